"""`hyla latents`: read the codes of trained runs and write down all that they tell.

The result is one document of plain data, `analysis.json`, from which `hyla.report.latents` makes tables, figures and a
page. None stands for a number that is undefined.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hyla.errors import MissingExtraError, RunError, check
from hyla.latents.analysis import Options, analyse
from hyla.latents.collect import collect
from hyla.latents.labels import sklearn
from hyla.latents.readings import reading_of
from hyla.report import build
from hyla.report.latents import write_figures, write_scores
from hyla.report.latents_page import write_latents_page
from hyla.runs import open_run, whole_folder, write_json
from hyla.training.config import config_from_dict
from hyla.training.loop import load_model

ANALYSIS, CODES = "analysis.json", "codes"
NOTES = [
    "Decoders are fitted on trained combinations and scored on unseen ones: no task is on both sides. Features are "
    "standardised with the training rows alone.",
    "Intervals (95%) are bootstrapped over tasks, since sequences of one task are not independent of each other; with "
    "fewer than about 20 tasks they are too narrow.",
    "Chance is the best guess that never looks at the codes. The control is the same decoder fitted on labels exchanged "
    "between tasks: what it reaches is no evidence of anything.",
    "The same decoders on the pairs' own input tokens, which no model has touched, show what is no merit of the codes.",
    "Macro F1 is the mean over the classes present in the evaluated split. Constant targets have no R2; they are left out "
    "and counted.",
    "Purity is the share of the ten nearest codes that have the same class; of other tasks: only codes of other tasks "
    "count as neighbours.",
    "Cosines are between mean codes with the mean over classes taken off, which all would share otherwise.",
    "Causal check: the pairs' codes are replaced by the mean code of another class (means of trained combinations), in one "
    "layer at a time, and the model answers again. The control is the mean code of the sequence's own class.",
]


def check_extras(project: str = "tsne") -> None:
    """Raise MissingExtraError before any work starts if something in the end would lack a package."""
    build.check_extras()
    sklearn("linear_model")
    if project == "umap":
        try:
            __import__("umap")
        except ImportError:
            raise MissingExtraError("umap-learn", "umap", "method umap") from None


def check_run(path: Path, options: Options) -> None:
    """Raise what `read_run` would raise of a run that is missing, of another task, or lacks one of the splits."""
    config = config_from_dict(open_run(path).config)
    task = reading_of(config).task
    for split in options.splits:
        check(split in task.splits, "splits", split, f"task {task.name} of {path} has {', '.join(task.splits)}")


def read_run(path: Path, options: Options, store: Path | None = None) -> dict[str, Any]:
    """The analysis of the run in `path`, which `check_run` has passed; its codes are collected into the folder `store`, or
    in memory."""
    model, _, config = load_model(path, options.step)
    reading = reading_of(config)
    if options.queries is not None:
        reading.queries = options.queries
    if options.keys is not None:
        reading.keys = options.keys
    length = reading.task.sequence_length
    if options.queries is not None or options.keys is not None:
        queries, keys = (tuple(place % length for place in places) for places in (reading.queries, reading.keys))
        reading.key_names = tuple(f"query {q}, key {k}" for q in queries for k in keys)
        reading.pairs = f"queries: tokens {', '.join(map(str, queries))}; keys: tokens {', '.join(map(str, keys))}"
    collection = collect(
        model,
        reading.task,
        queries=reading.queries,
        keys=reading.keys,
        splits=options.splits,
        num_samples=options.num_samples,
        layers=options.layers,
        source={"run": path.absolute().name, "mechanism": config.mechanism, "seed": config.seed},
        path=store,
    )
    run = open_run(path)
    described = {
        "name": path.absolute().name,
        "task": config.task_name,
        "mechanism": config.mechanism,
        "seed": config.seed,
        "step": options.step if options.step is not None else (run.result or {}).get("step", config.training.steps),
    }
    return described | analyse(model, reading, collection, options)


def write_analysis(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    command: str,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], list[Path]]:
    """Read each run in `paths` and write the folder `out` anew: analysis.json, scores.json and .csv, figures, index.html
    and the collected codes. Returns the analysis and the files. An older folder is replaced once the new one is whole."""
    check_extras(options.project)
    for path in paths:
        check_run(path, options)
    names = [path.absolute().name for path in paths]
    different = len({path.absolute() for path in paths}) == len(paths)
    check(different, "runs", ", ".join(map(str, paths)), "each only once")
    if out.exists() and not (out / ANALYSIS).exists():
        raise RunError(f"{out} exists and was not written by hyla latents; choose another --out")
    with whole_folder(out) as folder:
        models = []
        for number, path in enumerate(paths):
            progress(f"reading the codes of {path}")
            store = f"{number}-{names[number]}" if names.count(names[number]) > 1 else names[number]
            (folder / CODES).mkdir(exist_ok=True)
            model = read_run(path, options, folder / CODES / store)
            model["run"] = os.path.relpath(path.absolute(), out.absolute())
            models.append(model)
        analysis = {
            "format": 1,
            "title": "Latent codes: " + ", ".join(dict.fromkeys(f"{m['task']} {m['mechanism']}" for m in models)),
            "command": command,
            "notes": NOTES,
            "models": models,
        }
        write_json(folder / ANALYSIS, analysis)
        progress("drawing")
        files = [folder / ANALYSIS, *write_scores(folder, analysis)]
        files += [*write_figures(folder / "figures", analysis), write_latents_page(folder, analysis)]
    return analysis, [out / file.relative_to(folder) for file in files]
