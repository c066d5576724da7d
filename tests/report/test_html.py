"""The page: whole in itself, escaped, and holding what it should."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from hyla.report import html
from hyla.report.tables import summarise

NOTE = "600 steps show that <everything> works."
EVIL = '<script>alert("x")</script>'
VOID = {"meta", "circle", "line", "path", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Collects tags and attributes, and checks that elements nest."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


@pytest.fixture
def comparison(make_run):
    curve = [(300, {"held_out": -4e4, "train": 0.1}), (600, {"held_out": 0.5, "train": None})]
    runs = [make_run("softmax", seed, {"held_out": 0.5 + 0.1 * seed, "train": 0.6}, curve=curve) for seed in range(3)]
    runs += [make_run(EVIL, 0, {"held_out": 0.2, "train": 0.3}, curve=curve, name="<b>&run #1")]
    runs += [make_run("hyla", 0, state="diverged", steps=300, curve=curve[:1])]
    runs += [make_run("hyla", 1, state="unfinished")]
    return summarise(runs, task="logic", budget="quick", budget_note=NOTE)


def data_of(text):
    return json.loads(re.search(r'id="curves-data">(.*?)</script>', text)[1])


def test_page_is_one_file_that_loads_nothing(comparison, tmp_path):
    path = html.write_page(comparison, tmp_path / "comparison.html")
    text = path.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    page = Page(text.replace(text[text.index("<script>/**") : text.index("</script>")], "<script>"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "base")
        assert "src" not in attributes
        if "href" in attributes:
            assert tag == "a"
            assert re.fullmatch(r"runs/[^/:]+/config\.json", attributes["href"])
    assert "default-src 'none'" in text
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 3


def test_names_are_escaped(comparison):
    text = html.page(comparison, "")
    assert EVIL not in text
    assert "<b>" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    page = Page(text)
    assert EVIL in page.words  # shown as it is
    assert "runs/%3Cb%3E%26run%20%231/config.json" in [attributes.get("href") for _, attributes in page.tags]
    data = data_of(text)
    assert [m["name"] for m in data["splits"][0]["mechanisms"]][
        1
    ] == "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;"


def test_page_says_what_matters(comparison):
    words = " ".join(Page(html.page(comparison, "")).words)
    assert "logic: 3 mechanisms" not in words  # three are named
    for part in (
        NOTE,
        "quick budget, 600 steps",
        "0.600 ± 0.100",
        "0 of 2 (1 diverged, 1 unfinished)",
        "diverged: loss nan",
        "unfinished",
        "0.633 ± 0.023",
        "hyla compare logic --mechanisms",
        "2.13.0",
        "151,265",
        "held_out_fraction",
    ):
        assert part in words, part


def test_curve_data(comparison):
    data = data_of(html.page(comparison, ""))
    held_out = data["splits"][0]
    assert (data["last"], held_out["title"]) == (600, "held-out combinations")
    assert "cut at" in held_out["axis"]
    softmax, _, hyla = held_out["mechanisms"]
    assert (softmax["x"], softmax["runs"], softmax["band"]) == ([300, 600], 3, True)
    assert (hyla["x"], hyla["seeds"][0]["name"], hyla["seeds"][0]["x"]) == ([], "seed 0, diverged", [300])
    assert softmax["reported"][0]["text"] == "P1: 0.633 ± 0.023<br>50,000 steps"
    assert data["splits"][1]["mechanisms"][0]["x"] == [300]  # the null score at 600 is left out


def test_accuracy_is_in_percent(make_run, sraven_task):
    curve = [(600, {"held_out": 0.5, "train": 0.6})]
    ceiling = {"held_out": 0.85, "train": 0.86}
    run = make_run("hyla", 0, {"held_out": 0.5, "train": 0.6}, task=sraven_task, curve=curve, ceiling=ceiling)
    comparison = summarise([run], task="sraven", budget="quick", budget_note=NOTE)
    text = html.page(comparison, "")
    split = data_of(text)["splits"][0]
    assert (split["ceiling"], split["ceiling_in_view"], split["mechanisms"][0]["y"]) == (85, True, [50])
    words = " ".join(Page(text).words)
    assert "accuracy (%), ceiling 85.0" in words
    assert "69.1 ± 1.9" in words


def test_nothing_finished(make_run):
    comparison = summarise([make_run("hyla", 0, state="unfinished")], task="logic", budget="quick", budget_note="")
    assert "no run finished" in " ".join(Page(html.page(comparison, "")).words)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.2, "0 s"), (59.7, "1 min 00 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 05 min")],
)
def test_duration(seconds, text):
    assert html.duration(seconds) == text
