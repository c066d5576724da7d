"""plan.json: written and read back, and every mistake in it named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.errors import RunError
from hyla.report import plan as plans
from hyla.report.plan import Candidate, Plan, Variant, read_plan, write_plan
from hyla.runs import write_json

SETTINGS = {"optimizer.lr": 0.001, "optimizer.weight_decay": 0.1}
PLAN = Plan(
    name="logic-sweep",
    title="Fuzzy logic: <three> mechanisms",
    task="logic",
    budget="quick",
    budget_note="900 of 50,000 steps.",
    command="hyla reproduce logic-sweep --budget quick",
    metric="r2",
    baseline="softmax",
    selection="validation",
    reported_split="held_out",
    axes=("num_points",),
    figures=("scores", "scaling"),
    variants=(
        Variant("softmax", "softmax", {"num_points": 32}, "softmax", (Candidate(SETTINGS, {0: "a", 1: "b"}),)),
        Variant("hyla, 16", "hyla", {"num_points": 16}, None, (Candidate({}, {0: "c"}), Candidate(SETTINGS, {0: "d"}))),
    ),
)


def test_round_trip(tmp_path):
    path = write_plan(tmp_path / "new", PLAN)
    assert path == tmp_path / "new" / "plan.json"
    assert read_plan(tmp_path / "new") == PLAN
    data = json.loads(path.read_text())
    assert (data["format"], data["variants"][0]["candidates"][0]["runs"]) == (1, {"0": "a", "1": "b"})
    assert (PLAN.runs, PLAN.variants[1].runs) == (("a", "b", "c", "d"), ("c", "d"))


words = st.text(st.characters(exclude_characters="/\\", exclude_categories=["Cs"]), min_size=1).filter(
    lambda word: word not in (".", "..")
)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=3, unique=True), st.dictionaries(words, numbers | words), st.data())
def test_any_plan_round_trips(names, settings, data):
    runs = st.dictionaries(st.integers(0, 2**40), words, min_size=1, max_size=3)
    variants = tuple(Variant(name, name, {}, name, (Candidate(settings, data.draw(runs)),)) for name in names)
    plan = Plan(*names[:1] * 7, None, "none", names[0], (), (), variants)
    assert plans.from_json(json.loads(json.dumps(plans.to_json(plan)))) == plan


WRONG = {
    "budgte": (("budgte",), 1, "key budgte: is not known"),
    "format": (("format",), 2, "key format: 2 is not 1"),
    "wrong title": (("title",), 3, "key title: must be text, not '3'"),
    "axes": (("axes",), "num_points", "key axes: must be a list"),
    "selection": (("selection",), "best", "key selection: 'best' is none of validation, reported, none"),
    "selection kind": (("selection",), [], r"key selection: \[\] is none of"),
    "one candidate": (("selection",), "none", r"key variants\['hyla, 16'\].candidates: 2, but selection is 'none'"),
    "figures": (("figures",), ["pie"], "key figures: 'pie' is none of scores, curves"),
    "heat map": (("figures",), ["heat_map"], "key figures: 'heat_map' needs 2 axes, not 1"),
    "baseline": (("baseline",), "linear", "key baseline: there is no variant 'linear'"),
    "no variant": (("variants",), [], "key variants: at least one"),
    "twice": (("variants", 1, "name"), "softmax", "key variants: two are called 'softmax'"),
    "variant": (("variants", 0), 7, r"key variants\[0\]: must be an object, not '7'"),
    "axis": (("variants", 0, "axes"), {"width": 2}, r"key variants\['softmax'\].axes: has \['width'\]"),
    "axis value": (("variants", 0, "axes"), {"num_points": [1]}, r"variants\[0\].axes.num_points: must be text"),
    "mechanism": (("variants", 1, "mechanism"), None, r"key variants\[1\].mechanism: must be text"),
    "no candidates": (("variants", 0, "candidates"), [], r"key variants\['softmax'\].candidates: at least one"),
    "no runs": (("variants", 0, "candidates", 0, "runs"), {}, r"candidates: one has no runs"),
    "seed": (("variants", 0, "candidates", 0, "runs"), {"-1": "a"}, r"candidates\[0\].runs: '-1' is no seed"),
    "escape": (("variants", 0, "candidates", 0, "runs", "0"), "../../etc", r"runs: '../../etc' is no folder"),
    "run": (("variants", 0, "candidates", 0, "runs", "0"), 5, r"candidates\[0\].runs.0: must be text"),
    "setting": (("variants", 0, "candidates", 0, "extra"), 5, r"candidates\[0\].extra: is not known"),
}


@pytest.mark.parametrize("place", WRONG)
def test_a_mistake_is_named(tmp_path, place):
    path, value, message = WRONG[place]
    data = json.loads(json.dumps(plans.to_json(PLAN)))
    spot = data
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = value
    write_json(tmp_path / "plan.json", data)
    with pytest.raises(RunError, match=rf"plan\.json, .*{message}"):
        read_plan(tmp_path)


@pytest.mark.parametrize("key", plans.to_json(PLAN))
def test_a_missing_key_is_named(tmp_path, key):
    data = plans.to_json(PLAN)
    del data[key]
    write_json(tmp_path / "plan.json", data)
    with pytest.raises(RunError, match=rf"plan\.json, key {key}: is missing"):
        read_plan(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "null", "3"])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RunError, match=r"plan\.json"):
        read_plan(tmp_path)


def test_no_plan(tmp_path):
    with pytest.raises(RunError, match=r"plan\.json does not exist"):
        read_plan(tmp_path)
