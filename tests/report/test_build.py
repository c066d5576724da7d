"""`hyla report`: everything rebuilt from run folders, in a process of its own, without torch."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest

from hyla import cli
from hyla.errors import RunError
from hyla.report.build import write_report
from hyla.report.plan import write_plan
from hyla.report.published import results_page

KINDS = [f"figures/{stem}.{kind}" for stem in ("scores", "curves") for kind in ("png", "svg", "pdf")]
FILES = ["comparison.json", "index.html", *KINDS, *(f"tables/{name}" for name in ("scores.md", "scores.tex"))]
FILES = sorted([*FILES, "tables/scores.csv", "tables/runs.csv"])


@pytest.fixture
def experiment(make_run, make_plan, tmp_path):
    """Three seeds of softmax; of hyla one finished, one diverged and one that was never made."""
    curve = [(300, {"held_out": 0.1, "train": 0.2}), (600, {"held_out": 0.5, "train": 0.6})]
    plain = [make_run("softmax", s, {"held_out": 0.5 + 0.1 * s, "train": 0.6}, curve=curve) for s in range(3)]
    others = [make_run("hyla", 0, {"held_out": 0.9, "train": 0.9}, curve=curve), make_run("hyla", 1, state="diverged")]
    others.append(make_run("hyla", 2, state="unfinished"))
    write_plan(tmp_path, make_plan({"softmax": plain, "hyla": others}))
    shutil.rmtree(others[2].path)
    return tmp_path


def everything(folder):
    made = (path for path in folder.rglob("*") if path.is_file() and "runs" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in made}


def test_everything_is_rebuilt_without_torch(experiment):
    plan = (experiment / "plan.json").read_bytes()
    code = "import sys; from hyla.cli import main; status = main(['report', sys.argv[1]])"
    code += "; print(status, 'torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, str(experiment)], capture_output=True, text=True)
    assert done.stderr.split() == ["0", "False"], done.stderr
    found = everything(experiment)
    assert sorted(found) == sorted([*FILES, "plan.json"])
    assert (experiment / "plan.json").read_bytes() == plan
    for name in FILES:
        assert name in done.stdout.replace("\n", "")
        assert found[name].stat().st_size > 100
    words = " ".join(done.stdout.split())
    assert "softmax 0.600 ± 0.100 0.352 to 0.848 3 0.633 ± 0.023" in words
    assert "1 of 3" in words


def test_the_files_agree(experiment):
    write_report(experiment)
    data = json.loads((experiment / "comparison.json").read_text())
    with open(experiment / "tables" / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == [row["summary"]["mean"] for row in data["rows"]]
    text = (experiment / "tables" / "scores.md").read_text()
    page = (experiment / "index.html").read_text()
    for part in ("0.600 ± 0.100", "0.352 to 0.848", "1 of 3 (1 diverged, 1 not started)"):
        assert part in text
        assert part in page
    links = re.findall(r'href="([^"#]+)"', re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    assert {*FILES} - {"index.html"} <= set(links)
    assert all((experiment / unquote(link)).is_file() for link in links)


def test_the_same_runs_give_the_same_report(experiment):
    first = {name: path.read_bytes() for name, path in everything(write_report(experiment) and experiment).items()}
    write_report(experiment)
    assert {name: path.read_bytes() for name, path in everything(experiment).items()} == first


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "plan.json").unlink(), r"plan\.json does not exist"),
        (lambda folder: (folder / "plan.json").write_text("{}"), r"plan\.json, key axes: is missing"),
        (
            lambda folder: (folder / "runs/softmax-seed1/result.json").write_text("{"),
            r"softmax-seed1/result\.json, line 1",
        ),
    ],
)
def test_damage_is_named_before_anything_is_written(experiment, damage, message, capsys):
    damage(experiment)
    before = set(everything(experiment))
    with pytest.raises(RunError, match=message):
        write_report(experiment)
    assert cli.main(["report", str(experiment)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert set(everything(experiment)) == before


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("argv", [[], ["x", "--pag", "y"]])
def test_wrong_words_are_refused(argv, capsys):
    try:
        status = cli.main(["report", *argv])
    except SystemExit as error:
        status = error.code
    assert status == 2


# --- the page about several experiments -------------------------------------------------------------------------------


def test_results_page(experiment, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(experiment / "runs", other / "runs")
    plan = json.loads((experiment / "plan.json").read_text())
    for variant in plan["variants"]:
        for candidate in variant["candidates"]:
            candidate["runs"] = {"0": candidate["runs"]["0"]}
    (other / "plan.json").write_text(json.dumps(plan | {"name": "one-seed", "budget": "paper", "title": "One <seed>"}))
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    assert cli.main(["report", str(experiment), str(other), "--page", str(page)]) == 0
    assert (other / "index.html").exists()
    text = page.read_text()
    for part in (
        "| [logic: softmax, hyla](#compare-logic) | quick | 600 steps | 6 | 4 |",
        "| [One &lt;seed>](#one-seed) | paper | 600 steps | 2 | 2 |",
        "**quick budget.** 600 steps show that &lt;everything> works",
        "NOT FINISHED: 2 of 6 runs have no score (1 diverged, 1 not started).",
        "Finished: all 2 runs.",
        "| softmax | 0.600 ± 0.100 | 0.352 to 0.848 | 3 | – | 0.633 ± 0.023 | covers |",
        "P1 trained for 50,000 steps, these runs for 600 steps",
        "torch: 2.13.0; backend: eager",
        "| hyla-seed2 | hyla | 2 | not started | 0 | – |",
    ):
        assert part in text, part
    for anchor in re.findall(r"\]\(#([\w-]+)\)", text):
        assert f'<a id="{anchor}"></a>' in text
    links = re.findall(r"\]\(([^#)]+)\)", text)
    assert len(links) > 10
    for link in links:
        assert (page.parent / unquote(link)).exists(), link


def test_results_page_without_any_result(make_run, make_plan, tmp_path):
    write_plan(tmp_path, make_plan({"hyla": [make_run("hyla", 0, state="unfinished")]}))
    text = results_page([tmp_path], tmp_path)
    assert "NOT FINISHED: 1 of 1 runs have no score (1 not started). No result at all for: hyla." in text


def test_the_page_needs_a_folder(experiment, capsys):
    assert cli.main(["report", str(experiment), "--page", str(experiment / "no" / "page.md")]) == 2
    assert "page = " in capsys.readouterr().err
    assert not (experiment / "index.html").exists()
