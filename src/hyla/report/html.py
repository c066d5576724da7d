"""An experiment as one HTML file that needs nothing else: tables, interactive curves, runs, and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hyla.report import canvas, document, figures, statistics, tables
from hyla.report.comparison import Comparison, Row, RunSummary, mean_curve, run_curve, steps_text
from hyla.report.decodability import NOTE, Layer
from hyla.report.decodability import cells as decodability_cells
from hyla.report.plan import Setting


def write_page(
    comparison: Comparison, path: Path | str, files: Sequence[str] = (), decoded: Sequence[Layer] = ()
) -> Path:
    """Write the page to `path`. decoded: what the probes of an experiment with decodability found. Put the page into the
    folder of the experiment: its links to the runs and to `files` are relative to that."""
    library = document.plotly_js()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparison, library, files, decoded), encoding="utf-8")
    return path


def page(comparison: Comparison, plotly_js: str, files: Sequence[str] = (), decoded: Sequence[Layer] = ()) -> str:
    """The whole page as text, with `plotly_js` inside it once."""
    title, asked = escape(comparison.title), comparison.plan.figures
    sections = [
        _warnings(comparison),
        _section("Scores", _score_tables(comparison) + _every_statistic(comparison)),
        _section("Heat maps", _heat_maps(comparison)) if "heat_map" in asked else "",
        _section("Score against size", _scaling(comparison)) if "scaling" in asked else "",
        _section("Learning curves", _curves(comparison)),
        _section("Decodability", _decodability(comparison, decoded)) if decoded else "",
        _section("What was chosen", chosen) if (chosen := _choices(comparison)) else "",
        _section("How to read the numbers", _notes(comparison)),
        _section("Runs", _runs(comparison)),
        _section("Repeat it", f"<pre><code>{escape(comparison.plan.command)}</code></pre>" + _environment(comparison)),
        _section("Files", _files(files)) if files else "",
        _section("Settings", _settings(comparison)),
    ]
    main = f"{_header(comparison)}\n{''.join(sections)}"
    style, script = _resource("page.css"), _resource("page.js")
    return document.document(title, style, main, plotly_js, "curves-data", _curve_data(comparison), script)


def _resource(name: str) -> str:
    return resources.files("hyla.report").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _header(comparison: Comparison) -> str:
    plan = comparison.plan
    counts = ", ".join(f"{count} {state}" for state, count in comparison.states.items())
    mechanisms = dict.fromkeys(variant.mechanism for variant in plan.variants)
    facts = [
        ("Mechanisms", ", ".join(mechanisms)),
        ("Seeds", ", ".join(str(seed) for seed in comparison.seeds)),
        ("Runs", f"{len(comparison.runs)} ({counts})"),
        (
            "Score",
            f"{tables.metric_label(plan.metric)} on {tables.split_words(plan, plan.reported_split)}",
        ),
    ]
    sizes = [run.num_parameters for run in comparison.runs if run.num_parameters is not None]
    if sizes:
        ends = dict.fromkeys(f"{size:,}" for size in (min(sizes), max(sizes)))
        facts.append(("Parameters", " to ".join(ends)))
    times = [run.wall_seconds for run in comparison.runs if run.wall_seconds is not None]
    if times:
        facts.append(("Training time, all runs", duration(sum(times))))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    budget = f"{plan.budget} budget, {steps_text(comparison.steps)}"
    heading = f"{escape(plan.title)} <small>{escape(budget)}</small>"
    eyebrow = f"{escape(plan.task)} · {escape(plan.name)}"
    return f'<header><p class="eyebrow">{eyebrow}</p><h1>{heading}</h1><dl>{items}</dl></header>'


def _warnings(comparison: Comparison) -> str:
    """What a reader must know before the first number."""
    lost = comparison.lost
    words = [comparison.plan.budget_note]
    if comparison.plan.selection == "reported":
        words.append(tables.selection_note(comparison))
    if lost:
        count = f"{sum(lost.values())} of {len(comparison.runs)}"
        words.append(f"{count} runs have no score: {tables.lost_text(comparison)}.")
    return "".join(f'<p class="note">{escape(word)}</p>' for word in words if word)


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """html: what is shown. value: what it sorts by, the shown text by default."""

    html: str
    value: int | float | None = None


@dataclass(frozen=True)
class Column:
    """title: HTML. css: `number` sorts as numbers. first: the order of the first click."""

    title: str
    css: str = ""
    first: str = "ascending"


def _table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]], label: str, classes: str = "",
           ids: Sequence[str] = ()) -> str:  # fmt: skip
    """A table that can be sorted by any column; the first cell of each row is its header."""
    heads = "".join(
        f'<th scope="col" class="{column.css}" data-first="{column.first}">{column.title}</th>' for column in columns
    )
    body = []
    for number, row in enumerate(rows):
        cells = [_cell("td", column, cell) for cell, column in zip(row[1:], columns[1:], strict=True)]
        anchor = f' id="{ids[number]}"' if ids else ""
        body.append(f"<tr{anchor}>{_cell('th', columns[0], row[0])}{''.join(cells)}</tr>")
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div class="scroll {classes}" role="region" aria-label="{escape(label)}" tabindex="0">{table}</div>'


def _cell(tag: str, column: Column, cell: str | Cell) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    scope = ' scope="row"' if tag == "th" else ""
    css = f' class="{column.css}"' if column.css else ""
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f"<{tag}{scope}{css}{value}>{cell.html}</{tag}>"


def _swatch(look: tuple[str, str], name: str) -> str:
    colour, dash = look
    css = {"solid": "solid", "dash": "dashed", "dashdot": "dotted"}[dash]
    line = f'<i class="swatch" style="border-top:3px {css} {colour}"></i>'
    return f'<span class="named">{line}<span>{escape(name)}</span></span>'


def _minus(text: str) -> str:
    """Numbers for reading: a true minus sign."""
    return escape(text.replace("-", "−"))


def _config_link(run: RunSummary) -> str:
    return escape(quote(f"{run.path}/config.json"))


def _run_id(comparison: Comparison, name: str) -> str:
    """The anchor of a run in the table of runs."""
    return f"run-{next(place for place, run in enumerate(comparison.runs) if run.name == name)}"


def _to_runs(comparison: Comparison, row: Row, html: str) -> str:
    """`html` as a link to the row's first run."""
    return f'<a class="run" href="#{_run_id(comparison, row.runs[0])}">{html}</a>' if row.runs else html


def _score_tables(comparison: Comparison) -> str:
    metric = comparison.plan.metric
    reported = tables.reported_columns(comparison.rows)  # the same in every table: they line up
    difference = tables.difference_title(comparison)
    blocks = []
    for split in comparison.splits:
        rows = comparison.rows_of(split)
        ceiling = comparison.ceiling(split)
        columns = [
            Column("variant", "name"),
            *(Column(escape(tables.axis_label(a)), "number") for a in comparison.plan.axes),
        ]
        columns += [Column("mean ± sd", "number", "descending"), Column("95% interval", "number", "descending")]
        columns += [Column("each seed", "strip", "descending"), Column("seeds", "seeds")]
        columns += [Column(_two_lines(difference), "number", "descending")] if difference else []
        columns += [Column(f"{escape(s)}<br>{n:,} steps", "number", "descending") for s, n in reported]
        body = [_score_row(comparison, row, rows, reported, difference is not None) for row in rows]
        label = f"<code>{escape(split)}</code>"
        if split in tables.SPLIT_LABELS:
            label = f"{escape(tables.split_words(comparison.plan, split)).capitalize()} {label}"
        unit = escape(tables.metric_label(metric))
        with_ceiling = "" if ceiling is None else f", ceiling {_minus(tables.format_score(metric, ceiling))}"
        heading = f'{label}<span class="unit">{unit}{with_ceiling}</span>'
        table = _table(columns, body, f"Scores on {split}", "scores")
        if split == comparison.plan.reported_split:
            blocks.append(f"<h3>{heading}</h3>{table}")
        else:
            open_ = " open" if len(comparison.variants) <= 4 and split == "train" else ""
            blocks.append(f"<details{open_}><summary><h3>{heading}</h3></summary>{table}</details>")
    key = "Each seed: ● one seed (a link to its config), | their mean, — its 95% interval"
    key += ", ◇ reported" if reported else ""
    key += ", ┊ ceiling" if any(row.ceiling is not None for row in comparison.rows) else ""
    return "".join(blocks) + f'<p class="fine">{key}; one scale per table. Click a column’s title to sort by it.</p>'


def _two_lines(title: str) -> str:
    """`difference<br>to softmax`, `difference to softmax<br>with the same settings`."""
    at = " with " if " with " in title else " "
    first, _, rest = title.partition(at)
    return f"{escape(first)}<br>{escape(at.lstrip() + rest)}"


def _score_row(
    comparison: Comparison, row: Row, rows: Sequence[Row], reported: Sequence[tuple[str, int]], with_difference: bool
) -> list[str | Cell]:
    metric, numbers, axes = comparison.plan.metric, row.summary, comparison.variant(row.variant).axes
    name = canvas.series(comparison)[row.variant]
    cells: list[str | Cell] = [_swatch(canvas.styles(comparison)[row.variant], name)]
    cells += [_axis_cell(axes[axis]) for axis in comparison.plan.axes]
    mean = _minus(tables.format_mean(metric, numbers.mean, numbers.standard_deviation))
    mean = f"<strong>{mean}</strong>" if comparison.is_best(row) else mean
    cells.append(mean if numbers.mean is None else Cell(_to_runs(comparison, row, mean), numbers.mean))
    low = None if numbers.interval is None else numbers.interval[0]
    cells.append(Cell(_minus(tables.format_interval(metric, numbers.interval)), low))
    cells += [Cell(_strip(comparison, row, rows), numbers.mean), escape(tables.seeds_text(row))]
    if with_difference:
        cells.append(_difference_cell(metric, row))
    for column in reported:
        text, word = tables.reported_cell(metric, row, column)
        mean_of = next((f.mean for f in row.reported if (f.source, f.steps) == column), None)
        below = "" if word == "–" else f"<br><small>{escape(_verdict_words(word))}</small>"
        cells.append(Cell(_minus(text) + below, mean_of))
    return cells


def _axis_cell(value: Setting) -> Cell:
    number = float(value) if isinstance(value, int | float) else None
    return Cell(escape(figures.tick_text(value)), number)


def _verdict_words(word: str) -> str:
    return {"covers": "ours covers it", "above": "ours is above", "below": "ours is below"}.get(word, word)


def _difference_cell(metric: str, row: Row) -> str | Cell:
    if row.difference is None:
        return "–"
    mean, interval = row.difference.summary.mean, row.difference.summary.interval
    if mean is None:
        return "–"
    sign = "" if mean < 0 else "+"
    ends = "" if interval is None else f" <small>({_minus(tables.format_interval(metric, interval))})</small>"
    word = f"<br><small>{escape(tables.difference_word(row.difference))}</small>"
    return Cell(f"{sign}{_minus(tables.format_score(metric, mean))}{ends}{word}", mean)


def _strip(comparison: Comparison, row: Row, rows: Sequence[Row]) -> str:
    """A small drawing: a dot per seed, a bar at the mean, its interval, a diamond per reported figure, the ceiling; one
    scale for all `rows`."""
    width, height, edge, metric = 150, 22, 7, comparison.plan.metric
    if not any(value is not None for one in rows for value in one.values) and not any(one.reported for one in rows):
        return ""
    low, high = figures.final_range(comparison, rows, intervals=True)

    def place(value: float) -> str:
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return f"{edge + share * (width - 2 * edge):.1f}"

    colour = canvas.styles(comparison)[row.variant][0]
    parts = [f'<line class="rule" x1="{edge}" x2="{width - edge}" y1="11" y2="11"/>']
    if row.ceiling is not None:
        words = f"ceiling {tables.format_score(metric, row.ceiling)}"
        x = place(row.ceiling)
        parts.append(f'<line class="ceiling" x1="{x}" x2="{x}" y1="0" y2="22"><title>{escape(words)}</title></line>')
    for figure in row.reported:
        x, words = place(figure.mean), f"{figure.source}: {tables.format_reported(metric, figure)}"
        diamond = f'd="M{x} 5l6 6l-6 6l-6-6z" fill="none" stroke="{colour}" stroke-width="1.4"'
        parts.append(f"<path {diamond}><title>{escape(words)}</title></path>")
    if row.summary.interval is not None:
        left, right = (place(end) for end in row.summary.interval)
        line = f'x1="{left}" x2="{right}" y1="11" y2="11" stroke="{colour}" stroke-width="1.6" stroke-opacity="0.55"'
        words = f"95% interval: {tables.format_interval(metric, row.summary.interval)}"
        parts.append(f"<line {line}><title>{escape(words)}</title></line>")
    if row.summary.mean is not None:
        x = place(row.summary.mean)
        parts.append(f'<line x1="{x}" x2="{x}" y1="3" y2="19" stroke="{colour}" stroke-width="2"/>')
    runs = {run.name: run for run in comparison.runs}
    for seed, name, value in zip(row.seeds, row.runs, row.values, strict=True):
        if value is not None:
            words = escape(f"seed {seed}: {tables.format_score(metric, value)}")
            dot = f'cx="{place(value)}" cy="11" r="3.4" fill="{colour}" fill-opacity="0.75"'
            link = f'href="{_config_link(runs[name])}" aria-label="{words}"'
            parts.append(f"<a {link}><circle {dot}><title>{words}</title></circle></a>")
    label = f'role="group" aria-label="{escape(row.variant)}: values of each seed"'
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" {label}>{"".join(parts)}</svg>'


def _every_statistic(comparison: Comparison) -> str:
    """All statistics of all rows, each seed's number linking to its run's config."""
    metric, runs = comparison.plan.metric, {run.name: run for run in comparison.runs}
    columns = [
        Column("variant", "name"),
        Column("split"),
        Column("n", "number"),
        Column("mean", "number", "descending"),
    ]
    columns += [Column("standard<br>deviation", "number"), Column("standard<br>error", "number")]
    columns += [Column("95% interval,<br>Student’s t", "number"), Column("95% interval,<br>bootstrap", "number")]
    columns += [Column("steps", "number"), Column("each seed")]
    body: list[list[str | Cell]] = []
    for row in comparison.rows:
        n = row.summary
        numbers = [(n.mean, n.mean), (n.standard_deviation, n.standard_deviation), (n.standard_error, n.standard_error)]
        cells: list[str | Cell] = [escape(row.variant), f"<code>{escape(row.split)}</code>", str(n.count)]
        cells += [Cell(_minus(tables.format_score(metric, shown)), value) for shown, value in numbers]
        cells += [Cell(_minus(tables.format_interval(metric, ends)), ends[0] if ends else None)
                  for ends in (n.interval, n.bootstrap)]  # fmt: skip
        cells.append(Cell("–" if row.steps is None else " to ".join(f"{step:,}" for step in dict.fromkeys(row.steps)),
                          None if row.steps is None else row.steps[0]))  # fmt: skip
        links = [
            f'<a class="run" href="{_config_link(runs[name])}" title="seed {seed}">'
            f"{_minus(tables.format_score(metric, value))}</a>"
            if value is not None
            else f"<small>{escape(runs[name].state)}</small>"
            for seed, name, value in zip(row.seeds, row.runs, row.values, strict=True)
        ]
        body.append([*cells, ", ".join(links) or "–"])
    table = _table(columns, body, "Every statistic")
    return f"<details><summary>Every statistic, with each seed’s number and its run’s config</summary>{table}</details>"


def _choices(comparison: Comparison) -> str:
    cells = tables.choice_cells(comparison)
    if cells is None:
        return ""
    columns = [Column(escape(title), "number" if number else "") for title, number in cells.head]
    columns[-1] = Column("chosen")
    body = [[f"<strong>{escape(cell)}</strong>" if place in cells.bold and i in (1, 4) else _minus(cell) if i == 2
             else escape(cell) for i, cell in enumerate(row)] for place, row in enumerate(cells.rows)]  # fmt: skip
    note = f"<p>{escape(tables.selection_note(comparison))}</p>"
    if len(body) <= 12:
        return note + _table(columns, body, "What was chosen")
    return f"{note}<details><summary>All {len(body)} settings</summary>{_table(columns, body, 'What was chosen')}</details>"


def _decodability(comparison: Comparison, decoded: Sequence[Layer]) -> str:
    """A table per target, and the picture, which lies beside the page."""
    parts = [f"<p>{escape(NOTE)}</p>"]
    for cells in decodability_cells(comparison, decoded):
        columns = [Column(escape(title), "number" if number else "") for title, number in cells.head]
        rows = [[_minus(escape(word)) if i else escape(word) for i, word in enumerate(row)] for row in cells.rows]
        parts.append(f"<h3>{escape(cells.title)}</h3>" + _table(columns, rows, cells.title))
    return "".join(parts)


def _notes(comparison: Comparison) -> str:
    sentences = [*tables.notes(comparison)[1 if comparison.plan.budget_note else 0 :], statistics.BOOTSTRAP]
    return f'<ul class="fine">{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul>'


def _runs(comparison: Comparison) -> str:
    shown = {name for row in comparison.rows for name in row.runs}
    chosen = [run for run in comparison.runs if run.name in shown]
    others = [run for run in comparison.runs if run.name not in shown]
    unit = escape(tables.metric_label(comparison.plan.metric))
    text = f'<p class="fine">Scores: {unit} at the end, each a link to its run’s config; – for a run without one.</p>'
    text += _runs_table(comparison, chosen, "Runs") if chosen else ""
    if others:
        table = _runs_table(comparison, others, "Other runs")
        text += f"<details><summary>Runs of settings that are not shown above: {len(others)}</summary>{table}</details>"
    return text


def _runs_table(comparison: Comparison, runs: Sequence[RunSummary], label: str) -> str:
    metric, splits = comparison.plan.metric, comparison.splits
    columns = [
        Column("run"),
        Column("state"),
        Column("seed", "number"),
        Column("steps", "number"),
        Column("time", "number"),
    ]
    columns += [Column(f"<code>{escape(split)}</code>", "number", "descending") for split in splits]
    columns += [Column("files")]
    body = []
    for run in runs:
        link = _config_link(run)
        state = f"{run.state}: {run.reason}" if run.reason else run.state
        css = run.state if run.state in ("finished", "diverged", "failed") else "other"
        dot = f'<i class="dot" style="background:{figures.style(run.mechanism)[0]}"></i>'
        cells: list[str | Cell] = [f"{dot}{escape(run.name)}", f'<span class="state {css}">{escape(state)}</span>']
        cells += [str(run.seed), Cell(f"{run.steps:,}", run.steps), Cell(duration(run.wall_seconds), run.wall_seconds)]
        for split in splits:
            value = run.scores.get(split)
            text = _minus(tables.format_score(metric, value))
            cells.append("–" if value is None else Cell(f'<a class="run" href="{link}">{text}</a>', value))
        there = run.state != "not started"
        body.append([*cells, f'<a href="{link}">config.json</a>' if there else "–"])
    return _table(columns, body, label, ids=[_run_id(comparison, run.name) for run in runs])


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


def _files(files: Sequence[str]) -> str:
    items = "".join(f'<li><a href="{escape(quote(file))}">{escape(file)}</a></li>' for file in files)
    return f'<ul class="files">{items}</ul>'


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


# --- heat maps and scaling --------------------------------------------------------------------------------------------


def _heat_maps(comparison: Comparison) -> str:
    maps, metric = figures.heat_maps(comparison), comparison.plan.metric
    low, high = figures.shade_range(comparison)
    blocks = []
    for title, rows in maps.cells.items():
        across = escape(tables.axis_label(maps.x))
        heads = "".join(f'<th scope="col">{escape(figures.tick_text(value))}</th>' for value in maps.x_values)
        body = []
        for value, line in reversed(list(zip(maps.y_values, rows, strict=True))):
            cells = [_heat_cell(comparison, row, metric, low, high) for row in line]
            body.append(f'<tr><th scope="row">{escape(figures.tick_text(value))}</th>{"".join(cells)}</tr>')
        corner = f'<th class="axis">{escape(tables.axis_label(maps.y))} ↓<br>{across} →</th>'
        blocks.append(
            f"<table><caption>{escape(title)}</caption><thead><tr>{corner}{heads}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table>"
        )
    split = comparison.plan.reported_split
    words = f"{tables.metric_label(metric)} on {tables.split_words(comparison.plan, split)}, mean over seeds"
    note = f'<p class="fine">{escape(words)}; each links to its runs. Hatched: no result. †: not all seeds.</p>'
    return f'<div class="maps">{"".join(blocks)}</div>{note}'


def _heat_cell(comparison: Comparison, row: Row | None, metric: str, low: float, high: float) -> str:
    mean = None if row is None else row.summary.mean
    if row is None or mean is None:
        return f'<td class="empty" title="{escape("not planned" if row is None else tables.seeds_text(row))}">–</td>'
    share = (mean - low) / (high - low)
    red, green, blue = (round(255 * part) for part in figures.shade(share))
    style = f"background:rgb({red},{green},{blue});color:{'#fff' if share > 0.5 else '#1b2026'}"
    text = _minus(tables.format_score(metric, mean)) + ("†" if row.lost else "")
    title = escape(f"{row.variant}: {tables.format_mean(metric, mean, row.summary.standard_deviation)}, "
                   f"seeds {tables.seeds_text(row)}")  # fmt: skip
    return f'<td style="{style}" title="{title}">{_to_runs(comparison, row, text)}</td>'


def _scaling(comparison: Comparison) -> str:
    looks, names = canvas.styles(comparison), canvas.series(comparison)
    legend = dict.fromkeys(_swatch(looks[variant], name) for variant, name in names.items())
    plots = "".join(
        f'<figure id="line-{i}" class="plot"></figure>' for i in range(len(figures.scaling_axes(comparison)))
    )
    words = "Small dots: seeds. Lines: their means, along one axis with all other settings the same."
    if comparison.ceiling(comparison.plan.reported_split) is not None:
        words += " Dotted: the ideal observer’s ceiling."
    return f'<p>{" &nbsp; ".join(legend)}</p><div id="lines">{plots}</div><p class="fine">{words}</p>'


def _line_data(comparison: Comparison, unit: float) -> dict[str, Any]:
    plan, split = comparison.plan, comparison.plan.reported_split
    if "scaling" not in plan.figures:
        return {}
    looks, panels = canvas.styles(comparison), []
    for axis in figures.scaling_axes(comparison):
        values = figures.axis_values(comparison, axis)
        numbers = figures.axis_numbers(values)
        lines = []
        for rows in figures.scaling_lines(comparison, axis):
            at = [(numbers[values.index(comparison.variant(row.variant).axes[axis])], row) for row in rows]
            means = [(x, row) for x, row in at if row.summary.mean is not None]
            seeds = [(x, row.variant, seed, value) for x, row in at
                     for seed, value in zip(row.seeds, row.values, strict=True) if value is not None]  # fmt: skip
            colour, dash = looks[rows[0].variant]
            lines.append(
                {
                    "colour": colour,
                    "dash": dash,
                    "x": [x for x, _ in means],
                    "y": _shown([row.summary.mean or 0.0 for _, row in means], unit),
                    "text": [f"<b>{escape(row.variant)}</b>, mean of {row.summary.count}" for _, row in means],
                    "seed_x": [x for x, _, _, _ in seeds],
                    "seed_y": _shown([value for _, _, _, value in seeds], unit),
                    "seed_text": [f"<b>{escape(name)}</b>, seed {seed}" for _, name, seed, _ in seeds],
                }
            )
        panels.append(
            {
                "axis": escape(tables.axis_label(axis)),
                "kind": "log" if figures.is_logarithmic(values) else "linear",
                "values": numbers,
                "ticks": [escape(figures.tick_text(value)) for value in values],
                "lines": lines,
            }
        )
    low, high = figures.final_range(comparison, comparison.rows_of(split), intervals=False)
    ceiling = comparison.ceiling(split)
    return {
        "lines": panels,
        "line_range": [unit * low, unit * high],
        "line_label": escape(tables.metric_label(plan.metric)),
        "line_ceiling": None if ceiling is None else unit * ceiling,
    }


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> str:
    if not any(run.curve for run in comparison.runs):
        return "<p>No evaluation has been logged yet.</p>"
    first = figures.panel_splits(comparison)
    splits = [
        f'<button type="button" data-split="{i}" aria-pressed="{str(split in first).lower()}">{escape(split)}</button>'
        for i, split in enumerate(comparison.splits)
    ]
    looks, names = canvas.styles(comparison), canvas.series(comparison)
    swatches = list(dict.fromkeys(_swatch(looks[variant], name) for variant, name in names.items()))
    lines = [
        f'<button type="button" data-series="{i}" aria-pressed="true">{swatch}</button>'
        for i, swatch in enumerate(swatches)
    ]
    groups = comparison.groups
    choice = ""
    if len(groups) > 1:
        options = "".join(
            f'<option value="{i}">{escape(figures.group_text(comparison, group))}</option>'
            for i, group in enumerate(groups)
        )
        choice = f'<div><label for="group"><span>Setting</span></label><select id="group">{options}</select></div>'
    several = any(mean_curve(comparison, name, comparison.splits[0]).num_runs > 1 for name in comparison.variants)
    few = str(len(swatches) <= 4).lower()  # many single lines of many variants hide each other
    seeds = f'<button type="button" id="seeds" aria-pressed="{few}">single seeds</button>' if several else ""
    plots = "".join(f'<figure id="plot-{i}" class="plot" hidden></figure>' for i in range(len(splits)))
    caption = escape(figures.caption(comparison).replace("Thin lines: single seeds.", ""))
    if several:
        caption += " Thin lines: single seeds."
    return f"""<div class="controls"><div role="group" aria-label="splits"><span>Split</span>{"".join(splits)}</div>{choice}
<div role="group" aria-label="lines"><span>Lines</span>{"".join(lines)}{seeds}</div></div>
<noscript><p class="fine">The curves need JavaScript; the tables do not.</p></noscript>
<div id="plots">{plots}</div><p class="fine">{caption} Drag to zoom in, double-click for the whole.</p>"""


def _curve_data(comparison: Comparison) -> dict[str, Any]:
    """All that the script draws, in the units shown."""
    metric, shared = comparison.plan.metric, figures.panel_splits(comparison)
    unit = 100.0 if metric == "accuracy" else 1.0
    drawn = any(run.curve for run in comparison.runs)
    splits = []
    for split in comparison.splits if drawn else ():
        low, high, cut, above = figures.score_axis(comparison, shared if split in shared else [split])
        ceiling = comparison.ceiling(split)
        splits.append(
            {
                "title": escape(tables.split_words(comparison.plan, split)),
                "range": [unit * low, unit * high],
                "axis": tables.metric_label(metric) + (f" (axis cut at {low:.3g})".replace("-", "−") if cut else ""),
                "ceiling": None if ceiling is None else unit * ceiling,
                "ceiling_in_view": ceiling is not None and ceiling <= high,
                "above": _above(comparison, split, high) if above else "",
                "variants": [_variant_data(comparison, name, split, unit) for name in comparison.variants],
            }
        )
    last = max([step for run in comparison.runs for step, _ in run.curve] or [1]) or 1
    label = {"r2": "R²", "accuracy": "accuracy"}.get(metric, metric)
    data = {"splits": splits, "last": last, "label": escape(label), "percent": metric == "accuracy"}
    return data | _line_data(comparison, unit)


def _above(comparison: Comparison, split: str, high: float) -> str:
    rows, ceiling = comparison.rows_of(split), comparison.ceiling(split)
    words = []
    if ceiling is not None and ceiling > high:
        words.append(f"ceiling {tables.format_score(comparison.plan.metric, ceiling)}")
    if any(figure.mean > high for row in rows for figure in row.reported):
        words.append("reported figures")
    return f"above the axis: {', '.join(words)}" if words else ""


def _variant_data(comparison: Comparison, name: str, split: str, unit: float) -> dict[str, Any]:
    (colour, dash), names = canvas.styles(comparison)[name], canvas.series(comparison)
    mean, group = mean_curve(comparison, name, split), comparison.group(name)
    beside = sum(comparison.group(other) == group for other in comparison.variants)
    single = []
    for run in comparison.runs_of(name):
        steps, values = run_curve(run, split)
        label = escape(f"seed {run.seed}" if run.state == "finished" else f"seed {run.seed}, {run.state}")
        single.append({"name": label, "finished": run.state == "finished", "x": steps, "y": _shown(values, unit)})
    return {
        "name": escape(name),
        "series": list(dict.fromkeys(names.values())).index(names[name]),
        "group": comparison.groups.index(group),
        "colour": colour,
        "dash": dash,
        "runs": mean.num_runs,
        "x": mean.steps,
        "y": _shown(mean.mean, unit),
        "low": _shown(mean.low, unit),
        "high": _shown(mean.high, unit),
        "band": mean.num_runs >= figures.MIN_BAND_RUNS and beside <= figures.MAX_SPREAD_LINES,
        "seeds": single,
        "reported": [
            {
                "y": unit * figure.mean,
                "text": _minus(f"{figure.source}: {tables.format_reported(comparison.plan.metric, figure)}")
                + f"<br>{figure.steps:,} steps",
            }
            for figure in comparison.row(name, split).reported
        ],
    }


def _shown(values: Sequence[float], unit: float) -> list[float]:
    return [round(unit * value, 6) for value in values]
