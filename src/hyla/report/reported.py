"""What others report (`experiments/reported.toml`), for printing beside our own runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Reported:
    """A figure that others report for a mechanism and split.

    spread: None where none was given; spread_kind says what it is. note: where the figures of this source come from;
    caveat: what is uncertain about this one, empty for most.
    """

    source: str
    mean: float
    spread: float | None
    spread_kind: str
    steps: int
    setting: str
    note: str
    caveat: str


@lru_cache
def _tables() -> list[dict[str, Any]]:
    text = resources.files("hyla").joinpath("experiments/reported.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["table"]


def reported_names() -> frozenset[str]:
    """The names under which `reported.toml` has figures."""
    return frozenset(name for table in _tables() for split in table["splits"].values() for name in split)


def reported_figures(
    name: str,
    task: Mapping[str, Any],
    model: Mapping[str, Any],
    split: str,
    metric: str,
    steps: tuple[int, int] | None,
) -> tuple[Reported, ...]:
    """The figures reported under `name` for runs with these `task` and `model` sections, on one split.

    A table counts only if the sections agree with every key it names and set none that it wants unset. steps: fewest and
    most steps of the runs, for tables that hold for one number of steps only.
    """
    figures = []
    for table in _tables():
        figure = table["splits"].get(split, {}).get(name)
        wanted = [(task, table["task"]), (model, table["model"])]
        agrees = all(mine.get(key) == value for mine, theirs in wanted for key, value in theirs.items())
        agrees = agrees and all(model.get(key) is None for key in table["model_unset"])
        at_these_steps = not table["steps_must_agree"] or steps == (table["steps"], table["steps"])
        if figure is None or metric != table["metric"] or not agrees or not at_these_steps:
            continue
        mean, spread = (*figure, None)[:2]
        scale = table["divide_by"]
        figures.append(
            Reported(
                source=table["source"],
                mean=round(mean / scale, 6),
                spread=None if spread is None else round(spread / scale, 6),
                spread_kind=table["spread"],
                steps=table["steps"],
                setting=table["setting"],
                note=table["note"],
                caveat=table.get("caveats", {}).get(name, ""),
            )
        )
    return tuple(figures)
