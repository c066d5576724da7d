"""The page of latent codes: whole in itself, escaped, holding the numbers given, and working in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from typing import Any

import latent_analyses
import page_parser
import pytest

from hyla.errors import MissingExtraError, RunError
from hyla.report import latents, latents_page

EVIL = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">%{x}&amp;"


class Page(page_parser.Page):
    void = frozenset({"meta", "br", "img", "line", "rect"})

    def titles(self):
        return [attributes["title"] for tag, attributes in self.tags if tag == "td" and "title" in attributes]


@pytest.fixture
def sraven() -> dict[str, Any]:
    return latent_analyses.sraven()


@pytest.fixture
def logic() -> dict[str, Any]:
    return latent_analyses.logic()


def data_of(text):
    return json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.DOTALL)[1])


def words_of(text):
    return " ".join(" ".join(Page(text).words).split())


def poison(analysis):
    """Every text of the analysis that is for people becomes hostile."""
    analysis |= {"title": EVIL, "command": EVIL, "notes": [EVIL]}
    for model in analysis["models"]:
        model |= {"name": EVIL, "mechanism": EVIL, "pairs": EVIL, "keys": [EVIL] * len(model["keys"]), "label": EVIL}
        model["run"] = "javascript:alert(1)//" + EVIL
        model["splits"] = {EVIL: {"count": 1, "tasks": 1, "accuracy": None}}
        model["classes"] = [f"{EVIL}{i}" for i in range(len(model["classes"]))]
        number = len(model["points"]["class"])
        model["points"] |= {"split": [EVIL] * number, "task": [EVIL] * number, "text": [EVIL] * number}
        for layer in model["layers"]:
            layer |= {"title": EVIL}
            layer["mean_codes"]["split"] = layer["projection"]["method"] = EVIL
            for score in [*layer["probes"], *layer["few_shot"]]:
                score["note"] = EVIL
            for score in layer["probes"]:
                score |= {"probe": EVIL, "target": EVIL, "metric": EVIL}
            for one in layer["per_class"]:
                one["class"] = model["classes"][0]
            for one in layer["structure"]:
                one["split"] = EVIL
            if layer["causal"]:
                layer["causal"] |= {"effect_unit": EVIL, "split": EVIL}
    return analysis


def test_page_is_one_file_that_loads_nothing(sraven, tmp_path):
    path = latents_page.write_latents_page(tmp_path / "new", sraven)
    assert path == tmp_path / "new" / "index.html"
    text = path.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    page = Page(text.replace(text[text.index("<script>/**") : text.index("</script>")], "<script>"))
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "base")
        assert "src" not in attributes
        if "href" in attributes:
            assert (tag, attributes["href"]) == ("a", "../../config.json")
    assert "default-src 'none'" in text
    assert [tag for tag, _ in page.tags].count("script") == 3


def test_numbers_in_the_table_are_those_given(sraven):
    page = Page(latents_page.page(sraven, ""))
    table = next(table for table in page.tables if "95% interval" in table[0])
    given = [(model, at, layer, score) for model in sraven["models"]
             for at, layer in enumerate(model["layers"]) for score in layer["probes"]]  # fmt: skip
    assert len(table) == 1 + len(given)
    for cells, (model, _, layer, score) in zip(table[1:], given, strict=True):
        row = dict(zip(table[0], cells, strict=True))
        assert (row["model"], row["layer"]) == (f"{model['mechanism']}, seed 0", layer["title"])
        assert row["probe"] == score["probe"] + score["note"]
        assert (row["fitted on"], row["scored on"], row["metric"]) == ("train", score["test"], score["metric"])
        for name, key in (("score", "value"), ("chance", "chance"), ("shuffled labels", "control")):
            assert row[name] == f"{score[key]:.3f}"
        assert row["95% interval"] == f"{score['low']:.3f} to {score['high']:.3f}"
        assert (row["at most"], row["pairs"]) == (f"{score['control_high']:.3f}", "4,096")
    keys = [attributes["data-sort"] for tag, attributes in page.tags if tag == "td" and "data-sort" in attributes]
    assert {repr(score["value"]) for *_, score in given} <= set(keys)  # sorting is by the numbers, not by what is shown


def test_undefined_scores_are_dashes_and_sort_last(logic):
    page = Page(latents_page.page(logic, ""))
    head, *rows = next(table for table in page.tables if "95% interval" in table[0])
    scores = [row[head.index("score")] for row in rows]
    assert scores == ["0.080", "−300,000,000", "–", "0.910", "−300,000,000", "–"]
    assert [row[head.index("95% interval")] for row in rows].count("–") == 4
    keys = [attributes["data-sort"] for tag, attributes in page.tags if tag == "td" and "data-sort" in attributes]
    assert keys.count("") >= scores.count("–")
    assert "2 of 8 targets constant, left out" in page.words


def test_headlines(sraven, logic):
    for analysis in (sraven, logic):
        words = words_of(latents_page.page(analysis, ""))
        for model in analysis["models"]:
            assert latents.headline(model) in words


def test_heat_maps_hold_the_numbers(sraven):
    text = latents_page.page(sraven, "")
    page = Page(text)
    model = sraven["models"][0]
    layer = model["layers"][3]
    titles = page.titles()
    code = layer["mean_codes"]["values"][1][16 + 4]  # the second key's fifth head
    assert titles.count(f"progression +1, panel 8, head 5: {latents.format_value(code)}") >= 1
    cosine = latents.format_value(layer["cosines"][2][5])
    assert f"progression +2 and addition: {cosine}" in titles
    effect = latents.format_value(layer["causal"]["effect"][0][3])
    assert f"constant, replaced by progression -1, share of answers changed: {effect}" in titles
    assert "constant, replaced by its own mean, share of answers changed: 0.050" in titles
    causal = [table for table in page.tables if table[0][0] == "class ↓ replaced by →"]
    assert len(causal) == 2 * 4
    shown = [cells[1:] for cells in causal[3][1:]]
    assert shown == [
        ["–" if row[j] is None else f"{row[j]:.2f}" for j in range(8)] for row in layer["causal"]["effect"]
    ]


def test_cells_without_a_value_are_hatched(sraven):
    text = latents_page.page(sraven, "")
    per_layer = 48 + (8 + 7) + 8 + 1  # mean codes, cosines, causal check, F1
    assert len(re.findall(r'<td class="[^"]*\bnone\b', text)) == 2 * 4 * per_layer
    assert re.search(r"\.heat \.none \{[^}]*repeating-linear-gradient", text)


def test_causal_check_is_explained_with_its_control(sraven, logic):
    model = sraven["models"][0]
    words = words_of(latents_page.page(sraven, ""))
    assert latents_page.CONTROL in words
    for layer in model["layers"]:
        assert latents_page.causal_sentence(model, layer) in words
    layer = model["layers"][3]
    layer["causal"] |= {"same": 0.04, "other": 0.613, "other_low": 0.58, "other_high": 0.64, "follows": 0.5}
    assert latents_page.causal_sentence(model, layer) == (
        "Layer 4, share of answers changed: 0.040 with the mean code of the same rule (the control), 0.613 (95% interval "
        "0.580 to 0.640) with that of another, 2,048 pairs. The effect lies beyond the control. Answers that the other "
        "rule gives: 0.040 before, 0.500 after."
    )
    layer["causal"] |= {"same": 0.58, "follows": None}
    assert latents_page.causal_sentence(model, layer).endswith("2,048 pairs. No more than the control.")
    assert "Does the code decide" not in words_of(latents_page.page(logic, ""))


def test_side_by_side_bars_of_the_causal_check_share_a_scale(sraven):
    for model in sraven["models"]:
        for layer in model["layers"]:
            layer["causal"] |= {"same": 0.1, "other": 0.2, "other_low": 0.1, "other_high": 0.3}
    sraven["models"][1]["layers"][0]["causal"]["other"] = 0.4
    widths = re.findall(r'<rect x="112" y="22" width="([\d.]+)"', latents_page.page(sraven, ""))
    assert len(widths) == 8
    assert float(widths[4]) == pytest.approx(2 * float(widths[0]), abs=0.2)
    assert widths[0] == widths[5]


def test_scatter_data(sraven):
    data = data_of(latents_page.page(sraven, ""))
    source, model = sraven["models"][0], data["models"][0]
    points = source["points"]
    order = [i for i, s in enumerate(points["split"]) if s == "train"]
    order += [i for i, s in enumerate(points["split"]) if s == "held_out"]
    assert model["splits"] == ["trained combinations", "held-out combinations"]
    assert model["class"] == [points["class"][i] for i in order]
    assert model["correct"] == [points["correct"][i] for i in order]
    assert [data["texts"][i] for i in model["text"]] == [points["text"][i] for i in order]
    assert [data["texts"][i] for i in model["task"]] == [points["task"][i] for i in order]
    x = source["layers"][2]["projection"]["x"]
    assert model["layers"][2]["x"] == pytest.approx([x[i] for i in order], rel=1e-3)
    assert None not in model["layers"][3]["spots"]


def test_every_text_is_escaped(sraven, logic):
    for analysis in (poison(sraven), poison(logic)):
        text = latents_page.page(analysis, "")
        assert text.count("<script") == text.count("</script>") == 3
        page = Page(text)
        assert EVIL in page.words
        assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
        hrefs = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
        assert all(href.startswith("javascript%3A") for href in hrefs)
        data = data_of(text)
        assert data["models"][0]["classes"][0] == EVIL + "0"  # put into the page as text
        assert unescape(data["panels"][0]["series"][0]["name"]).startswith(f"{EVIL}, seed")  # put into labels of plotly
        assert "<" not in data["panels"][0]["title"]


def test_a_model_without_anything_but_points(logic):
    model = logic["models"][0]
    model |= {"layer_similarity": None, "splits": {}}
    for layer in model["layers"]:
        layer["probes"] = []
    words = words_of(latents_page.page(logic, ""))
    assert "no probe has a defined score" in words
    assert "All scores" not in words


def test_numbers_that_are_not_finite_are_undefined(sraven, tmp_path):
    layer = sraven["models"][0]["layers"][3]
    layer["probes"][0] |= {"value": float("nan"), "low": float("-inf")}
    layer["causal"]["effect"][0][1] = float("nan")
    text = latents_page.write_latents_page(tmp_path, sraven).read_text()
    assert "nan" not in Page(latents_page.page(latents.checked(sraven), "")).words
    assert data_of(text)["panels"][0]["series"][0]["x"] == pytest.approx([-0.08, 0.92, 1.92])


def test_what_cannot_be_shown_is_refused(sraven, tmp_path, hide_package):
    with pytest.raises(RunError, match="format 3"):
        latents_page.write_latents_page(tmp_path / "x", sraven | {"format": 3})
    hide_package("plotly")
    with pytest.raises(MissingExtraError, match=r"writing the HTML page needs plotly.*hyla\[report\]"):
        latents_page.write_latents_page(tmp_path / "x", sraven)
    assert not (tmp_path / "x").exists()


# --- in a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SCRIPT = """
<script>
(function () {
  const found = { errors: [] }, plot = document.getElementById("scatter-0"), card = document.getElementById("card-0");
  window.addEventListener("error", (event) => found.errors.push(event.message));
  const press = (selector, i) => document.querySelectorAll(selector)[i].click();
  const pressed = (selector) => [...document.querySelectorAll(selector)].map((b) => b.getAttribute("aria-pressed"));
  const state = () => ({ x: plot.data[0].x, colours: plot.data[0].marker.color, opacity: plot.data[0].marker.opacity,
    symbols: [...new Set(plot.data[0].marker.symbol)], numbers: plot.layout.annotations.length,
    chips: [...document.querySelectorAll("#chips-0 button")].map((chip) => chip.textContent),
    structure: document.getElementById("structure-0").textContent, layers: pressed("[data-layer]") });
  const column = () => [...document.querySelector(".sortable").tBodies[0].rows].map((row) => row.cells[7].textContent);
  const head = document.querySelectorAll(".sortable thead th")[7];
  found.first = state();
  press("[data-layer]", 0);
  found.layer = state();
  press("[data-colour]", 1);
  found.correct = state();
  press("[data-colour]", 2);
  found.split = state();
  press("[data-layer]", 3);
  press("[data-colour]", 0);
  press("#chips-0 button", 2);
  found.picked = state();
  press("#chips-0 button", 2);
  found.unpicked = state();
  found.hidden = card.hidden;
  plot.scrollIntoView();
  const area = plot.querySelector(".nsewdrag"), x = plot._fullLayout.xaxis, y = plot._fullLayout.yaxis;
  const frame = plot.getBoundingClientRect();
  area.dispatchEvent(new MouseEvent("mousemove", { bubbles: true,
    clientX: frame.left + x._offset + x.d2p(plot.data[0].x[5]),
    clientY: frame.top + y._offset + y.d2p(plot.data[0].y[5]) }));
  const style = getComputedStyle(card), box = card.getBoundingClientRect();
  found.card = { hidden: card.hidden, text: card.textContent, font: style.fontFamily, elements: card.children.length,
    inside: box.left >= 0 && box.right <= document.documentElement.clientWidth && box.top >= 0 };
  head.querySelector("button").click();
  found.falling = [head.getAttribute("aria-sort"), column()];
  head.querySelector("button").click();
  found.rising = [head.getAttribute("aria-sort"), column()];
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.plots = document.querySelectorAll(".js-plotly-plot .main-svg").length;
  found.title = document.title;
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
})();
</script>
"""


def browse(path):
    """What SCRIPT found in the page at `path`."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command += ["--window-size=390,800", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    text = path.read_text()
    path.write_text(text.replace("</body>", f"{SCRIPT}</body>"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; runs where chromium is installed")
def test_buttons_work_in_a_browser(sraven, tmp_path):
    sraven["models"][0]["layers"][0]["probes"][0]["value"] = None
    sraven["models"][0]["points"]["text"] = [EVIL + "\n  1 2 | 3 4"] * len(sraven["models"][0]["points"]["text"])
    source = data_of(latents_page.page(sraven, ""))
    model = source["models"][0]
    found = browse(latents_page.write_latents_page(tmp_path, sraven))
    assert (found["errors"], found["overflow"] <= 0, found["title"]) == ([], True, sraven["title"])
    assert found["plots"] >= 4  # two scatters, two plots of scores

    first = found["first"]
    assert first["layers"] == ["false", "false", "false", "true"]  # the best layer comes first
    assert first["x"] == model["layers"][3]["x"]
    assert first["colours"] == [latents.colour_of(i) for i in model["class"]]
    assert (first["symbols"], first["numbers"]) == (["circle", "triangle-up"], 8)
    assert first["chips"][0] == "1 constant (30)"

    layer = found["layer"]
    assert layer["layers"] == ["true", "false", "false", "false"]
    assert layer["x"] == model["layers"][0]["x"]
    assert layer["numbers"] < 8
    assert layer["structure"] == "\n".join(model["layers"][0]["structure"])

    right = sum(model["correct"])
    assert found["correct"]["chips"] == [f"wrong ({240 - right})", f"correct ({right})"]
    assert [colour == found["correct"]["colours"][0] for colour in found["correct"]["colours"]] == [
        one == model["correct"][0] for one in model["correct"]
    ]
    assert found["split"]["chips"] == ["trained combinations (160)", "held-out combinations (80)"]
    assert len(set(found["split"]["colours"])) == 2

    shown = [opacity > 0.5 for opacity in found["picked"]["opacity"]]
    assert shown == [number == 2 for number in model["class"]]
    assert all(opacity > 0.5 for opacity in found["unpicked"]["opacity"])

    card = found["card"]
    assert (found["hidden"], card["hidden"], card["elements"]) == (True, False, 0)
    assert card["inside"]
    assert "monospace" in card["font"]
    assert card["text"].endswith(EVIL + "\n  1 2 | 3 4")  # as text, with its line break and spaces
    assert f"{model['classes'][model['class'][5]]}, answered" in card["text"]

    numbers = [f"{score['value']:.3f}" if score["value"] is not None else "–"
               for one in sraven["models"] for layer in one["layers"] for score in layer["probes"]]  # fmt: skip
    defined = sorted((number for number in numbers if number != "–"), key=float)
    assert found["falling"] == ["descending", [*reversed(defined), "–"]]
    assert found["rising"] == ["ascending", [*defined, "–"]]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; runs where chromium is installed")
def test_hostile_texts_stay_texts_in_a_browser(sraven, tmp_path):
    sraven["models"] = sraven["models"][:1]
    found = browse(latents_page.write_latents_page(tmp_path, poison(sraven)))
    assert (found["errors"], found["title"]) == ([], EVIL)
    assert found["card"]["elements"] == 0
    assert found["first"]["chips"][0].startswith(f"1 {EVIL}0")
