"""A comparison as one HTML file that needs nothing else: table, interactive curves, runs, and how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hyla.errors import MissingExtraError
from hyla.report import figures, tables
from hyla.report.tables import Comparison, Row, RunSummary


def write_page(comparison: Comparison, path: Path | str) -> Path:
    """Write the page to `path`. Put it into the folder of the comparison: its links to the runs are relative to that."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("plotly", "report", "writing the HTML page") from None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparison, get_plotlyjs()), encoding="utf-8")
    return path


def page(comparison: Comparison, plotly_js: str) -> str:
    """The whole page as text, with `plotly_js` inside it once."""
    title = escape(comparison.title)
    sections = [
        f'<p class="note">{escape(comparison.budget_note)}</p>' if comparison.budget_note else "",
        _section("Scores", _score_tables(comparison) + _notes(comparison)) if comparison.rows else "",
        _section("Learning curves", _curves(comparison)),
        _section("Runs", _runs(comparison)),
        _section("Repeat it", f"<pre><code>{escape(comparison.command)}</code></pre>" + _environment(comparison)),
        _section("Settings", _settings(comparison)),
    ]
    # Nothing may be loaded from anywhere: the policy makes the browser refuse it.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
{_header(comparison)}
{"".join(sections)}
</main>
<script>{plotly_js}</script>
<script type="application/json" id="curves-data">{_script_json(_curve_data(comparison))}</script>
<script>{_JS}</script>
</body>
</html>
"""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _header(comparison: Comparison) -> str:
    states = [run.state for run in comparison.runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    facts = [
        ("Mechanisms", ", ".join(comparison.mechanisms)),
        ("Seeds", seeds),
        ("Runs", f"{len(comparison.runs)} ({counts})"),
        ("Score", tables.metric_label(comparison.metric)),
    ]
    sizes = [run.num_parameters for run in comparison.runs if run.num_parameters is not None]
    if sizes:
        ends = dict.fromkeys(f"{size:,}" for size in (min(sizes), max(sizes)))
        facts.append(("Parameters", " to ".join(ends)))
    times = [run.wall_seconds for run in comparison.runs if run.wall_seconds is not None]
    if times:
        facts.append(("Training time, all runs", duration(sum(times))))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    budget = f"{comparison.budget} budget, {tables.steps_text(comparison.steps)}"
    heading = f"{escape(comparison.task)} <small>{escape(budget)}</small>"
    return (
        f'<header><p class="eyebrow">Comparison of attention mechanisms</p><h1>{heading}</h1><dl>{items}</dl></header>'
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], classes: str = "") -> str:
    """`head`: (title, CSS class) of each column. Cells are HTML already; the first of each row is its header."""
    heads = "".join(f'<th scope="col" class="{css}">{title}</th>' for title, css in head)
    body = []
    for row in rows:
        cells = [f'<td class="{css}">{cell}</td>' for cell, (_, css) in zip(row[1:], head[1:], strict=True)]
        body.append(f'<tr><th scope="row">{row[0]}</th>{"".join(cells)}</tr>')
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll {classes}">{table}</div>'


def _swatch(mechanism: str) -> str:
    colour, dash = figures.style(mechanism)
    css = {"solid": "solid", "dash": "dashed", "dashdot": "dotted"}[dash]
    return f'<i class="swatch" style="border-top:3px {css} {colour}"></i><code>{escape(mechanism)}</code>'


def _minus(text: str) -> str:
    """Numbers for reading: a true minus sign."""
    return escape(text.replace("-", "−"))


def _score_tables(comparison: Comparison) -> str:
    metric, columns = (
        comparison.metric,
        tables.reported_columns(comparison.rows),
    )  # the same in every table: they line up
    blocks = []
    for split in comparison.splits:
        rows = comparison.rows_of(split)
        ceiling = comparison.ceiling(split)
        head = [("mechanism", "name"), ("mean ± sd", "number"), ("seeds", "seeds")]
        head += [(f"{escape(source)}<br>{steps:,} steps", "number") for source, steps in columns]
        head += [("standard error", "number"), ("each seed", "strip")]
        body = []
        for row in rows:
            cells = [_swatch(row.mechanism), _minus(tables.format_mean(metric, row.mean, row.standard_deviation))]
            cells += [escape(tables.seeds_text(row))]
            cells += [_minus(tables.reported_cell(metric, row, column)) for column in columns]
            cells += [_minus(tables.format_score(metric, row.standard_error)), _strip(row, rows, metric)]
            body.append(cells)
        label = f"<code>{escape(split)}</code>"
        if split in tables.SPLIT_LABELS:
            label = f"{escape(tables.SPLIT_LABELS[split]).capitalize()} {label}"
        unit = escape(tables.metric_label(metric))
        with_ceiling = "" if ceiling is None else f", ceiling {_minus(tables.format_score(metric, ceiling))}"
        blocks.append(f'<h3>{label}<span class="unit">{unit}{with_ceiling}</span></h3>{_table(head, body, "scores")}')
    return "".join(blocks)


def _strip(row: Row, rows: Sequence[Row], metric: str) -> str:
    """A small drawing: a dot per seed, a bar at the mean, a diamond per reported figure; one scale for all `rows`."""
    width, height, edge = 150, 20, 7
    shown = [value for one in rows for value in one.values if value is not None]
    shown += [figure.mean for one in rows for figure in one.reported]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (width - 2 * edge) / (high - low) if high > low else 0.0

    def place(value: float) -> str:
        return f"{edge + (value - low) * scale if scale else width / 2:.1f}"

    colour, _ = figures.style(row.mechanism)
    parts = [f'<line class="rule" x1="{edge}" x2="{width - edge}" y1="10" y2="10"/>']
    for figure in row.reported:
        x, words = place(figure.mean), f"{figure.source}: {tables.format_reported(metric, figure)}"
        diamond = f'd="M{x} 4l6 6l-6 6l-6-6z" fill="none" stroke="{colour}" stroke-width="1.4"'
        parts.append(f"<path {diamond}><title>{escape(words)}</title></path>")
    if row.mean is not None:
        x = place(row.mean)
        parts.append(f'<line x1="{x}" x2="{x}" y1="2" y2="18" stroke="{colour}" stroke-width="2"/>')
    for seed, value in zip(row.seeds, row.values, strict=True):
        if value is not None:
            words = f"seed {seed}: {tables.format_score(metric, value)}"
            dot = f'cx="{place(value)}" cy="10" r="3.4" fill="{colour}" fill-opacity="0.75"'
            parts.append(f"<circle {dot}><title>{escape(words)}</title></circle>")
    label = f'role="img" aria-label="{escape(row.mechanism)}: values of each seed"'
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" {label}>{"".join(parts)}</svg>'


def _notes(comparison: Comparison) -> str:
    sentences = tables.notes(comparison)[1 if comparison.budget_note else 0 :]
    key = "Each seed: ● one seed, | their mean"
    if any(row.reported for row in comparison.rows):
        key += ", ◇ reported"
    items = [*sentences, f"{key}; one scale per table."]
    return f'<ul class="fine">{"".join(f"<li>{escape(sentence)}</li>" for sentence in items)}</ul>'


def _runs(comparison: Comparison) -> str:
    metric, splits = comparison.metric, comparison.splits
    head = [("run", ""), ("state", ""), ("seed", "number"), ("steps", "number"), ("time", "number")]
    head += [(f"<code>{escape(split)}</code>", "number") for split in splits]
    head += [("config", "")]
    body = []
    for run in comparison.runs:
        link = quote(f"{run.path}/config.json")
        state = f"{run.state}: {run.reason}" if run.reason else run.state
        cells = [_swatch_named(run), f'<span class="state {_state_class(run.state)}">{escape(state)}</span>']
        cells += [str(run.seed), f"{run.steps:,}", duration(run.wall_seconds)]
        cells += [_minus(tables.format_score(metric, run.scores.get(split))) for split in splits]
        body.append([*cells, f'<a href="{escape(link)}">config.json</a>'])
    unit = escape(tables.metric_label(metric))
    return f'<p class="fine">Scores: {unit} at the end; – for a run that diverged or is unfinished.</p>' + _table(
        head, body
    )


def _state_class(state: str) -> str:
    return state if state in ("finished", "diverged", "unfinished") else "other"


def _swatch_named(run: RunSummary) -> str:
    colour, _ = figures.style(run.mechanism)
    return f'<i class="dot" style="background:{colour}"></i>{escape(run.name)}'


def duration(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`; an en dash for None."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _environment(comparison: Comparison) -> str:
    found = {key.removeprefix("run."): v for key, v in comparison.settings.items() if key.startswith("run.")}
    if not found:
        return ""
    return "<p>Found when the runs began:</p>" + _definitions(found)


def _settings(comparison: Comparison) -> str:
    skipped = ("model.mechanism", "seed")
    found = {k: v for k, v in comparison.settings.items() if not k.startswith("run.") and k not in skipped}
    same = {key: values for key, values in found.items() if len(values) == 1}
    differing = {key: values for key, values in found.items() if len(values) > 1}
    text = "<p>The same in every run:</p>" + _definitions(same)
    if differing:
        text += "<p>Different between runs:</p>" + _definitions(differing)
    return f"<details><summary>{len(same)} settings shared by all runs</summary>{text}</details>"


def _definitions(found: dict[str, tuple[Any, ...]]) -> str:
    items = []
    for key, values in found.items():
        words = " | ".join("none" if value is None else str(value) for value in values[:6])
        more = f" and {len(values) - 6} more" if len(values) > 6 else ""
        items.append(f"<div><dt><code>{escape(key)}</code></dt><dd>{escape(words + more)}</dd></div>")
    return f'<dl class="settings">{"".join(items)}</dl>'


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> str:
    if not comparison.splits:
        return "<p>No evaluation has been logged yet.</p>"
    first = figures.panel_splits(comparison)
    splits = [
        f'<button type="button" data-split="{i}" aria-pressed="{str(split in first).lower()}">{escape(split)}</button>'
        for i, split in enumerate(comparison.splits)
    ]
    mechanisms = [
        f'<button type="button" data-mechanism="{i}" aria-pressed="true">{_swatch(mechanism)}</button>'
        for i, mechanism in enumerate(comparison.mechanisms)
    ]
    finished = [run.mechanism for run in comparison.runs if run.state == "finished"]
    several = any(finished.count(mechanism) > 1 for mechanism in finished)
    few = str(len(comparison.mechanisms) <= 4).lower()  # many single lines of many mechanisms hide each other
    seeds = f'<button type="button" id="seeds" aria-pressed="{few}">single seeds</button>' if several else ""
    plots = "".join(f'<figure id="plot-{i}" class="plot" hidden></figure>' for i in range(len(splits)))
    caption = escape(figures.caption(comparison).replace("Thin lines: single seeds.", ""))
    if several:
        caption += " Thin lines: single seeds."
    return f"""<div class="controls"><div role="group" aria-label="splits"><span>Split</span>{"".join(splits)}</div>
<div role="group" aria-label="mechanisms"><span>Mechanism</span>{"".join(mechanisms)}{seeds}</div></div>
<noscript><p class="fine">The curves need JavaScript; the tables do not.</p></noscript>
<div id="plots">{plots}</div><p class="fine">{caption} Drag to zoom in, double-click for the whole.</p>"""


def _curve_data(comparison: Comparison) -> dict[str, Any]:
    """All that the script draws, in the units shown."""
    metric, shared = comparison.metric, figures.panel_splits(comparison)
    unit = 100.0 if metric == "accuracy" else 1.0
    splits = []
    for split in comparison.splits:
        low, high, cut, above = figures.score_axis(comparison, shared if split in shared else [split])
        ceiling = comparison.ceiling(split)
        splits.append(
            {
                "title": escape(tables.SPLIT_LABELS.get(split, split)),
                "range": [unit * low, unit * high],
                "axis": tables.metric_label(metric) + (f" (axis cut at {low:.3g})".replace("-", "−") if cut else ""),
                "ceiling": None if ceiling is None else unit * ceiling,
                "ceiling_in_view": ceiling is not None and ceiling <= high,
                "above": _above(comparison, split, high) if above else "",
                "mechanisms": [_mechanism_data(comparison, name, split, unit) for name in comparison.mechanisms],
            }
        )
    last = max([step for run in comparison.runs for step, _ in run.curve] or [1]) or 1
    label = {"r2": "R²", "accuracy": "accuracy"}.get(metric, metric)
    return {"splits": splits, "last": last, "label": escape(label), "percent": metric == "accuracy"}


def _above(comparison: Comparison, split: str, high: float) -> str:
    rows, ceiling = comparison.rows_of(split), comparison.ceiling(split)
    words = []
    if ceiling is not None and ceiling > high:
        words.append(f"ceiling {tables.format_score(comparison.metric, ceiling)}")
    if any(figure.mean > high for row in rows for figure in row.reported):
        words.append("reported figures")
    return f"above the axis: {', '.join(words)}" if words else ""


def _mechanism_data(comparison: Comparison, mechanism: str, split: str, unit: float) -> dict[str, Any]:
    colour, dash = figures.style(mechanism)
    mean = tables.mean_curve(comparison, mechanism, split)
    runs = [run for run in comparison.runs if run.mechanism == mechanism]
    single = []
    for run in runs:
        steps, values = tables.run_curve(run, split)
        name = escape(f"seed {run.seed}" if run.state == "finished" else f"seed {run.seed}, {run.state}")
        scaled = [unit * value for value in values]
        single.append({"name": name, "finished": run.state == "finished", "x": steps, "y": scaled})
    return {
        "name": escape(mechanism),
        "colour": colour,
        "dash": dash,
        "runs": mean.num_runs,
        "x": mean.steps,
        "y": [unit * value for value in mean.mean],
        "low": [unit * value for value in mean.low],
        "high": [unit * value for value in mean.high],
        "band": mean.num_runs >= figures.MIN_BAND_RUNS,
        "seeds": single,
        "reported": [
            {
                "y": unit * figure.mean,
                "text": _minus(f"{figure.source}: {tables.format_reported(comparison.metric, figure)}")
                + f"<br>{figure.steps:,} steps",
            }
            for figure in comparison.row(mechanism, split).reported
        ],
    }


def _script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_CSS = """
:root { --ink: #1b2026; --soft: #5a636e; --line: #dfe3e8; --paper: #ffffff; --panel: #f6f7f9; --accent: #0a6f8f;
  --note-edge: #c98500; --note: #fff7e3; --good: #1a7f4b; --bad: #b3261e; --wait: #8a6100; --grid: #e6e9ed;
  --shade: #00000026; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #2d333b; --paper: #15181d; --panel: #1d2127; --accent: #5cc3e3;
    --note-edge: #d9a031; --note: #2a2415; --good: #58c98b; --bad: #ff8a80; --wait: #e2b84e; --grid: #2a3038;
    --shade: #ffffff33; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); 
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 18px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h1 small { font-size: 18px; font-weight: 400; color: var(--soft); margin-left: 8px; letter-spacing: 0; }
h2 { font-size: 19px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 24px 0 6px; display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; }
h3 code { font-weight: 400; color: var(--soft); }
h3 .unit { margin-left: auto; font-weight: 400; color: var(--soft); font-size: 14px; }
.eyebrow { margin: 0 0 4px; color: var(--accent); font-size: 13px; font-weight: 600; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.92em; }
dl { margin: 0; display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 12px 28px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; overflow-wrap: anywhere; }
dl.settings { grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 4px 28px; font-size: 14px; }
dl.settings div { display: flex; justify-content: space-between; gap: 12px; padding: 3px 0;
  border-bottom: 1px solid var(--line); }
dl.settings dd { text-align: right; }
.note { margin: 26px 0 0; padding: 14px 18px; background: var(--note); border-left: 4px solid var(--note-edge);
  border-radius: 4px; font-size: 16px; }
.fine { color: var(--soft); font-size: 13px; }
ul.fine { padding-left: 18px; margin: 16px 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px 7px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; line-height: 1.3; }
tbody th { font-weight: 400; }
.number { text-align: right; }
th:last-child, td:last-child { padding-right: 2px; }
.scores th.strip, .scores td.strip { padding-left: 14px; }
.scores td.seeds { white-space: normal; line-height: 1.25; }
td.strip { padding-top: 0; padding-bottom: 0; line-height: 0; }
.rule { stroke: var(--line); stroke-width: 1; }
.swatch { display: inline-block; width: 22px; height: 0; vertical-align: middle; margin: 0 8px 2px 0; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
.state::before { content: ""; display: inline-block; width: 8px; height: 8px; margin-right: 7px; background: currentColor; }
.finished { color: var(--good); } .finished::before { border-radius: 50%; }
.diverged { color: var(--bad); } .diverged::before { transform: rotate(45deg); }
.unfinished, .other { color: var(--wait); }
a { color: var(--accent); }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 18px; }
details summary { cursor: pointer; color: var(--accent); }
.controls { display: grid; gap: 8px; margin-bottom: 10px; }
.controls > div { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.controls span { color: var(--soft); font-size: 13px; min-width: 82px; }
button { font: inherit; font-size: 13px; padding: 5px 11px; min-height: 32px; border-radius: 16px; cursor: pointer;
  color: var(--ink); border: 1px solid var(--line); background: var(--panel); }
button[aria-pressed="false"] { background: none; color: var(--soft); border-style: dashed; }
button[aria-pressed="false"] .swatch { opacity: 0.3; }
button:focus-visible, a:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
#plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.plot { margin: 0; height: 380px; min-width: 0; }
.plot[hidden] { display: none; }
.plot:only-of-type, #plots.one .plot { grid-column: 1 / -1; }
@media (min-width: 761px) {
  .scores table { table-layout: fixed; }
  .scores th { width: 12%; } .scores th.name { width: 21%; } .scores th.seeds { width: 14%; }
  .scores th.strip { width: 172px; } }
@media (max-width: 760px) {
  .scroll { background: linear-gradient(270deg, var(--paper) 40%, transparent) 100% 0 / 40px 100% no-repeat local,
    linear-gradient(270deg, var(--shade), transparent) 100% 0 / 14px 100% no-repeat scroll; }
  main { padding: 22px 16px 48px; }
  h1 { font-size: 25px; } h1 small { display: block; margin: 4px 0 0; font-size: 16px; }
  dl { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px 18px; }
  dl.settings { grid-template-columns: minmax(0, 1fr); }
  #plots { grid-template-columns: minmax(0, 1fr); }
  .plot { height: 320px; }
  .controls span { min-width: 100%; }
  h3 .unit { margin-left: 0; width: 100%; }
  tbody th, thead th:first-child { position: sticky; left: 0; background: var(--paper); padding-right: 12px; }
  th .swatch { width: 14px; }
}
@media print { .controls, details { display: none; } main { max-width: none; } section { break-inside: avoid; } }
"""

_JS = """
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("curves-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const pressed = (button) => button.getAttribute("aria-pressed") === "true";
  const splitButtons = [...document.querySelectorAll("[data-split]")];
  const mechanismButtons = [...document.querySelectorAll("[data-mechanism]")];
  const seedsButton = document.getElementById("seeds");
  const number = data.percent ? ".1f" : ".3f";
  const value = "step %{x:,}<br>" + data.label + " %{y:" + number + "}" + (data.percent ? " %" : "");

  function faded(colour, alpha) {
    const part = (at) => parseInt(colour.slice(at, at + 2), 16);
    return "rgba(" + part(1) + "," + part(3) + "," + part(5) + "," + alpha + ")";
  }

  function traces(split) {
    const list = [];
    split.mechanisms.forEach((m, i) => {
      if (!pressed(mechanismButtons[i])) return;
      const line = (extra) => Object.assign({ type: "scatter", mode: "lines", showlegend: false, name: m.name }, extra);
      if (m.band) {
        const edge = { width: 0, color: m.colour };
        list.push(line({ x: m.x, y: m.low, line: edge, hoverinfo: "skip" }));
        list.push(line({ x: m.x, y: m.high, line: edge, hoverinfo: "skip", fill: "tonexty",
          fillcolor: faded(m.colour, 0.16) }));
      }
      m.seeds.forEach((seed) => {
        if (seed.finished && (m.runs < 2 || !pressed(seedsButton))) return;
        const hover = "<b>" + m.name + "</b>, " + seed.name + "<br>" + value + "<extra></extra>";
        list.push(line({ x: seed.x, y: seed.y, hovertemplate: hover,
          line: { color: faded(m.colour, seed.finished ? 0.5 : 0.9), width: 1, dash: seed.finished ? "solid" : "dot" } }));
        if (!seed.finished && seed.x.length) {
          list.push(line({ x: seed.x.slice(-1), y: seed.y.slice(-1), mode: "markers", hovertemplate: hover,
            marker: { symbol: "x-thin", size: 9, line: { color: m.colour, width: 2 } } }));
        }
      });
      if (m.x.length) {
        const who = m.runs > 1 ? ", mean of " + m.runs + " seeds" : "";
        const range = m.runs > 1 ? "<br>%{customdata[0]:" + number + "} to %{customdata[1]:" + number + "}" : "";
        list.push(line({ x: m.x, y: m.y, mode: m.x.length > 1 ? "lines" : "markers",
          customdata: m.low.map((low, k) => [low, m.high[k]]), line: { color: m.colour, width: 2.6, dash: m.dash },
          marker: { color: m.colour, size: 7 }, hovertemplate: "<b>" + m.name + "</b>" + who + "<br>" + value + range +
          "<extra></extra>" }));
      }
      m.reported.forEach((r) => list.push(line({ x: [data.last * 0.955, data.last * 1.03], y: [r.y, r.y],
        cliponaxis: false, line: { color: m.colour, width: 2, dash: "3px,2px" },
        hovertemplate: "<b>" + m.name + "</b><br>" + r.text + "<extra></extra>" })));
    });
    return list;
  }

  function layout(split) {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue("--" + name).trim();
    const axis = { color: colour("soft"), gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false,
      automargin: true, tickfont: { size: 12 } };
    const shapes = [], annotations = [];
    if (split.ceiling_in_view) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: split.ceiling, y1: split.ceiling,
        line: { color: colour("soft"), width: 1.2, dash: "dot" } });
      annotations.push({ xref: "paper", x: 0, xanchor: "left", y: split.ceiling, yanchor: "bottom", showarrow: false,
        text: "ceiling " + split.ceiling.toFixed(data.percent ? 1 : 3), font: { size: 11, color: colour("soft") } });
    }
    if (split.above) {
      annotations.push({ xref: "paper", yref: "paper", x: 1, xanchor: "right", y: 1, yanchor: "top", showarrow: false,
        text: split.above, font: { size: 11, color: colour("soft") } });
    }
    return {
      title: { text: split.title, x: 0, xref: "paper", xanchor: "left", y: 0.985, yanchor: "top",
        font: { size: 14, color: colour("ink") } },
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 52, r: 18, t: 34, b: 44 }, hovermode: "closest", dragmode: coarse ? false : "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink"), size: 13 } },
      xaxis: Object.assign({ range: [0, data.last * 1.035], title: { text: "training steps", standoff: 8 }, nticks: 6,
        tickformat: ",d", showgrid: false, showline: true }, axis),
      yaxis: Object.assign({ range: split.range, title: { text: split.axis, standoff: 6 }, nticks: 7 }, axis),
      shapes: shapes, annotations: annotations, uirevision: "keep",
    };
  }

  function draw() {
    const shown = splitButtons.filter(pressed).length;
    document.getElementById("plots").classList.toggle("one", shown === 1);
    data.splits.forEach((split, i) => {
      const place = document.getElementById("plot-" + i);
      place.hidden = !pressed(splitButtons[i]);
      if (place.hidden) return;
      Plotly.react(place, traces(split), layout(split), { responsive: true, displaylogo: false,
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], displayModeBar: coarse ? false : "hover" });
      Plotly.Plots.resize(place);
    });
  }

  [...splitButtons, ...mechanismButtons, seedsButton].filter(Boolean).forEach((button) => {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(!pressed(button)));
      draw();
    });
  });
  dark.addEventListener("change", draw);
  draw();
})();
"""
