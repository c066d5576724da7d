"""Training steps of language models of one size, mechanism against mechanism, and what drawing a batch costs.

    python benchmarks/language_speed.py runs/language/runs/RUN ...

Takes the settings of text runs (their text must lie where it was), and alternates their whole steps in one process: the
ratios drift less than the times.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

from hyla.bench import Step, alternate
from hyla.runs import open_run
from hyla.training.config import config_from_dict, make_task
from hyla.training.loop import apply_gradients, compute_loss, fresh_model
from hyla.training.optimizer import make_optimizer

REPEATS = 15


def step_of(path: Path) -> tuple[str, int, Step]:
    """(mechanism, tokens of a step, the step) of a run, from fresh weights."""
    config = config_from_dict(open_run(path).config)
    task = make_task(config, path)
    model = fresh_model(config, task, torch.device("cpu"))
    optimizer = make_optimizer(model, config.optimizer)
    size, half = config.training.batch_size, config.training.precision == "bf16"
    number = 0

    def step() -> None:
        nonlocal number
        batch = task.batch("train", number, size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = compute_loss(model, task, batch)
        loss.backward()
        apply_gradients(model, optimizer, 1e-4, config.optimizer.clip_norm)
        number += 1

    return config.mechanism, size * task.sequence_length, step


def main(paths: list[Path]) -> None:
    torch.set_num_threads(1)
    name, tokens, first = step_of(paths[0])
    config = config_from_dict(open_run(paths[0]).config)
    task = make_task(config, paths[0])
    start = time.perf_counter()
    for number in range(100):
        task.batch("train", number, config.training.batch_size)
    print(f"a batch: {(time.perf_counter() - start) * 10:.2f} ms")
    for path in paths[1:]:
        other, _, step = step_of(path)
        ours, theirs = alternate(first, step, REPEATS)
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        for mechanism, times in ((name, ours), (other, theirs)):
            middle = statistics.median(times)
            print(f"{mechanism}: {middle:.0f} ms a step, {1e3 * tokens / middle:,.0f} tokens a second")
        print(f"{other} / {name}: {ratio:.2f}")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
