"""Every architecture learns the tasks that come with an encoding, through the same training, files and ensembles."""

import json
from dataclasses import replace

import pytest
import torch

from hyla.errors import ConfigError
from hyla.models.mlp import MLPConfig
from hyla.runs import Run
from hyla.tasks.fuzzy_logic import LogicConfig
from hyla.tasks.hyperteacher import HyperteacherConfig
from hyla.training.config import (
    TASKS,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    make_model,
    make_task,
    preset_default,
    preset_paper,
)
from hyla.training.ensemble import Ensemble, member_configs
from hyla.training.loop import Trainer, evaluate, load_model, train

SIZES = {
    "mlp": {"width": 12, "num_layers": 2},
    "hypernetwork": {"width": 6},
    "transformer": {"embed_dim": 16, "qk_dim": 16, "v_dim": 16, "mlp_dim": 12, "num_layers": 2},
}
TASK = HyperteacherConfig(num_modules=6, num_hot=2, point_dim=4, hidden_dims=(5,), output_dim=3, num_points=5)


def small(architecture, encoding="identity", steps=12, **training):
    base = preset_default("hyperteacher", architecture)
    loop = {"steps": steps, "batch_size": 8, "eval_every": 6, "eval_samples": 64, "final_eval_samples": 64}
    return replace(
        base,
        task=replace(TASK, encoding=encoding, num_examples=3),
        model=replace(base.model, **SIZES[architecture]),
        training=replace(base.training, **loop | {"checkpoint_every": 5, "log_every": 1} | training),
    )


@pytest.mark.parametrize("encoding", ["identity", "tokens", "fewshot"])
@pytest.mark.parametrize("architecture", SIZES)
def test_trains_and_loads(architecture, encoding, tmp_path):
    config = small(architecture, encoding)
    result = train(config, tmp_path / "run")
    assert result["state"] == "finished"
    assert set(result["splits"]) == {"train", "held_out"}
    model, task, again = load_model(tmp_path / "run")
    assert again == config
    assert evaluate(model, task, ["held_out"], 64)["held_out"] == result["splits"]["held_out"]
    backend = json.loads((tmp_path / "run/config.json").read_text())["run"]["backend"]
    assert (backend == "none") == (architecture != "transformer")


@pytest.mark.parametrize("architecture", SIZES)
def test_learns(architecture, tmp_path):
    config = small(architecture, steps=200, log_every=10, eval_every=200, checkpoint_every=200)
    rate = 3e-3 if architecture == "transformer" else 1e-2
    train(replace(config, optimizer=replace(config.optimizer, lr=rate)), tmp_path / "run")
    losses = [line["loss"] for line in Run(tmp_path / "run").metrics.read()]
    assert sum(losses[-5:]) < (0.85 if architecture == "transformer" else 0.6) * sum(losses[:5])


@pytest.mark.parametrize("architecture", ["mlp", "transformer"])
def test_goes_on_bit_for_bit(architecture, tmp_path):
    config = small(architecture)
    train(config, tmp_path / "whole")
    trainer = Trainer.start(config, tmp_path / "stopped")
    for _ in range(7):
        trainer.update(config.optimizer.lr)
        trainer.step += 1
        if trainer.step == 5:
            trainer.save()
    Trainer.resume(tmp_path / "stopped").run()
    for name, weight in load_model(tmp_path / "whole")[0].state_dict().items():
        assert torch.equal(weight, load_model(tmp_path / "stopped")[0].state_dict()[name]), name


@pytest.mark.parametrize("architecture", SIZES)
def test_members_of_an_ensemble_equal_solo_runs(architecture, tmp_path):
    config = small(architecture, "tokens", precision="float64")
    members = member_configs(config, {"seeds": [2], "lr": [3e-4, 3e-3]})
    Ensemble.start(members, tmp_path / "grid").run()
    for member in members:
        name = f"seed{member.seed}-lr{member.optimizer.lr:g}-wd0.003"
        train(member, tmp_path / "solo" / name)
        together, alone = (load_model(tmp_path / group / name)[0].state_dict() for group in ("grid", "solo"))
        for key, weight in alone.items():
            torch.testing.assert_close(together[key], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", SIZES)
def test_a_config_is_written_and_read(architecture):
    config = small(architecture)
    data = json.loads(json.dumps(config_to_dict(config)))
    assert data["model"]["architecture"] == architecture
    assert config_from_dict(data) == config
    assert config.mechanism == ("softmax" if architecture == "transformer" else architecture)


def test_a_model_section_without_an_architecture_is_a_transformer():
    data = config_to_dict(TrainConfig())
    del data["model"]["architecture"]
    assert config_from_dict(data) == TrainConfig()


def test_a_file_may_choose_another_architecture():
    base = preset_default("hyperteacher")
    assert base.model == MLPConfig()
    other = config_from_dict({"model": {"architecture": "hypernetwork", "width": 7}}, base)
    assert other.architecture_name == "hypernetwork"
    assert other.model.width == 7
    with pytest.raises(ConfigError, match="choose from mlp, transformer, hypernetwork"):
        config_from_dict({"model": {"architecture": "lstm"}}, base)
    with pytest.raises(ConfigError, match="unknown key 'num_layers' in section 'model'"):
        config_from_dict({"model": {"architecture": "hypernetwork", "num_layers": 2}}, base)


def test_sequence_tasks_train_transformers_alone():
    with pytest.raises(ConfigError, match="architecture = 'mlp' is not possible: task logic trains transformer"):
        TrainConfig(LogicConfig(), MLPConfig())


@pytest.mark.parametrize("task", [name for name in TASKS if name != "text"])  # which needs text
def test_presets_fit_their_task(task):
    for architecture in TASKS[task].architectures:
        for preset in (preset_default, preset_paper):
            config = preset(task, architecture)
            assert config.architecture_name == architecture
            assert make_model(config, make_task(config)).num_parameters > 1_000
