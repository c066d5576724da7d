import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.errors import ConfigError
from hyla.tasks.base import overlap_rate
from hyla.tasks.hyperteacher import Hyperteacher, HyperteacherConfig

SMALL = {"num_modules": 6, "num_hot": 2, "point_dim": 4, "hidden_dims": (5,), "output_dim": 3, "num_points": 7}
ENCODINGS = ["identity", "orthogonal", "tokens", "invertible_nn", "interval_shuffle", "fewshot"]


def small(seed=0, **changes):
    return Hyperteacher(HyperteacherConfig(**SMALL | changes), seed)


def written_out(task, latent, point):
    """The teacher's answer to one point, by loops over modules and units."""
    teacher, x = task.teacher, point.double().tolist()
    z = [value / task.config.num_hot**0.5 for value in latent.double().tolist()]
    for weight, bias in zip(teacher.weights, teacher.biases, strict=True):
        weight, bias = weight.double(), bias.double()
        x = [
            max(
                0.0,
                sum(
                    z[m] * (bias[m, j].item() + sum(weight[m, i, j].item() * x[i] for i in range(len(x))))
                    for m in range(len(z))
                ),
            )
            for j in range(bias.shape[1])
        ]
    return [sum(teacher.readout[j, o].item() * x[j] for j in range(len(x))) for o in range(task.output_dim)]


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_dims": (5, 4), "bias": False}], ids=["one layer", "two layers, no bias"]
)
def test_targets_are_the_equation_written_out(changes):
    task = small(**changes)
    batch = task.batch("held_out", 3, 4, dtype=torch.float64)
    _, points = task.layout.unpack(batch.inputs)
    assert batch.targets.shape == (4, 7, 3)
    assert (points.abs() <= 1).all()
    assert points.min() < -0.5
    for b in range(2):
        for n in (0, 6):
            expected = written_out(task, batch.latents["task"][b], points[b, n])
            np.testing.assert_allclose(batch.targets[b, n], expected, atol=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_encoding_stands_before_the_points(encoding):
    task = small(encoding=encoding, num_examples=9)
    batch = task.batch("train", 0, 5)
    told, points = task.layout.unpack(batch.inputs)
    assert batch.inputs.shape == (5, task.input_dim)
    assert points.shape == (5, 7, 4)
    if encoding == "fewshot":
        assert told.shape == (5, 9, 7)
        answers = task.teacher.forward(batch.latents["task"], told[..., :4].contiguous())
        torch.testing.assert_close(told[..., 4:], answers)
        return
    assert torch.equal(told, task.encoding.encode(batch.latents["task"]))
    torch.testing.assert_close(task.encoding.decode(told).float(), batch.latents["task"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("values", "possible"), [("khot", {10}), ("discrete", set(range(5, 11)))])
def test_values_of_active_modules(values, possible):
    found = small(latents=values).batch("train", 0, 500).latents["task"]
    assert {round(10 * value, 4) for value in found[found > 0].tolist()} == possible


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), index=st.integers(0, 9))
def test_continuous_values_lie_between_half_and_one(seed, index):
    latents = small(seed, latents="continuous").batch("train", index, 64).latents["task"]
    active = latents[latents > 0]
    assert ((active > 0.5) & (active < 1)).all()
    assert ((latents > 0).sum(-1) <= 2).all()


def combinations_of(task, split, num_batches=20):
    latents = torch.cat([task.batch(split, i, 64, stream="evaluation").latents["task"] for i in range(num_batches)])
    return {tuple((row > 0).nonzero().flatten().tolist()) for row in latents}


def test_splits_never_share_a_combination_and_together_have_all():
    task = small(validation_fraction=0.3, validation_from="held_out", held_out_fraction=0.5)
    assert task.splits == ("train", "validation", "held_out")
    found = [combinations_of(task, split) for split in task.splits]
    assert len(set.union(*found)) == sum(map(len, found)) == 6 + 15
    assert len(found[0]) == 11


def test_splits_by_number_of_modules_go_beyond_those_trained():
    task = small(evaluate_hot=(2, 3, 6), held_out_fraction=0.5)
    assert task.splits == ("train", "held_out", "held_out_hot2", "held_out_hot3", "held_out_hot6")
    trained = combinations_of(task, "train")
    for count in (2, 3, 6):
        found = combinations_of(task, f"held_out_hot{count}")
        assert {len(combination) for combination in found} == {count}
        assert not found & trained
    assert len(combinations_of(task, "held_out_hot3")) == 20
    assert combinations_of(task, "held_out_hot6") == {(0, 1, 2, 3, 4, 5)}


def test_a_batch_is_a_function_of_seed_split_stream_and_index():
    first, again = small().batch("train", 5, 8), small().batch("train", 5, 8)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    different = [
        small(1).batch("train", 5, 8),
        small().batch("train", 6, 8),
        small().batch("train", 5, 8, stream="evaluation"),
        small().batch("held_out", 5, 8),
    ]
    assert all(not torch.equal(first.inputs, other.inputs) for other in different)


def test_no_sample_is_drawn_twice():
    task = small()
    for split in task.splits:
        assert overlap_rate(task, split, 50, 32).shared == 0


def test_seeds_of_the_split_and_of_the_teacher():
    weights = [
        small(**changes).teacher.readout for changes in ({}, {"split_seed": 1}, {"split_seed": 1, "teacher_seed": 0})
    ]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(small(seed=3).teacher.readout, weights[0]), "the run's seed leaves the teacher alone"


def test_r2_is_against_the_mean_of_each_task_and_unit():
    task = small()
    batch = task.batch("train", 0, 16)
    exact = task.scores(batch.targets, batch)
    assert torch.equal(exact["r2"], torch.ones(16))
    means = batch.targets.mean(1, keepdim=True).expand_as(batch.targets)
    torch.testing.assert_close(task.scores(means, batch)["r2"], torch.zeros(16), atol=1e-4, rtol=0)
    predictions = batch.targets + 0.1 * torch.randn(16, 7, 3)
    error = (predictions - batch.targets)[0].double().numpy() ** 2
    y = batch.targets[0].double().numpy()
    units = [1 - error[:, o].mean() / y[:, o].var() for o in range(3)]
    np.testing.assert_allclose(task.scores(predictions, batch)["r2"][0], np.mean(units), rtol=1e-4)
    np.testing.assert_allclose(task.scores(predictions, batch)["loss"].mean(), task.loss(predictions, batch), rtol=1e-5)


def test_constant_answers_are_no_division_by_zero():
    task = small()
    batch = task.batch("train", 0, 2)
    batch.targets[0] = 1.0
    batch.targets[1, :, 0] = 1.0
    predictions = batch.targets + 0.5
    scores = task.scores(predictions, batch)["r2"]
    y = batch.targets[1, :, 1:].double().numpy()
    assert scores[0] == 0
    np.testing.assert_allclose(scores[1], np.mean(1 - 0.25 / y.var(0)), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hot": 7}, "task.num_hot = 7 is not possible: at most num_modules = 6"),
        ({"hidden_dims": ()}, "task.hidden_dims"),
        ({"num_points": 1}, "task.num_points = 1 is not possible: at least 2"),
        ({"held_out_fraction": 1.0}, "task.held_out_fraction = 1.0"),
        ({"evaluate_hot": (9,)}, "each from 1 to num_modules = 6"),
        ({"evaluate_hot": (3, 3)}, "each only once"),
        ({"scale": -1.0}, "task.scale = -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text.replace("(", r"\(").replace(")", r"\)")):
        HyperteacherConfig(**SMALL | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"support": "connected", "num_hot": 3}, "num_hot"),
        ({"validation_fraction": 0.01}, "of 16 combinations 0 would be reserved"),
        ({"support": "connected", "evaluate_hot": (1,)}, "holds out combinations of 2, 3, 4, 5, 6 modules"),
        ({"held_out_fraction": 0.99}, "held_out_fraction"),
    ],
)
def test_supports_that_do_not_exist_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        small(**changes)
