"""On a planted model the analysis finds exactly the planted layer; the command writes it all, and refuses mistakes."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from planted import NUM_RULES, PlantedModel, PlantedReading

from hyla.cli import main
from hyla.latents.analysis import Options, analyse
from hyla.latents.collect import collect, open_collection
from hyla.latents.readings import LogicReading, SravenReading
from hyla.models.transformer import TransformerConfig
from hyla.tasks.fuzzy_logic import LogicConfig
from hyla.tasks.sraven import SravenConfig
from hyla.training.config import LoopConfig, OptimizerConfig, TrainConfig
from hyla.training.loop import train

OPTIONS = Options(num_samples=600, num_points=60, num_replaced=200, project="pca")


@pytest.fixture(scope="module")
def planted():
    """The analysis of the planted model: layer 1 has the rule, layer 2 has noise."""
    model, reading = PlantedModel(), PlantedReading()
    collection = collect(model, reading.task, queries=reading.queries, keys=reading.keys, num_samples=600)
    return analyse(model, reading, collection, OPTIONS)


def score(part, metric="accuracy", test="held_out"):
    return next(row for row in part["probes"] if (row["metric"], row["test"]) == (metric, test))


def test_probes_find_the_planted_layer_and_the_control_stays_at_chance(planted):
    rule, noise = (score(layer) for layer in planted["layers"])
    assert rule["value"] == 1
    assert rule["low"] == 1
    chance = 1 / NUM_RULES
    assert abs(noise["value"] - chance) < 0.1
    assert rule["control"] < 0.5 < rule["value"]
    assert noise["low"] < max(noise["chance"], noise["control_high"]) + 0.1
    assert (rule["count"], rule["tasks"]) == (600, 5)
    assert [layer["title"] for layer in planted["layers"]] == ["layer 1", "layer 2"]
    assert {layer["name"]: layer["per_class"][0]["f1"] for layer in planted["layers"]}["rule"] == 1


def test_structure_says_so_too(planted):
    rule, noise = ({part["split"]: part for part in layer["structure"]}["held_out"] for layer in planted["layers"])
    assert rule["purity"] == 1
    assert rule["silhouette"] > 0.8
    assert abs(noise["purity"] - noise["purity_chance"]) < 0.1
    assert abs(noise["silhouette"]) < 0.1


def test_only_the_planted_layer_moves_the_answer(planted):
    rule, noise = (layer["causal"] for layer in planted["layers"])
    assert (rule["other"], rule["same"]) == (1, 0)
    np.testing.assert_array_equal(rule["effect"], 1 - np.eye(NUM_RULES))
    assert (rule["follows"], rule["follows_before"]) == (1, 0)
    assert (noise["other"], noise["same"], noise["follows"]) == (0, 0, 0)


def test_mean_codes_and_cosines_are_the_planted_ones(planted):
    means = np.array(planted["layers"][0]["mean_codes"]["values"]).reshape(NUM_RULES, 3, NUM_RULES)
    # the score of the rule's head is 1 + jitter of mean 0.05, over sqrt(width of a key per head = 1)
    planted_means = np.repeat(np.eye(NUM_RULES)[:, None], 3, 1) + 0.05
    np.testing.assert_allclose(means, planted_means, atol=0.02)
    cosines = np.array(planted["layers"][0]["cosines"])
    np.testing.assert_allclose(cosines, np.where(np.eye(NUM_RULES), 1, -1 / (NUM_RULES - 1)), atol=0.05)


def test_points_are_the_samples_drawn(planted):
    points = planted["points"]
    assert {len(values) for values in points.values()} == {60}
    assert set(points["split"]) == {"train", "held_out"}
    assert all(points["correct"])
    for task, label, text in zip(points["task"], points["class"], points["text"], strict=True):
        assert int(task) % NUM_RULES == label
        assert text == f"task <{task}>"
    assert len(planted["layers"][0]["projection"]["x"]) == 60


def test_input_tokens_are_probed_beside_the_codes(planted):
    """Here the inputs themselves hold the rule, so that the codes of layer 1 are no merit of the model."""
    titles = [part["title"] for part in planted["others"]]
    assert titles == ["the input tokens", "all layers"]
    assert score(planted["others"][0])["value"] == 1
    assert {part["purity_inputs"] for layer in planted["layers"] for part in layer["structure"]} != {None}


# --- what is read of each task -----------------------------------------------------------------------------------------


def test_the_reading_of_fuzzy_logic():
    reading = LogicReading(LogicConfig(num_points=6), seed=0)
    _, collection = tiny_model(reading)
    for split in ("train", "held_out"):
        inputs, terms = collection.inputs(split), collection.latent("terms", split)
        assert (inputs[:, -1, :-1] == inputs[0, -1, :-1]).all()  # the same last point everywhere
        names, bits = reading.bits(collection, split)
        assert names[:5] == ("term 1, x1", "term 1, x2", "term 1, x3", "term 1, x4", "term 2, x1")
        assert (bits[:, :4] @ [8, 4, 2, 1] == terms[:, 0]).all()
        assert (reading.labels(collection, split) == terms[:, 0]).all()
    train, held_out = (set(reading.groups(collection, split)) for split in ("train", "held_out"))
    assert not train & held_out
    assert len(train) == 20
    assert "f(x) = (" in reading.text(collection, "train", 0)


def test_the_reading_of_sraven():
    reading = SravenReading(SravenConfig(num_features=3), seed=0)
    assert (reading.queries, reading.keys) == ((-1,), (20, 23, 26))
    _, collection = tiny_model(reading)
    for split in ("train", "held_out"):
        rules, panels = collection.latent("rules", split), collection.latent("panels", split)
        assert (reading.labels(collection, split) == rules[:, -1]).all()
        counts = np.bincount(rules[:, -1], minlength=8)
        assert counts.min() > counts.max() / 6, "rules are not sorted: no rule is much more frequent in the last place"
        answers = reading.answers_of_classes(collection, split)
        truth = panels[:, -1, -1, -1]
        own = answers[np.arange(len(rules)), rules[:, -1]]
        assert ((own == truth) | (rules[:, -1] == 7)).all()
        assert (own[rules[:, -1] == 7] == -1).all()
        assert (collection.latent("permutations", split) == [0, 1, 2]).all()
    assert not set(reading.groups(collection, "train")) & set(reading.groups(collection, "held_out"))


def tiny_model(reading):
    from test_collect import transformer

    model = transformer(reading.task)
    return model, collect(model, reading.task, queries=reading.queries, keys=reading.keys, num_samples=700)


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs, of a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    model = TransformerConfig(embed_dim=16, num_heads=4, qk_dim=8, v_dim=8, mlp_dim=16, backend="eager")
    loop = LoopConfig(steps=4, batch_size=16, eval_samples=64, final_eval_samples=64)
    base = TrainConfig(LogicConfig(num_points=6), model, OptimizerConfig(warmup_steps=1), loop)
    train(base, folder / "logic")
    sraven = replace(base, task=SravenConfig(num_features=2), model=replace(model, mechanism="softmax"))
    train(sraven, folder / "sraven")
    return folder


FEW = ["--num-samples", "300", "--num-points", "50", "--num-replaced", "50", "--project", "pca"]


def test_one_run_is_read_into_its_own_folder(runs, capsys):
    assert main(["latents", str(runs / "logic"), *FEW, "--layers", "2", "--reference"]) == 0
    out = runs / "logic" / "latents"
    names = {path.name for path in out.iterdir()}
    assert names == {"analysis.json", "scores.json", "scores.csv", "index.html", "figures", "codes"}
    analysis = json.loads((out / "analysis.json").read_text())
    (model,) = analysis["models"]
    assert [layer["title"] for layer in model["layers"]] == ["layer 2"]
    probes = {row["probe"] for row in model["layers"][0]["probes"]}
    assert probes == {"ridge", "ridge (reference)", "logistic"}
    rows = list(csv.DictReader((out / "scores.csv").read_text().splitlines()))
    given = score(model["layers"][0], "R2")
    shown = next(row for row in rows if row["metric"] == "R2" and row["test"] == "held_out" and row["probe"] == "ridge")
    assert float(shown["value"]) == given["value"]
    assert len(list((out / "figures").glob("*.svg"))) >= 5
    assert open_collection(out / "codes" / "logic").splits == {"train": 300, "held_out": 300}
    printed = capsys.readouterr().out
    assert "R2 of the term bits, held_out" in printed
    assert str(out / "index.html") in printed


def test_several_runs_are_shown_beside_each_other(runs, tmp_path, monkeypatch):
    out = tmp_path / "both"
    arguments = ["latents", str(runs / "sraven"), str(runs / "logic"), *FEW, "--layers", "2", "--out", str(out)]
    assert main(arguments) == 0
    first = json.loads((out / "analysis.json").read_text())
    assert [model["name"] for model in first["models"]] == ["sraven", "logic"]
    assert first["models"][0]["layers"][0]["causal"]["effect_unit"] == "share of answers changed"
    monkeypatch.setattr("hyla.latents.read.write_figures", lambda folder, analysis: [])  # other tests look at them
    assert main(arguments) == 0, "written again"
    assert json.loads((out / "analysis.json").read_text()) == first, "and the same"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs = '' is not possible"),
        (["{runs}/nothing"], "no run folder"),
        (["{runs}/logic", "{runs}/logic"], "each only once"),
        (["{runs}/sraven", "--splits", "train,unseen_terms"], "splits = 'unseen_terms' .*train, held_out"),
        (["{runs}/logic", "--splits", "train"], "splits = 'train' .* two or more"),
        (["{runs}/logic", "--layers", "3"], "layers = 2|layers = 3"),
        (["{runs}/logic", "--layers", "0"], "layers = '0' .* numbers from 1"),
        (["{runs}/logic", "--keys", "9"], "keys = 9 .* 6 positions"),
        (["{runs}/logic", "--keys", "a"], "keys = 'a' .* positions"),
        (["{runs}/logic", "--num-replaced", "9000"], "num_replaced = 9000"),
        (["{runs}/logic", "--step", "3"], "3"),
        (["{runs}/logic", "--out", "{runs}"], "was not written by hyla latents"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(runs, tmp_path, capsys, monkeypatch, arguments, message):
    import re

    monkeypatch.chdir(tmp_path)
    before = sorted(runs.rglob("*"))
    assert main(["latents", *(word.format(runs=runs) for word in arguments)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(runs.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
