"""Collected codes are the model's own, only what is asked for, beside everything that generated them."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from planted import PlantedModel, PlantedReading, PlantedTask

from hyla.attention import MECHANISMS
from hyla.errors import ConfigError, RunError
from hyla.latents.collect import COLLECTION, attention_layers, collect, open_collection
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig

COUNT = 600  # more than one batch, and a short last one


def transformer(task, **options):
    torch.manual_seed(0)
    config = TransformerConfig(
        embed_dim=16, num_heads=4, qk_dim=8, v_dim=8, mlp_dim=16, attention_dropout=0.3, **options
    )
    return Transformer(
        config, sequence_length=task.sequence_length, input_dim=task.input_dim, output_dim=task.output_dim
    )


@pytest.fixture(scope="module")
def task():
    return FuzzyLogic(LogicConfig(num_points=6), seed=3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kept_on_disk", [False, True])
def test_codes_equal_the_whole_ones(task, tmp_path, mechanism, kept_on_disk):
    model = transformer(task, mechanism=mechanism, causal=True)
    path = tmp_path / "codes" if kept_on_disk else None
    collected = collect(model, task, queries=[-1, 2], keys=[0, -1, 3], num_samples=COUNT, path=path)
    assert collected.layers == ("blocks.0.attention", "blocks.1.attention")
    assert (collected.queries, collected.keys) == ((5, 2), (0, 5, 3))
    model.eval()
    for split in ("train", "held_out"):
        batch = task.batch(split, 0, 512, stream="evaluation")
        with torch.no_grad():
            out = model(batch.inputs, return_codes=True)
        for number in range(2):
            codes = collected.codes(number, split)
            assert codes.shape == (COUNT, 2, 3, 4)
            assert codes.dtype == np.float32
            expected = out.codes[number][:, :, [5, 2]][..., [0, 5, 3]].permute(0, 2, 3, 1)
            np.testing.assert_allclose(codes[:512], expected, rtol=1e-5, atol=1e-5)  # rms_head enlarges rounding
        np.testing.assert_array_equal(collected.inputs(split)[:512], batch.inputs)
        np.testing.assert_array_equal(collected.targets(split)[:512], batch.targets)
        np.testing.assert_array_equal(collected.latent("terms", split)[:512], batch.latents["terms"])
        np.testing.assert_allclose(collected.predictions(split)[:512], out.predictions[:, -1:], rtol=1e-4, atol=1e-5)


def test_collecting_changes_no_bit_of_the_model_and_leaves_its_mode(task):
    model = transformer(task, mechanism="hyla")
    batch = task.batch("held_out", 0, 512, stream="evaluation")
    model.eval()
    with torch.no_grad():
        before = model(batch.inputs, predict_at=task.predict_at).predictions
    model.train()
    collected = collect(model, task, queries=[-1], keys=[-1], num_samples=512)
    assert model.training
    np.testing.assert_array_equal(collected.predictions("held_out"), before)
    np.testing.assert_array_equal(
        collected.score("r2", "held_out"), task.scores(before, batch)["r2"], err_msg="scores are the task's"
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_collection_does_not_depend_on_how_many_samples_are_asked_for(task):
    model = transformer(task)
    few, many = (collect(model, task, queries=[-1], keys=[-1], num_samples=n) for n in (100, 700))
    np.testing.assert_array_equal(few.codes(0, "train"), many.codes(0, "train")[:100])


def test_activations_of_named_submodules(task):
    model = transformer(task)
    names = ["blocks.0.mlp", "norm", "blocks.0"]
    collected = collect(
        model, task, queries=[-1], keys=[-1], num_samples=64, activations=names, positions=[-1], layers=[1]
    )
    assert collected.layers == ("blocks.1.attention",)
    seen = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: seen.update({name: out if isinstance(out, torch.Tensor) else out[0]})
        )
    model.eval()
    with torch.no_grad():
        model(task.batch("held_out", 0, 512, stream="evaluation").inputs, predict_at=task.predict_at)
    for name in names:
        np.testing.assert_allclose(
            collected.activation(name, "held_out")[:, 0], seen[name][:64, -1], rtol=1e-5, atol=1e-6
        )


def test_activations_of_a_model_without_attention():
    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = torch.nn.Linear(8, 5), torch.nn.Linear(5, 4)

        def forward(self, inputs, *, predict_at):
            from planted import Output

            return Output(self.out(self.hidden(inputs.mean(1)).relu())[:, None])

    collected = collect(Mlp(), PlantedTask(), queries=[], keys=[], activations=["hidden"], num_samples=10)
    assert collected.layers == ()
    assert collected.activation("hidden", "train").shape == (10, 5)


def test_any_model_with_our_layers_can_be_read():
    reading = PlantedReading()
    collected = collect(PlantedModel(), reading.task, queries=reading.queries, keys=reading.keys, num_samples=50)
    assert collected.layers == ("rule", "noise")
    codes = collected.codes("rule", "train")  # the rule's head is 1 and the others near 0, at every key
    assert (codes.argmax(-1) == collected.latent("rules", "train")[:, None, None]).all()
    assert collected.score("accuracy", "train").mean() == 1


def test_a_store_is_whole_or_not_there(task, tmp_path):
    model = transformer(task)

    class Failing:
        def __getattr__(self, name):
            return getattr(task, name)

        def batch(self, split, index, *args, **options):
            if index == 1:
                raise KeyboardInterrupt
            return task.batch(split, index, *args, **options)

    with pytest.raises(KeyboardInterrupt):
        collect(model, Failing(), queries=[-1], keys=[-1], num_samples=COUNT, path=tmp_path / "codes")
    assert list(tmp_path.iterdir()) == []
    collect(model, task, queries=[-1], keys=[-1], num_samples=10, path=tmp_path / "codes", source={"run": "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["codes"]
    described = json.loads((tmp_path / "codes" / COLLECTION).read_text())
    assert described["source"] == {"run": "x", "task": "logic", "dtype": "float32"}
    with pytest.raises(RunError, match="exists"):
        collect(model, task, queries=[-1], keys=[-1], num_samples=10, path=tmp_path / "codes")
    assert isinstance(open_collection(tmp_path / "codes").codes(0, "train"), np.memmap)


def test_damaged_stores_are_refused_by_name(task, tmp_path):
    collect(transformer(task), task, queries=[-1], keys=[-1], num_samples=10, path=tmp_path / "whole")
    for name, damage in {
        "without": lambda path: (path / "train" / "codes.1.npy").unlink(),
        "short": lambda path: (path / "train" / "codes.0.npy").write_bytes(
            (path / "train" / "codes.0.npy").read_bytes()[:100]
        ),
        "empty": lambda path: (path / COLLECTION).write_text("{}"),
        "text": lambda path: (path / COLLECTION).write_text("{"),
    }.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(RunError, match=name):
            open_collection(tmp_path / name)
    with pytest.raises(RunError, match="does not exist"):
        open_collection(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": ["blocks.7"]}, r"layers = 'blocks.7' .*blocks.0.attention, blocks.1.attention"),
        ({"layers": [2]}, "layers = 2"),
        ({"layers": [0, "blocks.0.attention"]}, "each only once"),
        ({"queries": [6]}, "queries = 6 .* 6 positions"),
        ({"keys": [-7]}, "keys = -7"),
        ({"num_samples": 0}, "num_samples = 0"),
        ({"activations": ["blocks.0.mlq"]}, r"activations = 'blocks.0.mlq' .*blocks.0.mlp"),
        ({"activations": ["norm"], "positions": [3]}, "positions = 3"),
        ({"num_samples": 10**13}, "num_samples = 10000000000000 .* MiB free"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(task, tmp_path, options, message):
    arguments = {"queries": [-1], "keys": [-1], "path": tmp_path / "codes"} | options
    with pytest.raises(ConfigError, match=message):
        collect(transformer(task), task, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_asking_for_what_was_not_collected_names_what_was(task):
    collected = collect(transformer(task), task, queries=[-1], keys=[-1], num_samples=4)
    for ask, message in (
        (lambda: collected.codes("norm", "train"), "layer = 'norm' .*blocks.0.attention"),
        (lambda: collected.codes(0, "unseen_terms"), "split = 'unseen_terms' .*train, held_out"),
        (lambda: collected.latent("rules", "train"), r"latents\.terms"),
        (lambda: collected.activation("norm", "train"), "none"),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()


def test_attention_layers_in_order(task):
    assert list(attention_layers(transformer(task))) == ["blocks.0.attention", "blocks.1.attention"]


MEASURE = """
import resource, sys, torch
from hyla.latents.collect import collect
from hyla.latents.readings import reading_of
from hyla.training.config import make_model, make_task, preset_paper

config = preset_paper("sraven")
reading = reading_of(config)
model = make_model(config, make_task(config))
collected = collect(
    model, reading.task, queries=reading.queries, keys=reading.keys, num_samples=50_000, path=sys.argv[1]
)
assert collected.codes(3, "held_out").shape == (50_000, 1, 3, 16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_hundred_thousand_sequences_of_the_papers_sraven_model_stay_under_1_5_gib(tmp_path):
    """300,000 pairs in each of four layers, with inputs and latents beside them."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "codes")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout.split()[-1]) < 1.5, done.stdout
