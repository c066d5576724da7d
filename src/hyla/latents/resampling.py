"""The control and the interval of a score: labels shuffled, and test sets drawn again, by whole groups."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Num, Shaped


def shuffled_rows(
    num_rows: int, groups: Shaped[np.ndarray, "rows"] | None, rng: np.random.Generator
) -> Shaped[np.ndarray, "rows"]:
    """For each row the row whose label it gets in the control.

    Whole groups exchange their labels: each gets those of another (drawn without replacement), in random order, repeated
    or cut to its size. What labels of one task have in common stays together, as it does in the data; shuffling rows one
    by one would make a control that is too easy to beat. A group may draw itself, which with a handful of groups makes
    the control's largest score high. Without groups, rows are permuted.
    """
    if groups is None:
        return rng.permutation(num_rows)
    _, starts = np.unique(np.sort(groups), return_index=True)
    members = np.split(np.argsort(groups, kind="stable"), starts[1:])
    source = np.empty(num_rows, dtype=np.int64)
    for taker, giver in enumerate(rng.permutation(len(members))):
        source[members[taker]] = np.resize(rng.permutation(members[giver]), len(members[taker]))
    return source


def group_sums(
    terms: Num[np.ndarray, "rows terms"], groups: Shaped[np.ndarray, "rows"] | None
) -> Float[np.ndarray, "groups terms"]:
    """Sums of `terms` over the rows of each group; sorted by group; None is every row by itself."""
    if groups is None:
        return np.asarray(terms, np.float64)
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    return np.add.reduceat(np.asarray(terms, np.float64)[order], starts, axis=0)


def resampled_sums(
    sums: Num[np.ndarray, "groups terms"], num_resamples: int, seed: int
) -> Float[np.ndarray, "resamples terms"]:
    """Sums over each bootstrap resample: as many groups as there are, drawn with replacement."""
    rng = np.random.default_rng([seed, 3])
    num_groups = len(sums)
    parts = [np.empty((0, sums.shape[1]))]
    batch = max(1, 2_000_000 // num_groups)  # resamples at a time, a few dozen MB
    for start in range(0, num_resamples, batch):
        size = min(batch, num_resamples - start)
        drawn = rng.integers(num_groups, size=(size, num_groups)) + num_groups * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * num_groups).reshape(size, num_groups)
        parts.append(times.astype(np.float64) @ sums)
    return np.concatenate(parts)


def interval(samples: Float[np.ndarray, "resamples"], num_groups: int) -> tuple[float, float] | tuple[None, None]:
    """95% interval from bootstrap samples: percentiles, widened for few groups.

    The plain percentile interval of a mean of G groups is too narrow, by the normal in place of Student's t and by
    (G-1)/G in the variance. The tails are moved outwards to make up for both (Hesterberg, "What Teachers Should Know About
    the Bootstrap", 2015: the expanded percentile interval). Samples without a value are left out; (None, None) with fewer
    than two groups or no sample.

    In a simulation of tasks with 15 dependent rows each, 600 times, it covered the true accuracy, macro F1 and R2 in 95%
    with 60 tasks and in 92 to 95% with 20, but with 6 tasks in 70, 71 and 89% only: a handful of tasks may all be decoded.
    Resampling rows instead covered the accuracy in 38 to 39%.
    """
    samples = samples[np.isfinite(samples)]
    if num_groups < 2 or not len(samples):
        return None, None
    from scipy import stats  # comes with scikit-learn

    tail = stats.norm.cdf(stats.t.ppf(0.025, num_groups - 1) * np.sqrt(num_groups / (num_groups - 1)))
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)
