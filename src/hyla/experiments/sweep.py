"""`hyla sweep FILE`: a grid or a random search of one's own over any setting of a run, written down in a TOML file.

    name = "rates"                          # the folder is runs/NAME
    task = "logic"
    seeds = [0, 1, 2]
    variants = ["model.mechanism"]          # the axes that make rows of the table; the others are candidates
    select = "validation"                   # what chooses among the candidates of a row: validation, reported, or none

    [base]                                  # what all runs share: a preset, and sections as in config.json
    preset = "default"
    [base.training]
    steps = 1000

    [grid]                                  # every combination
    "model.mechanism" = ["softmax", "hyla"]
    "optimizer.lr" = [1e-3, 3e-3]

    [random]                                # ... with each of so many random draws
    samples = 4
    seed = 0
    "optimizer.weight_decay" = { log_uniform = [0.01, 0.3] }

Everything is checked before the first run: a mistake is named with the file and the nearest key that exists.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from hyla.configs import field_types, unknown_key
from hyla.errors import ConfigError, check
from hyla.experiments.experiment import Experiment, Variant, config_hash, setting, with_settings
from hyla.experiments.hypernetwork_paper import VALIDATION
from hyla.report.plan import Figure, Selection, Setting
from hyla.tasks.base import Draws
from hyla.training.config import SECTIONS, TASKS, TextConfig, TrainConfig, config_from_dict, presets_of

KEYS = ("name", "title", "task", "seeds", "splits", "variants", "select", "baseline", "base", "grid", "random")
KINDS = ("choice", "uniform", "log_uniform", "int_uniform")
MAX_RUNS = 100_000
MODEL_AXES = ("model.mechanism", "model.architecture")  # what a row is named after, rather than a place on an axis


def read_sweep(path: Path | str) -> Experiment:
    """The experiment that a sweep file describes. Raises ConfigError naming the file, and for a mistake of syntax the line
    and column."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}, {_place(str(error), text)}") from None
    try:
        return sweep(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _place(message: str, text: str) -> str:
    """tomllib's `what (at line 3, column 5)` as `line 3, column 5: what`."""
    what, _, where = message.rpartition(" (at ")
    if "end of document" in where:
        lines = text.split("\n")
        where = f"line {len(lines)}, column {len(lines[-1]) + 1}"
    return f"{where.rstrip(')')}: {what}"


def sweep(data: Mapping[str, Any]) -> Experiment:
    """The experiment that the content of a sweep file describes."""
    for key in data:
        if key not in KEYS:
            raise unknown_key(key, {"": list(KEYS)}, "")
    for key in ("name", "task"):
        check(isinstance(data.get(key), str), key, data.get(key), "must be there, as text")
    name, task = data["name"], data["task"]
    check(re.fullmatch(r"[\w.-]*\w[\w.-]*", name) is not None, "name", name, "letters, digits and . _ - only")
    check(task in TASKS, "task", task, f"choose from {', '.join(TASKS)}")
    select = _one_of(data, "select", get_args(Selection), "none")
    splits = _one_of(data, "splits", ("seed", "official", "fixed"), "seed")
    seeds = data.get("seeds", [0])
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds) and seeds != []
    check(whole, "seeds", seeds, "a list of whole numbers, each 0 or more")

    base = _base(data.get("base", {}), task)
    own_split = base.task.split_seed != presets_of(task)["default"](task).task.split_seed
    fixed = "the held-out set is that of each seed; for another, write splits = 'fixed' at the top level"
    check(not own_split or splits == "fixed", "base.task.split_seed", base.task.split_seed, fixed)
    if select == "validation":
        has = not isinstance(base.task, TextConfig)
        check(has, "select", select, "task text has no validation documents; use 'reported' or 'none'")
    if select == "validation" and getattr(base.task, "validation_fraction", 1) == 0:
        base = with_settings(base, VALIDATION)
    grid = _grid(data.get("grid", {}), base)
    draws = _random(data.get("random", {}), base)
    check("task.split_seed" not in {**grid, **draws[0]} or splits == "fixed", "axis", "task.split_seed", fixed)
    both = sorted(set(grid) & set(draws[0]))
    check(not both, "random", both, "an axis of the grid is drawn at random too")
    check(bool(grid or draws[0]), "grid", {}, "at least one axis, here or in [random]")
    count = math.prod(map(len, grid.values())) * len(draws) * len(seeds)
    check(count <= MAX_RUNS, "grid", count, f"at most {MAX_RUNS:,} runs")

    rows = _row_axes(data.get("variants"), select, [*grid, *draws[0]], list(grid))
    # a random draw is a row of its own where nothing is chosen
    inner = [axis for axis in [*grid, *draws[0]] if axis not in rows]
    variants: dict[str, list[TrainConfig]] = {}
    axes_of: dict[str, dict[str, Setting]] = {}
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        for draw in draws:
            settings = point | draw
            config = with_settings(base, settings)
            row = _row_name(rows, settings) or config.mechanism
            axes_of[row] = {axis: settings[axis] for axis in rows if axis not in MODEL_AXES}
            variants.setdefault(row, []).append(config)
    axes = tuple(axis for axis in rows if axis not in MODEL_AXES)
    baseline = data.get("baseline")
    check(baseline is None or baseline in variants, "baseline", baseline, f"the rows are {'; '.join(variants)}")
    experiment = Experiment(
        name=name,
        title=_text(data, "title", name),
        variants=tuple(
            Variant(row, _different(configs), axes_of[row], configs[0].mechanism if not TASKS[task].told else None)
            for row, configs in variants.items()
        ),
        seeds=tuple(seeds),
        budget="custom",
        budget_note=_note(variants),
        splits=splits,
        selection=select,
        tuned=tuple(inner),
        baseline=baseline,
        axes=axes,
        figures=_figures(axes, variants),
    )
    _ = experiment.runs  # a held-out set that does not exist is met here
    return experiment


def _one_of(data: Mapping[str, Any], key: str, allowed: Sequence[str], default: str) -> Any:
    value = data.get(key, default)
    check(value in allowed, key, value, f"choose from {', '.join(allowed)}")
    return value


def _text(data: Mapping[str, Any], key: str, default: str) -> str:
    value = data.get(key, default)
    check(isinstance(value, str), key, value, "must be text")
    return value


def _base(data: Any, task: str) -> TrainConfig:
    """[base]: a preset, overridden by sections as in config.json."""
    check(isinstance(data, Mapping), "base", data, "must hold preset and sections")
    presets = presets_of(task)
    preset = _one_of(data, "preset", tuple(presets), "default")
    sections = {key: value for key, value in data.items() if key != "preset"}
    check("seed" not in sections, "base.seed", sections.get("seed"), "write seeds = [...] at the top level")
    return config_from_dict(sections, presets[preset](task))


def _grid(data: Any, base: TrainConfig) -> dict[str, list[Any]]:
    """[grid]: dotted key -> its values, each once."""
    check(isinstance(data, Mapping), "grid", data, 'must hold axes, such as "optimizer.lr" = [1e-3, 3e-3]')
    grid = {}
    for axis, values in _flat(data):
        _check_axis(axis, base)
        check(isinstance(values, list), f"grid.{axis}", values, "must be a list of values")
        check(values != [], f"grid.{axis}", values, "at least one value")
        grid[axis] = list({repr(value): value for value in (_kind(axis, value, base) for value in values)}.values())
        for value in grid[axis]:
            _check_value(axis, value, base)
    return grid


def _random(data: Any, base: TrainConfig) -> list[dict[str, Any]]:
    """[random]: `samples` draws, each {dotted key: value}; one empty draw where there is no such table.

    A value depends on the seed, its axis and the number of its draw alone, so that more samples or another axis leave the
    draws before as they are, and nothing is trained again. Numbers have four significant digits.
    """
    check(isinstance(data, Mapping), "random", data, "must hold samples and axes")
    if not data:
        return [{}]
    samples, seed = data.get("samples"), data.get("seed", 0)
    check(type(samples) is int and samples >= 1, "random.samples", samples, "a whole number, at least 1")
    check(type(seed) is int and seed >= 0, "random.seed", seed, "a whole number, 0 or more")
    axes = dict(_flat({key: value for key, value in data.items() if key not in ("samples", "seed")}))
    check(axes != {}, "random", {}, 'at least one axis, such as "optimizer.lr" = { log_uniform = [1e-4, 1e-2] }')
    for axis, distribution in axes.items():
        _check_axis(axis, base)
        one = f"a row has one {axis.rpartition('.')[2]}: make it an axis of [grid]"
        check(axis not in MODEL_AXES, "random", axis, one)
        _check_distribution(axis, distribution)
    draws = []
    for number in range(samples):
        draw = {axis: _kind(axis, _draw(seed, axis, number, axes[axis]), base) for axis in axes}
        for axis, value in draw.items():
            _check_value(axis, value, base)
        draws.append(draw)
    return draws


def _check_distribution(axis: str, data: Any) -> None:
    field = f"random.{axis}"
    one = isinstance(data, Mapping) and len(data) == 1
    check(one, field, data, "one of { choice = [...] }, { uniform = [low, high] }, log_uniform, int_uniform")
    ((kind, values),) = data.items()
    if kind not in KINDS:
        raise unknown_key(kind, {field: list(KINDS)}, field)
    check(isinstance(values, list) and values != [], f"{field}.{kind}", values, "must be a list of values")
    if kind == "choice":
        return
    types = (int,) if kind == "int_uniform" else (int, float)
    numbers = len(values) == 2 and all(type(value) in types and math.isfinite(value) for value in values)
    check(numbers and values[0] < values[1], f"{field}.{kind}", values, f"[low, high], two {_words(kind)}, low < high")
    check(kind != "log_uniform" or values[0] > 0, f"{field}.{kind}", values, "both above 0")


def _words(kind: str) -> str:
    return "whole numbers" if kind == "int_uniform" else "numbers"


def _draw(seed: int, axis: str, number: int, distribution: Mapping[str, Any]) -> Any:
    ((kind, values),) = distribution.items()
    draws = Draws(seed, "sweep", axis, number)
    if kind == "choice":
        return values[draws.integers(len(values), 1).item()]
    low, high = values
    if kind == "int_uniform":
        return low + draws.integers(high - low + 1, 1).item()
    share = draws.uniform(1).double().item()
    if kind == "log_uniform":
        return float(f"{low * (high / low) ** share:.4g}")
    return float(f"{low + (high - low) * share:.4g}")


# --- axes -------------------------------------------------------------------------------------------------------------


def _flat(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`"optimizer.lr" = x` and `optimizer.lr = x`, which TOML reads as a table in a table, both as ("optimizer.lr", x)."""
    flat = []
    for key, value in data.items():
        if key in ("task", *SECTIONS) and isinstance(value, Mapping):
            flat += [(f"{key}.{name}", item) for name, item in value.items()]
        else:
            flat.append((key, value))
    return flat


def _check_axis(axis: str, base: TrainConfig) -> None:
    """Refuse what is no setting of a run, naming the nearest one."""
    known = {name: [field.name for field in fields(getattr(base, name))] for name in ("task", *SECTIONS)}
    known["model"].append("architecture")
    section, _, key = axis.rpartition(".")
    check(axis != "seed", "axis", axis, "write seeds = [...] at the top level")
    check(axis != "task.name", "axis", axis, "a sweep has one task: write task = ... at the top level")
    if section not in known or key not in known[section]:
        raise unknown_key(key if section in known else axis, known, section if section in known else "")


def _kind(axis: str, value: Any, base: TrainConfig) -> Any:
    """A whole number as a float where the setting is one, so that 1 and 1.0 are the same run."""
    if axis == "model.architecture":
        return value
    section, _, key = axis.rpartition(".")
    hint = field_types(type(getattr(base, section)))[key]
    is_float = hint is float or float in get_args(hint)
    return float(value) if is_float and type(value) is int else value


def _check_value(axis: str, value: Any, base: TrainConfig) -> None:
    """Refuse a value of the wrong kind under the name of its axis; whether it fits the others is seen with the whole."""
    check(isinstance(value, str | int | float | bool), axis, value, "an axis has texts, numbers, true or false")
    try:
        with_settings(base, {axis: value})
    except ConfigError as error:
        if str(error).startswith(f"{axis} = "):
            raise


def _row_axes(variants: Any, select: Selection, axes: Sequence[str], grid: Sequence[str]) -> list[str]:
    """The axes that make rows: those named, else the mechanism if it is one; all of them where nothing is chosen."""
    if select == "none":
        all_of_them = variants is None or set(_names(variants)) == set(axes)
        allowed = f"with select = 'none' every axis makes rows: leave variants out, or name {', '.join(axes)}"
        check(all_of_them, "variants", variants, allowed)
        return list(axes)
    if variants is None:
        return [axis for axis in grid if axis in MODEL_AXES]
    for axis in MODEL_AXES:
        allowed = f"it must name {axis}, since a row has one {axis.rpartition('.')[2]}"
        check(axis not in grid or axis in _names(variants), "variants", variants, allowed)
    for axis in _names(variants):
        check(axis in grid, "variants", axis, f"rows are made by axes of [grid]: {', '.join(grid)}")
    return _names(variants)


def _names(variants: Any) -> list[str]:
    names = [variants] if isinstance(variants, str) else variants
    sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
    check(sound, "variants", variants, "an axis, or a list of axes")
    return names


def _row_name(rows: Sequence[str], settings: Mapping[str, Any]) -> str:
    """`hyla, lr 0.003`."""
    named = ((axis.rpartition(".")[2], settings[axis]) for axis in rows)
    return ", ".join(str(value) if f"model.{short}" in MODEL_AXES else f"{short} {value}" for short, value in named)


def _different(configs: Sequence[TrainConfig]) -> tuple[TrainConfig, ...]:
    """The configs, each once: a random choice may draw the same twice."""
    return tuple({config_hash(config): config for config in configs}.values())


def _note(variants: Mapping[str, Sequence[TrainConfig]]) -> str:
    steps = sorted({config.training.steps for configs in variants.values() for config in configs})
    return f"{steps[0]:,} steps." if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps."


def _figures(axes: Sequence[str], variants: Mapping[str, Sequence[TrainConfig]]) -> tuple[Figure, ...]:
    """Scaling curves where an axis has numbers; a heat map where two have."""
    figures: list[Figure] = ["scores", "curves"]
    numbers = [axis for axis in axes if all(type(setting(c[0], axis)) in (int, float) for c in variants.values())]
    if len(numbers) == 2 and len(axes) == 2:
        figures.append("heat_map")
    if numbers:
        figures.append("scaling")
    return tuple(figures)
