"""Means over seeds, with intervals that are honest for three of them.

The interval shown and used for every verdict is Student's t interval of the mean, `m ± t(n - 1) * sd / sqrt(n)`: it holds
the true mean in 95% of repetitions where scores of seeds are about normally distributed, for any n from 2; it is cut to the
range that the score can have. The percentile bootstrap stands beside it for those who expect it, but decides nothing: it
never leaves the range of its values, so that of three seeds from a normal distribution it holds the true mean in 75% of
repetitions, of two in 50% (a test measures both).

Nothing here corrects for the number of rows of a table that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Literal

LEVEL = 0.95
MAX_EXACT = 8
"""Up to so many values every resample of the bootstrap is enumerated; beyond, `DRAWS` are drawn from a fixed seed."""
DRAWS = 20_000

METHOD = (
    "Intervals are 95% intervals of the mean over seeds by Student's t (n − 1 degrees of freedom), each row by itself: "
    "nothing is corrected for the number of rows. With two or three seeds they are wide because little is known. "
    "Differences are taken seed by seed (the same seed has the same combinations held out), then treated alike."
)
BOOTSTRAP = (
    "The percentile bootstrap is given for comparison and decides nothing: over three seeds it is too narrow, and holds "
    "the true mean in about 75% of cases instead of 95%."
)

BOUNDS = {"accuracy": (0.0, 1.0), "r2": (-math.inf, 1.0)}
"""Of metrics that have any."""

Interval = tuple[float, float]
Verdict = Literal["covers", "above", "below", "too few seeds"]


@dataclass(frozen=True)
class Summary:
    """count: n. standard_deviation: n - 1 in the denominator. interval: Student's t; bootstrap: percentiles; both for
    the mean at 95%. All but count and mean are None where n < 2, the mean too where n = 0."""

    count: int
    mean: float | None
    standard_deviation: float | None
    standard_error: float | None
    interval: Interval | None
    bootstrap: Interval | None


def summary(values: Sequence[float | None], bounds: Interval = (-math.inf, math.inf)) -> Summary:
    """The statistics of the `values` that are numbers; None stands for a run without one. All must be finite.

    bounds: the least and the greatest mean there can be, to which the interval is cut."""
    present = [value for value in values if value is not None]
    if not all(math.isfinite(value) for value in present):
        raise ValueError(f"values must be finite or None, not {present}")
    count = len(present)
    if count == 0:
        return Summary(0, None, None, None, None, None)
    mean = math.fsum(present) / count
    if count == 1:
        return Summary(1, mean, None, None, None, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in present) / (count - 1))
    error = deviation / math.sqrt(count)
    half = t_quantile(count - 1) * error
    interval = (max(mean - half, bounds[0]), min(mean + half, bounds[1]))
    return Summary(count, mean, deviation, error, interval, bootstrap_interval(present))


def paired_difference(mine: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Summary:
    """The statistics of `mine - theirs`, seed by seed; seeds that lack a value on either side are left out."""
    return summary([value - other for seed, value in mine.items() if value is not None
                    if (other := theirs.get(seed)) is not None])  # fmt: skip


def verdict(interval: Interval | None, number: float) -> Verdict:
    """Where `interval` lies, seen from `number`: it covers it, or lies above or below it."""
    if interval is None:
        return "too few seeds"
    low, high = interval
    return "above" if low > number else "below" if high < number else "covers"


def distinguishable(a: Interval | None, b: Interval | None) -> bool:
    """Whether both intervals exist and do not touch. Stricter than a test of the difference at the same level."""
    return a is not None and b is not None and (a[1] < b[0] or b[1] < a[0])


# --- the two intervals ------------------------------------------------------------------------------------------------


@lru_cache
def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t for which a Student variable of `degrees` (at least 1) lies in [-t, t] with probability `level`."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < level else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's distribution with a whole number of `degrees`, in closed form (Abramowitz and Stegun 26.7.3
    and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):  # the terms' ratios: k / (k + 1) times cos^2
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def bootstrap_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The percentile bootstrap of the mean: of all n^n resamples, so that the same values always give the same interval,
    up to n = `MAX_EXACT`; of `DRAWS` resamples from a fixed seed beyond.

    Its ends are the innermost resampled means that leave at most (1 - level) / 2 of all resamples strictly outside.
    """
    count = len(values)
    if count <= MAX_EXACT:
        whole = math.factorial(count)
        weighted = []
        for places in combinations_with_replacement(range(count), count):  # a resample, whatever its order
            orders = whole // math.prod(math.factorial(places.count(place)) for place in set(places))
            weighted.append((math.fsum(values[place] for place in places) / count, orders))
    else:
        import numpy as np

        sampled = np.random.default_rng(0).choice(np.asarray(values), (DRAWS, count)).mean(1)
        weighted = [(float(mean), 1) for mean in sampled]
    weighted.sort()
    allowed = (1 - level) / 2 * sum(orders for _, orders in weighted)
    return _inner(weighted, allowed), _inner(weighted[::-1], allowed)


def _inner(weighted: Sequence[tuple[float, int]], allowed: float) -> float:
    """The last mean, from the outside in, that has at most `allowed` resamples before it."""
    passed = 0
    for mean, orders in weighted:
        if passed + orders > allowed:
            return mean
        passed += orders
    raise AssertionError("allowed is less than all resamples")
