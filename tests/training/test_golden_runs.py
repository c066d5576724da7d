"""Twenty steps of the public code: losses, gradient norms, learning rates, final weights."""

import pytest
import torch
from tests.models.test_transformer import golden_model

from golden_values import Case, flax_parameters, load_parameters, names, relative_error
from hyla.tasks.base import Batch
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.sraven import Sraven, SravenConfig
from hyla.training.config import OptimizerConfig
from hyla.training.loop import apply_gradients, compute_loss
from hyla.training.optimizer import learning_rate, make_optimizer


def golden_batch(case, step):
    if case.size["task"] == "sraven":
        return Batch(case["x"][step].double(), case["y"][step], {})
    x = case["x"][step].clone()
    targets = x[:, -1:, -1].clone() if "y" not in case else case["y"][step].reshape(len(x), 1)
    x[:, -1, -1] = 0.0
    return Batch(x, targets, {})


@pytest.mark.parametrize("name", names("training"))
def test_repeats_the_public_run(name):
    case = Case("training", name)
    theirs = case.size["optimizer"]
    config = OptimizerConfig(
        lr=theirs["lr"],
        weight_decay=theirs["weight_decay"],
        warmup_steps=theirs["warmup_steps"],
        final_lr_fraction=theirs["end_lr_fraction"],
        schedule="reference",
    )
    model = golden_model(case.size)
    load_parameters(model, case, "init")
    optimizer = make_optimizer(model, config)
    if case.size["task"] == "sraven":
        task = Sraven(SravenConfig())
    else:
        task = FuzzyLogic(LogicConfig(num_points=case.size["T"]))
    for step in range(case.size["steps"]):
        batch = golden_batch(case, step)
        rate = learning_rate(config, step, theirs["total_steps"])
        assert rate == pytest.approx(case["lr"][step].item(), rel=1e-6, abs=1e-12)
        loss = compute_loss(model, task, batch)
        loss.backward()
        with torch.no_grad():
            scores = task.scores(model(batch.inputs, predict_at=task.predict_at).predictions, batch)
        norm = apply_gradients(model, optimizer, rate, None)
        assert loss.item() == pytest.approx(case["loss"][step].item(), rel=5e-7)
        assert norm.item() == pytest.approx(case["grad_norm"][step].item(), rel=5e-6)
        if case.size["task"] == "logic":
            expected = case.size["metrics"][step]["r2"]
            assert scores["r2"].mean().item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        else:
            assert scores["accuracy"].double().mean().item() == pytest.approx(
                case.size["metrics"][step]["acc"], abs=1e-6
            )
    for flax_name, (parameter, convert) in flax_parameters(model).items():
        assert relative_error(parameter, convert(case[f"final/{flax_name}"])) < 1e-7, flax_name
