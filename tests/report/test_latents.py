"""Scores and figures of latent codes: the numbers given are the numbers shown."""

from __future__ import annotations

import csv
import itertools
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import latent_analyses
import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyla.errors import MissingExtraError, RunError
from hyla.report import latents


@pytest.fixture
def sraven() -> dict[str, Any]:
    return latent_analyses.sraven()


@pytest.fixture
def logic() -> dict[str, Any]:
    return latent_analyses.logic()


@pytest.fixture
def svg_text(monkeypatch):
    """Lets SVG files keep their text as text, and reads it."""
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")

    def read(path: Path) -> list[str]:
        return [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)]

    return read


def probes_of(model):
    return [(layer, score) for layer in model["layers"] for score in layer["probes"]]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text", "short"),
    [
        (None, "–", "–"),
        (float("nan"), "–", "–"),
        (float("-inf"), "–", "–"),
        (0.9344, "0.934", "0.93"),
        (-0.25, "−0.250", "−0.25"),
        (-0.0001, "0.000", "0.00"),
        (-3.0e8, "−300,000,000", "−300000000.00"),
        (1, "1.000", "1.00"),
    ],
)
def test_format(value, text, short):
    assert (latents.format_value(value), latents.format_short(value)) == (text, short)


def test_interval_and_counts():
    assert latents.format_interval(-0.1, 0.25) == "−0.100 to 0.250"
    assert latents.format_interval(None, 0.25) == latents.format_interval(0.1, float("nan")) == "–"
    assert latents.count_of(4096, 9) == "4,096 pairs of 9 tasks"
    assert latents.count_of(5, 1) == "5 pairs of 1 task"
    assert latents.count_of(None, None) == "– pairs"


def test_scores_are_those_given(sraven, tmp_path):
    as_json, as_csv = latents.write_scores(tmp_path / "new", sraven)
    with open(as_csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    given = [(model, *pair) for model in sraven["models"] for pair in probes_of(model)]
    assert len(rows) == len(given) == 2 * 4 * 4
    for row, (model, layer, score) in zip(rows, given, strict=True):
        assert (row["model"], row["layer"], row["note"]) == (model["name"], layer["name"], score["note"])
        for key in ("value", "low", "high", "chance", "control", "control_high"):
            assert float(row[key]) == score[key]
    document = json.loads(as_json.read_text())
    first, source = document["models"][0]["layers"][3], sraven["models"][0]["layers"][3]
    for key in ("probes", "per_class", "structure", "causal", "few_shot"):
        assert first[key] == source[key]
    assert "points" not in document["models"][0]
    assert not {"projection", "mean_codes", "cosines"} & set(first)


def test_scores_without_a_value_are_empty(logic, tmp_path):
    logic["models"][0]["layers"][0]["probes"][0]["value"] = float("nan")
    as_json, as_csv = latents.write_scores(tmp_path, logic)
    with open(as_csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["value"] for row in rows] == ["", "-300000000.0", "", "0.91", "-300000000.0", ""]
    assert json.loads(as_json.read_text())["models"][0]["layers"][0]["probes"][0]["value"] is None


def test_another_format_is_refused(sraven, tmp_path):
    with pytest.raises(RunError, match="format 2: this version shows 1"):
        latents.write_scores(tmp_path / "x", sraven | {"format": 2})
    with pytest.raises(RunError, match="format None"):
        latents.write_figures(tmp_path / "x", {"models": []})
    assert not (tmp_path / "x").exists()


# --- what is said of them ---------------------------------------------------------------------------------------------


def test_panels_show_the_held_out_split_and_the_metric_that_matters_first(sraven, logic):
    panels = latents.probe_panels(sraven)
    assert [(panel.metric, panel.test) for panel in panels] == [("macro F1", "held_out"), ("accuracy", "held_out")]
    assert [index for index, _ in panels[0].series] == [0, 1]
    values = [score["value"] for score in panels[0].series[0][1]]
    assert values == [layer["probes"][0]["value"] for layer in sraven["models"][0]["layers"]]
    assert panels[0].subtitle == "held-out combinations, 4,096 pairs of 9 tasks"
    (panel,) = latents.probe_panels(logic)  # the reference ridge and the unseen terms are for the table
    assert (panel.probe, panel.metric, panel.title) == ("ridge", "R2", "R² of the term bits, ridge probe")
    both = latents.probe_panels(sraven | {"models": [*sraven["models"], *logic["models"]]})
    assert [panel.metric for panel in both] == ["R2", "macro F1", "accuracy"]


def test_without_a_held_out_split_another_one_is_shown(sraven):
    for _, score in probes_of(sraven["models"][0]):
        if score["test"] == "held_out":
            score["test"] = "validation"
    assert {panel.test for panel in latents.probe_panels({"models": sraven["models"][:1]})} == {"validation"}


def test_headline_is_made_from_the_numbers(sraven):
    model = sraven["models"][0]
    score = model["layers"][2]["probes"][0]
    score |= {"value": 0.97, "low": 0.955, "high": 0.98, "chance": 0.031, "control": 0.044, "control_high": 0.072}
    assert latents.best_layer(model) == 2
    assert latents.headline(model) == (
        "the rule is read best from layer 3 (the best of 4 layers on these same pairs), macro F1 0.970 (95% interval "
        "0.955 to 0.980) on 4,096 pairs of 9 tasks, held-out combinations. Chance 0.031; fitted to shuffled labels "
        "0.044, at most 0.072: the whole interval lies above both."
    )


@pytest.mark.parametrize(("low", "above"), [(0.2001, True), (0.2, False), (0.05, False)])
def test_headline_claims_nothing_that_its_control_does(sraven, low, above):
    model = sraven["models"][0]
    for layer in model["layers"]:
        layer["probes"][0] |= {"value": 0.3, "low": low, "chance": 0.1, "control": 0.15, "control_high": 0.2}
    assert latents.best_layer(model) == 0  # the first of equals
    assert ("lies above both" in latents.headline(model)) is above
    assert ("shows nothing yet" in latents.headline(model)) is not above


def test_headline_of_undefined_scores(logic):
    model = logic["models"][0]
    assert "the term bits are read best from layer 2" in latents.headline(model)
    for key in ("low", "chance", "control"):
        given = model["layers"][1]["probes"][0][key]
        model["layers"][1]["probes"][0][key] = None
        assert " –" in latents.headline(model)
        assert "cannot be judged" in latents.headline(model)
        model["layers"][1]["probes"][0][key] = given
    for _, score in probes_of(model):
        score["value"] = None
    assert latents.best_layer(model) is None
    assert "no probe has a defined score" in latents.headline(model)
    model["layers"] = [layer | {"probes": []} for layer in model["layers"]]
    assert latents.main_scores(model) == ()
    assert "no probe has a defined score" in latents.headline(model)


def test_labels_tell_models_apart(sraven, logic):
    first, second = sraven["models"]
    assert latents.model_labels(sraven) == ["hyla, seed 0", "softmax, seed 0"]
    twice = {"models": [first, first | {"step": 500}]}
    assert latents.model_labels(twice)[1] == "hyla, seed 0 (sraven-hyla-seed0, step 500)"
    assert latents.model_labels({"models": [second, *logic["models"]]})[0] == "sraven, softmax, seed 0"


@given(st.lists(st.text(max_size=8) | st.sampled_from(["a", "a-2", "a b", "../a"]), max_size=6))
def test_file_names_are_safe_and_differ(names):
    stems = latents.file_stems({"models": [{"name": name} for name in names]})
    assert len(set(stems)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", stem) for stem in stems)


# --- where numbers stand in a scatter ---------------------------------------------------------------------------------


def test_numbers_stand_in_the_crowd_of_their_class():
    rng = np.random.default_rng(0)
    left, right = rng.normal((-5, 0), 0.5, (30, 2)), rng.normal((5, 0), 0.5, (20, 2))
    strays = rng.normal((0, 9), 0.1, (5, 2))  # of the first class, but not where most of it is
    points = np.concatenate([left, right, strays])
    classes = [0] * 30 + [1] * 20 + [0] * 5
    spots = latents.crowded_spots(points[:, 0].tolist(), points[:, 1].tolist(), classes, 3)
    assert spots[0] is not None
    assert spots[1] is not None
    assert spots[0] == pytest.approx((-5, 0), abs=1)
    assert spots[1] == pytest.approx((5, 0), abs=1)
    assert spots[2] is None  # no points at all


def test_mixed_classes_have_no_number():
    points = np.random.default_rng(1).normal(size=(400, 2))
    spots = latents.crowded_spots(points[:, 0].tolist(), points[:, 1].tolist(), [i % 4 for i in range(400)], 4)
    assert spots == [None] * 4


# --- colours ----------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1; rows give linear red, green, blue.
SEEN_AS = {
    "normal": np.eye(3),
    "red-blind": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green-blind": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue-blind": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(linear):
    """Ottosson (2020): linear sRGB to OKLab."""
    to_cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    to_cones += [[0.0883024619, 0.2817188376, 0.6299787005]]
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    to_lab += [[0.0259040371, 0.7827717662, -0.8086757660]]
    return np.cbrt(linear @ np.array(to_cones).T) @ np.array(to_lab).T


@pytest.mark.parametrize(("reader", "least"), [("normal", 0.2), *[(name, 0.066) for name in list(SEEN_AS)[1:]]])
def test_colours_of_classes_keep_apart(reader, least):
    srgb = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in latents.COLOURS]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = oklab(np.clip(linear @ np.array(SEEN_AS[reader]).T, 0, 1))
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= least
    assert (oklab(linear)[:, 0] > 0.35).all()  # lightness: seen on black
    assert (oklab(linear)[:, 0] < 0.86).all()  # and on white
    assert latents.colour_of(12) == latents.COLOURS[0]


# --- figures ----------------------------------------------------------------------------------------------------------


def assert_drawn(path):
    with Image.open(path) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50


def test_every_figure_that_has_data_is_drawn(logic, tmp_path):
    paths = latents.write_figures(tmp_path / "figures", logic)
    stems = ["probes", *(f"logic-hyla-seed2024-{name}" for name in ("projections", "mean-codes", "cosines"))]
    assert [path.name for path in paths] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    for path in paths[::2]:
        assert_drawn(path)
    model = logic["models"][0]  # it has neither scores of single rules nor a causal check
    again = latents.cosines(model, tmp_path / "again")[1]
    assert again.read_bytes() == paths[-1].read_bytes()  # the same data gives the same file


def test_probe_scores_far_below_zero_are_at_the_edge_with_their_number(logic, tmp_path, svg_text):
    logic["models"][0]["layers"][0]["probes"][0] |= {"value": -3.0e8, "low": -4.0e8, "high": -2.0e8}
    texts = svg_text(latents.probe_scores(logic, tmp_path / "probes")[1])
    assert "−300,000,000" in texts
    assert "held-out combinations, 4,096 pairs of 33 tasks" in texts
    assert {"layer 1", "layer 2", "hyla, seed 2024", "chance", "fitted to shuffled labels"} <= set(texts)


def test_figures_of_rules_hold_their_numbers(sraven, tmp_path, svg_text):
    model = sraven["models"][0]
    texts = svg_text(latents.rule_scores(model, tmp_path / "rules")[1])
    given = [one["f1"] for layer in model["layers"] for one in layer["per_class"] if one["f1"] is not None]
    macro = [layer["probes"][0]["value"] for layer in model["layers"]]
    shown = [text for text in texts if re.fullmatch(r"\d\.\d\d", text)]
    assert sorted(shown) == sorted(f"{value:.2f}" for value in [*given, *macro])
    assert "distribute three (0)" in texts
    assert "macro average" in texts

    path = latents.causal_effects(model, tmp_path / "causal")[1]
    texts = svg_text(path)
    checks = [layer["causal"] for layer in model["layers"]]
    cells = [value for one in checks for row in one["effect"] for value in row if value is not None]
    beside = [one[name] for one in checks for name in ("same", "other", "follows")]
    for text in {f"{value:.2f}" for value in [*cells, *beside]}:
        least = sum(f"{value:.2f}" == text for value in [*cells, *beside])
        assert texts.count(text) >= least, text
    assert "<pattern" in path.read_text()  # the row without pairs is hatched


def test_projections_say_how_clear_the_clusters_are(sraven, tmp_path, svg_text):
    model = sraven["models"][0]
    layer = model["layers"][3]
    layer["structure"][1] |= {"purity": 0.876, "purity_chance": 0.127, "purity_other_tasks": None, "silhouette": -0.31}
    texts = svg_text(latents.projections(model, tmp_path / "p")[1])
    assert "held-out: purity 0.876 (chance 0.127, other tasks –), silhouette −0.310" in texts
    assert {"1 constant (30)", "8 distribute three (30)", "trained combinations (160)"} <= set(texts)
    numbers = {str(i + 1) for i in range(8)}
    assert numbers <= set(texts)  # the last layer's clusters are numbered
    model["layers"] = model["layers"][:1]
    assert not numbers & set(svg_text(latents.projections(model, tmp_path / "noise")[1]))


def test_rows_without_codes_are_hatched(sraven, tmp_path):
    model = sraven["models"][0]
    model["layers"] = model["layers"][-1:]
    hatched = latents.mean_codes(model, tmp_path / "hatched")[1].read_text()
    model["layers"][0]["mean_codes"]["values"][7] = [0.0] * 48
    whole = latents.mean_codes(model, tmp_path / "whole")[1].read_text()
    assert ("<pattern" in hatched, "<pattern" in whole) == (True, False)


def test_scale_of_mean_codes_is_shared_unless_a_layer_would_vanish():
    def model(*tops):
        layers = [{"name": str(i), "mean_codes": {"values": [[top, -top / 2], None]}} for i, top in enumerate(tops)]
        return {"classes": ["a", "b"], "num_heads": 2, "keys": ["k"], "layers": layers}

    assert latents.code_limits(model(1.0, -2.0)) == {"0": 2.0, "1": 2.0}
    assert latents.code_limits(model(0.1, 2.5)) == {"0": 0.1, "1": 2.5}


def test_names_are_drawn_as_they_are(logic, tmp_path, svg_text):
    """Neither mathematics between dollar signs, nor markup, nor an underscore that matplotlib would drop."""
    evil = "$\\frac{1}$ <b>&amp;"
    model = logic["models"][0] | {"mechanism": "_x", "classes": [evil, *latent_analyses.TERMS[1:]]}
    texts = svg_text(latents.cosines(model, tmp_path / "c")[1])
    assert f"1 {evil}" in texts
    texts = svg_text(latents.probe_scores(logic | {"models": [model]}, tmp_path / "p")[1])
    assert "_x, seed 2024" in [text.strip("\u200b") for text in texts]


def test_missing_matplotlib(logic, tmp_path, hide_package):
    hide_package("matplotlib")
    with pytest.raises(MissingExtraError, match=r"drawing figures needs matplotlib.*hyla\[report\]"):
        latents.write_figures(tmp_path / "x", logic)
