"""Runs that are really killed, and checkpoints that are really damaged, end as runs left alone."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyla.attention import choose_backend
from hyla.errors import CheckpointError, DivergedError, HylaError, RunError
from hyla.runs import open_run
from hyla.training.checkpoint import MODEL, OPTIMIZER, STATE, checkpoint_path, list_checkpoints, save_checkpoint, verify
from hyla.training.config import TrainConfig, config_to_dict, preset_default
from hyla.training.loop import InterruptedRunError, Trainer, load_model, resume, train
from hyla.training.optimizer import make_optimizer

STEPS = 24


def tiny(task="logic", **training) -> TrainConfig:
    """Three epochs' worth of eight small batches, evaluated every 5 steps and saved every 4, with dropout."""
    base = preset_default(task)
    small = {"embed_dim": 16, "mlp_dim": 16, "num_heads": 4, "qk_dim": 8, "v_dim": 8, "num_layers": 2}
    data = {"num_points": 6} if task == "logic" else {"num_features": 2, "num_values": 5}
    loop = {"steps": STEPS, "batch_size": 8, "log_every": 1, "eval_every": 5, "checkpoint_every": 4}
    loop |= {"eval_samples": 40, "final_eval_samples": 60, "threads": 1} | training
    return replace(
        base,
        task=replace(base.task, **data),
        model=replace(base.model, **small),
        optimizer=replace(base.optimizer, warmup_steps=4),
        training=replace(base.training, **loop),
    )


def content(path: Path):
    """What must be equal bit for bit: weights, optimiser, metrics and result, without what a clock has measured."""
    lines = [{k: v for k, v in line.items() if k != "steps_per_second"} for line in open_run(path).metrics.read()]
    result = {k: v for k, v in open_run(path).result.items() if k not in ("wall_seconds", "steps_per_second")}
    last = checkpoint_path(path / "checkpoints", STEPS)
    return lines, result, (last / MODEL).read_bytes(), (last / OPTIMIZER).read_bytes()


def python(code: str, *arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def hyla(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hyla", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


# Trains a run, new or begun, and kills itself with SIGKILL once a step has been logged.
TRAIN_AND_DIE = """
import json, os, signal, sys
from hyla.training.config import config_from_dict
from hyla.training.loop import Trainer
path, config, at = sys.argv[1:]
new = not os.path.exists(path)
trainer = Trainer.start(config_from_dict(json.loads(config)), path) if new else Trainer.resume(path)
trainer.run(lambda line: os.kill(os.getpid(), signal.SIGKILL) if line["step"] == int(at) else None)
"""


def killed_at(path: Path, config: TrainConfig, step: int) -> None:
    done = python(TRAIN_AND_DIE, path, json.dumps(config_to_dict(config)), step)
    assert done.returncode == -signal.SIGKILL, done.stderr


VARIANTS = {
    "sraven": tiny("sraven"),
    "mixture": replace(tiny(), model=replace(tiny().model, mlp="mixture", mechanism="hyla_plus")),
    "clipped, bf16": replace(tiny(precision="bf16"), optimizer=replace(tiny().optimizer, clip_norm=0.1)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_killed_twice_and_resumed_is_bit_for_bit_the_same(name, tmp_path):
    """TRN-01: killed with -9 at step 19 and, resumed, at 22; every step logged once; evaluated at 5, 10, 15, 20."""
    config = VARIANTS[name]
    train(config, tmp_path / "alone")
    killed_at(tmp_path / "killed", config, 19)
    killed_at(tmp_path / "killed", config, 22)
    notes = Trainer.resume(tmp_path / "killed").notes
    assert notes == []
    resume(tmp_path / "killed")
    assert content(tmp_path / "killed") == content(tmp_path / "alone")
    lines = content(tmp_path / "killed")[0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "splits" in line] == [5, 10, 15, 20, 24]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(number, status, tmp_path):
    config = tiny(steps=100_000, checkpoint_every=50_000, eval_every=50_000)
    path = tmp_path / "run"
    source = tmp_path / "config.json"
    source.write_text(json.dumps(config_to_dict(config)))
    command = [sys.executable, "-m", "hyla", "train", "logic", "--config", str(source), "--out", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (path / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"hyla resume {path}" in errors
    assert "Traceback" not in errors
    (step, saved), *_ = list_checkpoints(path / "checkpoints")
    assert verify(saved)["step"] == step
    assert f"stopped at step {step}" in errors
    trainer = Trainer.resume(path)
    assert trainer.step == step


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "half of the weights": (lambda p: half(p / MODEL), r"model.safetensors has .* bytes instead of"),
    "no byte of the optimiser": (lambda p: (p / OPTIMIZER).write_bytes(b""), r"optimizer.safetensors has 0 bytes"),
    "half of the state": (lambda p: half(p / STATE), r"state.json, line \d+, column \d+"),
    "an empty state": (lambda p: (p / STATE).write_bytes(b""), r"state.json, line 1"),
    "a state of something else": (
        lambda p: (p / STATE).write_text("{}"),
        r"state.json lacks step, best, seconds or files",
    ),
    "a flipped bit": (lambda p: flip(p / MODEL), r"model.safetensors is damaged"),
    "weights gone": (lambda p: (p / MODEL).unlink(), r"model.safetensors is missing"),
}


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run that ended at step 24 without having written its result, and the same one left alone."""
    folder = tmp_path_factory.mktemp("stopped")
    train(tiny(), folder / "alone")
    shutil.copytree(folder / "alone", folder / "run")
    (folder / "run" / "result.json").unlink()
    return folder


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_by_name(name, stopped_run, tmp_path):
    """TRN-03: the newest whole one is taken, and the run still ends as it would have."""
    damage, message = DAMAGE[name]
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    newest = checkpoint_path(tmp_path / "run" / "checkpoints", STEPS)
    damage(newest)
    trainer = Trainer.resume(tmp_path / "run")
    (note,) = trainer.notes
    assert "skipped a checkpoint" in note
    assert str(newest) in note
    assert re.search(message, note)
    trainer.run()
    assert content(tmp_path / "run") == content(stopped_run / "alone")
    assert verify(newest)["step"] == STEPS


def test_what_was_skipped_is_said_on_the_command_line(stopped_run, tmp_path):
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    newest = checkpoint_path(tmp_path / "run" / "checkpoints", STEPS)
    half(newest / MODEL)
    done = hyla("resume", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"skipped a checkpoint: {newest}" in done.stderr
    assert content(tmp_path / "run") == content(stopped_run / "alone")


def test_when_no_checkpoint_is_whole_it_starts_again_and_says_so(stopped_run, tmp_path):
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    for _, path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        half(path / MODEL)
    trainer = Trainer.resume(tmp_path / "run")
    assert trainer.step == 0
    assert "starts again from step 0" in trainer.notes[0]
    trainer.run()
    assert content(tmp_path / "run") == content(stopped_run / "alone")
    with pytest.raises(RunError, match="has ended"):
        Trainer.resume(tmp_path / "run")


def test_killed_between_the_last_checkpoint_and_the_result(stopped_run, tmp_path):
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    resume(tmp_path / "run")
    assert content(tmp_path / "run") == content(stopped_run / "alone")


def test_killed_inside_the_write(tmp_path):
    """The checkpoint being written is not there under its name, the one before is, and the next save clears up."""
    path, config = tmp_path / "run", tiny()
    code = """
import json, os, signal, sys
from hyla.training import loop
from hyla.training.config import config_from_dict
save = loop.save_checkpoint
def dies_at_12(folder, step, *arguments):
    hook = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if step == 12 else (lambda: None)
    return save(folder, step, *arguments, before_rename=hook)
loop.save_checkpoint = dies_at_12
loop.train(config_from_dict(json.loads(sys.argv[2])), sys.argv[1])
"""
    done = python(code, path, json.dumps(config_to_dict(config)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = path / "checkpoints"
    assert not checkpoint_path(folder, 12).exists()
    assert list(folder.glob(".writing-*"))
    assert max(step for step, _ in list_checkpoints(folder)) < 12
    resume(path)
    assert not list(folder.glob(".writing-*"))
    train(config, tmp_path / "alone")
    assert content(path) == content(tmp_path / "alone")


def test_a_file_too_large_for_the_disk(tmp_path):
    """The kernel refuses the write; the earlier checkpoints stay, and the message has path and size."""
    trainer = Trainer.start(tiny(), tmp_path / "run")
    trainer.step = 4
    trainer.save()
    trainer.step = 8
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, old[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step_00000008 could not be written \([\d,]+ bytes needed\): the disk"
        ):
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    folder = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [4]
    assert not list(folder.glob(".writing-*"))
    assert verify(checkpoint_path(folder, 4))
    trainer.save()
    assert [step for step, _ in list_checkpoints(folder)] == [4, 8]


def test_a_full_disk(tmp_path):
    """The same on a real file system that has no room left: non-zero exit, no traceback, and it goes on after space."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs; runs as root on Linux")
    try:
        source = tmp_path / "config.json"
        source.write_text(json.dumps(config_to_dict(tiny())))
        path = small / "run"
        done = hyla("train", "logic", "--config", source, "--out", path, "--training.keep-checkpoints", 9)
        assert done.returncode == 1
        assert "bytes needed): the disk is full" in done.stderr
        assert str(path / "checkpoints") in done.stderr
        assert "Traceback" not in done.stderr
        whole = list_checkpoints(path / "checkpoints")
        assert whole
        assert all(verify(p)["step"] == step for step, p in whole)
        subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
        resume(path)
        assert open_run(path).state == "finished"
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    trainer = Trainer.start(tiny(), tmp_path / "run")
    (tmp_path / "run" / "checkpoints").write_text("a file in its place")
    with pytest.raises(CheckpointError, match="could not be written"):
        trainer.save()


def test_two_saves_racing(tmp_path):
    """Many writers of the same steps: every checkpoint is whole and nothing stray is left."""
    config = tiny()
    trainer = Trainer.start(config, tmp_path / "run")
    folder = tmp_path / "race"

    def write():
        for step in (1, 2, 3):
            save_checkpoint(folder, step, trainer.model, trainer.optimizer, {"best": None, "seconds": 0.0})

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [step for step, _ in list_checkpoints(folder)] == [1, 2, 3]
    assert all(verify(path)["step"] == step for step, path in list_checkpoints(folder))
    assert not list(folder.glob(".writing-*"))


def test_two_processes_never_train_into_one_folder(tmp_path):
    path = tmp_path / "run"
    trainer = Trainer.start(tiny(), path)
    with trainer.folder.locked():
        done = hyla("resume", path)
    assert done.returncode == 2
    assert "in use by another process" in done.stderr
    assert not (path / "metrics.jsonl").exists()
    resume(path)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_divergence_stops_and_keeps_the_last_good_checkpoint(precision, tmp_path):
    path = tmp_path / "run"
    trainer = Trainer.start(tiny(precision=precision), path)

    def poison(line):
        if line["step"] == 9:
            with torch.no_grad():
                trainer.model.head.weight[0, 0] = float("nan")

    with pytest.raises(
        DivergedError, match=r"loss nan at step 10 .* last good checkpoint: step \d+.*lower --optimizer.lr"
    ):
        trainer.run(poison)
    result = open_run(path).result
    assert (result["state"], result["step"]) == ("diverged", 10)
    model, _, _ = load_model(path)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with pytest.raises(RunError, match="has ended"):
        Trainer.resume(path)


def test_a_rate_that_explodes_ends_with_status_1(tmp_path):
    path = tmp_path / "run"
    flags = ["--steps", 200, "--lr", 1e29, "--optimizer.warmup-steps", 1, "--batch-size", 8, "--task.num-points", 4]
    done = hyla("train", "logic", "--mechanism", "linear", *flags, "--out", path, "--model.embed-dim", 16)
    assert done.returncode == 1, done.stderr
    assert "To mend it, try a lower --optimizer.lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((path / "result.json").read_text())["state"] == "diverged"


def test_what_differs_on_resuming_is_said(tmp_path):
    path = tmp_path / "run"
    Trainer.start(tiny(), path)
    stored = json.loads((path / "config.json").read_text())
    stored["run"] |= {"threads": 64, "torch": "2.9.0"}
    (path / "config.json").write_text(json.dumps(stored))
    (note,) = Trainer.resume(path).notes
    assert "threads: 64 -> 1" in note
    assert "torch: 2.9.0 -> " in note


def test_the_run_records_the_backend_it_takes(tmp_path):
    """auto: native where it was compiled; a large value network of depth 3, which native lacks, in chunks."""
    config = tiny()
    backends = {}
    for depth, batch, points in ((2, 8, 6), (3, 8, 6), (3, 512, 64)):
        model = replace(config.model, depth=depth)
        loop = replace(config.training, batch_size=batch)
        changed = replace(config, model=model, training=loop, task=replace(config.task, num_points=points))
        path = tmp_path / f"{depth}-{batch}"
        Trainer.start(changed, path)
        backends[depth, batch] = open_run(path).config["run"]["backend"]
    assert backends == {(2, 8): choose_backend("auto"), (3, 8): "eager", (3, 512): "chunked"}


def test_keeps_the_last_ones_and_the_best(tmp_path):
    trainer = Trainer.start(tiny(keep_checkpoints=2), tmp_path / "run")
    trainer.best = {"step": 3}
    for step in range(1, 8):
        trainer.step = step
        trainer.save()
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")] == [3, 6, 7]


def test_the_best_is_chosen_on_validation_combinations_never_on_a_reported_split(tmp_path):
    base = tiny()
    for fraction, split in ((0.0, "train"), (0.3, "validation")):
        config = replace(base, task=replace(base.task, validation_fraction=fraction))
        result = train(config, tmp_path / split)
        assert result["best"]["split"] == split
        lines = [line for line in open_run(tmp_path / split).metrics.read() if "splits" in line]
        assert result["best"]["score"] == max(line["splits"][split]["r2"] for line in lines)


def test_checkpoints_hold_no_pickle(tmp_path):
    train(tiny(), tmp_path / "run")
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert {p.suffix for p in files if p.name != ".lock"} == {".json", ".jsonl", ".safetensors"}


def test_optimizer_state_survives(tmp_path):
    trainer = Trainer.start(tiny(), tmp_path / "run")
    with pytest.raises(InterruptedRunError):
        trainer.run(lambda line: os.kill(os.getpid(), signal.SIGTERM) if line["step"] == 6 else None)
    again = Trainer.resume(tmp_path / "run")
    fresh = make_optimizer(again.model, again.config.optimizer)
    assert not fresh.state
    for one, two in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in trainer.optimizer.state[one].items():
            assert torch.equal(value, again.optimizer.state[two][key])


def test_a_whole_checkpoint_that_does_not_fit_is_never_trained_over(stopped_run, tmp_path):
    """A config edited to another size is refused, and everything stays as it was."""
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["embed_dim"] = 32
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    done = hyla("resume", tmp_path / "run")
    assert done.returncode == 2
    assert "does not fit the model of config.json" in done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_step_trained_again_replaces_its_checkpoint(tmp_path):
    trainer = Trainer.start(tiny(), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    state = {"best": None, "seconds": 0.0}
    save_checkpoint(folder, 4, trainer.model, trainer.optimizer, state)
    with torch.no_grad():
        trainer.model.head.weight.add_(1.0)
    save_checkpoint(folder, 4, trainer.model, trainer.optimizer, state)
    assert torch.equal(load_model(tmp_path / "run")[0].head.weight, trainer.model.head.weight)


BROKEN = {
    "state.json": ['{"files": []}', "[]", '{"step": 24, "best": null, "seconds": "x", "files": {}}'],
    "metrics.jsonl": ['{"a": 1}\n', "[1]\n", '{"step": "1"}\n', b"\xff\xfe\n"],
    "result.json": ["[]", "{}", "5", '{"state": "finished"}'],
    "config.json": ["[]", '{"task": {"name": ["logic"]}}', '{"seed": ' + "9" * 5000 + "}", "[" * 100_000],
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_damaged_file_is_named(name, content, stopped_run, tmp_path):
    shutil.copytree(stopped_run / "run", tmp_path / "run")
    path = tmp_path / "run" / name
    if name == "state.json":
        path = checkpoint_path(tmp_path / "run" / "checkpoints", STEPS) / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if name == "state.json":  # an older whole one is there
        (note,) = Trainer.resume(tmp_path / "run").notes
        assert str(path) in note
        return
    with pytest.raises(
        HylaError, match=r"not hold a config|task.name" if name == "config.json" and len(content) < 99 else name
    ):
        Trainer.resume(tmp_path / "run").run()


def test_what_a_killed_start_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.99.tmp").write_text('{"ta')
    assert train(tiny(), tmp_path / "run")["state"] == "finished"


def test_weights_that_overflow_are_never_saved(tmp_path):
    config = tiny(checkpoint_every=1)
    wild = replace(config, optimizer=replace(config.optimizer, lr=1e29, warmup_steps=0, weight_decay=1e29))
    with pytest.raises(DivergedError):
        train(wild, tmp_path / "run")
    for _, path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        weights = load_file(path / MODEL)
        assert all(torch.isfinite(value).all() for value in weights.values())
