"""The engine that trains many runs: killed, interrupted, with runs that fail; always the same results in the end."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from test_resume import tiny

from hyla.errors import ConfigError
from hyla.experiments.compare import comparison_configs
from hyla.experiments.engine import config_hash, prepare, run_jobs, run_name
from hyla.experiments.hypernetwork_paper import budget
from hyla.runs import open_run
from hyla.training.config import config_from_dict, config_to_dict
from hyla.training.loop import train


def ignore(jobs):
    pass


def metrics(path):
    return [{k: v for k, v in line.items() if k != "steps_per_second"} for line in open_run(path).metrics.read()]


def test_runs_are_named_by_their_whole_config():
    base = tiny()
    other = replace(base, optimizer=replace(base.optimizer, lr=2e-3))
    assert config_hash(base) != config_hash(other)
    assert run_name(base) == f"logic-hyla-seed0-{config_hash(base)}"
    assert config_hash(config_from_dict(json.loads(json.dumps(config_to_dict(base))))) == config_hash(base)


def test_a_comparison_shares_seeds_and_splits_between_mechanisms():
    configs = comparison_configs(tiny(), ["softmax", "hyla"], [0, 3])
    assert [(c.seed, c.model.mechanism, c.task.split_seed) for c in configs] == [
        (0, "softmax", 0),
        (0, "hyla", 0),
        (3, "softmax", 3),
        (3, "hyla", 3),
    ]
    fixed = replace(tiny(), task=replace(tiny().task, split_seed=7))
    assert {c.task.split_seed for c in comparison_configs(fixed, ["hyla"], [0, 3], "fixed")} == {7}
    assert [c.task.split_seed for c in comparison_configs(tiny(), ["hyla"], [2], "official")] == ["official-2"]
    with pytest.raises(ConfigError, match="official-5"):
        comparison_configs(tiny(), ["hyla"], [5], "official")
    with pytest.raises(ConfigError, match="each only once"):
        comparison_configs(tiny(), ["hyla"], [1, 1])


@pytest.mark.parametrize("task", ["logic", "sraven"])
def test_budgets_differ_in_steps_alone_and_say_what_they_show(task):
    sections = []
    for name in ("quick", "short", "paper"):
        planned = budget(task, name)
        assert len(planned.note) > 40
        data = config_to_dict(planned.config)
        data.pop("training")
        data["optimizer"].pop("warmup_steps")
        sections.append(data)
    assert sections[0] == sections[1] == sections[2]
    assert budget(task, "paper").config.training.steps == {"logic": 50_000, "sraven": 156_250}[task]
    with pytest.raises(ConfigError, match="budget = 'huge'"):
        budget(task, "huge")


def test_every_run_ends_and_equals_one_trained_alone(tmp_path):
    configs = comparison_configs(tiny(threads=None), ["softmax", "hyla"], [0])
    jobs = prepare(configs, tmp_path / "runs")
    seen = []
    run_jobs(jobs, 2, 1, lambda jobs: seen.append([job.state for job in jobs]))
    assert [job.state for job in jobs] == ["finished", "finished"]
    assert any("running" in states for states in seen)
    for config, job in zip(configs, jobs, strict=True):
        train(config, tmp_path / "alone" / job.run.name)
        assert metrics(job.run.path) == metrics(tmp_path / "alone" / job.run.name)
        assert open_run(job.run.path).config["run"]["threads"] == 1


ENGINE = """
import json, sys
from pathlib import Path
from hyla.experiments.engine import prepare, run_jobs
from hyla.training.config import config_from_dict
configs = [config_from_dict(data) for data in json.loads(sys.argv[2])]
run_jobs(prepare(configs, Path(sys.argv[1])), 2, 1, lambda jobs: None)
"""


def start_engine(folder, configs):
    data = json.dumps([config_to_dict(config) for config in configs])
    return subprocess.Popen([sys.executable, "-c", ENGINE, str(folder), data])


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_engine_goes_on_where_it_was(number, tmp_path):
    """SWP-01, local part: six runs, the engine killed after two have ended; again: six results, the two untouched."""
    folder = tmp_path / "runs"
    configs = comparison_configs(tiny(steps=150, log_every=5, threads=None), ["softmax", "linear", "hyla"], [0, 1])
    engine = start_engine(folder, configs)
    wait_for(lambda: len(list(folder.glob("*/result.json"))) >= 2)
    engine.send_signal(number)
    engine.wait(timeout=60)
    # the workers notice that they are alone and stop by themselves
    wait_for(
        lambda: subprocess.run(["pgrep", "-f", f"hyla resume {folder}"], stdout=subprocess.DEVNULL).returncode == 1
    )
    ended = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert 2 <= len(ended) < 6
    assert start_engine(folder, configs).wait(timeout=120) == 0
    results = list(folder.glob("*/result.json"))
    assert len(results) == 6
    assert all(path.stat().st_mtime_ns == at for path, at in ended.items())
    for path in results:
        steps = [line["step"] for line in open_run(path.parent).metrics.read()]
        assert steps == sorted(set(steps))
        assert steps[-1] == 150


def test_a_run_that_fails_is_listed_and_does_not_stop_the_others(tmp_path):
    configs = comparison_configs(tiny(threads=None), ["softmax", "hyla"], [0])
    jobs = prepare(configs, tmp_path / "runs")
    (jobs[0].run.path / "checkpoints").write_text("a file where a folder must be")
    run_jobs(jobs, 1, 1, ignore)
    assert [job.state for job in jobs] == ["failed", "finished"]
    assert "could not be written" in jobs[0].error
    (jobs[0].run.path / "checkpoints").unlink()
    again = prepare(configs, tmp_path / "runs")
    run_jobs(again, 1, 1, ignore)
    assert [job.state for job in again] == ["finished", "finished"]


def test_a_diverged_run_is_an_end(tmp_path):
    base = tiny(threads=None)
    wild = replace(base, optimizer=replace(base.optimizer, lr=1e29, warmup_steps=0))
    configs = comparison_configs(wild, ["linear"], [0])
    jobs = prepare(configs, tmp_path / "runs")
    run_jobs(jobs, 1, 1, ignore)
    assert [job.state for job in jobs] == ["diverged"]
    assert prepare(configs, tmp_path / "runs")[0].state == "diverged"
    assert os.path.exists(jobs[0].run.path / "worker.log")
