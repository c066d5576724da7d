"""The engine that trains many runs: killed, interrupted, with runs that fail; always the same results in the end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_resume import tiny

from hyla.errors import ConfigError, RunError
from hyla.experiments.cost import peak_gib, size_of
from hyla.experiments.engine import (
    Pool,
    check_machine,
    fits,
    hold,
    make_pool,
    read_errors,
    read_jobs,
    run_experiment,
    train,
)
from hyla.experiments.experiment import Experiment, Variant
from hyla.report.comparison import summarise
from hyla.report.plan import read_plan
from hyla.runs import create_run, open_run, read_json, write_json
from hyla.training.config import config_to_dict
from hyla.training.loop import train as train_alone

POOL = Pool(workers=2, cores=2, memory_gib=64.0)


def small(mechanisms=("softmax", "hyla"), seeds=(0,), base=None, **training):
    """An experiment of tiny runs, one row per mechanism."""
    base = base or tiny(threads=None, **training)
    rows = [Variant(m, (replace(base, model=replace(base.model, mechanism=m)),)) for m in mechanisms]
    return Experiment("small", "Small", tuple(rows), tuple(seeds), "custom", "For tests.")


def metrics(path):
    return [{k: v for k, v in line.items() if k != "steps_per_second"} for line in open_run(path).metrics.read()]


def states(jobs):
    return [job.state for job in jobs]


# --- what there is to do ----------------------------------------------------------------------------------------------


def test_jobs_are_read_and_nothing_is_made(tmp_path):
    experiment = small(seeds=(0, 1))
    jobs = read_jobs(experiment.runs, tmp_path / "new")
    assert [job.name for job in jobs] == [run.name for run in experiment.runs]
    assert states(jobs) == ["waiting"] * 4
    assert list(tmp_path.iterdir()) == []


def test_two_of_the_same_config_are_one_run(tmp_path):
    base = tiny()
    same = replace(base, optimizer=replace(base.optimizer, lr=2e-3))
    twice = Variant("a", (base, same, same))
    experiment = Experiment(
        "x", "X", (twice, Variant("b", (base,))), (0,), "custom", "", selection="validation", tuned=("optimizer.lr",)
    )
    assert len(experiment.runs) == 4
    assert len(read_jobs(experiment.runs, tmp_path)) == 2
    assert len(experiment.plan("hyla").runs) == 2


def test_two_configs_of_one_hash_are_refused(tmp_path):
    first, second = small(seeds=(0, 1), mechanisms=("hyla",)).runs
    with pytest.raises(RunError, match=f"two different configs have the same hash, {first.name}"):
        read_jobs([first, replace(second, name=first.name)], tmp_path)


def test_a_config_that_was_edited_is_refused_by_name_and_a_new_one_is_a_new_run(tmp_path):
    experiment = small()
    run = experiment.runs[0]
    path = create_run(tmp_path / "runs" / run.name, config_to_dict(run.config)).path
    assert states(read_jobs(experiment.runs, tmp_path)) == ["waiting"] * 2

    changed = small(base=replace(tiny(threads=None), optimizer=replace(tiny().optimizer, lr=5e-3)))
    assert not {job.name for job in read_jobs(changed.runs, tmp_path)} & {run.name for run in experiment.runs}

    data = read_json(path / "config.json")
    data["optimizer"]["lr"] = 5e-3
    write_json(path / "config.json", data)
    message = rf"{run.name} holds another run than its name says: optimizer.lr = 0.005 where 0.001 is asked for"
    with pytest.raises(RunError, match=message):
        read_jobs(experiment.runs, tmp_path)
    with pytest.raises(RunError, match=message):
        run_experiment(experiment, tmp_path, POOL, command="hyla")
    assert not (tmp_path / "plan.json").exists()
    data["optimizer"]["learning_rate"] = 5e-3
    write_json(path / "config.json", data)
    with pytest.raises(RunError, match=rf"{run.name}/config.json: unknown key 'learning_rate'"):
        read_jobs(experiment.runs, tmp_path)


def test_other_things_in_place_of_a_run_are_refused(tmp_path):
    experiment = small()
    other = tmp_path / "runs" / experiment.runs[1].name
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=f"{other.name} exists and is not an empty folder"):
        read_jobs(experiment.runs, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        run_experiment(experiment, tmp_path / "file", POOL, command="hyla")


def test_failures_are_remembered_until_asked_for(tmp_path):
    experiment = small()
    name = experiment.runs[0].name
    write_json(tmp_path / "errors.json", {name: {"error": "no luck", "attempts": 2}})
    job, other = read_jobs(experiment.runs, tmp_path)
    assert (job.state, job.error, job.attempts, other.state) == ("failed", "no luck", 2, "waiting")
    job, _ = read_jobs(experiment.runs, tmp_path, retry_failed=True)
    assert (job.state, job.attempts) == ("waiting", 2)
    write_json(tmp_path / "errors.json", {name: "no luck"})
    with pytest.raises(RunError, match=r"errors.json does not hold"):
        read_jobs(experiment.runs, tmp_path)


def test_a_run_that_cannot_fit_is_refused(tmp_path):
    experiment = small()
    with pytest.raises(ConfigError, match=rf"memory_gib = 0.2 is not possible: {experiment.runs[0].name} alone needs"):
        run_experiment(experiment, tmp_path / "out", replace(POOL, memory_gib=0.2), command="hyla")
    nowhere = small(base=tiny(device="cuda:99"))
    with pytest.raises(ConfigError, match=r"training.device = 'cuda:99'"):
        check_machine(read_jobs(nowhere.runs, tmp_path / "out"), POOL)
    assert list(tmp_path.iterdir()) == []
    assert size_of(experiment.runs[0].config) != size_of(experiment.runs[1].config)


def test_cores_are_shared_out_and_limits_checked():
    assert (make_pool(9, jobs=2, cores=8).threads, make_pool(9, jobs=3, cores=8).threads) == (4, 2)
    assert make_pool(1, cores=8) == replace(make_pool(9, jobs=1, cores=8))
    assert make_pool(9, jobs=4, cores=2).threads == 1
    assert make_pool(9).memory_gib > 0.1
    for limits in ({"jobs": 0}, {"cores": 0}, {"memory_gib": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(limits))):
            make_pool(9, **limits)


def test_a_second_engine_is_kept_out(tmp_path):
    with hold(tmp_path / "out"), pytest.raises(RunError, match="is in use by another hyla command"):
        run_experiment(small(), tmp_path / "out", POOL, command="hyla")
    assert not (tmp_path / "out" / "plan.json").exists()


def test_memory_limits_how_many_run_at_a_time(tmp_path):
    one, other = read_jobs(small().runs, tmp_path)
    need = peak_gib(one.config)
    assert fits(other, [], replace(POOL, memory_gib=0.01), {})  # one alone was checked before
    assert fits(other, [one], replace(POOL, memory_gib=2.1 * need), {})
    assert not fits(other, [one], replace(POOL, memory_gib=1.9 * need), {})
    # what was seen counts more than the estimate
    assert fits(other, [one], replace(POOL, memory_gib=1.9 * need), {size_of(other.config): 0.5 * need})
    one.peak_gib = 3 * need
    assert not fits(other, [one], replace(POOL, memory_gib=2.1 * need), {})


# --- training, in real processes --------------------------------------------------------------------------------------

ENGINE = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_engine import POOL, small
from hyla.experiments.engine import run_experiment
run_experiment(small(**json.loads(sys.argv[2])), Path(sys.argv[1]), POOL, command="hyla")
"""


def start_engine(folder, **options):
    here = Path(__file__).parent
    words = [folder, json.dumps(options), here, here.parent / "training"]
    return subprocess.Popen([sys.executable, "-c", ENGINE, *map(str, words)])


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return met


def saving(runs):
    """(run, process) of a run that is in the middle of writing a checkpoint and has a whole one already."""
    for stray in runs.glob("*/checkpoints/.writing-*"):
        pid = re.match(r"\.writing-(\d+)-", stray.name)
        if pid and list(stray.parent.glob("step_*")):
            return stray.parent.parent, int(pid[1])
    return None


def test_killed_and_failing_it_goes_on_where_it_was(tmp_path):
    """SWP-01, local part: six runs; one fails, a worker is killed with -9 while it saves, the engine with -9 later on."""
    runs = tmp_path / "runs"
    steps = {"steps": 120, "log_every": 5, "eval_every": 60, "checkpoint_every": 4}
    options = {"mechanisms": ["softmax", "linear", "hyla"], "seeds": [0, 1]} | steps
    experiment = small(**options)
    failing = runs / experiment.runs[0].name
    create_run(failing, config_to_dict(experiment.runs[0].config))
    (failing / "checkpoints").write_text("a file where a folder must be")

    # the first failure ends it all if asked
    _, jobs = run_experiment(experiment, tmp_path, Pool(1, 1, 64.0), command="hyla", fail_fast=True)
    assert states(jobs) == ["failed", *["waiting"] * 5]
    log = (failing / "worker.log").read_text()
    assert "could not be written" in log
    assert read_errors(tmp_path) == {failing.name: {"error": jobs[0].error, "attempts": 1}}

    engine = start_engine(tmp_path, **options)
    killed, pid = wait_for(lambda: saving(runs))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: list(runs.glob("*/result.json")))
    engine.send_signal(signal.SIGKILL)
    engine.wait(timeout=60)

    # again at once, while orphaned workers may still hold their runs
    ended = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert 1 <= len(ended) < 5
    _, jobs = run_experiment(experiment, tmp_path, POOL, command="hyla")
    assert states(jobs) == ["failed", *["finished"] * 5]
    assert (failing / "worker.log").read_text() == log  # not tried again
    assert read_errors(tmp_path) == {failing.name: {"error": jobs[0].error, "attempts": 1}}

    (failing / "checkpoints").unlink()
    called = []
    experiment = replace(experiment, after=lambda folder, plan: called.append((folder, plan)))
    plan, jobs = run_experiment(experiment, tmp_path, POOL, command="hyla", retry_failed=True)
    assert states(jobs) == ["finished"] * 6
    assert called == [(tmp_path, plan)] == [(tmp_path, read_plan(tmp_path))]
    assert not (tmp_path / "errors.json").exists()
    results = list(runs.glob("*/result.json"))
    assert len(results) == 6
    assert all(path.stat().st_mtime_ns == at for path, at in ended.items())
    for path in results:
        assert [line["step"] for line in open_run(path.parent).metrics.read()] == [*range(5, 121, 5)]
        assert not list((path.parent / "checkpoints").glob(".writing-*"))
        assert open_run(path.parent).config["run"]["threads"] == 1
    # the one killed while it saved had a checkpoint, and went on from one
    log = (killed / "worker.log").read_text()
    assert log.count("parameters, on") == 1  # started from nothing once
    starts = re.findall(r"seed \d, at step (\d+)", log)
    assert starts != []
    assert all(int(step) > 0 for step in starts)
    # and is the run that it would have been
    config = next(job.config for job in jobs if job.run.path == killed)
    train_alone(config, tmp_path / "alone")
    assert metrics(killed) == metrics(tmp_path / "alone")


def test_a_diverged_run_is_an_end_and_one_that_keeps_being_killed_a_failure(tmp_path):
    base = tiny(threads=None, steps=10_000, checkpoint_every=10_000)
    wild = small(["linear"], base=replace(base, optimizer=replace(base.optimizer, lr=1e29, warmup_steps=0)))
    slow = small(["hyla"], base=base)
    jobs = read_jobs([*wild.runs, *slow.runs], tmp_path)
    killed = []

    def kill(jobs):
        process = jobs[1].process
        if process is not None and process.pid not in killed:
            killed.append(process.pid)
            process.kill()

    train(jobs, POOL, kill)
    assert states(jobs) == ["diverged", "failed"]
    assert len(killed) == 3
    assert "killed 3 times without a new checkpoint" in jobs[1].error
    assert states(read_jobs(wild.runs, tmp_path)) == ["diverged"]
    assert jobs[0].peak_gib > 0.1 or not sys.platform.startswith("linux")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_workers_too(number, tmp_path, request):
    experiment = small(steps=10_000)
    workers = []
    if number == signal.SIGINT:  # where the tests run in the background of a script, it is ignored
        previous = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda: signal.signal(number, previous))

    def interrupt(jobs):
        if not workers and states(jobs) == ["running"] * 2:
            workers.extend(job.process for job in jobs)
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        run_experiment(experiment, tmp_path, POOL, command="hyla", progress=interrupt)
    assert [worker.poll() is not None for worker in workers] == [True, True]
    assert states(read_jobs(experiment.runs, tmp_path)) == ["waiting", "waiting"]
    with hold(tmp_path):
        pass


def test_a_candidate_without_a_finite_score_never_wins(tmp_path):
    base = tiny(threads=None)
    rates = tuple(replace(base, optimizer=replace(base.optimizer, lr=lr)) for lr in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3))
    row = Variant("hyla", rates, reported="hyla")
    experiment = Experiment(
        "x", "X", (row,), (0,), "custom", "For tests.", selection="validation", tuned=("optimizer.lr",)
    )
    scores = [float("nan"), 0.2, 0.3, 0.9, None]  # the fourth diverged, the fifth has not started
    for run, score in zip(experiment.runs, scores, strict=True):
        if score is None:
            continue
        made = create_run(tmp_path / "runs" / run.name, config_to_dict(run.config))
        splits = {split: {"r2": score} for split in ("train", "held_out", "validation")}
        state = "diverged" if score == 0.9 else "finished"
        result = {"state": state, "step": 24, "headline": "r2", "num_parameters": 1, "wall_seconds": 1.0}
        write_json(made.path / "result.json", result | {"splits": splits, "ceiling": None})
    (choice,) = summarise(experiment.plan("hyla sweep"), tmp_path).choices
    assert choice.candidates[choice.selected].settings == {"optimizer.lr": 3e-3}
    assert "so far" in choice.note
