"""All that is said of a model's latent codes, as plain data: probes, structure, and what the answer owes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyla.errors import ConfigError, check
from hyla.latents import probes, projections
from hyla.latents.collect import Collection, attention_layers
from hyla.latents.interventions import causal_check
from hyla.latents.readings import Reading
from hyla.latents.resampling import group_sums, interval, resampled_sums
from hyla.runs import finite_or_none


@dataclass(frozen=True)
class Options:
    """What to read, and how much of it.

    splits: the first one is what decoders are fitted on. layers: names or numbers, all for None. queries, keys: token
    positions in place of the task's own plan. num_samples: sequences per split. num_points: of the projection.
    num_replaced: sequences answered again in the causal check, 0 for none.
    """

    splits: tuple[str, ...] = ("train", "held_out")
    layers: tuple[str | int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    project: projections.Method = "tsne"
    num_samples: int = 4_096
    num_points: int = 1_500
    num_replaced: int = 512
    step: int | None = None
    seed: int = 0
    reference: bool = False

    def __post_init__(self) -> None:
        check(
            len(self.splits) >= 2, "splits", ",".join(self.splits), "two or more: one to fit decoders on, then others"
        )
        check(len(set(self.splits)) == len(self.splits), "splits", ",".join(self.splits), "each only once")
        check(self.num_samples >= 100, "num_samples", self.num_samples, "at least 100")
        check(self.num_points >= 50, "num_points", self.num_points, "at least 50")
        enough = 0 <= self.num_replaced <= self.num_samples
        check(enough, "num_replaced", self.num_replaced, f"0, for no causal check, to num_samples = {self.num_samples}")
        check(self.seed >= 0, "seed", self.seed, "0 or more")


def analyse(model: Any, reading: Reading, collection: Collection, options: Options) -> dict[str, Any]:
    """All that can be said of a collection made by `model` with `reading`, as plain data."""
    splits, fitted, test = _sides(collection)
    labels = {split: reading.labels(collection, split) for split in splits}
    groups = {split: reading.groups(collection, split) for split in splits}
    present = np.unique(np.concatenate(list(labels.values())))
    classes = [reading.classes[number] for number in present]
    labels = {split: np.searchsorted(present, ids) for split, ids in labels.items()}  # classes that occur nowhere go
    rows = projections.chosen_rows(
        sum(collection.splits.values()),
        options.num_points,
        options.seed,
        np.concatenate([len(splits) * labels[split] + number for number, split in enumerate(splits)]),
    )
    flat = {
        layer: {split: _features(collection.codes(layer, split)) for split in splits} for layer in collection.layers
    }
    inputs = _input_tokens(collection)
    inputs_structure = {
        split: _structure(split, inputs[split], labels[split], groups[split], options.seed) for split in splits
    }
    layers, cosines = [], []
    for layer in collection.layers:
        codes = flat[layer]
        means = projections.class_means(codes[fitted], labels[fitted])
        found, per_class = _probes(reading, collection, codes, labels, groups, classes, options)
        shown = projections.class_means(codes[test], labels[test])
        mean_CF = _rows_of(shown, len(classes))
        cosine_CC = projections.class_cosines(_centred(mean_CF))
        cosines.append(cosine_CC)
        layers.append(
            {
                "name": layer,
                "title": f"layer {list(attention_layers(model)).index(layer) + 1}",
                "probes": found,
                "per_class": per_class,
                "few_shot": _few_shot(codes, labels, groups, (fitted, test), classes, options.seed),
                "structure": [
                    _structure(split, codes[split], labels[split], groups[split], options.seed)
                    | {"purity_inputs": inputs_structure[split]["purity_other_tasks"]}
                    for split in splits
                ],
                "projection": _projection(codes, rows, options),
                "mean_codes": {"split": test, "values": _plain(mean_CF), "counts": _counts(shown, len(classes))},
                "cosines": _plain(cosine_CC),
                "causal": _causal(
                    model, reading, collection, layer, test, means, labels[test], present, groups[test], options
                )
                if options.num_replaced
                else None,
            }
        )
    others = [("the input tokens", inputs)]
    if len(layers) > 1:
        others.append(("all layers", {split: np.concatenate([c[split] for c in flat.values()], 1) for split in splits}))
    return {
        "num_heads": int(collection.codes(0, fitted).shape[-1]),
        "pairs": reading.pairs,
        "keys": list(reading.key_names),
        "splits": {
            split: {
                "count": collection.splits[split],
                "tasks": len(np.unique(groups[split])),
                reading.metric: float(np.mean(collection.score(reading.metric, split), dtype=np.float64)),
            }
            for split in splits
        },
        "label": reading.label,
        "classes": classes,
        "layers": layers,
        "others": [
            {
                "title": title,
                "probes": _probes(reading, collection, features, labels, groups, classes, options)[0],
            }
            for title, features in others
        ],
        "layer_similarity": _similarity(cosines),
        "points": _points(reading, collection, rows, labels, groups),
    }


def _sides(collection: Collection) -> tuple[list[str], str, str]:
    """(all splits, the one that decoders are fitted on, the unseen one that matters most)."""
    splits = list(collection.splits)
    return splits, splits[0], "held_out" if "held_out" in splits[1:] else splits[1]


def _features(codes: np.ndarray) -> np.ndarray:
    """`[N, Q, K, H]` codes as `[N, Q K H]` features."""
    return np.asarray(codes).reshape(len(codes), -1)


def _input_tokens(collection: Collection) -> dict[str, np.ndarray]:
    """What the pairs' own input tokens tell, without any model: codes that tell no more than that show nothing."""
    tokens = list(dict.fromkeys((*collection.queries, *collection.keys)))
    return {
        split: np.asarray(collection.inputs(split)[:, tokens]).reshape(count, -1)
        for split, count in collection.splits.items()
    }


# --- probes -----------------------------------------------------------------------------------------------------------


def _probes(
    reading: Reading,
    collection: Collection,
    codes: dict[str, np.ndarray],
    labels: dict[str, np.ndarray],
    groups: dict[str, np.ndarray],
    classes: Sequence[str],
    options: Options,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Decoders fitted on the first split and scored on each other one, and cross-validated within the first: (a row per
    score, the logistic one class by class on the unseen split)."""
    splits, fitted, test = _sides(collection)
    rows: list[dict[str, Any]] = []
    per_class: list[dict[str, Any]] = []
    bits = {split: found for split in splits if (found := reading.bits(collection, split)) is not None}
    for split in splits:
        about = {"train": fitted, "test": split}
        sides: dict[str, Any] = {"train_groups": groups[fitted], "test_groups": groups[split], "seed": options.seed}
        within: dict[str, Any] = {"groups": groups[split], "seed": options.seed}
        if bits:
            names, values = bits[split]
            if split == fitted:
                ridge = probes.cross_validate("ridge", codes[split], values, names=names, **within)
            else:
                given = (codes[fitted], bits[fitted][1], codes[split], values)
                ridge = probes.ridge(*given, names=names, reference=options.reference, **sides)
            assert isinstance(ridge, probes.RidgeResult)
            rows += _ridge_rows(ridge, about)
        if split == fitted:
            logistic = probes.cross_validate("logistic", codes[split], labels[split], names=classes, **within)
        else:
            given = (codes[fitted], labels[fitted], codes[split], labels[split])
            logistic = probes.logistic(*given, names=classes, **sides)
        assert isinstance(logistic, probes.LogisticResult)
        rows += _logistic_rows(logistic, about, reading.label)
        if split == test:
            fields = ("f1", "precision", "recall", "count")
            by_name = {rule.name: rule for rule in logistic.rules}
            per_class = [
                {"class": name} | {field: getattr(by_name.get(name), field, None) for field in fields}
                for name in classes
            ]
    return rows, per_class


def _few_shot(
    codes: dict[str, np.ndarray],
    labels: dict[str, np.ndarray],
    groups: dict[str, np.ndarray],
    sides: tuple[str, str],
    classes: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """Macro F1 of decoders fitted on a few examples of each class; sides: the splits fitted and scored on."""
    fitted, test = sides
    few = probes.few_shot(
        codes[fitted], labels[fitted], codes[test], labels[test], names=classes, seed=seed,
        train_groups=groups[fitted], test_groups=groups[test],
    )  # fmt: skip
    return [
        {
            "examples": point.num_examples,
            "value": point.macro_f1.value,
            "low": point.macro_f1.low,
            "high": point.macro_f1.high,
            "note": f"without {', '.join(point.left_out)}" if point.left_out else "",
        }
        for point in few
        if point.decoder == "logistic"
    ]


def _row(
    probe: str, target: str, metric: str, score: probes.Score, rows: probes.Rows, about: dict[str, str], note: str
) -> dict[str, Any]:
    within = f"cross-validated over tasks in {rows.num_folds} folds" if rows.num_folds > 1 else ""
    numbers = {name: getattr(score, name) for name in ("value", "low", "high", "chance", "control", "control_high")}
    return {
        "probe": probe, "target": target, **about, "metric": metric, **numbers,
        "count": rows.num_test, "tasks": rows.num_test_groups, "note": "; ".join(filter(None, (within, note))),
    }  # fmt: skip


def _ridge_rows(result: probes.RidgeResult, about: dict[str, str]) -> list[dict[str, Any]]:
    total = len(result.targets)
    note = f"{result.num_undefined} of {total} targets constant, left out" if result.num_undefined else ""
    rows = [_row("ridge", "term bits", "R2", result.r2, result.rows, about, note)]
    if result.reference_mean is not None:
        theirs = probes.Score(result.reference_mean, None, None, None, None, None, total)
        rows.append(
            _row(
                "ridge (reference)",
                "term bits",
                "R2",
                theirs,
                result.rows,
                about,
                "as the public code's solver gives it",
            )
        )
    return rows


def _logistic_rows(result: probes.LogisticResult, about: dict[str, str], label: str) -> list[dict[str, Any]]:
    notes = [] if result.converged else ["did not converge"]
    if not result.controls_converged:
        notes.append("some controls did not converge")
    if result.unseen:
        notes.append(f"{result.num_unseen} rows of classes never fitted: {', '.join(result.unseen)}")
    pairs = (("macro F1", result.macro_f1), ("accuracy", result.accuracy))
    return [_row("logistic", label, metric, score, result.rows, about, "; ".join(notes)) for metric, score in pairs]


# --- structure --------------------------------------------------------------------------------------------------------


def _structure(split: str, codes: np.ndarray, labels: np.ndarray, groups: np.ndarray, seed: int) -> dict[str, Any]:
    """Silhouette and purity of a split; None for what cannot be had, such as neighbours of other tasks where one task has
    nearly all rows, or clusters where there is one class."""
    found: dict[str, Any] = dict.fromkeys(("silhouette", "purity", "purity_chance", "purity_other_tasks"))
    try:
        found["silhouette"] = projections.silhouette(codes, labels, seed=seed, max_points=3_000).value
        purity = projections.neighbour_purity(codes, labels, seed=seed, max_points=4_000)
        found |= {"purity": purity.value, "purity_chance": purity.chance}
        other = projections.neighbour_purity(codes, labels, groups=groups, seed=seed, max_points=4_000)
        found |= {"purity_other_tasks": other.value, "purity_other_tasks_chance": other.chance}
    except ConfigError:
        pass
    return {"split": split} | found


def _projection(codes: dict[str, np.ndarray], rows: np.ndarray, options: Options) -> dict[str, Any]:
    """The drawn codes in the plane; by PCA where there are too few different ones, on one point where all are equal."""
    pooled = np.concatenate(list(codes.values()))[rows]
    num_distinct = len(np.unique(pooled, axis=0))
    if num_distinct == 1 or pooled.shape[1] == 1:
        x = (pooled[:, 0] if num_distinct > 1 else np.zeros(len(rows))).tolist()
        note = "codes are single numbers" if num_distinct > 1 else "all codes are equal"
        return {"method": "none", "x": x, "y": [0.0] * len(rows), "note": note}
    method = options.project if num_distinct >= 4 else "pca"
    drawn = projections.project(pooled, method, seed=options.seed, max_points=len(rows))
    if drawn.explained_variance is not None:
        note = f"{sum(drawn.explained_variance):.0%} of the variance"
    else:
        note = f"{'perplexity' if method == 'tsne' else 'neighbours'} {drawn.neighbours:g}"
    x, y = drawn.points.T.round(3).tolist()
    return {"method": method, "x": x, "y": y, "note": note}


def _points(
    reading: Reading,
    collection: Collection,
    rows: np.ndarray,
    labels: dict[str, np.ndarray],
    groups: dict[str, np.ndarray],
) -> dict[str, list[Any]]:
    """What the points of every projection are."""
    points: dict[str, list[Any]] = {name: [] for name in ("split", "class", "correct", "task", "text")}
    first = 0
    for split, count in collection.splits.items():
        correct = reading.correct(collection, split)
        for sample in rows[(rows >= first) & (rows < first + count)] - first:
            points["split"].append(split)
            points["class"].append(int(labels[split][sample]))
            points["correct"].append(int(correct[sample]))
            points["task"].append(str(groups[split][sample]))
            points["text"].append(reading.text(collection, split, int(sample)))
        first += count
    return points


def _rows_of(means: projections.ClassMeans, num_classes: int) -> np.ndarray:
    """`[C, F]` mean codes, nan for the classes that the split lacks (names are the classes' numbers)."""
    mean_CF = np.full((num_classes, means.means.shape[1]), np.nan)
    mean_CF[[int(name) for name in means.names]] = means.means
    return mean_CF


def _counts(means: projections.ClassMeans, num_classes: int) -> list[int]:
    counts = [0] * num_classes
    for name, count in zip(means.names, means.counts, strict=True):
        counts[int(name)] = count
    return counts


def _centred(mean_CF: np.ndarray) -> np.ndarray:
    return mean_CF - np.nanmean(mean_CF, 0)


def _similarity(cosines: Sequence[np.ndarray]) -> list[list[float | None]]:
    """Between layers, over the classes that have a mean; all None with fewer than three of them."""
    stacked = np.stack(cosines)
    there = ~np.isnan(stacked).all((0, 2))
    if there.sum() < 3:
        return [[None] * len(cosines)] * len(cosines)
    return _plain(projections.layer_similarity(stacked[:, there][:, :, there]))


def _plain(array: np.ndarray) -> list[Any]:
    """Nested lists with None for nan."""
    return finite_or_none(np.asarray(array, float).tolist())


# --- the causal check -------------------------------------------------------------------------------------------------


def _causal(
    model: Any,
    reading: Reading,
    collection: Collection,
    layer: str,
    split: str,
    means: projections.ClassMeans,
    labels: np.ndarray,
    present: np.ndarray,
    groups: np.ndarray,
    options: Options,
) -> dict[str, Any]:
    num_classes, count = len(present), options.num_replaced
    shape = collection.codes(layer, split).shape[1:]
    mean_CQKH = _rows_of(means, num_classes).reshape(num_classes, *shape)
    result = causal_check(model, reading, collection, layer, split, mean_CQKH, count)
    labels, groups = labels[:count], groups[:count]
    effect_NC, unit = result.effect, "share of answers changed"
    if result.answers is None:
        spread = float(np.std(np.asarray(collection.targets(split), np.float64)))
        effect_NC, unit = effect_NC / spread, "mean change of the answer, in standard deviations of the targets"
    own_NC = labels[:, None] == np.arange(num_classes)
    defined_NC = ~np.isnan(effect_NC)
    # per sample: its own class's mean, and the mean over the others; summed by task for the interval
    terms = np.stack(
        [
            np.where(own_NC & defined_NC, effect_NC, 0).sum(1),
            (own_NC & defined_NC).sum(1),
            np.where(~own_NC & defined_NC, effect_NC, 0).sum(1),
            (~own_NC & defined_NC).sum(1),
        ],
        1,
    )
    sums_GT = group_sums(terms, groups)
    same, other = _ratios(sums_GT.sum(0)[None])
    same_R, other_R = _ratios(resampled_sums(sums_GT, 1000, options.seed))
    bounds = {name: interval(values, len(sums_GT)) for name, values in (("same", same_R), ("other", other_R))}
    found: dict[str, Any] = {
        "split": split,
        "effect": _plain(np.stack([_mean_or_nan(effect_NC[labels == number]) for number in range(num_classes)])),
        "effect_unit": unit,
        "same": float(same[0]),
        "other": float(other[0]),
        "follows": None,
        "follows_before": None,
        "count": count,
    }
    for name, (low, high) in bounds.items():
        found |= {f"{name}_low": low, f"{name}_high": high}
    alternatives = reading.answers_of_classes(collection, split)
    if alternatives is not None and result.answers is not None and result.before is not None:
        wanted_NC = alternatives[:count][:, present]
        truth_N = np.asarray(collection.targets(split))[:count].reshape(count, -1)[:, reading.answer]
        asked_NC = ~own_NC & defined_NC & (wanted_NC >= 0) & (wanted_NC != truth_N[:, None])
        if asked_NC.any():
            found["follows"] = float((result.answers == wanted_NC)[asked_NC].mean())
            found["follows_before"] = float((result.before[:, None] == wanted_NC)[asked_NC].mean())
    return finite_or_none(found)


def _ratios(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the control and of the others from their sums and counts; nan where there is nothing to average."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]


def _mean_or_nan(values_NC: np.ndarray) -> np.ndarray:
    return values_NC.mean(0) if len(values_NC) else np.full(values_NC.shape[1], np.nan)
