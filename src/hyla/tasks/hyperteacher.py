"""Hyperteacher (P2): regression of networks whose weights are sums of known modules, in unseen combinations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hyla.configs import check_fractions, check_sizes, check_types
from hyla.errors import check
from hyla.layout import InputLayout
from hyla.tasks.base import Batch, Draws, Stream, ToldTask, check_split
from hyla.tasks.encodings import EncodingName, FewShot, make_encoding
from hyla.tasks.latents import LatentValues, draw_values
from hyla.tasks.support import SupportName, make_support, multi_hot, split_support
from hyla.tasks.teacher import Teacher, draw_teacher

MAX_SIZE = 2**16  # of any width or number


@dataclass(frozen=True)
class HyperteacherConfig:
    """A teacher network of num_modules modules, num_hot of which make a task; which combinations are held out."""

    num_modules: int = 16
    """Modules M."""
    num_hot: int = 3
    """Most modules K that make a task: combinations of 1 to K of them."""
    point_dim: int = 16
    """Width of a point, uniform in [-1, 1]."""
    hidden_dims: tuple[int, ...] = (16,)
    """Widths of the teacher's hidden layers."""
    output_dim: int = 16
    """Width of an answer."""
    num_points: int = 16
    """Points of a task in a batch."""
    bias: bool = True
    """Biases in the teacher's hidden layers."""
    scale: float = math.sqrt(3.0)
    """Variance of the modules' weights, times fan-in."""
    latents: LatentValues = "discrete"
    """Values of the active modules. khot: 1. discrete: 0.5, 0.6, ..., 1. continuous: between 0.5 and 1."""
    support: SupportName = "random"
    """Which combinations are trained on (docs/scaling.md has the list)."""
    held_out_fraction: float = 0.25
    """Share of the combinations held out of training, for supports that do not fix it."""
    validation_fraction: float = 0.0
    """Share of the combinations named by validation_from reserved as split `validation`."""
    validation_from: Literal["train", "held_out"] = "train"
    """Which combinations validation takes its share of; from held_out, the trained ones stay as they are."""
    encoding: EncodingName = "identity"
    """How the task is told to the model."""
    num_examples: int = 50
    """Labelled points of encoding fewshot."""
    evaluate_hot: tuple[int, ...] = ()
    """Also evaluate combinations of exactly so many modules, as splits held_out_hotN: held-out ones, above num_hot any."""
    split_seed: int = 0
    """Sets the support, the encoding and, by default, the teacher."""
    teacher_seed: int | None = None
    """Sets the teacher's weights; split_seed by default."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        sizes = ("num_modules", "num_hot", "point_dim", "output_dim", "num_points", "num_examples")
        check_sizes(self, "task", dict.fromkeys(sizes, (1, MAX_SIZE)))
        check(len(self.hidden_dims) >= 1, "task.hidden_dims", self.hidden_dims, "at least one width")
        for width in self.hidden_dims:
            check(1 <= width <= MAX_SIZE, "task.hidden_dims", self.hidden_dims, f"each from 1 to {MAX_SIZE:,}")
        enough = self.num_points >= 2
        check(
            enough, "task.num_points", self.num_points, "at least 2: R2 is taken against the mean of a task's answers"
        )
        check(
            self.num_hot <= self.num_modules, "task.num_hot", self.num_hot, f"at most num_modules = {self.num_modules}"
        )
        check(self.scale > 0, "task.scale", self.scale, "above 0")
        check_fractions(self, "task", "held_out_fraction", "validation_fraction")
        for count in self.evaluate_hot:
            possible = f"each from 1 to num_modules = {self.num_modules}"
            check(1 <= count <= self.num_modules, "task.evaluate_hot", self.evaluate_hot, possible)
        different = len(set(self.evaluate_hot)) == len(self.evaluate_hot)
        check(different, "task.evaluate_hot", self.evaluate_hot, "each only once")


class Hyperteacher(ToldTask):
    """Batches of the hyperteacher.

    A task is a latent z in R^M with at most K nonzero entries; its network answers points x `[N, point_dim]` with y
    `[N, output_dim]` (:class:`hyla.tasks.teacher.Teacher`). Inputs: rows of `layout`, the encoding of z, then the points.
    Targets `[B, N, output_dim]`. Latents: `task [B, M]`, the z itself. Splits: `train`; `validation` if reserved;
    `held_out`: unseen combinations of modules; `held_out_hotN` for every N in `evaluate_hot`.
    """

    name = "hyperteacher"
    headline = "r2"
    discrete = False

    def __init__(self, config: HyperteacherConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self.support = make_support(
            config.support, config.num_modules, config.num_hot, config.held_out_fraction, config.split_seed
        )
        self.combinations = split_support(self.support, config.validation_from, config.validation_fraction)
        self.sizes = {f"held_out_hot{count}": count for count in config.evaluate_hot}
        for count in config.evaluate_hot:
            sizes = self.support.held_out_sizes
            allowed = f"support {config.support!r} holds out combinations of {', '.join(map(str, sizes))} modules"
            check(count in sizes, "task.evaluate_hot", config.evaluate_hot, allowed)
        self.splits = (*self.combinations, *self.sizes)
        self.teacher = draw_teacher(
            config.split_seed if config.teacher_seed is None else config.teacher_seed,
            num_modules=config.num_modules,
            num_hot=config.num_hot,
            point_dim=config.point_dim,
            hidden_dims=config.hidden_dims,
            output_dim=config.output_dim,
            bias=config.bias,
            scale=config.scale,
        )
        self.encoding = make_encoding(
            config.encoding,
            config.num_modules,
            config.split_seed,
            num_examples=config.num_examples,
            example_dim=config.point_dim + config.output_dim,
        )
        vocab_size = self.encoding.vocab_size
        self.layout = InputLayout(self.encoding.shape, config.num_points, config.point_dim, vocab_size)
        self.output_dim = config.output_dim
        self._teachers: dict[tuple[torch.device, torch.dtype], Teacher] = {}
        self._rows: dict[tuple[str, torch.device], Tensor] = {}

    def batch(
        self,
        split: str,
        index: int,
        batch_size: int,
        *,
        stream: Stream = "training",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        check_split(self, split)
        config = self.config
        draws = Draws(self.seed, self.name, split, stream, index, device=device)
        active_BM = self._active(split, draws, batch_size)
        task_BM = draw_values(draws, active_BM, config.latents).to(dtype)
        num_examples = config.num_examples if isinstance(self.encoding, FewShot) else 0
        drawn = draws.uniform(batch_size, config.num_points + num_examples, config.point_dim, dtype=dtype) * 2 - 1
        answers = self._teacher_on(torch.device(device), dtype).forward(task_BM, drawn)
        points_BNI, answers_BNO = drawn[:, : config.num_points], answers[:, : config.num_points]
        if isinstance(self.encoding, FewShot):
            examples = torch.cat([drawn, answers], -1)[:, config.num_points :]
            encoding = self.encoding.encode(examples)
        else:
            encoding = self.encoding.encode(task_BM)
        return Batch(self.layout.pack(encoding, points_BNI), answers_BNO, {"task": task_BM})

    def loss(self, predictions: Float[Tensor, "batch points outputs"], batch: Batch) -> Float[Tensor, ""]:
        """Squared error."""
        return (predictions - batch.targets).square().mean()

    def scores(self, predictions: Float[Tensor, "batch points outputs"], batch: Batch) -> dict[str, Tensor]:
        """`r2`: 1 - squared error / variance over the task's points, for every output unit, then the mean over the units
        that vary (0 where none does); `loss`: squared error."""
        error_BNO = (predictions - batch.targets).square()
        variance_BO = batch.targets.var(-2, correction=0)
        varies_BO = variance_BO > 0
        r2_BO = torch.where(varies_BO, 1 - error_BNO.mean(-2) / variance_BO.where(varies_BO, 1), 0)
        return {"r2": r2_BO.sum(-1) / varies_BO.sum(-1).clamp(min=1), "loss": error_BNO.mean((-2, -1))}

    def _active(self, split: str, draws: Draws, batch_size: int) -> Tensor:
        """Which modules are active, 0 or 1, `[B, M]`."""
        if split in self.sizes:
            rows_BK = self.support.draw_held_out(draws, batch_size, self.sizes[split])
        else:
            if (split, draws.device) not in self._rows:
                self._rows[split, draws.device] = self.combinations[split].to(draws.device)
            rows_CK = self._rows[split, draws.device]
            rows_BK = rows_CK[draws.integers(len(rows_CK), batch_size)]
        return multi_hot(rows_BK, self.config.num_modules)

    def _teacher_on(self, device: torch.device, dtype: torch.dtype) -> Teacher:
        if (device, dtype) not in self._teachers:
            self._teachers[device, dtype] = self.teacher.to(device).to(dtype)
        return self._teachers[device, dtype]
