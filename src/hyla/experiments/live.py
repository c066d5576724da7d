"""What the terminal shows while an experiment trains: a live table, or plain lines where the output is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hyla.experiments.cost import duration, seconds_left
from hyla.experiments.engine import Job, Pool, seconds_of

SECONDS_BETWEEN_LINES = 60  # of plain progress
SECONDS_BETWEEN_ESTIMATES = 2.0
STATES = ("finished", "running", "waiting", "failed", "diverged")


class Display:
    """Shows jobs; `show` is the engine's progress callback. A context manager, for the live table."""

    def __init__(self, console: Console, pool: Pool):
        self.console, self.pool = console, pool
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._ended: set[str] | None = None
        self._told = self._estimated = time.monotonic()
        self._end = ""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        if self._ended is None or now - self._estimated > SECONDS_BETWEEN_ESTIMATES:
            self._end, self._estimated = estimated_end(seconds_left(seconds_of(jobs), self.pool.workers)), now
        if self._ended is None:
            self._ended = {job.name for job in jobs if job.ended}
            self._begin(jobs)
        for job in jobs:
            if job.ended and job.name not in self._ended:
                self._ended.add(job.name)
                reason = f": {job.error}" if job.error else ""
                self.console.print(f"{job.state}: {job.name}{reason}", soft_wrap=True)
        if self._live is not None:
            self._live.update(live_table(jobs, self._end, self.console.height), refresh=True)
        elif now - self._told > SECONDS_BETWEEN_LINES:
            self._told = now
            self.console.print(summary(jobs, self._end), soft_wrap=True)

    def _begin(self, jobs: Sequence[Job]) -> None:
        """What is there already, and how long the rest will take."""
        failed = sum(job.state == "failed" for job in jobs)
        there = sum(job.ended for job in jobs) - failed
        if there:
            self.console.print(f"{there} of {len(jobs)} runs were there already")
        if failed:
            self.console.print(f"{failed} of {len(jobs)} failed before; --retry-failed tries them again")
        if there + failed < len(jobs):
            self.console.print(f"{self._end} for the rest")


def estimated_end(seconds: float) -> str:
    """`about 12 min, until 14:05`."""
    end = datetime.now() + timedelta(seconds=seconds)
    return f"about {duration(seconds)}, until {end:%H:%M}" + (f" on {end:%d %B}" if seconds > 12 * 3600 else "")


def speed(jobs: Sequence[Job]) -> float:
    """Steps per second of those that run, together."""
    return sum((job.steps_per_second or 0.0 for job in jobs if job.state == "running"), 0.0)


def counts(jobs: Sequence[Job]) -> str:
    """`2 finished, 1 running`."""
    found = ((state, sum(job.state == state for job in jobs)) for state in STATES)
    return ", ".join(f"{count} {state}" for state, count in found if count)


def summary(jobs: Sequence[Job], end: str) -> str:
    """All jobs in a line: how many are in each state, steps per second, the estimated end."""
    return f"{len(jobs)} runs: {counts(jobs)}; {speed(jobs):.1f} steps/s; {end}"


def live_table(jobs: Sequence[Job], end: str, height: int) -> Group:
    """A row per variant that is not done yet, as many as the terminal is high, and all runs in a line below."""
    variants: dict[str, list[Job]] = {}
    for job in jobs:
        variants.setdefault(job.variant, []).append(job)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("variant")
    for name in (*STATES, "done", "steps/s"):
        table.add_column(name, justify="right")
    # those at work first, then those that wait; what is done is in the line below
    order = sorted(variants, key=lambda name: not any(job.state == "running" for job in variants[name]))
    left = [name for name in order if any(not job.ended for job in variants[name])]
    fitting = max(3, height - 6)
    for name in left[:fitting]:
        mine = variants[name]
        cells = [str(sum(job.state == state for job in mine) or "") for state in STATES]
        steps = sum(job.config.training.steps for job in mine)
        done = sum(job.config.training.steps if job.ended else job.step for job in mine) / steps
        table.add_row(name, *cells, f"{done:.0%}", f"{speed(mine):.1f}" if speed(mine) else "")
    more = [Text(f"and {len(left) - fitting} more variants", "dim")] if len(left) > fitting else []
    return Group(table, *more, Text(summary(jobs, end), "bold"))


def runs_table(jobs: Sequence[Job], pool: Pool) -> Group:
    """Every run with its state and the time that it needs by itself, and all together: what --dry-run shows."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    for name in ("row", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("time left", justify="right")
    seconds = seconds_of(jobs)
    for job, left in zip(jobs, seconds, strict=True):
        begun = job.state == "waiting" and job.step > 0
        state = f"step {job.step:,} of {job.config.training.steps:,}" if begun else job.state
        state += f": {job.error}" if job.error else ""
        table.add_row(job.name, job.variant, state, "" if job.ended else duration(left))
    steps = sorted({job.config.training.steps for job in jobs})
    length = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "")
    lines = [f"{len(jobs)} runs of {length} steps: {counts(jobs)}"]
    if all(job.ended for job in jobs):
        lines.append("nothing is left to train")
    else:
        measured = sum(job.steps_per_second is not None for job in jobs)
        table_of = "a table of speeds on two CPU cores, since no run has begun"
        threads = f"{pool.threads} thread" + ("s" if pool.threads > 1 else "")
        lines.append(
            f"about {duration(seconds_left(seconds, pool.workers))} left, {pool.workers} at a time with {threads} each "
            f"(from {f'speeds of {measured} runs here' if measured else table_of})"
        )
    return Group(table, *map(Text, lines))
