"""Learning curves: what the axis holds, and that something was drawn."""

from __future__ import annotations

import builtins

import pytest
from PIL import Image

from hyla.errors import MissingExtraError
from hyla.report import figures
from hyla.report.tables import summarise


def compare(runs, task="logic"):
    return summarise(runs, task=task, budget="quick", budget_note="")


def curve(*values, split="held_out"):
    return [(100 * (i + 1), {split: value, "train": value}) for i, value in enumerate(values)]


def assert_drawn(path, width):
    with Image.open(path) as image:
        assert image.width == width
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50


@pytest.mark.parametrize("num_seeds", [1, 2, 3])
def test_curves_are_drawn(make_run, tmp_path, num_seeds):
    runs = [
        make_run(m, s, {"held_out": 0.5, "train": 0.6}, curve=curve(-1e5, None, 0.3, 0.4 + 0.1 * s))
        for m in ("softmax", "linear_rms_head", "hyla_softmax")
        for s in range(num_seeds)
    ]
    runs += [make_run("hyla", 0, state="diverged", curve=curve(0.1, 0.2))]
    comparison = compare(runs)
    png, svg = figures.learning_curves(comparison, tmp_path / "figures" / "curves.v1")
    assert (png.name, svg.name) == ("curves.v1.png", "curves.v1.svg")
    assert_drawn(png, 1440)
    assert svg.read_text().startswith("<?xml")
    again = figures.learning_curves(comparison, tmp_path / "again")[1]
    assert again.read_bytes() == svg.read_bytes()  # the same comparison gives the same file
    caption = figures.caption(comparison)
    assert ("single seeds" in caption, "least to greatest" in caption) == (num_seeds == 2, num_seeds == 3)
    assert "1 diverged" in caption


def test_nothing_to_draw(make_run, tmp_path):
    png, _ = figures.learning_curves(compare([make_run("hyla", 0, state="unfinished")]), tmp_path / "none")
    assert png.exists()


def test_hugely_negative_r2_is_cut(make_run):
    comparison = compare([make_run("x", 0, {"held_out": 0.6}, curve=curve(-1e6, -0.12, 0.6))])
    low, high, cut, above = figures.score_axis(comparison, ["held_out"])
    assert (low, cut, above) == (pytest.approx(-0.15), True, False)
    assert 0.6 < high < 0.7


def test_final_values_are_never_cut_off(make_run):
    comparison = compare([make_run("x", 0, {"held_out": -30.0}, curve=curve(-1e6, -100.0, -30.0))])
    low, high, cut, _ = figures.score_axis(comparison, ["held_out"])
    assert cut
    assert -33 <= low < -30
    assert high > 0


def test_axis_holds_reported_figures_unless_they_flatten_the_curves(make_run, sraven_task):
    low, high, cut, above = figures.score_axis(
        compare([make_run("hyla", 0, {"held_out": 0.4}, curve=curve(0.1, 0.4))]), ["held_out"]
    )
    assert (low, cut, above) == (0.0, False, False)
    assert high > 0.8113
    run = make_run("hyla", 1, {"held_out": 0.02}, curve=curve(0.0, 0.02), task=sraven_task, ceiling={"held_out": 0.85})
    low, high, cut, above = figures.score_axis(compare([run], "sraven"), ["held_out"])
    assert (low, cut, above) == (0.0, False, True)
    assert high < 0.03


@pytest.mark.parametrize(
    ("values", "moved"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.0, 1.0], [0.0, 1.0]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.0, 0.5], [0.45, 0.0, 0.55]),
        ([0.0, 0.1, 0.15, 0.9], [-0.0166667, 0.0833333, 0.1833333, 0.9]),
    ],
)
def test_labels_keep_apart(values, moved):
    assert figures.spread_apart(values, 0.1) == pytest.approx(moved, abs=1e-6)


def test_every_mechanism_has_a_look_of_its_own():
    assert len({colour for colour, _ in figures.STYLES.values()}) == len(figures.STYLES) == 9
    assert figures.style("never heard of") == figures.style("never heard of")


def test_missing_matplotlib(make_run, tmp_path, monkeypatch):
    comparison = compare([make_run("hyla", 0, {"held_out": 0.5})])
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"drawing figures needs matplotlib.*hyla\[report\]"):
        figures.learning_curves(comparison, tmp_path / "x")
