"""The figure of docs/theory.md: hidden neurons against modules, and errors against hidden neurons.

    python benchmarks/theory_figure.py [--out docs/images/theory] [--inputs 20000]

Prints the numbers it draws. One minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from hyla.report.canvas import save_screen
from hyla.tasks.base import Draws
from hyla.tasks.teacher import Teacher, draw_teacher
from hyla.theory import approximate, memorised_hidden, num_hidden

MODULES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
NUM_HOT, ERROR = 3, 0.1
ERRORS = {(16,): (8, 4, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01), (16, 16): (8, 4, 2, 1, 0.5, 0.2, 0.1)}
BLUE, ORANGE, GREY, BROWN = "#0072B2", "#D55E00", "#5F6B76", "#8A6A1F"


def draw_inputs(teacher: Teacher, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents with K values in [0.5, 1], or at its ends; points in the cube, or at its corners."""
    draws = Draws(0, "theory_figure")
    active = draws.permutations(teacher.num_modules, count)[:, : teacher.num_hot]
    values = 0.5 + 0.5 * draws.uniform(count, teacher.num_hot, dtype=torch.float64)
    points = 2 * draws.uniform(count, 1, teacher.point_dim, dtype=torch.float64) - 1
    quarter = count // 4
    values[: 2 * quarter] = (2 * values[: 2 * quarter] - 1).round() / 2 + 0.5
    points[quarter : 3 * quarter] = points[quarter : 3 * quarter].sign()
    latents = torch.zeros(count, teacher.num_modules, dtype=torch.float64).scatter(1, active, values)
    return latents, points


@torch.no_grad()
def measure(teacher: Teacher, error: float, count: int) -> tuple[int, float, float]:
    """(hidden neurons, proven bound, largest error over `count` inputs)."""
    approximation = approximate(teacher, error)
    latents, points = draw_inputs(teacher, count)
    largest = 0.0
    for z, x in zip(latents.split(500), points.split(500), strict=True):
        largest = max(largest, (approximation.forward(z, x) - teacher.forward(z, x)).abs().max().item())
    return approximation.num_hidden, approximation.bound, largest


def growth() -> dict[str, list[int]]:
    """Hidden neurons for each number of modules."""
    teachers = [draw_teacher(0, num_modules=modules, num_hot=NUM_HOT) for modules in MODULES]
    return {
        "all subsets, memorised": [memorised_hidden(modules, modules, (16,)) for modules in MODULES],
        f"up to {NUM_HOT} of M, memorised": [memorised_hidden(modules, NUM_HOT, (16,)) for modules in MODULES],
        f"constructed, error below {ERROR}": [num_hidden(teacher, ERROR) for teacher in teachers],
        "constructed, exact for 0 and 1": [num_hidden(teacher, ERROR, smallest=1) for teacher in teachers],
    }


def draw(
    figure: Any, counts: dict[str, list[int]], errors: dict[tuple[int, ...], list[tuple[int, float, float]]]
) -> None:
    left, right = figure.subplots(1, 2)
    looks = ((GREY, ":", (14, 1e6)), (BROWN, "--", (130, 1.4e7)))
    looks += ((BLUE, "-", (130, 5e3)), (ORANGE, "-", (130, 2e2)))
    for (name, values), (colour, dash, (x, y)) in zip(counts.items(), looks, strict=True):
        shown = [(modules, value) for modules, value in zip(MODULES, values, strict=True) if value < 1e9]
        left.loglog(*zip(*shown, strict=True), dash, color=colour, marker="o", markersize=2.5, linewidth=1.2)
        left.text(x, y, name, color=colour, fontsize=7, ha="right", va="center")
    left.set(xlabel="modules M", ylabel="hidden neurons", ylim=(50, 3e7))
    left.set_xticks((4, 8, 16, 32, 64, 128), ("4", "8", "16", "32", "64", "128"))
    left.minorticks_off()
    for (hidden, rows), colour in zip(errors.items(), (BLUE, ORANGE), strict=True):
        neurons, bounds, largest = zip(*rows, strict=True)
        layers = "1 hidden layer" if len(hidden) == 1 else f"{len(hidden)} hidden layers"
        right.loglog(neurons, bounds, "-", color=colour, linewidth=1.2, label=f"{layers}: proven bound")
        right.loglog(neurons, largest, "o", color=colour, markersize=3, label=f"{layers}: largest measured")
    right.set(xlabel="hidden neurons", ylabel="error of an output", ylim=(1e-4, 20))
    right.legend(frameon=False, fontsize=7, loc="lower left")
    for axes in (left, right):
        axes.grid(color="#DDDDDD", linewidth=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/theory"))
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs that the largest error is measured over")
    args = parser.parse_args()
    counts = growth()
    print("modules", *MODULES)
    for name, values in counts.items():
        print(name, *(f"{value:,}" if value < 1e9 else f"{value:.1e}" for value in values))
    errors = {}
    for hidden, requested in ERRORS.items():
        teacher = draw_teacher(0, num_hot=NUM_HOT, hidden_dims=hidden).to(torch.float64)
        latents, points = draw_inputs(teacher, args.inputs)
        print(f"hidden {hidden}: root mean square output {teacher.forward(latents, points).square().mean().sqrt():.2f}")
        errors[hidden] = [measure(teacher, error, args.inputs) for error in requested]
        for error, (neurons, bound, largest) in zip(requested, errors[hidden], strict=True):
            print(
                f"  asked {error:g}: {neurons:,} neurons, bound {bound:.3g}, largest {largest:.3g}, {bound / largest:.1f}"
            )
    _, svg = save_screen(args.out, (7.2, 2.9), lambda figure: draw(figure, counts, errors))
    svg.unlink()


if __name__ == "__main__":
    main()
