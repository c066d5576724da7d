"""From run folders to numbers: what counts, what was chosen, what is beside it, what is damaged."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hyla.errors import RunError
from hyla.report.comparison import mean_curve, summarise, write_comparison
from hyla.report.reported import reported_figures
from hyla.runs import write_json


def test_statistics_of_a_row(make_run, compare):
    runs = [make_run("hyla", seed, {"held_out": value}) for seed, value in enumerate([0.1, 0.2, 0.6])]
    row = compare(runs).row("hyla", "held_out")
    assert row.summary.mean == pytest.approx(0.3)
    assert row.summary.standard_deviation == pytest.approx(math.sqrt(0.07))
    assert (row.seeds, row.values, row.steps) == ((0, 1, 2), (0.1, 0.2, 0.6), (600, 600))
    assert row.runs == ("hyla-seed0", "hyla-seed1", "hyla-seed2")


def test_lost_runs_are_counted_and_have_no_value(make_run, make_plan, tmp_path):
    runs = [
        make_run("hyla", 0, {"held_out": 0.4, "train": 0.5}),
        make_run("hyla", 1, state="diverged", steps=70),
        make_run("hyla", 2, state="unfinished", curve=[(100, {"held_out": 0.9})]),
        make_run("hyla", 3, {"held_out": None, "train": 0.7}),  # finished, held-out score not finite
        make_run("hyla", 4, state="unfinished"),  # a folder with nothing in it but a config
        make_run("hyla", 5, state="unfinished", curve=[(100, {"held_out": 0.8})]),
    ]
    plan = make_plan({"hyla": runs})
    (candidate,) = plan.variants[0].candidates
    missing = replace(candidate, runs=candidate.runs | {6: "never-made"})
    plan = replace(plan, variants=(replace(plan.variants[0], candidates=(missing,)),))
    write_json(tmp_path / "errors.json", {"hyla-seed5": {"error": "disk full", "attempts": 2}})
    comparison = summarise(plan, tmp_path)
    held_out, train = comparison.row("hyla", "held_out"), comparison.row("hyla", "train")
    assert held_out.values == (0.4, None, None, None, None, None, None)
    assert held_out.lost == {"diverged": 1, "failed": 1, "unfinished": 1, "not started": 2, "not finite": 1}
    assert train.lost == {"diverged": 1, "failed": 1, "unfinished": 1, "not started": 2}
    assert train.summary.mean == pytest.approx(0.6)
    states = {run.name: (run.state, run.steps, run.reason) for run in comparison.runs}
    assert states["hyla-seed1"] == ("diverged", 70, "loss nan")
    assert states["hyla-seed2"] == ("unfinished", 100, None)
    assert states["hyla-seed5"] == ("failed", 100, "disk full")
    assert states["never-made"] == ("not started", 0, None)
    assert comparison.steps == (600, 600)
    assert comparison.states == {"finished": 2, "diverged": 1, "failed": 1, "unfinished": 1, "not started": 2}
    assert comparison.lost == held_out.lost


def test_a_run_that_failed_and_then_finished_has_finished(make_run, compare, tmp_path):
    run = make_run("hyla", 0, {"held_out": 0.4})
    write_json(tmp_path / "errors.json", {run.name: {"error": "killed", "attempts": 1}})
    assert compare([run]).states == {"finished": 1}


def test_scores_of_a_diverged_run_do_not_count(make_run, compare):
    runs = [make_run("hyla", 0, {"held_out": 0.4}), make_run("hyla", 1, {"held_out": 0.8}, state="diverged")]
    assert compare(runs).row("hyla", "held_out").values == (0.4, None)


def test_nothing_finished(make_run, compare):
    comparison = compare([make_run("hyla", 0, state="unfinished"), make_run("linear", 0, state="diverged")])
    counted = [(row.variant, row.split, row.lost, row.summary.mean) for row in comparison.rows]
    assert counted == [("hyla", "held_out", {"not started": 1}, None), ("linear", "held_out", {"diverged": 1}, None)]
    assert comparison.title == "logic: hyla, linear (quick budget, no run finished)"


def test_order_is_reported_split_first_and_variants_as_given(make_run, compare):
    scores = {"train": 0.6, "validation": 0.6, "held_out": 0.5, "unseen_terms": -0.1}
    runs = [make_run(mechanism, 0, scores) for mechanism in ("softmax", "hyla")]
    comparison = compare(runs)
    assert comparison.splits == ("held_out", "train", "validation", "unseen_terms")
    assert comparison.variants == ("softmax", "hyla")
    assert compare(runs, reported_split="unseen_terms").splits[:2] == ("unseen_terms", "train")


def test_written_as_plain_data(make_run, compare, tmp_path):
    comparison = compare([make_run("softmax", 0, {"held_out": 0.5}), make_run("hyla", 0, {"held_out": 0.25})])
    path = write_comparison(tmp_path / "new", comparison)
    data = json.loads(path.read_text())
    assert (path.name, data["plan"]["name"], data["rows"][1]["variant"]) == ("comparison.json", "compare-logic", "hyla")
    assert data["rows"][1]["summary"]["mean"] == 0.25
    assert data["rows"][1]["difference"]["summary"] == data["rows"][1]["summary"] | {"mean": -0.25}


# --- differences, best ------------------------------------------------------------------------------------------------


def test_differences_pair_seeds(make_run, compare):
    values = {"softmax": [0.4, 0.4, 0.5], "hyla": [0.5, 0.7, 0.9]}
    runs = [
        make_run(m, s, {"held_out": v}) for m, vs in values.items() for s, v in enumerate(vs) if (m, s) != ("hyla", 1)
    ]
    comparison = compare([*runs, make_run("hyla", 1, state="diverged")])
    assert comparison.row("softmax", "held_out").difference is None
    difference = comparison.row("hyla", "held_out").difference
    # seeds 0 and 2: 0.1 and 0.4; mean 0.25, standard error 0.15
    assert (difference.to, difference.summary.count) == ("softmax", 2)
    assert difference.summary.mean == pytest.approx(0.25)
    assert difference.summary.interval == pytest.approx((0.25 - 12.7062 * 0.15, 0.25 + 12.7062 * 0.15), abs=1e-4)
    assert all(row.difference is None for row in compare(runs, baseline=None).rows)


AXES = {"softmax 16": {"n": 16}, "softmax 32": {"n": 32}, "hyla 16": {"n": 16}, "hyla 32": {"n": 32}}


def swept(make_run, make_plan, tmp_path, **changes):
    variants = {}
    for place, name in enumerate(AXES):
        mechanism = name.split()[0]
        variants[name] = [
            make_run(mechanism, seed, {"held_out": 0.1 * place + 0.001 * seed}, name=f"{name}-{seed}")
            for seed in range(2)
        ]
    return summarise(make_plan(variants, axes=AXES, **changes), tmp_path)


def test_with_axes_the_baseline_is_that_with_the_same_settings(make_run, make_plan, tmp_path):
    comparison = swept(make_run, make_plan, tmp_path, baseline="softmax 16")
    found = {row.variant: row.difference and row.difference.to for row in comparison.rows_of("held_out")}
    assert found == {"softmax 16": None, "softmax 32": None, "hyla 16": "softmax 16", "hyla 32": "softmax 32"}
    assert comparison.groups == ((16,), (32,))


def test_with_one_mechanism_the_baseline_is_the_one_named(make_run, make_plan, tmp_path):
    runs = {name: [make_run("hyla", 0, {"held_out": 0.5}, name=name)] for name in ("a", "b")}
    plan = make_plan(runs, axes={"a": {"n": 1}, "b": {"n": 2}}, baseline="a")
    assert [row.difference and row.difference.to for row in summarise(plan, tmp_path).rows] == [None, "a"]


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({"softmax": [0.50, 0.51, 0.52], "linear": [0.3, 0.31, 0.32], "hyla": [0.80, 0.81, 0.82]}, "hyla"),
        ({"softmax": [0.50, 0.51, 0.52], "hyla": [0.51, 0.52, 0.53]}, None),  # intervals touch
        ({"softmax": [0.50], "hyla": [0.80, 0.81, 0.82]}, None),  # softmax has no interval
        ({"hyla": [0.80, 0.81, 0.82]}, None),  # nothing to compare with
    ],
)
def test_best_is_only_what_is_apart_from_all_others(make_run, compare, values, best):
    runs = [make_run(m, seed, {"held_out": v}) for m, vs in values.items() for seed, v in enumerate(vs)]
    comparison = compare(runs)
    marked = [row.variant for row in comparison.rows_of("held_out") if comparison.is_best(row)]
    assert marked == ([best] if best else [])


# --- selection --------------------------------------------------------------------------------------------------------


def candidates(make_run, scores):
    """scores: per candidate, per seed, (validation, held out) or a state."""
    grid = []
    for place, seeds in enumerate(scores):
        runs = []
        for seed, value in enumerate(seeds):
            made = {"name": f"hyla-{place}-{seed}", "lr": 0.001 * (place + 1)}
            if isinstance(value, str):
                curve = [(100, {"validation": 5.0, "held_out": 5.0})]
                runs.append(make_run("hyla", seed, {"validation": 5.0}, state=value, curve=curve, **made))
            else:
                runs.append(make_run("hyla", seed, dict(zip(("validation", "held_out"), value, strict=True)), **made))
        grid.append(runs)
    return {"hyla": grid}


LOST, UNDEFINED = "diverged", (None, 0.99)
CHOICES = {
    "highest mean on validation": ([[(0.1, 0.9), (0.2, 0.9)], [(0.2, 0.1), (0.3, 0.1)]], 1),
    "ties go to the first": ([[(0.2, 0.1), (0.2, 0.1)], [(0.2, 0.9), (0.2, 0.9)]], 0),
    "diverged runs do not win": ([[(0.1, 0.1), (0.1, 0.1)], [(0.9, 0.9), LOST]], 0),
    "undefined scores do not win": ([[(0.1, 0.1), (0.1, 0.1)], [UNDEFINED, UNDEFINED]], 0),
    "nor the mean of fewer seeds": ([[(0.9, 0.1), "unfinished"], [(0.1, 0.1), (0.1, 0.1)]], 1),
    "below zero wins over nothing": ([[LOST, LOST], [(-5.0, -5.0), LOST]], 1),
    "none has finished": ([[LOST, "unfinished"], [LOST, LOST]], None),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice_by_validation(make_run, make_plan, tmp_path, name):
    scores, expected = CHOICES[name]
    comparison = summarise(make_plan(candidates(make_run, scores), selection="validation"), tmp_path)
    assert comparison.choices[0].selected == expected
    row = comparison.row("hyla", "held_out")
    if expected is None:
        assert (row.runs, row.values, row.summary.count) == ((), (), 0)
        assert sum(row.lost.values()) == 4  # all candidates' runs
        assert comparison.runs_of("hyla") == ()
    else:
        assert row.runs == (f"hyla-{expected}-0", f"hyla-{expected}-1")
        assert comparison.choices[0].candidates[expected].settings == {"optimizer.lr": 0.001 * (expected + 1)}
    assert len(comparison.runs) == 4


def test_choice_by_the_reported_split(make_run, make_plan, tmp_path):
    plan = make_plan(candidates(make_run, CHOICES["highest mean on validation"][0]), selection="reported")
    comparison = summarise(plan, tmp_path)
    assert comparison.choices[0].selected == 0
    assert comparison.choices[0].candidates[0].summary.mean == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("scores", "note"),
    [
        ([[(0.1, 0.1)], [(0.2, 0.2)]], ""),
        ([[(0.1, 0.1)], [LOST]], ""),  # all have ended
        ([[(0.1, 0.1)], [(0.2, 0.2)], ["unfinished"], ["unfinished"]], "chosen among 2 of 4 settings so far"),
        ([["unfinished"], ["unfinished"]], "not chosen yet: no run has finished"),
        ([["unfinished"]], ""),  # nothing to choose
    ],
)
def test_an_unfinished_choice_says_so(make_run, make_plan, tmp_path, scores, note):
    comparison = summarise(make_plan(candidates(make_run, scores), selection="validation"), tmp_path)
    assert comparison.choices[0].note == note


# --- reported figures, ceiling ----------------------------------------------------------------------------------------


def test_reported_figures_of_the_paper(make_run, compare, sraven_task):
    runs = [make_run("hyla", seed, {"held_out": 0.5 + 0.01 * seed, "train": 0.6}) for seed in range(3)]
    comparison = compare(runs)
    row = comparison.row("hyla", "held_out")
    (figure,) = row.reported
    assert (figure.source, figure.steps, figure.caveat) == ("P1", 50_000, "")
    assert (figure.mean, figure.spread) == pytest.approx((0.8113, 0.0777))
    assert row.verdicts == ("below",)
    assert comparison.row("hyla", "train").reported == ()
    sraven = compare([make_run("hyla", 3, {"held_out": 0.1}, task=sraven_task)]).row("hyla", "held_out")
    (figure,) = sraven.reported
    assert (figure.mean, figure.spread, figure.steps) == (pytest.approx(0.6913), pytest.approx(0.019), 156_250)
    assert sraven.verdicts == ("too few seeds",)


def test_a_variant_without_a_reported_name_has_no_figure(make_run, make_plan, tmp_path):
    plan = make_plan({"hyla": [make_run("hyla", 0, {"held_out": 0.5})]})
    for name, count in ((None, 0), ("hyla", 1)):
        changed = replace(plan, variants=(replace(plan.variants[0], reported=name),))
        assert len(summarise(changed, tmp_path).row("hyla", "held_out").reported) == count
    wrong = replace(plan, variants=(replace(plan.variants[0], reported="hylla"),))
    with pytest.raises(
        RunError, match=r"plan.json, key variants\['hyla'\].reported: reported.toml has nothing on 'hylla'"
    ):
        summarise(wrong, tmp_path)


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
    sections = {"task": logic_task, "model": model_sizes}
    assert reported_figures("hyla", sections["task"], sections["model"], "held_out", "r2", (600, 600))
    sections[section][key] = value
    assert reported_figures("hyla", sections["task"], sections["model"], "held_out", "r2", (600, 600)) == ()


@pytest.mark.parametrize(("steps", "sources"), [(3_000, ["P1", "public code"]), (2_999, ["P1"]), (50_000, ["P1"])])
def test_public_code_is_shown_at_its_own_steps_only(make_run, compare, steps, sources):
    comparison = compare([make_run("softmax", 0, {"held_out": 0.5, "train": 0.6}, steps=steps)])
    figures = comparison.row("softmax", "held_out").reported
    assert [figure.source for figure in figures] == sources
    if len(figures) == 2:
        assert (figures[1].mean, figures[1].spread, figures[1].spread_kind) == (0.532, 0.040, "standard error")
        (train,) = comparison.row("softmax", "train").reported
        assert (train.mean, train.spread) == (0.706, None)


def test_ceiling(make_run, compare, sraven_task):
    runs = [
        make_run("hyla", seed, {"held_out": 0.6}, task=sraven_task, ceiling={"held_out": value})
        for seed, value in enumerate([0.84, 0.86])
    ]
    comparison = compare(runs)
    assert comparison.row("hyla", "held_out").ceiling == comparison.ceiling("held_out") == pytest.approx(0.85)


# --- damage -----------------------------------------------------------------------------------------------------------


def edited(path, **changes):
    write_json(path, json.loads(path.read_text()) | changes)


DAMAGE = {
    "no config": (lambda run: (run.path / "config.json").unlink(), r"hyla-seed0/config\.json does not exist"),
    "config cut": (lambda run: (run.path / "config.json").write_text("{"), r"hyla-seed0/config\.json, line 1"),
    "no section": (lambda run: edited(run.path / "config.json", model=None), r"config\.json .*lacks model"),
    "other seed": (
        lambda run: edited(run.path / "config.json", seed=7),
        r"config\.json has seed 7, where .*plan\.json",
    ),
    "result cut": (lambda run: (run.path / "result.json").write_text("{"), r"hyla-seed0/result\.json, line 1"),
    "state": (lambda run: edited(run.path / "result.json", state="lost"), r"result\.json: state 'lost'"),
    "metric": (
        lambda run: edited(run.path / "result.json", headline="accuracy"),
        r"result\.json has the metric 'accuracy'",
    ),
    "splits": (lambda run: edited(run.path / "result.json", splits={"train": 1}), r"result\.json: splits must hold"),
    "step": (lambda run: edited(run.path / "result.json", step="many"), r"result\.json .*step 'many'"),
    "ceiling": (lambda run: edited(run.path / "result.json", ceiling=[1]), r"result\.json .*ceiling \[1\]"),
    "metrics": (lambda run: run.metrics.path.write_text("x\n{}\n"), r"metrics\.jsonl, line 1"),
    "evaluation": (lambda run: run.metrics.append({"step": 1, "splits": [1]}), r"metrics\.jsonl: splits must hold"),
    "errors": (lambda run: write_json(run.path.parent.parent / "errors.json", ["x"]), r"errors\.json must hold"),
    "errors cut": (lambda run: (run.path.parent.parent / "errors.json").write_text("["), r"errors\.json, line 1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named(make_run, make_plan, tmp_path, name):
    run = make_run("hyla", 0, {"held_out": 0.5}, curve=[(600, {"held_out": 0.5})])
    plan = make_plan({"hyla": [run]})
    damage, message = DAMAGE[name]
    damage(run)
    with pytest.raises(RunError, match=message):
        summarise(plan, tmp_path)


def test_one_run_cannot_have_two_seeds(make_run, make_plan, tmp_path):
    plan = make_plan({"hyla": [make_run("hyla", 0, {"held_out": 0.5})]})
    (variant,) = plan.variants
    twice = replace(variant.candidates[0], runs={0: "hyla-seed0", 1: "hyla-seed0"})
    with pytest.raises(RunError, match="names hyla-seed0 for seeds 0 and 1"):
        summarise(replace(plan, variants=(replace(variant, candidates=(twice,)),)), tmp_path)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_mean_curve(make_run, compare):
    runs = [
        make_run("hyla", 0, {"a": 0.5}, curve=[(100, {"a": 0.1}), (200, {"a": 0.3}), (300, {"a": 0.5})]),
        make_run("hyla", 1, {"a": 0.5}, curve=[(100, {"a": 0.2}), (200, {"a": None}), (300, {"a": 0.7})]),
        make_run("hyla", 2, state="diverged", curve=[(100, {"a": -9.0})]),
    ]
    curve = mean_curve(compare(runs), "hyla", "a")
    assert (curve.steps, curve.num_runs) == ((100, 300), 2)
    assert curve.mean == pytest.approx((0.15, 0.6))
    assert (curve.low, curve.high) == ((0.1, 0.5), (0.2, 0.7))
    assert mean_curve(compare(runs[2:]), "hyla", "a").steps == ()
