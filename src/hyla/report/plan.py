"""`plan.json`: which runs make up which row of an experiment's table. Written before the first run; read without torch.

    DIR/plan.json       this file
    DIR/runs/NAME/      the runs it names (:class:`hyla.runs.Run`)
    DIR/errors.json     {run: {"error", "attempts"}} of runs that failed, if any did
    DIR/decodability.json   what can be decoded from every run's activations, if that was measured

A *variant* is a row of the table. Each of its *candidates* is one setting of the hyperparameters, trained once per seed;
`selection` says how the candidate was chosen whose runs are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from hyla.errors import RunError
from hyla.runs import read_json, write_json

PLAN, ERRORS, RUNS = "plan.json", "errors.json", "runs"
DECODABILITY = "decodability.json"
FORMAT = 1

Selection = Literal["validation", "reported", "none"]
Figure = Literal["scores", "curves", "heat_map", "scaling", "decodability"]
Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Candidate:
    """One setting of the hyperparameters. settings: dotted config key -> value. runs: seed -> folder under DIR/runs."""

    settings: dict[str, Setting]
    runs: dict[int, str]


@dataclass(frozen=True)
class Variant:
    """One row of the table. axes: its value on every axis of the plan. reported: its mechanism's name in
    `experiments/reported.toml`, None where no figure is reported for it."""

    name: str
    mechanism: str
    axes: dict[str, Setting]
    reported: str | None
    candidates: tuple[Candidate, ...]

    @property
    def runs(self) -> tuple[str, ...]:
        """The folders of all candidates' runs, each once."""
        return tuple(dict.fromkeys(name for candidate in self.candidates for name in candidate.runs.values()))


LOWER_IS_BETTER = ("loss",)  # of the metrics that experiments report


@dataclass(frozen=True)
class Plan:
    """An experiment. metric: the task's headline metric. baseline: the variant that paired differences are taken to.
    reported_split: the split that the experiment is about. Raises RunError for what does not fit together."""

    name: str
    title: str
    task: str
    budget: str
    budget_note: str
    command: str
    metric: str
    baseline: str | None
    selection: Selection
    reported_split: str
    axes: tuple[str, ...]
    figures: tuple[Figure, ...]
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        _need(names != [], "variants", "at least one is needed")
        for name in names:
            _need(names.count(name) == 1, "variants", f"two are called {name!r}")
        _need(self.baseline is None or self.baseline in names, "baseline", f"there is no variant {self.baseline!r}")
        needed = {"heat_map": 2, "scaling": 1}
        for figure in self.figures:
            enough = len(self.axes) >= needed.get(figure, 0)
            _need(enough, "figures", f"{figure!r} needs {needed.get(figure)} axes, not {len(self.axes)}")
        for variant in self.variants:
            key, count = f"variants[{variant.name!r}]", len(variant.candidates)
            _need(set(variant.axes) == set(self.axes), f"{key}.axes", f"has {[*variant.axes]}, not {[*self.axes]}")
            _need(count >= 1, f"{key}.candidates", "at least one is needed")
            _need(count == 1 or self.selection != "none", f"{key}.candidates", f"{count}, but selection is 'none'")
            for candidate in variant.candidates:
                _need(candidate.runs != {}, f"{key}.candidates", "one has no runs")
            for run in variant.runs:
                _need(run not in ("", ".", "..") and not {"/", "\\"} & set(run), f"{key}.runs", f"{run!r} is no folder")

    @property
    def runs(self) -> tuple[str, ...]:
        """The folders of all runs, each once: variants may share runs."""
        return tuple(dict.fromkeys(name for variant in self.variants for name in variant.runs))


def write_plan(folder: Path | str, plan: Plan) -> Path:
    """Write `plan.json` into `folder`, which is made if needed."""
    path = Path(folder) / PLAN
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_json(plan))
    return path


def read_plan(folder: Path | str) -> Plan:
    """The plan of the experiment in `folder`; :class:`RunError` names the file and the key that is wrong."""
    path = Path(folder) / PLAN
    return from_json(read_json(path), str(path))


def to_json(plan: Plan) -> dict[str, Any]:
    """`plan` as plain dicts and lists, seeds as text."""
    data: dict[str, Any] = {"format": FORMAT} | asdict(plan)
    for variant in data["variants"]:
        for candidate in variant["candidates"]:
            candidate["runs"] = {str(seed): name for seed, name in candidate["runs"].items()}
    return data


def from_json(data: Any, file: str = PLAN) -> Plan:
    """The inverse of :func:`to_json`. file: named in errors."""
    try:
        found = _object(data, "", {"format", *(field.name for field in fields(Plan))})
        _need(found.pop("format") == FORMAT, "format", f"{data['format']!r} is not {FORMAT}, which this version reads")
        variants = tuple(
            _variant(item, f"variants[{i}]") for i, item in enumerate(_list(found["variants"], "variants"))
        )
        texts = {name: _text(found[name], name) for name in _TEXTS}
        return Plan(
            **texts,
            baseline=_text_or_none(found["baseline"], "baseline"),
            selection=_one_of(found["selection"], "selection", Selection),
            axes=tuple(_text(axis, "axes") for axis in _list(found["axes"], "axes")),
            figures=tuple(_one_of(figure, "figures", Figure) for figure in _list(found["figures"], "figures")),
            variants=variants,
        )
    except _WrongKeyError as error:
        raise RunError(f"{file}, {error}") from None


_TEXTS = ("name", "title", "task", "budget", "budget_note", "command", "metric", "reported_split")


class _WrongKeyError(RunError):
    pass


def _need(condition: bool, key: str, problem: str) -> None:
    if not condition:
        raise _WrongKeyError(f"key {key}: {problem}")


def _variant(data: Any, key: str) -> Variant:
    found = _object(data, key, {field.name for field in fields(Variant)})
    candidates = _list(found["candidates"], f"{key}.candidates")
    return Variant(
        name=_text(found["name"], f"{key}.name"),
        mechanism=_text(found["mechanism"], f"{key}.mechanism"),
        axes=_settings(found["axes"], f"{key}.axes"),
        reported=_text_or_none(found["reported"], f"{key}.reported"),
        candidates=tuple(_candidate(item, f"{key}.candidates[{i}]") for i, item in enumerate(candidates)),
    )


def _candidate(data: Any, key: str) -> Candidate:
    found = _object(data, key, {field.name for field in fields(Candidate)})
    runs = _object(found["runs"], f"{key}.runs")
    for seed in runs:
        _need(seed.isdecimal() and str(int(seed)) == seed, f"{key}.runs", f"{seed!r} is no seed")
    named = {int(seed): _text(name, f"{key}.runs.{seed}") for seed, name in runs.items()}
    return Candidate(_settings(found["settings"], f"{key}.settings"), named)


def _object(data: Any, key: str, names: set[str] | None = None) -> dict[str, Any]:
    """`data` if it is an object, with exactly the keys `names` where they are given."""
    place = f"{key}." if key else ""
    _need(isinstance(data, Mapping), key or "(the file)", f"must be an object, not {str(data)[:60]!r}")
    if names is not None:
        for name in data:
            _need(name in names, f"{place}{name}", "is not known")
        for name in sorted(names):
            _need(name in data, f"{place}{name}", "is missing")
    return dict(data)


def _list(data: Any, key: str) -> list[Any]:
    _need(isinstance(data, list), key, f"must be a list, not {str(data)[:60]!r}")
    return data


def _text(data: Any, key: str) -> str:
    _need(isinstance(data, str), key, f"must be text, not {str(data)[:60]!r}")
    return data


def _text_or_none(data: Any, key: str) -> str | None:
    return None if data is None else _text(data, key)


def _one_of(data: Any, key: str, kind: Any) -> Any:
    _need(data in get_args(kind), key, f"{data!r} is none of {', '.join(get_args(kind))}")
    return data


def _settings(data: Any, key: str) -> dict[str, Setting]:
    found = _object(data, key)
    for name, value in found.items():
        plain = value is None or isinstance(value, str | int | float | bool)
        _need(plain, f"{key}.{name}", f"must be text, a number, true, false or null, not {str(value)[:60]!r}")
    return found
