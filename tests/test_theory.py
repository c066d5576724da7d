"""The construction against the teacher it stands for, and its size against what is proven."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hyla.errors import ConfigError
from hyla.tasks.teacher import Teacher, draw_teacher
from hyla.theory import approximate, memorised_hidden, num_hidden

ROUNDING = 1e-11  # bounds hold in exact arithmetic; outputs here are below 100
TEACHERS = {
    "one_layer": draw_teacher(0, num_modules=8, num_hot=3, point_dim=5, hidden_dims=(6,), output_dim=4),
    "two_layers": draw_teacher(1, num_modules=6, num_hot=2, point_dim=4, hidden_dims=(7, 5), output_dim=3),
    "no_bias": draw_teacher(2, num_modules=5, num_hot=3, point_dim=3, hidden_dims=(4, 5), output_dim=2, bias=False),
    "three_layers": draw_teacher(3, num_modules=4, num_hot=4, point_dim=2, hidden_dims=(4, 3, 4), output_dim=1),
}
TEACHERS = {name: teacher.to(torch.float64) for name, teacher in TEACHERS.items()}


def inputs(teacher, smallest, num_tasks=200, num_points=20, seed=0):
    """Latents and points inside the domain and at its corners."""
    rng = np.random.default_rng(seed)
    latents = np.zeros((num_tasks, teacher.num_modules))
    for i, row in enumerate(latents):
        active = rng.choice(teacher.num_modules, rng.integers(0, teacher.num_hot + 1), replace=False)
        values = rng.uniform(smallest, 1, len(active))
        corners = rng.choice([smallest, (1 + smallest) / 2, 1], len(active))
        row[active] = values if i % 2 else corners
    points = rng.uniform(-1, 1, (num_tasks, num_points, teacher.point_dim))
    points[:, : num_points // 3] = np.sign(points[:, : num_points // 3])
    return torch.from_numpy(latents), torch.from_numpy(points)


def largest_error(teacher, approximation, latents, points):
    with torch.no_grad():
        return (approximation.forward(latents, points) - teacher.forward(latents, points)).abs().max().item()


@pytest.mark.parametrize("smallest", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", TEACHERS)
def test_no_output_is_further_off_than_the_bound(name, smallest):
    teacher = TEACHERS[name]
    latents, points = inputs(teacher, smallest)
    for error in (3.0, 0.1):
        approximation = approximate(teacher, error, smallest=smallest)
        assert approximation.bound <= error * (1 + 1e-12)
        measured = largest_error(teacher, approximation, latents, points)
        assert measured <= approximation.bound + ROUNDING
        assert measured >= approximation.bound / 30  # the bound says something


@pytest.mark.parametrize("smallest", [0.0, 0.5, 0.8])
def test_the_bound_holds_where_inputs_are_chosen_to_break_it(smallest):
    """Coordinates are changed one after another, each to whichever of 9 values makes the error largest."""
    teacher = TEACHERS["one_layer"]
    approximation = approximate(teacher, 0.3, smallest=smallest)
    z, x = inputs(teacher, smallest, 40, 1, seed=1)
    with torch.no_grad():
        for _ in range(2):
            for place in range(teacher.num_modules + teacher.point_dim):
                found = []
                for fraction in torch.linspace(0, 1, 9, dtype=torch.float64):
                    new_z, new_x = z.clone(), x.clone()
                    if place < teacher.num_modules:
                        new_z[:, place] = torch.where(z[:, place] > 0, smallest + (1 - smallest) * fraction, 0.0)
                    else:
                        new_x[:, :, place - teacher.num_modules] = 2 * fraction - 1
                    wrong = approximation.forward(new_z, new_x) - teacher.forward(new_z, new_x)
                    found.append((wrong.abs().amax((1, 2)), new_z, new_x))
                best = torch.stack([wrong for wrong, _, _ in found]).argmax(0)
                rows = torch.arange(len(z))
                z = torch.stack([new_z for _, new_z, _ in found])[best, rows]
                x = torch.stack([new_x for _, _, new_x in found])[best, rows]
    worst = largest_error(teacher, approximation, z, x)
    assert approximation.bound / 5 < worst <= approximation.bound + ROUNDING


@pytest.mark.parametrize("smallest", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("error", [0.3, 0.02, 0.003])
def test_the_bound_of_one_product_is_reached(smallest, error):
    """A teacher that only multiplies: z * 1.5 x, lifted above 0 by its bias; all of the domain on a fine grid."""
    teacher = Teacher((torch.full((1, 1, 1), 1.5),), (torch.full((1, 1), 2.0),), torch.ones(1, 1), 1).to(torch.float64)
    approximation = approximate(teacher, error, smallest=smallest)
    z, x = torch.linspace(smallest, 1, 161, dtype=torch.float64), torch.linspace(-1, 1, 161, dtype=torch.float64)
    measured = largest_error(teacher, approximation, z[:, None], x[None, :, None].expand(161, -1, -1))
    assert 0.9 * approximation.bound < measured <= approximation.bound + ROUNDING


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([0.0, 0.5, 0.7, 0.95]), st.floats(0.001, 0.5), st.floats(0, 1), st.floats(-1, 1))
def test_a_product_is_a_difference_of_interpolated_squares(smallest, error, fraction, x):
    """The network of one product equals numpy's interpolation of g(s) = c s / 2 + r s^2 / 4 at equally spaced knots."""
    teacher = Teacher((torch.ones(1, 1, 1),), (torch.full((1, 1), 2.0),), torch.ones(1, 1), 1).to(torch.float64)
    approximation = approximate(teacher, error, smallest=smallest)
    segments = (approximation.num_hidden - 1 - 2 + 1) // 2
    centre, half = (1 + smallest) / 2, (1 - smallest) / 2
    knots = np.linspace(-2, 2, segments + 1)
    heights = centre * knots / 2 + half * knots**2 / 4
    z = smallest + (1 - smallest) * fraction
    plus, minus = (np.interp((z - centre) / half + v, knots, heights) for v in (x, -x))
    got = approximation.network(torch.tensor([z, x], dtype=torch.float64)).item()
    assert got == pytest.approx(2 * z + plus - minus, abs=1e-7)  # forms are scaled by 1 + 1e-9


@pytest.mark.parametrize("name", TEACHERS)
def test_modules_that_are_not_active_add_exactly_nothing(name):
    teacher = TEACHERS[name]
    _, points = inputs(teacher, 0.5)
    latents = torch.zeros(len(points), teacher.num_modules, dtype=torch.float64)
    gated = approximate(teacher, 0.1, smallest=0.5)
    assert (gated.forward(latents, points) == 0).all()
    assert (approximate(teacher, 0.1, smallest=0.0).forward(latents, points).abs() < ROUNDING).all()
    latents[:, 0] = 0.7
    first = gated.network[0].weight[:, 0] != 0  # the neurons that see module 0
    active = torch.relu(gated.network[0](torch.cat([latents[:, None].expand(-1, points.shape[1], -1), points], -1)))
    assert (active[..., ~first] == 0).all()
    assert (active[..., first] > 0).any()


@pytest.mark.parametrize("name", TEACHERS)
def test_latents_of_zero_and_one_are_exact_with_the_fewest_neurons(name):
    teacher = TEACHERS[name]
    approximation = approximate(teacher, 0.1, smallest=1.0)
    assert approximation.bound == 0
    assert largest_error(teacher, approximation, *inputs(teacher, 1.0)) < ROUNDING
    modules, hidden = teacher.num_modules, teacher.hidden_dims
    carried = modules * (len(hidden) - 1)  # latents that later layers read
    assert approximation.num_hidden == sum(modules * (width + 2) + width for width in hidden) + carried


def repeated(teacher, times):
    """The teacher with `times` copies of each module."""
    weights = tuple(weight.repeat(times, 1, 1) for weight in teacher.weights)
    return replace(teacher, weights=weights, biases=tuple(bias.repeat(times, 1) for bias in teacher.biases))


@pytest.mark.parametrize("smallest", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", TEACHERS)
def test_neurons_are_affine_in_the_number_of_modules(name, smallest):
    """From K copies of each module on: then the worst K modules, which bound the range of later layers, stay the same."""
    teacher = TEACHERS[name]
    times = range(teacher.num_hot, teacher.num_hot + 6)
    counts = [num_hidden(repeated(teacher, copies), 0.1, smallest=smallest) for copies in times]
    steps = np.diff(counts)
    assert (steps == steps[0]).all()
    constant = counts[0] - times[0] * steps[0]
    assert constant == sum(teacher.hidden_dims)  # the teacher's own units; everything else belongs to a module


@settings(deadline=None, max_examples=10)
@given(st.integers(3, 9), st.integers(1, 6), st.floats(0.01, 1), st.integers(0, 100))
def test_each_module_brings_its_own_neurons(num_modules, others, error, seed):
    """Of one hidden layer: the sets of modules A and B need together what they need apart, but for the hidden units."""
    both = draw_teacher(seed, num_modules=num_modules + others, num_hot=1, point_dim=4, hidden_dims=(5,), output_dim=3)
    parts = [
        replace(both, weights=(both.weights[0][part],), biases=(both.biases[0][part],))
        for part in (slice(num_modules), slice(num_modules, None))
    ]
    assert num_hidden(both, error) == sum(num_hidden(part, error) for part in parts) - 5


def test_further_modules_change_neither_the_answers_nor_the_error():
    teacher = TEACHERS["one_layer"]
    latents, points = inputs(teacher, 0.5, num_tasks=50)
    small = approximate(teacher, 0.1)
    large = approximate(repeated(teacher, 16), 0.1)
    padded = torch.cat([latents, latents.new_zeros(50, 15 * teacher.num_modules)], 1)
    torch.testing.assert_close(large.forward(padded, points), small.forward(latents, points), atol=1e-12, rtol=0)
    assert 0.7 * 0.1 < small.bound <= large.bound <= 0.1 + ROUNDING


def test_neurons_grow_with_the_root_of_the_precision():
    counts = [num_hidden(TEACHERS["two_layers"], error) for error in (0.1, 0.1 / 4, 0.1 / 16, 0.1 / 64)]
    ratios = np.array(counts[1:]) / counts[:-1]
    assert (abs(ratios - 2) < 0.1).all()


def test_it_is_a_plain_network_of_the_announced_size():
    for name, teacher in TEACHERS.items():
        state = torch.get_rng_state()
        approximation = approximate(teacher.to(torch.float32), 0.2)
        assert torch.equal(torch.get_rng_state(), state)
        kinds = [type(module) for module in approximation.network]
        assert kinds == [nn.Linear, nn.ReLU] * (2 * len(teacher.hidden_dims)) + [nn.Linear], name
        widths = [module.out_features for module in approximation.network if isinstance(module, nn.Linear)]
        assert approximation.num_hidden == sum(widths[:-1]) == num_hidden(teacher.to(torch.float32), 0.2)
        z, x = inputs(teacher, 0.5, 3, 2)
        assert torch.equal(approximation.network(torch.cat([z, x[:, 0]], -1)), approximation.forward(z, x[:, :1])[:, 0])


def test_parts_without_effect_do_no_harm():
    teacher = TEACHERS["two_layers"]
    weights = (torch.zeros_like(teacher.weights[0]), teacher.weights[1] * 1e6)
    silent = replace(teacher, weights=weights, biases=tuple(-bias for bias in teacher.biases))
    for dead in (silent, replace(teacher, readout=torch.zeros_like(teacher.readout))):
        approximation = approximate(dead, 1.0)
        assert largest_error(dead, approximation, *inputs(dead, 0.5)) <= approximation.bound


def test_memorising_counts_combinations():
    for num_modules, num_hot in ((1, 1), (5, 2), (6, 3), (7, 7)):
        sets = [s for k in range(1, num_hot + 1) for s in combinations(range(num_modules), k)]
        assert memorised_hidden(num_modules, num_hot, (3, 2)) == 5 * len(sets)
    assert memorised_hidden(20, 20, (1,)) == 2**20 - 1


@pytest.mark.parametrize("smallest", [0.0, 0.5])
def test_networks_that_do_not_fit_are_refused_with_what_would(smallest):
    teacher = TEACHERS["two_layers"]
    approximation = approximate(teacher, 0.05, smallest=smallest)
    size = sum(parameter.nbytes for parameter in approximation.network.parameters())
    assert approximate(teacher, 0.05, smallest=smallest, max_bytes=size).num_hidden == approximation.num_hidden
    message = rf"error = 0.05 .* {approximation.num_hidden:,} hidden .* {size:,} bytes, .*; error = (.*) fits"
    with pytest.raises(ConfigError, match=message) as raised:
        approximate(teacher, 0.05, smallest=smallest, max_bytes=size - 1)
    fitting = float(str(raised.value).split("; error = ")[1].split()[0])
    assert 0.05 < approximate(teacher, fitting, smallest=smallest, max_bytes=size - 1).bound <= fitting
    with pytest.raises(ConfigError, match=r"; no error does"):
        approximate(teacher, 0.05, smallest=smallest, max_bytes=100)


def test_impossible_settings_are_refused():
    teacher = TEACHERS["one_layer"]
    for error in (0.0, -1.0, 1e-12, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=r"error = .* at least 1e-9"):
            approximate(teacher, error)
    for smallest in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=r"smallest = .* from 0 to 1"):
            approximate(teacher, 0.1, smallest=smallest)
    with pytest.raises(ConfigError, match=r"num_hot = 5 .* 4 modules"):
        memorised_hidden(4, 5, (1,))
    with pytest.raises(ConfigError, match=r"must be finite"):
        approximate(replace(teacher, readout=teacher.readout * float("nan")), 0.1)


def test_the_guide_runs_and_its_numbers_are_right():
    guide = (Path(__file__).parents[1] / "docs" / "theory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    names = {}
    exec(compile(block, "docs/theory.md", "exec"), names)
    assert round(names["approximation"].bound, 3) == 0.098
    stated = re.findall(r"^(\S.*)  # ([\d,]+[\d])\b(?!\.)", block, flags=re.M)
    assert len(stated) == 5
    for expression, number in stated:
        assert eval(expression, names) == int(number.replace(",", "")), expression
