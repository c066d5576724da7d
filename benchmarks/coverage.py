"""How often 95% intervals hold the truth: over seeds (hyla.report.statistics) and over a probe's test tasks.

python benchmarks/coverage.py
"""

import numpy as np

from hyla.latents.decoders import fit_ridge, r2, reference_ridge
from hyla.latents.probes import logistic, ridge
from hyla.report.statistics import summary

ROWS_OF_A_TASK, TEST_SETS = 15, 300


def over_seeds(count: int) -> tuple[float, float]:
    """Share of 4,000 normal samples of `count` seeds whose interval holds the mean: Student's t, percentile bootstrap."""
    samples = np.random.default_rng(0).standard_normal((4_000, count)).tolist()
    found = [summary(sample) for sample in samples]
    ends = ([one.interval for one in found], [one.bootstrap for one in found])
    t, bootstrap = (float(np.mean([low <= 0 <= high for low, high in intervals])) for intervals in ends)
    return t, bootstrap


def draw(rng: np.random.Generator, num_tasks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, rules, tasks): rows of a task share an offset, so that a task is mostly right or mostly wrong."""
    tasks = np.repeat(np.arange(num_tasks), ROWS_OF_A_TASK)
    rules = rng.integers(0, 2, num_tasks)[tasks]
    offset = rng.standard_normal((num_tasks, 2))[tasks]
    return np.eye(2)[rules] * 1.5 + offset + 0.2 * rng.standard_normal((len(tasks), 2)), rules, tasks


def over_tasks(num_tasks: int) -> tuple[float, float]:
    """Share of test sets of `num_tasks` whose interval holds a fixed decoder's true score: accuracy, R2. Sets whose
    tasks all have the same rule have no R2 and are left out."""
    rng = np.random.default_rng(0)
    x, y, _ = draw(rng, 60)
    rows, answers, _ = draw(rng, 4_000)
    none = {"num_shuffles": 0, "num_resamples": 0}
    truth = (logistic(x, y, rows, answers, **none).accuracy.value, ridge(x, y, rows, answers, **none).r2.value)
    held = []
    for seed in range(TEST_SETS):
        rows, answers, tasks = draw(rng, num_tasks)
        quick = {"num_shuffles": 0, "num_resamples": 400, "seed": seed, "test_groups": tasks}
        scores = (logistic(x, y, rows, answers, **quick).accuracy, ridge(x, y, rows, answers, **quick).r2)
        ends = [(score.low, true, score.high) for score, true in zip(scores, truth, strict=True)]
        held.append([np.nan if low is None else low <= true <= high for low, true, high in ends])
    accuracy, of_r2 = np.nanmean(held, 0)
    return float(accuracy), float(of_r2)


def main() -> None:
    for count in (2, 3, 4, 5, 8):
        t, bootstrap = over_seeds(count)
        print(f"{count} seeds: Student's t {t:.3f}, percentile bootstrap {bootstrap:.3f}")
    for num_tasks in (6, 9, 20, 60):
        accuracy, of_r2 = over_tasks(num_tasks)
        print(f"{num_tasks} test tasks: accuracy {accuracy:.2f}, R2 {of_r2:.2f}")
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((400, 8)), 0)
    y = (5 + x @ rng.standard_normal(8))[:, None]
    weights, intercept = fit_ridge(x, y, standardise=False)
    ours, theirs = r2(y, x @ weights + intercept)[0], reference_ridge(x, y, x, y)[0]
    print(f"PRB-04: R2 of ours {ours:.5f}, of the public code's regression {theirs:.2f}")


if __name__ == "__main__":
    main()
