"""Statistics against values worked out by hand; every form of the table."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console

from hyla.errors import RunError
from hyla.report import tables
from hyla.report.tables import format_mean, format_score, read_comparison, seeds_text, summarise, write_comparison
from hyla.runs import write_json

NOTE = "600 steps show that everything works, and nothing about the paper's figures."


def compare(runs, task="logic", budget="quick"):
    return summarise(runs, task=task, budget=budget, budget_note=NOTE)


def printed(comparison, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(tables.rich_table(comparison))
    return console.file.getvalue()


def test_report_does_not_import_torch():
    modules = ["tables", "figures", "html", "drawings"]
    code = "; ".join(f"import hyla.report.{module}" for module in modules)
    code += "; import sys; print('torch' in sys.modules, 'matplotlib' in sys.modules, 'plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_statistics_by_hand(make_run):
    runs = [make_run("hyla", seed, {"held_out": value}) for seed, value in enumerate([0.1, 0.2, 0.6])]
    row = compare(runs).row("hyla", "held_out")
    # mean 0.3; squared deviations 0.04 + 0.01 + 0.09 = 0.14, over n - 1 = 2 gives 0.07
    assert row.mean == pytest.approx(0.3)
    assert row.standard_deviation == pytest.approx(math.sqrt(0.07))
    assert row.standard_error == pytest.approx(math.sqrt(0.07 / 3))
    assert (row.num_values, row.seeds, row.values, row.steps) == (3, (0, 1, 2), (0.1, 0.2, 0.6), (600, 600))


def test_one_seed_has_no_spread(make_run):
    row = compare([make_run("hyla", 0, {"held_out": 0.5})]).row("hyla", "held_out")
    assert (row.mean, row.standard_deviation, row.standard_error) == (0.5, None, None)
    assert format_mean("r2", row.mean, row.standard_deviation) == "0.500 ± –"


def test_lost_runs_are_counted_and_have_no_value(make_run):
    runs = [
        make_run("hyla", 0, {"held_out": 0.4, "train": 0.5}),
        make_run("hyla", 1, state="diverged", steps=70),
        make_run("hyla", 2, state="unfinished", curve=[(100, {"held_out": 0.9})]),
        make_run("hyla", 3, {"held_out": None, "train": 0.7}),  # finished, held-out score not finite
    ]
    comparison = compare(runs)
    held_out, train = comparison.row("hyla", "held_out"), comparison.row("hyla", "train")
    assert held_out.values == (0.4, None, None, None)
    assert (held_out.num_values, held_out.num_diverged, held_out.num_unfinished, held_out.num_undefined) == (1, 1, 1, 1)
    assert seeds_text(held_out) == "1 of 4 (1 diverged, 1 unfinished, 1 not finite)"
    assert seeds_text(train) == "2 of 4 (1 diverged, 1 unfinished)"
    assert train.mean == pytest.approx(0.6)
    states = {run.name: (run.state, run.steps, run.reason) for run in comparison.runs}
    assert states["hyla-seed1"] == ("diverged", 70, "loss nan")
    assert states["hyla-seed2"] == ("unfinished", 100, None)
    assert comparison.steps == (600, 600)
    assert "1 of 4" in printed(comparison)


def test_scores_of_a_diverged_run_do_not_count(make_run):
    runs = [make_run("hyla", 0, {"held_out": 0.4}), make_run("hyla", 1, {"held_out": 0.8}, state="diverged")]
    assert compare(runs).row("hyla", "held_out").values == (0.4, None)


def test_nothing_finished(make_run):
    comparison = compare([make_run("hyla", 0, state="unfinished"), make_run("linear", 0, state="diverged")])
    counted = [(row.mechanism, row.split, row.num_unfinished, row.num_diverged, row.mean) for row in comparison.rows]
    assert counted == [("hyla", "held_out", 1, 0, None), ("linear", "held_out", 0, 1, None)]
    assert comparison.metric == "r2"
    assert comparison.title == "logic: hyla, linear (quick budget, no run finished)"
    assert "no run finished" in printed(comparison)
    assert len(tables.to_csv(comparison).splitlines()) == 3


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no runs"),
        ([("hyla", 0, "a"), ("hyla", 0, "b")], "two runs of hyla with seed 0: runs/a and runs/b"),
    ],
)
def test_runs_that_cannot_be_compared(make_run, runs, message):
    with pytest.raises(RunError, match=message):
        compare([make_run(mechanism, seed, {"held_out": 0.5}, name=name) for mechanism, seed, name in runs])


def test_metrics_must_agree(make_run, sraven_task):
    runs = [make_run("hyla", 0, {"held_out": 0.5}), make_run("hyla", 1, {"held_out": 0.5}, task=sraven_task)]
    with pytest.raises(RunError, match="different metrics: r2, accuracy"):
        compare(runs)


def test_order_is_held_out_first_and_mechanisms_as_given(make_run):
    scores = {"train": 0.6, "validation": 0.6, "held_out": 0.5, "unseen_terms": -0.1}
    comparison = compare([make_run(mechanism, 0, scores) for mechanism in ("softmax", "hyla")])
    assert comparison.splits == ("held_out", "train", "validation", "unseen_terms")
    assert comparison.mechanisms == ("softmax", "hyla")
    assert comparison.command == "hyla compare logic --mechanisms softmax,hyla --seeds 0 --budget quick"


# --- reported figures -------------------------------------------------------------------------------------------------


def test_reported_figures_of_the_paper(make_run, sraven_task):
    row = compare([make_run("hyla", 0, {"held_out": 0.5, "train": 0.6})]).row("hyla", "held_out")
    (figure,) = row.reported
    assert (figure.source, figure.steps, figure.caveat) == ("P1", 50_000, "")
    assert (figure.mean, figure.spread) == pytest.approx((0.8113, 0.0777))
    assert compare([make_run("hyla", 1, {"train": 0.6})]).row("hyla", "train").reported == ()
    sraven = compare([make_run("hyla", 2, {"held_out": 0.1}, task=sraven_task)], task="sraven")
    (figure,) = sraven.row("hyla", "held_out").reported
    assert (figure.mean, figure.spread, figure.steps) == (pytest.approx(0.6913), pytest.approx(0.019), 156_250)


def test_uncertain_row_is_marked(make_run):
    comparison = compare([make_run("hyla_linear_no_rms_head", 0, {"held_out": 0.5})])
    assert "0.569 ± 0.043 *" in printed(comparison)
    assert any(note.startswith("* The summary leaves open") for note in tables.notes(comparison))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("task", "held_out_fraction", 0.5),
        ("task", "num_points", 16),
        ("task", "name", "sraven"),
        ("model", "num_layers", 3),
        ("model", "depth", 3),
        ("model", "score_norm", "softmax"),
    ],
)
def test_other_settings_have_no_reported_figure(logic_task, model_sizes, section, key, value):
    sections = {"task": logic_task, "model": model_sizes | {"mechanism": "hyla"}}
    assert tables.reported_figures(sections["task"], sections["model"], "held_out", "r2", (600, 600))
    sections[section][key] = value
    assert tables.reported_figures(sections["task"], sections["model"], "held_out", "r2", (600, 600)) == ()


@pytest.mark.parametrize(("steps", "sources"), [(3_000, ["P1", "public code"]), (2_999, ["P1"]), (50_000, ["P1"])])
def test_public_code_is_shown_at_its_own_steps_only(make_run, steps, sources):
    comparison = compare([make_run("softmax", 0, {"held_out": 0.5, "train": 0.6}, steps=steps)])
    figures = comparison.row("softmax", "held_out").reported
    assert [figure.source for figure in figures] == sources
    if len(figures) == 2:
        assert (figures[1].mean, figures[1].spread, figures[1].spread_kind) == (0.532, 0.040, "standard error")
        (train,) = comparison.row("softmax", "train").reported
        assert (train.mean, train.spread) == (0.706, None)
        assert "0.706  \n" in printed(comparison)


def test_ceiling(make_run, sraven_task):
    runs = [
        make_run("hyla", seed, {"held_out": 0.6}, task=sraven_task, ceiling={"held_out": value})
        for seed, value in enumerate([0.84, 0.86])
    ]
    comparison = compare(runs, task="sraven")
    assert comparison.row("hyla", "held_out").ceiling == pytest.approx(0.85)
    assert "held_out (held-out combinations): accuracy (%); ceiling 85.0" in printed(comparison)


# --- forms ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(make_run):
    runs = [make_run("softmax", s, {"held_out": 0.5 + 0.1 * s, "train": 0.7}, curve=[(300, {"held_out": -2.5e4})])
            for s in range(2)]  # fmt: skip
    runs += [make_run("hyla_linear_no_rms_head", 0, {"held_out": 0.25, "train": 0.5}, steps=600)]
    runs += [make_run("hyla_linear_no_rms_head", 1, state="diverged", steps=40)]
    return compare(runs)


def test_terminal_table(comparison):
    text = printed(comparison)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:8] == [
        "logic: softmax, hyla_linear_no_rms_head (quick budget, 600 steps)",
        "",
        "held_out (held-out combinations): R²",
        "                                                                         P1,",
        "mechanism                    mean ± sd  seeds                   50,000 steps",
        "softmax                  0.550 ± 0.071  2                      0.633 ± 0.023",
        "hyla_linear_no_rms_head      0.250 ± –  1 of 2 (1 diverged)  0.569 ± 0.043 *",
        "",
    ]
    assert NOTE.split(",")[0] in text


def test_markdown(comparison):
    lines = tables.to_markdown(comparison).splitlines()
    assert lines[0] == "# logic: softmax, hyla_linear_no_rms_head (quick budget, 600 steps)"
    assert lines[2:5] == [
        "| split | mechanism | R², mean ± sd | standard error | seeds | P1, 50,000 steps |",
        "|:--|:--|--:|--:|:--|--:|",
        "| held_out | softmax | 0.550 ± 0.071 | 0.050 | 2 | 0.633 ± 0.023 |",
    ]
    assert all(line.count("|") == 7 for line in lines[2:8])
    assert NOTE in lines


def test_csv_parses_back(comparison, make_run):
    odd = compare([make_run('odd, "quoted"\nname', 0, {"held_out": 1 / 3}, name="a, b")])
    (row,) = csv.DictReader(io.StringIO(tables.to_csv(odd)))
    assert (row["mechanism"], row["run"], float(row["value"])) == ('odd, "quoted"\nname', "a, b", 1 / 3)

    rows = list(csv.DictReader(io.StringIO(tables.to_csv(comparison))))
    assert len(rows) == 4 * 2  # runs, splits
    values = [float(r["value"]) for r in rows if (r["mechanism"], r["split"]) == ("softmax", "held_out")]
    assert sum(values) / 2 == comparison.row("softmax", "held_out").mean
    lost = [r for r in rows if r["state"] == "diverged"]
    assert [(r["value"], r["steps"], r["seed"]) for r in lost] == [("", "40", "1")] * 2
    assert [float(r["p1_mean"]) for r in rows if r["split"] == "held_out"] == [0.6328, 0.6328, 0.5691, 0.5691]


def test_comparison_file_round_trips(comparison, tmp_path):
    path = write_comparison(tmp_path / "new", comparison)
    assert path == tmp_path / "new" / "comparison.json"
    assert read_comparison(tmp_path / "new") == comparison
    assert json.loads(path.read_text())["rows"][1]["standard_deviation"] is None


def test_damaged_comparison_file(comparison, tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        read_comparison(tmp_path)
    data = tables.to_json(comparison)
    del data["rows"][0]["mean"]
    write_json(tmp_path / "comparison.json", data)
    with pytest.raises(RunError, match=r"comparison.json is not a comparison"):
        read_comparison(tmp_path)


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("r2", 0.6328, "0.633"),
        ("r2", -0.09, "-0.090"),
        ("r2", -53211.4, "-53,211"),
        ("accuracy", 0.5656, "56.6"),
        ("accuracy", 0.0, "0.0"),
        ("r2", None, "–"),
    ],
)
def test_numbers(metric, value, text):
    assert format_score(metric, value) == text


# --- curves -----------------------------------------------------------------------------------------------------------


def test_mean_curve(make_run):
    runs = [
        make_run("hyla", 0, {"a": 0.5}, curve=[(100, {"a": 0.1}), (200, {"a": 0.3}), (300, {"a": 0.5})]),
        make_run("hyla", 1, {"a": 0.5}, curve=[(100, {"a": 0.2}), (200, {"a": None}), (300, {"a": 0.7})]),
        make_run("hyla", 2, state="diverged", curve=[(100, {"a": -9.0})]),
    ]
    curve = tables.mean_curve(compare(runs), "hyla", "a")
    assert (curve.steps, curve.num_runs) == ((100, 300), 2)
    assert curve.mean == pytest.approx((0.15, 0.6))
    assert (curve.low, curve.high) == ((0.1, 0.5), (0.2, 0.7))
    assert tables.mean_curve(compare(runs[2:]), "hyla", "a").steps == ()
