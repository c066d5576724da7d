"""`hyla compare`: mechanisms side by side in one setting, as an experiment with one candidate each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hyla.errors import check
from hyla.experiments.experiment import Experiment, Splits, Variant
from hyla.experiments.hypernetwork_paper import Budget
from hyla.training.config import TrainConfig


def comparison(
    budget: Budget, config: TrainConfig, mechanisms: Sequence[str], seeds: Sequence[int], splits: Splits = "seed"
) -> Experiment:
    """One row per mechanism, in the setting of `config`: the budget's own, or a changed one, which is then named custom.

    Raises ConfigError for no mechanism or seed, for one named twice, and for a split that does not exist.
    """
    check(len(mechanisms) > 0, "mechanisms", list(mechanisms), "at least one")
    check(len(set(mechanisms)) == len(mechanisms), "mechanisms", list(mechanisms), "each only once")
    variants = []
    for mechanism in mechanisms:
        candidate = replace(config, model=replace(config.model, mechanism=mechanism))
        variants.append(Variant(mechanism, (candidate,), reported=mechanism))
    name, note = budget.name, budget.note
    if config != budget.config:
        steps = f"{config.training.steps:,} steps"
        name, note = "custom", f"Changes settings of the {budget.name} budget and trains for {steps}."
    task = {"logic": "Fuzzy logic", "sraven": "SRAVEN"}[config.task_name]
    return Experiment(
        name=f"compare-{config.task_name}",
        title=f"{task}: {', '.join(mechanisms) if len(mechanisms) <= 4 else f'{len(mechanisms)} mechanisms'}",
        variants=tuple(variants),
        seeds=tuple(seeds),
        budget=name,
        budget_note=note,
        splits=splits,
        baseline="softmax" if "softmax" in mechanisms else None,
    )
