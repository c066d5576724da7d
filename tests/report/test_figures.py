"""Figures: what their axes and cells hold, and that something was drawn."""

from __future__ import annotations

import re

import matplotlib
import pytest
from PIL import Image

from hyla.errors import MissingExtraError
from hyla.report import canvas, figures
from hyla.report.comparison import summarise


def curve(*values, split="held_out"):
    return [(100 * (i + 1), {split: value, "train": value}) for i, value in enumerate(values)]


def assert_drawn(path, width):
    with Image.open(path) as image:
        assert image.width == width
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50


def assert_print_size(path):
    """A column of a paper wide, all letters embedded, 8 points."""
    data = path.read_bytes()
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", data)
    assert float(box[0]) == pytest.approx(72 * canvas.PRINT.width)
    assert b"/FontFile2" in data
    sizes = {float(size) for size in re.findall(rb"/\w+ ([\d.]+) Tf", data)}
    assert sizes == {8.0}


@pytest.fixture(autouse=True)
def _readable_pdf(monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "pdf.compression", 0)


@pytest.mark.parametrize("num_seeds", [1, 2, 3])
def test_curves_are_drawn(make_run, compare, tmp_path, num_seeds):
    runs = [
        make_run(m, s, {"held_out": 0.5, "train": 0.6}, curve=curve(-1e5, None, 0.3, 0.4 + 0.1 * s))
        for m in ("softmax", "linear_rms_head", "hyla_softmax")
        for s in range(num_seeds)
    ]
    runs += [make_run("hyla", 0, state="diverged", curve=curve(0.1, 0.2))]
    comparison = compare(runs)
    png, svg, pdf = figures.learning_curves(comparison, tmp_path / "figures" / "curves.v1")
    assert (png.name, svg.name, pdf.name) == ("curves.v1.png", "curves.v1.svg", "curves.v1.pdf")
    assert_drawn(png, 1440)
    assert svg.read_text().startswith("<?xml")
    if num_seeds == 3:
        for first, second in zip((svg, pdf), figures.learning_curves(comparison, tmp_path / "again")[1:], strict=True):
            assert first.read_bytes() == second.read_bytes()  # the same comparison gives the same file
    assert_print_size(pdf)
    caption = figures.caption(comparison)
    assert ("single seeds" in caption, "least to greatest" in caption) == (num_seeds == 2, num_seeds == 3)
    assert "1 diverged" in caption


def test_nothing_to_draw(make_run, compare, tmp_path):
    comparison = compare([make_run("hyla", 0, state="unfinished")])
    assert all(path.exists() for path in figures.draw_figures(comparison, tmp_path))
    assert figures.score_axis(comparison, ["held_out"])[:2] != (0.0, 0.0)


def test_hugely_negative_r2_is_cut(make_run, compare):
    comparison = compare([make_run("x", 0, {"held_out": 0.6}, curve=curve(-1e6, -0.12, 0.6))])
    low, high, cut, above = figures.score_axis(comparison, ["held_out"])
    assert (low, cut, above) == (pytest.approx(-0.15), True, False)
    assert 0.6 < high < 0.7


def test_final_values_are_never_cut_off(make_run, compare):
    comparison = compare([make_run("x", 0, {"held_out": -30.0}, curve=curve(-1e6, -100.0, -30.0))])
    low, high, cut, _ = figures.score_axis(comparison, ["held_out"])
    assert cut
    assert -33 <= low < -30
    assert high > 0


def test_axis_holds_reported_figures_unless_they_flatten_the_curves(make_run, compare, sraven_task):
    low, high, cut, above = figures.score_axis(
        compare([make_run("hyla", 0, {"held_out": 0.4}, curve=curve(0.1, 0.4))]), ["held_out"]
    )
    assert (low, cut, above) == (0.0, False, False)
    assert high > 0.8113
    run = make_run("hyla", 1, {"held_out": 0.02}, curve=curve(0.0, 0.02), task=sraven_task, ceiling={"held_out": 0.85})
    low, high, cut, above = figures.score_axis(compare([run]), ["held_out"])
    assert (low, cut, above) == (0.0, False, True)
    assert high < 0.03


def test_final_scores_are_all_in_view_and_wide_intervals_are_not(make_run, compare):
    comparison = compare([make_run("hyla", seed, {"held_out": v}, steps=3_000) for seed, v in enumerate((0.4, 0.5))])
    rows = comparison.rows_of("held_out")
    low, high = figures.final_range(comparison, rows, intervals=True)
    assert low < 0.4
    assert high > 0.8113  # reported
    assert rows[0].summary.interval[0] < low  # from -0.19: an arrow says that it goes on
    assert figures.final_range(comparison, rows, intervals=False)[0] > low


def test_scores_are_drawn(make_run, compare, tmp_path, sraven_task):
    options = {"task": sraven_task, "ceiling": {"held_out": 0.9}}
    runs = [make_run("hyla", seed, {"held_out": 0.5 + 0.1 * seed}, **options) for seed in range(3)]
    runs += [make_run("softmax", 0, {"held_out": 0.4}, **options), make_run("linear", 0, state="diverged", **options)]
    png, svg, pdf = figures.scores(compare(runs), tmp_path / "scores")
    assert_drawn(png, 1440)
    assert_print_size(pdf)
    comments = re.findall("<!-- (.*?) *-->", svg.read_text())  # the words of the figure
    assert "ceiling 90.0" in comments
    assert "no score: 0 of 1 (1 diverged)" in comments
    assert any("quick budget, 600 steps" in words for words in comments)


# --- axes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def swept(make_run, make_plan, tmp_path):
    """softmax and hyla at 16 and 32 points, 30 and 70% held out; hyla at (32, 0.7) has not started."""
    variants, axes = {}, {}
    for mechanism in ("softmax", "hyla"):
        for points in (32, 16):
            for fraction in (0.7, 0.3):
                name = f"{mechanism} {points} {fraction}"
                axes[name] = {"task.num_points": points, "held_out_fraction": fraction}
                state = "unfinished" if name == "hyla 32 0.7" else "finished"
                value = 0.01 * points + fraction + (mechanism == "hyla")
                variants[name] = [make_run(mechanism, s, {"held_out": value + 0.1 * s}, state=state, name=f"{name}-{s}")
                                  for s in range(2)]  # fmt: skip
    figures_ = ("scores", "curves", "heat_map", "scaling")
    return summarise(make_plan(variants, axes=axes, baseline="softmax 32 0.7", figures=figures_), tmp_path)


def test_heat_map_cells(swept):
    maps = figures.heat_maps(swept)
    assert {maps.x, maps.y} == {"task.num_points", "held_out_fraction"}
    assert list(maps.cells) == ["softmax", "hyla"]
    for mechanism, lines in maps.cells.items():
        for y, line in zip(maps.y_values, lines, strict=True):
            for x, row in zip(maps.x_values, line, strict=True):
                values = {maps.x: x, maps.y: y}
                assert row.variant == f"{mechanism} {values['task.num_points']} {values['held_out_fraction']}"
    assert swept.row("hyla 32 0.7", "held_out").summary.mean is None


def test_scaling_lines_differ_in_one_axis(swept):
    lines = figures.scaling_lines(swept, "task.num_points")
    names = [[row.variant for row in line] for line in lines]
    assert names == [[f"{m} 16 {f}", f"{m} 32 {f}"] for m in ("softmax", "hyla") for f in (0.7, 0.3)]


def test_figures_of_axes_are_drawn(swept, tmp_path):
    files = figures.draw_figures(swept, tmp_path / "figures")
    names = {f"{stem}.{kind}" for stem in ("scores", "curves", "heat_map", "scaling") for kind in ("png", "svg", "pdf")}
    assert {path.name for path in files} == names
    for path in files:
        if path.suffix == ".png":
            assert_drawn(path, 1440)
        elif path.suffix == ".pdf":
            assert_print_size(path)
    words = re.findall("<!-- (.*?) -->", (tmp_path / "figures" / "heat_map.svg").read_text())
    assert {"0.860 ± 0.000", "hyla", "held-out fraction", "points"} - set(words) == {"0.860 ± 0.000"}
    assert "0.510" in words  # softmax 16 0.3: 0.46 and 0.56
    assert "Hatched: no result." in " ".join(words)


def test_variants_of_one_mechanism_keep_apart(make_run, make_plan, tmp_path):
    runs = {name: [make_run("softmax", 0, {"held_out": 0.5}, name=name)] for name in ("plain", "mixture", "third")}
    comparison = summarise(make_plan(runs), tmp_path)
    looks = canvas.styles(comparison)
    assert looks["plain"] == canvas.STYLES["softmax"]
    assert len(set(looks.values())) == 3


@pytest.mark.parametrize(
    ("value", "text"), [(20_000_000, "20M"), (156_250, "156250"), (0.7, "0.7"), (None, "none"), (True, "True")]
)
def test_ticks(value, text):
    assert figures.tick_text(value) == text


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
    assert canvas.spread_apart(values, 0.1) == pytest.approx(moved, abs=1e-6)


def test_every_mechanism_has_a_look_of_its_own():
    assert len({colour for colour, _ in canvas.STYLES.values()}) == len(canvas.STYLES) == 9
    assert canvas.style("never heard of") == canvas.style("never heard of")


def test_missing_matplotlib(make_run, compare, tmp_path, hide_package):
    comparison = compare([make_run("hyla", 0, {"held_out": 0.5})])
    hide_package("matplotlib")
    with pytest.raises(MissingExtraError, match=r"drawing figures needs matplotlib.*hyla\[report\]"):
        figures.learning_curves(comparison, tmp_path / "x")
