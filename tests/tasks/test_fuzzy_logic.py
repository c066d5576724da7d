import hashlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_values import arrays
from hyla.errors import ConfigError
from hyla.tasks.base import overlap_rate
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig, evaluate_function, official_split, term_bits


@pytest.mark.parametrize("name", ["logic_4var_2term", "logic_5var_3term"])
def test_equals_the_public_functions(name):
    data = arrays("logic")
    points, values = torch.from_numpy(data[f"{name}/x"]), torch.from_numpy(data[f"{name}/y"])[..., 0]
    assert torch.equal(evaluate_function(points, torch.from_numpy(data[f"{name}/terms"])), values)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10_000))
def test_functions_equal_the_definition(num_variables, num_terms, seed):
    rng = np.random.default_rng(seed)
    points = rng.random((5, num_variables))
    terms = rng.integers(0, 2, (num_terms, num_variables))
    expected = [max(min(x if bit else 1 - x for x, bit in zip(p, t, strict=True)) for t in terms) for p in points]
    got = evaluate_function(torch.from_numpy(points), torch.from_numpy(terms))
    assert got.tolist() == expected


def test_batches_are_made_of_their_split():
    """Every sequence's function is recomputed by brute force from the term ids, and its ids are of the split."""
    for config in (LogicConfig(), LogicConfig(num_variables=3, num_terms=2, held_out_fraction=0.5, num_points=5)):
        task = FuzzyLogic(config, seed=3)
        table = term_bits(config.num_variables)
        for split in task.splits:
            batch = task.batch(split, 2, 64)
            allowed = {tuple(row) for row in task.combinations[split].tolist()}
            assert {tuple(row) for row in batch.latents["terms"].tolist()} <= allowed
            for i in range(4):
                terms = table[batch.latents["terms"][i]]
                for n, point in enumerate(batch.inputs[i, :, :-1]):
                    value = torch.where(terms.bool(), point, 1 - point).min(-1).values.max()
                    shown = batch.inputs[i, n, -1] if n < config.num_points - 1 else batch.targets[i, 0]
                    assert shown == value
            assert (batch.inputs[:, -1, -1] == 0).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 5), st.integers(1, 3), st.floats(0.1, 0.9), st.floats(0, 0.5), st.integers(0, 1000))
def test_splits_partition_the_combinations(num_variables, num_terms, held_out, validation, seed):
    fields = {"num_variables": num_variables, "num_terms": num_terms, "held_out_fraction": held_out}
    try:
        config = LogicConfig(**fields, validation_fraction=validation, split_seed=seed)
    except ConfigError as error:
        assert "empty split" in str(error) or "conjunctions" in str(error)
        return
    task = FuzzyLogic(config)
    known = set(combinations(range(config.num_known), num_terms))
    parts = [{tuple(row) for row in task.combinations[split].tolist()} for split in task.splits]
    for a, b in combinations(parts, 2):
        assert not a & b
    named = dict(zip(task.splits, parts, strict=True))
    unseen = named.pop("unseen_terms", set())
    assert set().union(*named.values()) == known
    assert all(min(row) >= config.num_known for row in unseen)
    assert len(named["held_out"]) == int(len(known) * held_out)


@pytest.mark.parametrize("split_seed", [3, "official-1"])
def test_validation_from_the_held_out_leaves_the_trained_combinations_alone(split_seed):
    """What the paper's grids are chosen on: never trained on, and no part of what is reported."""
    whole = FuzzyLogic(LogicConfig(split_seed=split_seed)).combinations
    config = LogicConfig(split_seed=split_seed, validation_from="held_out", validation_fraction=0.2)
    parts = FuzzyLogic(config).combinations
    assert torch.equal(parts["train"], whole["train"])
    assert torch.equal(torch.cat([parts["validation"], parts["held_out"]]), whole["held_out"])
    assert [len(parts[split]) for split in ("train", "validation", "held_out")] == [20, 9, 37]
    with pytest.raises(ConfigError, match=r"of 46 combinations 0 would be reserved"):
        replace(config, validation_fraction=0.01)


def test_sizes_of_the_papers_splits():
    """GEN-01: (4 variables, 2 terms) 33/33/6; (5 variables, 3 terms) 1012/1012/56."""
    for variables, terms, sizes in ((4, 2, (33, 33, 6)), (5, 3, (1012, 1012, 56))):
        task = FuzzyLogic(LogicConfig(num_variables=variables, num_terms=terms, held_out_fraction=0.5))
        assert tuple(len(task.combinations[s]) for s in ("train", "held_out", "unseen_terms")) == sizes


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("seed", ["0", "1", "2", "2024"])
def test_official_splits(fraction, seed):
    config = LogicConfig(held_out_fraction=fraction, split_seed=f"official-{seed}")
    task = FuzzyLogic(config)
    for split, rows in official_split(config).items():
        assert task.combinations[split].tolist() == rows
    assert len(task.combinations["train"]) + len(task.combinations["held_out"]) == 66


def test_the_held_out_set_depends_on_the_split_seed_alone():
    one, two = (FuzzyLogic(LogicConfig(split_seed=5), seed=seed) for seed in (0, 1))
    assert torch.equal(one.combinations["held_out"], two.combinations["held_out"])
    assert not torch.equal(one.batch("train", 0, 8).inputs, two.batch("train", 0, 8).inputs)
    other = FuzzyLogic(LogicConfig(split_seed=6))
    assert not torch.equal(one.combinations["held_out"], other.combinations["held_out"])


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_shared_between_streams(seed):
    """GEN-01: every sequence of the first 200 training batches and of every evaluation stream is different."""
    task = FuzzyLogic(LogicConfig(num_variables=3, num_points=4, held_out_fraction=0.5), seed=seed)
    seen = set()
    count = 0
    streams = [("train", "training", 200), *((split, "evaluation", 30) for split in task.splits)]
    for split, stream, batches in streams:
        for index in range(batches):
            rows = task.batch(split, index, 64, stream=stream).inputs.numpy()
            seen.update(hashlib.blake2b(row.tobytes()).digest() for row in rows)
            count += len(rows)
    assert len(seen) == count
    assert overlap_rate(task, "train", 20, 64).rate == 0.0


def test_r2_is_that_of_its_definition():
    task = FuzzyLogic(LogicConfig(num_points=6))
    batch = task.batch("held_out", 0, 9, dtype=torch.float64)
    predictions = torch.rand(9, 1, 1, dtype=torch.float64)
    for i in range(9):
        values = torch.cat([batch.inputs[i, :-1, -1], batch.targets[i]]).numpy()
        expected = 1 - (predictions[i].item() - values[-1]) ** 2 / np.var(values)
        assert task.scores(predictions, batch)["r2"][i].item() == pytest.approx(expected, rel=1e-12)
    exact = task.scores(batch.targets[:, None], batch)
    assert (exact["r2"] == 1).all()


def test_probe_inputs():
    query = FuzzyLogic(LogicConfig(probe="fixed_query"))
    a, b = query.batch("train", 0, 8).inputs, query.batch("held_out", 3, 8, stream="evaluation").inputs
    assert (a[:, -1] == b[0, -1]).all()
    assert not torch.equal(a[0, :-1], a[1, :-1])
    context = FuzzyLogic(LogicConfig(probe="fixed_context"))
    a, b = context.batch("train", 0, 8).inputs, context.batch("held_out", 3, 8).inputs
    assert (a[:, :-1, :-1] == b[0, :-1, :-1]).all()
    assert not torch.equal(a[0, -1], a[1, -1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_terms": 13}, r"task.num_terms = 13 .* 12 of the 16 conjunctions of 4 variables"),
        ({"num_variables": 13}, r"task.num_variables = 13 .* 1 to 12"),
        ({"num_points": 1}, r"task.num_points = 1"),
        ({"held_out_fraction": 1.0}, r"task.held_out_fraction = 1.0"),
        ({"held_out_fraction": 0.01}, r"task.held_out_fraction = 0.01 .* 0 would be held out, leaving an empty split"),
        ({"validation_fraction": 0.01}, r"task.validation_fraction = 0.01 .* empty split"),
        ({"num_variables": 6, "num_terms": 12}, r"task.num_terms = 12 .* too many to list"),
        ({"split_seed": "official-3"}, r"task.split_seed = 'official-3' .* official-2024"),
        ({"split_seed": "official-0", "held_out_fraction": 0.4}, r"no official set exists for .* fractions 0.3, 0.5"),
        ({"split_seed": "official-0", "num_variables": 5}, r"no official set exists for 5 variables"),
        ({"split_seed": 1.5}, r"task.split_seed = 1.5 .* whole number or text"),
        ({"num_points": True}, r"task.num_points = True"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=message):
        LogicConfig(**fields)
