"""One engine for many runs: trains whatever is missing, resumes what was interrupted, leaves what is finished.

    DIR/plan.json       which runs make up the table (hyla.report.plan)
    DIR/runs/NAME/      the runs, each named after the hash of its whole config and trained in a process of its own
    DIR/errors.json     the runs that failed, with their error
    DIR/.lock           held while an engine works on the folder

Nothing is trained twice, a changed config is a new run, and the engine can be stopped, killed and started again at any
moment: the folder is the only state.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import filelock

from hyla.errors import ConfigError, RunError, check
from hyla.experiments.cost import peak_gib, seconds_each, size_of
from hyla.experiments.experiment import Experiment, PlannedRun
from hyla.models.transformer import TransformerConfig
from hyla.report.plan import ERRORS, RUNS, Plan, write_plan
from hyla.runs import CONFIG, LOCK, Run, check_free, create_run, read_json, write_json
from hyla.training.checkpoint import list_checkpoints
from hyla.training.config import TrainConfig, config_from_dict, config_to_dict, make_task
from hyla.training.loop import backend_of_run, resolve_device
from hyla.training.trackers import check_trackers

State = Literal["waiting", "running", "finished", "diverged", "failed"]

ENGINE_PID = "HYLA_ENGINE_PID"  # tells a worker whose child it is, so that it stops when the engine is gone
LOG = "worker.log"
POLL_SECONDS = 0.25
MAX_KILLS = 3  # of one run without a new checkpoint in between, before it counts as failed


@dataclass
class Job:
    """One run that the engine is asked for, and how far it is.

    step, steps_per_second: from the run's last logged line. attempts: how often it has failed. kills: how often its
    process was killed without a new checkpoint in between. saved_before: the step of the checkpoint that its process
    started from. peak_gib: the most memory that its processes were seen to hold.
    """

    run: Run
    config: TrainConfig
    variant: str
    state: State = "waiting"
    step: int = 0
    steps_per_second: float | None = None
    error: str | None = None
    attempts: int = 0
    kills: int = 0
    saved_before: int = 0
    peak_gib: float = 0.0
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "diverged", "failed")


Progress = Callable[[Sequence[Job]], None]


@dataclass(frozen=True)
class Pool:
    """What of this machine the runs may use.

    workers: runs trained at a time. cores: CPU cores, shared out among them as threads. memory_gib: as many runs are
    trained at a time as are expected to fit.
    """

    workers: int
    cores: int
    memory_gib: float

    def __post_init__(self) -> None:
        check(self.cores >= 1, "cores", self.cores, "at least 1")
        check(self.workers >= 1, "jobs", self.workers, "at least 1")
        check(self.memory_gib > 0, "memory_gib", self.memory_gib, "above 0")

    @property
    def threads(self) -> int:
        """Threads of each run."""
        return max(1, self.cores // self.workers)


def make_pool(
    num_runs: int, jobs: int | None = None, cores: int | None = None, memory_gib: float | None = None
) -> Pool:
    """A pool for `num_runs`. By default all cores of this machine, one run per core, and all of its memory."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if memory_gib is None:
        memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Pool(min(cores if jobs is None else jobs, max(1, num_runs)), cores, memory_gib)


# --- what there is to do ----------------------------------------------------------------------------------------------


def read_jobs(runs: Iterable[PlannedRun], folder: Path, *, retry_failed: bool = False) -> list[Job]:
    """A job for every different run, as its folder in `folder/runs` and errors.json leave it. Makes nothing.

    Raises RunError naming a run folder that does not hold the config asked for: it was edited, is damaged, or two
    configs share a name.
    """
    errors = read_errors(folder)
    jobs: dict[str, Job] = {}
    for planned in runs:
        name = planned.name
        if name in jobs:
            if jobs[name].config != planned.config:
                raise RunError(f"two different configs have the same hash, {name}: leave one of them out, or change it")
            continue
        job = jobs[name] = Job(Run(folder / RUNS / name), planned.config, planned.variant.name)
        if (job.run.path / CONFIG).exists():
            _check_same(job.run, job.config)
            update(job)
        else:
            check_free(job.run.path)
        if name in errors and not job.ended:
            job.attempts = errors[name]["attempts"]
            if not retry_failed:
                job.state, job.error = "failed", errors[name]["error"]
    return list(jobs.values())


def _check_same(run: Run, config: TrainConfig) -> None:
    """Raise RunError, naming the keys that differ, if the folder holds another run than that of `config`."""
    try:
        found = config_to_dict(config_from_dict(run.config))
    except ConfigError as error:
        raise RunError(f"{run.path / CONFIG}: {error}") from None
    wanted = config_to_dict(config)
    differences = [
        f"{section}.{key} = {found[section][key]!r} where {value!r} is asked for"
        for section in ("task", "model", "optimizer", "training")
        for key, value in wanted[section].items()
        if found[section].get(key) != value
    ]
    if found["seed"] != wanted["seed"]:
        differences.append(f"seed = {found['seed']} where {wanted['seed']} is asked for")
    if differences:
        raise RunError(
            f"{run.path} holds another run than its name says: {'; '.join(differences)}. Undo the edit of its {CONFIG}, or "
            "move the folder away"
        )


def update(job: Job) -> None:
    """Read from its files how far a run is."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        with open(job.run.metrics.path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            line = json.loads(file.read().split(b"\n")[-2])
        job.step, job.steps_per_second = line["step"], line["steps_per_second"]
    result = job.run.result
    if result is not None:
        job.state, job.step = result["state"], result["step"]
        job.steps_per_second = result.get("steps_per_second") or job.steps_per_second


def read_errors(folder: Path) -> dict[str, dict[str, Any]]:
    """errors.json: {run: {"error", "attempts"}}; empty where there is none."""
    path = folder / ERRORS
    if not path.exists():
        return {}
    errors = read_json(path)
    sound = isinstance(errors, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("error"), str) and isinstance(entry.get("attempts"), int)
        for entry in errors.values()
    )
    if not sound:
        raise RunError(f"{path} does not hold {{run: {{error, attempts}}}}; delete it to try every run again")
    return errors


def write_errors(folder: Path, jobs: Sequence[Job]) -> None:
    """Bring errors.json up to date with `jobs`; what it says of other runs stays."""
    errors = read_errors(folder)
    for job in jobs:
        if job.state == "failed":
            errors[job.name] = {"error": job.error, "attempts": job.attempts}
        elif job.state in ("finished", "diverged"):
            errors.pop(job.name, None)
    if errors:
        write_json(folder / ERRORS, errors)
    else:
        (folder / ERRORS).unlink(missing_ok=True)


def check_machine(jobs: Sequence[Job], pool: Pool) -> None:
    """Raise ConfigError for a run still to be trained that this machine or this pool cannot take."""
    checked = set()
    for job in jobs:
        config, need = job.config, peak_gib(job.config)
        if job.ended or size_of(config) in checked:
            continue
        checked.add(size_of(config))
        allowed = f"{job.name} alone needs about {need:.1f} GiB"
        check(need <= pool.memory_gib, "memory_gib", round(pool.memory_gib, 2), allowed)
        check_trackers(config)
        device = resolve_device(config.training.device)
        if isinstance(config.model, TransformerConfig) and config.model.backend != "auto":
            backend_of_run(config, make_task(config), device)


def seconds_of(jobs: Sequence[Job]) -> list[float]:
    """Seconds that each job still takes by itself, from measured speeds where there are any."""
    return seconds_each([(job.config, None if job.ended else job.step, job.steps_per_second) for job in jobs])


# --- the whole experiment ---------------------------------------------------------------------------------------------


def run_experiment(
    experiment: Experiment,
    folder: Path,
    pool: Pool,
    *,
    command: str,
    retry_failed: bool = False,
    fail_fast: bool = False,
    progress: Progress = lambda jobs: None,
) -> tuple[Plan, list[Job]]:
    """Write plan.json, train what is missing under `folder/runs`, then call the experiment's `after`.

    A run that fails is listed in errors.json and in its job, and does not stop the others unless `fail_fast`; one that
    failed before is only tried again with `retry_failed`. Raises ConfigError or RunError, before anything is made, for
    what cannot work, and RunError where another engine is at work on the folder.
    """
    check(not folder.exists() or folder.is_dir(), "out", str(folder), "it is a file")
    plan, runs = experiment.plan(command), experiment.runs
    check_machine(read_jobs(runs, folder, retry_failed=retry_failed), pool)
    with hold(folder):
        jobs = read_jobs(runs, folder, retry_failed=retry_failed)
        write_plan(folder, plan)
        train(jobs, pool, progress, changed=lambda: write_errors(folder, jobs), fail_fast=fail_fast)
        if experiment.after is not None and all(job.ended for job in jobs):
            experiment.after(folder, plan)
    return plan, jobs


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make the folder and keep every other engine out of it; RunError where one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise RunError(
            f"{folder} is in use by another hyla command that trains its runs; wait for it or stop it"
        ) from None
    try:
        yield
    finally:
        lock.release()


# --- the pool ---------------------------------------------------------------------------------------------------------


def train(
    jobs: Sequence[Job],
    pool: Pool,
    progress: Progress,
    *,
    changed: Callable[[], None] = lambda: None,
    fail_fast: bool = False,
) -> None:
    """Train every job that has not ended, as many at a time as `pool` takes. `changed` is called whenever one has ended.

    A run whose process was killed, or stopped from outside, goes on from its newest checkpoint; it counts as failed after
    MAX_KILLS of these in a row without a new checkpoint. On Ctrl-C, SIGTERM or any error here the workers are asked to
    save and stop, and waited for; then KeyboardInterrupt or SystemExit goes on to the caller.
    """
    waiting = [job for job in jobs if job.state == "waiting"]
    running: list[Job] = []
    measured: dict[Any, float] = {}  # GiB, by size
    changed()
    progress(jobs)
    try:
        previous = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # not the main thread: whoever runs it there decides about signals
        previous = None
    try:
        while waiting or running:
            while len(running) < pool.workers:
                job = next((j for j in waiting if fits(j, running, pool, measured) and not _in_use(j.run)), None)
                if job is None:
                    break
                waiting.remove(job)
                update(job)  # another process may have ended it while it waited
                if not job.ended:
                    _start(job, pool.threads)
                    running.append(job)
            time.sleep(POLL_SECONDS)
            for job in list(running):
                assert job.process is not None
                status = job.process.poll()
                update(job)
                job.peak_gib = max(job.peak_gib, _held_gib(job.process.pid))
                if status is None:
                    continue
                running.remove(job)
                _settle(job, status)
                if job.state == "waiting":
                    waiting.insert(0, job)
                elif job.state == "finished":
                    measured[size_of(job.config)] = max(measured.get(size_of(job.config), 0.0), job.peak_gib)
                changed()
                if job.state == "failed" and fail_fast:
                    return
            progress(jobs)
    finally:
        _stop(running)
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
        progress(jobs)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def fits(job: Job, running: Sequence[Job], pool: Pool, measured: dict[Any, float]) -> bool:
    """Whether there is memory for `job` beside those that run. One alone always fits, see `check_machine`."""
    needs = [max(measured.get(size_of(j.config)) or peak_gib(j.config), j.peak_gib) for j in [job, *running]]
    return not running or sum(needs) <= pool.memory_gib


def _in_use(run: Run) -> bool:
    """Whether another process is training into the folder, such as a worker whose engine was killed a moment ago."""
    if not (run.path / CONFIG).exists():
        return False
    try:
        with run.locked():
            return False
    except RunError:
        return True


def _held_gib(pid: int) -> float:
    """The most memory that a process has held so far, where the system tells (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return 0.0


def _start(job: Job, threads: int) -> None:
    """Start a process that trains the run, whose folder is made if it is not there yet."""
    if not (job.run.path / CONFIG).exists():
        create_run(job.run.path, config_to_dict(job.config))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), ENGINE_PID: str(os.getpid())}
    command = [sys.executable, "-m", "hyla", "resume", str(job.run.path)]
    with open(job.run.path / LOG, "ab") as log:
        # in a session of its own: Ctrl-C reaches the engine alone, which then asks its workers to save
        job.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    job.state, job.error, job.saved_before = "running", None, _saved_step(job.run)


def _saved_step(run: Run) -> int:
    """The step of a run's newest checkpoint; 0 before the first."""
    return max((step for step, _ in list_checkpoints(run.checkpoints)), default=0)


def _settle(job: Job, status: int) -> None:
    """What becomes of a job whose process has ended with `status`."""
    job.process = None
    if job.ended:  # result.json says so
        return
    if status < 0 or status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        job.kills = 1 if _saved_step(job.run) > job.saved_before else job.kills + 1
        if job.kills < MAX_KILLS:
            job.state = "waiting"
            return
        job.error = f"killed {job.kills} times without a new checkpoint (exit status {status}); too little memory?"
    else:
        job.error = _last_words(job.run.path / LOG, status)
    job.state = "failed"
    job.attempts += 1


def _stop(running: Sequence[Job]) -> None:
    """Ask the workers to save and stop, and wait for them."""
    for job in running:
        if job.process is not None:
            job.process.send_signal(signal.SIGTERM)
    for job in running:
        if job.process is not None:
            try:
                job.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
            job.process, job.state = None, "waiting"
            update(job)


def _last_words(log: Path, status: int) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"{lines[-1]} (exit status {status}; all of it in {log})"
    return f"exit status {status}"


def stop_with_engine() -> None:
    """For a worker, before anything else: ask this process to save and stop as soon as its engine is gone."""
    engine = os.environ.get(ENGINE_PID)
    if engine is None:
        return
    if os.getppid() != int(engine):  # it was killed while this process was starting
        raise SystemExit(128 + signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == int(engine):
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
