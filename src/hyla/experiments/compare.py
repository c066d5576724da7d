"""`hyla compare`: which runs a comparison needs, and what is written once they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hyla.errors import ConfigError, MissingExtraError, check
from hyla.experiments.engine import Job, prepare, run_jobs
from hyla.report import figures, html, tables
from hyla.runs import Run
from hyla.training.config import TrainConfig

Splits = Literal["seed", "official", "fixed"]


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to: its numbers, its jobs and the files written."""

    comparison: tables.Comparison
    jobs: list[Job]
    files: list[Path]


def comparison_configs(
    base: TrainConfig, mechanisms: Sequence[str], seeds: Sequence[int], splits: Splits = "seed"
) -> list[TrainConfig]:
    """One config per seed and mechanism, the mechanisms of a seed beside each other.

    splits: where the held-out set of each run comes from. seed: the run's seed, so that the spread over seeds includes
    different held-out sets, as in P1. official: the public code's own set of that seed. fixed: `task.split_seed`.
    """
    check(len(mechanisms) > 0, "mechanisms", list(mechanisms), "at least one")
    check(len(seeds) > 0, "seeds", list(seeds), "at least one")
    for name, values in (("mechanisms", mechanisms), ("seeds", seeds)):
        check(len(set(values)) == len(values), name, list(values), "each only once")
    configs = []
    for seed in seeds:
        split_seed = {"seed": seed, "official": f"official-{seed}", "fixed": base.task.split_seed}[splits]
        for mechanism in mechanisms:
            model = replace(base.model, mechanism=mechanism)
            configs.append(replace(base, seed=seed, model=model, task=replace(base.task, split_seed=split_seed)))
    return configs


def check_report_extra() -> None:
    """Raise MissingExtraError before any work starts if figures and the page could not be made in the end."""
    for package in ("matplotlib", "plotly"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package, "report", "hyla compare") from None


def compare(
    configs: Sequence[TrainConfig],
    folder: Path,
    *,
    budget: str,
    note: str,
    command: str,
    workers: int,
    threads: int,
    progress: Callable[[Sequence[Job]], None],
) -> Outcome:
    """Train what is missing under `folder/runs`, then write comparison.json, comparison.csv, learning_curves.png and .svg,
    and index.html into `folder`. Raises ConfigError if `folder` cannot be used; failed runs are in the outcome's jobs."""
    check_report_extra()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r} is not possible: it is a file")
    jobs = prepare(configs, folder / "runs")
    run_jobs(jobs, workers, threads, progress)
    runs: list[Run] = [job.run for job in jobs]
    comparison = tables.summarise(
        runs, task=configs[0].task_name, budget=budget, budget_note=note, command=command, base=folder
    )
    files = [tables.write_comparison(folder, comparison)]
    csv = folder / "comparison.csv"
    csv.write_text(tables.to_csv(comparison), encoding="utf-8")
    files += [csv, *figures.learning_curves(comparison, folder / "learning_curves")]
    files.append(html.write_page(comparison, folder / "index.html"))
    return Outcome(comparison, jobs, files)
