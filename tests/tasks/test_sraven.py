"""SRAVEN: the generator, its splits, the checker of ambiguity and the ideal observer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.errors import ConfigError
from hyla.tasks import sraven
from hyla.tasks.base import Batch, Overlap, Task, overlap_rate
from hyla.tasks.sraven import Sraven, SravenConfig
from hyla.tasks.sraven_solver import RULES, ambiguous, fitting_rules, ideal_answer, possible_answers

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "sraven.npz")
PAPER = SravenConfig(split_seed="official-0")
CONSTANT, PLUS_1, PLUS_2, MINUS_1, MINUS_2, ADDITION, SUBTRACTION, DISTRIBUTE = range(8)


def golden(key: str) -> torch.Tensor:
    values = torch.from_numpy(GOLDEN[key])
    return values if values.dtype == torch.bool else values.long()


# --- the naive counterpart: one puzzle at a time, in plain Python ---------------------------------------------------


def obeys(rule: int, row: list[int], num_values: int) -> bool:
    """Whether a whole row obeys a rule other than distribute."""
    if rule <= MINUS_2:
        step = (0, 1, 2, -1, -2)[rule]
        return all((b - a - step) % num_values == 0 for a, b in itertools.pairwise(row))
    rest = sum(row[1:-1])
    return (row[-1] - row[0] - (rest if rule == ADDITION else -rest)) % num_values == 0


def implied_answers(grid: list[list[int]], num_values: int) -> dict[int, int]:
    """The answer implied by each rule that one feature obeys on its given values; the last value is not looked at."""
    found = {}
    for rule, answer in itertools.product(range(8), range(num_values)):
        rows = [*grid[:-1], [*grid[-1][:-1], answer]]
        if rule == DISTRIBUTE:
            sets = [set(row) for row in rows]
            fits = all(len(values) == len(rows[0]) and values == sets[0] for values in sets)
        else:
            fits = all(obeys(rule, row, num_values) for row in rows)
        if fits:
            found[rule] = answer
    return found


def naive_answers(panels: torch.Tensor, num_values: int, permuted: bool) -> set[tuple[int, ...]]:
    """Every possible answer to one puzzle `[R, C, M]`, by trying all alignments."""
    num_rows, num_columns, num_features = panels.shape
    grid = panels.tolist()
    orders = list(itertools.permutations(range(num_features))) if permuted else [tuple(range(num_features))]
    answers = set()
    for alignment in itertools.product(orders, repeat=num_columns - 1):
        columns = [*alignment, tuple(range(num_features))]
        options = [
            set(
                implied_answers(
                    [[grid[r][c][columns[c][j]] for c in range(num_columns)] for r in range(num_rows)], num_values
                ).values()
            )
            for j in range(num_features)
        ]
        answers |= set(itertools.product(*options))
    return answers


def feature_values(panels_NRCM: torch.Tensor, permutations_NCM: torch.Tensor) -> torch.Tensor:
    """Values `[N, M, R, C]` by feature, from panels whose features are permuted."""
    values_NRCM = torch.empty_like(panels_NRCM)
    values_NRCM.scatter_(-1, permutations_NCM[:, None].expand_as(panels_NRCM), panels_NRCM)
    return values_NRCM.permute(0, 3, 1, 2)


def assert_rules_hold(panels: torch.Tensor, rules: torch.Tensor, permutations: torch.Tensor, num_values: int) -> None:
    values_NMRC = feature_values(panels, permutations)
    for grids, ids in zip(values_NMRC.tolist(), rules.tolist(), strict=True):
        for grid, rule in zip(grids, ids, strict=True):
            assert implied_answers(grid, num_values).get(rule) == grid[-1][-1], (RULES[rule], grid)


def chi_square(counts: torch.Tensor | np.ndarray) -> float:
    """Chi-square of counts against equal frequencies, as a number of standard deviations."""
    counts = np.asarray(counts, dtype=float).ravel()
    degrees = len(counts) - 1
    return float((((counts - counts.mean()) ** 2 / counts.mean()).sum() - degrees) / math.sqrt(2 * degrees))


# --- configuration and splits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"num_features": 0}, ["num_features = 0", "at least 1"]),
        ({"num_rows": 1}, ["num_rows = 1", "at least 2"]),
        ({"num_columns": 2}, ["num_columns = 2", "at least 3", "constant"]),
        ({"num_values": 2}, ["num_values = 2", "num_columns = 3", "distinct"]),
        ({"num_values": 63}, ["num_values = 63", "at most 62"]),
        ({"held_out_fraction": 1.0}, ["held_out_fraction = 1.0", "less than 1"]),
        ({"held_out_fraction": float("nan")}, ["held_out_fraction = nan"]),
        ({"validation_fraction": -0.1}, ["validation_fraction = -0.1"]),
        ({"num_features": 1, "held_out_fraction": 0.1}, ["held_out_fraction = 0.1", "8 combinations", "empty"]),
        ({"validation_fraction": 0.001}, ["validation_fraction = 0.001", "248", "empty"]),
        ({"split_seed": "official-3"}, ["split_seed = 'official-3'", "official-2024", "num_features = 4", "0.25"]),
        ({"split_seed": "official-0", "num_features": 2}, ["no official set of that name exists for num_features = 2"]),
        (
            {"split_seed": "official-0", "held_out_fraction": 0.5},
            ["held_out_fraction = 0.5", "0.25 only", "official-1"],
        ),
        ({"num_features": 11, "num_values": 60, "reject_ambiguous": True}, ["reject_ambiguous = True", "62"]),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings_, words):
    with pytest.raises(ConfigError) as error:
        SravenConfig(**settings_)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("seed", [0, 1, 2, 2024])
def test_official_splits_are_the_public_codes(seed):
    splits = SravenConfig(split_seed=f"official-{seed}").combinations()
    held_out = {tuple(rules) for rules in GOLDEN[f"held_out/{seed}"].tolist()}
    every = set(itertools.combinations_with_replacement(range(8), 4))
    assert set(splits["held_out"]) == held_out
    assert set(splits["train"]) == every - held_out
    assert (len(splits["train"]), len(splits["held_out"])) == (248, 82)


def test_golden_unpermuted_instances_are_of_the_held_out_combinations():
    held_out = set(PAPER.combinations()["held_out"])
    assert {tuple(rules) for rules in GOLDEN["sraven_unpermuted/rules"].tolist()} <= held_out


def test_splits_share_no_combination_and_cover_all():
    config = SravenConfig(validation_fraction=0.1, split_seed=3)
    splits = config.combinations()
    assert [(name, len(rules)) for name, rules in splits.items()] == [
        ("train", 224),
        ("validation", 24),
        ("held_out", 82),
    ]
    together = [rules for split in splits.values() for rules in split]
    assert sorted(together) == list(itertools.combinations_with_replacement(range(8), 4))
    assert Sraven(config, 0).splits == ("train", "validation", "held_out")
    assert splits["held_out"] == replace(config, validation_fraction=0.0).combinations()["held_out"]
    assert splits["held_out"] != replace(config, split_seed=4).combinations()["held_out"]
    assert Sraven(replace(config, held_out_fraction=0.0, validation_fraction=0.0), 0).splits == ("train",)


def test_official_split_with_validation_keeps_the_official_held_out_set():
    splits = replace(PAPER, validation_fraction=0.1).combinations()
    assert splits["held_out"] == PAPER.combinations()["held_out"]
    assert set(splits["train"]) | set(splits["validation"]) == set(PAPER.combinations()["train"])


def test_validation_from_the_held_out_leaves_the_trained_combinations_alone():
    splits = replace(PAPER, validation_from="held_out", validation_fraction=0.2).combinations()
    whole = PAPER.combinations()
    assert splits["train"] == whole["train"]
    assert sorted(splits["validation"] + splits["held_out"]) == sorted(whole["held_out"])
    assert [len(rules) for rules in splits.values()] == [248, 16, 66]
    with pytest.raises(ConfigError, match="82"):
        replace(PAPER, validation_from="held_out", validation_fraction=0.01)


def test_splits_and_batches_leave_global_generators_alone():
    config = SravenConfig(validation_fraction=0.1)
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    random.seed(1)  # its state cannot be compared: the checks of signatures in these tests draw from it
    first = Sraven(config, 5)
    first_batch = first.batch("train", 0, 4)
    random.seed(2)
    assert Sraven(config, 5).combinations == first.combinations
    assert torch.equal(Sraven(config, 5).batch("train", 0, 4).inputs, first_batch.inputs)
    assert (np.random.get_state()[1] == np_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


# --- the generator ---------------------------------------------------------------------------------------------------


def test_batch_at_the_papers_size():
    task = Sraven(PAPER, 0)
    assert isinstance(task, Task)
    assert (task.name, task.headline, task.splits) == ("sraven", "accuracy", ("train", "held_out"))
    assert (task.input_dim, task.output_dim, task.sequence_length) == (8, 8, 36)
    assert task.predict_at == slice(32, 36)
    batch = task.batch("train", 7, 16)
    assert batch.inputs.shape == (16, 36, 8)
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.shape == (16, 4)
    assert batch.targets.dtype == torch.int64
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in batch.latents.items()}
    assert shapes == {
        "rules": ((16, 4), torch.int64),
        "permutations": ((16, 3, 4), torch.int64),
        "panels": ((16, 3, 3, 4), torch.int64),
    }
    panels = batch.latents["panels"]
    assert torch.equal(batch.inputs[:, :32].argmax(-1), panels.flatten(1)[:, :32])
    assert torch.equal(batch.inputs[:, :32].sum(-1), torch.ones(16, 32))
    assert (batch.inputs[:, task.predict_at] == 0).all()
    assert torch.equal(batch.targets, panels[:, -1, -1])
    assert task.batch("train", 7, 16, dtype=torch.float64).inputs.dtype == torch.float64


@pytest.mark.parametrize("key", ["sraven", "sraven_unpermuted", "sraven_2feat_5val"])
def test_rules_hold_on_golden_instances(key):
    panels, rules = golden(f"{key}/instances"), golden(f"{key}/rules")
    if key == "sraven_2feat_5val":  # its permutations are not recorded: some alignment must fit the rules
        positions_KC = torch.cartesian_prod(*[torch.arange(2)] * 3)
        fits_NK8, answers_NK8 = fitting_rules(panels, positions_KC, 5)
        right_NK8 = fits_NK8 & (answers_NK8 == panels[:, -1, -1][:, positions_KC[:, -1]][..., None])
        fits_NM = right_NK8.any(1).gather(1, rules)
        assert fits_NM.all()
        return
    permutations = golden("sraven/perms") if key == "sraven" else torch.arange(4).expand(len(panels), 3, 4)
    assert_rules_hold(panels, rules, permutations, 8)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rules_hold_on_drawn_puzzles(data):
    num_columns = data.draw(st.integers(3, 5), "columns")
    config = SravenConfig(
        num_features=data.draw(st.integers(1, 5), "features"),
        num_values=data.draw(st.integers(num_columns, 11), "values"),
        num_rows=data.draw(st.integers(2, 4), "rows"),
        num_columns=num_columns,
        permute_features=data.draw(st.booleans(), "permute"),
        shuffle_rules=data.draw(st.booleans(), "shuffle"),
        split_seed=data.draw(st.integers(0, 9), "split seed"),
    )
    task = Sraven(config, data.draw(st.integers(0, 99), "seed"))
    split = data.draw(st.sampled_from(task.splits), "split")
    batch = task.batch(split, data.draw(st.integers(0, 9), "index"), 12)
    rules, permutations, panels = (batch.latents[name] for name in ("rules", "permutations", "panels"))
    assert panels.shape == (12, config.num_rows, config.num_columns, config.num_features)
    assert int(panels.min()) >= 0
    assert int(panels.max()) < config.num_values
    assert torch.equal(permutations.sort(-1).values, torch.arange(config.num_features).expand_as(permutations))
    assert_rules_hold(panels, rules, permutations, config.num_values)
    assert {tuple(sorted(ids)) for ids in rules.tolist()} <= set(task.combinations[split])
    if not config.shuffle_rules:
        assert torch.equal(rules, rules.sort(-1).values)
    if not config.permute_features:
        assert torch.equal(permutations, torch.arange(config.num_features).expand_as(permutations))


def test_batches_are_pure_functions_of_their_path():
    alone = Sraven(PAPER, 3).batch("train", 5, 8)
    task = Sraven(PAPER, 3)
    for index in (0, 9, 5):
        task.batch("held_out", index, 3)
        task.batch("train", index, 8, stream="evaluation")
    again = task.batch("train", 5, 8)
    assert torch.equal(alone.inputs, again.inputs)
    assert torch.equal(alone.targets, again.targets)
    assert all(torch.equal(alone.latents[name], again.latents[name]) for name in alone.latents)
    others = [
        Sraven(PAPER, 4).batch("train", 5, 8),
        task.batch("train", 6, 8),
        task.batch("train", 5, 8, stream="evaluation"),
        task.batch("held_out", 5, 8),
    ]
    assert not any(torch.equal(alone.inputs, other.inputs) for other in others)


def test_an_unknown_split_is_refused_with_the_possible_ones():
    with pytest.raises(ValueError, match="'test' is not possible: task 'sraven' has train, held_out"):
        Sraven(PAPER, 0).batch("test", 0, 4)


def statistics(panels: torch.Tensor, rules: torch.Tensor, permutations: torch.Tensor) -> dict[str, float]:
    """Deviations (in standard deviations) of what the generator should draw uniformly; V = 8, 3 x 3 panels."""
    values = feature_values(panels, permutations)
    found = {}
    for rule in range(7):
        found[f"start of {RULES[rule]}"] = chi_square(
            torch.bincount(values[rules == rule][..., 0].ravel(), minlength=8)
        )
    for rule in (ADDITION, SUBTRACTION):
        first, second = values[rules == rule][..., 0], values[rules == rule][..., 1]
        found[f"operands of {RULES[rule]}"] = chi_square(torch.bincount((first * 8 + second).ravel(), minlength=64))
    distributed = values[rules == DISTRIBUTE]
    masks = (1 << distributed[:, 0]).sum(-1)
    counts = torch.bincount(masks, minlength=256)[[mask for mask in range(256) if mask.bit_count() == 3]]
    found["sets of distribute"] = chi_square(counts)
    orders = distributed.argsort(-1)
    order = orders[..., 0] * 2 + (orders[..., 1] > orders[..., 2])
    found["orders of distribute"] = chi_square(torch.bincount(order.ravel(), minlength=6))
    found["orders of two rows"] = chi_square(torch.bincount(order[:, 0] * 6 + order[:, 1], minlength=36))
    found["permutations"] = chi_square(torch.bincount(permutations[..., 0].ravel(), minlength=4))
    pairs = permutations[:, 0, 0] * 4 + permutations[:, 1, 0]
    found["permutations of two columns"] = chi_square(torch.bincount(pairs, minlength=16))
    rows = [values[rules == rule] for rule in range(5)]
    starts = torch.cat([rows_[:, 0, 0] * 8 + rows_[:, 1, 0] for rows_ in rows])
    found["starts of two rows"] = chi_square(torch.bincount(starts, minlength=64))
    return found


def test_the_generator_draws_the_public_codes_distribution():
    """Both follow the same uniform laws, so each is compared with them: golden with 256 puzzles, ours with 20,000."""
    public = statistics(golden("sraven/instances"), golden("sraven/rules"), golden("sraven/perms"))
    assert max(public.values()) < 4, public
    task = Sraven(PAPER, 0)
    batch = task.batch("train", 0, 20_000)
    latents = batch.latents
    ours = statistics(latents["panels"], latents["rules"], latents["permutations"])
    assert max(ours.values()) < 4, ours
    place = {rules: number for number, rules in enumerate(task.combinations["train"])}
    drawn = torch.tensor([place[tuple(rules)] for rules in latents["rules"].tolist()])
    assert chi_square(torch.bincount(drawn, minlength=248)) < 4


def test_shuffled_rules_are_in_every_order_equally_often():
    task = Sraven(replace(PAPER, permute_features=False, shuffle_rules=True), 0)
    rules = task.batch("train", 0, 20_000).latents["rules"]
    largest = rules.argmax(-1)[(rules == rules.max(-1, keepdim=True).values).sum(-1) == 1]
    assert chi_square(torch.bincount(largest, minlength=4)) < 4


def test_loss_and_scores_on_hand_computed_predictions():
    task = Sraven(SravenConfig(num_features=2, num_values=4), 0)
    targets = torch.tensor([[0, 1], [2, 3]])
    batch = Batch(torch.zeros(2, task.sequence_length, 4), targets, {})
    predictions = torch.zeros(2, 2, 4)
    predictions[0, 0, 0] = predictions[0, 1, 1] = math.log(3)  # right, with probability 3/6
    predictions[1, 0, 2] = math.log(3)  # right
    predictions[1, 1, 0] = math.log(3)  # wrong: probability 1/6 for the target
    scores = task.scores(predictions, batch)
    torch.testing.assert_close(scores["accuracy"], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(scores["feature_accuracy"], torch.tensor([1.0, 0.5]))
    losses = torch.tensor([math.log(2), (math.log(2) + math.log(6)) / 2])
    torch.testing.assert_close(scores["loss"], losses)
    torch.testing.assert_close(task.loss(predictions, batch), losses.mean())


# --- symmetries ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 9), st.integers(2, 4), st.integers(0, 10**6), st.data())
def test_rules_are_equivariant(num_values, num_rows, seed, data):
    num_columns = data.draw(st.integers(3, min(5, num_values)))
    task = Sraven(SravenConfig(1, num_values, num_rows, num_columns, held_out_fraction=0.0), seed)
    batch = task.batch("train", 0, 24)
    panels, rules = batch.latents["panels"], batch.latents["rules"][:, 0]
    position = torch.zeros(1, num_columns, dtype=torch.int64)

    def answer_of(rule: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        fits, answers = fitting_rules(grid, position, num_values)
        rows = torch.arange(len(rule))
        return torch.where(fits[rows, 0, rule], answers[rows, 0, rule], -1)

    truth = panels[:, -1, -1, 0]
    assert torch.equal(answer_of(rules, panels), truth)
    # values moved by a constant: all but addition and subtraction stay as they are
    shift = data.draw(st.integers(1, num_values - 1))
    moved = (panels + shift) % num_values
    keeps = (rules != ADDITION) & (rules != SUBTRACTION)
    assert torch.equal(answer_of(rules, moved)[keeps], ((truth + shift) % num_values)[keeps])
    # values negated: progressions turn round, all others stay
    mirror = torch.tensor([CONSTANT, MINUS_1, MINUS_2, PLUS_1, PLUS_2, ADDITION, SUBTRACTION, DISTRIBUTE])
    assert torch.equal(answer_of(mirror[rules], -panels % num_values), -truth % num_values)
    # the rows but the last in any order
    order = [*data.draw(st.permutations(range(num_rows - 1))), num_rows - 1]
    assert torch.equal(answer_of(rules, panels[:, order]), truth)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_the_solver_is_equivariant_to_the_order_of_features(seed, data):
    task = Sraven(SravenConfig(num_features=3, num_values=5), seed)
    panels = task.batch("train", 0, 64).latents["panels"]
    orders = torch.tensor([data.draw(st.permutations(range(3))) for _ in range(3)])
    permuted = panels.gather(-1, orders[None, None].expand_as(panels))
    assert torch.equal(task.ambiguous(panels), task.ambiguous(permuted))
    before, after = task.ideal_answer(panels, "train"), task.ideal_answer(permuted, "train")
    torch.testing.assert_close(before.probability, after.probability, rtol=0, atol=1e-12)
    # where no second answer is as probable, the answer moves along
    sure = before.probability > 0.5 + 1e-9
    assert torch.equal(before.answer[:, orders[-1]][sure], after.answer[sure])


# --- ambiguity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "num_values", "count"), [("sraven", 8, 61), ("sraven_2feat_5val", 5, 93)])
def test_ambiguity_is_golden(key, num_values, count):
    found = ambiguous(golden(f"{key}/instances"), num_values)
    assert torch.equal(found, golden(f"{key}/ambiguous"))
    assert int(found.sum()) == count


def test_hand_made_puzzles():
    # 1 2 3 / 2 2 4 / 3 3 ?: addition gives 6, and so does nothing else
    clear = [[1, 2, 3], [2, 2, 4], [3, 3, 6]]
    # 1 2 3 / 2 1 3 / 5 6 ?: addition gives 3 (11 mod 8), distribute nothing (1 and 2 are not of the last row's set)
    also_clear = [[1, 2, 3], [2, 1, 3], [5, 6, 3]]
    # 0 0 0 / 0 0 0 / 4 4 ?: constant gives 4, addition gives 0, subtraction gives 0
    two_answers = [[0, 0, 0], [0, 0, 0], [4, 4, 4]]
    # 1 2 3 / 2 3 1 / 3 1 ?: distribute gives 2 and nothing else fits
    distributed = [[1, 2, 3], [2, 3, 1], [3, 1, 2]]
    # 1 2 3 / 2 1 3 / 1 2 ?: distribute and addition both give 3
    one_answer_twice = [[1, 2, 3], [2, 1, 3], [1, 2, 3]]
    # 1 2 3 / 1 2 3 / 3 2 ?: distribute gives 1, addition 5
    distribute_or_addition = [[1, 2, 3], [1, 2, 3], [3, 2, 1]]
    grids = torch.tensor([clear, also_clear, two_answers, distributed, one_answer_twice, distribute_or_addition])
    panels = grids[..., None]
    assert ambiguous(panels, 8, permuted=False).tolist() == [False, False, True, False, False, True]
    puzzle, answer = possible_answers(panels, 8)
    assert puzzle.tolist() == [0, 1, 2, 2, 3, 4, 5, 5]
    assert answer[:, 0].tolist() == [6, 3, 0, 4, 2, 3, 1, 5]


def test_a_puzzle_that_only_its_alignment_makes_ambiguous():
    # Two constants, 1 and 2 in the first two rows, 3 and 4 in the last: both answers fit where features are permuted
    # only if the constants agree in all given rows of the last column.
    panels = torch.tensor([[[[1, 1]] * 3, [[2, 2]] * 3, [[3, 4]] * 3]])
    assert ambiguous(panels, 8, permuted=True).tolist() == [True]
    assert ambiguous(panels, 8, permuted=False).tolist() == [False]
    assert possible_answers(panels, 8)[1].tolist() == [[3, 4], [4, 3]]


def small_puzzles(data: st.DataObject) -> tuple[torch.Tensor, int]:
    """Puzzles of any small size, or grids that are none, with few enough values to obey rules by chance."""
    num_columns = data.draw(st.sampled_from([3, 3, 4]), "columns")
    num_features = data.draw(st.integers(1, 3 if num_columns == 3 else 2), "features")
    num_values, num_rows = data.draw(st.integers(num_columns, 6), "values"), data.draw(st.integers(2, 3), "rows")
    seed = data.draw(st.integers(0, 10**6), "seed")
    if data.draw(st.booleans(), "puzzles"):
        config = SravenConfig(num_features, num_values, num_rows, num_columns, held_out_fraction=0.0)
        return Sraven(config, seed).batch("train", 0, 4).latents["panels"], num_values
    generator = torch.Generator().manual_seed(seed)
    used_values = data.draw(st.integers(1, num_values), "used values")
    return torch.randint(used_values, (4, num_rows, num_columns, num_features), generator=generator), num_values


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_possible_answers_equal_brute_force(data, permuted):
    panels, num_values = small_puzzles(data)
    puzzle, answer = possible_answers(panels, num_values, permuted)
    assert len(set(zip(puzzle.tolist(), map(tuple, answer.tolist()), strict=True))) == len(puzzle)
    assert torch.equal(puzzle, puzzle.sort().values)
    expected = [naive_answers(grid, num_values, permuted) for grid in panels]
    assert [set(map(tuple, answer[puzzle == n].tolist())) for n in range(len(panels))] == expected
    truth = list(map(tuple, panels[:, -1, -1].tolist()))
    others = [bool(answers - {answer}) for answers, answer in zip(expected, truth, strict=True)]
    assert ambiguous(panels, num_values, permuted).tolist() == others


def test_wide_keys_change_nothing(monkeypatch):
    panels = Sraven(PAPER, 0).batch("held_out", 0, 200).latents["panels"]
    expected = possible_answers(panels, 8)
    monkeypatch.setattr("hyla.tasks.sraven_solver.MAX_BITS", 24)
    found = possible_answers(panels, 8)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_solver_refuses_what_it_cannot_solve():
    with pytest.raises(ValueError, match=r"shape \(1, 3, 2, 1\)"):
        ambiguous(torch.zeros(1, 3, 2, 1, dtype=torch.int64), 8)
    with pytest.raises(ValueError, match=r"outside 0\.\.7"):
        ambiguous(torch.full((1, 3, 3, 1), 8), 8)
    with pytest.raises(ValueError, match="positions need 64 bits"):
        ambiguous(torch.zeros(1, 3, 3, 32, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="combinations is empty"):
        ideal_answer(torch.zeros(1, 3, 3, 2, dtype=torch.int64), 8, [])
    with pytest.raises(ValueError, match=r"\(1, 0\) is not 2 sorted rule ids"):
        ideal_answer(torch.zeros(1, 3, 3, 2, dtype=torch.int64), 8, [(1, 0)])
    with pytest.raises(ValueError, match=r"\(0, 8\) is not 2 sorted rule ids"):
        ideal_answer(torch.zeros(1, 3, 3, 2, dtype=torch.int64), 8, [(0, 8)])


def test_no_puzzles_have_no_answers():
    none = torch.zeros(0, 3, 3, 4, dtype=torch.int64)
    assert ambiguous(none, 8).shape == (0,)
    assert ideal_answer(none, 8, [(0, 1, 2, 3)]).answer.shape == (0, 4)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (replace(PAPER, reject_ambiguous=True), 2_048),
        (
            SravenConfig(1, 4, permute_features=False, held_out_fraction=0.0, reject_ambiguous=True),
            20_000,
        ),
    ],
)
def test_rejection_leaves_no_ambiguous_puzzle(config, count):
    task, plain = Sraven(config, 0), Sraven(replace(config, reject_ambiguous=False), 0)
    for split in task.splits:
        batch, with_ambiguous = (t.batch(split, 0, count, stream="evaluation") for t in (task, plain))
        panels = batch.latents["panels"]
        assert not task.ambiguous(panels).any()
        # each puzzle keeps its combination of rules, and one that was clear is left alone
        assert torch.equal(batch.latents["rules"], with_ambiguous.latents["rules"])
        was = plain.ambiguous(with_ambiguous.latents["panels"])
        assert was.any()
        assert torch.equal(panels[~was], with_ambiguous.latents["panels"][~was])
        assert torch.equal(batch.inputs, task.batch(split, 0, count, stream="evaluation").inputs)
        first = slice(0, 64)
        rules, permutations = batch.latents["rules"][first], batch.latents["permutations"][first]
        assert_rules_hold(panels[first], rules, permutations, config.num_values)
        assert torch.equal(batch.targets, panels[:, -1, -1])


def test_always_ambiguous_combinations_are_given_up(monkeypatch):
    monkeypatch.setattr(sraven, "MAX_REDRAWS", 3)
    task = Sraven(SravenConfig(num_features=6, num_values=3, num_rows=2, reject_ambiguous=True), 0)
    with pytest.raises(ConfigError, match=r"reject_ambiguous = True .* 3 draws\. Set more num_values"):
        task.batch("train", 0, 64)


# --- the ideal observer ----------------------------------------------------------------------------------------------


def all_grids(rule: int, num_values: int, num_rows: int, num_columns: int) -> list[tuple[int, ...]]:
    """Every outcome of one feature, `R*C` values row by row; all are equally likely."""
    values = range(num_values)
    if rule == DISTRIBUTE:
        outcomes = []
        for chosen in itertools.combinations(values, num_columns):
            for rows in itertools.product(itertools.permutations(chosen), repeat=num_rows):
                outcomes.append(tuple(itertools.chain(*rows)))
        return outcomes
    if rule in (ADDITION, SUBTRACTION):
        sign = 1 if rule == ADDITION else -1
        rows = [
            (*free, (free[0] + sign * sum(free[1:])) % num_values)
            for free in itertools.product(values, repeat=num_columns - 1)
        ]
    else:
        step = (0, 1, 2, -1, -2)[rule]
        rows = [tuple((start + step * c) % num_values for c in range(num_columns)) for start in values]
    return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(rows, repeat=num_rows)]


def enumerate_generator(config: SravenConfig, combinations: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Every grid the generator can draw, as a number in base V with the answer's digits last, and its probability."""
    shape, size = (config.num_rows, config.num_columns, config.num_features), config.num_features
    cells = math.prod(shape)
    assert config.num_values**cells < 2**62
    weight_of_cell = np.array([config.num_values ** (cells - 1 - place) for place in range(cells)]).reshape(shape)
    orders = list(itertools.permutations(range(size)))
    column_orders = (
        list(itertools.product(orders, repeat=config.num_columns))
        if config.permute_features
        else [(orders[0],) * config.num_columns]
    )
    keys, weights = [], []
    for combination in combinations:
        handed = list(itertools.permutations(combination)) if config.shuffle_rules else [combination]
        for rules in handed:
            grids = [
                np.array(all_grids(rule, *(config.num_values, config.num_rows, config.num_columns))).reshape(
                    -1, config.num_rows, config.num_columns
                )
                for rule in rules
            ]
            for columns in column_orders:
                key = np.zeros((), dtype=np.int64)
                for feature, grid in enumerate(grids):
                    places = [columns[c].index(feature) for c in range(config.num_columns)]
                    weight = np.stack([weight_of_cell[:, c, place] for c, place in enumerate(places)], axis=1)
                    key = key[..., None] + (grid * weight).sum((1, 2))
                keys.append(key.ravel())
                probability = 1 / (len(combinations) * len(handed) * len(column_orders) * key.size)
                weights.append(np.full(key.size, probability))
    distinct, place = np.unique(np.concatenate(keys), return_inverse=True)
    return distinct, np.bincount(place, weights=np.concatenate(weights))


TWO_FEATURES = list(itertools.combinations_with_replacement(range(8), 2))
SOME_PAIRS = TWO_FEATURES[::3]
REPEATED = [(0, 0, 1), (0, 1, 3), (2, 2, 2)]


@pytest.mark.parametrize(
    ("config", "combinations"),
    [
        (SravenConfig(2, 4, 2), TWO_FEATURES),
        (SravenConfig(2, 4, 2), SOME_PAIRS),
        (SravenConfig(2, 4, 2, permute_features=False), SOME_PAIRS),
        (SravenConfig(2, 4, 2, permute_features=False, shuffle_rules=True), SOME_PAIRS),
        (SravenConfig(1, 5, 3), [(rule,) for rule in range(8)]),
        (SravenConfig(1, 4, 2, 4), [(rule,) for rule in range(8)]),
        (SravenConfig(3, 4, 2), REPEATED),
        (SravenConfig(2, 3, 2), TWO_FEATURES),
    ],
    ids=["2 features", "a split", "unpermuted", "unpermuted shuffled", "3 rows", "4 columns", "3 features", "3 values"],
)
def test_ideal_answer_equals_bayes_rule_on_the_enumerated_generator(config, combinations):
    keys, weights = enumerate_generator(config, combinations)
    assert abs(weights.sum() - 1) < 1e-9
    num_answers = config.num_values**config.num_features
    given, starts = np.unique(keys // num_answers, return_index=True)
    evidence, best = np.add.reduceat(weights, starts), np.maximum.reduceat(weights, starts)
    ceiling = best.sum()
    # up to 4,000 of the possible puzzles, in proportion to how often they are drawn
    generator = np.random.default_rng(0)
    chosen = np.arange(len(given)) if len(given) <= 4000 else generator.choice(len(given), 4000, p=evidence)
    shape = (config.num_rows, config.num_columns, config.num_features)
    cells = math.prod(shape)
    digits = (given[chosen] * num_answers)[:, None] // config.num_values ** np.arange(cells)[::-1] % config.num_values
    panels = torch.from_numpy(digits.reshape(-1, *shape))
    permuted, shuffled = config.permute_features, config.shuffle_rules
    answer, probability = ideal_answer(panels, config.num_values, combinations, permuted=permuted, shuffled=shuffled)
    np.testing.assert_allclose(probability.numpy(), (best / evidence)[chosen], rtol=0, atol=1e-10)
    # its answer has that very probability
    powers = config.num_values ** np.arange(config.num_features)[::-1]
    answered = given[chosen] * num_answers + answer.numpy() @ powers
    place = np.searchsorted(keys, answered)
    assert (keys[place] == answered).all()
    np.testing.assert_allclose(weights[place] / evidence[chosen], probability.numpy(), rtol=0, atol=1e-10)
    if len(chosen) < len(given):
        assert abs(float(probability.mean()) - ceiling) < 4 * float(probability.std()) / math.sqrt(len(chosen))
    else:
        assert abs(float(probability.numpy() @ evidence) - ceiling) < 1e-10


def test_the_ideal_observer_is_calibrated():
    task = Sraven(PAPER, 0)
    for split in task.splits:
        batch = task.batch(split, 0, 6_000, stream="evaluation")
        answer, probability = task.ideal_answer(batch.latents["panels"], split)
        hit = (answer == batch.targets).all(-1).double()
        spread = math.sqrt(float((probability * (1 - probability)).sum())) / len(hit)
        assert abs(float(hit.mean() - probability.mean())) < 4 * spread
        unsure = probability < 0.9
        spread = math.sqrt(float((probability * (1 - probability))[unsure].sum())) / int(unsure.sum())
        assert abs(float(hit[unsure].mean() - probability[unsure].mean())) < 4 * spread
        # an unambiguous puzzle leaves no doubt, and an observer with wrong beliefs is right less often
        clear = ~task.ambiguous(batch.latents["panels"])
        torch.testing.assert_close(probability[clear], torch.ones(int(clear.sum()), dtype=torch.float64))
        assert hit[clear].all()
        agnostic = (task.ideal_answer(batch.latents["panels"], split, "all").answer == batch.targets).all(-1)
        assert float(agnostic.double().mean()) < float(hit.mean())


def test_puzzles_of_unknown_combinations_have_no_answer():
    panels = torch.tensor([[[[1]] * 3, [[2]] * 3, [[3]] * 3]])
    answer, probability = ideal_answer(panels, 8, [(ADDITION,)])
    assert answer.tolist() == [[-1]]
    assert probability.tolist() == [0.0]
    assert ideal_answer(panels, 8, [(CONSTANT,)]).answer.tolist() == [[3]]


def test_ceiling_of_the_papers_setting():
    """docs/sraven.md has the same figures from 51,200 puzzles."""
    task = Sraven(PAPER, 0)
    train = task.ceiling("train", 1000, batch_size=300)
    assert train["count"] == 1000
    assert train["accuracy"] == pytest.approx(0.934, abs=5 * train["standard_error"])
    assert train["hit_rate"] == pytest.approx(0.934, abs=5 * math.sqrt(0.934 * 0.066 / 1000))
    assert train["ambiguous"] == pytest.approx(0.245, abs=5 * math.sqrt(0.245 * 0.755 / 1000))
    agnostic = task.ceiling("held_out", 1000, knows="all")
    assert agnostic["accuracy"] == agnostic["hit_rate"]
    with pytest.raises(ConfigError, match="num_samples = 1"):
        task.ceiling("train", 1)


def test_ceiling_without_ambiguous_puzzles_is_1():
    ceiling = Sraven(replace(PAPER, reject_ambiguous=True), 0).ceiling("held_out", 256, batch_size=256)
    assert ceiling == {"accuracy": 1.0, "standard_error": 0.0, "hit_rate": 1.0, "ambiguous": 0.0, "count": 256}


# --- samples shared between streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_no_evaluation_sample_was_trained_on(seed):
    task = Sraven(replace(PAPER, validation_fraction=0.1), seed)
    for split in task.splits:
        assert overlap_rate(task, split, 200, 128, evaluation_batches=40) == Overlap(0, 5120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_no_evaluation_sample_was_trained_on_in_1000_batches(seed):
    task = Sraven(replace(PAPER, validation_fraction=0.1), seed)
    for split in task.splits:
        assert overlap_rate(task, split, 1000, 128, evaluation_batches=400) == Overlap(0, 51_200)


def test_overlap_of_a_tiny_setting_is_reported():
    task = Sraven(SravenConfig(num_features=1, num_values=4, permute_features=False), 0)
    overlap = overlap_rate(task, "train", 20, 128)
    assert overlap.total == 2560
    assert 0.5 < overlap.rate < 1
    # held-out rules share few grids with the trained ones: only those that obey both
    assert 0 < overlap_rate(task, "held_out", 20, 128).rate < overlap.rate


def test_the_code_in_the_documentation_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "sraven.md").read_text("utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 1
    exec(blocks[0], {})
    assert "('train', 'validation', 'held_out') {'train': 224" in capsys.readouterr().out


# --- other devices ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_puzzles_drawn_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    task = Sraven(PAPER, 0)
    batch = task.batch("held_out", 0, 2_000, stream="evaluation", device="cuda")
    again = task.batch("held_out", 0, 2_000, stream="evaluation", device="cuda")
    assert batch.inputs.is_cuda
    assert torch.equal(batch.inputs, again.inputs)
    latents = {name: value.cpu() for name, value in batch.latents.items()}
    assert_rules_hold(latents["panels"], latents["rules"], latents["permutations"], 8)
    assert {tuple(rules) for rules in latents["rules"].tolist()} <= set(task.combinations["held_out"])
    assert max(statistics(latents["panels"], latents["rules"], latents["permutations"]).values()) < 4
    panels = batch.latents["panels"]
    assert torch.equal(task.ambiguous(panels).cpu(), task.ambiguous(panels.cpu()))
    there, here = task.ideal_answer(panels, "held_out"), task.ideal_answer(panels.cpu(), "held_out")
    torch.testing.assert_close(there.probability.cpu(), here.probability, rtol=0, atol=1e-12)
    rejecting = Sraven(replace(PAPER, reject_ambiguous=True), 0)
    assert not task.ambiguous(rejecting.batch("train", 0, 512, device="cuda").latents["panels"]).any()
