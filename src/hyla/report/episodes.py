"""Episodes of the grid worlds for people: as text, a picture with the path, an animation, one frame at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyla.errors import MissingExtraError
from hyla.report.drawings import COLOURS, SHAPES

_INK, _SOFT, _LINE, _PAPER = "#1F2328", "#5A636E", "#D5DAE0", "#FFFFFF"
_WALL, _GOAL, _AGENT, _PATH = "#454F5B", "#FFF3C4", "#0072B2", "#0072B2"
GOAL = "goal"  # the label of an object whose cell is marked
_DIRECTIONS = {(-1, 0), (0, 1), (1, 0), (0, -1)}

Cell = tuple[int, int]  # row, column


@dataclass(frozen=True)
class Scene:
    """A world before the first step. walls: rows of booleans. objects: where they lie. kinds, kind_names, labels: for each
    object a number that sets its look, what it is called, and what is special about it (may be empty). title: the task."""

    walls: Sequence[Sequence[bool]]
    objects: Sequence[Cell]
    kinds: Sequence[int]
    kind_names: Sequence[str]
    labels: Sequence[str]
    title: str


@dataclass(frozen=True)
class Course:
    """What happened: N actions by name, the reward of each, and N + 1 states, the agent's cell and the objects taken."""

    actions: Sequence[str]
    rewards: Sequence[float]
    agent: Sequence[Cell]
    taken: Sequence[Sequence[bool]]

    def events(self, scene: Scene) -> list[str]:
        """One line for each action: its name, what it picked up or that nothing moved, its reward."""
        lines = []
        for n, (action, reward) in enumerate(zip(self.actions, self.rewards, strict=True)):
            gained = [name_of(i) for i, now in enumerate(self.taken[n + 1]) if now and not self.taken[n][i]]
            parts = [action, *(f"picks up {name}" for name in gained), *([f"{reward:+.2f}"] if reward else [])]
            lines.append(", ".join(parts))
        return lines


def name_of(number: int) -> str:
    """`a` for the first object."""
    return chr(ord("a") + number) if number < 26 else f"a{number}"


def episode_text(scene: Scene, course: Course) -> str:
    """The map before the first step, the objects, and every action. `@` is the agent, `#` a wall."""
    rows = [["#" if wall else "." for wall in row] for row in scene.walls]
    for number, (row, column) in enumerate(scene.objects):
        rows[row][column] = name_of(number)[0]
    row, column = course.agent[0]
    rows[row][column] = "@"
    objects = [
        f"  {name_of(number)}  {name}" + (f"  {label}" if label else "")
        for number, (name, label) in enumerate(zip(scene.kind_names, scene.labels, strict=True))
    ]
    steps = [f"  {number:>2}  {line}" for number, line in enumerate(course.events(scene), 1)]
    return "\n".join(
        [scene.title, "", *("  " + " ".join(row) for row in rows), "", *objects, "", "Demonstration:", *steps, ""]
    )


def draw_episode(scene: Scene, course: Course, path: Path | str) -> Path:
    """Draw the map before the first step with the agent's path on it, numbered by step, and the objects beside it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = _figure(scene, panel=2.6)
    axes = figure.axes[0]
    _draw_map(axes, scene, [False] * len(scene.objects))
    _draw_path(axes, course)
    _draw_agent(axes, course.agent[0])
    _draw_list(figure, scene, course, len(course.actions))
    figure.savefig(path, dpi=160)
    return path


def animate_episode(scene: Scene, course: Course, path: Path | str, seconds: float = 0.5) -> Path:
    """Write the episode as an animated GIF, a frame for every state and `seconds` for each; the last one stays for 2 s."""
    images = check_pillow()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = []
    for n in range(len(course.agent)):
        figure = _figure(scene, panel=2.6)
        axes = figure.axes[0]
        _draw_map(axes, scene, course.taken[n])
        _draw_trail(axes, course.agent[: n + 1])
        _draw_agent(axes, course.agent[n])
        _draw_list(figure, scene, course, n)
        frames.append(images.fromarray(_pixels(figure, 80)).quantize(128))
    times = [int(1000 * seconds)] * (len(frames) - 1) + [2000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
    return path


def frame_pixels(scene: Scene, agent: Sequence[Cell], taken: Sequence[bool], pixels: int) -> np.ndarray:
    """One state as an image `[pixels, pixels, 3]` of bytes: the map, what is left of the objects, the agent (the last of
    its cells) and the way it came."""
    _, figure_of = _matplotlib()
    figure = figure_of((pixels / 100, pixels / 100))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    _prepare(axes, scene)
    _draw_map(axes, scene, taken)
    _draw_trail(axes, agent)
    _draw_agent(axes, agent[-1])
    return _pixels(figure, 100)


def check_pillow() -> Any:
    """Pillow's `Image`; MissingExtraError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("pillow", "report", "--format gif") from None
    return Image


# --- parts ------------------------------------------------------------------------------------------------------------


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "drawing episodes") from None

    def figure_of(size: tuple[float, float]) -> Any:
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        return figure

    return FigureCanvasAgg, figure_of


def _figure(scene: Scene, panel: float) -> Any:
    """A figure with the map's axes on the left, `panel` inches beside it and the task above it."""
    _, figure_of = _matplotlib()
    rows, columns = len(scene.walls), len(scene.walls[0])
    cell = min(0.62, 5.6 / rows)
    width, height = cell * columns + panel + 0.5, max(cell * rows, 3.4) + 0.85
    figure = figure_of((width, height))
    axes = figure.add_axes(
        (0.2 / width, (height - 0.65 - cell * rows) / height, cell * columns / width, cell * rows / height)
    )
    _prepare(axes, scene)
    figure.text(0.2 / width, 1 - 0.34 / height, scene.title, fontsize=11, color=_INK, va="center", weight="bold")
    return figure


def _prepare(axes: Any, scene: Scene) -> None:
    axes.set_xlim(0, len(scene.walls[0]))
    axes.set_ylim(len(scene.walls), 0)
    axes.set_axis_off()


def _pixels(figure: Any, dpi: int) -> np.ndarray:
    figure.set_dpi(dpi)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _draw_map(axes: Any, scene: Scene, taken: Sequence[bool]) -> None:
    """Walls, free cells and the objects that are left. x grows to the right, y downwards, a cell is 1 by 1."""
    from matplotlib.patches import Rectangle

    goal = next((cell for cell, label in zip(scene.objects, scene.labels, strict=True) if label == GOAL), None)
    for row, line in enumerate(scene.walls):
        for column, wall in enumerate(line):
            face = _WALL if wall else _GOAL if (row, column) == goal else _PAPER
            edge, order = (_WALL, 1.5) if wall else (_LINE, 1)
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=edge, linewidth=0.6, zorder=order))
    rows, columns = len(scene.walls), len(scene.walls[0])
    axes.add_patch(
        Rectangle((0, 0), columns, rows, fill=False, edgecolor=_WALL, linewidth=2.5, clip_on=False, zorder=4)
    )
    for number, (row, column) in enumerate(scene.objects):
        if not taken[number]:
            _draw_object(axes, (column + 0.5, row + 0.5), 0.27, scene.kinds[number], flip=True)
            name = name_of(number)
            axes.text(column + 0.09, row + 0.1, name, fontsize=7.5, color=_SOFT, ha="left", va="top", zorder=3)


def _draw_object(axes: Any, middle: tuple[float, float], size: float, kind: int, flip: bool = False) -> None:
    """Ten shapes in ten colours: no two kinds below 100 look the same."""
    from matplotlib.patches import Polygon

    outline = SHAPES[kind % 10] * (size, -size if flip else size) + np.asarray(middle)
    colour = COLOURS[(kind + kind // 10) % 10]
    axes.add_patch(Polygon(outline, facecolor=colour, edgecolor=_INK, linewidth=0.8, zorder=3, clip_on=False))


def _draw_agent(axes: Any, cell: Cell) -> None:
    """A head that looks at the reader."""
    from matplotlib.patches import Circle

    x, y = cell[1] + 0.5, cell[0] + 0.5
    axes.add_patch(Circle((x, y), 0.3, facecolor=_AGENT, edgecolor=_PAPER, linewidth=1.5, zorder=6))
    for side in (-1, 1):
        axes.add_patch(Circle((x + 0.11 * side, y - 0.05), 0.075, facecolor=_PAPER, linewidth=0, zorder=7))
        axes.add_patch(Circle((x + 0.11 * side, y - 0.05), 0.035, facecolor=_INK, linewidth=0, zorder=8))


def _draw_trail(axes: Any, agent: Sequence[Cell]) -> None:
    rows, columns = zip(*agent, strict=True)
    middles = np.array([columns, rows], float) + 0.5
    axes.plot(*middles, color=_PATH, alpha=0.35, linewidth=4, solid_capstyle="round", solid_joinstyle="round", zorder=2)


def _draw_path(axes: Any, course: Course) -> None:
    """An arrow with its number for each step, on the right-hand side of its direction, so that ways there and back keep
    apart. A step that stays in place is a number in brackets in the cell's corner."""
    stays: dict[Cell, list[str]] = {}
    for number, (one, other) in enumerate(zip(course.agent[:-1], course.agent[1:], strict=True), 1):
        step = (other[0] - one[0], other[1] - one[1])
        if step not in _DIRECTIONS:
            stays.setdefault(one, []).append(str(number))
            continue
        right = np.array([-step[0], step[1]]) * 0.14  # (x, y) of a quarter turn clockwise, y downwards
        start = np.array([one[1] + 0.5, one[0] + 0.5]) + right
        end = np.array([other[1] + 0.5, other[0] + 0.5]) + right
        axes.annotate(
            "", end, start, zorder=5,
            arrowprops={"arrowstyle": "-|>,head_length=0.35,head_width=0.18", "color": _PATH, "linewidth": 1.4,
                        "shrinkA": 5, "shrinkB": 5},
        )  # fmt: skip
        middle = (start + end) / 2 + right
        halo = {"boxstyle": "circle,pad=0.1", "facecolor": _PAPER, "linewidth": 0}
        axes.text(*middle, str(number), fontsize=7, color=_PATH, ha="center", va="center", zorder=5.5, bbox=halo)
    for (row, column), numbers in stays.items():
        shown = numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        box = {"boxstyle": "round,pad=0.15", "facecolor": _PAPER, "edgecolor": _PATH, "linewidth": 0.8}
        axes.text(
            column + 0.78, row + 0.8, shown, fontsize=7, color=_PATH, ha="center", va="center", zorder=8, bbox=box
        )


def _draw_list(figure: Any, scene: Scene, course: Course, done: int) -> None:
    """Beside the map: the objects, and the first `done` actions (the last of them, if there are too many)."""
    width, height = figure.get_size_inches()
    left = figure.axes[0].get_position().x1 * width + 0.25
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    y, step = height - 0.8, 0.27
    for number, (kind, name, label) in enumerate(zip(scene.kinds, scene.kind_names, scene.labels, strict=True)):
        axes.text(left, y, name_of(number), fontsize=9, color=_SOFT, va="center")
        _draw_object(axes, (left + 0.32, y), 0.1, kind)
        axes.text(left + 0.55, y, name, fontsize=9, color=_INK, va="center")
        axes.text(left + 2.1, y, label.replace("-", "−"), fontsize=9, color=_INK, va="center", ha="right")
        y -= step
    y -= 0.12
    axes.plot([left, left + 2.1], [y + step / 2] * 2, color=_LINE, linewidth=0.8)
    lines = [f"{number:>2}  {line}" for number, line in enumerate(course.events(scene)[:done], 1)]
    room = max(int((y - 0.1) / 0.2), 2)
    if len(lines) > room:
        lines = ["    ..."] + lines[len(lines) - room + 1 :]
    for line in lines:
        axes.text(
            left, y - 0.06, line.replace(", -", ", −"), fontsize=8.5, color=_INK, va="center", family="DejaVu Sans Mono"
        )
        y -= 0.2
