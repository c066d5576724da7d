"""An experiment's figures, each as PNG and SVG for the screen and as PDF for print."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyla.report import canvas, tables
from hyla.report.canvas import DASHES, Size, check_matplotlib, panel_rows, save_screen, series, style, styles
from hyla.report.comparison import Comparison, Row, mean_curve, run_curve
from hyla.report.plan import LOWER_IS_BETTER, Setting
from hyla.report.statistics import Interval
from hyla.report.tables import axis_label, setting_text

__all__ = ["check_matplotlib", "draw_figures", "heat_map", "learning_curves", "scaling", "scaling_curves", "scores"]

MIN_BAND_RUNS = 3
"""A band of least and greatest is drawn from this many seeds on; below it, each seed has its own line."""

MAX_SPREAD_LINES = 4
"""With more lines than this in a panel, bands and single seeds would hide each other and are left out."""

LOWEST_R2 = -0.5
"""Axes of R2 are cut here or above: early in training it can be many thousands below zero."""

_INK, _SOFT, _GRID = "#222222", "#555555", "#E4E4E4"


def draw_figures(comparison: Comparison, folder: Path | str) -> list[Path]:
    """Draw into `folder` every figure that the plan asks for; scores and curves always."""
    folder, asked = Path(folder), comparison.plan.figures
    files = [*scores(comparison, folder / "scores"), *learning_curves(comparison, folder / "curves")]
    if "heat_map" in asked:
        files += heat_map(comparison, folder / "heat_map")
    if "scaling" in asked:
        files += scaling(comparison, folder / "scaling")
    return files


# --- axes -------------------------------------------------------------------------------------------------------------


def panel_splits(comparison: Comparison) -> tuple[str, ...]:
    """The splits to show side by side: the one that the experiment is about, and trained combinations or the next."""
    first = comparison.plan.reported_split
    others = [split for split in comparison.splits if split != first]
    second = ["train"] if "train" in others else others[:1]
    return (first, *second)


def score_axis(comparison: Comparison, splits: Sequence[str]) -> tuple[float, float, bool, bool]:
    """Range of the score axis shared by `splits`: (low, high, values lie below it, reference values lie above it).

    It holds every measured value, save R2 below `LOWEST_R2` that training left behind; then the axis starts just below
    the lowest value left.
    Reported figures and ceilings are taken in unless they lie so far above the curves that these would be flattened (the
    best value under a third of the way up).
    """
    rows = [row for row in comparison.rows if row.split in splits]
    chosen = {run.name: run for name in comparison.variants for run in comparison.runs_of(name)}
    curves = [(run.state, run_curve(run, split)[1]) for run in chosen.values() for split in splits]
    ends = [value for row in rows for value in row.values if value is not None]
    ends += [values[-1] for state, values in curves if values and state == "finished"]
    values = [*ends, *(value for _, values in curves for value in values)]
    references = [figure.mean for row in rows for figure in row.reported]
    references += [row.ceiling for row in rows if row.ceiling is not None]
    floor = min([LOWEST_R2, *(1.1 * end for end in ends)]) if comparison.plan.metric == "r2" else -float("inf")
    shown = [value for value in values if value >= floor]
    cut = len(shown) < len(values)
    low, high = min([0.0, *shown]), max([0.0, *shown])
    if comparison.plan.metric in LOWER_IS_BETTER and shown:  # far from 0, which nothing reaches
        margin = 0.05 * (max(shown) - min(shown)) or 0.5
        return min(shown) - margin, max(shown) + margin, False, False
    if cut:
        low -= 0.03 * (high - low)
        unit = 0.05 if low > -1 else 1.0
        low = max(floor, round(unit * math.floor(low / unit), 2))
    top = max([high, *references])
    above = bool(values) and high - min(low, 0.0) < (top - min(low, 0.0)) / 3
    if not above:
        high = top
    if high <= low:
        high = low + 1.0
    margin = 0.05 * (high - low)
    headroom = 3 * margin if above else margin  # for the words that say what lies above
    return low if cut or low == 0.0 else low - margin, high + headroom, cut, above


def final_range(comparison: Comparison, rows: Sequence[Row], intervals: bool) -> tuple[float, float]:
    """Range of an axis of final scores: every seed, reported figure and ceiling of `rows` and, where `intervals` are
    drawn, as much of them as fits into half of that again at either side (those of two seeds can be far wider)."""
    values = [value for row in rows for value in row.values if value is not None]
    values += [figure.mean for row in rows for figure in row.reported]
    values += [row.ceiling for row in rows if row.ceiling is not None]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = 0.5 * (high - low) or 0.05
    ends = [end for row in rows if intervals and row.summary.interval for end in row.summary.interval]
    low, high = max(min([low, *ends]), low - room), min(max([high, *ends]), high + room)
    if comparison.plan.metric == "accuracy":
        low, high = max(low, 0.0), min(high, 1.0)
    margin = 0.04 * (high - low) or 0.05
    return low - margin, high + margin


def _score_ticks(comparison: Comparison, axis: Any) -> None:
    axis.set_major_locator(_ticker().MaxNLocator(5))
    if comparison.plan.metric == "accuracy":
        axis.set_major_formatter(lambda value, _: f"{100 * value:.4g}")


def _caption(figure: Any, comparison: Comparison, size: Size, words: str) -> None:
    """The title, the budget and `words` under a figure for the screen."""
    if size.captioned:
        text = "\n".join(textwrap.wrap(f"{comparison.title}. {words}", 132))
        figure.supxlabel(text, fontsize=size.small, color="#444444", x=0.01, ha="left")


def _lost(comparison: Comparison) -> str:
    """`Without a score: 1 diverged, 2 not started.`, or nothing."""
    lost = tables.lost_text(comparison)
    return f"Without a score: {lost}." if lost else ""


def _optimistic(comparison: Comparison) -> str:
    return tables.selection_note(comparison) if comparison.plan.selection == "reported" else ""


# --- scores -----------------------------------------------------------------------------------------------------------


def scores(comparison: Comparison, path_stem: Path | str) -> tuple[Path, Path, Path]:
    """Every variant's final score on the split that the experiment is about: seeds, mean, interval, reported figures and
    the ideal observer's ceiling."""
    rows = comparison.rows_of(comparison.plan.reported_split)
    return canvas.save(
        path_stem,
        lambda size: (1.35 if size.captioned else 1.0) + (0.34 if size.captioned else 0.3) * len(rows),
        lambda figure, size: _draw_scores(figure, comparison, rows, size),
    )


def _draw_scores(figure: Any, comparison: Comparison, rows: Sequence[Row], size: Size) -> None:
    metric, looks, panel = comparison.plan.metric, styles(comparison), figure.subplots()
    low, high = final_range(comparison, rows, intervals=True)
    panel.set_xlim(low, high)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    names = [_two_lines(row.variant, 36 if size.captioned else 24) for row in rows]
    panel.set_yticks(range(len(rows)), names)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(axis="x", color=_GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    _score_ticks(comparison, panel.xaxis)
    label = tables.metric_label(metric)
    panel.set_xlabel(f"{tables.split_words(comparison.plan, rows[0].split)}: {label}" if size.captioned else label)
    for y, row in enumerate(rows):
        colour, numbers = looks[row.variant][0], row.summary
        if numbers.interval is not None:
            _draw_interval(panel, numbers.interval, y, colour)
        for figure_ in row.reported:
            spread = figure_.spread or 0.0
            panel.plot([figure_.mean - spread, figure_.mean + spread], [y + 0.24] * 2, color=colour, linewidth=0.6)
            panel.plot(figure_.mean, y + 0.24, "D", markersize=4.2, markerfacecolor="white", markeredgecolor=colour)
        shown = [value for value in row.values if value is not None]
        panel.plot(shown, [y] * len(shown), "o", color=colour, markersize=3.6, alpha=0.75, markeredgewidth=0)
        if numbers.mean is not None:
            panel.plot([numbers.mean] * 2, [y - 0.2, y + 0.2], color=colour, linewidth=2, solid_capstyle="butt")
        else:
            text = f"no score: {tables.seeds_text(row)}" if size.captioned else "no score"
            words = {"transform": panel.get_yaxis_transform(), "va": "center", "color": _SOFT}
            panel.text(0.01, y, text, fontsize=size.small, **words)
    ceiling = comparison.ceiling(rows[0].split)
    if ceiling is not None:
        panel.axvline(ceiling, color=_SOFT, linewidth=0.9, linestyle=(0, (1, 2)))
        panel.text(ceiling, -0.62, f"ceiling {tables.format_score(metric, ceiling)} ", fontsize=size.small, color=_SOFT,
                   ha="right", va="bottom")  # fmt: skip
    words = ["Dots: seeds. Bars: their means. Lines: 95% intervals of the mean (Student's t)."]
    columns = tables.reported_columns(rows)
    words += [f"Diamonds: reported by {source} at {steps:,} steps." for source, steps in columns]
    words += [_lost(comparison), _optimistic(comparison)]
    _caption(figure, comparison, size, " ".join(filter(None, words)))


def _two_lines(name: str, width: int) -> str:
    return textwrap.fill(name, width, max_lines=2, placeholder=" …", break_long_words=False)


def _draw_interval(panel: Any, interval: Interval, y: int, colour: str) -> None:
    """A line with ends; an arrow where it goes on beyond the axis."""
    left, right = panel.get_xlim()
    ends = [min(max(end, left), right) for end in interval]
    panel.plot(ends, [y, y], color=colour, linewidth=1.1, alpha=0.55)
    for end, seen, beyond in zip(interval, ends, "<>", strict=True):
        marker = "|" if end == seen else beyond
        panel.plot(seen, y, marker, color=colour, alpha=0.55, markersize=5, clip_on=False)


# --- learning curves --------------------------------------------------------------------------------------------------


def learning_curves(comparison: Comparison, path_stem: Path | str) -> tuple[Path, Path, Path]:
    """Scores against steps. One panel per split; where variants differ in axes, one per setting of the axes, all on the
    split that the experiment is about."""
    panels = curve_panels(comparison)

    def height(size: Size) -> float:
        rows = _curve_grid(comparison, len(panels), size)[0]
        per_row = (3.0 if rows == 1 else 1.75) if size.captioned else 1.7
        return per_row * rows + _legend_height(comparison, size) + (0.6 if size.captioned else 0.2)

    return canvas.save(path_stem, height, lambda figure, size: _draw_curves(figure, comparison, panels, size))


def curve_panels(comparison: Comparison) -> list[tuple[str, str, list[str]]]:
    """(title, split, variants) of each panel."""
    if len(comparison.groups) == 1:
        names = list(comparison.variants)
        return [(tables.split_words(comparison.plan, split), split, names) for split in panel_splits(comparison)]
    order = [axis_values(comparison, axis) for axis in comparison.plan.axes]
    panels = []
    for group in sorted(comparison.groups, key=lambda g: [values.index(v) for values, v in zip(order, g, strict=True)]):
        names = [name for name in comparison.variants if comparison.group(name) == group]
        panels.append((group_text(comparison, group), comparison.plan.reported_split, names))
    return panels


def _curve_grid(comparison: Comparison, count: int, size: Size) -> tuple[int, int]:
    """(rows, columns) of the panels: a column per value of the last axis where that fills a grid and fits."""
    if comparison.plan.axes:
        last = len(axis_values(comparison, comparison.plan.axes[-1]))
        if size.columns >= last > 1 and count % last == 0:
            return count // last, last
    return panel_rows(count, size) if size.captioned or count > 2 else (count, 1)


def group_text(comparison: Comparison, group: Sequence[Setting]) -> str:
    """`held-out fraction 0.7, points 32`."""
    pairs = zip(comparison.plan.axes, group, strict=True)
    return ", ".join(f"{axis_label(axis)} {tick_text(value)}" for axis, value in pairs)


def caption(comparison: Comparison) -> str:
    """What the lines of the learning curves are, and which runs they leave out."""
    shown = {run.name: run for name in comparison.variants for run in comparison.runs_of(name)}
    counts = [sum(run.state == "finished" for run in comparison.runs_of(name)) for name in comparison.variants]
    parts = ["Lines: one seed each." if max(counts) == 1 else "Lines: mean over the seeds that finished."]
    few = any(len(names) <= MAX_SPREAD_LINES for _, _, names in curve_panels(comparison))
    if few and any(count >= MIN_BAND_RUNS for count in counts):
        parts.append(f"Bands (from {MIN_BAND_RUNS} seeds on): least to greatest over them.")
    if few and any(1 < count < MIN_BAND_RUNS for count in counts):
        parts.append("Thin lines: single seeds.")
    splits = panel_splits(comparison) if len(comparison.groups) == 1 else (comparison.plan.reported_split,)
    low, high, _, _ = score_axis(comparison, splits)
    figures = [figure for row in comparison.rows if row.split in splits for figure in row.reported]
    seen = dict.fromkeys((figure.source, figure.steps) for figure in figures if low <= figure.mean <= high)
    reported = [f"{source} at {steps:,} steps" for source, steps in seen]
    if reported:
        parts.append(f"Dashed ticks at the right: reported by {' and '.join(reported)}.")
    if any((ceiling := comparison.ceiling(split)) is not None and ceiling <= high for split in splits):
        parts.append("Dotted across: the ideal observer's ceiling.")
    lost = [run.state for run in shown.values() if run.state != "finished" and run.curve]
    if lost:
        named = " and ".join(f"{lost.count(state)} {state}" for state in dict.fromkeys(lost))
        parts.append(f"Thin dotted lines ending in a cross: {named}, not in the mean.")
    return " ".join([*parts, _optimistic(comparison)]).strip()


def _draw_curves(figure: Any, comparison: Comparison, panels: Sequence[tuple[str, str, list[str]]], size: Size) -> None:
    splits = list(dict.fromkeys(split for _, split, _ in panels))
    num_rows, num_columns = _curve_grid(comparison, len(panels), size)
    grid = figure.subplots(num_rows, num_columns, sharey=True, sharex=True, squeeze=False)
    low, high, cut, above = score_axis(comparison, splits)
    runs = [run for name in comparison.variants for run in comparison.runs_of(name)]
    last = max([step for run in runs for step, _ in run.curve] or [1])
    narrow = num_columns > 2 or (num_columns > 1 and not size.captioned)
    lines: dict[str, Any] = {}
    for place, panel in enumerate(grid.flat):
        if place >= len(panels):
            panel.set_axis_off()
            continue
        title, split, names = panels[place]
        panel.set_ylim(low, high)
        panel.set_xlim(0, last or 1)
        title = title.replace(", ", "\n") if narrow and comparison.plan.axes else title
        panel.set_title(title, loc="left", fontsize=9 if size.captioned and not narrow else 8, color=_INK)
        panel.grid(axis="y", color=_GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_locator(_ticker().MaxNLocator(2 if narrow else 5, integer=True))
        panel.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        _score_ticks(comparison, panel.yaxis)
        with_spread = len(names) <= MAX_SPREAD_LINES
        for name in names:
            lines.setdefault(series(comparison)[name], _draw_variant(panel, comparison, name, split, with_spread))
        _draw_references(panel, comparison, names, split, above, size, labelled=len(panels) <= 2)
        if place + num_columns >= len(panels):
            panel.set_xlabel("training steps")
            panel.tick_params(labelbottom=True)
    label = tables.metric_label(comparison.plan.metric)
    figure.supylabel(f"{label} (axis cut at {low:.3g})".replace("-", "−") if cut else label, fontsize=8, color=_INK)
    begun = [name for name in comparison.variants if any(run.curve for run in comparison.runs_of(name))]
    shown = {series(comparison)[name] for name in begun}  # no line, no entry
    _legend(figure, comparison, {name: line for name, line in lines.items() if name in shown} or lines, size)
    _caption(figure, comparison, size, caption(comparison))


def _legend(figure: Any, comparison: Comparison, lines: dict[str, Any], size: Size) -> None:
    columns = _legend_columns(comparison, size)
    figure.legend(lines.values(), lines, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.4)


def _legend_columns(comparison: Comparison, size: Size) -> int:
    names = set(series(comparison).values())
    each = 0.55 + 0.062 * max(len(name) for name in names)  # inches: the line and 8-point letters
    return max(1, min(len(names), 4, int(size.width / each)))


def _legend_height(comparison: Comparison, size: Size) -> float:
    return 0.17 * -(-len(set(series(comparison).values())) // _legend_columns(comparison, size))


def _draw_variant(panel: Any, comparison: Comparison, name: str, split: str, with_spread: bool) -> Any:
    """The variant's curves; returns the line of its mean."""
    colour, dash = styles(comparison)[name]
    mean = mean_curve(comparison, name, split)
    marker = {"marker": "o", "markersize": 3} if len(mean.steps) == 1 else {}
    (line,) = panel.plot(mean.steps, mean.mean, color=colour, linestyle=DASHES[dash], linewidth=1.6, **marker)
    if with_spread and mean.num_runs >= MIN_BAND_RUNS:
        panel.fill_between(mean.steps, mean.low, mean.high, color=colour, alpha=0.16, linewidth=0)
    for run in comparison.runs_of(name):
        steps, values = run_curve(run, split)
        if run.state == "finished" and with_spread and 1 < mean.num_runs < MIN_BAND_RUNS:
            panel.plot(steps, values, color=colour, linewidth=0.6, alpha=0.7)
        elif run.state != "finished" and steps:
            panel.plot(steps, values, color=colour, linewidth=0.8, linestyle=":")
            panel.plot(steps[-1:], values[-1:], color=colour, marker="x", markersize=5, markeredgewidth=1.1)
    return line


def _draw_references(
    panel: Any, comparison: Comparison, names: Sequence[str], split: str, above: bool, size: Size, labelled: bool
) -> None:
    """Reported figures as dashed ticks in the right margin and the ceiling as a dotted line, with their values if
    `labelled`."""
    metric, (low, high) = comparison.plan.metric, panel.get_ylim()
    rows = [comparison.row(name, split) for name in names]
    looks, ceiling = styles(comparison), comparison.ceiling(split)
    out_of_view = []
    if ceiling is not None and ceiling <= high:
        panel.axhline(ceiling, color=_SOFT, linewidth=0.9, linestyle=(0, (1, 2)))
        if labelled:
            words = {"xytext": (3, 2), "textcoords": "offset points", "fontsize": size.small, "color": _SOFT}
            panel.annotate(f"ceiling {tables.format_score(metric, ceiling)}", (0, ceiling), **words)
    elif ceiling is not None:
        out_of_view.append(f"ceiling {tables.format_score(metric, ceiling)}")
    marks = [(figure, looks[row.variant][0]) for row in rows for figure in row.reported]
    seen = [(figure, colour) for figure, colour in marks if low <= figure.mean <= high]
    places = canvas.spread_apart([figure.mean for figure, _ in seen], size.gap * (high - low))
    for (figure, colour), place in zip(seen, places, strict=True):
        across = {"transform": panel.get_yaxis_transform(), "clip_on": False}
        panel.plot([0.955, 1.015], [figure.mean] * 2, color=colour, linewidth=1.4, linestyle=(0, (2, 1)), **across)
        if not labelled:
            continue
        panel.plot([1.015, 1.035], [figure.mean, place], color=colour, linewidth=0.5, **across)
        text = f"{tables.format_score(metric, figure.mean)} {figure.source}"
        across = {"transform": panel.get_yaxis_transform(), "va": "center"}
        panel.text(1.04, place, text, color=colour, fontsize=size.small, **across)
    higher = [figure.mean for figure, _ in marks if figure.mean > high]
    if higher:
        ends = [tables.format_score(metric, value) for value in (min(higher), max(higher))]
        out_of_view.append(f"reported {ends[0]} to {ends[1]}" if len(higher) > 1 else f"reported {ends[0]}")
    if above and out_of_view:
        text = "above the axis: " + ", ".join(out_of_view)
        panel.text(0.99, 0.985, text, transform=panel.transAxes, ha="right", va="top", fontsize=size.small, color=_SOFT)


# --- heat map ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """Rows of the table on two axes: `cells[panel][y][x]`, None where no variant has these settings. The axis with more
    values lies across; variants that differ in a third axis are in panels of their own."""

    x: str
    y: str
    x_values: tuple[Setting, ...]
    y_values: tuple[Setting, ...]
    cells: dict[str, list[list[Row | None]]]


def heat_maps(comparison: Comparison) -> HeatMap:
    """The final scores on the split that the experiment is about, by the plan's first two axes."""
    values = {axis: axis_values(comparison, axis) for axis in comparison.plan.axes}
    y, x = sorted(comparison.plan.axes[:2], key=lambda axis: len(values[axis]))
    names, rest = series(comparison), comparison.plan.axes[2:]
    cells: dict[str, list[list[Row | None]]] = {}
    for row in comparison.rows_of(comparison.plan.reported_split):
        axes = comparison.variant(row.variant).axes
        others = [f"{axis_label(axis)} {tick_text(axes[axis])}" for axis in rest]
        title = ", ".join([names[row.variant], *others])
        panel = cells.setdefault(title, [[None for _ in values[x]] for _ in values[y]])
        panel[values[y].index(axes[y])][values[x].index(axes[x])] = row
    return HeatMap(x, y, tuple(values[x]), tuple(values[y]), cells)


def axis_values(comparison: Comparison, axis: str) -> list[Setting]:
    """The different values on an axis: numbers in order, others as the plan lists them."""
    found = list(dict.fromkeys(variant.axes[axis] for variant in comparison.plan.variants))
    return sorted(found, key=_as_number) if all(_is_number(value) for value in found) else found


def _is_number(value: Setting) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_number(value: Setting) -> float:
    assert isinstance(value, int | float)
    return float(value)


def shade_range(comparison: Comparison) -> tuple[float, float]:
    """The scores at the light and the dark end of the heat maps; R2 below 0 is as light as 0."""
    means = [m for row in comparison.rows_of(comparison.plan.reported_split) if (m := row.summary.mean) is not None]
    low, high = min(means, default=0.0), max(means, default=1.0)
    low = max(low, 0.0) if comparison.plan.metric == "r2" else low
    return (low, high) if high > low else (low, low + 1.0)


def shade(share: float) -> tuple[float, float, float]:
    """White-blue at 0 to dark blue at 1, in even steps of lightness."""
    light, dark = (0.93, 0.96, 0.99), (0.03, 0.25, 0.46)
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (a + share * (b - a) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def heat_map(comparison: Comparison, path_stem: Path | str) -> tuple[Path, Path, Path]:
    """A panel per mechanism, the mean over seeds in every cell; hatched where there is no result."""
    maps = heat_maps(comparison)

    def columns(size: Size) -> int:  # a cell needs about half an inch
        return max(1, min(len(maps.cells), int(size.width / (0.46 * len(maps.x_values) + 0.5))))

    def height(size: Size) -> float:
        rows = -(-len(maps.cells) // columns(size))
        return rows * (0.42 * len(maps.y_values) + 0.75) + (0.55 if size.captioned else 0.1)

    return canvas.save(
        path_stem, height, lambda figure, size: _draw_heat_map(figure, comparison, maps, columns(size), size)
    )


def _draw_heat_map(figure: Any, comparison: Comparison, maps: HeatMap, columns: int, size: Size) -> None:
    from matplotlib.patches import Rectangle

    low, high = shade_range(comparison)
    grid = figure.subplots(-(-len(maps.cells) // columns), columns, sharey=True, squeeze=False)
    for panel in grid.flat[len(maps.cells) :]:
        panel.set_axis_off()
    for panel, (title, rows) in zip(grid.flat, maps.cells.items(), strict=False):
        panel.set_title(title, loc="left", fontsize=8, color=_INK)
        panel.set_xlim(0, len(maps.x_values))
        panel.set_ylim(0, len(maps.y_values))
        for y, line in enumerate(rows):
            for x, row in enumerate(line):
                mean = None if row is None else row.summary.mean
                if mean is None:
                    look = {"facecolor": "#F4F4F4", "edgecolor": "#B8B8B8", "hatch": "////", "linewidth": 0}
                    panel.add_patch(Rectangle((x, y), 1, 1, **look))
                    continue
                share = (mean - low) / (high - low)
                panel.add_patch(Rectangle((x, y), 1, 1, facecolor=shade(share), edgecolor="white", linewidth=1))
                words = {"ha": "center", "va": "center", "color": "white" if share > 0.5 else _INK}
                text = tables.format_score(comparison.plan.metric, mean).replace("-", "−")
                lost = row is not None and row.lost
                panel.text(x + 0.5, y + 0.5, f"{text}†" if lost else text, fontsize=8, **words)
        for axis, values in ((panel.xaxis, maps.x_values), (panel.yaxis, maps.y_values)):
            axis.set_ticks([place + 0.5 for place in range(len(values))], [tick_text(value) for value in values])
            axis.set_tick_params(length=0)
        panel.spines[:].set_visible(False)
        panel.set_xlabel(axis_label(maps.x))
    for line in grid:
        line[0].set_ylabel(axis_label(maps.y))
    split = comparison.plan.reported_split
    where = tables.split_words(comparison.plan, split)
    words = f"{tables.metric_label(comparison.plan.metric)} on {where}, mean over seeds."
    cells = [row for panel in maps.cells.values() for line in panel for row in line]
    if any(row is None or row.summary.mean is None for row in cells):
        words += " Hatched: no result."
    if any(row is not None and row.summary.mean is not None and row.lost for row in cells):
        words += " †: not all seeds."
    _caption(figure, comparison, size, " ".join(filter(None, [words, _lost(comparison), _optimistic(comparison)])))


# --- scaling ----------------------------------------------------------------------------------------------------------


def scaling_axes(comparison: Comparison) -> list[str]:
    """The axes that something can be drawn against: those with more than one value, if there are any."""
    axes = list(comparison.plan.axes)
    return [axis for axis in axes if len(axis_values(comparison, axis)) > 1] or axes


def scaling_lines(comparison: Comparison, axis: str) -> list[list[Row]]:
    """Rows on the reported split that differ in `axis` alone, in its order; single rows only where nothing longer is."""
    order = axis_values(comparison, axis)
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in comparison.rows_of(comparison.plan.reported_split):
        axes = comparison.variant(row.variant).axes
        rest = tuple(value for name, value in axes.items() if name != axis)
        lines.setdefault((series(comparison)[row.variant], *rest), []).append(row)
    longest = max(len(line) for line in lines.values())
    kept = [line for line in lines.values() if len(line) > 1 or longest == 1]
    return [sorted(line, key=lambda row: order.index(comparison.variant(row.variant).axes[axis])) for line in kept]


def scaling(comparison: Comparison, path_stem: Path | str) -> tuple[Path, Path, Path]:
    """Final score against each axis of the plan: a panel per axis, a line per mechanism (and setting of the other axes)
    through the means, a point per seed."""
    axes = scaling_axes(comparison)

    def height(size: Size) -> float:
        return (
            (2.2 if size.captioned else 1.75) * panel_rows(len(axes), size)[0] + _legend_height(comparison, size) + 0.5
        )

    return canvas.save(path_stem, height, lambda figure, size: _draw_scaling(figure, comparison, size))


def _draw_scaling(figure: Any, comparison: Comparison, size: Size) -> None:
    axes, looks = scaling_axes(comparison), styles(comparison)
    num_rows, num_columns = panel_rows(len(axes), size)
    grid = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False)
    for panel in grid.flat[len(axes) :]:
        panel.set_axis_off()
    low, high = final_range(comparison, comparison.rows_of(comparison.plan.reported_split), intervals=False)
    lines: dict[str, Any] = {}
    ended = False
    for panel, axis in zip(grid.flat, axes, strict=False):
        values = axis_values(comparison, axis)
        numbers = axis_numbers(values)
        if is_logarithmic(values):
            panel.set_xscale("log")
        panel.set_xticks(numbers, [tick_text(value) for value in values])
        panel.minorticks_off()
        ends: list[tuple[float, str, str]] = []
        for rows in scaling_lines(comparison, axis):
            colour, dash = looks[rows[0].variant]
            at = [numbers[values.index(comparison.variant(row.variant).axes[axis])] for row in rows]
            for x, row in zip(at, rows, strict=True):
                shown = [value for value in row.values if value is not None]
                panel.plot([x] * len(shown), shown, "o", color=colour, markersize=2.6, alpha=0.55, markeredgewidth=0)
            means = [(x, m) for x, row in zip(at, rows, strict=True) if (m := row.summary.mean) is not None]
            (line,) = panel.plot(*zip(*means, strict=True) if means else ((), ()), color=colour,
                                 linestyle=DASHES[dash], linewidth=1.5)  # fmt: skip
            lines.setdefault(series(comparison)[rows[0].variant], line)
            if means:
                others = [v for a, v in comparison.variant(rows[0].variant).axes.items() if a != axis]
                ends.append((means[-1][1], ", ".join(map(tick_text, others)), colour))
        if len(ends) > len(lines):  # several lines of one mechanism: each ends in the values of the other axes
            places = canvas.spread_apart([end for end, _, _ in ends], size.gap * (high - low))
            for y, (_, text, colour) in zip(places, ends, strict=True):
                panel.text(1.02, y, text, transform=panel.get_yaxis_transform(), fontsize=size.small, color=colour,
                           va="center")  # fmt: skip
            ended = True
        ceiling = comparison.ceiling(comparison.plan.reported_split)
        if ceiling is not None:
            panel.axhline(ceiling, color=_SOFT, linewidth=0.9, linestyle=(0, (1, 2)))
        panel.set_ylim(low, high)
        panel.set_xlabel(axis_label(axis))
        panel.grid(color=_GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        _score_ticks(comparison, panel.yaxis)
    figure.supylabel(tables.metric_label(comparison.plan.metric), fontsize=8, color=_INK)
    _legend(figure, comparison, lines, size)
    split = comparison.plan.reported_split
    words = [f"Final score on {tables.split_words(comparison.plan, split)}. Dots: seeds. Lines: their means."]
    if ended:
        words.append("At the end of each line: the setting on the other axes.")
    if comparison.ceiling(split) is not None:
        words.append("Dotted: the ideal observer's ceiling.")
    _caption(figure, comparison, size, " ".join([*words, _lost(comparison), _optimistic(comparison)]).strip())


def is_logarithmic(values: Sequence[Setting]) -> bool:
    """Whether an axis of these values, in order, has a logarithmic scale: numbers that grow at least twofold in all."""
    if not all(_is_number(value) for value in values):
        return False
    first, last = _as_number(values[0]), _as_number(values[-1])
    return first > 0 and last >= 2 * first


def axis_numbers(values: Sequence[Setting]) -> list[float]:
    """Where the values of an axis lie on it: numbers as they are, anything else in even steps."""
    if all(_is_number(value) for value in values):
        return [_as_number(value) for value in values]
    return [float(place) for place in range(len(values))]


def tick_text(value: Setting) -> str:
    """A setting in few letters: `20M` for 20,000,000."""
    if _is_number(value) and _as_number(value) >= 1e5 and _as_number(value) % 1e5 == 0:
        return f"{_as_number(value) / 1e6:g}M"
    return setting_text(value)


# --- what `hyla bench scaling` draws ----------------------------------------------------------------------------------


def scaling_curves(
    points: Sequence[dict[str, Any]], exponents: dict[tuple[str, str], tuple[float, float]], path_stem: Path | str
) -> tuple[Path, Path]:
    """Draw step time and peak memory against every axis of `points` (dicts with mechanism, axis, value, step_ms, peak_mib),
    on logarithmic scales. exponents: (mechanism, axis) -> those fitted to time and memory, written beside the curves."""
    axes = list(dict.fromkeys(point["axis"] for point in points))

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, len(axes), squeeze=False, sharex="col", sharey="row")
        for column, axis in enumerate(axes):
            for row, (key, label) in enumerate((("step_ms", "step, ms"), ("peak_mib", "peak memory, MiB"))):
                panel = panels[row][column]
                panel.set_xscale("log", base=2)
                panel.set_yscale("log")
                panel.grid(color="#E3E6EA", linewidth=0.6)
                panel.set_axisbelow(True)
                texts = []
                for mechanism in dict.fromkeys(point["mechanism"] for point in points):
                    mine = [p for p in points if (p["mechanism"], p["axis"]) == (mechanism, axis)]
                    colour, dash = style(mechanism)
                    x, y = [p["value"] for p in mine], [max(p[key], 0.1) for p in mine]
                    panel.plot(x, y, color=colour, linestyle=DASHES[dash], marker="o", markersize=2.5, label=mechanism)
                    texts.append((f"{axis}^{exponents[mechanism, axis][row]:.2f}", colour))
                for place, (text, colour) in enumerate(texts):
                    panel.text(
                        0.05, 0.95 - 0.1 * place, text, color=colour, transform=panel.transAxes, va="top", fontsize=7
                    )
                if column == 0:
                    panel.set_ylabel(label)
                if row == 1:
                    panel.set_xlabel(axis)
                    ticks = [
                        p["value"] for p in points if p["axis"] == axis and p["mechanism"] == points[0]["mechanism"]
                    ]
                    panel.set_xticks(ticks, [str(tick) for tick in ticks])
                    panel.minorticks_off()
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)

    return save_screen(path_stem, (1.9 * len(axes) + 0.6, 4.2), draw)


def _ticker() -> Any:
    import matplotlib.ticker

    return matplotlib.ticker
