"""Copy an experiment as it can be shared: what was measured, and the weights; nothing that can be made again from these."""

from __future__ import annotations

import shutil
from pathlib import Path

from hyla.errors import RunError
from hyla.report.comparison import summarise, write_comparison
from hyla.report.plan import DECODABILITY, ERRORS, PLAN, RUNS, read_plan
from hyla.runs import CHECKPOINTS, CONFIG, METRICS, RESULT, Run, read_json, whole_folder, write_json
from hyla.training.checkpoint import MODEL, STATE, list_checkpoints, verify


def publish(folder: Path, out: Path, numbers_only: bool = False) -> list[Path]:
    """Copy the experiment in `folder` to `out`, replacing an older copy; returns the run folders copied.

    Of every run: config.json, metrics.jsonl, result.json and one checkpoint, the weights alone of a run that has ended
    (`hyla evaluate` and `hyla latents` read them) and all of it of one that has not, so that it can go on elsewhere; with
    `numbers_only` no checkpoint. Runs that have not started are left out. Raises RunError where `folder` is no experiment
    or `out` is something else.
    """
    plan = read_plan(folder)
    if out.exists() and not (out / PLAN).exists():
        raise RunError(f"{out} exists and is no copy of an experiment; choose another --out")
    names = dict.fromkeys(name for variant in plan.variants for name in variant.runs)
    there = [name for name in names if (folder / RUNS / name / CONFIG).exists()]
    with whole_folder(out) as copy:
        for name in (PLAN, ERRORS, DECODABILITY):
            if (folder / name).exists():
                shutil.copy(folder / name, copy / name)
        for name in there:
            _copy_run(Run(folder / RUNS / name), copy / RUNS / name, numbers_only)
        write_comparison(copy, summarise(plan, copy))
    return [out / RUNS / name for name in there]


def _copy_run(run: Run, out: Path, numbers_only: bool) -> None:
    out.mkdir(parents=True)
    for name in (CONFIG, METRICS, RESULT):
        if (run.path / name).exists():
            shutil.copy(run.path / name, out / name)
    for _, path in [] if numbers_only else reversed(list_checkpoints(run.checkpoints)):
        try:
            verify(path)
        except RunError:
            continue  # an older one may be whole
        copy = out / CHECKPOINTS / path.name
        if run.state == "unfinished":
            shutil.copytree(path, copy)
            return
        copy.mkdir(parents=True)
        shutil.copy(path / MODEL, copy / MODEL)
        state = read_json(path / STATE)
        write_json(copy / STATE, state | {"files": {MODEL: state["files"][MODEL]}})
        return
