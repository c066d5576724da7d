import math

import pytest
import torch

from hyla.errors import ConfigError
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.training.config import (
    LoopConfig,
    OptimizerConfig,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    preset_paper,
)
from hyla.training.loop import apply_gradients
from hyla.training.optimizer import decayed, learning_rate, make_optimizer


def rates(total, **fields):
    config = OptimizerConfig(lr=1.0, warmup_steps=10, **fields)
    return [learning_rate(config, step, total) for step in range(total)]


def test_cosine_ends_at_the_last_step():
    rate = rates(111, schedule="cosine", final_lr_fraction=0.1)
    assert rate[:11] == [step / 10 for step in range(11)]
    assert rate[60] == pytest.approx(0.55)
    assert rate[-1] == pytest.approx(0.1)
    assert rate[-2] > rate[-1]


def test_reference_ends_one_warmup_early():
    rate = rates(110, schedule="reference", final_lr_fraction=0.1)
    assert rate[10] == 1.0
    assert rate[10 + 45] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rate[100:] == [pytest.approx(0.1)] * 10
    assert rate[99] > 0.1


def test_constant_and_no_warmup():
    assert rates(30, schedule="constant")[10:] == [1.0] * 20
    config = OptimizerConfig(lr=1.0, warmup_steps=0, schedule="cosine")
    assert learning_rate(config, 0, 5) == 1.0
    assert learning_rate(config, 0, 1) == pytest.approx(0.1)  # a single step is the last


@pytest.mark.parametrize("total", [1, 5, 10, 11, 12])
def test_short_runs_have_finite_rates(total):
    assert all(math.isfinite(rate) and 0 <= rate <= 1 for rate in rates(total, schedule="cosine"))


def test_what_is_decayed():
    model = Transformer(TransformerConfig(mechanism="hyla_plus"), sequence_length=8, input_dim=5, output_dim=1)
    names = dict(model.named_parameters())
    for rule in ("reference", "matrices"):
        plain = {name for name, parameter in names.items() if not decayed(name, parameter, rule)}
        assert all("norm" in name or name.endswith("bias") for name in plain)
        biases = {name for name in names if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))}
        assert (biases <= plain) == (rule == "matrices")
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_clipping_scales_the_whole_gradient():
    layer = torch.nn.Linear(2, 1, bias=False)
    for clip, used in ((None, 5.0), (1.0, 1.0), (10.0, 5.0)):
        layer.weight.data.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        layer.weight.grad = torch.tensor([[3.0, 4.0]])
        norm = apply_gradients(layer, optimizer, 1.0, clip)
        assert norm.item() == pytest.approx(5.0)  # the norm before clipping
        assert layer.weight.norm().item() == pytest.approx(used, rel=1e-5)
        assert layer.weight.grad is None


def test_configs_survive_json_and_fill_in_from_a_base():
    for task in ("logic", "sraven"):
        config = preset_paper(task)
        assert config_from_dict(config_to_dict(config)) == config
    base = preset_paper("logic")
    changed = config_from_dict({"model": {"num_heads": 4}, "seed": 5}, base)
    assert (changed.model.num_heads, changed.seed, changed.training) == (4, 5, base.training)
    assert config_from_dict({"task": {"name": "sraven"}}).task_name == "sraven"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(lr=0.0), r"optimizer.lr = 0.0 .* above 0"),
        (lambda: OptimizerConfig(lr="1e-3"), r"optimizer.lr = '1e-3' .* a number"),
        (lambda: OptimizerConfig(schedule="linear"), r"optimizer.schedule = 'linear' .* one of cosine"),
        (lambda: OptimizerConfig(clip_norm=-1.0), r"optimizer.clip_norm = -1.0"),
        (lambda: LoopConfig(steps=0), r"training.steps = 0 .* at least 1"),
        (lambda: LoopConfig(eval_samples=0), r"training.eval_samples = 0"),
        (lambda: LoopConfig(device="tpu"), r"training.device = 'tpu'"),
        (lambda: LoopConfig(trackers=("mlflow",)), r"training.trackers"),
        (lambda: TrainConfig(seed=-1), r"seed = -1"),
    ],
)
def test_impossible_settings_name_the_field(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
