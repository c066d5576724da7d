import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from golden_values import arrays
from hyla.errors import ConfigError
from hyla.tasks.teacher import TRUNCATED_STD, Teacher, draw_teacher

NUM_HOT = {"one_layer": 3, "two_layer": 2}


def golden_teacher(name):
    data = {key.removeprefix(f"{name}/"): value for key, value in arrays("hyperteacher").items()}
    layers = range(1 if name.startswith("one_layer") else 2)
    weights = tuple(torch.from_numpy(data[f"module_weight_{layer}"]) for layer in layers)
    biases = tuple(torch.from_numpy(data[f"module_bias_{layer}"]) for layer in layers)
    return Teacher(weights, biases, torch.from_numpy(data["readout"]), NUM_HOT[name.split("/")[0]])


@pytest.mark.parametrize("split", ["train", "ood"])
@pytest.mark.parametrize("values", ["khot", "discrete", "continuous"])
@pytest.mark.parametrize("depth", ["one_layer", "two_layer"])
def test_equals_the_public_teacher(depth, values, split):
    name = f"{depth}/{values}"
    teacher = golden_teacher(name)
    x, y, latents = (torch.from_numpy(arrays("hyperteacher")[f"{name}/{split}/{key}"]) for key in ("x", "y", "latents"))
    torch.testing.assert_close(teacher.forward(latents, x), y, atol=1e-5, rtol=0)
    assert (teacher.num_modules, teacher.point_dim, teacher.output_dim) == (len(latents[0]), len(x[0, 0]), len(y[0, 0]))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 1000), st.booleans())
def test_equals_the_definition(num_modules, hidden_dims, seed, bias):
    sizes = {"num_modules": num_modules, "num_hot": min(2, num_modules), "point_dim": 3, "output_dim": 2}
    teacher = draw_teacher(seed, **sizes, hidden_dims=tuple(hidden_dims), bias=bias).to(torch.float64)
    assert all(bool(beta.any()) is bias for beta in teacher.biases)
    rng = np.random.default_rng(seed)
    latents, points = rng.random((2, num_modules)), rng.uniform(-1, 1, (2, 3, 3))
    answers = teacher.forward(torch.from_numpy(latents), torch.from_numpy(points))
    for z, rows, answer in zip(latents, points, answers.numpy(), strict=True):
        for row, expected in zip(rows, answer, strict=True):
            hidden = row
            for theta, beta in zip(teacher.weights, teacher.biases, strict=True):
                total = sum(z[m] * (hidden @ theta[m].numpy() + beta[m].numpy()) for m in range(num_modules))
                hidden = np.maximum(total / math.sqrt(teacher.num_hot), 0)
            np.testing.assert_allclose(expected, hidden @ teacher.readout.numpy(), atol=1e-12)


def test_draws_are_those_of_the_paper():
    """Against scipy's truncated normal: Kolmogorov-Smirnov over 38,400 weights, and the exact variance."""
    teacher = draw_teacher(3, num_modules=20, point_dim=48, hidden_dims=(40, 32), output_dim=24)
    for weight, fan_in in (*zip(teacher.weights, (48, 40), strict=True), (teacher.readout, 32)):
        std = math.sqrt(math.sqrt(3) / fan_in)
        scaled = weight.double().flatten().numpy() / std * TRUNCATED_STD
        assert np.abs(scaled).max() <= 2 + 1e-6
        assert stats.kstest(scaled, stats.truncnorm(-2, 2).cdf).pvalue > 1e-3
        assert weight.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * weight.numel()))
    for bias in teacher.biases:
        assert stats.kstest(bias.double().flatten().numpy(), stats.uniform(0, 0.5).cdf).pvalue > 1e-3


def test_draws_depend_on_the_seed_and_not_on_later_sizes():
    base = draw_teacher(1, num_modules=4, num_hot=2, point_dim=3, hidden_dims=(5,), output_dim=2)
    again = draw_teacher(1, num_modules=4, num_hot=2, point_dim=3, hidden_dims=(5,), output_dim=2)
    other = draw_teacher(2, num_modules=4, num_hot=2, point_dim=3, hidden_dims=(5,), output_dim=2)
    more = draw_teacher(1, num_modules=7, num_hot=3, point_dim=3, hidden_dims=(5, 6), output_dim=2)
    assert torch.equal(base.weights[0], again.weights[0])
    assert torch.equal(base.readout, again.readout)
    assert not torch.equal(base.weights[0], other.weights[0])
    assert torch.equal(base.weights[0], more.weights[0][:4])
    assert torch.equal(base.biases[0], more.biases[0][:4])


@pytest.mark.usefixtures("unchecked")
def test_tensors_that_do_not_fit_are_refused():
    teacher = draw_teacher(0, num_modules=4, num_hot=2, point_dim=3, hidden_dims=(5, 6), output_dim=2)
    weights, biases, readout = teacher.weights, teacher.biases, teacher.readout
    for fields, message in (
        ((weights, biases, readout, 5), r"teacher.num_hot = 5 .* from 1 to the 4 modules"),
        ((weights, biases[:1], readout, 2), r"teacher.biases .* there are 2"),
        ((weights[::-1], biases[::-1], readout, 2), r"teacher.weights\[1\] = \(4, 3, 5\) .* \(4, 6, 5\)"),
        ((weights[:1], biases[:1], readout, 2), r"teacher.readout = \(6, 2\) .* width 5"),
        ((weights, (biases[0], biases[1][:3]), readout, 2), r"teacher.biases\[1\] = \(3, 6\) .* \(4, 6\)"),
        ((weights, biases, readout.double(), 2), r"one dtype"),
        (((), (), readout, 2), r"at least one hidden layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            Teacher(*fields)
    for fields in ({"num_modules": 0}, {"hidden_dims": (3, 0)}, {"scale": 0.0}, {"hidden_dims": ()}, {"num_hot": 17}):
        with pytest.raises(ConfigError, match=r"^teacher"):
            draw_teacher(0, **fields)
