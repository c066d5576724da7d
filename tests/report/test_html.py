"""The page: whole in itself, escaped, and holding what it should."""

from __future__ import annotations

import json
import re
from urllib.parse import quote, unquote

import pytest
from page_parser import Page

from hyla.report import html, tables
from hyla.report.comparison import summarise

EVIL = '<script>alert("x")</script>'


@pytest.fixture
def comparison(make_run, compare):
    curve = [(300, {"held_out": -4e4, "train": 0.1}), (600, {"held_out": 0.5, "train": None})]
    runs = [make_run("softmax", seed, {"held_out": 0.5 + 0.1 * seed, "train": 0.6}, curve=curve) for seed in range(3)]
    runs += [make_run(EVIL, 0, {"held_out": 0.2, "train": 0.3}, curve=curve, name="<b>&run #1")]
    runs += [make_run("hyla", 0, state="diverged", steps=300, curve=curve[:1])]
    runs += [make_run("hyla", 1, state="unfinished", curve=curve[:1])]
    return compare(runs)


def data_of(text):
    return json.loads(re.search(r'id="curves-data">(.*?)</script>', text)[1])


def test_page_is_one_file_that_loads_nothing(comparison, tmp_path):
    path = html.write_page(comparison, tmp_path / "index.html", ["tables/scores.md"])
    text = path.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    page = Page(text.replace(text[text.index("<script>/**") : text.index("</script>")], "<script>"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "base")
        assert "src" not in attributes
        if "href" in attributes:
            assert tag == "a"
    assert "default-src 'none'" in text
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 3
    assert "tables/scores.md" in page.links


def test_every_link_leads_somewhere(comparison, tmp_path):
    page = Page(html.page(comparison, ""))
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (tmp_path / unquote(link)).is_file(), link
    # each score of each run, on each split, links to the config of its run
    for run in comparison.runs:
        config = quote(f"{run.path}/config.json")
        scored = [value for value in run.scores.values() if value is not None]
        assert page.links.count(config) == 3 * len(scored) + 1  # drawing, every statistic, runs; and the file itself


def test_names_are_escaped(comparison):
    text = html.page(comparison, "")
    assert EVIL not in text
    assert "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    page = Page(text)
    assert EVIL in page.words  # shown as it is
    assert "runs/%3Cb%3E%26run%20%231/config.json" in page.links
    names = [variant["name"] for variant in data_of(text)["splits"][0]["variants"]]
    assert names[1] == "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;"


def test_page_says_what_matters(comparison):
    words = " ".join(" ".join(Page(html.page(comparison, "")).words).split())
    for part in (
        comparison.plan.budget_note,
        "quick budget, 600 steps",
        "2 of 6 runs have no score: 1 diverged, 1 unfinished.",
        "6 (4 finished, 1 diverged, 1 unfinished)",
        "0.600 ± 0.100",
        "0.352 to 0.848",  # 0.6 and 4.303 * 0.1 / sqrt(3) to either side
        "0.500 to 0.700",  # bootstrap
        "0 of 2 (1 diverged, 1 unfinished)",
        "diverged: loss nan",
        "0.633 ± 0.023 ours covers it",
        "Student's t",
        "about 75% of cases instead of 95%",
        "hyla compare logic --budget quick",
        "2.13.0",
        "151,265",
        "held_out_fraction",
        "−0.300 too few seeds",
    ):
        assert part in words, part


def test_what_must_be_known_comes_before_the_first_number(comparison, compare):
    text = html.page(comparison, "")
    assert text.index("2 of 6 runs have no score") < text.index("<h2>Scores")
    assert text.index("quick budget, 600 steps") < text.index("<h2>Scores")


def test_a_choice_by_the_reported_split_is_a_warning(make_run, make_plan, tmp_path):
    grid = [[make_run("hyla", 0, {"held_out": lr}, name=f"lr{lr}", lr=lr)] for lr in (0.1, 0.2)]
    text = html.page(summarise(make_plan({"hyla": grid}, selection="reported"), tmp_path), "")
    warning = text.index(f'<p class="note">Settings (optimizer.lr) of each row were {tables.OPTIMISTIC}.</p>')
    assert warning < text.index("<h2>Scores")
    words = " ".join(Page(text).words)
    assert "What was chosen" in words
    assert "Runs of settings that are not shown above: 1" in words


def test_curve_data(comparison):
    data = data_of(html.page(comparison, ""))
    held_out = data["splits"][0]
    assert (data["last"], held_out["title"]) == (600, "held-out combinations")
    assert "cut at" in held_out["axis"]
    softmax, _, hyla = held_out["variants"]
    assert (softmax["x"], softmax["runs"], softmax["band"]) == ([300, 600], 3, True)
    assert (hyla["x"], hyla["seeds"][0]["name"], hyla["seeds"][0]["x"]) == ([], "seed 0, diverged", [300])
    assert (softmax["series"], hyla["series"], hyla["group"]) == (0, 2, 0)
    assert softmax["reported"][0]["text"] == "P1: 0.633 ± 0.023<br>50,000 steps"
    assert data["splits"][1]["variants"][0]["x"] == [300]  # the null score at 600 is left out


def test_accuracy_is_in_percent(make_run, compare, sraven_task):
    curve = [(600, {"held_out": 0.5, "train": 0.6})]
    ceiling = {"held_out": 0.85, "train": 0.86}
    run = make_run("hyla", 0, {"held_out": 0.5, "train": 0.6}, task=sraven_task, curve=curve, ceiling=ceiling)
    text = html.page(compare([run]), "")
    split = data_of(text)["splits"][0]
    assert (split["ceiling"], split["ceiling_in_view"], split["variants"][0]["y"]) == (85, True, [50])
    words = " ".join(Page(text).words)
    assert "accuracy (%), ceiling 85.0" in words
    assert "69.1 ± 1.9" in words


def test_axes_have_heat_maps_and_lines(make_run, make_plan, tmp_path):
    variants, axes = {}, {}
    for points in (16, 32):
        for fraction in (0.3, 0.7):
            name = f"hyla {points} {fraction}"
            axes[name] = {"points": points, "fraction": fraction}
            state = "unfinished" if name == "hyla 32 0.7" else "finished"
            variants[name] = [make_run("hyla", 0, {"held_out": points * fraction / 100}, state=state, name=name)]
    plan = make_plan(variants, axes=axes, baseline=None, figures=("scores", "curves", "heat_map", "scaling"))
    text = html.page(summarise(plan, tmp_path), "")
    Page(text)  # elements nest
    assert text.count('<td class="empty"') == 1
    assert re.search(r'title="hyla 16 0.7: 0.112 ± –, seeds 1"><a class="run" href="#run-\d">0.112</a>', text)
    data = data_of(text)
    assert [panel["axis"] for panel in data["lines"]] == ["points", "fraction"]
    drawn = [(line["x"], line["y"]) for line in data["lines"][0]["lines"]]
    assert drawn == [([16, 32], [0.048, 0.096]), ([16], [0.112])]


def test_nothing_finished(make_run, compare):
    text = html.page(compare([make_run("hyla", 0, state="unfinished")]), "")
    words = " ".join(Page(text).words)
    assert "no run finished" in words
    assert "No evaluation has been logged yet" in words
    assert data_of(text)["splits"] == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.2, "0 s"), (59.7, "1 min 00 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 05 min")],
)
def test_duration(seconds, text):
    assert html.duration(seconds) == text
