"""What every task offers, and the random numbers they all draw from.

A batch is a pure function of (seed, split, stream, index): no generator is carried from one batch to the next, so that
any step, rank or ensemble member can be drawn alone, and a resumed run sees exactly the batches it would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hyla.layout import InputLayout

Stream = Literal["training", "evaluation"]


def entropy(*path: int | str) -> list[int]:
    """128 bits that depend on every part of `path`, as four 32-bit words."""
    digest = hashlib.blake2b("/".join(f"{type(part).__name__}:{part}" for part in path).encode(), digest_size=16)
    return [int(word) for word in np.frombuffer(digest.digest(), dtype="<u4")]


class Draws:
    """Random numbers named by a path such as (seed, "logic", "train", "training", 17).

    On the CPU they come from NumPy's counter-based Philox with a 128-bit key: torch's CPU generator keeps only 32 bits of
    its seed, so that among a few hundred thousand batches two would be expected to repeat each other. Other devices use
    a torch generator of their own with a 64-bit seed; the numbers therefore differ by type of device.
    """

    def __init__(self, *path: int | str, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        words = entropy(*path)
        if self.device.type == "cpu":
            self._numpy = np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
            self._torch = None
        else:
            self._numpy = None
            self._torch = torch.Generator(self.device)
            self._torch.manual_seed(words[0] | words[1] << 32)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1), shape `shape`."""
        if self._numpy is not None:
            drawn = self._numpy.random(shape, dtype=np.float64 if dtype == torch.float64 else np.float32)
            return torch.from_numpy(drawn).to(dtype)
        return torch.rand(shape, generator=self._torch, device=self.device, dtype=dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform int64 numbers in 0..high-1, shape `shape`."""
        if self._numpy is not None:
            return torch.from_numpy(self._numpy.integers(high, size=shape, dtype=np.int64))
        return torch.randint(high, shape, generator=self._torch, device=self.device)

    def permutations(self, length: int, *shape: int) -> Tensor:
        """Independent uniform permutations of 0..length-1, shape `(*shape, length)`."""
        # float64 keys: ties, which would favour some orders, then have probability below 1e-13
        return self.uniform(*shape, length, dtype=torch.float64).argsort(-1)


@dataclass(frozen=True)
class Batch:
    """B sequences of a task.

    inputs: what the model reads, `[B, T, input_dim]`, or `[B, input_dim]` rows of an :class:`InputLayout`. targets: what
    it must answer (the task's docstring gives the shape). latents: the ground truth that generated each sequence, tensors
    with leading axis B.
    """

    inputs: Tensor
    targets: Tensor
    latents: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.inputs)

    def head(self, count: int) -> Batch:
        """The first `count` sequences."""
        return self.rows(slice(count))

    def rows(self, rows: slice) -> Batch:
        """Some of the sequences."""
        latents = {name: value[rows] for name, value in self.latents.items()}
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], latents=latents)

    def to(self, device: torch.device | str) -> Batch:
        latents = {name: value.to(device) for name, value in self.latents.items()}
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), latents=latents)


@runtime_checkable
class Task(Protocol):
    """A source of batches, a loss and per-sequence scores.

    splits: their names, `train` first. The same split is drawn through two streams that never meet: `training` for
    gradient steps and `evaluation` for measurements. predict_at: the positions (of T) whose outputs are the answer.
    headline: the score that results are reported in; higher is better unless `lower_is_better`. discrete: whether sequences
    can repeat by chance, so that a result counts those that were also trained on. scores_by_answer: whether the mean of a
    score weighs every answer equally, rather than every sequence. layout: how inputs hold an encoding of
    the task and points, for tasks that come with one; None where inputs are tokens `[B, T, input_dim]`.
    """

    name: str
    config: Any
    splits: tuple[str, ...]
    headline: str
    lower_is_better: bool
    scores_by_answer: bool
    discrete: bool

    @property
    def output_dim(self) -> int: ...

    @property
    def input_dim(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def predict_at(self) -> slice: ...

    @property
    def layout(self) -> InputLayout | None: ...

    @property
    def evaluation_batch(self) -> int:
        """Sequences that are evaluated at once."""
        ...

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
        """Batch number `index` of a split."""
        ...

    def loss(self, predictions: Tensor, batch: Batch) -> Tensor:
        """Mean loss of `predictions [B, answers, output_dim]`."""
        ...

    def scores(self, predictions: Tensor, batch: Batch) -> dict[str, Tensor]:
        """One number per sequence `[B]` for each metric."""
        ...

    def weights(self, batch: Batch) -> Tensor:
        """`[B]`: how many answers each sequence's loss and scores are means over."""
        ...

    def size(self, split: str) -> int | None:
        """Sequences that there are to evaluate; None where they never end."""
        ...

    def summary(self, split: str, scores: dict[str, float]) -> dict[str, float]:
        """Further metrics that follow from the mean scores of a split."""
        ...


class GeneratedTask:
    """What most tasks have in common: sequences without end, each with as many answers as any other."""

    lower_is_better = False
    scores_by_answer = False
    evaluation_batch: int = 512

    def weights(self, batch: Batch) -> Tensor:
        return torch.ones(len(batch), dtype=torch.int64, device=batch.targets.device)

    def size(self, split: str) -> int | None:
        return None

    def summary(self, split: str, scores: dict[str, float]) -> dict[str, float]:
        return {}


class ToldTask(GeneratedTask):
    """Base of tasks that come with an encoding: what follows from their layout."""

    layout: InputLayout

    @property
    def input_dim(self) -> int:
        return self.layout.input_dim

    @property
    def sequence_length(self) -> int:
        return self.layout.num_tokens

    @property
    def predict_at(self) -> slice:
        return slice(self.layout.num_encoding_tokens, None)


def check_split(task: Task, split: str) -> None:
    """Raise `ValueError` with the possible names when `split` is not one of the task's."""
    if split not in task.splits:
        raise ValueError(f"split = {split!r} is not possible: task {task.name!r} has {', '.join(task.splits)}")


class Overlap(NamedTuple):
    """How many samples of an evaluation stream were trained on: `shared` of `total`."""

    shared: int
    total: int

    @property
    def rate(self) -> float:
        return self.shared / self.total


def overlap_rate(
    task: Task,
    split: str,
    num_batches: int,
    batch_size: int,
    evaluation_batches: int | None = None,
    evaluation_size: int | None = None,
) -> Overlap:
    """How many samples of a split's evaluation stream also occur among the first training batches.

    Two samples are the same where inputs and targets agree bit for bit. Takes the first `num_batches` training batches
    of split `train`, and of `split` the first `evaluation_batches` evaluation batches of `evaluation_size` (by default as
    many of the same size).
    """
    check_split(task, split)
    seen = {
        sample
        for index in range(num_batches)
        for sample in _sample_hashes(task.batch("train", index, batch_size, stream="training"))
    }
    shared = count = 0
    for index in range(num_batches if evaluation_batches is None else evaluation_batches):
        hashes = _sample_hashes(task.batch(split, index, evaluation_size or batch_size, stream="evaluation"))
        shared += sum(sample in seen for sample in hashes)
        count += len(hashes)
    return Overlap(shared, count)


def _sample_hashes(batch: Batch) -> list[bytes]:
    """128 bits that depend on the inputs and targets of each sample."""
    inputs, targets = batch.inputs.cpu().numpy(), batch.targets.cpu().numpy()
    return [
        hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=16).digest()
        for x, y in zip(inputs, targets, strict=True)
    ]
