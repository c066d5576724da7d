"""Pictures and texts of single examples, for people: a SRAVEN puzzle to solve by hand, a fuzzy-logic function to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hyla.errors import MissingExtraError

MAX_FEATURES, MAX_VALUES = 5, 10
FEATURE_NAMES = ("number", "shape", "colour", "clock", "bar")
"""What shows the feature at each of a panel's positions: number of items, their shape, their colour, the place of a dot
on the frame (clockwise from the top), the filled part of a bar."""

# Ten colours as far apart as can be, also for readers who are red-, green- or blue-blind.
COLOURS = (
    "#1F2328", "#FFE14D", "#1A03E3", "#17B500", "#9B3508", "#17F0F0", "#740084", "#EB52F4", "#078186", "#C5A7AB",
)  # fmt: skip
_INK, _SOFT, _LINE, _PAPER = "#1F2328", "#5A636E", "#B8BFC7", "#FFFFFF"
# Places of 0 to 9 items in a panel, as on dice, in units of a third of the panel.
_PLACES = {
    0: [(0, 0)],
    1: [(0, 0)],
    2: [(-1, 1), (1, -1)],
    3: [(-1, 1), (0, 0), (1, -1)],
    4: [(-1, 1), (1, 1), (-1, -1), (1, -1)],
    5: [(-1, 1), (1, 1), (0, 0), (-1, -1), (1, -1)],
    6: [(-1, 1), (1, 1), (-1, 0), (1, 0), (-1, -1), (1, -1)],
    7: [(-1, 1), (1, 1), (-1, 0), (0, 0), (1, 0), (-1, -1), (1, -1)],
    8: [(-1, 1), (0, 1), (1, 1), (-1, 0), (1, 0), (-1, -1), (0, -1), (1, -1)],
    9: [(x, y) for y in (1, 0, -1) for x in (-1, 0, 1)],
}


def _regular(corners: int, turn: float = 90.0) -> np.ndarray:
    angles = np.radians(turn + 360 * np.arange(corners) / corners)
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def _star(points: int, inner: float, turn: float = 90.0) -> np.ndarray:
    angles = np.radians(turn + 180 * np.arange(2 * points) / points)
    radius = np.where(np.arange(2 * points) % 2 == 0, 1.0, inner)[:, None]
    return radius * np.stack([np.cos(angles), np.sin(angles)], 1)


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * math.pi, 60, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([x, y + 2.5], 1) / 16.5


def _moon() -> np.ndarray:
    outer = np.radians(np.linspace(50, 310, 50))
    inner = np.radians(np.linspace(290, 70, 40))
    left = np.stack([np.cos(outer), np.sin(outer)], 1)
    right = np.stack([0.42 + 0.85 * np.cos(inner), 0.85 * np.sin(inner)], 1)
    return np.concatenate([left, right]) + np.array([0.25, 0])


_BAR, _ARM = 0.95, 0.34
# One outline per value, at most 1 from the centre, none like another when small.
SHAPES: tuple[np.ndarray, ...] = (
    _regular(48),  # circle
    _regular(3) * 1.12 - [0, 0.22],  # triangle
    _regular(4, 45.0) * 1.15,  # square
    _star(5, 0.42) * 1.1,  # star
    np.array([[-_ARM, _BAR], [_ARM, _BAR], [_ARM, _ARM], [_BAR, _ARM], [_BAR, -_ARM], [_ARM, -_ARM],
              [_ARM, -_BAR], [-_ARM, -_BAR], [-_ARM, -_ARM], [-_BAR, -_ARM], [-_BAR, _ARM], [-_ARM, _ARM]]),  # cross
    _moon(),
    np.array([[0, 1.1], [0.62, 0], [0, -1.1], [-0.62, 0]]),  # diamond
    _heart(),
    np.array([[-1, 0.36], [0.1, 0.36], [0.1, 0.9], [1.05, 0], [0.1, -0.9], [0.1, -0.36], [-1, -0.36]]),  # arrow
    np.array([[-0.9, 1], [0.9, 1], [-0.9, -1], [0.9, -1]]) * 0.95,  # hourglass
)  # fmt: skip


# --- SRAVEN -----------------------------------------------------------------------------------------------------------


def draw_puzzle(
    panels: ArrayLike,
    rules: Sequence[str],
    num_values: int,
    path: Path | str,
    *,
    permutations: ArrayLike | None = None,
) -> Path:
    """Draw a puzzle that a person can solve, with rules and answer below it.

    panels: `[R, C, M]` integers below `num_values`, the answer as the last panel. rules: M names, one per feature.
    permutations: `[C, M]`, the feature that each position of a column shows (its index into `rules`); None where position
    p shows feature p in every column. Position p is drawn as `FEATURE_NAMES[p]`, so that a permuted puzzle has, say, the
    colours of one column go on as the shapes of the next; the picture says so, and gives the alignment with the answer.
    Raises `ValueError` for more than 5 features or 10 values, which :func:`puzzle_text` can show.
    """
    grid, feature_CM = _checked(panels, rules, num_values, permutations)
    rows, columns, num_features = grid.shape
    if num_features > MAX_FEATURES or num_values > MAX_VALUES:
        raise ValueError(
            f"a puzzle of {num_features} features and {num_values} values cannot be drawn so that values stay apart "
            f"(at most {MAX_FEATURES} and {MAX_VALUES}); use puzzle_text"
        )
    figure, save = _figure(path)
    permuted = _is_permuted(feature_CM)
    side, gap, legend_step, line_step = 1.7, 0.16, 0.6, 0.25
    grid_width, grid_height = columns * (side + gap) - gap, rows * (side + gap) - gap
    legend_width = 0.95 + num_values * 0.42
    lines = _alignment_table(grid, rules, feature_CM)
    hint = _wrap(_hint(permuted, num_values, num_features, columns), int(legend_width * 14.2))
    legend_height = 0.35 + num_features * legend_step
    body = max(grid_height, legend_height + 0.15 + 0.19 * (hint.count("\n") + 1))
    answer_height = max(0.45 + 0.8 * side, 0.2 + line_step * len(lines))
    width, height = grid_width + legend_width + 1.25, 0.9 + body + 0.4 + answer_height + 0.4
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()

    left, top = 0.4, height - 0.9
    axes.text(
        left, height - 0.32, "Which panel belongs in place of the question mark?", fontsize=14, va="top", color=_INK
    )
    for row in range(rows):
        for column in range(columns):
            corner = (left + column * (side + gap), top - row * (side + gap) - side)
            last = (row, column) == (rows - 1, columns - 1)
            _draw_panel(axes, corner, side, None if last else grid[row, column], num_values)
    _draw_legend(axes, left + grid_width + 0.45, top, num_features, num_values, legend_step)
    axes.text(
        left + grid_width + 0.45, top - legend_height - 0.15, hint, fontsize=9, va="top", color=_INK, linespacing=1.4
    )

    fold = top - body - 0.4
    axes.plot([left, width - left], [fold, fold], color=_LINE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(left, fold - 0.14, "Answer", fontsize=11, va="top", color=_INK, weight="bold")
    _draw_panel(axes, (left, fold - 0.45 - side * 0.8), side * 0.8, grid[-1, -1], num_values)
    text_left = left + side * 0.8 + 0.35
    for number, line in enumerate(lines):
        axes.text(
            text_left, fold - 0.18 - line_step * number, line, fontsize=9.5, va="top", color=_INK if number else _SOFT,
            family="DejaVu Sans Mono",
        )  # fmt: skip
    return save()


def puzzle_text(
    panels: ArrayLike, rules: Sequence[str], num_values: int, *, permutations: ArrayLike | None = None
) -> str:
    """The puzzle of :func:`draw_puzzle` as monospaced text, of any size."""
    grid, feature_CM = _checked(panels, rules, num_values, permutations)
    rows, columns, num_features = grid.shape
    digits = len(str(num_values - 1))
    question = " ".join(["?".rjust(digits)] * num_features)
    values = f"values 0 to {num_values - 1}; after {num_values - 1} comes 0"
    lines = [f"{rows} x {columns} panels, {num_features} features with {values}", ""]
    for row in range(rows):
        cells = [" ".join(str(value).rjust(digits) for value in grid[row, column]) for column in range(columns)]
        if row == rows - 1:
            cells[-1] = question
        lines.append("  " + " | ".join(cells))
    note = "Each column lists the features in an order of its own." if _is_permuted(feature_CM) else ""
    answer = " ".join(str(value) for value in grid[-1, -1])
    lines += ["", *([note, ""] if note else []), f"Answer: {answer}", ""]
    return "\n".join([*lines, *_alignment_table(grid, rules, feature_CM, named=False), ""])


def _checked(
    panels: ArrayLike, rules: Sequence[str], num_values: int, permutations: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    grid = np.asarray(panels)
    if grid.ndim != 3 or not np.issubdtype(grid.dtype, np.integer):
        raise ValueError(f"panels must be integers of shape [rows, columns, features], not {grid.dtype} {grid.shape}")
    _, columns, num_features = grid.shape
    if grid.min() < 0 or grid.max() >= num_values:
        raise ValueError(f"panels hold {grid.min()} to {grid.max()}, which is not within 0 to {num_values - 1}")
    if len(rules) != num_features:
        raise ValueError(f"{len(rules)} rules for {num_features} features")
    feature_CM = np.tile(np.arange(num_features), (columns, 1)) if permutations is None else np.asarray(permutations)
    if feature_CM.shape != (columns, num_features) or (np.sort(feature_CM) != np.arange(num_features)).any():
        raise ValueError(f"permutations must hold one of 0 to {num_features - 1} for each of {columns} columns")
    return grid, feature_CM


def _is_permuted(feature_CM: np.ndarray) -> bool:
    return bool((feature_CM != feature_CM[0]).any())


def _hint(permuted: bool, num_values: int, num_features: int, columns: int) -> str:
    sums = "first_+_second_=_third, first_−_second_=_third"
    if columns != 3:
        sums = "last_=_sum of the others, last_=_first minus the others between"
    same = {3: "the same three values"}.get(columns, f"the same {columns} values")
    sentences = [
        f"Each feature follows one rule, in all rows: constant, a progression by 1 or 2 up or down, {sums}, or {same} "
        f"in every row in any order. After {num_values - 1} comes 0. A number of 0 is drawn as one hollow item."
    ]
    if permuted:
        names = FEATURE_NAMES[:num_features]
        sentences.append(
            f"Features are permuted between columns: what the first column shows as {names[0]}, the second may show as "
            f"{names[-1]}. Within a column, all rows agree."
        )
    return " ".join(sentences).replace("_", "\N{NO-BREAK SPACE}")


def _alignment_table(grid: np.ndarray, rules: Sequence[str], feature_CM: np.ndarray, named: bool = True) -> list[str]:
    """Lines of a table: for each feature its rule, where each column shows it, and its values row by row."""
    rows, columns, _ = grid.shape
    place_CM = np.argsort(feature_CM, 1)  # place_CM[c, f]: the position that shows feature f in column c
    permuted, head = _is_permuted(feature_CM), ["rule"]
    head += ["shown as" if named else "position"] + [f"row {row + 1}" for row in range(rows)]
    body = []
    for feature in feature_CM[-1]:  # as the answer lists them
        places = [int(place_CM[column, feature]) for column in range(columns)]
        shown = [FEATURE_NAMES[place] if named else str(place + 1) for place in places]
        values = [[str(grid[row, column, places[column]]) for column in range(columns)] for row in range(rows)]
        where = ", ".join(shown) if permuted else shown[0]
        body.append([rules[feature], where, *(" ".join(row) for row in values)])
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]


def _draw_panel(
    axes: Any, corner: tuple[float, float], side: float, values: np.ndarray | None, num_values: int
) -> None:
    """A panel with its lower left corner at `corner`; a question mark for None."""
    from matplotlib.patches import Rectangle

    x, y = corner
    axes.add_patch(Rectangle(corner, side, side, facecolor="#FBFBFC", edgecolor=_LINE, linewidth=1))
    if values is None:
        axes.text(x + side / 2, y + side / 2, "?", fontsize=20 * side, ha="center", va="center_baseline", color=_SOFT)
        return
    given = [int(value) for value in values]
    number, shape, colour = (*given, *(1, 0, 0)[len(given) :])[:3]  # features a panel lacks: one black circle
    clock, bar = (*given[3:], None, None)[:2]
    centre = (x + side / 2, y + side * (0.5 if bar is None else 0.56))
    _draw_items(axes, centre, side * (0.21 if clock is not None else 0.27), number, shape, colour)
    if clock is not None:
        _draw_clock(axes, centre, side * (0.43 if bar is None else 0.38), clock, num_values, side)
    if bar is not None:
        _draw_bar(axes, (x + 0.1 * side, y + 0.045 * side), 0.8 * side, 0.06 * side, bar, num_values)


def _draw_items(axes: Any, centre: tuple[float, float], step: float, number: int, shape: int, colour: int) -> None:
    from matplotlib.patches import Polygon

    size = 0.43 * step
    for dx, dy in _PLACES[number]:
        middle = (centre[0] + dx * step, centre[1] + dy * step)
        outline = SHAPES[shape] * size + middle
        if number == 0:
            for edge, width in ((_INK, 9 * step + 1.0), (COLOURS[colour], 9 * step)):
                axes.add_patch(Polygon(outline, facecolor=_PAPER, edgecolor=edge, linewidth=width, joinstyle="round"))
        else:
            axes.add_patch(Polygon(outline, facecolor=COLOURS[colour], edgecolor=_INK, linewidth=0.5))


def _draw_clock(axes: Any, centre: tuple[float, float], half: float, value: int, num_values: int, side: float) -> None:
    """A dot on a square track around the items (whose corners a circle would cross), `half` from its centre."""
    from matplotlib.patches import Circle, Rectangle

    corner = (centre[0] - half, centre[1] - half)
    axes.add_patch(Rectangle(corner, 2 * half, 2 * half, facecolor="none", edgecolor=_LINE, linewidth=0.7))
    for place in range(num_values):
        angle = math.radians(90 - 360 * place / num_values)
        reach = half / max(abs(math.cos(angle)), abs(math.sin(angle)))
        spot = (centre[0] + reach * math.cos(angle), centre[1] + reach * math.sin(angle))
        here = place == value
        colour, radius = (_INK, 0.042 * side) if here else (_LINE, 0.014 * side)
        axes.add_patch(Circle(spot, radius, facecolor=colour, linewidth=0, zorder=3))


def _draw_bar(axes: Any, corner: tuple[float, float], width: float, height: float, value: int, num_values: int) -> None:
    from matplotlib.patches import Rectangle

    cell = width / (num_values - 1)
    for place in range(num_values - 1):
        fill = _INK if place < value else _PAPER
        spot = (corner[0] + place * cell, corner[1])
        axes.add_patch(Rectangle(spot, cell * 0.84, height, facecolor=fill, edgecolor=_SOFT, linewidth=0.6))


def _draw_legend(axes: Any, left: float, top: float, num_features: int, num_values: int, step: float) -> None:
    """All values of every feature in order, under their numbers."""
    from matplotlib.patches import Polygon, Rectangle

    column = 0.42
    first = left + 0.95

    def middle(value: int) -> float:
        return first + (value + 0.5) * column

    axes.text(left, top - 0.1, "value", fontsize=9, color=_SOFT, va="center")
    for value in range(num_values):
        axes.text(
            middle(value), top - 0.1, str(value), fontsize=10, color=_INK, ha="center", va="center", weight="bold"
        )
    draw: list[Callable[[float, float, int], object]] = [
        lambda x, y, value: _draw_items(axes, (x, y), 0.098, value, 0, 0),
        lambda x, y, value: axes.add_patch(
            Polygon(SHAPES[value] * 0.13 + (x, y), facecolor=_SOFT, edgecolor=_INK, linewidth=0.5)
        ),
        lambda x, y, value: axes.add_patch(
            Rectangle((x - 0.14, y - 0.14), 0.28, 0.28, facecolor=COLOURS[value], edgecolor=_INK, linewidth=0.5)
        ),
        lambda x, y, value: _draw_clock(axes, (x, y), 0.14, value, num_values, 0.9),
        lambda x, y, value: _draw_bar(axes, (x - 0.17, y - 0.05), 0.36, 0.1, value, num_values),
    ]
    for position in range(num_features):
        y = top - 0.55 - position * step
        axes.plot([left, first + num_values * column], [y + step / 2] * 2, color="#E3E6EA", linewidth=0.6)
        axes.text(left, y, FEATURE_NAMES[position], fontsize=9.5, color=_INK, va="center")
        for value in range(num_values):
            draw[position](middle(value), y, value)


# --- fuzzy logic ------------------------------------------------------------------------------------------------------


def formula(terms: ArrayLike) -> str:
    """`(x1 ∧ ¬x2) ∨ (x1 ∧ x2)` for terms `[K, L]` of bits: 1 for a variable as it is, 0 for its negation."""
    bits = np.asarray(terms)
    return " ∨ ".join(
        "(" + " ∧ ".join(("" if bit else "¬") + f"x{i}" for i, bit in enumerate(term, 1)) + ")" for term in bits
    )


def function_text(terms: ArrayLike, points: ArrayLike, values: ArrayLike, *, max_points: int = 8) -> str:
    """The function as a formula, with the first points of the sequence and the last one, which is to be predicted."""
    bits, points_NL, values_N = _checked_function(terms, points, values)
    num_points = len(points_NL)
    kept = list(range(min(max_points, num_points - 1)))
    lines = [f"f(x) = {formula(bits)}", "with ¬x = 1 - x, ∧ = min, ∨ = max", ""]
    lines.append("  point  " + "  ".join(f"{f'x{i + 1}':>5}" for i in range(points_NL.shape[1])) + "   f(x)")
    for n in [*kept, num_points - 1]:
        last = n == num_points - 1
        if last and num_points - 1 > len(kept):
            lines.append(f"  ... {num_points - 1 - len(kept)} more")
        row = f"{'>' if last else ' '} {n + 1:>5}  " + "  ".join(f"{x:5.3f}" for x in points_NL[n])
        lines.append(row + ("      ?" if last else f"  {values_N[n]:5.3f}"))
    return "\n".join([*lines, "", f"Answer: {values_N[-1]:.3f}", ""])


def draw_function(terms: ArrayLike, points: ArrayLike, values: ArrayLike, path: Path | str) -> Path:
    """Draw the function as a formula over a table of its points, shaded by value; the last point is the question.

    terms: `[K, L]` bits as for :func:`formula`. points: `[N, L]` in [0, 1], values: `[N]`. Beside each point stand the
    values of the terms, whose largest is f(x). The answer stands below the table.
    """
    bits, points_NL, values_N = _checked_function(terms, points, values)
    num_points, num_variables = points_NL.shape
    terms_NK = np.where(bits[None] == 1, points_NL[:, None], 1 - points_NL[:, None]).min(-1)
    figure, save = _figure(path)
    cell, tall, gap, left = 0.62, 0.27, 0.22, 0.85
    blocks = [points_NL, terms_NK, values_N[:, None]]
    names = [[f"x{i + 1}" for i in range(num_variables)], [f"term {k + 1}" for k in range(len(bits))], ["f(x)"]]
    width = max(left + cell * sum(block.shape[1] for block in blocks) + 2 * gap + 0.4, 6.2)
    text = _broken(formula(bits), int((width - 0.6) / 0.108))
    title_height = 0.24 * (text.count("\n") + 1) + 0.3
    height = 0.25 + title_height + 0.4 + tall * (num_points + 0.6) + 0.75
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    axes.text(0.3, height - 0.25, text, fontsize=11, va="top", color=_INK, linespacing=1.4)
    axes.text(
        0.3, height - 0.25 - title_height + 0.25, "¬x = 1 − x,  ∧ = min,  ∨ = max", fontsize=8.5, va="top", color=_SOFT
    )
    top = height - 0.25 - title_height - 0.4
    x = left
    for block, titles in zip(blocks, names, strict=True):
        is_value = titles == ["f(x)"]
        for j, name in enumerate(titles):
            axes.text(x + cell / 2, top + 0.12, name, fontsize=9, ha="center", va="center", color=_INK)
            for n in range(num_points):
                hidden = n == num_points - 1 and not titles[0].startswith("x")
                y = top - tall * (n + 1) - (0.6 * tall if n == num_points - 1 else 0)
                _draw_cell(axes, (x, y), (cell, tall), None if hidden else float(block[n, j]), "?" if is_value else "")
            x += cell
        x += gap
    for n in range(num_points):
        last = n == num_points - 1
        y = top - tall * (n + 0.5) - (0.6 * tall if last else 0)
        label = "question" if last else str(n + 1)
        axes.text(left - 0.1, y, label, fontsize=8, ha="right", va="center", color=_INK if last else _SOFT)
    answer = ", ".join(f"term {k + 1} = {value:.3f}" for k, value in enumerate(terms_NK[-1]))
    axes.text(0.3, 0.22, f"Answer: f(x) = {values_N[-1]:.3f}   ({answer})", fontsize=9, va="bottom", color=_INK)
    return save()


def _broken(text: str, width: int) -> str:
    """`f(x) = ...` with line breaks before those terms that would pass `width`."""
    lines = ["f(x) = "]
    for number, term in enumerate(text.split(" ∨ ")):
        piece = term if number == 0 else f" ∨ {term}"
        if number and len(lines[-1]) + len(piece) > width:
            lines.append("     ")
        lines[-1] += piece
    return "\n".join(lines)


def _checked_function(
    terms: ArrayLike, points: ArrayLike, values: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bits, points_NL, values_N = np.asarray(terms), np.asarray(points, float), np.asarray(values, float)
    if (
        bits.ndim != 2
        or points_NL.ndim != 2
        or points_NL.shape[1] != bits.shape[1]
        or values_N.shape != points_NL.shape[:1]
    ):
        shapes = f"{bits.shape}, {points_NL.shape} and {values_N.shape}"
        raise ValueError(f"terms, points and values must have shapes [K, L], [N, L] and [N], not {shapes}")
    return bits, points_NL, values_N


def _draw_cell(
    axes: Any, corner: tuple[float, float], size: tuple[float, float], value: float | None, unknown: str
) -> None:
    from matplotlib.patches import Rectangle

    middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
    shade = _PAPER if value is None else _shade(value)
    axes.add_patch(
        Rectangle(corner, *size, facecolor=shade, edgecolor="#FFFFFF" if value is not None else _LINE, linewidth=1)
    )
    text = unknown if value is None else f"{value:.2f}"
    colour = "#FFFFFF" if value is not None and value > 0.5 else _INK
    axes.text(*middle, text, fontsize=8, ha="center", va="center_baseline", color=colour)


def _shade(value: float) -> tuple[float, float, float]:
    """White at 0 to dark blue at 1, in even steps of lightness."""
    light, dark = np.array([0.95, 0.97, 0.99]), np.array([0.03, 0.26, 0.47])
    red, green, blue = light + (dark - light) * min(max(value, 0.0), 1.0)
    return float(red), float(green), float(blue)


# --- files ------------------------------------------------------------------------------------------------------------


def _figure(path: Path | str) -> tuple[Any, Callable[[], Path]]:
    """An empty figure, and the function that saves it to `path` (the kind follows its ending)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing figures") from None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure()
    FigureCanvasAgg(figure)

    def save() -> Path:
        figure.savefig(path, dpi=160)
        return path

    return figure, save


def _wrap(text: str, width: int, indent: str = "") -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width, subsequent_indent=indent))
