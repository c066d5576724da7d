"""What `decodability.json` says beside the scores: how linearly the parts of unseen tasks can be read from each layer, and
whether that goes with generalisation (P2)."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyla.errors import RunError
from hyla.report import canvas
from hyla.report.canvas import Size, styles
from hyla.report.comparison import Comparison
from hyla.report.plan import DECODABILITY, Plan
from hyla.report.statistics import summary
from hyla.report.tables import SPLIT_LABELS, Cells, format_mean, metric_label
from hyla.runs import read_json

TARGETS = {"task": "the task latent", "weights": "the teacher's weights"}
_INK, _SOFT, _GRID = "#222222", "#555555", "#E4E4E4"


@dataclass(frozen=True)
class Layer:
    """One layer of some runs. values: variant -> one R2 per run that has one; scores: the scores of the same runs."""

    name: str
    target: str
    values: Mapping[str, Sequence[float]]
    scores: Mapping[str, Sequence[float]]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(score, R2 of the probe) of every run."""
        return [pair for name in self.values for pair in zip(self.scores[name], self.values[name], strict=True)]


def read_decodability(folder: Path | str, plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """{run: rows} of the experiment in `folder`; empty where nothing was measured. RunError for a damaged file."""
    path = Path(folder) / DECODABILITY
    if "decodability" not in plan.figures or not path.exists():
        return {}
    found = read_json(path)
    rows = found.get("rows") if isinstance(found, dict) else None
    keys = {"layer", "depth", "target", "split", "r2"}
    sound = isinstance(rows, dict) and all(
        isinstance(lines, list) and all(isinstance(line, dict) and keys <= set(line) for line in lines)
        for lines in rows.values()
    )
    if not sound:
        raise RunError(f"{path} does not hold what `hyla reproduce` writes there: {{'rows': {{run: [...]}}}}")
    assert isinstance(rows, dict)
    return rows


def layers(comparison: Comparison, rows: Mapping[str, list[dict[str, Any]]]) -> list[Layer]:
    """Every layer and target, on the split that the experiment is about."""
    split = comparison.plan.reported_split
    depths = {(line["depth"], line["layer"]) for lines in rows.values() for line in lines}
    targets = [
        target for target in TARGETS if any(line["target"] == target for lines in rows.values() for line in lines)
    ]
    found = []
    for target in targets:
        for depth, name in sorted(depths):
            values: dict[str, list[float]] = {}
            scores: dict[str, list[float]] = {}
            for variant in comparison.variants:
                for run in comparison.runs_of(variant):
                    key = (depth, name, target, split)
                    lines = [
                        line["r2"]
                        for line in rows.get(run.name, [])
                        if (line["depth"], line["layer"], line["target"], line["split"]) == key
                    ]
                    score = run.scores.get(split)
                    if lines and lines[0] is not None and score is not None:
                        values.setdefault(variant, []).append(lines[0])
                        scores.setdefault(variant, []).append(score)
            if values:
                found.append(Layer("the encoding" if depth == 0 else f"layer {depth}", target, values, scores))
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(Pearson's r, Spearman's rank correlation); None for fewer than three pairs or where one side is constant."""
    if len(pairs) < 3:
        return None
    xs, ys = zip(*pairs, strict=True)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    return statistics.correlation(xs, ys), statistics.correlation(ranks(xs), ranks(ys))


def ranks(values: Sequence[float]) -> list[float]:
    """The place of every value in order, equal ones sharing the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def correlation_text(layer: Layer) -> str:
    """`r = 0.93, ranks 0.90 (12 runs)`."""
    found, count = correlation(layer.pairs), len(layer.pairs)
    if found is None:
        return f"no correlation ({count} runs)"
    return f"r = {found[0]:.2f}, ranks {found[1]:.2f} ({count} runs)".replace("-", "−")


def cells(comparison: Comparison, found: Sequence[Layer]) -> list[Cells]:
    """A table per target: variants in rows, layers in columns, mean and deviation over seeds of the probe's R2."""
    tables = []
    for target in dict.fromkeys(layer.target for layer in found):
        mine = [layer for layer in found if layer.target == target]
        head = [("variant", False), *((f"{layer.name}, R²", True) for layer in mine)]
        rows = []
        for variant in comparison.variants:
            numbers = [summary(list(layer.values.get(variant, ()))) for layer in mine]
            rows.append([variant, *(format_mean("r2", one.mean, one.standard_deviation) for one in numbers)])
        rows.append(["correlation with the score, over runs", *(correlation_text(layer) for layer in mine)])
        split = comparison.plan.reported_split
        where = SPLIT_LABELS.get(split, split)
        tables.append(
            Cells(f"Decodability of {TARGETS[target]} on {where}: ridge probes, mean ± sd", head, rows, set())
        )
    return tables


NOTE = (
    "Decodability: R² of a ridge probe (penalty 1) on 1,024 tasks of unseen combinations, fitted on 512 tasks of trained "
    "ones, from the activations at a task's last point. The encoding itself is decoded beside the layers: what can be "
    "read from it already, no layer has to its credit. A correlation over runs says nothing about causes, and runs of one "
    "variant are not independent of each other."
)


def draw(comparison: Comparison, found: Sequence[Layer], path_stem: Path | str) -> tuple[Path, Path, Path]:
    """A panel per target and hidden layer: every run's probe against its score."""
    hidden = [layer for layer in found if layer.name != "the encoding"]
    targets = list(dict.fromkeys(layer.target for layer in hidden))
    columns = max(sum(layer.target == target for layer in hidden) for target in targets)

    def height(size: Size) -> float:
        return (2.3 if size.captioned else 1.8) * len(targets) + (0.75 if size.captioned else 0.4)

    def panels(figure: Any, size: Size) -> None:
        grid = figure.subplots(len(targets), columns, squeeze=False, sharex=True)
        lines = {}
        for panel in grid.flat:
            panel.set_visible(False)
        for row, target in enumerate(targets):
            for panel, layer in zip(grid[row], (one for one in hidden if one.target == target), strict=False):
                panel.set_visible(True)
                lines |= _draw_panel(panel, comparison, layer, size)
                if row == len(targets) - 1:
                    panel.set_xlabel(f"{metric_label(comparison.plan.metric)}, {_split_text(comparison)}")
            grid[row][0].set_ylabel(f"R² of {TARGETS[target]}")
        shown = len(lines) if len(lines) <= 8 else 8
        figure.legend(
            list(lines.values())[:shown], list(lines)[:shown], loc="outside upper left", ncols=2 if len(lines) > 4 else 4,
            frameon=False, handlelength=1.0,
        )  # fmt: skip
        if size.captioned:
            words = "Every dot is a run: how well a ridge probe reads the task from a layer's activations on unseen "
            words += "combinations, against the score on them."
            figure.supxlabel(f"{comparison.title}.\n{words}", fontsize=size.small, color="#444444", x=0.01, ha="left")

    return canvas.save(path_stem, height, panels)


def _split_text(comparison: Comparison) -> str:
    split = comparison.plan.reported_split
    return SPLIT_LABELS.get(split, split)


def _draw_panel(panel: Any, comparison: Comparison, layer: Layer, size: Size) -> dict[str, Any]:
    """Draws one panel; returns a handle per variant."""
    handles = {}
    for variant, values in layer.values.items():
        colour, marker = look(comparison, variant)
        (handles[variant],) = panel.plot(
            layer.scores[variant],
            values,
            marker,
            color=colour,
            markersize=4.2,
            alpha=0.85,
            markeredgewidth=0,
            linestyle="",
        )
    panel.set_title(
        f"{layer.name}: {correlation_text(layer)}", loc="left", fontsize=8 if size.captioned else 7, color=_INK
    )
    panel.grid(color=_GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelbottom=True)
    return handles


MARKERS = "osD^vP"


def look(comparison: Comparison, variant: str) -> tuple[str, str]:
    """Colour and marker of a variant: shades from light to dark along the rows where all are of one mechanism."""
    names = list(comparison.variants)
    if len({one.mechanism for one in comparison.plan.variants}) > 1:
        return styles(comparison)[variant][0], MARKERS[names.index(variant) % len(MARKERS)]
    place = names.index(variant)
    share = place / max(len(names) - 1, 1)
    light, dark = (0.55, 0.76, 0.93), (0.02, 0.19, 0.38)
    shade = [a + share * (b - a) for a, b in zip(light, dark, strict=True)]
    return "#" + "".join(f"{math.floor(255 * part + 0.5):02X}" for part in shade), MARKERS[place % len(MARKERS)]


# --- what `hyla latents` shows of single runs --------------------------------------------------------------------------


def layers_csv(rows: Mapping[str, list[dict[str, Any]]]) -> str:
    """One line per run, layer, target and split."""
    keys = list(next(iter(rows.values()))[0])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys])
    writer.writerows([run, *(line[key] for key in keys)] for run, lines in rows.items() for line in lines)
    return text.getvalue()


def draw_layers(rows: Mapping[str, list[dict[str, Any]]], path_stem: Path | str) -> tuple[Path, Path]:
    """R2 of the probes layer by layer: a panel per target and split, a line per run with the interval of every point."""
    every = [line for lines in rows.values() for line in lines]
    targets, splits = (list(dict.fromkeys(line[key] for line in every)) for key in ("target", "split"))
    names = dict(
        sorted({line["depth"]: "encoding" if line["depth"] == 0 else str(line["depth"]) for line in every}.items())
    )
    looks = {run: (canvas.OTHERS[i % len(canvas.OTHERS)], MARKERS[i % len(MARKERS)]) for i, run in enumerate(rows)}

    def draw_all(figure: Any) -> None:
        grid = figure.subplots(len(targets), len(splits), squeeze=False, sharex=True, sharey=True)
        for target, panels in zip(targets, grid, strict=True):
            for split, panel in zip(splits, panels, strict=True):
                for run, lines in rows.items():
                    mine = [line for line in lines if (line["target"], line["split"]) == (target, split)]
                    mine = [line for line in mine if line["r2"] is not None]
                    colour, marker = looks[run]
                    panel.plot([line["depth"] for line in mine], [line["r2"] for line in mine], marker=marker, color=colour,
                               markersize=4, linewidth=1.3, label=run)  # fmt: skip
                    for line in mine:
                        panel.plot(
                            [line["depth"]] * 2, [line["low"], line["high"]], color=colour, linewidth=1, alpha=0.6
                        )
                panel.set_title(
                    f"{TARGETS[target]}, {SPLIT_LABELS.get(split, split)}", loc="left", fontsize=8, color=_INK
                )
                panel.set_xticks(list(names), list(names.values()))
                panel.grid(color=_GRID, linewidth=0.6)
                panel.set_axisbelow(True)
                panel.tick_params(labelbottom=True)
            panels[0].set_ylabel("R² of a ridge probe")
        for panel in grid[-1]:
            panel.set_xlabel("hidden layer")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False)

    return canvas.save_screen(path_stem, (7.2, 0.6 + 2.1 * len(targets) + 0.17 * len(rows)), draw_all)
