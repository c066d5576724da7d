"""Supports: the public code's sets where it has them, definitions by brute force, graph libraries as oracles."""

from itertools import combinations
from math import comb
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from golden_values import index
from hyla.errors import ConfigError
from hyla.tasks import support as module
from hyla.tasks.base import Draws
from hyla.tasks.support import (
    SupportName,
    all_combinations,
    is_compositional,
    is_connected,
    make_support,
    multi_hot,
    usage_counts,
)

NAMES = get_args(SupportName)


def rows_of(multi_hots):
    """Rows of modules, filled up with -1, from rows of 0 and 1."""
    width = max(1, *(sum(row) for row in multi_hots))
    found = [[m for m, one in enumerate(row) if one] for row in multi_hots]
    return torch.tensor([row + [-1] * (width - len(row)) for row in found], dtype=torch.int16)


def sets(rows):
    return [frozenset(m for m in row if m >= 0) for row in rows.tolist()]


def total(num_modules, num_hot):
    return sum(comb(num_modules, size) for size in range(1, num_hot + 1))


def arguments(key):
    name, *rest = key.split(",")
    modules, hot, fraction = (part.split("=")[1] for part in rest)
    return name, int(modules), int(hot), float(fraction)


# --- against the public code ---


@pytest.mark.parametrize("key", [key for key, case in index("supports")["supports"].items() if "error" not in case])
def test_sizes_and_properties_are_those_of_the_public_code(key):
    expected = index("supports")["supports"][key]
    name, modules, hot, fraction = arguments(key)
    for seed in range(3):
        made = make_support(name, modules, hot, fraction, seed)
        assert (len(made.train), len(made.held_out)) == (expected["train"], expected["held_out"])
        assert is_compositional(made.train, modules) == expected["compositional"]
        assert is_connected(made.train, modules) == expected["connected"]
        usage, theirs = usage_counts(made.train, modules).tolist(), expected["usage"]
        if name in ("non_compositional", "minimal_first", "unpopular_modules"):
            assert usage == theirs
        elif name == "equal":
            assert max(usage) - min(usage) <= 1
            assert sum(usage) == pytest.approx(sum(theirs), rel=0.1)  # sizes are drawn at random
        elif name == "popular_modules":
            full = [m for m in range(modules) if theirs[m] == max(theirs)]
            assert [usage[m] for m in full] == [theirs[m] for m in full]
        if expected["deterministic_train"] is not None:
            assert set(sets(made.train)) == set(sets(rows_of(expected["deterministic_train"])))


def test_properties_of_sets_are_those_of_the_public_code():
    cases = index("supports")["connectivity"]
    assert len(cases) == 60
    for case in cases:
        rows, modules = rows_of(case["combinations"]), len(case["combinations"][0])
        assert is_compositional(rows, modules) == case["compositional"]
        assert is_connected(rows, modules) == case["connected"]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.lists(st.sets(st.integers(0, 8), max_size=4), max_size=7))
def test_connected_by_a_graph_library(modules, drawn):
    """scipy's components of the graph of modules and combinations, where ours is of modules alone."""
    sparse = pytest.importorskip("scipy.sparse")
    drawn = [{m for m in row if m < modules} for row in drawn] or [set()]
    hots = [[int(m in row) for m in range(modules)] for row in drawn]
    graph = np.zeros((modules + len(hots),) * 2)
    graph[modules:, :modules] = hots
    _, labels = sparse.csgraph.connected_components(sparse.csr_matrix(graph), directed=False)
    used = set().union(*drawn)
    connected = len(set(labels[:modules])) == 1 and len(used) == modules
    assert is_connected(rows_of(hots), modules) == connected
    assert usage_counts(rows_of(hots), modules).tolist() == np.sum(hots, 0).tolist()


# --- definitions ---


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(modules=st.integers(2, 9), hot=st.integers(1, 4), fraction=st.floats(0, 0.9), seed=st.integers(0, 1000))
@example(modules=8, hot=2, fraction=0.5, seed=0)
@example(modules=8, hot=4, fraction=0.7, seed=0)
def test_supports_keep_their_promises(name, modules, hot, fraction, seed):
    """A partition of all combinations (but for rings and halves), with the properties that the name stands for."""
    try:
        made = make_support(name, modules, hot, fraction, seed)
    except ConfigError as error:
        assert "is not possible" in str(error)
        return
    train, held_out = sets(made.train), sets(made.held_out)
    every = {frozenset(c) for size in range(1, hot + 1) for c in combinations(range(modules), size)}
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)
    usage = [sum(m in row for row in train) for m in range(modules)]
    if name in ("connected", "disconnected"):
        assert set(train) | set(held_out) <= every
    else:
        assert set(train) | set(held_out) == every
    assert is_connected(made.train, modules) == (
        name not in ("disconnected", "pseudo_random_disconnected", "non_compositional")
    )
    assert (min(usage) > 0) == (name != "non_compositional")
    if name in ("random", "equal", "pseudo_random_disconnected"):
        assert len(held_out) == int(len(every) * fraction)
    if name in ("popular_modules", "minimal_first", "unpopular_modules"):
        assert len(train) == int(len(every) * (1 - fraction))
    if name == "equal":
        assert max(usage) - min(usage) <= 1
    if name == "popular_modules":
        # some modules are in all of their combinations, and each that is trained on is theirs or of one module more
        full = [m for m in range(modules) if all(c in train for c in every if m in c)]
        assert full == list(range(len(full)))
        assert all(row & set(range(len(full) + 1)) for row in train)
    if name == "pseudo_random_disconnected":
        divided = [n for n in range(1, modules // 2 + 1) if all(max(row) < n or min(row) >= n for row in train)]
        assert divided
    again = make_support(name, modules, hot, fraction, seed)
    assert torch.equal(again.train, made.train)
    assert torch.equal(again.held_out, made.held_out)


@pytest.mark.parametrize("modules", [6, 8, 10, 16])
def test_rings_and_halves_hold_out_the_same(modules):
    one, two = (make_support(name, modules, 2) for name in ("connected", "disconnected"))
    near = {frozenset({m, (m + step) % modules}) for m in range(modules) for step in (0, 1, 2)}
    half = modules // 2
    apart = {frozenset({a, b}) for a in range(modules) for b in range(modules) if (a < half) == (b < half)}
    assert (set(sets(one.train)), set(sets(two.train))) == (near, apart)
    every = set(sets(torch.from_numpy(all_combinations(modules, 2))))
    assert set(sets(one.held_out)) == set(sets(two.held_out)) == every - near - apart
    assert len(one.held_out)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("random_constant", 522),
        ("random_linear", 652),
        ("random_quadratic", 815),
        ("random_linear_pure", 20),
        ("random_linear_modules", 160),
        ("random_linear_modules_hot", 480),
        ("random_quadratic_modules", 400),
        ("random_quadratic_modules_hot", 1200),
    ],
)
def test_sizes_that_are_the_supports_own(name, expected):
    """M = 20, K = 3; 0.75 * (16 + 120 + 560) = 522."""
    made = make_support(name, 20, 3)
    assert len(made.train) == expected
    assert len(made.held_out) == 1350 - expected
    assert is_connected(made.train, 20)


@pytest.mark.parametrize("name", ["random", "equal", "popular_modules"])
@pytest.mark.parametrize(("modules", "hot"), [(12, 2), (13, 4), (9, 3), (20, 2)])
def test_as_few_as_can_connect_all_modules(name, modules, hot):
    """Random draws hardly ever do; the smallest possible numbers, the next, and the error below."""
    fewest = -(-(modules - 1) // (hot - 1))
    of = total(modules, hot)
    for count in (fewest, fewest + 1, fewest + 3):
        for seed in range(3):
            # half a combination above the number: popular_modules rounds the number held out up, the others down
            made = make_support(name, modules, hot, (of - count + 0.5 - (name == "popular_modules")) / of, seed)
            assert len(made.train) == count
            assert is_connected(made.train, modules)
            usage = usage_counts(made.train, modules)
            assert name != "equal" or usage.max() - usage.min() <= 1
    with pytest.raises(ConfigError, match=rf"needs {fewest} or more of {of} .* to connect {modules} modules"):
        make_support(name, modules, hot, (of - fewest + 1.5) / of)


def test_joining_alone_connects_what_no_draw_did(monkeypatch):
    monkeypatch.setattr(module, "MAX_TRIES", 1)
    for seed in range(60):
        modules, hot = 6 + seed % 9, 2 + seed % 3
        of = total(modules, hot)
        count = min(of - 1, -(-(modules - 1) // (hot - 1)) + seed % 7)
        made = make_support("equal", modules, hot, (of - count + 0.5) / of, seed)
        usage = usage_counts(made.train, modules)
        assert is_connected(made.train, modules)
        assert usage.max() - usage.min() <= 1
        assert len(set(sets(made.train))) == count


def test_random_supports_are_uniform_given_what_they_promise():
    """M = 3, K = 2, three trained: the 20 sets less those not connected, each as often as the others."""
    counts = {}
    for seed in range(1000):
        train = frozenset(sets(make_support("random", 3, 2, 0.5, seed).train))
        counts[train] = counts.get(train, 0) + 1
    pairs = [frozenset(pair) for pair in combinations(range(3), 2)]
    possible = [
        s for s in map(frozenset, combinations(sets(torch.from_numpy(all_combinations(3, 2))), 3))
        if sum(pair in s for pair in pairs) >= 2
    ]  # fmt: skip
    assert set(counts) == set(possible)
    expected = 1000 / len(possible)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 30  # 9 degrees of freedom: p = 0.0004


def test_lists_are_in_random_order():
    """The first rows are a random part: half of them hold about half of the single modules."""
    made = make_support("minimal_first", 24, 3, 0.5)
    for rows in (made.train, made.held_out):
        first = rows[: len(rows) // 2]
        usage = usage_counts(first, 24).float() / usage_counts(rows, 24).clamp(min=1)
        assert usage[:12].mean() == pytest.approx(0.5, abs=0.05)


def test_large_sets_in_little_memory():
    made = make_support("equal", 32, 5, 0.25)
    assert len(made.train) + len(made.held_out) == 242_824
    usage = usage_counts(made.train, 32)
    assert usage.max() - usage.min() <= 1
    assert made.train.dtype == torch.int16
    assert is_connected(made.train, 32)


# --- rows ---


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(1, 4))
def test_all_combinations_and_their_identities(modules, hot):
    assume(hot <= modules)
    rows = all_combinations(modules, hot)
    wanted = [c for size in range(1, hot + 1) for c in combinations(range(modules), size)]
    assert [tuple(m for m in row if m >= 0) for row in rows.tolist()] == wanted
    shuffled = np.random.default_rng(0).permuted(rows, axis=1)
    assert sorted(module._identity(shuffled, modules).tolist()) == list(range(len(rows)))
    assert (module._identity(shuffled, modules) == module._identity(rows, modules)).all()


def test_multi_hot():
    rows = torch.tensor([[2, -1, -1], [0, 1, 3], [-1, -1, -1]], dtype=torch.int16)
    assert multi_hot(rows, 4).tolist() == [[0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]
    assert multi_hot(rows[None], 4, torch.float64).dtype == torch.float64


def test_held_out_combinations_of_a_size():
    made = make_support("random", 8, 3, 0.5, seed=1)
    assert made.held_out_sizes == tuple(range(1, 9))
    for size in (1, 2, 3):
        rows = made.held_out_with(size)
        assert set(sets(rows)) == {row for row in sets(made.held_out) if len(row) == size}
        drawn = made.draw_held_out(Draws(0, "k", size), 400, size)
        assert set(sets(drawn)) == set(sets(rows))
    for size in (4, 7, 8):
        drawn = made.draw_held_out(Draws(0, "k", size), 3000, size)
        assert drawn.shape == (3000, size)
        assert all(len(row) == size for row in sets(drawn))
        assert usage_counts(drawn, 8).tolist() == pytest.approx([3000 * size / 8] * 8, rel=0.1)


@pytest.mark.usefixtures("unchecked")
def test_sizes_that_are_never_held_out_are_refused():
    made = make_support("connected", 8, 2)
    for size in (0, 1, 9):
        message = rf"num_active = {size} is not possible: .* holds out combinations of 2, 3, 4, 5, 6, 7, 8 modules"
        with pytest.raises(ConfigError, match=message):
            made.draw_held_out(Draws(0), 4, size)
    with pytest.raises(ConfigError, match=r"num_active = 3 .* draw_held_out"):
        made.held_out_with(3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("rondom", 8, 2), r"task.support = 'rondom' .* one of random, equal"),
        (("random", 1, 1), r"task.num_modules = 1 .* from 2"),
        (("random", 4, 5), r"task.num_hot = 5 .* 1 to num_modules = 4"),
        (("random", 4, 1), r"task.num_hot = 1 .* trained on together, so 2"),
        (
            ("random", 40, 8),
            r"task.num_hot = 8 .* 100,\d+,\d+ combinations of up to 8 of 40 modules; at most 5,000,000",
        ),
        (("random", 8, 2, 1.0), r"task.held_out_fraction = 1.0"),
        (("random", 8, 2, 0.01), r"of 36 combinations none would be held out, leaving an empty split"),
        (("random", 8, 2, 0.9), r"needs 7 or more of 36 .* to connect 8 modules, and would have 4; at most 0.805"),
        (("minimal_first", 8, 2, 0.9), r"needs 8 or more of 36 .* one for each module, .* at most 0.777"),
        (("connected", 8, 3), r"task.num_hot = 3 .* made of pairs, so 2"),
        (("disconnected", 7, 2), r"task.num_modules = 7 .* an even number from 6"),
        (("pseudo_random_disconnected", 8, 3, 0.25), r"28 of 92 combinations join module 0 .* from 0.305"),
        (("random_constant", 12, 3), r"train on 522 combinations, and there are 298, .* at least 15 modules"),
        (("random_quadratic_modules", 12, 2), r"train on 144 combinations, .* more modules active at once"),
    ],
)
def test_what_is_impossible_is_refused_with_what_is_possible(given, message):
    with pytest.raises(ConfigError, match=message):
        make_support(*given)


def test_the_fractions_that_messages_name_are_possible():
    assert len(make_support("random", 8, 2, 0.805).train) >= 7
    assert len(make_support("minimal_first", 8, 2, 0.777).train) == 8
    made = make_support("pseudo_random_disconnected", 8, 3, 0.305)
    assert not is_connected(made.train, 8)
    assert len(make_support("random_constant", 15, 3).held_out) == 53
