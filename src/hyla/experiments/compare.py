"""`hyla compare`: which runs a comparison needs, and what is written once they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hyla.errors import ConfigError, check
from hyla.experiments.engine import Job, prepare, run_jobs, run_name
from hyla.report.build import check_extras, write_report
from hyla.report.comparison import Comparison
from hyla.report.plan import Candidate, Plan, Variant, write_plan
from hyla.report.reported import reported_names
from hyla.training.config import TrainConfig

Splits = Literal["seed", "official", "fixed"]


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to: its numbers, its jobs and the files written."""

    comparison: Comparison
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


def comparison_plan(configs: Sequence[TrainConfig], *, budget: str, note: str, command: str) -> Plan:
    """The plan of a comparison: a variant per mechanism, whose settings are all the same."""
    task = configs[0].task_name
    mechanisms = list(dict.fromkeys(config.model.mechanism for config in configs))
    variants = []
    for mechanism in mechanisms:
        runs = {config.seed: run_name(config) for config in configs if config.model.mechanism == mechanism}
        reported = mechanism if mechanism in reported_names() else None
        variants.append(Variant(mechanism, mechanism, {}, reported, (Candidate({}, runs),)))
    who = ", ".join(mechanisms) if len(mechanisms) <= 4 else f"{len(mechanisms)} mechanisms"
    return Plan(
        name=f"compare-{task}",
        title=f"{task}: {who}",
        task=task,
        budget=budget,
        budget_note=note,
        command=command,
        metric={"logic": "r2", "sraven": "accuracy"}[task],
        baseline="softmax" if "softmax" in mechanisms else None,
        selection="none",
        reported_split="held_out",
        axes=(),
        figures=("scores", "curves"),
        variants=tuple(variants),
    )


def check_report_extra() -> None:
    """Raise MissingExtraError before any work starts if figures and the page could not be made in the end."""
    check_extras()


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
    """Write `folder/plan.json`, train what is missing under `folder/runs`, then write the report (`hyla.report.build`).
    Raises ConfigError if `folder` cannot be used; failed runs are in the outcome's jobs."""
    check_report_extra()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out = {str(folder)!r} is not possible: it is a file")
    plan = comparison_plan(configs, budget=budget, note=note, command=command)
    jobs = prepare(configs, folder / "runs")
    write_plan(folder, plan)
    run_jobs(jobs, workers, threads, progress)
    report = write_report(folder, plan)
    return Outcome(report.comparison, jobs, list(report.files))
