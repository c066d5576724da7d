"""The page in a real browser: sorting, links, curves. Skipped where there is no Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape

import pytest

from hyla.report import html
from hyla.report.comparison import summarise

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here; runs where one is on the PATH")

SCRIPT = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const found = {};
  const table = document.querySelector(".scores table");
  const heads = [...table.tHead.rows[0].cells];
  const place = (title) => heads.findIndex((head) => head.textContent.startsWith(title));
  const state = (title) => ({
    order: [...table.tBodies[0].rows].map((row) => row.cells[0].textContent),
    sorted: heads[place(title)].getAttribute("aria-sort"),
    marked: heads.filter((head) => head.hasAttribute("aria-sort")).length,
  });
  const press = (title) => {
    const button = heads[place(title)].querySelector("button");
    button.focus();
    found.focused = document.activeElement === button && button.tabIndex === 0;
    button.click();
    return state(title);
  };
  found.before = state("mean");
  found.mean = press("mean");
  found.again = press("mean");
  found.name = press("variant");
  found.traces = [...document.querySelectorAll(".plot:not([hidden])")].map((plot) => plot.data.length);
  document.querySelector("[data-series='0']").click();
  found.fewer = [...document.querySelectorAll(".plot:not([hidden])")].map((plot) => plot.data.length);
  const choice = document.getElementById("group");
  if (choice) {
    choice.value = "1";
    choice.dispatchEvent(new Event("change"));
    found.other = [...document.querySelectorAll("#plots .plot:not([hidden])")].map((plot) => plot.data[0].y);
  }
  found.lines = document.querySelectorAll("#lines .plot .main-svg").length;
  found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.broken = [...document.querySelectorAll("a[href^='#']")].filter((a) => !document.querySelector(a.hash)).length;
  document.body.setAttribute("data-found", JSON.stringify(found));
}, 500));
</script>
"""


def look(path, *flags):
    """What the page's script found, in a window of 1280 pixels."""
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom", *flags]
    if os.name == "posix" and os.geteuid() == 0:
        command.append("--no-sandbox")
    profile = f"--user-data-dir={path.parent / 'profile'}"
    done = subprocess.run([*command, profile, path.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def test_sorting_and_curves(make_run, compare, tmp_path):
    curve = [(300, {"held_out": 0.1, "train": 0.2}), (600, {"held_out": 0.5, "train": 0.6})]
    values = {"softmax": 0.9, "linear": -0.5, "hyla": 0.95, "hyla_plus": 0.1}
    runs = [make_run(name, 0, {"held_out": value, "train": value}, curve=curve) for name, value in values.items()]
    runs.append(make_run("hyla_linear", 0, state="diverged"))
    found = look(html.write_page(compare(runs), tmp_path / "index.html"))
    assert found["before"] == {"order": [*values, "hyla_linear"], "sorted": None, "marked": 0}
    down = ["hyla", "softmax", "hyla_plus", "linear"]
    assert found["mean"] == {"order": [*down, "hyla_linear"], "sorted": "descending", "marked": 1}
    # what has no value stays last
    assert found["again"] == {"order": [*down[::-1], "hyla_linear"], "sorted": "ascending", "marked": 1}
    assert found["name"] == {"order": sorted([*values, "hyla_linear"]), "sorted": "ascending", "marked": 1}
    assert found["focused"]
    assert all(fewer < traces for fewer, traces in zip(found["fewer"], found["traces"], strict=True))
    assert found["broken"] == 0
    assert found["wide"] <= 0  # tables scroll in their own frames


@pytest.mark.parametrize("width", [1280, 500])
def test_a_page_with_axes(make_run, make_plan, tmp_path, width):
    variants, axes = {}, {}
    for points in (16, 32):
        for mechanism in ("softmax", "hyla"):
            name = f"{mechanism} with a rather long name, {points} points"
            axes[name] = {"points": points}
            value = points / 100
            curve = [(600, {"held_out": value, "train": value})]
            variants[name] = [make_run(mechanism, 0, {"held_out": value, "train": value}, curve=curve, name=name)]
    plan = make_plan(variants, axes=axes, figures=("scores", "curves", "scaling"))
    page = html.write_page(summarise(plan, tmp_path), tmp_path / "index.html")
    found = look(page, f"--window-size={width},2000")
    assert found["lines"] > 0
    assert found["other"] == [[0.32], [0.32]]  # softmax is switched off: hyla at 32 points, on both splits
    assert (found["broken"], found["wide"] <= 0) == (0, True)
