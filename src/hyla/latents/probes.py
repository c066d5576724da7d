"""Probes: how much of what generated a sequence can a linear decoder read from its latent codes?

`ridge` decodes numbers (the bits of a task's terms), `logistic` one of several rules. Decoders are scikit-learn's; ours is
what makes a score worth believing. Each :class:`Score` carries

- a 95% interval from a bootstrap over the test set's GROUPS (sequences of one task are not independent of each other);
- the chance level, the score of the best guess that never looks at the codes;
- a control: the same decoder fitted on shuffled training labels, scored on the same test rows.

Nothing of the test set reaches the fit: features are standardised with the training rows' mean and scale, and groups named
on both sides must be disjoint. Rows to leave out (padding) are named by a mask, never guessed from zeros. Arrays:
N rows, H features, T targets, C rules, G groups, V versions of the labels (as they are, then shuffled), R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Num, Shaped

from hyla.errors import check
from hyla.latents.decoders import (
    accuracy_and_f1,
    classification_scores,
    fit_ridge,
    predict_logistic,
    predict_nearest_mean,
    r2,
    reference_ridge,
    standardised,
)
from hyla.latents.labels import check_rows, finite_codes, finite_targets, group_ids, label_ids
from hyla.latents.resampling import group_sums, interval, resampled_sums, shuffled_rows

Decoder = Literal["logistic", "class_mean"]


@dataclass(frozen=True)
class Score:
    """A number, and what is needed to judge it.

    value: None where it is undefined (R2 of a constant target). low, high: 95% interval; it is over draws of test groups
    with the decoder held fixed, and a point where the decoder makes no mistake at all. None with fewer than two groups.
    chance: of a guess that never looks at the codes. control: mean over decoders fitted on shuffled training labels,
    control_high the largest. count: what `value` is over (targets with an R2, test rows, rules present, repeats).
    """

    value: float | None
    low: float | None
    high: float | None
    chance: float | None
    control: float | None
    control_high: float | None
    count: int


@dataclass(frozen=True)
class Rows:
    """What a probe was fitted and scored on, after masked rows were left out.

    Groups are None where none were named. num_repeated: test rows whose codes are exactly those of a training row.
    num_zero: rows, of both sides, whose codes are all exactly 0; many of them may be padding that no mask left out. In
    cross-validation num_train and num_train_groups are those of the smallest training set.
    """

    num_train: int
    num_test: int
    num_train_groups: int | None
    num_test_groups: int | None
    num_features: int
    num_masked: int
    num_repeated: int
    num_zero: int
    num_folds: int = 1


@dataclass(frozen=True)
class RidgeResult:
    """R2 of a ridge probe: mean over the targets that have one, and each target by itself.

    num_undefined: targets that are constant over the test rows and therefore have no R2. reference: R2 of each target as
    the public code's regression gives it (:func:`reference_ridge`), if asked for; reference_mean averages all of them,
    as it does.
    """

    r2: Score
    targets: tuple[Score, ...]
    names: tuple[str, ...]
    num_undefined: int
    rows: Rows
    penalty: float
    standardise: bool
    reference: tuple[float, ...] | None = None
    reference_mean: float | None = None


@dataclass(frozen=True)
class RuleScore:
    """One rule of a logistic probe. f1, recall: None if it is absent from the test rows; precision: None if it is never
    predicted. count: test rows that have the rule; num_predicted: test rows that were given it; num_train: training rows
    that have it (in cross-validation all rows)."""

    name: str
    f1: float | None
    precision: float | None
    recall: float | None
    count: int
    num_predicted: int
    num_train: int


@dataclass(frozen=True)
class LogisticResult:
    """Accuracy and macro F1 of a logistic probe; macro F1 is over the rules present in the test rows.

    rules: every rule of either side, sorted. confusion[i][j]: test rows of rule i that were given rule j. unseen: rules of
    test rows for which no training row had that rule; num_unseen such rows. They count as mistakes, their F1 is 0.
    converged: whether the solver reached its tolerance; controls_converged: in all of the shuffled fits.
    """

    accuracy: Score
    macro_f1: Score
    rules: tuple[RuleScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    unseen: tuple[str, ...]
    num_unseen: int
    converged: bool
    controls_converged: bool
    rows: Rows
    penalty: float
    standardise: bool


@dataclass(frozen=True)
class FewShotPoint:
    """A decoder fitted on `num_examples` rows of each rule. Scores are None, with count 0, where fewer than two rules have
    that many. rules: those that were fitted; left_out: those with fewer training rows than that, neither fitted nor scored;
    num_left_out: their test rows. num_unconverged: repeats whose solver stopped early."""

    decoder: Decoder
    num_examples: int
    accuracy: Score
    macro_f1: Score
    rules: tuple[str, ...]
    left_out: tuple[str, ...]
    num_left_out: int
    num_unconverged: int


@dataclass(frozen=True)
class _Fold:
    """One fit: numbers or rule ids `y`, and groups as ids, on both sides."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    train_groups: np.ndarray | None
    test_groups: np.ndarray | None


@dataclass(frozen=True)
class _Options:
    penalty: float
    standardise: bool
    num_shuffles: int
    num_resamples: int
    seed: int

    def __post_init__(self) -> None:
        check(0 < self.penalty < np.inf, "penalty", self.penalty, "above 0")
        check(self.seed >= 0, "seed", self.seed, "0 or more")
        check(self.num_shuffles >= 0, "num_shuffles", self.num_shuffles, "0, for no control, or more")
        check(self.num_resamples >= 0, "num_resamples", self.num_resamples, "0, for no interval, or more")


# --- probes -----------------------------------------------------------------------------------------------------------


def ridge(
    x_train: Num[np.ndarray, "train features"],
    y_train: Shaped[np.ndarray, "train *targets"],
    x_test: Num[np.ndarray, "test features"],
    y_test: Shaped[np.ndarray, "test *targets"],
    *,
    train_groups: Shaped[np.ndarray, "train *fields"] | None = None,
    test_groups: Shaped[np.ndarray, "test *fields"] | None = None,
    train_mask: Bool[np.ndarray, "train"] | None = None,
    test_mask: Bool[np.ndarray, "test"] | None = None,
    names: Sequence[str] | None = None,
    penalty: float = 1.0,
    standardise: bool = True,
    num_shuffles: int = 5,
    num_resamples: int = 1000,
    seed: int = 0,
    reference: bool = False,
) -> RidgeResult:
    """Decode numbers `y` (`[N]`, or `[N, T]` for several targets) from codes `x` by ridge regression.

    Minimises `|y - x w - b|^2 + penalty |w|^2`; the intercept b is not penalised. R2 = 1 - SSE / SST, SST about the mean
    of the TEST rows, in float64.

    train_groups, test_groups: what may not be on both sides and what the bootstrap resamples: a task's id, or the row that
        identifies it (its terms). Without them every row is its own group.
    train_mask, test_mask: True for the rows that count.
    standardise: scale features by the training rows' mean and standard deviation first, so that the penalty treats them
        alike; False for P1's setting.
    reference: also report what the public code's regression gives on the same rows (unstandardised, as there).

    Raises ConfigError for unequal lengths, values that are not finite, no rows, and groups on both sides.
    """
    options = _Options(penalty, standardise, num_shuffles, num_resamples, seed)
    fold, rows = _prepare(x_train, y_train, x_test, y_test, train_groups, test_groups, train_mask, test_mask)
    fold = replace(fold, y_train=finite_targets("y_train", fold.y_train), y_test=finite_targets("y_test", fold.y_test))
    num_targets = fold.y_train.shape[1]
    check(fold.y_test.shape[1] == num_targets, "y_test", fold.y_test.shape, f"{num_targets} targets, as in y_train")
    result = _ridge_result([fold], rows, names, options)
    if not reference:
        return result
    theirs = reference_ridge(fold.x_train, fold.y_train, fold.x_test, fold.y_test, penalty)
    return replace(result, reference=tuple(theirs.tolist()), reference_mean=float(theirs.mean()))


def logistic(
    x_train: Num[np.ndarray, "train features"],
    y_train: Shaped[np.ndarray, "train"],
    x_test: Num[np.ndarray, "test features"],
    y_test: Shaped[np.ndarray, "test"],
    *,
    train_groups: Shaped[np.ndarray, "train *fields"] | None = None,
    test_groups: Shaped[np.ndarray, "test *fields"] | None = None,
    train_mask: Bool[np.ndarray, "train"] | None = None,
    test_mask: Bool[np.ndarray, "test"] | None = None,
    names: Sequence[str] | None = None,
    penalty: float = 1.0,
    standardise: bool = True,
    num_shuffles: int = 5,
    num_resamples: int = 1000,
    seed: int = 0,
) -> LogisticResult:
    """Decode a rule per row from codes `x` by multinomial logistic regression.

    Minimises `sum of cross-entropies + penalty / 2 |w|^2`, intercepts not penalised. Labels are whole numbers or text;
    names[i] is what to call label i. Other arguments and errors as in :func:`ridge`; ConfigError also for labels that are
    neither and for a single rule in training.
    """
    options = _Options(penalty, standardise, num_shuffles, num_resamples, seed)
    fold, rows = _prepare(x_train, y_train, x_test, y_test, train_groups, test_groups, train_mask, test_mask)
    rules, (train_ids, test_ids) = label_ids({"y_train": fold.y_train, "y_test": fold.y_test}, names)
    fold = replace(fold, y_train=train_ids, y_test=test_ids)
    return _logistic_result([fold], rows, rules, options)


def cross_validate(
    kind: Literal["ridge", "logistic"],
    x: Num[np.ndarray, "samples features"],
    y: Shaped[np.ndarray, "samples *targets"],
    groups: Shaped[np.ndarray, "samples *fields"] | None,
    *,
    folds: int = 5,
    mask: Bool[np.ndarray, "samples"] | None = None,
    names: Sequence[str] | None = None,
    penalty: float = 1.0,
    standardise: bool = True,
    num_shuffles: int = 5,
    num_resamples: int = 1000,
    seed: int = 0,
) -> RidgeResult | LogisticResult:
    """Probe each fold's groups with a decoder fitted on the other folds'; no group is ever on both sides.

    The predictions of all folds are pooled and scored once, so that rare rules and the bootstrap see every group. Chance
    and control are pooled in the same way (and lie slightly below those of one split: where a fold has much of something,
    the rest has little). groups: None only where rows are independent of each other.
    """
    check(kind in ("ridge", "logistic"), "kind", kind, "ridge or logistic")
    options = _Options(penalty, standardise, num_shuffles, num_resamples, seed)
    (x, y, groups), num_masked = _kept("", x, y, groups, mask)
    x = finite_codes("x", x)
    ids = np.arange(len(x)) if groups is None else group_ids({"groups": groups})[0]
    num_groups = int(ids.max()) + 1
    check(2 <= folds <= num_groups, "folds", folds, f"from 2 to the number of groups, {num_groups}")
    rules: tuple[str, ...] = ()
    if kind == "ridge":
        y = finite_targets("y", y)
    else:
        rules, (y,) = label_ids({"y": y}, names)
    fold_N = (np.random.default_rng([seed, 1]).permutation(num_groups) % folds)[ids]
    named = ids if groups is not None else None
    parts = []
    for number in range(folds):
        train, test = fold_N != number, fold_N == number
        train_groups, test_groups = (None, None) if named is None else (named[train], named[test])
        parts.append(_Fold(x[train], y[train], x[test], y[test], train_groups, test_groups))
    smallest = min(parts, key=lambda part: len(part.x_train))
    rows = Rows(
        num_train=len(smallest.x_train),
        num_test=len(x),
        num_train_groups=_count(smallest.train_groups),
        num_test_groups=_count(named),
        num_features=x.shape[1],
        num_masked=num_masked,
        num_repeated=sum(_num_repeated(part.x_train, part.x_test) for part in parts),
        num_zero=_num_zero(x),
        num_folds=folds,
    )
    if kind == "ridge":
        return _ridge_result(parts, rows, names, options)
    return _logistic_result(parts, rows, rules, options)


def grouped_split(
    groups: Shaped[np.ndarray, "samples *fields"], test_fraction: float, seed: int = 0
) -> tuple[Shaped[np.ndarray, "train"], Shaped[np.ndarray, "test"]]:
    """Row numbers of a training and a test side such that no group is on both. test_fraction: share of the groups."""
    ids = group_ids({"groups": groups})[0]
    num_groups = int(ids.max()) + 1
    check(0 < test_fraction < 1, "test_fraction", test_fraction, "between 0 and 1")
    check(seed >= 0, "seed", seed, "0 or more")
    num_test = round(num_groups * test_fraction)
    reason = f"of {num_groups} groups {num_test} would be tested; both sides need one at least"
    check(1 <= num_test < num_groups, "test_fraction", test_fraction, reason)
    tested_G = np.random.default_rng(seed).permutation(num_groups) < num_test
    return np.flatnonzero(~tested_G[ids]), np.flatnonzero(tested_G[ids])


# --- ridge regression -------------------------------------------------------------------------------------------------


def _ridge_result(
    folds: Sequence[_Fold],
    rows: Rows,
    names: Sequence[str] | None,
    options: _Options,
) -> RidgeResult:
    num_targets = folds[0].y_train.shape[1]
    if names is not None:
        check(len(names) == num_targets, "names", tuple(names), f"one name for each of the {num_targets} targets")
    rng = np.random.default_rng([options.seed, 2])
    predicted, guessed = [], []
    for fold in folds:
        n = len(fold.x_train)
        sources = [np.arange(n)] + [shuffled_rows(n, fold.train_groups, rng) for _ in range(options.num_shuffles)]
        answers_NVT = fold.y_train[np.stack(sources, 1)]
        weights, intercept = fit_ridge(fold.x_train, answers_NVT.reshape(n, -1), options.penalty, options.standardise)
        predicted.append((fold.x_test @ weights + intercept).reshape(-1, *answers_NVT.shape[1:]))
        guessed.append(np.broadcast_to(fold.y_train.mean(0), fold.y_test.shape))
    y_NT, guessed_NT = np.concatenate([fold.y_test for fold in folds]), np.concatenate(guessed)
    predicted_VNT = np.concatenate(predicted).swapaxes(0, 1)
    values_VT, chance_T = r2(y_NT, predicted_VNT), r2(y_NT, guessed_NT)

    # R2 of a resample from sums over its groups. Values are taken from the mean, or the variance would cancel.
    off_NT = y_NT - y_NT.mean(0)
    terms_NK = np.concatenate([np.square(y_NT - predicted_VNT[0]), np.square(off_NT), off_NT], 1)
    terms_NK = np.concatenate([terms_NK, np.ones((len(y_NT), 1))], 1)
    sums_GK = group_sums(terms_NK, _all_groups(folds))
    sums_RK = resampled_sums(sums_GK, options.num_resamples, options.seed)
    sse_RT, square_RT, sum_RT = np.split(sums_RK[:, :-1], 3, axis=1)
    sst_RT = square_RT - np.square(sum_RT) / sums_RK[:, -1:]
    # A resample in which a target is constant has no R2 of it: its variance is 0 but for rounding.
    defined_RT = ~np.isnan(values_VT[0]) & (sst_RT > 1e-12 * square_RT)
    samples_RT = np.where(defined_RT, 1 - sse_RT / np.where(defined_RT, sst_RT, 1), np.nan)

    num_groups = len(sums_GK)
    targets = tuple(
        _score(values_VT[:, t], chance_T[t], samples_RT[:, t], num_groups, int(not np.isnan(values_VT[0, t])))
        for t in range(num_targets)
    )
    count = sum(target.count for target in targets)
    mean = _score(_mean(values_VT), _mean(chance_T[None])[0], _mean(samples_RT), num_groups, count)
    numbers = tuple(str(t) for t in range(num_targets))
    return RidgeResult(
        r2=mean,
        targets=targets,
        names=numbers if names is None else tuple(names),
        num_undefined=num_targets - count,
        rows=rows,
        penalty=options.penalty,
        standardise=options.standardise,
    )


def _mean(values_VT: np.ndarray) -> np.ndarray:
    """Mean over the targets that have a value; NaN where none has."""
    defined = ~np.isnan(values_VT)
    total = np.where(defined, values_VT, 0).sum(1)
    return np.where(defined.any(1), total / np.maximum(defined.sum(1), 1), np.nan)


# --- logistic regression ----------------------------------------------------------------------------------------------


def _logistic_result(
    folds: Sequence[_Fold],
    rows: Rows,
    rules: tuple[str, ...],
    options: _Options,
) -> LogisticResult:
    for fold in folds:
        present = np.unique(fold.y_train)
        only = f"the only rule in training is {rules[present[0]]}; a decoder needs two at least"
        check(len(present) > 1, "y_train", f"{len(fold.y_train)} rows", only)
    rng = np.random.default_rng([options.seed, 2])
    predicted, guessed, unseen, converged = [], [], [], []
    for fold in folds:
        x_train, x_test = (
            standardised(fold.x_train, fold.x_test) if options.standardise else (fold.x_train, fold.x_test)
        )
        n = len(x_train)
        sources = [np.arange(n)] + [shuffled_rows(n, fold.train_groups, rng) for _ in range(options.num_shuffles)]
        fits = [predict_logistic(x_train, fold.y_train[source], x_test, options.penalty) for source in sources]
        predicted.append(np.stack([fit[0] for fit in fits]))
        converged.append([fit[1] for fit in fits])
        guessed.append(np.full(len(x_test), np.bincount(fold.y_train).argmax()))
        unseen.append(~np.isin(fold.y_test, fold.y_train))
    true_N = np.concatenate([fold.y_test for fold in folds])
    predicted_VN, guessed_N = np.concatenate(predicted, 1), np.concatenate(guessed)
    unseen_N, converged_V = np.concatenate(unseen), np.all(converged, axis=0)

    identity = np.eye(len(rules))
    true_NC, predicted_NC = identity[true_N], identity[predicted_VN[0]]
    terms_NK = np.concatenate([true_NC * predicted_NC, true_NC, predicted_NC], 1)
    sums_GK = group_sums(terms_NK, _all_groups(folds))
    samples = accuracy_and_f1(*np.split(resampled_sums(sums_GK, options.num_resamples, options.seed), 3, axis=1))
    values = np.transpose([classification_scores(true_N, one, len(rules)) for one in predicted_VN])
    chance = classification_scores(true_N, guessed_N, len(rules))
    count_C = np.bincount(true_N, minlength=len(rules))
    counts = (len(true_N), int((count_C > 0).sum()))
    accuracy, macro_f1 = (_score(values[i], chance[i], samples[i], len(sums_GK), counts[i]) for i in range(2))
    confusion_CC = np.bincount(true_N * len(rules) + predicted_VN[0], minlength=len(rules) ** 2)
    confusion_CC = confusion_CC.reshape(len(rules), len(rules))
    train_ids = np.concatenate([fold.y_train for fold in folds]) if len(folds) == 1 else true_N
    return LogisticResult(
        accuracy=accuracy,
        macro_f1=macro_f1,
        rules=_rule_scores(rules, confusion_CC, np.bincount(train_ids, minlength=len(rules))),
        confusion=tuple(tuple(row) for row in confusion_CC.tolist()),
        unseen=tuple(rules[rule] for rule in np.unique(true_N[unseen_N])),
        num_unseen=int(unseen_N.sum()),
        converged=bool(converged_V[0]),
        controls_converged=bool(converged_V[1:].all()),
        rows=rows,
        penalty=options.penalty,
        standardise=options.standardise,
    )


def _rule_scores(rules: tuple[str, ...], confusion_CC: np.ndarray, num_train_C: np.ndarray) -> tuple[RuleScore, ...]:
    found = []
    for rule, name in enumerate(rules):
        hits, count, predicted = confusion_CC[rule, rule], confusion_CC[rule].sum(), confusion_CC[:, rule].sum()
        found.append(
            RuleScore(
                name=name,
                f1=float(2 * hits / (count + predicted)) if count else None,
                precision=float(hits / predicted) if predicted else None,
                recall=float(hits / count) if count else None,
                count=int(count),
                num_predicted=int(predicted),
                num_train=int(num_train_C[rule]),
            )
        )
    return tuple(found)


# --- both sides of a probe ---------------------------------------------------------------------------------------------


def _prepare(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    train_groups: Any,
    test_groups: Any,
    train_mask: Any,
    test_mask: Any,
) -> tuple[_Fold, Rows]:
    """Both sides without their masked rows; codes and groups checked, labels still as given."""
    (x_train, y_train, train_groups), masked_train = _kept("_train", x_train, y_train, train_groups, train_mask)
    (x_test, y_test, test_groups), masked_test = _kept("_test", x_test, y_test, test_groups, test_mask)
    x_train, x_test = finite_codes("x_train", x_train), finite_codes("x_test", x_test)
    check(x_test.shape[1] == x_train.shape[1], "x_test", x_test.shape, f"{x_train.shape[1]} features, as in x_train")
    named = {"train_groups": train_groups, "test_groups": test_groups}
    named = {field: values for field, values in named.items() if values is not None}
    ids = dict(zip(named, group_ids(named), strict=True))
    fold = _Fold(x_train, y_train, x_test, y_test, ids.get("train_groups"), ids.get("test_groups"))
    rows = Rows(
        num_train=len(x_train),
        num_test=len(x_test),
        num_train_groups=_count(fold.train_groups),
        num_test_groups=_count(fold.test_groups),
        num_features=x_train.shape[1],
        num_masked=masked_train + masked_test,
        num_repeated=_num_repeated(x_train, x_test),
        num_zero=_num_zero(x_train) + _num_zero(x_test),
    )
    return fold, rows


def _kept(side: str, x: Any, y: Any, groups: Any, mask: Any) -> tuple[tuple[Any, Any, Any], int]:
    """Codes, labels and groups of the rows that the mask keeps, and how many it leaves out."""
    x, y = np.asarray(x), np.asarray(y)
    prefix = side.removeprefix("_") + "_" if side else ""
    lengths = {f"x{side}": np.shape(x), f"y{side}": np.shape(y)}
    lengths |= {f"{prefix}groups": np.shape(groups)} if groups is not None else {}
    lengths |= {f"{prefix}mask": np.shape(mask)} if mask is not None else {}
    check_rows(lengths)
    if mask is None:
        return (x, y, groups), 0
    mask = np.asarray(mask)
    check(mask.dtype == bool and mask.ndim == 1, f"{prefix}mask", mask.dtype, "true or false for each row")
    return (x[mask], y[mask], None if groups is None else np.asarray(groups)[mask]), int((~mask).sum())


def _all_groups(folds: Sequence[_Fold]) -> np.ndarray | None:
    """Groups of the test rows of all folds."""
    named = [fold.test_groups for fold in folds if fold.test_groups is not None]
    return np.concatenate(named) if named else None


def _count(groups: np.ndarray | None) -> int | None:
    return None if groups is None else len(np.unique(groups))


def _num_repeated(x_train: np.ndarray, x_test: np.ndarray) -> int:
    seen = {row.tobytes() for row in x_train + 0.0}  # -0.0 + 0.0 is 0.0
    return sum(row.tobytes() in seen for row in x_test + 0.0)


def _num_zero(x: np.ndarray) -> int:
    return int((x == 0).all(1).sum())


def _score(values_V: np.ndarray, chance: float, samples_R: np.ndarray, num_groups: int, count: int) -> Score:
    """values_V: with the labels as they are, then shuffled."""
    if np.isnan(values_V[0]):
        return Score(None, None, None, None, None, None, count)
    low, high = interval(samples_R, num_groups)
    controls = values_V[1:]
    control, largest = (float(controls.mean()), float(controls.max())) if len(controls) else (None, None)
    return Score(float(values_V[0]), low, high, float(chance), control, largest, count)


# --- few examples -------------------------------------------------------------------------------------------------------


def few_shot(
    x_train: Num[np.ndarray, "train features"],
    y_train: Shaped[np.ndarray, "train"],
    x_test: Num[np.ndarray, "test features"],
    y_test: Shaped[np.ndarray, "test"],
    *,
    num_examples: Sequence[int] = (1, 2, 5, 10, 50),
    repeats: int = 20,
    train_groups: Shaped[np.ndarray, "train *fields"] | None = None,
    test_groups: Shaped[np.ndarray, "test *fields"] | None = None,
    train_mask: Bool[np.ndarray, "train"] | None = None,
    test_mask: Bool[np.ndarray, "test"] | None = None,
    names: Sequence[str] | None = None,
    penalty: float = 1.0,
    seed: int = 0,
) -> tuple[FewShotPoint, ...]:
    """How many examples of each rule does a decoder need? Logistic regression, and the nearest class mean beside it.

    For each n of `num_examples`, n rows of each rule are drawn `repeats` times, and a decoder fitted on them alone (they
    also set the standardisation) is scored on all test rows of those rules. A score's value is the mean over repeats; low
    and high are the 2.5th and 97.5th percentile of the repeats, that is how much the choice of examples matters; chance is
    guessing a rule uniformly; the control shuffles the drawn examples' labels, once in each repeat. Groups are checked to
    be disjoint. Errors as in :func:`logistic`.
    """
    check(len(num_examples) > 0 and min(num_examples) >= 1, "num_examples", num_examples, "whole numbers of 1 or more")
    check(repeats >= 1, "repeats", repeats, "at least 1")
    check(0 < penalty < np.inf, "penalty", penalty, "above 0")
    check(seed >= 0, "seed", seed, "0 or more")
    fold, _ = _prepare(x_train, y_train, x_test, y_test, train_groups, test_groups, train_mask, test_mask)
    rules, (train_N, test_N) = label_ids({"y_train": fold.y_train, "y_test": fold.y_test}, names)
    available_C = np.bincount(train_N, minlength=len(rules))
    points = []
    for n in sorted(set(num_examples)):
        enough_C = available_C >= n
        chosen, left_out = np.flatnonzero(enough_C), np.flatnonzero(~enough_C)
        scored = enough_C[test_N]
        x_scored, y_scored = fold.x_test[scored], test_N[scored]
        members = [np.flatnonzero(train_N == rule) for rule in chosen]
        found: dict[Decoder, list[tuple[float, ...]]] = {"logistic": [], "class_mean": []}
        num_unconverged = 0
        rng = np.random.default_rng([seed, 4, n])
        for _ in range(repeats if len(chosen) > 1 and len(y_scored) else 0):
            drawn = np.concatenate([rng.choice(rows, n, replace=False) for rows in members])
            examples, queries = standardised(fold.x_train[drawn], x_scored)
            labels, shuffled = train_N[drawn], rng.permutation(train_N[drawn])
            predicted, converged = predict_logistic(examples, labels, queries, penalty)
            control, _ = predict_logistic(examples, shuffled, queries, penalty)
            num_unconverged += not converged
            nearest, nearest_control = (predict_nearest_mean(examples, ids, queries) for ids in (labels, shuffled))
            pairs: dict[Decoder, tuple[np.ndarray, np.ndarray]]
            pairs = {"logistic": (predicted, control), "class_mean": (nearest, nearest_control)}
            for decoder, pair in pairs.items():
                scores = (classification_scores(y_scored, ids, len(rules)) for ids in pair)
                found[decoder].append(tuple(number for score in scores for number in score))
        # guessing one of C rules uniformly: recall 1 / C, precision the rule's share, so F1 = 2 share / (C share + 1)
        share_C = np.bincount(y_scored, minlength=len(rules)) / max(len(y_scored), 1)
        uniform_f1 = np.sum(2 * share_C / (len(chosen) * share_C + 1)) / max((share_C > 0).sum(), 1)
        chance = (1 / max(len(chosen), 1), float(uniform_f1))
        for decoder, scores in found.items():
            accuracy, macro_f1 = (_over_repeats(scores, column, chance[column]) for column in (0, 1))
            point = FewShotPoint(
                decoder=decoder,
                num_examples=n,
                accuracy=accuracy,
                macro_f1=macro_f1,
                rules=tuple(rules[rule] for rule in chosen),
                left_out=tuple(rules[rule] for rule in left_out),
                num_left_out=int((~scored).sum()),
                num_unconverged=num_unconverged if decoder == "logistic" else 0,
            )
            points.append(point)
    return tuple(points)


def _over_repeats(found: list[tuple[float, ...]], column: int, chance: float) -> Score:
    """One of accuracy and macro F1; each repeat has both, and then both of its control."""
    if not found:
        return Score(None, None, None, None, None, None, 0)
    values, controls = (np.array([scores[column + offset] for scores in found]) for offset in (0, 2))
    low, high = np.percentile(values, [2.5, 97.5])
    mean = float(values.mean())
    return Score(mean, float(low), float(high), chance, float(controls.mean()), float(controls.max()), len(found))
