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
    """quick: minutes on two cores. short: up to some hours. paper: the paper's steps, days on two cores.

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


# steps, warm-up, steps between evaluations, sequences of the last evaluation; chosen by measurement, see LOG.md
STEPS = {
    "logic": {"quick": (900, 100, 100, 4_096), "short": (3_000, 100, 250, 16_000)},
    "sraven": {"quick": (300, 50, 50, 2_048), "short": (5_000, 500, 500, 10_240)},
}

ONE_SETTING = (
    "The paper chose learning rate and weight decay from a grid; this uses one setting, lr 1e-3 and decay 0.1."
)
NOTES = {
    "logic": {
        "quick": (
            "900 of the paper's 50,000 steps. This shows that all mechanisms learn, and how far each is at the "
            "start, where softmax attention leads and HYLA is last. It cannot show which generalises best: HYLA "
            "overtakes only with longer training, by the paper's figures. For more: --budget short (3,000 steps), "
            "--budget paper (50,000)."
        ),
        "short": (
            "3,000 of the paper's 50,000 steps, the length that was measured on the paper's public code: softmax "
            "attention still leads, HYLA lies between it and linear attention. It cannot show the paper's result. "
            "Seeds with different held-out sets differ by more than mechanisms do: compare within a seed. For "
            "more: --budget paper."
        ),
        "paper": f"The paper's 50,000 steps. {ONE_SETTING}",
    },
    "sraven": {
        "quick": (
            "300 of the paper's 156,250 steps: accuracy (all features right) is still near 0. This shows that "
            "everything runs, not how any mechanism generalises. For more: --budget short (5,000 steps), --budget "
            "paper."
        ),
        "short": (
            "5,000 of the paper's 156,250 steps: the beginning of the learning curve. It cannot show how "
            "mechanisms generalise in the end. For more: --budget paper."
        ),
        "paper": f"The paper's 156,250 steps (20 million instances). {ONE_SETTING}",
    },
}
