"""The engine that trains many runs: killed, interrupted, with runs that fail; always the same results in the end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from test_resume import tiny

from hyla.errors import ConfigError, RunError
from hyla.experiments.cost import size_of
from hyla.experiments.engine import (
    Pool,
    check_machine,
    hold,
    make_pool,
    read_errors,
    read_jobs,
    run_experiment,
    train,
)
from hyla.experiments.experiment import Experiment, Variant, run_name
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


def ignore(jobs):
    pass


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
    with pytest.raises(ConfigError, match="training.device = 'cuda:99'"):
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


# --- training, in real processes --------------------------------------------------------------------------------------


def test_every_run_ends_and_equals_one_trained_alone(tmp_path):
    experiment = small()
    seen, called = [], []
    experiment = replace(experiment, after=lambda folder, plan: called.append((folder, plan)))
    plan, jobs = run_experiment(
        experiment, tmp_path, POOL, command="hyla compare", progress=lambda jobs: seen.append(states(jobs))
    )
    assert states(jobs) == ["finished", "finished"]
    assert ["running", "running"] in seen
    assert read_plan(tmp_path) == plan == called[0][1]
    for job in jobs:
        train_alone(job.config, tmp_path / "alone" / job.name)
        assert metrics(job.run.path) == metrics(tmp_path / "alone" / job.name)
        assert open_run(job.run.path).config["run"]["threads"] == 1
        assert job.peak_gib > 0.1 or not sys.platform.startswith("linux")
    assert not (tmp_path / "errors.json").exists()


ENGINE = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_engine import POOL, small
from hyla.experiments.engine import run_experiment
run_experiment(small(**json.loads(sys.argv[2])), Path(sys.argv[1]), POOL, command="hyla")
"""


def start_engine(folder, **options):
    here = os.path.dirname(__file__)
    words = [folder, json.dumps(options), here, os.path.join(here, "..", "training")]
    return subprocess.Popen([sys.executable, "-c", ENGINE, *map(str, words)])


def wait_for(condition, seconds=90):
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


def test_killed_interrupted_and_failing_it_goes_on_where_it_was(tmp_path):
    """SWP-01, local part: six runs, one that fails, a worker and the engine killed with -9, the next engine stopped."""
    runs = tmp_path / "runs"
    options = {"mechanisms": ["softmax", "linear", "hyla"], "seeds": [0, 1], "steps": 150, "log_every": 5}
    experiment = small(**options)
    failing = runs / experiment.runs[0].name
    create_run(failing, config_to_dict(experiment.runs[0].config))
    (failing / "checkpoints").write_text("a file where a folder must be")

    engine = start_engine(tmp_path, **options)
    killed, pid = wait_for(lambda: saving(runs))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: list(runs.glob("*/result.json")))
    engine.send_signal(signal.SIGKILL)
    engine.wait(timeout=60)

    # at once, while orphaned workers may still hold their runs
    first = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    assert 1 <= len(first) < 5
    engine = start_engine(tmp_path, **options)
    wait_for(lambda: len(list(runs.glob("*/result.json"))) > len(first))
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(timeout=60) == 143
    second = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    log = (failing / "worker.log").read_text()
    assert "could not be written" in log

    _, jobs = run_experiment(experiment, tmp_path, POOL, command="hyla")
    assert states(jobs) == ["failed", *["finished"] * 5]
    assert (failing / "worker.log").read_text() == log  # not tried again
    assert read_errors(tmp_path) == {failing.name: {"error": jobs[0].error, "attempts": 1}}
    assert "could not be written" in jobs[0].error

    (failing / "checkpoints").unlink()
    _, jobs = run_experiment(experiment, tmp_path, POOL, command="hyla", retry_failed=True)
    assert states(jobs) == ["finished"] * 6
    assert read_errors(tmp_path) == {}
    results = list(runs.glob("*/result.json"))
    assert len(results) == 6
    assert all(path.stat().st_mtime_ns == at for before in (first, second) for path, at in before.items())
    for path in results:
        steps = [line["step"] for line in open_run(path.parent).metrics.read()]
        assert steps == [*range(5, 151, 5)]
        assert not list((path.parent / "checkpoints").glob(".writing-*"))
    # the one killed while it saved had a checkpoint, and went on from one
    starts = re.findall(r"seed \d, at step (\d+)", (killed / "worker.log").read_text())
    assert starts != []
    assert all(int(step) > 0 for step in starts)
    assert (killed / "worker.log").read_text().count("parameters, on") == 1  # started from nothing once


def test_the_first_failure_ends_it_all_if_asked(tmp_path):
    experiment = small()
    failing = create_run(tmp_path / "runs" / experiment.runs[0].name, config_to_dict(experiment.runs[0].config))
    (failing.path / "checkpoints").write_text("a file where a folder must be")
    _, jobs = run_experiment(experiment, tmp_path, replace(POOL, workers=1), command="hyla", fail_fast=True)
    assert states(jobs) == ["failed", "waiting"]


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


def test_little_memory_trains_one_at_a_time(tmp_path):
    experiment = small()
    at_once = []
    pool = replace(POOL, memory_gib=0.5)
    run_experiment(
        experiment, tmp_path, pool, command="hyla", progress=lambda jobs: at_once.append(states(jobs).count("running"))
    )
    assert max(at_once) == 1


def test_names_differ_for_every_config():
    base = tiny()
    configs = [replace(base, seed=seed, optimizer=replace(base.optimizer, lr=lr)) for seed in range(8) for lr in (1e-3, 2e-3)]
    assert len({run_name(config) for config in configs}) == 16
    with contextlib.suppress(KeyError):
        raise KeyError
