"""Statistics against hand-computed values, brute force, tables of books, and their own coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.report.statistics import (
    BOUNDS,
    MAX_EXACT,
    bootstrap_interval,
    distinguishable,
    paired_difference,
    summary,
    t_probability,
    t_quantile,
    verdict,
)

scores = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 3))
several = st.lists(scores, min_size=2, max_size=5)


def test_by_hand():
    # mean 0.3; squared deviations 0.04 + 0.01 + 0.09 = 0.14, over n - 1 = 2 gives 0.07
    numbers = summary([0.1, None, 0.2, 0.6])
    error = math.sqrt(0.07 / 3)
    assert numbers.count == 3
    assert numbers.mean == pytest.approx(0.3)
    assert numbers.standard_deviation == pytest.approx(math.sqrt(0.07))
    assert numbers.standard_error == pytest.approx(error)
    assert numbers.interval == pytest.approx((0.3 - 4.302653 * error, 0.3 + 4.302653 * error))
    # 27 resamples: the least mean 0.1 and the greatest 0.6 occur once each, more often than 0.025 * 27 = 0.675 allows
    assert numbers.bootstrap == pytest.approx((0.1, 0.6))


@pytest.mark.parametrize(("values", "count", "mean"), [([], 0, None), ([None], 0, None), ([0.5], 1, 0.5)])
def test_one_value_has_no_spread(values, count, mean):
    numbers = summary(values)
    assert (numbers.count, numbers.mean) == (count, mean)
    assert [numbers.standard_deviation, numbers.standard_error, numbers.interval, numbers.bootstrap] == [None] * 4


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(wrong):
    with pytest.raises(ValueError, match="must be finite"):
        summary([0.5, wrong])


def test_intervals_stay_within_the_range_of_the_score():
    low, high = summary([0.1, 0.9], BOUNDS["accuracy"]).interval
    assert (low, high) == (0.0, 1.0)
    low, high = summary([0.1, 0.9], BOUNDS["r2"]).interval
    assert (low, high) == (pytest.approx(0.5 - 12.7062 * 0.4), 1.0)


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045), (30, 2.042), (120, 1.980)],
)
def test_t_as_in_the_tables_of_books(degrees, t):
    assert t_quantile(degrees) == pytest.approx(t, abs=5e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("t", [0.1, 1.0, 3.0])
def test_t_is_the_integral_of_its_density(degrees, t):
    x = np.linspace(-t, t, 20_001)
    scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert t_probability(t, degrees) == pytest.approx(np.trapezoid(density, x), abs=1e-7)


@settings(deadline=None)
@given(several)
def test_bootstrap_is_that_of_all_resamples(values):
    means = sorted(math.fsum(resample) / len(values) for resample in itertools.product(values, repeat=len(values)))
    outside = math.floor(0.025 * len(means))  # as many may lie strictly outside at either end
    expected = means[outside], means[len(means) - 1 - outside]
    assert bootstrap_interval(values) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("count", [MAX_EXACT, MAX_EXACT + 1, 30])
def test_bootstrap_is_the_same_every_time(count):
    values = np.random.default_rng(count).standard_normal(count).tolist()
    low, high = bootstrap_interval(values)
    assert bootstrap_interval(values) == (low, high)
    error = np.std(values) / math.sqrt(count)
    assert (low, high) == pytest.approx(
        (np.mean(values) - 1.96 * error, np.mean(values) + 1.96 * error), abs=0.3 * error
    )


@settings(deadline=None)
@given(several, st.randoms(use_true_random=False), scores, st.floats(0.1, 10))
def test_summary_follows_shifts_scales_and_any_order(values, random, shift, scale):
    before = summary(values)
    moved = [shift + scale * value for value in values]
    random.shuffle(moved)
    after = summary(moved)
    assert after.mean == pytest.approx(shift + scale * before.mean, abs=1e-8)
    assert after.standard_error == pytest.approx(scale * before.standard_error, abs=1e-8)
    for name in ("interval", "bootstrap"):
        expected = [shift + scale * end for end in getattr(before, name)]
        assert getattr(after, name) == pytest.approx(expected, abs=1e-7)


@settings(deadline=None)
@given(several)
def test_intervals_hold_the_mean(values):
    numbers = summary(values)
    slack = 1e-9
    for low, high in (numbers.interval, numbers.bootstrap):
        assert low - slack <= numbers.mean <= high + slack
    assert min(values) - slack <= numbers.bootstrap[0] <= numbers.bootstrap[1] <= max(values) + slack


@pytest.mark.parametrize(("count", "of_bootstrap"), [(2, 0.50), (3, 0.75)])
def test_coverage_is_what_the_report_says(count, of_bootstrap):
    """Of 4,000 samples from a normal distribution; three standard errors of a share are at most 0.024."""
    samples = np.random.default_rng(0).standard_normal((4_000, count)).tolist()
    found = [summary(sample) for sample in samples]
    holds = [np.mean([low <= 0 <= high for low, high in ends])
             for ends in ([n.interval for n in found], [n.bootstrap for n in found])]  # fmt: skip
    assert holds[0] == pytest.approx(0.95, abs=0.011)
    assert holds[1] == pytest.approx(of_bootstrap, abs=0.024)


def test_paired_differences_by_hand():
    difference = paired_difference({0: 0.5, 1: 0.7, 2: 0.9, 4: None}, {0: 0.4, 1: 0.4, 3: 0.1, 4: 0.2})
    # seeds 0 and 1: 0.1 and 0.3
    assert (difference.count, difference.mean) == (2, pytest.approx(0.2))
    assert difference.standard_error == pytest.approx(0.1)
    assert difference.interval == pytest.approx((0.2 - 1.27062, 0.2 + 1.27062), abs=1e-5)
    assert paired_difference({0: 0.5}, {1: 0.4}).mean is None


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 6), scores, min_size=2), st.dictionaries(st.integers(0, 6), scores, min_size=2))
def test_paired_differences_turn_round(mine, theirs):
    one, other = paired_difference(mine, theirs), paired_difference(theirs, mine)
    assert one.count == other.count == len(set(mine) & set(theirs))
    if one.interval:
        assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))


def test_a_common_shift_of_seeds_leaves_paired_differences_alone():
    """What pairs are for: seeds have different held-out sets, some of them harder for every mechanism."""
    shifts = [0.0, 0.3, -0.2]
    mine = {seed: 0.5 + shift for seed, shift in enumerate(shifts)}
    theirs = {seed: 0.4 + shift for seed, shift in enumerate(shifts)}
    assert paired_difference(mine, theirs).interval == pytest.approx((0.1, 0.1))
    assert not distinguishable(summary(list(mine.values())).interval, summary(list(theirs.values())).interval)


@pytest.mark.parametrize(
    ("interval", "word"),
    [((0.1, 0.3), "covers"), ((0.2, 0.2), "covers"), ((0.2, 0.3), "covers"), ((0.21, 0.3), "above"),
     ((0.1, 0.19), "below"), (None, "too few seeds")],
)  # fmt: skip
def test_verdict(interval, word):
    assert verdict(interval, 0.2) == word


@settings(deadline=None)
@given(several, several)
def test_distinguishable(a, b):
    one, other = summary(a).interval, summary(b).interval
    assert distinguishable(one, other) == distinguishable(other, one)
    assert not distinguishable(one, one)
    assert not distinguishable(one, None)
    apart = one[1] < other[0] or other[1] < one[0]
    assert distinguishable(one, other) == apart
