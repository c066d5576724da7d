from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.latents.resampling import group_sums, interval, resampled_sums, shuffled_rows

groups_st = st.lists(st.integers(-3, 6), min_size=1, max_size=40)


@settings(deadline=None)
@given(groups_st, st.integers(0, 1000))
def test_each_group_gets_the_labels_of_one_group(groups, seed):
    groups = np.array(groups)
    source = shuffled_rows(len(groups), groups, np.random.default_rng(seed))
    givers = {}
    for group in np.unique(groups):
        taken = source[groups == group]
        giver = {int(g) for g in groups[taken]}
        assert len(giver) == 1
        givers[int(group)] = giver.pop()
        # every row of the giver as often as any other, or once more
        times = Counter(taken.tolist())
        size = (groups == givers[int(group)]).sum()
        assert max(times.values()) <= -(-len(taken) // size)
    assert sorted(givers.values()) == sorted(givers)


def test_without_groups_labels_are_permuted():
    assert sorted(shuffled_rows(50, None, np.random.default_rng(0)).tolist()) == list(range(50))


@settings(deadline=None)
@given(groups_st)
def test_sums_of_groups_by_brute_force(groups):
    groups = np.array(groups)
    terms = np.arange(2.0 * len(groups)).reshape(-1, 2)
    expected = [terms[groups == group].sum(0) for group in np.unique(groups)]
    assert np.allclose(group_sums(terms, groups), expected)
    assert np.array_equal(group_sums(terms, None), terms)


def test_resamples_have_the_moments_of_drawing_with_replacement():
    """Each draws G groups; the variance of a sum is G times that of a group (1/G in the denominator)."""
    sums = np.stack([np.arange(30.0), np.ones(30)], 1)
    drawn = resampled_sums(sums, 20_000, 0)
    assert (drawn[:, 1] == 30).all()
    assert drawn[:, 0].mean() == pytest.approx(sums[:, 0].sum(), rel=0.005)
    assert drawn[:, 0].var() == pytest.approx(30 * sums[:, 0].var(), rel=0.05)


def test_resamples_do_not_depend_on_how_they_are_batched(monkeypatch):
    """At a million groups one resample is drawn at a time."""
    assert resampled_sums(np.ones((1_500_000, 1)), 2, 0).tolist() == [[1_500_000], [1_500_000]]
    assert resampled_sums(np.ones((3, 2)), 0, 0).shape == (0, 2)


@pytest.mark.parametrize(("num_groups", "least"), [(5, 0.90), (10, 0.90), (40, 0.92)])
def test_intervals_of_a_mean_cover_it(num_groups, least):
    """1,000 normal samples: covered in about 95%; the plain percentile interval covers 84% at five groups."""
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(1000):
        sums = resampled_sums(rng.standard_normal((num_groups, 1)), 400, trial)
        low, high = interval(sums[:, 0] / num_groups, num_groups)
        covered += low <= 0 <= high
    assert least <= covered / 1000 <= 0.985


def test_an_interval_of_many_groups_is_that_of_percentiles():
    samples = np.random.default_rng(0).standard_normal(4000)
    assert interval(samples, 100_000) == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])), abs=1e-2)


def test_no_interval_of_one_group_or_no_sample():
    assert interval(np.array([1.0, 2.0]), 1) == (None, None)
    assert interval(np.array([np.nan, np.inf]), 9) == (None, None)
    assert interval(np.array([np.nan, 2.0, 2.0]), 9) == (2.0, 2.0)
