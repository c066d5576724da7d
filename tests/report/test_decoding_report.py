import csv
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, rankdata, spearmanr

from hyla.errors import RunError
from hyla.report import decodability
from hyla.report.build import write_report
from hyla.report.comparison import summarise
from hyla.report.plan import write_plan
from hyla.report.published import results_page
from hyla.runs import write_json

SCORES = {"narrow": (0.5, 0.55, 0.45), "wide": (0.9, 0.95, 0.92)}
PROBES = {"narrow": (0.4, 0.5, 0.3), "wide": (0.8, 0.9, None)}


def lines(value):
    """The rows of one run: two layers and the encoding, on both splits."""
    values = {0: 0.99, 1: value, 2: None if value is None else value / 2}
    row = {"low": 0.1, "high": 0.9, "chance": -0.01, "control": -0.1, "undefined": 0, "targets": 16, "tasks": 64}
    return [
        {"layer": "encoding" if depth == 0 else f"hidden.{depth - 1}", "depth": depth, "target": target, "split": split}
        | {"r2": value}
        | row
        for depth, value in values.items()
        for target in ("task", "weights")
        for split in ("train", "held_out")
    ]


@pytest.fixture
def folder(tmp_path, make_run, make_plan):
    runs, rows = {}, {}
    for name, scores in SCORES.items():
        runs[name] = []
        for seed, score in enumerate(scores):
            curve = [(100, {"held_out": score / 2, "train": score}), (600, {"held_out": score, "train": score})]
            run = make_run(
                "mlp", seed, {"held_out": score, "train": 0.99}, curve=curve, name=f"{name}-{seed}", model={}
            )
            runs[name].append(run)
            rows[run.name] = lines(PROBES[name][seed])
    plan = make_plan(runs, figures=("scores", "curves", "decodability"))
    write_plan(tmp_path, plan)
    write_json(tmp_path / "decodability.json", {"format": 1, "rows": rows})
    return tmp_path, plan


def test_layers_pair_every_probe_with_the_score_of_its_run(folder):
    path, plan = folder
    found = decodability.layers(summarise(plan, path), decodability.read_decodability(path, plan))
    assert [(layer.name, layer.target) for layer in found] == [
        (name, target) for target in ("task", "weights") for name in ("the encoding", "layer 1", "layer 2")
    ]
    first = found[1]
    assert first.pairs == [
        (0.5, 0.4),
        (0.55, 0.5),
        (0.45, 0.3),
        (0.9, 0.8),
        (0.95, 0.9),
    ]  # an undefined one is left out
    r, ranks = decodability.correlation(first.pairs)
    assert r == pytest.approx(pearsonr(*zip(*first.pairs, strict=True))[0])
    assert ranks == pytest.approx(spearmanr(*zip(*first.pairs, strict=True))[0])
    assert decodability.correlation_text(first) == f"r = {r:.2f}, ranks 1.00 (5 runs)"
    assert decodability.correlation_text(found[0]) == "no correlation (6 runs)"  # one side is constant


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=3, max_size=12))
def test_ranks_are_those_of_scipy(values):
    assert decodability.ranks(values) == (rankdata(values) - 1).tolist()


def test_tables_pages_and_figures_have_it(folder):
    path, _ = folder
    report = write_report(path)
    names = {file.relative_to(path).as_posix() for file in report.files}
    assert {f"figures/decodability.{kind}" for kind in ("png", "svg", "pdf")} <= names
    for text in ((path / "tables/scores.md").read_text(), results_page([path], path)):
        assert "Decodability of the task latent on held-out combinations" in text
        assert "| narrow | 0.990 ± 0.000 | 0.400 ± 0.100 |" in text
        assert "correlation with the score, over runs" in text
    page = (path / "index.html").read_text()
    assert "<h2>Decodability</h2>" in page
    assert "0.850 ± 0.071" in page
    svg = (path / "figures/decodability.svg").read_text()
    assert svg.count("<!-- layer 1: r = ") == 2


def test_without_a_file_nothing_is_said_of_it(folder):
    path, _ = folder
    (path / "decodability.json").unlink()
    report = write_report(path)
    assert not [file for file in report.files if "decodability" in file.name]
    assert "Decodability" not in (path / "index.html").read_text()


@pytest.mark.parametrize("damage", ["[]", '{"rows": {"a": [{"layer": 1}]}}', '{"rows": 3}', "{"])
def test_a_damaged_file_is_named(folder, damage):
    path, _ = folder
    (path / "decodability.json").write_text(damage)
    with pytest.raises(RunError, match=r"decodability\.json"):
        write_report(path)


def test_single_runs_layer_by_layer(tmp_path):
    rows = {"one": lines(0.7), "two": lines(0.3)}
    table = list(csv.DictReader(decodability.layers_csv(rows).splitlines()))
    assert len(table) == 24
    assert table[0] == {"run": "one"} | {key: str(value) for key, value in rows["one"][0].items()}
    png, svg = decodability.draw_layers(rows, tmp_path / "figure")
    assert png.stat().st_size > 10_000
    text = svg.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("one", "two", "encoding", "hidden layer"))
    json.dumps(rows)
