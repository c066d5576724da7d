"""A support as a picture: which combinations of modules are trained on, and which are held out."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hyla.report.canvas import save_screen, style

MAX_SHOWN = 150
"""Combinations that are drawn one by one; for more, shares of pairs are."""

TRAINED, HELD_OUT = style("softmax")[0], style("hyla")[0]
_NAMES = {"trained on": TRAINED, "held out": HELD_OUT}
_EMPTY, _MISSING, _INK = "#EEF0F2", "#C9CED3", "#222222"


def draw_support(
    train: ArrayLike, held_out: ArrayLike, num_modules: int, path_stem: Path | str, title: str = ""
) -> tuple[Path, Path]:
    """Draw a support into `path_stem`.png and .svg.

    train, held_out: `[C, K]`, one row of modules per combination, filled up with -1. Up to MAX_SHOWN combinations are
    columns of a matrix with a row for each module. Of more, a matrix shows for each pair of modules the share of the
    combinations with both that is trained on (on its diagonal, of those with the module). Beside it stand the counts of
    combinations for each module.
    """
    parts = [_as_sets(rows, num_modules) for rows in (train, held_out)]
    cell = min(0.2, 4.6 / num_modules)
    if sum(map(len, parts)) <= MAX_SHOWN:
        shown = max(sum(map(len, parts)), 12)
        width = min(7.2, 2.6 + 0.2 * shown)
        height = 1.1 + num_modules * cell
        return save_screen(path_stem, (width, height), lambda figure: _matrix(figure, parts, num_modules, title))
    side = max(2.4, num_modules * cell)
    size = (side + 3.3, side + 0.9)
    return save_screen(path_stem, size, lambda figure: _pairs(figure, parts, num_modules, title))


def _as_sets(rows: ArrayLike, num_modules: int) -> list[tuple[int, ...]]:
    """Combinations as ascending modules, small ones first."""
    sets = [tuple(sorted(m for m in row if m >= 0)) for row in np.asarray(rows).tolist()]
    if any(m >= num_modules for row in sets for m in row):
        raise ValueError(f"a combination has a module that is not below num_modules = {num_modules}")
    return sorted(sets, key=lambda row: (len(row), row))


def _matrix(figure: Any, parts: list[list[tuple[int, ...]]], num_modules: int, title: str) -> None:
    from matplotlib.colors import ListedColormap

    groups = [[list(group) for _, group in groupby(part, key=len)] for part in parts]
    # an empty column between the sizes of combinations
    widths = [max(sum(map(len, sizes)) + len(sizes) - 1, 4) for sizes in groups]
    grid = figure.add_gridspec(1, 3, width_ratios=[*widths, sum(widths) * 1.5 / (figure.get_figwidth() - 2.1)])
    figure.get_layout_engine().set(wspace=0.08)
    panels = [figure.add_subplot(grid[0, i]) for i in range(3)]
    for panel, sizes, width, (name, colour) in zip(panels, groups, widths, _NAMES.items(), strict=False):
        cells = np.full((num_modules, width), np.nan)
        start = 0
        ticks = {}
        for group in sizes:
            cells[:, start : start + len(group)] = 0
            for column, row in enumerate(group, start):
                cells[list(row), column] = 1
            ticks[start + len(group) / 2] = str(len(group[0]))
            start += len(group) + 1
        lines = 0.6 if sum(widths) < 80 else 0.3
        panel.pcolormesh(
            cells, cmap=ListedColormap([_EMPTY, colour]), vmin=0, vmax=1, edgecolors="white", linewidth=lines
        )
        panel.set_title(f"{name}: {sum(map(len, sizes)):,}", fontsize=8, color=colour, loc="left")
        panel.set_xticks(list(ticks), list(ticks.values()))
        panel.tick_params(length=0)
        panel.set_xlabel("modules in a combination" if panel is panels[0] else "", loc="left")
        _module_axis(panel, num_modules, 0.5, labelled=panel is panels[0])
        panel.spines[:].set_visible(False)
    _usage(panels[2], parts, num_modules, 0.5)
    figure.suptitle(title, fontsize=9, color=_INK)


def _pairs(figure: Any, parts: list[list[tuple[int, ...]]], num_modules: int, title: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    counts = np.zeros((2, num_modules, num_modules))
    for number, part in enumerate(parts):
        for row in part:
            counts[number][np.ix_(row, row)] += 1
    both = counts.sum(0)
    share = np.divide(counts[0], both, out=np.full_like(both, np.nan), where=both > 0)
    grid = figure.add_gridspec(1, 2, width_ratios=[2.4, 1])
    panels = [figure.add_subplot(grid[0, i]) for i in range(2)]
    colours = LinearSegmentedColormap.from_list("support", [HELD_OUT, "#F4F1EE", TRAINED]).with_extremes(bad=_MISSING)
    image = panels[0].imshow(share, cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    panels[0].spines[:].set_visible(False)
    for (name, colour), part, place in zip(_NAMES.items(), parts, ("left", "right"), strict=True):
        panels[0].set_title(f"{name}: {len(part):,}", fontsize=8, color=colour, loc=place)
    _module_axis(panels[0], num_modules, 0.0, labelled=True)
    panels[0].set_xticks(panels[0].get_yticks())
    panels[0].set_xlabel("module" if (both > 0).all() else "module (grey: pairs neither trained on nor held out)")
    panels[0].tick_params(length=0)
    _usage(panels[1], parts, num_modules, 0.0)
    bar = figure.colorbar(image, ax=panels, aspect=35, ticks=[0, 0.5, 1])
    bar.set_label("share trained on of the combinations with both modules")
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=9, color=_INK)


def _module_axis(panel: Any, num_modules: int, middle: float, labelled: bool) -> None:
    """Modules from above to below, as many numbers as there is room for."""
    every = 1 if num_modules <= 16 else max(1, num_modules // 8)
    shown = range(0, num_modules, every)
    panel.set_yticks([m + middle for m in shown], [str(m) for m in shown] if labelled else [""] * len(shown))
    panel.set_ylim(num_modules - 0.5 + middle, middle - 0.5)
    panel.set_ylabel("module" if labelled else "")


def _usage(panel: Any, parts: list[list[tuple[int, ...]]], num_modules: int, middle: float) -> None:
    """Combinations with each module, as bars beside the matrix."""
    left = np.zeros(num_modules)
    for part, colour in zip(parts, (TRAINED, HELD_OUT), strict=True):
        counts = np.bincount([m for row in part for m in row], minlength=num_modules)
        panel.barh(np.arange(num_modules) + middle, counts, left=left, height=0.78, color=colour)
        left += counts
    _module_axis(panel, num_modules, middle, labelled=False)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.locator_params(axis="x", nbins=3, integer=True)
    panel.set_title("combinations per module", fontsize=8, color=_INK, loc="left")
