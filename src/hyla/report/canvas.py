"""What every figure shares: the look of each mechanism, the two sizes, and the files that are written."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyla.errors import MissingExtraError
from hyla.report.comparison import Comparison

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
OTHERS = ("#5F6B76", "#8A6A1F", "#3E7F86", "#96525A")
DASHES = {"solid": "-", "dash": (0, (5, 1.6)), "dashdot": (0, (6, 1.4, 1.2, 1.4))}
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


@dataclass(frozen=True)
class Size:
    """width: inches. columns: panels beside each other, at most. small: points of the smallest words; others have 8. gap:
    share of a panel's height that one line of them takes."""

    width: float
    columns: int
    small: float
    gap: float
    captioned: bool


SCREEN = Size(7.2, 4, 6.5, 0.055, captioned=True)
PRINT = Size(3.35, 2, 8.0, 0.11, captioned=False)
"""The width of a column of a two-column paper, or about half the text width of a one-column one; the paper has its own
caption."""


def style(mechanism: str) -> tuple[str, str]:
    """Colour and dash (`solid`, `dash`, `dashdot`) of a mechanism; the same for the same name, also for unknown ones."""
    return STYLES.get(mechanism) or (OTHERS[zlib.crc32(mechanism.encode()) % len(OTHERS)], "solid")


def series(comparison: Comparison) -> dict[str, str]:
    """Variant -> the name of its line. Variants that differ in axes alone share one, named after their mechanism."""
    names: dict[str, str] = {}
    taken: set[tuple[str, tuple[Any, ...]]] = set()
    for variant in comparison.plan.variants:
        key = (variant.mechanism, comparison.group(variant.name))
        names[variant.name] = variant.name if not comparison.plan.axes or key in taken else variant.mechanism
        taken.add(key)
    return names


def styles(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """The colour and dash of each variant: its mechanism's, unless another line has that already."""
    looks: dict[str, tuple[str, str]] = {}
    names = series(comparison)
    for variant in comparison.plan.variants:
        name = names[variant.name]
        if name not in looks:
            look = style(variant.mechanism)
            free = [(colour, dash) for dash in DASHES for colour in OTHERS if (colour, dash) not in looks.values()]
            looks[name] = look if look not in looks.values() or not free else free[0]
    return {variant: looks[name] for variant, name in names.items()}


def check_matplotlib() -> None:
    """Raise MissingExtraError if figures cannot be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing figures") from None


Draw = Callable[[Any, Size], None]


def save(path_stem: Path | str, height: Callable[[Size], float], draw: Draw) -> tuple[Path, Path, Path]:
    """Draw a figure for the screen into `path_stem`.png (200 dpi) and .svg, and for print into .pdf. The same content
    gives the same bytes. height: inches, for a size."""
    screen = save_screen(path_stem, (SCREEN.width, height(SCREEN)), lambda figure: draw(figure, SCREEN))
    pdf = screen[0].with_suffix(".pdf")
    printed = {"axes.titlesize": 8, "legend.fontsize": 8, "pdf.fonttype": 42}
    with _figure((PRINT.width, height(PRINT)), printed) as figure:
        draw(figure, PRINT)
        figure.savefig(pdf, metadata={"CreationDate": None})
    return *screen, pdf


def save_screen(
    path_stem: Path | str,
    size: tuple[float, float],
    draw: Callable[[Any], None],
    settings: dict[Any, Any] | None = None,
    **options: Any,
) -> tuple[Path, Path]:
    """Draw a figure of `size` inches into `path_stem`.png (200 dpi) and .svg. settings: matplotlib's, beside ours.
    options: of its `savefig`."""
    check_matplotlib()
    stem = Path(path_stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with _figure(size, settings or {}) as figure:
        draw(figure)
        figure.savefig(png, dpi=200, **options)
        figure.savefig(svg, metadata={"Date": None}, **options)
    return png, svg


@contextlib.contextmanager
def _figure(size: tuple[float, float], settings: dict[Any, Any]) -> Iterator[Any]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC | settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def panel_rows(count: int, size: Size) -> tuple[int, int]:
    """(rows, columns) of `count` panels in a figure of `size`."""
    columns = min(count, size.columns)
    return -(-count // columns), columns


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
