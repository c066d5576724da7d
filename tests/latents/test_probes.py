import json
from dataclasses import asdict

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from hyla.errors import ConfigError
from hyla.latents import decoders
from hyla.latents.probes import Score, cross_validate, few_shot, grouped_split, logistic, ridge
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig

NONE = Score(None, None, None, None, None, None, 0)


def planted(num_tasks=120, per_task=10, num_rules=4, strength=5.0, seed=0):
    """Codes of two layers, each row of a task with one rule: the rule is in layer 1, and noise in layer 0. Tasks also have
    a fingerprint in both layers, which tells nothing of the rules of other tasks. Returns (layers, rules, tasks)."""
    rng = np.random.default_rng(seed)
    tasks = np.repeat(np.arange(num_tasks), per_task)
    rules = rng.integers(0, num_rules, num_tasks)[tasks]
    fingerprint = rng.standard_normal((num_tasks, 16))[tasks]
    layers = [fingerprint + 0.3 * rng.standard_normal((len(tasks), 16)) for _ in range(2)]
    layers[1] = layers[1] + strength * np.eye(num_rules, 16)[rules]
    return layers, rules, tasks


def split(codes, y, tasks, **options):
    train, test = grouped_split(tasks, 0.5, seed=1)
    sides = (codes[train], y[train], codes[test], y[test])
    return sides, {"train_groups": tasks[train], "test_groups": tasks[test]} | options


# --- what a probe finds -----------------------------------------------------------------------------------------------


def test_the_rule_is_found_in_the_layer_that_has_it_and_nowhere_else():
    layers, rules, tasks = planted()
    noise, signal = (logistic(*sides, **options) for sides, options in (split(codes, rules, tasks) for codes in layers))
    assert signal.accuracy.low > 0.85
    assert signal.macro_f1.low > 0.85
    assert signal.accuracy.low > signal.accuracy.control_high
    assert noise.accuracy.low < 0.25 < noise.accuracy.high
    for result in (noise, signal):
        for score in (result.accuracy, result.macro_f1):
            assert score.low <= score.value <= score.high
            assert abs(score.control - 0.25) < 0.1
            assert score.control <= score.control_high
        assert result.converged
        assert result.controls_converged


def test_bits_are_found_in_the_layer_that_has_them_and_nowhere_else():
    layers, rules, tasks = planted()
    bits = np.stack([rules & 1, rules >> 1], 1)
    noise, signal = (ridge(*sides, **options) for sides, options in (split(codes, bits, tasks) for codes in layers))
    assert signal.r2.low > 0.5
    assert signal.r2.control_high < 0.1
    assert noise.r2.value < 0.1  # fingerprints of the training tasks do not help with others
    assert signal.r2.count == 2
    assert signal.r2.value == pytest.approx(np.mean([target.value for target in signal.targets]))


def test_a_split_that_ignores_tasks_finds_what_is_not_there():
    """Why groups matter: fingerprints of tasks seem to tell the rule when rows of a task are on both sides."""
    (noise, _), rules, tasks = planted()
    honest = cross_validate("logistic", noise, rules, tasks, num_shuffles=0)
    leaking = cross_validate("logistic", noise, rules, None, num_shuffles=0)
    assert leaking.accuracy.value > honest.accuracy.value + 0.2


def test_ridge_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((80, 6)) * np.arange(1, 7), rng.standard_normal((50, 6)) * np.arange(1, 7)
    w = rng.standard_normal((6, 3))
    y, answers = x @ w + rng.standard_normal((80, 3)), rows @ w + rng.standard_normal((50, 3))
    for standardise, model in ((True, make_pipeline(StandardScaler(), Ridge(2.0))), (False, Ridge(2.0))):
        found = ridge(x, y, rows, answers, penalty=2.0, standardise=standardise, names=["a", "b", "c"])
        expected = r2_score(answers, model.fit(x, y).predict(rows), multioutput="raw_values")
        assert [target.value for target in found.targets] == pytest.approx(expected.tolist(), abs=1e-9)
        assert found.names == ("a", "b", "c")
        chance = r2_score(answers, np.tile(y.mean(0), (50, 1)), multioutput="raw_values")
        assert [target.chance for target in found.targets] == pytest.approx(chance.tolist(), abs=1e-9)


def test_logistic_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    y, answers = rng.choice([2, 5, 9], 150), rng.choice([2, 5, 9], 90)
    x, rows = (rng.standard_normal((len(ids), 4)) + np.eye(10, 4)[ids % 4] * 1.5 for ids in (y, answers))
    found = logistic(x, y, rows, answers, names=[f"rule {i}" for i in range(10)])
    predicted = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y).predict(rows)
    precision, recall, f1, count = precision_recall_fscore_support(answers, predicted)
    assert found.accuracy.value == (predicted == answers).mean()
    assert [rule.name for rule in found.rules] == ["rule 2", "rule 5", "rule 9"]
    assert [rule.precision for rule in found.rules] == pytest.approx(precision)
    assert [rule.recall for rule in found.rules] == pytest.approx(recall)
    assert [rule.f1 for rule in found.rules] == pytest.approx(f1)
    assert [rule.count for rule in found.rules] == count.tolist()
    assert [rule.num_train for rule in found.rules] == [int((y == rule).sum()) for rule in (2, 5, 9)]
    assert found.macro_f1.value == pytest.approx(f1.mean())
    assert found.confusion == tuple(map(tuple, confusion_matrix(answers, predicted).tolist()))
    majority = np.bincount(y).argmax()
    share = (answers == majority).mean()
    assert found.accuracy.chance == pytest.approx(share)
    assert found.macro_f1.chance == pytest.approx(2 * share / (share + 1) / 3)


def test_labels_may_be_text_or_whole_floats():
    layers, rules, tasks = planted(num_tasks=20)
    (x, y, rows, answers), options = split(layers[1], rules, tasks)
    numbers = logistic(x, y, rows, answers, **options)
    floats = logistic(x, y.astype(float), rows, answers.astype(np.float32), **options)
    texts = logistic(x, y.astype(str), rows, answers.astype(str), **options)
    assert numbers == floats == texts


def test_results_are_plain_values_and_repeatable():
    layers, rules, tasks = planted(num_tasks=20)
    sides, options = split(layers[1], rules, tasks)
    one, two, other = (logistic(*sides, **options, seed=seed) for seed in (3, 3, 4))
    assert one == two
    assert one.accuracy.value == other.accuracy.value
    assert one != other
    assert json.loads(json.dumps(asdict(one)))["accuracy"]["value"] == one.accuracy.value
    assert ridge(*sides, **options) == ridge(*sides, **options)


def test_the_order_of_rows_changes_no_score():
    layers, rules, tasks = planted(num_tasks=20)
    (x, y, rows, answers), options = split(layers[1], rules, tasks)
    order = np.random.default_rng(0).permutation(len(answers))
    options_turned = options | {"test_groups": options["test_groups"][order]}
    one, two = logistic(x, y, rows, answers, **options), logistic(x, y, rows[order], answers[order], **options_turned)
    assert one.accuracy == two.accuracy
    assert one.confusion == two.confusion


# --- targets without a score, rules without rows ----------------------------------------------------------------------


def test_a_constant_target_is_left_out_and_counted():
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((60, 4)), rng.standard_normal((40, 4))
    y, answers = np.column_stack([x[:, 0], np.ones(60)]), np.column_stack([rows[:, 0], np.ones(40)])
    found = ridge(x, y, rows, answers)
    assert found.targets[1] == NONE
    assert found.num_undefined == 1
    assert found.r2.count == 1
    assert found.r2.value == found.targets[0].value > 0.9
    nothing = ridge(x, y[:, 1:], rows, answers[:, 1:])
    assert nothing.r2 == NONE
    assert nothing.num_undefined == 1
    alone = ridge(x, y, rows[:1], answers[:1])  # of one row no target varies
    assert (alone.r2, alone.num_undefined) == (NONE, 2)


@pytest.mark.parametrize(("variables", "terms", "constant"), [(3, 2, 6), (4, 2, 4), (5, 3, 6)])
def test_prb_03_bits_of_unseen_terms(variables, terms, constant):
    """With a quarter of the conjunctions unseen, 6/6, 4/8 and 6/15 of the bits of unseen terms never vary."""
    task = FuzzyLogic(LogicConfig(num_variables=variables, num_terms=terms, held_out_fraction=0.5, num_points=2))
    rng = np.random.default_rng(0)
    sides = []
    for name in ("train", "unseen_terms"):
        bits = task.batch(name, 0, 600).latents["term_bits"].flatten(1).numpy()
        sides += [bits + 0.1 * rng.standard_normal(bits.shape), bits]
    found = ridge(*sides, num_shuffles=1, num_resamples=200)
    assert found.num_undefined == constant
    assert sum(target.value is None for target in found.targets) == constant
    defined = [target.value for target in found.targets if target.value is not None]
    assert found.r2.count == len(defined) == variables * terms - constant
    assert all(value <= 1 for value in defined)
    if defined:
        assert found.r2.value == pytest.approx(np.mean(defined))
    else:
        assert found.r2 == NONE


def test_a_nearly_constant_target_counts_in_full():
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((50, 3)), rng.standard_normal((6, 3))
    answers = np.array([-5.1608, -5.1609, -5.1608, -5.1608, -5.1608, -5.1608], np.float32)
    found = ridge(x, x[:, 0], rows, answers)
    assert found.r2.value < -1e6
    assert found.r2.low <= found.r2.value
    assert found.num_undefined == 0


def test_rules_never_seen_in_training_count_as_mistakes():
    layers, rules, tasks = planted()
    (x, y, rows, answers), options = split(layers[1], rules, tasks)
    kept = y != 2
    options["train_groups"] = options["train_groups"][kept]
    found = logistic(x[kept], y[kept], rows, answers, names=list("abcd"), **options)
    assert found.unseen == ("c",)
    assert found.num_unseen == (answers == 2).sum()
    assert found.rules[2].f1 == 0
    assert found.rules[2].precision is None
    assert found.rules[2].num_train == 0
    assert found.macro_f1.count == 4
    assert found.macro_f1.value == pytest.approx(np.mean([rule.f1 for rule in found.rules]))
    assert found.accuracy.value <= 1 - (answers == 2).mean()


def test_rules_absent_from_the_test_rows_are_not_in_the_mean():
    layers, rules, tasks = planted()
    (x, y, rows, answers), options = split(layers[1], rules, tasks)
    kept = answers != 1
    options["test_groups"] = options["test_groups"][kept]
    found = logistic(x, y, rows[kept], answers[kept], **options)
    assert found.rules[1].f1 is None
    assert found.rules[1].recall is None
    assert found.rules[1].count == 0
    assert found.macro_f1.count == 3
    assert found.macro_f1.value == pytest.approx(np.mean([rule.f1 for rule in found.rules if rule.f1 is not None]))


def test_a_rule_with_one_row_and_a_test_set_of_one_row():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 3))
    y = np.array([0] * 15 + [1] * 14 + [2])
    found = logistic(x, y, x[-1:], y[-1:])
    assert found.rules[2].num_train == 1
    assert found.accuracy.value in (0, 1)
    assert (found.accuracy.low, found.accuracy.high) == (None, None)


def test_a_solver_that_stops_early_is_reported(monkeypatch):
    monkeypatch.setattr(decoders, "MAX_ITERATIONS", 2)
    layers, rules, tasks = planted(num_tasks=20)
    sides, options = split(layers[1], rules, tasks)
    found = logistic(*sides, **options)
    assert not found.converged
    assert found.accuracy.value > 0.5


# --- what may not leak ------------------------------------------------------------------------------------------------


def test_nothing_of_the_test_set_reaches_the_fit():
    """Scaling the test codes changes predictions as scaling does; the decoder itself stays as it is."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((100, 3)), rng.standard_normal(100)
    model = make_pipeline(StandardScaler(), Ridge(1.0)).fit(x, y)
    rows = 100 * rng.standard_normal((40, 3)) + 7
    answers = rng.standard_normal(40)
    assert ridge(x, y, rows, answers).r2.value == pytest.approx(r2_score(answers, model.predict(rows)), rel=1e-9)


def test_tasks_on_both_sides_are_refused():
    layers, rules, tasks = planted(num_tasks=10)
    groups = {"train_groups": tasks[:60], "test_groups": tasks[55:]}
    sides = (layers[0][:60], rules[:60], layers[0][55:], rules[55:])
    for probe in (ridge, logistic, few_shot):
        with pytest.raises(ConfigError, match="share 1 of 10 groups, such as 5"):
            probe(*sides, **groups)


def test_masked_rows_do_not_exist():
    """Padding may hold anything, NaN included; rows that are exactly 0 without a mask are data, and counted."""
    layers, rules, tasks = planted(num_tasks=40)
    (x, y, rows, answers), options = split(layers[1], rules, tasks)
    expected = logistic(x, y, rows, answers, **options)
    padding = np.full((7, 16), np.nan)
    padded = {
        "train_groups": np.append(options["train_groups"], [-1] * 7),
        "test_groups": np.append(options["test_groups"], [-1] * 7),  # of both sides, but of rows that do not count
        "train_mask": np.arange(len(y) + 7) < len(y),
        "test_mask": np.arange(len(answers) + 7) < len(answers),
    }
    sides = (
        np.append(x, padding, 0),
        np.append(y, [99] * 7),
        np.append(rows, padding, 0),
        np.append(answers, [99] * 7),
    )
    found = logistic(*sides, **padded)
    assert (found.accuracy, found.macro_f1, found.confusion) == (
        expected.accuracy,
        expected.macro_f1,
        expected.confusion,
    )
    assert (found.rows.num_masked, expected.rows.num_masked) == (14, 0)
    x[:3] = 0
    assert logistic(x, y, rows, answers, **options).rows.num_zero == 3


def test_rows_on_both_sides_are_counted():
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((30, 3)), rng.standard_normal((20, 3))
    rows[:4] = x[10:14]
    x[0], rows[5] = 0.0, -0.0
    found = ridge(x, x[:, 0], rows, rows[:, 0]).rows
    assert found.num_repeated == 5
    assert (found.num_train, found.num_test, found.num_features, found.num_train_groups) == (30, 20, 3, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((29, 3))}, r"unequal numbers of rows: x_train has shape \(29, 3\), y_train has shape"),
        ({"test_groups": np.zeros(19, int)}, r"unequal numbers of rows: .*test_groups has shape \(19,\)"),
        ({"x_test": np.zeros((20, 4))}, "x_test = .*: 3 features, as in x_train"),
        ({"x_test": np.full((20, 3), np.nan)}, "x_test has 60 values that are not finite, in 20 of 20 rows"),
        ({"train_mask": np.zeros(30, bool)}, "x_train is an array .* not empty"),
        ({"train_mask": np.ones(30, int)}, "train_mask = .*: true or false for each row"),
        ({"penalty": 0.0}, "penalty = 0.0 is not possible: above 0"),
        ({"seed": -1}, "seed = -1"),
        ({"num_shuffles": -1}, "num_shuffles = -1"),
        ({"num_resamples": -1}, "num_resamples = -1"),
        ({"y_train": np.ones(30, int)}, "the only rule in training is 1; a decoder needs two"),
        ({"y_train": np.full(30, 0.5)}, "not whole numbers"),
    ],
)
def test_mistakes_are_named(change, message, unchecked):
    rng = np.random.default_rng(0)
    sides = {"x_train": rng.standard_normal((30, 3)), "y_train": rng.integers(0, 3, 30)}
    sides |= {"x_test": rng.standard_normal((20, 3)), "y_test": rng.integers(0, 3, 20)}
    with pytest.raises(ConfigError, match=message):
        logistic(**sides | change)


def test_mistakes_in_targets_are_named(unchecked):
    x = np.random.default_rng(0).standard_normal((10, 3))
    with pytest.raises(ConfigError, match=r"y_test = .*: 2 targets, as in y_train"):
        ridge(x, x[:, :2], x, x)
    with pytest.raises(ConfigError, match="one name for each of the 2 targets"):
        ridge(x, x[:, :2], x, x[:, :2], names=["a"])
    with pytest.raises(ConfigError, match="y_train has 1 values that are not finite"):
        ridge(x, np.where(x == x[0, 0], np.inf, x), x, x)


# --- splits and folds -------------------------------------------------------------------------------------------------


def test_a_grouped_split_keeps_tasks_whole():
    tasks = np.random.default_rng(0).integers(0, 50, 400)
    train, test = grouped_split(tasks, 0.2, seed=5)
    assert sorted([*train, *test]) == list(range(400))
    assert not set(tasks[train]) & set(tasks[test])
    assert len(set(tasks[test])) == 10
    assert [a.tolist() for a in grouped_split(tasks, 0.2, seed=5)] == [train.tolist(), test.tolist()]
    assert grouped_split(tasks, 0.2, seed=6)[1].tolist() != test.tolist()
    with pytest.raises(ConfigError, match="of 2 groups 0 would be tested"):
        grouped_split(np.array([0, 0, 1]), 0.1)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        grouped_split(tasks, 1.0)


def test_cross_validation_by_hand():
    """Leaving out one of four tasks at a time; predictions pooled, scored about the mean of all."""
    rng = np.random.default_rng(0)
    tasks = np.repeat(["a", "b", "c", "d"], [5, 7, 9, 4])
    x = rng.standard_normal((25, 2))
    y = x[:, 0] + 0.1 * rng.standard_normal(25)
    predicted, guessed = np.empty(25), np.empty(25)
    for task in "abcd":
        out = tasks == task
        predicted[out] = Ridge(1.0).fit(x[~out], y[~out]).predict(x[out])
        guessed[out] = y[~out].mean()
    found = cross_validate("ridge", x, y, tasks, folds=4, standardise=False)
    assert found.r2.value == pytest.approx(r2_score(y, predicted), abs=1e-9)
    assert found.r2.chance == pytest.approx(r2_score(y, guessed), abs=1e-9)
    rows = found.rows
    assert (rows.num_folds, rows.num_train, rows.num_test, rows.num_train_groups, rows.num_test_groups) == (
        4,
        16,
        25,
        3,
        4,
    )


def test_cross_validation_of_rules():
    layers, rules, tasks = planted()
    noise, signal = (cross_validate("logistic", codes, rules, tasks, mask=tasks > 4) for codes in layers)
    assert signal.accuracy.low > 0.85
    assert abs(noise.accuracy.value - 0.25) < 0.15
    assert abs(signal.accuracy.control - 0.25) < 0.1
    assert signal.rows.num_masked == 50
    assert signal.rows.num_test_groups == 115
    assert sum(map(sum, signal.confusion)) == 1150
    assert cross_validate("logistic", layers[1], rules, tasks, mask=tasks > 4) == signal


def test_a_rule_of_one_task_is_unseen_in_its_fold():
    layers, rules, tasks = planted(num_tasks=60)
    rules[tasks == 3] = 9
    found = cross_validate("logistic", layers[1], rules, tasks)
    assert (found.unseen, found.num_unseen) == (("9",), 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": 6}, "folds = 6 is not possible: from 2 to the number of groups, 5"),
        ({"folds": 1}, "folds = 1"),
        ({"kind": "lasso"}, "kind = 'lasso' is not possible: ridge or logistic"),
        ({"y": np.repeat([1, 0, 0, 0, 0], 4), "folds": 5}, "the only rule in training is 0"),
        ({"y": np.zeros(19)}, "unequal numbers of rows"),
    ],
)
def test_mistakes_in_cross_validation_are_named(change, message, unchecked):
    x, tasks = np.random.default_rng(0).standard_normal((20, 2)), np.repeat(np.arange(5), 4)
    with pytest.raises(ConfigError, match=message):
        cross_validate(**{"kind": "logistic", "x": x, "y": tasks % 2, "groups": tasks} | change)


# --- intervals cover --------------------------------------------------------------------------------------------------


def test_intervals_over_tasks_cover_and_intervals_over_rows_do_not():
    """A fixed decoder, 150 test sets of 20 tasks with 15 rows each. Rows of a task share an offset, so that a task is
    mostly right or mostly wrong; the true accuracy and R2 are those of 4,000 tasks."""

    def draw(rng, num_tasks):
        tasks = np.repeat(np.arange(num_tasks), 15)
        rules = rng.integers(0, 2, num_tasks)[tasks]
        offset = rng.standard_normal((num_tasks, 2))[tasks]
        return np.eye(2)[rules] * 1.5 + offset + 0.2 * rng.standard_normal((len(tasks), 2)), rules, tasks

    rng = np.random.default_rng(0)
    x, y, _ = draw(rng, 60)
    rows, answers, _ = draw(rng, 4000)
    quick = {"num_shuffles": 0, "num_resamples": 400}
    truth = {
        "accuracy": logistic(x, y, rows, answers, num_shuffles=0, num_resamples=0).accuracy,
        "r2": ridge(x, y, rows, answers, num_shuffles=0, num_resamples=0).r2,
    }
    assert (truth["r2"].low, truth["r2"].control) == (None, None)
    covered = {"accuracy": [], "r2": [], "accuracy over rows": []}
    for seed in range(150):
        rows, answers, tasks = draw(rng, 20)
        found = {
            "accuracy": logistic(x, y, rows, answers, test_groups=tasks, seed=seed, **quick).accuracy,
            "r2": ridge(x, y, rows, answers, test_groups=tasks, seed=seed, **quick).r2,
            "accuracy over rows": logistic(x, y, rows, answers, seed=seed, **quick).accuracy,
        }
        for name, score in found.items():
            covered[name].append(score.low <= truth[name.removesuffix(" over rows")].value <= score.high)
    assert 0.90 <= np.mean(covered["accuracy"]) <= 0.99
    assert 0.90 <= np.mean(covered["r2"]) <= 0.99
    assert np.mean(covered["accuracy over rows"]) < 0.75


# --- few examples -----------------------------------------------------------------------------------------------------


def test_more_examples_decode_better():
    layers, rules, tasks = planted()
    sides, options = split(layers[1], rules, tasks)
    points = few_shot(*sides, num_examples=(20, 1, 5), repeats=10, **options)
    assert [(p.num_examples, p.decoder) for p in points[::2]] == [(1, "logistic"), (5, "logistic"), (20, "logistic")]
    assert [p.decoder for p in points[:2]] == ["logistic", "class_mean"]
    for decoder in range(2):
        accuracy = [p.accuracy for p in points[decoder::2]]
        assert accuracy[0].value < accuracy[1].value < accuracy[2].value
        assert all(a.value > 0.25 and a.low <= a.value <= a.high and a.count == 10 for a in accuracy)
        assert all(a.chance == 0.25 and abs(a.control - 0.25) < 0.15 for a in accuracy)
    assert all(p.left_out == () and p.num_unconverged == 0 for p in points)
    assert few_shot(*sides, num_examples=(20, 1, 5), repeats=10, **options) == points


def test_chance_of_few_examples_is_a_uniform_guess():
    rng = np.random.default_rng(0)
    y, answers = rng.integers(0, 3, 60), rng.choice(3, 200, p=[0.6, 0.3, 0.1])
    point = few_shot(
        rng.standard_normal((60, 2)), y, rng.standard_normal((200, 2)), answers, num_examples=[5], repeats=2
    )[0]
    guesses = [decoders.classification_scores(answers, rng.integers(0, 3, 200), 3) for _ in range(4000)]
    assert (point.accuracy.chance, point.macro_f1.chance) == pytest.approx(np.mean(guesses, 0).tolist(), abs=0.005)


def test_rules_with_too_few_examples_are_named_and_left_out():
    layers, rules, tasks = planted()
    (x, y, rows, answers), _ = split(layers[1], rules, tasks)
    kept = (y != 3) | (np.cumsum(y == 3) <= 4)
    by_n = {p.num_examples: p for p in few_shot(x[kept], y[kept], rows, answers, num_examples=(4, 5), repeats=3)}
    assert (by_n[4].rules, by_n[4].left_out, by_n[4].num_left_out) == (("0", "1", "2", "3"), (), 0)
    assert (by_n[5].rules, by_n[5].left_out) == (("0", "1", "2"), ("3",))
    assert by_n[5].num_left_out == (answers == 3).sum()
    assert by_n[5].accuracy.chance == pytest.approx(1 / 3)
    nothing = few_shot(x, y, rows, answers, num_examples=[10_000])[0]
    assert (nothing.accuracy, nothing.macro_f1, nothing.rules) == (NONE, NONE, ())


def test_mistakes_with_few_examples_are_named():
    x, y = np.eye(4), np.array([0, 1, 0, 1])
    for change, message in (
        ({"num_examples": ()}, "num_examples"),
        ({"num_examples": (0, 1)}, "num_examples"),
        ({"repeats": 0}, "repeats = 0"),
        ({"penalty": -1.0}, "penalty = -1.0"),
        ({"seed": -1}, "seed = -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            few_shot(x, y, x, y, **change)


# --- the public code's probe ------------------------------------------------------------------------------------------


def test_prb_04_the_reference_stands_beside_the_right_number():
    state = np.random.RandomState(0)
    x = np.maximum(state.randn(400, 8), 0)
    y = 5 + x @ state.randn(8)
    for standardise in (True, False):
        found = ridge(x, y, x, y, reference=True, standardise=standardise)
        assert found.r2.value == pytest.approx(0.9999, abs=1e-4)
        assert found.reference_mean == found.reference[0] == pytest.approx(-0.28, abs=0.005)
    assert ridge(x, y, x, y).reference is None


def test_codes_of_more_features_than_rows():
    rng = np.random.default_rng(0)
    x, rows = rng.standard_normal((20, 100)), rng.standard_normal((200, 100))
    found = ridge(x, x[:, 0], rows, rows[:, 0])
    assert found.rows.num_features == 100 > found.rows.num_train
    assert 0 < found.r2.value < 0.5
