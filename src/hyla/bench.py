"""How fast it is: our code against a named baseline, in alternation, in one process.

Nothing is timed before it has been found correct: a baseline that computes something else makes its ratio worthless.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyla import plain
from hyla.attention import hyper_attention, resolve_mechanism
from hyla.attention.mechanisms import MECHANISMS
from hyla.errors import HylaError, check
from hyla.tasks.base import Batch
from hyla.training.config import make_task, preset_default
from hyla.training.ensemble import Ensemble, member_configs
from hyla.training.loop import apply_gradients, compute_loss, fresh_model
from hyla.training.optimizer import make_optimizer

Step = Callable[[], object]

WARMUP = 3


class WrongResultError(HylaError):
    """Our result and the baseline's differ, so neither is timed."""

    exit_status = 1


@dataclass(frozen=True)
class Row:
    """Median milliseconds of ours and of the baseline, and baseline / ours."""

    task: str
    mechanism: str
    baseline: str
    ours_ms: float
    baseline_ms: float
    ratio: float

    @staticmethod
    def of(task: str, mechanism: str, baseline: str, ours: Sequence[float], theirs: Sequence[float]) -> Row:
        """The ratio is the median of the ratios of neighbouring pairs, which drift less than the times themselves."""
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        return Row(task, mechanism, baseline, statistics.median(ours), statistics.median(theirs), ratio)

    def as_dict(self) -> dict:
        return asdict(self)


def alternate(first: Step, second: Step, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each call of two functions, called in turn after a warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(-WARMUP, repeats):
        for step, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            step()
            if index >= 0:
                taken.append(1e3 * (time.perf_counter() - start))
    return times


def check_equal(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Raise WrongResultError if two results differ by more than `tolerance` of the largest magnitude."""
    error = (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-30)
    if not error <= tolerance:
        raise WrongResultError(f"{what} differs from the baseline's by {error:.2g} of its largest magnitude: not timed")


def bench_train(tasks: Sequence[str], mechanisms: Sequence[str], repeats: int) -> list[Row]:
    """One whole training step (data, forward, backward, AdamW) at the paper's sizes, batch 128, float32, no dropout,
    against the same step in textbook PyTorch (hyla.plain), whose inputs are drawn once."""
    for task in tasks:
        check(task in plain.SIZES, "tasks", task, f"choose from {', '.join(plain.SIZES)}")
    for mechanism in mechanisms:
        check(mechanism in ("softmax", "hyla"), "mechanisms", mechanism, "the plain step has softmax and hyla")
    rows = []
    for task in tasks:
        for mechanism in mechanisms:
            check_step(task, mechanism)
            ours, theirs = alternate(our_step(task, mechanism), plain.plain_step(task, mechanism), repeats)
            rows.append(Row.of(task, mechanism, "plain", ours, theirs))
    return rows


def bench_config(task: str, mechanism: str):
    """P1's sizes with no dropout."""
    base = preset_default(task)
    return replace(base, model=replace(base.model, mechanism=mechanism, attention_dropout=0.0))


def our_step(task_name: str, mechanism: str) -> Step:
    """A function that makes one training step as :class:`hyla.training.loop.Trainer` does."""
    config = bench_config(task_name, mechanism)
    task = make_task(config)
    model = fresh_model(config, task, torch.device("cpu"))
    optimizer = make_optimizer(model, config.optimizer)
    index = 0

    def step() -> None:
        nonlocal index
        batch = task.batch("train", index, config.training.batch_size)
        compute_loss(model, task, batch).backward()
        apply_gradients(model, optimizer, config.optimizer.lr, None)
        index += 1

    return step


def check_step(task_name: str, mechanism: str) -> None:
    """Our model and the plain one, with the same weights and batch, have the same loss and gradients."""
    config = bench_config(task_name, mechanism)
    task = make_task(config)
    ours = fresh_model(config, task, torch.device("cpu"))
    theirs = plain.PlainTransformer(plain.SIZES[task_name], mechanism)
    theirs.load_state_dict(ours.state_dict())
    batch: Batch = task.batch("train", 0, 16)
    loss = compute_loss(ours, task, batch)
    plain_loss = plain.loss(task_name, theirs(batch.inputs), batch.targets)
    loss.backward()
    plain_loss.backward()
    check_equal(f"the loss of {task_name} {mechanism}", loss, plain_loss, 1e-5)
    check_equal(f"the gradient of {task_name} {mechanism}", _gradient(ours), _gradient(theirs), 1e-4)


def _gradient(model: nn.Module) -> Tensor:
    found = sorted(model.named_parameters(), key=lambda item: item[0])
    return torch.cat([parameter.grad.flatten() for _, parameter in found if parameter.grad is not None])


@dataclass(frozen=True)
class AttentionSize:
    """Sizes of one call of `hyper_attention`: batch, heads, tokens, width per head."""

    batch: int
    heads: int
    tokens: int
    depth: int
    causal: bool = True

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} T{self.tokens} D{self.depth}{' causal' if self.causal else ''}"


ATTENTION_SIZES = (
    AttentionSize(128, 8, 32, 2, causal=False),
    AttentionSize(128, 16, 36, 4, causal=False),
    AttentionSize(1, 8, 256, 64),
    AttentionSize(1, 8, 1024, 64),
)


def bench_attention(
    sizes: Sequence[AttentionSize],
    mechanisms: Sequence[str],
    baselines: Sequence[str],
    repeats: int,
    backend: str = "auto",
) -> list[Row]:
    """Forward and backward of `hyper_attention` against `eager` or torch's `sdpa` (softmax only), float32."""
    for baseline in baselines:
        check(baseline in ("eager", "sdpa"), "against", baseline, "choose from eager, sdpa")
    for mechanism in mechanisms:
        check(mechanism in MECHANISMS, "mechanisms", mechanism, f"choose from {', '.join(MECHANISMS)}")
    rows = []
    for size in sizes:
        for mechanism in mechanisms:
            for baseline in baselines:
                if baseline == "sdpa" and mechanism != "softmax":
                    continue
                mine, result = _attention_step(size, mechanism, backend)
                other, expected = _attention_step(size, mechanism, baseline)
                mine()
                other()
                for name in result:
                    check_equal(f"{name} of {mechanism} at {size}", result[name], expected[name], 1e-4)
                ours, theirs = alternate(mine, other, repeats)
                rows.append(Row.of(str(size), mechanism, baseline, ours, theirs))
    return rows


def _attention_step(size: AttentionSize, mechanism: str, backend: str) -> tuple[Step, dict[str, Tensor]]:
    """A function that computes output and gradients, and the dict that it puts them in."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.batch, size.tokens, size.heads, size.depth)  # as projections leave it in memory
    query, key, value, cotangent = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4))
    further = resolve_mechanism(mechanism).value_network.num_further_weights
    weights = [
        torch.randn(size.heads, size.depth, size.depth, generator=generator) / size.depth for _ in range(further)
    ]
    result: dict[str, Tensor] = {}

    def step() -> None:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        if backend == "sdpa":
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=size.causal)
        else:
            options: dict[str, Any] = {"causal": size.causal, "value_weights": weights, "backend": backend}
            out = hyper_attention(q, k, v, mechanism=mechanism, **options)
        grads = torch.autograd.grad(out, (q, k, v), cotangent)
        names = ("the output", "the query's gradient", "the key's gradient", "the value's gradient")
        result.update(zip(names, (out.detach(), *grads), strict=True))

    return step, result


# --- how cost grows ---------------------------------------------------------------------------------------------------

# axis -> the values it takes while the others stay at the base
SCALING_AXES: dict[str, tuple[int, ...]] = {
    "tokens": (32, 64, 128, 256, 512),
    "heads": (4, 8, 16, 32, 64),
    "width": (64, 128, 256, 512, 1024),
    "batch": (16, 32, 64, 128, 256),
    "members": (1, 2, 4, 8),
}
SCALING_BASE = {"tokens": 32, "heads": 8, "width": 128, "batch": 32, "members": 1}


@dataclass(frozen=True)
class Point:
    """One training step of a fuzzy-logic model at a size: median milliseconds and how much the process grew at its peak."""

    mechanism: str
    axis: str
    value: int
    step_ms: float
    peak_mib: float


def bench_scaling(mechanisms: Sequence[str], repeats: int, axes: Sequence[str] | None = None) -> list[Point]:
    """Step time and memory against tokens T, heads H (2 wide each), width E (MLP 2 E), batch and ensemble members. Each
    axis (all by default) is measured in a process of its own."""
    axes = list(SCALING_AXES) if axes is None else axes
    for axis in axes:
        check(axis in SCALING_AXES, "axes", axis, f"choose from {', '.join(SCALING_AXES)}")
    points = []
    for mechanism in mechanisms:
        check(mechanism in MECHANISMS, "mechanisms", mechanism, f"choose from {', '.join(MECHANISMS)}")
        for axis in axes:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                points += pool.submit(_measure_axis, mechanism, axis, repeats, torch.get_num_threads()).result()
    return points


def fitted_exponent(points: Sequence[Point], quantity: str) -> float:
    """The slope of log(quantity) against log(value) over the larger half of the values; constants matter less there."""
    chosen = sorted(points, key=lambda point: point.value)[len(points) // 2 - (len(points) == 2) :]
    x = [math.log(point.value) for point in chosen]
    y = [math.log(max(getattr(point, quantity), 1e-3)) for point in chosen]
    return statistics.linear_regression(x, y).slope


def _measure_axis(mechanism: str, axis: str, repeats: int, threads: int) -> list[Point]:
    torch.set_num_threads(threads)
    before = _peak_mib()
    points = []
    for value in SCALING_AXES[axis]:  # rising, so that the peak so far is this value's
        step_ms = _step_ms(mechanism, SCALING_BASE | {axis: value}, repeats)
        points.append(Point(mechanism, axis, value, step_ms, _peak_mib() - before))
    return points


def _step_ms(mechanism: str, sizes: dict[str, int], repeats: int) -> float:
    """Median milliseconds of a step of a fuzzy-logic model."""
    base = preset_default("logic")
    config = replace(
        base,
        task=replace(base.task, num_points=sizes["tokens"]),
        model=replace(
            base.model,
            mechanism=mechanism,
            num_heads=sizes["heads"],
            qk_dim=2 * sizes["heads"],
            v_dim=2 * sizes["heads"],
            embed_dim=sizes["width"],
            mlp_dim=2 * sizes["width"],
        ),
        training=replace(base.training, batch_size=sizes["batch"]),
    )
    with tempfile.TemporaryDirectory() as folder:
        ensemble = Ensemble.start(member_configs(config, {"seeds": [sizes["members"]]}), Path(folder) / "runs")
        times, _ = alternate(ensemble.update, lambda: None, repeats)
    return statistics.median(times)


def _peak_mib() -> float:
    """The largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource  # where there is no /proc

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
