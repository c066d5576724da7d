"""A published experiment holds what was measured and the weights, and no more."""

import json
import shutil
from dataclasses import replace

import pytest

from hyla.cli import main
from hyla.errors import RunError
from hyla.experiments.engine import make_pool, run_experiment
from hyla.experiments.experiment import Experiment, Variant
from hyla.experiments.publish import publish
from hyla.models.transformer import TransformerConfig
from hyla.report.comparison import summarise
from hyla.report.plan import read_plan
from hyla.tasks.fuzzy_logic import LogicConfig
from hyla.training.config import LoopConfig, OptimizerConfig, TrainConfig
from hyla.training.loop import Trainer, evaluate, load_model, train


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """One run that has ended, one that stopped half-way with a checkpoint, one that has not started."""
    folder = tmp_path_factory.mktemp("experiment")
    model = TransformerConfig(embed_dim=16, num_heads=4, qk_dim=8, v_dim=8, mlp_dim=16, backend="eager")
    loop = LoopConfig(steps=4, batch_size=16, eval_samples=64, final_eval_samples=64, checkpoint_every=2, log_every=1)
    base = TrainConfig(LogicConfig(num_points=6), model, OptimizerConfig(warmup_steps=1), loop)
    variants = tuple(
        Variant(name, (replace(base, model=replace(model, mechanism=name)),)) for name in ("softmax", "linear", "hyla")
    )
    planned = Experiment("compare-logic", "Three mechanisms", variants, (0,), "custom", "A test.", baseline="softmax")
    from hyla.report.plan import write_plan

    write_plan(folder, planned.plan("hyla compare logic"))
    ended, half, _ = planned.runs
    train(ended.config, folder / "runs" / ended.name)
    trainer = Trainer.start(half.config, folder / "runs" / half.name)
    with trainer.recording():
        for _ in range(2):
            trainer.record(*trainer.update(1e-3), 1e-3)
    (folder / "index.html").write_text("made again by hyla report")
    return folder, planned


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_numbers_alone(experiment, tmp_path):
    folder, _ = experiment
    assert main(["publish", str(folder), "--out", str(tmp_path / "copy"), "--numbers-only"]) == 0
    whole = {path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert whole == {"plan.json", "comparison.json", "config.json", "metrics.jsonl", "result.json"}


def test_what_is_copied(experiment, tmp_path, capsys):
    folder, planned = experiment
    ended, half, waiting = (run.name for run in planned.runs)
    assert main(["publish", str(folder), "--out", str(tmp_path / "copy")]) == 0
    assert ended in capsys.readouterr().out
    found = names(tmp_path / "copy")
    assert found == {
        "plan.json",
        "comparison.json",
        *(f"runs/{ended}/{name}" for name in ("config.json", "metrics.jsonl", "result.json")),
        *(f"runs/{ended}/checkpoints/step_00000004/{name}" for name in ("model.safetensors", "state.json")),
        *(f"runs/{half}/{name}" for name in ("config.json", "metrics.jsonl")),
        *(
            f"runs/{half}/checkpoints/step_00000002/{name}"
            for name in ("model.safetensors", "optimizer.safetensors", "state.json")
        ),
    }
    states = {run.name: run.state for run in summarise(read_plan(tmp_path / "copy"), tmp_path / "copy").runs}
    assert states == {ended: "finished", half: "unfinished", waiting: "not started"}
    assert main(["publish", str(folder), "--out", str(tmp_path / "copy")]) == 0, "an older copy is replaced"
    assert names(tmp_path / "copy") == found
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_the_copy_can_be_read_and_what_was_unfinished_goes_on(experiment, tmp_path):
    folder, planned = experiment
    ended, half, _ = (run.name for run in planned.runs)
    publish(folder, tmp_path / "copy")
    model, task, config = load_model(tmp_path / "copy" / "runs" / ended)
    scores = evaluate(model, task, ["held_out"], 64, config.training.precision)
    result = json.loads((folder / "runs" / ended / "result.json").read_text())
    assert scores["held_out"]["r2"] == pytest.approx(result["splits"]["held_out"]["r2"], abs=1e-6)
    with pytest.raises(RunError, match="has ended"):
        Trainer.resume(tmp_path / "copy" / "runs" / ended)
    assert Trainer.resume(tmp_path / "copy" / "runs" / half).run()["state"] == "finished"


def test_weights_alone_are_not_trained_on(experiment, tmp_path):
    folder, planned = experiment
    ended = planned.runs[0].name
    publish(folder, tmp_path / "copy")
    (tmp_path / "copy" / "runs" / ended / "result.json").unlink()
    resumed = Trainer.resume(tmp_path / "copy" / "runs" / ended)
    assert resumed.step == 0
    assert "weights alone" in resumed.notes[-1]


def test_mistakes_leave_everything_as_it_is(experiment, tmp_path, capsys):
    folder, _ = experiment
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose this")
    assert main(["publish", str(folder), "--out", str(tmp_path / "mine")]) == 2
    assert "no copy of an experiment" in capsys.readouterr().err
    assert main(["publish", str(tmp_path / "mine"), "--out", str(tmp_path / "copy")]) == 2
    assert "plan.json" in capsys.readouterr().err
    assert names(tmp_path) == {"mine/thesis.txt"}
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    newest = max(damaged.glob("runs/*hyla*/checkpoints/*"), default=None)
    assert newest is None
    for path in damaged.glob("runs/*/checkpoints/*/model.safetensors"):
        path.write_bytes(b"damaged")
    publish(damaged, tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob("*.safetensors")), "what is damaged is not passed on"


def test_the_codes_of_the_chosen_runs_are_read_after_training(experiment, tmp_path):
    from hyla.experiments.hypernetwork_paper import EXPERIMENTS, Request, read_latents

    assert EXPERIMENTS["logic-latents"](Request("quick")).after is read_latents
    assert EXPERIMENTS["sraven-latents"](Request("quick")).after is read_latents
    folder, planned = experiment
    seen = []
    one = replace(planned, variants=planned.variants[:1], after=lambda *given: seen.append(given))
    plan, jobs = run_experiment(one, folder, make_pool(1), command="x")
    assert [job.state for job in jobs] == ["finished"]
    assert seen == [(folder, plan)]
