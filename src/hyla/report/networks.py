"""One task of the hyperteacher as text and as a picture: its modules, and what its network answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyla.report.canvas import style

_MODULES, _NEGATIVE, _INK, _EMPTY = style("softmax")[0], style("hyla")[0], "#222222", "#EEF0F2"
MAX_POINTS, MAX_WIDTH = 6, 8  # that a text shows


def network_text(latent: Sequence[float], points: Sequence[Sequence[float]], answers: Sequence[Sequence[float]]) -> str:
    """The active modules with their values, then some points with the answers."""
    active = ", ".join(f"{number} ({value:.2f})" for number, value in enumerate(latent) if value)
    lines = [f"modules: {active} of {len(latent)}"]
    for point, answer in zip(points[:MAX_POINTS], answers, strict=False):
        lines.append(f"  {_numbers(point)}  ->  {_numbers(answer)}")
    if len(points) > MAX_POINTS:
        lines.append(f"  and {len(points) - MAX_POINTS} more points")
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> str:
    text = " ".join(f"{value:5.2f}" for value in values[:MAX_WIDTH])
    return text + (" ..." if len(values) > MAX_WIDTH else "")


def draw_network(
    latent: Sequence[float],
    points: Sequence[Sequence[float]],
    answers: Sequence[Sequence[float]],
    path: Path | str,
) -> Path:
    """The latent as bars, points and answers as matrices (a row per point), in one picture."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    path = Path(path)
    colours = LinearSegmentedColormap.from_list("signed", [_NEGATIVE, "#FFFFFF", _MODULES])
    figure = Figure(figsize=(7.2, 1.3 + 0.13 * len(points)), layout="constrained")
    bars, left, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    bars.bar(range(len(latent)), latent, color=_MODULES)
    bars.set(ylim=(0, 1.05), xlabel="module", title="task latent z")
    matrices: list[tuple[Any, Any, str]] = [(left, points, "points x"), (right, answers, "answers y")]
    for panel, matrix, title in matrices:
        limit = max(max(abs(value) for value in row) for row in matrix) or 1.0
        image = panel.imshow(matrix, cmap=colours, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        panel.set(title=title, xlabel="unit")
        figure.colorbar(image, ax=panel, shrink=0.9, pad=0.02)
    left.set_ylabel("point")
    for panel in (bars, left, right):
        panel.title.set_fontsize(9)
        panel.tick_params(labelsize=7)
        for spine in ("top", "right"):
            panel.spines[spine].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
