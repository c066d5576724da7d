"""Several processes train one run as a single one would: gloo on the CPU, in float64, so that a difference is a fault."""

import hashlib
import json
import os
import re
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
from ranks_program import Constant, unequal_batch
from test_resume import DAMAGE, flip, half, tiny

from hyla.errors import ConfigError
from hyla.runs import open_run
from hyla.tasks.base import Batch
from hyla.training import checkpoint
from hyla.training.checkpoint import SHARDED, STATE, checkpoint_path, list_checkpoints, verify
from hyla.training.config import TASKS, config_to_dict, make_task, preset_default
from hyla.training.distributed import OtherRankError, Ranks, Replica
from hyla.training.loop import Trainer, evaluate, load_model, resume, train
from hyla.training.optimizer import learning_rate

pytestmark = pytest.mark.xdist_group("ranks")  # the groups of processes are started once
PROGRAM = Path(__file__).with_name("ranks_program.py")
STEPS, STOP = 6, 4
TASKS_HERE = ("logic", "sraven", "text")
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """150 documents, as JSON lines, and a cache of their own for the tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = (" ".join(str((31 * i + j) ** 3 % 99_991) for j in range(5 + i % 20)) for i in range(200))
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    before = os.environ.get("HYLA_CACHE")
    os.environ["HYLA_CACHE"] = str(folder / "cache")
    yield folder / "docs.jsonl"
    os.environ.pop("HYLA_CACHE")
    if before is not None:
        os.environ["HYLA_CACHE"] = before


def small(task, corpus, **training):
    """A batch that neither two ranks nor micro-batches divide, attention dropout with the shared mask, an uneven tail in
    every evaluation."""
    loop = {"steps": STEPS, "batch_size": 13, "micro_batch_size": 3, "checkpoint_every": 2, "eval_every": 3}
    loop |= {"eval_samples": 530, "final_eval_samples": 530, "precision": "float64"} | training
    config = tiny("logic" if task == "text" else task, **loop)
    if task == "text":
        base = preset_default("text")
        data = replace(base.task, data=(str(corpus),), vocab_size=280, sequence_length=16)
        optimizer = replace(base.optimizer, warmup_steps=4, clip_norm=0.5)
        config = replace(config, task=data, model=replace(config.model, causal=True), optimizer=optimizer)
    return config


def changed(config, **training):
    return replace(config, training=replace(config.training, **training))


def unclipped(config):
    return replace(config, optimizer=replace(config.optimizer, clip_norm=None))


def job(path, config=None, **further):
    return {"path": str(path)} | further | ({} if config is None else {"config": config_to_dict(config)})


@pytest.fixture(scope="module")
def group(corpus, tmp_path_factory):
    """Runs of two and three ranks, and what each rank met: {run: [of rank 0, of rank 1, ...]}."""
    folder = tmp_path_factory.mktemp("ranks")
    two, three = [], []
    for kind in KINDS:
        for task in TASKS_HERE:
            two.append(job(folder / f"{task}-{kind}", small(task, corpus, parallel=kind)))
        logic = small("logic", corpus, parallel=kind)
        two.append(job(folder / f"stopped-{kind}", logic, stop_at=STOP, stop_rank=1))
        two.append(job(folder / f"again-{kind}", copy=str(folder / f"stopped-{kind}")))
        two.append(job(folder / f"bf16-{kind}", changed(logic, precision="bf16", steps=2)))
        three.append(job(folder / f"three-{kind}", copy=str(folder / f"stopped-{kind}")))
    wild = replace(small("logic", corpus), optimizer=replace(small("logic", corpus).optimizer, lr=1e29, warmup_steps=1))
    two.append(job(folder / "diverged", replace(wild, model=replace(wild.model, mechanism="linear"))))
    two.append(job(folder / "small", changed(small("logic", corpus), batch_size=1)))
    two.append(job(folder / "unequal", unclipped(small("text", corpus, batch_size=2)), unequal=True))
    two.append(job(folder / "held" / "taken", small("logic", corpus)))
    Trainer.start(small("logic", corpus), folder / "held" / "taken")
    # begun by one process, so that its checkpoint is plain
    plain = Trainer.start(small("logic", corpus, parallel="fsdp"), folder / "plain")
    while plain.step < STOP:
        lr = learning_rate(plain.config.optimizer, plain.step, STEPS)
        plain.record(*plain.update(lr), lr)
    three.append(job(folder / "plain-fsdp", copy=str(folder / "plain")))
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)]
    mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if mounted:
        full = small("logic", corpus, parallel="fsdp", keep_checkpoints=9, checkpoint_every=1)
        two.append(job(disk / "full", full))
    groups = [{"ranks": 2, "jobs": two}, {"ranks": 3, "jobs": three}]
    (folder / "groups.json").write_text(json.dumps(groups))
    done = subprocess.run([sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    met = {}
    for number, group in enumerate(groups):
        each = [json.loads((folder / f"met-{number}-{rank}.json").read_text()) for rank in range(group["ranks"])]
        names = [Path(job["path"]).name for job in group["jobs"]]
        met |= {name: list(answers) for name, answers in zip(names, zip(*each, strict=True), strict=True)}
    yield folder, met
    if mounted:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The same runs by one process, each with the whole batch at once."""
    folder = tmp_path_factory.mktemp("alone")
    for task in TASKS_HERE:
        train(changed(small(task, corpus), micro_batch_size=None), folder / task)
    return folder


def assert_equal(path, other, tolerance):
    """Losses, gradient norms, rates, scores and weights of two runs."""
    one, two = (load_model(folder)[0].state_dict() for folder in (path, other))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=tolerance, msg=name)
    lines = [open_run(folder).metrics.read() for folder in (path, other)]
    assert [line["step"] for line in lines[0]] == list(range(1, len(lines[0]) + 1))
    for ours, theirs in zip(*lines, strict=True):
        for key in ("loss", "gradient_norm", "learning_rate"):
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=tolerance), (ours["step"], key)
        assert ("splits" in ours) == ("splits" in theirs)
        for split, scores in ours.get("splits", {}).items():
            assert scores["num_samples"] == theirs["splits"][split]["num_samples"]
            assert scores == pytest.approx(theirs["splits"][split], rel=1e-9, abs=1e-9)


def weights_of(path):
    return {name: value.numpy().tobytes() for name, value in load_model(path)[0].state_dict().items()}


def lines_of(path):
    return [{k: v for k, v in line.items() if k != "steps_per_second"} for line in open_run(path).metrics.read()]


# --- one step, one run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS_HERE)
def test_two_ranks_train_as_one_process(task, kind, group, alone):
    folder, met = group
    assert_equal(folder / f"{task}-{kind}", alone / task, 1e-10)
    first, second = met[f"{task}-{kind}"]
    assert first["weights"] == second["weights"]
    assert first["result"] == second["result"]
    assert open_run(folder / f"{task}-{kind}").config["run"]["ranks"] == 2
    total = load_model(alone / task)[0].num_parameters
    assert first["result"]["num_parameters"] == total
    assert first["own"] + second["own"] == (total if kind == "fsdp" else 2 * total)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16(kind, group):
    first, second = group[1][f"bf16-{kind}"]
    assert first["result"]["state"] == "finished"
    assert first["weights"] == second["weights"]


def test_divergence_is_met_by_all(group):
    folder, met = group
    assert open_run(folder / "diverged").result["state"] == "diverged"
    assert {(answer["error"], answer["status"]) for answer in met["diverged"]} == {("DivergedError", 1)}


def test_mistakes_are_met_by_all(group):
    met = group[1]
    for answer in met["small"]:
        assert "training.batch_size = 1 is not possible: at least one sequence for each of 2 ranks" in answer["message"]
        assert answer["status"] == 2


# --- TRN-08: means over answers, however they are shared out ------------------------------------------------------------


def stepped(trainer, batch):
    """(loss, gradient) of one step on `batch`."""
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 1.0)
    trainer.replica = Replica(trainer.model, trainer.ranks, "ddp", trainer.device)
    trainer.next_batch = lambda: batch
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    loss, _ = trainer.update(1.0)
    return loss.item(), before - torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def whole_batch_gradient():
    model, batch = Constant(), unequal_batch()
    logits = model(batch.inputs).predictions
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    (gradient,) = torch.autograd.grad(loss, model.logits)
    return loss.item(), gradient


def test_nine_tokens_at_loss_1_and_one_at_loss_9(group, corpus, tmp_path):
    expected, gradient = whole_batch_gradient()
    assert expected == pytest.approx(1.8, abs=1e-12)
    for size in (1, 2, 9, None):
        config = unclipped(small("text", corpus, batch_size=2, micro_batch_size=size))
        trainer = Trainer.start(config, tmp_path / str(size))
        trainer.model = Constant()
        loss, found = stepped(trainer, unequal_batch())
        assert loss == pytest.approx(1.8, abs=1e-6)
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-6)
    for answer in group[1]["unequal"]:
        assert answer["loss"] == pytest.approx(1.8, abs=1e-6)
        assert answer["gradient"] == pytest.approx(gradient.tolist(), abs=1e-6)


def test_the_last_group_may_be_short(corpus, tmp_path):
    """Ten sequences of unequal lengths in groups of 4, 4, 2; and in one that is larger than the batch."""
    config = unclipped(small("text", corpus, batch_size=10))
    found = {}
    for size in (4, 100, None):
        trainer = Trainer.start(changed(config, micro_batch_size=size), tmp_path / str(size))
        if not found:
            batch = trainer.next_batch()
            for row in range(10):
                batch.targets[row, row + 1 :] = -100
        trainer.model.eval()
        sizes = [len(part) for _, part in trainer._parts(batch)]
        assert sizes == ([4, 4, 2] if size == 4 else [10])
        found[size] = stepped(trainer, batch)
    for size in (4, 100):
        assert found[size][0] == pytest.approx(found[None][0], abs=1e-12)
        torch.testing.assert_close(found[size][1], found[None][1], rtol=0, atol=1e-12)


def test_a_micro_batch_of_nothing_is_refused(corpus):
    with pytest.raises(ConfigError, match=r"training.micro_batch_size = 0 is not possible: at least 1"):
        small("logic", corpus, micro_batch_size=0)


# --- SWP-03: who draws what ---------------------------------------------------------------------------------------------


def rows_of(batch: Batch) -> list[str]:
    pairs = zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True)
    return [hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=16).hexdigest() for x, y in pairs]


@pytest.mark.parametrize("task", TASKS)
def test_ranks_share_every_batch_out(task, corpus, tmp_path):
    """50 steps: the ranks' rows are disjoint and make up the one process's batch; no row comes twice."""
    if task in TASKS_HERE:
        config = small(task, corpus, batch_size=7, micro_batch_size=None)
    else:
        config = changed(preset_default(task, "mlp"), batch_size=7)
    trainer = Trainer.start(config, tmp_path / "run")
    seen = []
    for trainer.step in range(50):
        trainer.ranks, trainer.rows = Ranks(), slice(None)
        together = rows_of(trainer.next_batch())
        parts = []
        for rank in range(2):
            trainer.ranks = Ranks(rank, 2)
            trainer.rows = trainer.ranks.rows(7)
            parts.append(rows_of(trainer.next_batch()))
        assert [len(part) for part in parts] == [3, 4]
        assert parts[0] + parts[1] == together
        seen += together
    assert len(set(seen)) == len(seen)


def test_an_epoch_reads_everything_once_and_the_next_in_another_order(corpus):
    config = small("text", corpus)
    task = make_task(config)
    size = task.size("train")
    epochs = [rows_of(task.batch("train", epoch, size)) for epoch in range(2)]
    assert len(set(epochs[0])) == size
    assert epochs[0] != epochs[1]
    shares = [rows_of(task.batch("train", 1, size, rows=Ranks(rank, 2).rows(size))) for rank in range(2)]
    assert shares[0] + shares[1] == epochs[1]
    assert rows_of(make_task(config).batch("train", 1, size)) == epochs[1]


class InThreads(Ranks):
    """A rank that is a thread of this process."""

    def __init__(self, rank, size, barrier, given):
        super().__init__(rank, size)
        self.barrier, self.given = barrier, given

    def gather(self, value):
        self.given[self.rank] = value
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found


@pytest.mark.parametrize("task", ["logic", "text"])
@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_counts_every_sequence_once(task, size, corpus, alone, monkeypatch):
    model, made, _ = load_model(alone / task)
    monkeypatch.setattr(type(made), "evaluation_batch", 8)
    count = made.size("held_out") or 50  # 6 whole batches and a tail, or all of the text
    expected = evaluate(model, made, made.splits, count)
    barrier, given, found = threading.Barrier(size), [None] * size, [None] * size

    def measure(rank):
        ranks = InThreads(rank, size, barrier, given)
        found[rank] = evaluate(model, made, made.splits, count, ranks=ranks)

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * size
    assert expected["held_out"]["num_samples"] == count


# --- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_is_bit_for_bit_the_same(kind, group):
    """One rank alone is asked to stop: all stop at the same step, with a checkpoint of it."""
    folder, met = group
    for answer in met[f"stopped-{kind}"]:
        assert (answer["error"], answer["status"], answer["step"]) == ("InterruptedRunError", 143, STOP)
    newest = checkpoint_path(folder / f"stopped-{kind}" / "checkpoints", STOP)
    assert (SHARDED in verify(newest)["files"]) == (kind == "fsdp")
    assert [(answer["notes"], answer["begun_at"]) for answer in met[f"again-{kind}"]] == [([], STOP)] * 2
    assert met[f"again-{kind}"][0]["weights"] == met[f"logic-{kind}"][0]["weights"]
    assert weights_of(folder / f"again-{kind}") == weights_of(folder / f"logic-{kind}")
    assert lines_of(folder / f"again-{kind}") == lines_of(folder / f"logic-{kind}")


@pytest.mark.parametrize("name", ["three-ddp", "three-fsdp", "plain-fsdp"])
def test_goes_on_with_three_ranks(name, group, alone):
    folder, met = group
    was = 1 if name == "plain-fsdp" else 2
    for answer in met[name]:
        assert answer["begun_at"] == STOP
        assert answer["notes"] == [f"not bit for bit the run it was, since this differs: ranks: {was} -> 3"]
    assert len({answer["weights"] for answer in met[name]}) == 1
    assert_equal(folder / name, alone / "logic", 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_with_one_process(kind, group, alone, tmp_path):
    shutil.copytree(group[0] / f"stopped-{kind}", tmp_path / "run")
    trainer = Trainer.resume(tmp_path / "run")
    assert trainer.step == STOP
    assert trainer.notes == ["not bit for bit the run it was, since this differs: ranks: 2 -> 1"]
    trainer.run()
    assert_equal(tmp_path / "run", alone / "logic", 1e-10)


def test_a_run_of_before_ranks_were_recorded_goes_on_without_a_note(alone, tmp_path):
    shutil.copytree(alone / "logic", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["run"]["ranks"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert Trainer.resume(tmp_path / "run").notes == []


SHARD = "__1_0.distcp"
SHARD_DAMAGE = {
    "half of a part": (lambda p: half(p / SHARD), r"__1_0.distcp has .* bytes instead of"),
    "a part gone": (lambda p: (p / SHARD).unlink(), r"__1_0.distcp is missing"),
    "a flipped bit": (lambda p: flip(p / SHARD), r"__1_0.distcp is damaged"),
    "no index": (lambda p: (p / SHARDED).unlink(), r"\.metadata is missing"),
    "half of the state": DAMAGE["half of the state"],
}


@pytest.mark.parametrize("name", SHARD_DAMAGE)
def test_a_damaged_part_is_skipped_by_name(name, group, alone, tmp_path):
    damage, message = SHARD_DAMAGE[name]
    shutil.copytree(group[0] / "stopped-fsdp", tmp_path / "run")
    newest = checkpoint_path(tmp_path / "run" / "checkpoints", STOP)
    assert (newest / STATE).exists()
    damage(newest)
    trainer = Trainer.resume(tmp_path / "run")
    assert trainer.step == 3  # kept as the best
    (note,) = [note for note in trainer.notes if note.startswith("skipped a checkpoint")]
    assert str(newest) in note
    assert re.search(message, note)


def test_a_full_disk_leaves_what_was_there(group, alone):
    """All ranks meet the same error; the earlier checkpoints are whole, and with room it goes on."""
    folder, met = group
    if "full" not in met:
        pytest.skip("needs the right to mount a tmpfs; runs as root on Linux")
    first, other = met["full"]
    path = folder / "disk" / "full"
    assert first["error"] == "CheckpointError"
    assert re.search(r"full/checkpoints/step_\d+ could not be written \([\d,]+ bytes needed\): .*", first["message"])
    assert "the disk is full" in first["message"]
    assert (first["status"], other["status"]) == (1, 1)
    whole = list_checkpoints(path / "checkpoints")
    assert whole
    assert all(verify(at)["step"] == step for step, at in whole)
    subprocess.run(["mount", "-o", "remount,size=9m", str(folder / "disk")], check=True)
    resume(path)
    assert not list((path / "checkpoints").glob(f"{checkpoint.TEMPORARY}*"))
    assert_equal(path, alone / "logic", 1e-10)


def test_what_the_first_rank_meets_ends_the_others(group):
    first, other = group[1]["taken"]
    assert first["error"] == "RunError"
    assert "holds another run" in first["message"]
    assert other["error"] == OtherRankError.__name__
    assert first["status"] == other["status"] == 2


# --- the command line ---------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def begin(*arguments, launcher=(*TORCHRUN, "-m"), **environment) -> subprocess.Popen:
    command = [*map(str, launcher), "hyla", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, **options)


def ours(errors: str) -> list[str]:
    """What hyla says, without the launcher's own words."""
    return [line for line in errors.splitlines() if line.startswith(("error: ", "note: ", "stopped"))]


def wait_for_lines(process: subprocess.Popen, path: Path, count: int) -> None:
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks, in their order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in map(int, children):
        variables = dict(item.split("=", 1) for item in Path(f"/proc/{child}/environ").read_text().split("\0") if item)
        if "RANK" in variables:
            found[int(variables["RANK"])] = child
    return [found[rank] for rank in sorted(found)]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc; runs on Linux")
def test_on_the_command_line_stopped_then_killed_then_finished(corpus, tmp_path):
    """torchrun: SIGTERM, then kill -9 of one rank; the run ends as one process's, and everything is said once."""
    config = small("text", corpus, steps=40, eval_every=40, eval_samples=20, final_eval_samples=20, checkpoint_every=10)
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(config)))
    path = tmp_path / "run"
    metrics = path / "metrics.jsonl"

    process = begin("train", "text", "--config", tmp_path / "config.json", "--out", path)
    wait_for_lines(process, metrics, 3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    (said,) = ours(errors)
    ((step, saved),) = [(s, at) for s, at in list_checkpoints(path / "checkpoints") if s % 10] or [(0, path)]
    assert said.startswith(f"stopped at step {step}; a checkpoint is saved")
    assert verify(saved)["step"] == step

    process = begin("resume", path)
    wait_for_lines(process, metrics, step + 11)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "src/hyla" not in errors  # no traceback of ours
    assert open_run(path).state == "unfinished"

    process = begin("resume", path)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert ours(errors) == []
    assert output.count("result.json") == 1
    assert output.count("held_out") == 2  # as a score on the way and in the table
    train(changed(config, micro_batch_size=None), tmp_path / "alone")
    assert_equal(path, tmp_path / "alone", 1e-10)


def test_a_mistake_under_torchrun_is_said_once(alone):
    wrong = begin("train", "logic", "--model.mechanism", "hyl")
    taken = begin("train", "logic", "--out", alone / "logic")
    for process, message in ((wrong, "invalid choice 'hyl'"), (taken, "holds another run")):
        output, errors = process.communicate(timeout=300)
        assert process.returncode != 0
        assert (output + errors).count(message) == 1, errors
        assert "src/hyla" not in errors  # no traceback of ours


def test_other_commands_are_for_one_process():
    """Refused before anything joins, so no launcher is needed; the second rank would speak only after the first."""
    process = begin("compare", "logic", launcher=(sys.executable, "-m"), WORLD_SIZE="2", RANK="0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "WORLD_SIZE = 2 is not possible: hyla compare is for one process" in errors
    assert "Traceback" not in errors


def test_a_launcher_that_says_too_little(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2 is not possible: RANK, LOCAL_RANK, .* start the ranks with"):
        Ranks.join()


def test_one_process_imports_nothing_for_several():
    names = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor")
    code = f"import sys, hyla.training.loop; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
