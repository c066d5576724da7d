"""Learning curves in print: one PNG and one SVG, and the colours that every figure and page of the report uses."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hyla.errors import MissingExtraError
from hyla.report import tables
from hyla.report.tables import Comparison

# One colour and dash for each mechanism, everywhere. Chosen so that any two keep apart for readers who are red-, green-
# or blue-blind, on white and on black; ablations are dashed as well.
STYLES: dict[str, tuple[str, str]] = {
    "softmax": ("#0072B2", "solid"),
    "linear": ("#009E73", "solid"),
    "linear_rms_head": ("#47AEEF", "dash"),
    "hyla": ("#D55E00", "solid"),
    "hyla_no_rms_head": ("#78AE14", "dash"),
    "hyla_linear": ("#B06EF3", "dash"),
    "hyla_linear_no_rms_head": ("#B09A8F", "dashdot"),
    "hyla_softmax": ("#7A22E6", "dashdot"),
    "hyla_plus": ("#A8327D", "solid"),
}
_OTHERS = ("#5F6B76", "#8A6A1F", "#3E7F86", "#96525A")
_DASHES = {"solid": "-", "dash": (0, (5, 1.6)), "dashdot": (0, (6, 1.4, 1.2, 1.4))}
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.7,
    "axes.labelcolor": "#222222",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "svg.hashsalt": "hyla",
}

MIN_BAND_RUNS = 3
"""A band of least and greatest is drawn from this many seeds on; below it, each seed has its own line."""

LOWEST_R2 = -0.5
"""Axes of R2 are cut here or above: early in training it can be many thousands below zero."""


def style(mechanism: str) -> tuple[str, str]:
    """Colour and dash (`solid`, `dash`, `dashdot`) of a mechanism; the same for the same name, also for unknown ones."""
    return STYLES.get(mechanism) or (_OTHERS[zlib.crc32(mechanism.encode()) % len(_OTHERS)], "solid")


def panel_splits(comparison: Comparison) -> tuple[str, ...]:
    """The splits to show side by side: held-out and trained combinations, or the first two there are."""
    wanted = tuple(split for split in ("held_out", "train") if split in comparison.splits)
    return wanted if len(wanted) == 2 else comparison.splits[:2]


def score_axis(comparison: Comparison, splits: Sequence[str]) -> tuple[float, float, bool, bool]:
    """Range of the score axis shared by `splits`: (low, high, values lie below it, reference values lie above it).

    It holds every measured value, save R2 below `LOWEST_R2` that training left behind; then the axis starts just below
    the lowest value left.
    Reported figures and ceilings are taken in unless they lie so far above the curves that these would be flattened (the
    best value under a third of the way up).
    """
    curves = [(run.state, tables.run_curve(run, split)[1]) for run in comparison.runs for split in splits]
    ends = [value for row in comparison.rows if row.split in splits for value in row.values if value is not None]
    ends += [values[-1] for state, values in curves if values and state == "finished"]
    values = [*ends, *(value for _, values in curves for value in values)]
    rows = [row for row in comparison.rows if row.split in splits]
    references = [figure.mean for row in rows for figure in row.reported]
    references += [row.ceiling for row in rows if row.ceiling is not None]
    floor = min([LOWEST_R2, *(1.1 * end for end in ends)]) if comparison.metric == "r2" else -float("inf")
    shown = [value for value in values if value >= floor]
    cut = len(shown) < len(values)
    low, high = min([0.0, *shown]), max([0.0, *shown])
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


def spread_apart(values: Sequence[float], gap: float) -> list[float]:
    """`values` moved as little as needed for neighbours to be at least `gap` apart; the order is kept."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        while len(groups) > 1 and _bottom(groups[-1], values, gap) - _top(groups[-2], values, gap) < gap - 1e-12:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(values)
    for group in groups:
        for place, i in enumerate(group):
            moved[i] = _bottom(group, values, gap) + place * gap
    return moved


def _bottom(group: Sequence[int], values: Sequence[float], gap: float) -> float:
    return sum(values[i] for i in group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[int], values: Sequence[float], gap: float) -> float:
    return _bottom(group, values, gap) + gap * (len(group) - 1)


def caption(comparison: Comparison) -> str:
    """What the lines of the learning curves are, and which runs they leave out."""
    runs = comparison.runs
    finished = [run for run in runs if run.state == "finished"]
    counts = {m: sum(run.mechanism == m for run in finished) for m in comparison.mechanisms}
    mean = "Lines: mean over the seeds that finished."
    parts = ["Lines: one seed each." if max(counts.values(), default=0) == 1 else mean]
    if any(count >= MIN_BAND_RUNS for count in counts.values()):
        parts.append(f"Bands (from {MIN_BAND_RUNS} seeds on): least to greatest over them.")
    if any(1 < count < MIN_BAND_RUNS for count in counts.values()):
        parts.append("Thin lines: single seeds.")
    low, high, _, _ = score_axis(comparison, panel_splits(comparison))
    figures = [
        figure for split in panel_splits(comparison) for row in comparison.rows_of(split) for figure in row.reported
    ]
    seen = dict.fromkeys((figure.source, figure.steps) for figure in figures if low <= figure.mean <= high)
    reported = [f"{source} at {steps:,} steps" for source, steps in seen]
    if reported:
        parts.append(f"Dashed ticks at the right: reported by {' and '.join(reported)}.")
    lost = [run.state for run in runs if run.state != "finished"]
    if lost:
        named = " and ".join(f"{lost.count(state)} {state}" for state in dict.fromkeys(lost))
        parts.append(f"Thin dotted lines ending in a cross: {named}, not in the mean.")
    return " ".join(parts)


def check_matplotlib() -> None:
    """Raise MissingExtraError if figures cannot be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing figures") from None


def learning_curves(comparison: Comparison, path_stem: Path | str) -> tuple[Path, Path]:
    """Draw scores against steps, held-out beside trained combinations, into `path_stem`.png (200 dpi) and .svg."""
    return _save(path_stem, (7.2, 3.7), lambda figure: _draw(figure, comparison))


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
                    panel.plot(x, y, color=colour, linestyle=_DASHES[dash], marker="o", markersize=2.5, label=mechanism)
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

    return _save(path_stem, (1.9 * len(axes) + 0.6, 4.2), draw)


def _save(path_stem: Path | str, size: tuple[float, float], draw: Callable[[Any], None]) -> tuple[Path, Path]:
    """Draw a figure of `size` inches into `path_stem`.png (200 dpi) and .svg."""
    check_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stem = Path(path_stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(png, dpi=200)
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def _draw(figure: Any, comparison: Comparison) -> None:
    splits = panel_splits(comparison)
    if not splits:
        figure.text(0.5, 0.5, "no evaluation was logged yet", ha="center", va="center", color="#555555")
        return
    axes = figure.subplots(1, len(splits), sharey=True, sharex=True, squeeze=False)[0]
    low, high, cut, above = score_axis(comparison, splits)
    last = max([step for run in comparison.runs for step, _ in run.curve] or [1]) or 1
    for panel, split in zip(axes, splits, strict=True):
        panel.set_ylim(low, high)
        panel.set_xlim(0, last)
        panel.set_title(tables.SPLIT_LABELS.get(split, split), loc="left", fontsize=9, color="#222222")
        panel.grid(axis="y", color="#E4E4E4", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.set_xlabel("training steps")
        panel.xaxis.set_major_locator(_ticker().MaxNLocator(5, integer=True))
        panel.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        if comparison.metric == "accuracy":
            panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}")
        for mechanism in comparison.mechanisms:
            _draw_mechanism(panel, comparison, mechanism, split)
        _draw_references(panel, comparison, split, last, above)
    label = tables.metric_label(comparison.metric)
    axes[0].set_ylabel(f"{label} (axis cut at {low:.3g})".replace("-", "−") if cut else label)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(labels), 4)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.4)
    figure.suptitle("")
    names = f"{comparison.task}, {comparison.budget} budget, {tables.steps_text(comparison.steps)}."
    figure.supxlabel(_wrapped(f"{names} {caption(comparison)}", 132), fontsize=6.5, color="#444444", x=0.01, ha="left")


def _draw_mechanism(panel: Any, comparison: Comparison, mechanism: str, split: str) -> None:
    colour, dash = style(mechanism)
    mean = tables.mean_curve(comparison, mechanism, split)
    marker = {"marker": "o", "markersize": 3} if len(mean.steps) == 1 else {}
    panel.plot(mean.steps, mean.mean, color=colour, linestyle=_DASHES[dash], linewidth=1.6, label=mechanism, **marker)
    if mean.num_runs >= MIN_BAND_RUNS:
        panel.fill_between(mean.steps, mean.low, mean.high, color=colour, alpha=0.16, linewidth=0)
    for run in comparison.runs:
        if run.mechanism != mechanism:
            continue
        steps, values = tables.run_curve(run, split)
        if run.state == "finished" and 1 < mean.num_runs < MIN_BAND_RUNS:
            panel.plot(steps, values, color=colour, linewidth=0.6, alpha=0.7)
        elif run.state != "finished" and steps:
            panel.plot(steps, values, color=colour, linewidth=0.8, linestyle=":")
            panel.plot(steps[-1:], values[-1:], color=colour, marker="x", markersize=5, markeredgewidth=1.1)


def _draw_references(panel: Any, comparison: Comparison, split: str, last: int, above: bool) -> None:
    """Reported figures as dashed ticks in the right margin, the ceiling as a dotted line."""
    low, high = panel.get_ylim()
    rows, ceiling = comparison.rows_of(split), comparison.ceiling(split)
    out_of_view = []
    if ceiling is not None and ceiling <= high:
        panel.axhline(ceiling, color="#555555", linewidth=0.9, linestyle=(0, (1, 2)))
        panel.annotate(
            f"ceiling {tables.format_score(comparison.metric, ceiling)}",
            (0, ceiling), xytext=(3, 2), textcoords="offset points", fontsize=6.5, color="#555555",
        )  # fmt: skip
    elif ceiling is not None:
        out_of_view.append(f"ceiling {tables.format_score(comparison.metric, ceiling)}")
    marks = [(figure, style(row.mechanism)[0]) for row in rows for figure in row.reported]
    seen = [(figure, colour) for figure, colour in marks if low <= figure.mean <= high]
    places = spread_apart([figure.mean for figure, _ in seen], 0.055 * (high - low))
    for (figure, colour), place in zip(seen, places, strict=True):
        across = {"transform": panel.get_yaxis_transform(), "clip_on": False}
        panel.plot([0.955, 1.015], [figure.mean] * 2, color=colour, linewidth=1.4, linestyle=(0, (2, 1)), **across)
        panel.plot([1.015, 1.035], [figure.mean, place], color=colour, linewidth=0.5, **across)
        text = f"{tables.format_score(comparison.metric, figure.mean)} {figure.source}"
        panel.text(1.04, place, text, color=colour, fontsize=6.5, va="center", transform=panel.get_yaxis_transform())
    higher = [figure.mean for figure, _ in marks if figure.mean > high]
    if higher:
        ends = [tables.format_score(comparison.metric, value) for value in (min(higher), max(higher))]
        out_of_view.append(f"reported {ends[0]} to {ends[1]}" if len(higher) > 1 else f"reported {ends[0]}")
    if above and out_of_view:
        text = "above the axis: " + ", ".join(out_of_view)
        panel.text(0.99, 0.985, text, transform=panel.transAxes, ha="right", va="top", fontsize=6.5, color="#555555")


def _ticker() -> Any:
    import matplotlib.ticker

    return matplotlib.ticker


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
