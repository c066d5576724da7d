"""One engine for many runs: trains whatever is missing, resumes what was interrupted, leaves what is finished.

Each run trains in a process of its own and is a folder named after its config, so that nothing is trained twice, a changed
config is a new run, and the engine can be stopped, killed and started again at any moment. The folders are the only state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyla.runs import CONFIG, Run, create_run
from hyla.training.config import TrainConfig, config_to_dict

ENGINE_PID = "HYLA_ENGINE_PID"  # tells a worker whose child it is, so that it stops when the engine is gone
LOG = "worker.log"
POLL_SECONDS = 0.25


def config_hash(config: TrainConfig) -> str:
    """Eight hex digits of a config's content."""
    canonical = json.dumps(config_to_dict(config), sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=4).hexdigest()


def run_name(config: TrainConfig) -> str:
    """The folder of a run: for people first, and different for every config."""
    return f"{config.task_name}-{config.model.mechanism}-seed{config.seed}-{config_hash(config)}"


@dataclass
class Job:
    """One run that the engine is asked for, and how far it is."""

    run: Run
    steps: int
    step: int = 0
    error: str | None = None
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        """finished, diverged, failed, running or waiting."""
        if self.error is not None:
            return "failed"
        if self.process is not None:
            return "running"
        state = self.run.state
        return "waiting" if state == "unfinished" else state


def prepare(configs: Sequence[TrainConfig], folder: Path) -> list[Job]:
    """A job per config, with its run folder made where it is missing."""
    jobs = []
    for config in configs:
        path = folder / run_name(config)
        run = Run(path) if (path / CONFIG).exists() else create_run(path, config_to_dict(config))
        jobs.append(Job(run, config.training.steps, step=last_step(run)))
    return jobs


def last_step(run: Run) -> int:
    """The last step that a run has logged; 0 before the first."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        with open(run.metrics.path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")
        return json.loads(lines[-2])["step"]
    return 0


def run_jobs(jobs: Sequence[Job], workers: int, threads: int, progress: Callable[[Sequence[Job]], None]) -> None:
    """Train every job that has not ended, `workers` at a time with `threads` threads each.

    A run that fails keeps its error and does not stop the others. On Ctrl-C, SIGTERM or any error here the workers are
    asked to save and stop, and waited for; then KeyboardInterrupt or SystemExit goes on to the caller.
    """
    waiting = [job for job in jobs if job.state == "waiting"]
    running: list[Job] = []
    try:
        previous = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # not the main thread: whoever runs it there decides about signals
        previous = None
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                job.process = _start(job, threads)
                running.append(job)
            time.sleep(POLL_SECONDS)
            for job in list(running):
                assert job.process is not None
                job.step = last_step(job.run)
                status = job.process.poll()
                if status is not None:
                    job.process = None
                    running.remove(job)
                    if job.run.state == "unfinished":
                        job.error = _last_words(job.run.path / LOG, status)
            progress(jobs)
    finally:
        _stop(running)
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _start(job: Job, threads: int) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), ENGINE_PID: str(os.getpid())}
    command = [sys.executable, "-m", "hyla", "resume", str(job.run.path)]
    with open(job.run.path / LOG, "ab") as log:
        # in a session of its own: Ctrl-C reaches the engine alone, which then asks its workers to save
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _stop(running: Sequence[Job]) -> None:
    processes = [job.process for job in running if job.process is not None]
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: Path, status: int) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"{lines[-1]} (exit status {status}; all of it in {log})"
    return f"exit status {status}"


def stop_if_orphaned() -> None:
    """For a worker: ask this process to save and stop if the engine that started it is gone."""
    engine = os.environ.get(ENGINE_PID)
    if engine is not None and os.getppid() != int(engine):
        os.kill(os.getpid(), signal.SIGTERM)
