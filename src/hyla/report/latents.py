"""Latent codes in tables and figures: what probes read from them, how they lie, and what they do to the answer.

All of it starts from one document, the analysis of the latent codes of one or several models: plain data as in
`analysis.json`. A number that is None there has no value (a score that is undefined, a rule that is absent); it is
shown as an en dash or hatched, never as 0.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyla.errors import RunError
from hyla.report.canvas import save_screen, style
from hyla.report.tables import SPLIT_LABELS
from hyla.runs import finite_or_none, write_json

Data = dict[str, Any]
"""A part of the analysis: the whole, a model, a layer or a score."""
Number = float | int

FORMAT = 1
NO_VALUE = "–"
SPLIT_ORDER = ("train", "validation", "held_out", "unseen_terms")
LOWEST = -0.5
"""Axes of scores end here: an R2 can be millions below zero. Lower scores are drawn at the end, with their number."""

# Twelve colours for classes, any two at least 0.066 apart in OKLab for readers who are red-, green- or blue-blind and
# 0.2 for others, none too light for white or too dark for black; the first ones are the farthest apart.
COLOURS = (
    "#005AF0", "#69F02D", "#FF3C69", "#78001E", "#B4D2D2", "#4B8700",
    "#F087FF", "#B40FB4", "#8787A5", "#E19600", "#4B0096", "#005A69",
)  # fmt: skip
_INK, _SOFT, _GRID = "#222222", "#555555", "#E4E4E4"
_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,  # names come from data; a $ is a $
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "hatch.linewidth": 0.5,
}
_WIDTH = 7.2  # inches, of every figure: two columns of a paper
_CAPTION = 6.5
_MOST_IN_CELLS = 9
"""A matrix of more classes than this has cells too small for numbers in print; the page gives them."""


# --- words and numbers ------------------------------------------------------------------------------------------------


def format_value(value: Number | None) -> str:
    """`value` to 3 places with a true minus sign; an en dash where there is none."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    text = f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return "0.000" if text == "-0.000" else text.replace("-", "−")


def format_short(value: Number | None) -> str:
    """`value` to 2 places, for cells; an en dash where there is none."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text.replace("-", "−")


def format_interval(low: Number | None, high: Number | None) -> str:
    """`0.912 to 0.951`; an en dash where either end has no value."""
    if NO_VALUE in (format_value(low), format_value(high)):
        return NO_VALUE
    return f"{format_value(low)} to {format_value(high)}"


def metric_label(metric: str) -> str:
    return "R²" if metric == "R2" else metric


def split_label(split: str) -> str:
    """What a split holds, in words; the name of a split that has none."""
    return SPLIT_LABELS.get(split, split)


def split_order(splits: Iterable[str]) -> list[str]:
    """Each split once: the known ones first, trained before held out."""
    known = SPLIT_ORDER
    return sorted(dict.fromkeys(splits), key=lambda split: known.index(split) if split in known else len(known))


def colour_of(number: int) -> str:
    """The colour of class `number`; they repeat after twelve."""
    return COLOURS[number % len(COLOURS)]


def mechanism_colour(mechanism: str) -> str:
    return style(mechanism)[0]


def model_label(model: Data) -> str:
    """`hyla, seed 0`: how a model is called in legends and sentences."""
    return f"{model['mechanism']}, seed {model['seed']}"


def model_labels(analysis: Data) -> list[str]:
    """A label for each model: the mechanism and seed, with task or name wherever that leaves two alike."""
    models = analysis["models"]
    labels = [model_label(model) for model in models]
    if len({model["task"] for model in models}) > 1:
        labels = [f"{model['task']}, {label}" for model, label in zip(models, labels, strict=True)]
    return [
        label if labels.count(label) == 1 else f"{label} ({model['name']}, step {model['step']:,})"
        for model, label in zip(models, labels, strict=True)
    ]


def count_of(count: int | None, tasks: int | None) -> str:
    """`4,096 pairs of 9 tasks`."""
    pairs = NO_VALUE if count is None else f"{count:,}"
    return f"{pairs} pairs" if tasks is None else f"{pairs} pairs of {tasks:,} task{'s' * (tasks != 1)}"


def checked(analysis: Data) -> Data:
    """`analysis` with None for every number that is not finite. Raises :class:`RunError` if it is of another format."""
    if analysis.get("format") != FORMAT:
        raise RunError(f"an analysis of latent codes of format {analysis.get('format')!r}: this version shows {FORMAT}")
    return finite_or_none(analysis)


# --- which scores matter ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbePanel:
    """One metric of one probe on one split, layer by layer. `series`: (index of the model, its score in every layer,
    None for a layer without one)."""

    task: str
    probe: str
    target: str
    train: str
    test: str
    metric: str
    series: tuple[tuple[int, tuple[Data | None, ...]], ...]

    @property
    def title(self) -> str:
        return f"{metric_label(self.metric)} of the {self.target}, {self.probe} probe"

    @property
    def counts(self) -> str:
        """Pairs and tasks of the test set, as one phrase for all the models that agree."""
        scores = [score for _, layers in self.series for score in layers if score is not None]
        return ", or ".join(dict.fromkeys(count_of(score["count"], score["tasks"]) for score in scores))

    @property
    def subtitle(self) -> str:
        return f"{split_label(self.test)}, {self.counts}"


def probe_panels(analysis: Data) -> tuple[ProbePanel, ...]:
    """The panels of a picture of scores by layer: on the split that matters most, the metric that does first.

    The split is `held_out`, else one that the probe was not fitted on, else what there is. Probes that only show what
    another implementation would have given (`... (reference)`) belong in the table.
    """
    found: dict[tuple[str, str, str, str, str, str], dict[int, list[Data | None]]] = {}
    for index, model in enumerate(analysis["models"]):
        test = _test_split(model)
        for at, layer in enumerate(model["layers"]):
            for score in layer["probes"]:
                if score["test"] != test or "(reference)" in score["probe"]:
                    continue
                key = (model["task"], *(score[name] for name in ("probe", "target", "train", "test", "metric")))
                series = found.setdefault(key, {}).setdefault(index, [None] * len(model["layers"]))
                series[at] = score
    panels = [ProbePanel(*key, tuple((i, tuple(v)) for i, v in series.items())) for key, series in found.items()]
    return tuple(sorted(panels, key=lambda panel: _rank(panel.target, panel.metric)))


def _test_split(model: Data) -> str | None:
    pairs = [(score["train"], score["test"]) for layer in model["layers"] for score in layer["probes"]]
    tests = [test for _, test in pairs]
    others = [test for train, test in pairs if test != train]
    return "held_out" if "held_out" in tests else next(iter(others + tests), None)


def _rank(target: str, metric: str) -> int:
    """Terms are read as the paper does, by R2 of their bits; rules by macro F1, since they are not equally frequent."""
    return 0 if (target, metric) == ("term bits", "R2") else 1 if metric == "macro F1" else 2


def main_scores(model: Data) -> tuple[Data | None, ...]:
    """For every layer, the score that the headline is about; empty where the model has no probe."""
    panels = probe_panels({"models": [model]})
    return panels[0].series[0][1] if panels else ()


def best_layer(model: Data) -> int | None:
    """The layer with the highest of :func:`main_scores`; None where none is defined."""
    values = [score["value"] if score is not None else None for score in main_scores(model)]
    defined = [(value, -at) for at, value in enumerate(values) if format_value(value) != NO_VALUE]
    return -max(defined)[1] if defined else None


def headline(model: Data) -> str:
    """A sentence or two, made from the numbers: where the operation is read best, how well, and against what."""
    scores, best = main_scores(model), best_layer(model)
    if best is None:
        return "no probe has a defined score, so nothing can be said about the codes."
    score = scores[best]
    assert score is not None
    of_layers = "the only layer" if len(scores) == 1 else f"the best of {len(scores)} layers on these same pairs"
    verb = "are" if score["target"].endswith("s") else "is"
    text = (
        f"the {score['target']} {verb} read best from {model['layers'][best]['title']} ({of_layers}), "
        f"{metric_label(score['metric'])} {format_value(score['value'])} "
        f"(95% interval {format_interval(score['low'], score['high'])}) "
        f"on {count_of(score['count'], score['tasks'])}, {split_label(score['test'])}. "
        f"Chance {format_value(score['chance'])}; fitted to shuffled labels {format_value(score['control'])}"
    )
    if score["control_high"] is not None:
        text += f", at most {format_value(score['control_high'])}"
    if None in (score["low"], score["chance"], score["control"]):
        return f"{text}. Without an interval, chance and control this cannot be judged."
    if score["low"] > max(score["chance"], score["control"], score["control_high"] or score["control"]):
        return f"{text}: the whole interval lies above both."
    return f"{text}: the interval does not clear both, so this shows nothing yet."


def crowded_spots(
    x: Sequence[Number], y: Sequence[Number], classes: Sequence[int], num_classes: int
) -> list[tuple[float, float] | None]:
    """For each class where its points crowd, the place for its number in a scatter; None where they are mixed with others.

    The place is the point of the class nearest to a third of its own, and counts if most of the points within that
    distance are of the class.
    """
    points_P2, class_P = np.stack([np.asarray(x, float), np.asarray(y, float)], 1), np.asarray(classes)
    spots: list[tuple[float, float] | None] = []
    for number in range(num_classes):
        mine = points_P2[class_P == number]
        if len(mine) < 3:
            spots.append(None)
            continue
        candidates = mine[:: len(mine) // 500 + 1]  # enough to find the crowd, and never all pairs of a large class
        distances = np.linalg.norm(candidates[:, None] - mine[None], axis=-1)
        reach = np.sort(distances, axis=1)[:, max(1, len(mine) // 3)]
        middle = candidates[int(reach.argmin())]
        near = np.linalg.norm(points_P2 - middle, axis=1) <= reach.min()
        share = float((class_P[near] == number).mean())
        spots.append((float(middle[0]), float(middle[1])) if share > 0.5 else None)
    return spots


def structure_text(layer: Data) -> list[str]:
    """A line per split: how far codes of one class lie together."""
    lines = []
    for one in layer["structure"]:
        inner = f"chance {format_value(one['purity_chance'])}, other tasks {format_value(one['purity_other_tasks'])}"
        if one.get("purity_inputs") is not None:
            inner += f", of inputs {format_value(one['purity_inputs'])}"
        name = one["split"].replace("_", "-")
        purity, silhouette = format_value(one["purity"]), format_value(one["silhouette"])
        lines.append(f"{name}: purity {purity} ({inner}), silhouette {silhouette}")
    return lines


STRUCTURE_NOTE = (
    "Purity: share of a code's nearest neighbours that are of its class, among all codes and among those of other tasks "
    "only; of inputs: the latter for the pairs' own input tokens. Silhouette: from −1 to 1. All are of the codes "
    "themselves, not of their projection."
)


# --- files of numbers -------------------------------------------------------------------------------------------------

_MODEL_KEYS = (
    "name", "run", "task", "mechanism", "seed", "step", "num_heads", "pairs", "keys", "splits", "label", "classes",
    "layer_similarity",
)  # fmt: skip
_LAYER_KEYS = ("name", "title", "probes", "per_class", "few_shot", "structure", "causal")
_SCORE_KEYS = (
    "probe", "target", "train", "test", "metric", "value", "low", "high", "chance", "control", "control_high",
    "count", "tasks", "note",
)  # fmt: skip
_CSV_MODEL_KEYS = ("name", "task", "mechanism", "seed", "step")


def write_scores(folder: Path | str, analysis: Data) -> tuple[Path, Path]:
    """Write `scores.json` (all but points, projections and mean codes) and `scores.csv` (a row per model, layer, probe
    and metric, unrounded, empty where there is no value) into `folder`."""
    analysis = checked(analysis)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    models = []
    for model in analysis["models"]:
        layers = [{key: layer[key] for key in _LAYER_KEYS} for layer in model["layers"]]
        others = model.get("others", [])
        models.append({key: model[key] for key in _MODEL_KEYS} | {"layers": layers, "others": others})
    document = {key: analysis[key] for key in ("format", "title", "command", "notes")} | {"models": models}
    as_json, as_csv = folder / "scores.json", folder / "scores.csv"
    write_json(as_json, document)
    with open(as_csv, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", *_CSV_MODEL_KEYS[1:], "layer", "layer_title", *_SCORE_KEYS])
        for model in analysis["models"]:
            for layer in [*model["layers"], *model.get("others", [])]:
                for score in layer["probes"]:
                    cells = [model[key] for key in _CSV_MODEL_KEYS] + [layer.get("name", ""), layer["title"]]
                    writer.writerow(cells + [score[key] for key in _SCORE_KEYS])
    return as_json, as_csv


# --- figures ----------------------------------------------------------------------------------------------------------


def write_figures(folder: Path | str, analysis: Data) -> tuple[Path, ...]:
    """Draw every figure that `analysis` has data for into `folder`, as PNG and SVG: `probes`, and for each model
    `NAME-projections`, `-mean-codes`, `-cosines`, `-rules` and `-causal`."""
    analysis = checked(analysis)
    folder = Path(folder)
    paths = [*probe_scores(analysis, folder / "probes")] if probe_panels(analysis) else []
    for model, stem in zip(analysis["models"], file_stems(analysis), strict=True):
        layers = model["layers"]
        paths += projections(model, folder / f"{stem}-projections")
        paths += mean_codes(model, folder / f"{stem}-mean-codes")
        paths += cosines(model, folder / f"{stem}-cosines")
        if any(layer["per_class"] for layer in layers):
            paths += rule_scores(model, folder / f"{stem}-rules")
        if any(layer["causal"] for layer in layers):
            paths += causal_effects(model, folder / f"{stem}-causal")
    return tuple(paths)


def file_stems(analysis: Data) -> list[str]:
    """A file name for each model, without its ending: its name with nothing in it that a path could trip over."""
    stems: list[str] = []
    for model in analysis["models"]:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model["name"]).strip("-.") or "model"
        free = (f"{stem}-{number}" if number > 1 else stem for number in itertools.count(1))
        stems.append(next(name for name in free if name not in stems))
    return stems


def probe_scores(analysis: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """Scores of probes by layer, for all models: interval, chance, and the control that is fitted to shuffled labels."""
    panels, labels = probe_panels(analysis), model_labels(analysis)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)

    def draw(figure: Any) -> None:
        axes = _grid(figure, rows, columns, len(panels))
        for place, panel in zip(axes, panels, strict=True):
            _draw_scores(place, analysis, panel)
        handles = [_marker(mechanism_colour(model["mechanism"]), "o") for model in analysis["models"]]
        handles += [_marker(_SOFT, "s", hollow=True), _line(_SOFT)]
        names = [*labels, "fitted to shuffled labels", "chance"]
        _legend(figure, handles, names, columns=min(4, len(names)))
        _caption(
            figure,
            "Bars: 95% intervals. Squares: mean of the controls, with a line up to the largest. Dashes: chance. "
            f"Scores below {format_value(LOWEST)} are drawn at the edge, with their number; undefined ones are left out.",
        )

    return _save(path_stem, (_WIDTH if columns > 1 else 4.6, 2.75 * rows + 0.75), draw)


def _draw_scores(axes: Any, analysis: Data, panel: ProbePanel) -> None:
    axes.set_title(f"{panel.title}\n", fontsize=8.5)
    axes.annotate(
        panel.subtitle, (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points",
        fontsize=_CAPTION, color=_SOFT,
    )  # fmt: skip
    step = min(0.16, 0.7 / len(panel.series))
    lowest = 0.0
    for place, (index, scores) in enumerate(panel.series):
        colour = mechanism_colour(analysis["models"][index]["mechanism"])
        offset = (place - (len(panel.series) - 1) / 2) * step
        shown = [(at + offset, score) for at, score in enumerate(scores) if score is not None]
        shown = [(x, score) for x, score in shown if format_value(score["value"]) != NO_VALUE]
        axes.plot([x for x, _ in shown], [max(s["value"], LOWEST) for _, s in shown], color=colour, linewidth=0.8)
        for x, score in shown:
            value, chance, control = score["value"], score["chance"], score["control"]
            inside = [v for v in (value, score["low"], chance, control) if v is not None]
            lowest = min([lowest, *inside])
            if chance is not None:
                axes.plot([x - step / 2, x + step / 2], [max(chance, LOWEST)] * 2, color=_SOFT, linewidth=1, zorder=1)
            if control is not None:
                top = score["control_high"] if score["control_high"] is not None else control
                beside = x + 0.3 * step
                axes.plot([beside] * 2, [max(control, LOWEST), max(top, LOWEST)], color=colour, linewidth=0.8, zorder=2)
                axes.plot([beside], [max(control, LOWEST)], "s", color=colour, markersize=3.2, markerfacecolor="white")
            if value < LOWEST:
                axes.plot([x], [LOWEST], "v", color=colour, markersize=5, clip_on=False)
                axes.annotate(
                    format_value(value), (x, LOWEST), xytext=(0, 5), textcoords="offset points", ha="center",
                    fontsize=_CAPTION, color=colour,
                )  # fmt: skip
                continue
            if score["low"] is not None and score["high"] is not None:
                axes.plot([x, x], [max(score["low"], LOWEST), score["high"]], color=colour, linewidth=1.4)
            axes.plot([x], [value], "o", color=colour, markersize=4.5)
    layers = max((analysis["models"][i]["layers"] for i, _ in panel.series), key=len)
    axes.set_xticks(range(len(layers)), _layer_names(layers))
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_ylim(-0.02 if lowest >= 0 else max(LOWEST, lowest - 0.05), 1.02)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def projections(model: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """A scatter of the projected codes for each layer, coloured by class, with a marker for each split."""
    points, classes, layers = model["points"], model["classes"], model["layers"]
    class_P, split_P = np.asarray(points["class"], int), np.asarray(points["split"])
    splits = split_order(points["split"])
    columns = min(2 if len(layers) <= 4 else 3, len(layers))
    rows = math.ceil(len(layers) / columns)
    legend_columns = 4 if max(map(len, classes), default=0) <= 16 else 3
    legend_rows = math.ceil((len(classes) + len(splits)) / legend_columns)

    def draw(figure: Any) -> None:
        for axes, layer in zip(_grid(figure, rows, columns, len(layers)), layers, strict=True):
            found = layer["projection"]
            x, y = np.asarray(found["x"], float), np.asarray(found["y"], float)
            colours = np.array([colour_of(number) for number in points["class"]], dtype=object)
            for place, split in enumerate(splits):
                mine = split_P == split
                axes.scatter(
                    x[mine], y[mine], s=(8, 13)[place > 0], marker=_MARKERS[place % len(_MARKERS)],
                    c=list(colours[mine]), linewidths=0.2, edgecolors=_INK if place else "none", alpha=(0.7, 1)[place > 0],
                )  # fmt: skip
            for number, spot in enumerate(crowded_spots(x.tolist(), y.tolist(), points["class"], len(classes))):
                if spot is not None:
                    _number(axes, spot, str(number + 1))
            lines = structure_text(layer)
            axes.set_title(layer["title"], fontsize=9, pad=5 + 8.5 * len(lines))
            axes.annotate(
                "\n".join(lines), (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points",
                fontsize=6 if columns < 3 else 5.2, color=_SOFT,
            )  # fmt: skip
            axes.set_aspect("equal", adjustable="datalim")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
            axes.spines[:].set_color("#CCCCCC")
        counts = np.bincount(class_P, minlength=len(classes))
        handles = [_marker(colour_of(number), "o", size=5) for number in range(len(classes))]
        handles += [_marker(_SOFT, _MARKERS[place % len(_MARKERS)], size=4.5) for place in range(len(splits))]
        names = [f"{i + 1} {name} ({counts[i]:,})" for i, name in enumerate(classes)]
        names += [f"{split_label(split)} ({int((split_P == split).sum()):,})" for split in splits]
        _legend(figure, handles, names, columns=legend_columns)
        names_of_methods = [layer["projection"]["method"] for layer in layers]
        methods = dict.fromkeys(METHODS.get(name) or str(name) for name in names_of_methods)
        repeat = " Colours repeat after twelve classes." if len(classes) > len(COLOURS) else ""
        _caption(
            figure,
            f"{model_label(model)}: {' and '.join(methods)} of the latent codes, a point per pair ({model['pairs']}). In "
            f"brackets: points shown. A number stands where most points are of its class. {STRUCTURE_NOTE}{repeat}",
        )

    return _save(path_stem, (_WIDTH, rows * (3.5 if columns < 3 else 2.7) + 0.2 * legend_rows + 0.5), draw)


METHODS = {"tsne": "t-SNE", "pca": "PCA", "umap": "UMAP", "none": "plot"}
_MARKERS = ("o", "^", "s", "D")


def code_limits(model: Data) -> dict[str, float]:
    """Where the scale of each layer's mean codes ends: the same for all, so that a weak layer looks weak, unless layers
    differ more than twenty-fold."""
    own = {
        layer["name"]: _limit(_matrix(layer["mean_codes"]["values"], len(model["classes"]), _num_codes(model)))
        for layer in model["layers"]
    }
    top, shared = max(own.values()), max(own.values()) <= 20 * min(own.values())
    return dict.fromkeys(own, top) if shared else own


def _num_codes(model: Data) -> int:
    return model["num_heads"] * len(model["keys"])


def mean_codes(model: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """A heat map for each layer: the mean code of every class, heads as columns, grouped by key."""
    layers, classes, keys = model["layers"], model["classes"], model["keys"]
    num_heads = model["num_heads"]
    num_columns = _num_codes(model)
    height = max(0.145 * len(classes), 0.8) + 0.52
    limits = code_limits(model)
    scale = (
        "One scale for all layers"
        if len(set(limits.values())) == 1
        else "A scale for each layer, since they differ more than twenty-fold"
    )

    def draw(figure: Any) -> None:
        panels = _grid(figure, len(layers), 1, len(layers))
        for axes, layer in zip(panels, layers, strict=True):
            found = layer["mean_codes"]
            values_CN = _matrix(found["values"], len(classes), num_columns)
            limit = limits[layer["name"]]
            image = axes.imshow(
                values_CN, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest"
            )
            _hatch(axes, values_CN)
            names = [f"{name} ({_count(count)})" for name, count in zip(classes, found["counts"], strict=True)]
            axes.set_yticks(range(len(classes)), names, fontsize=6.5)
            every = 1 if num_columns <= 24 else 4
            heads = [head for head in range(num_heads) if head == 0 or (head + 1) % every == 0]
            ticks = [key * num_heads + head for key in range(len(keys)) for head in heads]
            axes.set_xticks(ticks, [str(head + 1) for _ in keys for head in heads], fontsize=6)
            for key, name in enumerate(keys):
                axes.text((key + 0.5) * num_heads - 0.5, -0.72, name, ha="center", va="bottom", fontsize=7, color=_SOFT)
                if key:
                    axes.axvline(key * num_heads - 0.5, color="white", linewidth=2.5)
            axes.set_title(f"{layer['title']}\n", fontsize=8.5)
            _bare(axes)
            bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=9, fraction=0.03)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=6)
        panels[-1].set_xlabel("head", fontsize=7)
        splits = " and ".join(dict.fromkeys(split_label(layer["mean_codes"]["split"]) for layer in layers))
        _caption(
            figure,
            f"{model_label(model)}: mean latent code of every {model['label']} ({model['pairs']}), {splits}; in brackets "
            f"the number of pairs. {scale}, symmetric about 0. Hatched: no such pair.",
        )

    width = min(_WIDTH, max(4.4, 2.6 + 0.3 * num_columns))
    return _save(path_stem, (width, height * len(layers) + 0.6), draw)


def cosines(model: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """Cosine between the mean codes of each two classes, a matrix per layer, and how alike these matrices are."""
    layers, similarity = model["layers"], model["layer_similarity"]
    titles = [layer["title"] for layer in layers]
    matrices = [_matrix(layer["cosines"], len(model["classes"]), len(model["classes"])) for layer in layers]
    with_similarity = bool(similarity) and len(layers) > 2

    def draw(figure: Any) -> None:
        axes = _grid(figure, math.ceil((len(layers) + with_similarity) / 2), 2, len(layers) + with_similarity)
        image = None
        for at, (place, title, values_CC) in enumerate(zip(axes, titles, matrices, strict=False)):
            image = place.imshow(values_CC, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            _matrix_labels(place, model["classes"], names=at % 2 == 0)
            _cell_numbers(place, values_CC, 1.0)
            place.set_title(title, fontsize=8.5)
        if with_similarity:
            values_LL = _matrix(similarity, len(layers), len(layers))
            axes[-1].imshow(values_LL, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            _cell_numbers(axes[-1], values_LL, 1.0)
            axes[-1].set_xticks(range(len(layers)), [str(at + 1) for at in range(len(layers))], fontsize=6.5)
            axes[-1].set_yticks(range(len(layers)), titles, fontsize=6.5)
            axes[-1].set_title("correlation of layers", fontsize=8.5)
            _bare(axes[-1])
        _bar(figure, image, axes, "cosine")
        text = (
            f"{model_label(model)}: cosine between the mean codes of each two classes ({model['label']}). "
            "Hatched: undefined, a class is absent."
        )
        if with_similarity:
            text += " Last panel: correlation of those cosines between layers."
        elif similarity and len(layers) == 2:
            text += f" Correlation of these cosines between the two layers: {format_value(similarity[0][1])}."
        _caption(figure, text if len(model["classes"]) <= _MOST_IN_CELLS else f"{text} The page gives the numbers.")

    rows = math.ceil((len(layers) + with_similarity) / 2)
    return _save(path_stem, (_WIDTH, 2.75 * rows + 0.4), draw)


def rule_scores(model: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """F1 of every class in every layer, with the macro average underneath."""
    layers, classes = model["layers"], model["classes"]
    f1_CL, counts = rule_table(model)
    panel = next((panel for panel in probe_panels({"models": [model]}) if panel.metric == "macro F1"), None)
    macro = [score["value"] if score else None for score in panel.series[0][1]] if panel else []
    rows = [*f1_CL, macro] if any(value is not None for value in macro) else f1_CL
    names = [f"{name} ({_count(count)})" for name, count in zip(classes, counts, strict=True)]
    names += ["macro average"] * (len(rows) - len(f1_CL))
    values_RL = _matrix(rows, len(rows), len(layers))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(values_RL, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        _cell_numbers(axes, values_RL, 1.0, always=True, size=7.5)
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.set_xticks(range(len(layers)), _layer_names(layers), fontsize=7)
        if len(rows) > len(f1_CL):
            axes.axhline(len(f1_CL) - 0.5, color="white", linewidth=4)
        axes.xaxis.tick_top()
        _bare(axes)
        _caption(
            figure,
            f"{model_label(model)}: F1 of every {model['label']} by the logistic probe; in brackets the pairs tested. "
            f"Hatched: undefined.",
        )

    return _save(path_stem, (min(_WIDTH, 2.2 + 0.75 * max(len(layers), 3)), 0.27 * len(rows) + 0.9), draw)


def rule_table(model: Data) -> tuple[list[list[float | None]], list[int | None]]:
    """F1 `[C, L]` of every class in every layer, and each class's number of pairs (None where no layer has it)."""
    found = [{one["class"]: one for one in layer["per_class"]} for layer in model["layers"]]
    f1_CL = [[one[name]["f1"] if name in one else None for one in found] for name in model["classes"]]
    counts = [next((one[name]["count"] for one in found if name in one), None) for name in model["classes"]]
    return f1_CL, counts


def causal_effects(model: Data, path_stem: Path | str) -> tuple[Path, Path]:
    """What replacing codes by mean codes does: a matrix per layer, and the control beside the effect."""
    layers = [layer for layer in model["layers"] if layer["causal"]]
    found = [layer["causal"] for layer in layers]
    classes = model["classes"]
    matrices = [_matrix(one["effect"], len(classes), len(classes)) for one in found]
    follows = any(one["follows"] is not None for one in found)
    unit = found[0]["effect_unit"]
    top = max((float(np.nanmax(m)) for m in matrices if np.isfinite(m).any()), default=1.0) or 1.0
    rows = math.ceil(len(layers) / 2)

    def draw(figure: Any) -> None:
        upper, lower = figure.subfigures(2, 1, height_ratios=[2.75 * rows, 2.3])
        axes, image = _grid(upper, rows, 2, len(layers)), None
        for at, (place, layer, values_CC) in enumerate(zip(axes, layers, matrices, strict=True)):
            image = place.imshow(values_CC, cmap="Blues", vmin=0, vmax=top, interpolation="nearest")
            _matrix_labels(place, classes, names=at % 2 == 0)
            _cell_numbers(place, values_CC, top)
            _diagonal(place, len(classes))
            place.set_title(layer["title"], fontsize=8.5)
            if at % 2 == 0:
                place.set_ylabel(f"{model['label']} of the pair", fontsize=7)
            place.set_xlabel("replaced by the mean code of", fontsize=7)
        _bar(upper, image, axes, unit)
        panels = lower.subplots(1, 1 + follows, squeeze=False)[0]
        _draw_effects(panels[0], layers, mechanism_colour(model["mechanism"]), unit)
        if follows:
            _draw_follows(panels[1], layers, mechanism_colour(model["mechanism"]), model["label"])
        splits = " and ".join(dict.fromkeys(split_label(one["split"]) for one in found))
        counts = ", or ".join(dict.fromkeys(count_of(one["count"], None) for one in found))
        _caption(
            lower,
            f"{model_label(model)}, {splits}, {counts}. Outlined: the control, codes replaced by the mean code of their "
            f"own {model['label']}. Bars: 95% intervals. Hatched: no such pair.",
        )

    return _save(path_stem, (_WIDTH, 2.75 * rows + 2.6), draw)


def _draw_effects(axes: Any, layers: Sequence[Data], colour: str, unit: str) -> None:
    for at, layer in enumerate(layers):
        one = layer["causal"]
        for x, value, face in ((at - 0.19, one["same"], "white"), (at + 0.19, one["other"], colour)):
            if value is None:
                axes.text(x, 0, NO_VALUE, ha="center", va="bottom")
                continue
            axes.bar(x, value, 0.34, facecolor=face, edgecolor=colour, linewidth=1)
            high = one["other_high"] if face == colour and one["other_high"] is not None else value
            axes.annotate(
                f"{value:.2f}",
                (x, max(value, high)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
        if one["other"] is not None and one["other_low"] is not None and one["other_high"] is not None:
            axes.plot([at + 0.19] * 2, [one["other_low"], one["other_high"]], color=_INK, linewidth=1)
    axes.set_xticks(range(len(layers)), _layer_names(layers))
    axes.set_title(unit, fontsize=8.5)
    axes.margins(y=0.14)
    handles = [_patch("white", colour), _patch(colour, colour)]
    axes.legend(
        handles, ["own mean code (control)", "another’s mean code"], fontsize=6.5, frameon=False, ncols=2,
        loc="lower left", bbox_to_anchor=(0, -0.32), borderaxespad=0,
    )  # fmt: skip


def _draw_follows(axes: Any, layers: Sequence[Data], colour: str, label: str) -> None:
    for at, layer in enumerate(layers):
        before, after = layer["causal"]["follows_before"], layer["causal"]["follows"]
        if before is not None and after is not None:
            axes.plot([at, at], [before, after], color=colour, linewidth=1, zorder=1)
        if before is not None:
            axes.plot([at], [before], "o", color=colour, markerfacecolor="white", markersize=5)
        if after is not None:
            axes.plot([at], [after], "o", color=colour, markersize=5)
            axes.annotate(format_short(after), (at, after), xytext=(6, -2), textcoords="offset points", fontsize=6.5)
    axes.set_xticks(range(len(layers)), _layer_names(layers))
    axes.set_xlim(-0.5, len(layers) - 0.5)
    shares = [layer["causal"][name] for layer in layers for name in ("follows", "follows_before")]
    axes.set_ylim(0, 1.15 * max([share for share in shares if share is not None], default=0.0) or 1.0)
    axes.set_title(f"share of answers that the other {label} gives", fontsize=8.5)
    handles = [_marker(colour, "o", hollow=True, size=5), _marker(colour, "o", size=5)]
    axes.legend(
        handles, ["codes as they are", "replaced"], fontsize=6.5, frameon=False, ncols=2, loc="lower left",
        bbox_to_anchor=(0, -0.32), borderaxespad=0,
    )  # fmt: skip


# --- parts of figures -------------------------------------------------------------------------------------------------


def _layer_names(layers: Sequence[Data]) -> list[str]:
    """Titles for an axis, or numbers where so many titles would run into each other."""
    return [layer["title"] if len(layers) <= 6 else str(at + 1) for at, layer in enumerate(layers)]


def _grid(figure: Any, rows: int, columns: int, used: int) -> list[Any]:
    """The first `used` of a grid of axes; the others are left blank."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[used:]:
        empty.set_visible(False)
    return axes[:used]


def _matrix(values: Sequence[Any] | None, rows: int, columns: int) -> np.ndarray:
    """`values` as floats `[rows, columns]`, NaN for None, also where a whole row or all of it is None."""
    if not values:
        return np.full((rows, columns), np.nan)
    lines = [[None] * columns if row is None else row for row in values]
    return np.array([[np.nan if value is None else value for value in row] for row in lines], dtype=float)


def _limit(values: np.ndarray) -> float:
    return (float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0) or 1.0


def _count(count: int | None) -> str:
    return NO_VALUE if count is None else f"{count:,}"


def _hatch(axes: Any, values: np.ndarray) -> None:
    """Cells without a value, in one patch wherever they are neighbours in a row."""
    from matplotlib.patches import Rectangle

    for row, empty in enumerate(np.isnan(values)):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], empty, [False]]).astype(int)))
        for start, stop in edges.reshape(-1, 2):
            spot = (start - 0.5, row - 0.5)
            axes.add_patch(
                Rectangle(spot, stop - start, 1, facecolor="#F4F4F4", edgecolor="#9A9A9A", hatch="//////", linewidth=0)
            )


def _cell_numbers(axes: Any, values: np.ndarray, top: Number, *, always: bool = False, size: Number = 6.2) -> None:
    """Numbers in the cells (to 2 places) where they have room, and hatching where there is none to give."""
    _hatch(axes, values)
    if len(values) > _MOST_IN_CELLS and not always:
        return
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        text = format_short(value)
        colour = "white" if abs(value) > 0.62 * top else _INK
        axes.text(column, row, text, ha="center", va="center_baseline", fontsize=size, color=colour)


def _matrix_labels(axes: Any, classes: Sequence[str], *, names: bool) -> None:
    """Rows by number and name (or number alone, where the panel to the left has the names), columns by number."""
    numbers = [str(i + 1) for i in range(len(classes))]
    rows = [f"{number} {name}" for number, name in zip(numbers, classes, strict=True)] if names else numbers
    axes.set_xticks(range(len(classes)), numbers, fontsize=6.5)
    axes.set_yticks(range(len(classes)), rows, fontsize=6.5)
    _bare(axes)


def _diagonal(axes: Any, size: int) -> None:
    from matplotlib.patches import Rectangle

    for at in range(size):
        axes.add_patch(Rectangle((at - 0.46, at - 0.46), 0.92, 0.92, fill=False, edgecolor=_INK, linewidth=0.7))


def _bare(axes: Any) -> None:
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)


def _bar(figure: Any, image: Any, axes: Sequence[Any], label: str) -> None:
    bar = figure.colorbar(image, ax=list(axes), fraction=0.025, pad=0.01, aspect=35)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6.5)
    bar.set_label(label, fontsize=7)


def _number(axes: Any, spot: tuple[float, float], text: str) -> None:
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    axes.text(*spot, text, fontsize=7.5, weight="bold", ha="center", va="center", color="black", bbox=box)


def _marker(colour: str, marker: str, *, hollow: bool = False, size: Number = 4.5) -> Any:
    from matplotlib.lines import Line2D

    face = "white" if hollow else colour
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markerfacecolor=face, markersize=size)


def _line(colour: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linewidth=1)


def _patch(face: str, edge: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=face, edgecolor=edge)


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str], *, columns: int) -> None:
    names = [
        f"\u200b{name}" if name.startswith("_") else name for name in names
    ]  # matplotlib drops a leading underscore
    figure.legend(
        handles, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=7, handletextpad=0.3,
        columnspacing=1.2,
    )  # fmt: skip


def _caption(figure: Any, text: str) -> None:
    width = int(20 * figure.get_figure(root=True).get_figwidth())
    lines = "\n".join(textwrap.wrap(" ".join(text.split()), width))
    figure.supxlabel(lines, fontsize=_CAPTION, color="#444444", x=0.01, ha="left")


def _save(path_stem: Path | str, size: tuple[Number, Number], draw: Callable[[Any], None]) -> tuple[Path, Path]:
    """Draw a figure of `size` inches into `path_stem`.png and .svg; the same data gives the same file."""
    # tight: what the layout of nested figures leaves outside, a tick label at the edge say, is kept
    return save_screen(path_stem, size, draw, _SETTINGS, bbox_inches="tight", pad_inches=0.05)
