import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hyla.errors import ConfigError
from hyla.latents.decodability import Options, decodability, targets_of, write_decodability
from hyla.models.base import Model, ModelOutput
from hyla.report.plan import Candidate, Plan, Variant
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.hyperteacher import Hyperteacher, HyperteacherConfig
from hyla.training.config import preset_default
from hyla.training.loop import train

TASK = HyperteacherConfig(num_modules=6, num_hot=2, point_dim=4, hidden_dims=(5,), output_dim=3, num_points=5)
FEW = Options(num_tasks=256, num_test=64, penalty=0.01)


class Planted(Model):
    """`told` holds the latent, turned and shifted; `squared` its squares alone; `mute` nothing of it."""

    def __init__(self, task):
        super().__init__()
        self.layout = task.layout
        generator = torch.Generator().manual_seed(0)
        self.turn = torch.nn.Parameter(torch.randn(9, 6, generator=generator))
        self.told, self.squared, self.mute = (torch.nn.Identity() for _ in range(3))

    @property
    def hidden_names(self):
        return ("told", "squared", "mute")

    def forward(self, inputs, *, predict_at=None, keep=None):
        encoding, points = self.layout.unpack(inputs)
        every = encoding[:, None].expand(-1, points.shape[1], -1)
        self.told(every @ self.turn.T + 3)
        self.squared((every - 0.4).square())
        self.mute(points)
        return ModelOutput(points[..., :3])


@pytest.fixture(scope="module")
def rows():
    task = Hyperteacher(TASK)
    found = decodability(Planted(task), task, FEW)
    return {(row["layer"], row["target"], row["split"]): row for row in found}


def test_finds_what_is_planted_and_nothing_else(rows):
    for split in ("train", "held_out"):
        for target in ("task", "weights"):
            assert rows["encoding", target, split]["r2"] > 0.98
            assert rows["told", target, split]["r2"] > 0.98
            assert rows["mute", target, split]["r2"] < 0.05
            assert rows["mute", target, split]["depth"] == 3
        assert rows["squared", "task", split]["r2"] < 0.9  # the latent is in it, but not linearly
    assert len(rows) == 4 * 2 * 2


def test_controls_and_intervals(rows):
    for row in rows.values():
        assert row["low"] <= row["high"]
        if row["layer"] in (
            "encoding",
            "told",
        ):  # a value near 0 may lie just outside an interval over few combinations
            assert row["low"] <= row["r2"] <= row["high"]
        assert row["control"] < 0.1
        assert row["chance"] <= 0
        assert row["tasks"] == 64
    assert rows["told", "weights", "held_out"]["targets"] == 4 * 5 + 5


def test_weights_are_those_of_the_tasks_network():
    task = Hyperteacher(replace(TASK, hidden_dims=(5, 3)))
    latents = task.batch("train", 0, 3, dtype=torch.float64).latents["task"]
    weights = targets_of(task, latents.numpy())["weights"]
    assert weights.shape == (3, 4 * 5 + 5 * 3 + 5 + 3)
    first = torch.einsum("m,mij->ij", latents[1] / 2**0.5, task.teacher.weights[0].double())
    np.testing.assert_allclose(weights[1, :20], first.flatten(), rtol=1e-6)
    bias = latents[1] / 2**0.5 @ task.teacher.biases[1].double()
    np.testing.assert_allclose(weights[1, -3:], bias, rtol=1e-6)


def test_entries_that_never_vary_are_left_out_and_counted():
    task = Hyperteacher(replace(TASK, support="non_compositional"))
    found = decodability(Planted(task), task, FEW)
    held_out = next(row for row in found if row["layer"] == "told" and row["split"] == "held_out")
    trained = next(row for row in found if row["layer"] == "told" and row["split"] == "train")
    assert (trained["target"], trained["undefined"]) == ("task", 1)  # the last module is never active
    assert held_out["undefined"] == 0


def test_only_for_tasks_with_an_encoding():
    with pytest.raises(ConfigError, match="task = 'logic' is not possible"):
        decodability(Planted(Hyperteacher(TASK)), FuzzyLogic(LogicConfig()))
    task = Hyperteacher(TASK)
    with pytest.raises(ConfigError, match="task hyperteacher has train, held_out"):
        decodability(Planted(task), task, Options(splits=("unseen",)))
    with pytest.raises(ConfigError, match="submodules are"):
        decodability(Planted(task), task, Options(layers=("hidden.7",)))
    with pytest.raises(ConfigError, match="penalty"):
        Options(penalty=0.0)


def test_the_guides_example_runs():
    guide = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", guide, flags=re.S)
    names = {}
    exec(compile(block, "docs/scaling.md", "exec"), names)
    assert {row["layer"] for row in names["rows"]} == {"encoding", "hidden.0", "hidden.1"}


@pytest.mark.parametrize(
    ("architecture", "sizes", "layers"),
    [
        ("mlp", {"width": 8, "num_layers": 2}, ["hidden.0", "hidden.1"]),
        ("hypernetwork", {"width": 8}, ["hidden"]),
        (
            "transformer",
            {"embed_dim": 8, "qk_dim": 8, "v_dim": 8, "mlp_dim": 8, "num_layers": 2},
            ["blocks.0", "blocks.1"],
        ),
    ],
)
def test_every_run_of_an_experiment_is_decoded_once(architecture, sizes, layers, tmp_path):
    config = preset_default("hyperteacher", architecture)
    loop = replace(config.training, steps=2, batch_size=4, eval_samples=8, final_eval_samples=8)
    config = replace(config, task=TASK, model=replace(config.model, **sizes), training=loop)
    train(config, tmp_path / "runs/first")
    plan = Plan(
        name="small",
        title="small",
        task="hyperteacher",
        budget="custom",
        budget_note="",
        command="",
        metric="r2",
        baseline=None,
        selection="none",
        reported_split="held_out",
        axes=(),
        figures=("decodability",),
        variants=(Variant("one", "mlp", {}, None, (Candidate({}, {0: "first", 1: "not begun"}),)),),
    )
    path = write_decodability(tmp_path, plan)
    found = json.loads(path.read_text())["rows"]
    assert list(found) == ["first"]
    assert list(dict.fromkeys(row["layer"] for row in found["first"])) == ["encoding", *layers]
    found["first"] = found["first"][:1]
    path.write_text(json.dumps({"format": 1, "rows": found}))
    write_decodability(tmp_path, plan)
    assert json.loads(path.read_text())["rows"] == found, "what is there is not measured again"
