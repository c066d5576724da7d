"""What runs cost: seconds and memory, from what runs here have measured, else from a table.

The table was measured on two CPU cores with one thread per run and both cores busy (`docs/experiments.md`); elsewhere it
is a guess until the first run has logged its speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hyla.attention import MECHANISMS
from hyla.models.hypernetwork import HypernetworkConfig
from hyla.models.mlp import MLPConfig
from hyla.models.transformer import TransformerConfig
from hyla.tasks.goal_grid import GoalConfig
from hyla.tasks.hyperteacher import HyperteacherConfig
from hyla.tasks.preference_grid import PreferenceConfig
from hyla.tasks.sraven import SravenConfig
from hyla.tasks.text import TextConfig
from hyla.training.config import TrainConfig, preset_paper

STEP_SECONDS = {"logic": 0.045, "sraven": 0.160}  # at the paper's sizes, softmax attention and HYLA alike
EXPONENTS = {"tokens": 0.8, "width": 1.5, "layers": 0.9, "batch": 0.9}  # of the seconds in each size, relative to those
MIXTURE_FACTOR = 6.0  # a mixture of experts computes every expert for every token
DEEP_FACTOR = 3.0  # of value networks with more than two layers
FLOPS_PER_SECOND = 9e10  # of the dense models of the second paper's tasks
OVERHEAD_SECONDS = 0.002  # of their steps
SCORE_SECONDS = 1.5e-8  # of an attention score in those steps, with its products, forward and backward
FORWARD_SHARE = 1 / 3  # of a training step's time: an evaluated sequence has no backward pass
OUTPUTS = 16  # of those tasks, roughly
START_SECONDS = 5.0  # a process that imports torch, builds its model and ends

BASE_GIB = 0.31  # of a process with torch and no model
BYTES_PER_TOKEN = 80  # of activations, for each layer and unit of width


def num_tokens(config: TrainConfig) -> int:
    """Length of a sequence, or points of a task."""
    task = config.task
    if isinstance(task, SravenConfig):
        return task.num_rows * task.num_columns * task.num_features
    if isinstance(task, PreferenceConfig):
        return task.time_limit
    if isinstance(task, GoalConfig):
        return task.time_limit or task.size**2 // 2
    return task.sequence_length if isinstance(task, TextConfig) else task.num_points


def point_dim(config: TrainConfig) -> int:
    """Width of a point, of tasks that come with an encoding."""
    task = config.task
    if isinstance(task, PreferenceConfig):
        return 7 * 7 * (task.num_features + 2)
    if isinstance(task, GoalConfig):
        return task.size**2 * (task.num_objects + 2)
    return task.point_dim if isinstance(task, HyperteacherConfig) else 0


def num_weights(config: TrainConfig) -> int:
    """Weights that every token or point is multiplied with, roughly."""
    model, width = config.model, point_dim(config)
    if isinstance(model, MLPConfig):
        return model.width * ((model.num_layers - 1) * model.width + width + OUTPUTS)
    if isinstance(model, HypernetworkConfig):
        return model.width * (width + OUTPUTS)
    experts = model.num_experts if model.mlp == "mixture" else 1
    each = model.num_layers * 2 * (model.mlp_dim * experts + model.qk_dim + model.v_dim)
    vocabulary = config.task.vocab_size if isinstance(config.task, TextConfig) else 0
    return model.embed_dim * (each + width + vocabulary)


@lru_cache(maxsize=100_000)
def size_of(config: TrainConfig) -> Any:
    """What speed and memory depend on: runs of one size differ in seed, split and hyperparameters only."""
    task = replace(config.task, split_seed=0)
    if not isinstance(task, TextConfig):
        task = replace(task, validation_fraction=0.0)
    return task, config.model, config.training.batch_size, config.training.precision, config.training.device


def step_seconds(config: TrainConfig) -> float:
    """Seconds of a training step by the table."""
    model = config.model
    if config.task_name not in STEP_SECONDS or not isinstance(model, TransformerConfig):
        tokens, batch = num_tokens(config), config.training.batch_size
        products = 6 * batch * tokens * num_weights(config) / FLOPS_PER_SECOND  # forward and two backward ones
        attends = isinstance(model, TransformerConfig)
        scores = batch * tokens**2 * model.num_heads * model.num_layers if attends else 0
        return OVERHEAD_SECONDS + products + scores * SCORE_SECONDS
    base = preset_paper(config.task_name)
    sizes = base.model
    assert isinstance(sizes, TransformerConfig)
    seconds = STEP_SECONDS[config.task_name]
    for name, now, then in (
        ("tokens", num_tokens(config), num_tokens(base)),
        ("width", model.embed_dim, sizes.embed_dim),
        ("layers", model.num_layers, sizes.num_layers),
        ("batch", config.training.batch_size, base.training.batch_size),
    ):
        seconds *= (now / then) ** EXPONENTS[name]
    depth = model.depth or MECHANISMS[model.mechanism].value_network.depth
    return seconds * (MIXTURE_FACTOR if model.mlp == "mixture" else 1) * (DEEP_FACTOR if depth > 2 else 1)


def work(config: TrainConfig, step: int = 0) -> float:
    """What is left of a run after `step`, in training steps, its evaluations counted as the steps they take as long as."""
    loop = config.training
    splits = 2 if isinstance(config.task, TextConfig) else 4 if config.task.validation_fraction else 3
    in_steps = splits * FORWARD_SHARE / loop.batch_size  # an evaluated sequence of every split
    evaluations = max(0, (loop.steps - 1) // loop.eval_every - step // loop.eval_every)
    return loop.steps - step + in_steps * (evaluations * loop.eval_samples + loop.final_eval_samples)


def peak_gib(config: TrainConfig) -> float:
    """Memory of a run's process by the table, in GiB; somewhat too high rather than too low."""
    model, weights = config.model, num_weights(config)
    tokens = config.training.batch_size * num_tokens(config)
    if isinstance(model, TransformerConfig):
        numbers = tokens * model.num_layers * model.embed_dim * (3 if model.mlp == "mixture" else 1)
    else:
        numbers = tokens * model.width * (model.num_layers if isinstance(model, MLPConfig) else 1)
    return BASE_GIB + (numbers * BYTES_PER_TOKEN + 16 * weights) / 2**30  # 16 bytes: weight, gradient and two moments


def seconds_each(runs: Sequence[tuple[TrainConfig, int | None, float | None]]) -> list[float]:
    """Seconds that each of `runs` still takes by itself.

    runs: (config, step, steps per second); step None for one that has ended, speed None where none was measured. A run
    goes at the measured speed of its size, else at the table's, corrected by what other runs of its task have measured.
    """
    measured: dict[Any, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for config, _, speed in runs:
        if speed:
            measured.setdefault(size_of(config), []).append(1 / speed)
            ratios.setdefault(config.task_name, []).append(1 / speed / step_seconds(config))
    medians = {size: statistics.median(seconds) for size, seconds in measured.items()}
    corrections = {task: statistics.median(found) for task, found in ratios.items()}
    left = []
    for config, step, _ in runs:
        seconds = medians.get(size_of(config)) or step_seconds(config) * corrections.get(config.task_name, 1.0)
        left.append(0.0 if step is None else START_SECONDS + seconds * work(config, step))
    return left


def seconds_left(each: Sequence[float], at_a_time: int) -> float:
    """Seconds until runs that take `each` have all ended, `at_a_time` together."""
    return max(max(each, default=0.0), sum(each) / at_a_time)


def duration(seconds: float) -> str:
    """A length of time in words: `40 s`, `12 min`, `3 h 20 min`, `5 days 3 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h"
