"""What an experiment is, before anything is trained: variants x candidates x seeds, each a whole config.

A *variant* is a row of the table. Its *candidates* are the settings of the hyperparameters that it is tried with; each is
trained once per *seed*. `hyla compare`, `hyla reproduce` and `hyla sweep` only differ in how they make an
:class:`Experiment`; one engine trains them all (:mod:`hyla.experiments.engine`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from hyla.configs import without_added
from hyla.errors import ConfigError, check
from hyla.report import plan as plans
from hyla.report.plan import Figure, Plan, Selection, Setting
from hyla.training.config import TASKS, TrainConfig, config_from_dict, config_to_dict

Splits = Literal["seed", "official", "fixed", "paper"]


@dataclass(frozen=True)
class Variant:
    """One row of an experiment's table.

    candidates: the configs to choose from, whose seed and split are set per run. axes: its value on every axis of the
    experiment. reported: its mechanism's name among the reported figures, None where none is reported for it.
    """

    name: str
    candidates: tuple[TrainConfig, ...]
    axes: Mapping[str, Setting] = field(default_factory=dict)
    reported: str | None = None

    @property
    def mechanism(self) -> str:
        return self.candidates[0].mechanism


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment: its whole config, and where in the experiment it belongs."""

    name: str
    variant: Variant
    candidate: int
    seed: int
    config: TrainConfig


@dataclass(frozen=True)
class Experiment:
    """Runs that make one table.

    budget_note: what its results can show, for every output. splits: see :func:`with_seed`. tuned: the dotted keys that
    tell the candidates of a variant apart. axes: what variants differ in besides their mechanism. baseline: the variant
    that differences are taken to; where there are axes, each variant is compared with the one of the baseline's mechanism
    at its own place on them. after: called with the folder and the plan when all is trained, before the report.
    """

    name: str
    title: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    budget: str
    budget_note: str
    splits: Splits = "seed"
    selection: Selection = "none"
    tuned: tuple[str, ...] = ()
    baseline: str | None = None
    axes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ("scores", "curves")
    reported_split: str = "held_out"
    after: Callable[[Path, Plan], object] | None = None

    def __post_init__(self) -> None:
        check(len(self.variants) > 0, "variants", [], "at least one")
        check(len(self.seeds) > 0, "seeds", [], "at least one")
        check(len(set(self.seeds)) == len(self.seeds), "seeds", list(self.seeds), "each only once")
        names = [variant.name for variant in self.variants]
        check(len(set(names)) == len(names), "variants", names, "each name only once")

    @property
    def task(self) -> str:
        return self.variants[0].candidates[0].task_name

    @property
    def metric(self) -> str:
        return TASKS[self.task].task.headline

    @cached_property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Every run in the order of training: all rows of one seed come before the next seed, so that an experiment that
        is not finished compares like with like. Two of the same config have the same name: they are one run."""
        runs = []
        for seed, variant in product(self.seeds, self.variants):
            for number, candidate in enumerate(variant.candidates):
                config = with_seed(candidate, seed, self.splits)
                runs.append(PlannedRun(run_name(config), variant, number, seed, config))
        return tuple(runs)

    def plan(self, command: str) -> Plan:
        """What `plan.json` says. command: what was typed."""
        names: dict[tuple[str, int], dict[int, str]] = {}
        for run in self.runs:
            names.setdefault((run.variant.name, run.candidate), {})[run.seed] = run.name
        variants = []
        for variant in self.variants:
            candidates = tuple(
                plans.Candidate({key: setting(config, key) for key in self.tuned}, names[variant.name, number])
                for number, config in enumerate(variant.candidates)
            )
            row = plans.Variant(variant.name, variant.mechanism, dict(variant.axes), variant.reported, candidates)
            variants.append(row)
        return Plan(
            name=self.name,
            title=self.title,
            task=self.task,
            budget=self.budget,
            budget_note=self.budget_note,
            command=command,
            metric=self.metric,
            baseline=self.baseline,
            selection=self.selection,
            reported_split=self.reported_split,
            axes=self.axes,
            figures=self.figures,
            variants=tuple(variants),
        )

    def only(self, patterns: Sequence[str]) -> Experiment:
        """The variants whose name or mechanism matches one of the patterns (`*` and `?` stand for any letters).

        Raises ConfigError, naming what there is, for a pattern that nothing matches.
        """

        def matches(variant: Variant, pattern: str) -> bool:
            return fnmatchcase(variant.name, pattern) or fnmatchcase(variant.mechanism, pattern)

        names = "; ".join(variant.name for variant in self.variants)
        for pattern in patterns:
            check(
                any(matches(v, pattern) for v in self.variants), "only", pattern, f"nothing matches; there are {names}"
            )
        kept = tuple(v for v in self.variants if any(matches(v, pattern) for pattern in patterns))
        if self.baseline is None or self.baseline in [variant.name for variant in kept]:
            return replace(self, variants=kept)
        mechanism = next(variant.mechanism for variant in self.variants if variant.name == self.baseline)
        baseline = next((variant.name for variant in kept if variant.mechanism == mechanism), None)
        return replace(self, variants=kept, baseline=baseline)


def with_seed(config: TrainConfig, seed: int, splits: Splits) -> TrainConfig:
    """The run of `config` with this seed, which sets initialisation and data, and with the held-out set that `splits` says.

    seed: the set of the run's seed, so that the spread over seeds includes different held-out sets, as in P1. official:
    the public code's own set of that seed (ConfigError where there is none). paper: the same where there is one, else the
    set of the seed. fixed: the config's own.
    """
    if splits == "paper":
        try:
            return with_seed(config, seed, "official")
        except ConfigError:
            return with_seed(config, seed, "seed")
    split_seed = {"seed": seed, "official": f"official-{seed}", "fixed": config.task.split_seed}[splits]
    return replace(config, seed=seed, task=replace(config.task, split_seed=split_seed))


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """`config` with other values of dotted keys, such as {"optimizer.lr": 3e-3}. Raises ConfigError for a key that does
    not exist or a value that is not possible."""
    data: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        (data.setdefault(section, {}) if section else data)[name] = value
    return config_from_dict(data, config)


def setting(config: TrainConfig, key: str) -> Any:
    """The value of a dotted key."""
    if key == "model.architecture":
        return config.architecture_name
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def config_hash(config: TrainConfig) -> str:
    """Eight hex digits of a config's content, blind to fields that were added later and hold their default."""
    data = config_to_dict(config)
    for section in ("task", "model", "optimizer", "training"):
        data[section] = without_added(getattr(config, section), data[section])
    if data["model"]["architecture"] == "transformer":  # older than the choice of it
        del data["model"]["architecture"]
    canonical = json.dumps(data, sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=4).hexdigest()


def run_name(config: TrainConfig) -> str:
    """The folder of a run: for people first, and different for every config."""
    return f"{config.task_name}-{config.mechanism}-seed{config.seed}-{config_hash(config)}"
