"""Comparisons of the first paper: what a budget trains, and what it can show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hyla.errors import check
from hyla.training.config import TrainConfig, preset_default, preset_paper

BudgetName = Literal["quick", "short", "paper"]


@dataclass(frozen=True)
class Budget:
    """A config to compare mechanisms in (its mechanism and seed are replaced), and what its results can show."""

    name: str
    config: TrainConfig
    note: str


def budget(task: str, name: str) -> Budget:
    """quick: minutes on two cores. short: about an hour or two. paper: the paper's steps, days on two cores for SRAVEN.

    All use P1's sizes and the public code's schedule, so that they differ in steps alone.
    """
    check(name in NOTES[task], "budget", name, f"choose from {', '.join(NOTES[task])}")
    paper = preset_paper(task)
    if name == "paper":
        return Budget(name, paper, NOTES[task][name])
    steps, warmup, eval_every, samples = STEPS[task][name]
    loop = replace(
        preset_default(task).training,
        steps=steps,
        log_every=25,
        eval_every=eval_every,
        eval_samples=1_024,
        final_eval_samples=samples,
        checkpoint_every=eval_every,
    )
    optimizer = replace(paper.optimizer, warmup_steps=warmup)
    return Budget(name, replace(paper, optimizer=optimizer, training=loop), NOTES[task][name])


# steps, warm-up, steps between evaluations, sequences of the last evaluation
STEPS = {
    "logic": {"quick": (900, 100, 100, 4_096), "short": (5_000, 100, 500, 16_000)},
    "sraven": {"quick": (300, 50, 50, 2_048), "short": (5_000, 500, 500, 10_240)},
}

NOTES = {
    "logic": {
        "quick": "",
        "short": "",
        "paper": "The paper's steps. Its figures chose learning rate and weight decay from a grid; this uses one setting.",
    },
    "sraven": {
        "quick": "",
        "short": "",
        "paper": "The paper's steps. Its figures chose learning rate and weight decay from a grid; this uses one setting.",
    },
}
