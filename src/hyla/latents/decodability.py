"""Decodability (P2): whether the parts of a task can be read linearly from a plain network's hidden activations.

Ridge probes are fitted on trained combinations and scored on unseen ones, from the activations at the last point of
every layer: to the task latent z and, for a hyperteacher, to the effective weights of its network. P2 fits on 512 tasks
with penalty 1 on activations as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyla.errors import ConfigError, RunError, check
from hyla.latents.collect import collect
from hyla.latents.labels import sklearn
from hyla.latents.probes import ridge
from hyla.models.base import Model
from hyla.report import canvas
from hyla.report.decodability import draw_layers, layers_csv
from hyla.report.plan import DECODABILITY, RUNS, Plan
from hyla.runs import Run, open_run, read_json, whole_folder, write_json
from hyla.tasks.base import Task
from hyla.tasks.hyperteacher import Hyperteacher
from hyla.training.config import TASKS, config_from_dict
from hyla.training.loop import load_model

INPUT = "encoding"
"""The name under which the encoding that the model is told is decoded, beside its layers: what no layer can take credit
for where the encoding is already linear in the latent."""


@dataclass(frozen=True)
class Options:
    """num_tasks: to fit on. num_test: to score on, of each split. penalty: of the ridge regression. layers: names of
    submodules; all hidden ones for None."""

    num_tasks: int = 512
    num_test: int = 1_024
    splits: tuple[str, ...] = ("train", "held_out")
    penalty: float = 1.0
    layers: tuple[str, ...] | None = None
    step: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_test"):
            check(getattr(self, name) >= 2, name, getattr(self, name), "at least 2")
        check(0 < self.penalty < math.inf, "penalty", self.penalty, "above 0")
        check(len(self.splits) >= 1, "splits", self.splits, "at least one to score on")
        check(self.seed >= 0, "seed", self.seed, "0 or more")


def decodability(model: Model, task: Task, options: Options = Options()) -> list[dict[str, Any]]:
    """One row for every layer, target and split: `{"layer", "depth", "target", "split", "r2", "low", "high", "chance",
    "control", "undefined", "targets", "tasks"}`.

    depth: 0 for the encoding, then 1 for the first hidden layer. r2: mean over the entries of the target that vary
    among the scored tasks (`undefined` counts the others). low, high: 95%, over combinations of modules. control: the
    same probe fitted on targets exchanged between tasks. Probes are fitted on the first `num_tasks` tasks of split
    `train` and scored on later ones.
    Raises ConfigError for a task without latents of this kind and for splits and layers that do not exist.
    """
    if task.layout is None:
        raise ConfigError(f"task = {task.name!r} is not possible: decodability is for tasks that come with an encoding")
    for split in options.splits:
        check(split in task.splits, "splits", split, f"task {task.name} has {', '.join(task.splits)}")
    names = options.layers or model.hidden_names
    splits = tuple(dict.fromkeys(("train", *options.splits)))
    collection = collect(
        model,
        task,
        queries=(),
        keys=(),
        splits=splits,
        num_samples=options.num_tasks + options.num_test,
        layers=(),
        activations=names,
    )
    size = task.layout.encoding_size
    features = {INPUT: {split: collection.inputs(split)[:, :size] for split in splits}}
    features |= {name: {split: _flat(collection.activation(name, split)) for split in splits} for name in names}
    targets = {split: targets_of(task, collection.latent("task", split)) for split in splits}
    active = {split: _flat(collection.latent("task", split)) != 0 for split in splits}  # the combination of a task
    fitted, scored = slice(None, options.num_tasks), slice(options.num_tasks, None)
    rows = []
    for depth, (layer, of_split) in enumerate(features.items()):
        for target in targets["train"]:
            for split in options.splits:
                found = ridge(
                    of_split["train"][fitted],
                    targets["train"][target][fitted],
                    of_split[split][scored],
                    targets[split][target][scored],
                    test_groups=active[split][scored],
                    penalty=options.penalty,
                    standardise=False,
                    num_shuffles=1,
                    num_resamples=200,
                    seed=options.seed,
                )
                score = found.r2
                rows.append(
                    {"layer": layer, "depth": depth, "target": target, "split": split, "r2": score.value}
                    | {"low": score.low, "high": score.high, "chance": score.chance, "control": score.control}
                    | {"undefined": found.num_undefined, "targets": len(found.targets), "tasks": found.rows.num_test}
                )
    return rows


def targets_of(task: Task, latents_BM: np.ndarray) -> dict[str, np.ndarray]:
    """What is decoded: `task`, the latent itself; of a hyperteacher also `weights`, those its network has for the task,
    all hidden layers and their biases."""
    flat_BM = latents_BM.reshape(len(latents_BM), -1)
    found = {"task": flat_BM}
    if isinstance(task, Hyperteacher):
        mixture_BM = flat_BM / math.sqrt(task.teacher.num_hot)
        modules = [tensor.flatten(1).double().numpy() for tensor in (*task.teacher.weights, *task.teacher.biases)]
        found["weights"] = mixture_BM @ np.concatenate(modules, 1)
    return found


def _flat(activation: np.ndarray) -> np.ndarray:
    return activation.reshape(len(activation), -1)


def write_decodability(folder: Path, plan: Plan) -> Path:
    """Decode every finished run of the experiment in `folder` that is not decoded yet; all of it stands in
    decodability.json, `{"format": 1, "rows": {run: [rows of decodability]}}`."""
    path = folder / DECODABILITY
    rows: dict[str, Any] = read_json(path)["rows"] if path.exists() else {}
    for name in plan.runs:
        if name not in rows and Run(folder / RUNS / name).state == "finished":
            model, task, _ = load_model(folder / RUNS / name)
            rows[name] = decodability(model, task)
            write_json(path, {"format": 1, "rows": rows})
    return path


def has_encoding(path: Path) -> bool:
    """Whether the run in `path` is of a task that comes with an encoding, which is what can be decoded here."""
    return TASKS[config_from_dict(open_run(path).config).task_name].told


def decode_runs(paths: Sequence[Path], out: Path, options: Options) -> tuple[dict[str, Any], list[Path]]:
    """Decode the runs in `paths` and write the folder `out` anew: decodability.json, scores.csv and figures. Returns
    ({run: rows}, files). An older folder is replaced once the new one is whole."""
    canvas.check_matplotlib()
    sklearn("linear_model")
    names = [path.absolute().name for path in paths]
    check(len(set(names)) == len(names), "runs", ", ".join(map(str, paths)), "runs whose folders have different names")
    for path in paths:
        check(has_encoding(path), "runs", str(path), "all of tasks that come with an encoding, or none")
    if out.exists() and not (out / DECODABILITY).exists():
        raise RunError(f"{out} exists and was not written by hyla latents; choose another --out")
    with whole_folder(out) as folder:
        rows = {}
        for name, path in zip(names, paths, strict=True):
            model, task, _ = load_model(path, options.step)
            rows[name] = decodability(model, task, options)
        write_json(folder / DECODABILITY, {"format": 1, "rows": rows})
        (folder / "scores.csv").write_text(layers_csv(rows), encoding="utf-8")
        files = [folder / DECODABILITY, folder / "scores.csv", *draw_layers(rows, folder / "figures/decodability")]
    return rows, [out / file.relative_to(folder) for file in files]
