"""How a task's latents z are shown to the model (P2): as they are, or in a form that has to be decoded first.

z `[..., M]` holds a number in [0, 1] for each of M modules, 0 where the module is inactive. An encoding has

- `shape`: of what stands in place of z: `(M,)`; `(2 M,)` token ids below `vocab_size`; `(examples, width)`.
- `vocab_size`: None unless it is made of token ids.
- `encode`, and `decode`, its inverse, on any device, in the dtype of what they are given.

What is drawn at random is drawn on the CPU from a seed, so that it is the same on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hyla.errors import check
from hyla.tasks.base import entropy

EncodingName = Literal["identity", "orthogonal", "tokens", "invertible_nn", "interval_shuffle", "fewshot"]

NUM_COUPLINGS = 3  # of the invertible network

NUM_EXAMPLES = 50  # of the few-shot encoding

COUPLING_STD = 0.1  # of the invertible network's weights, whatever their number of inputs


class Encoding(ABC):
    """Base of the six encodings."""

    name: EncodingName
    shape: tuple[int, ...]
    vocab_size: int | None = None

    @abstractmethod
    def encode(self, latents: Tensor) -> Tensor:
        """The encoding `[..., *shape]` of latents `[..., M]`."""

    def decode(self, encoded: Tensor) -> Tensor:
        """The latents `[..., M]` that were encoded."""
        raise NotImplementedError(f"the encoding {self.name!r} does not hold the latents")


def make_encoding(
    name: EncodingName,
    num_modules: int,
    seed: int = 0,
    *,
    num_examples: int = NUM_EXAMPLES,
    example_dim: int | None = None,
) -> Encoding:
    """The encoding called `name` for latents of `num_modules` modules.

    seed: what is drawn at random depends on it and on `num_modules` alone. num_examples, example_dim: of `fewshot`, whose
    examples the task makes. Raises `ConfigError`.
    """
    check(name in get_args(EncodingName), "task.encoding", name, f"one of {', '.join(get_args(EncodingName))}")
    check(num_modules >= 1, "task.num_modules", num_modules, "from 1")
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy(seed, "encoding", name, num_modules))))
    if name == "identity":
        return Identity(num_modules)
    if name == "orthogonal":
        return Orthogonal(torch.from_numpy(_random_orthogonal(num_modules, rng)))
    if name == "tokens":
        return Tokens(num_modules)
    if name == "invertible_nn":
        return InvertibleNetwork(num_modules, _random_couplings(num_modules, rng))
    if name == "interval_shuffle":
        return IntervalShuffle(num_modules, rng.permutation(10).tolist())
    check(num_examples >= 1, "task.num_examples", num_examples, "from 1")
    known = example_dim is not None and example_dim >= 1
    check(known, "example_dim", example_dim, "fewshot needs the numbers of one labelled point, from 1")
    assert example_dim is not None
    return FewShot(num_examples, example_dim)


class Identity(Encoding):
    """z itself."""

    name = "identity"

    def __init__(self, num_modules: int):
        self.shape = (num_modules,)

    def encode(self, latents: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        return latents

    def decode(self, encoded: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        return encoded


class Orthogonal(Encoding):
    """Q z, with a fixed orthogonal matrix Q `[M, M]`."""

    name = "orthogonal"

    def __init__(self, matrix: Float[Tensor, "modules modules"]):
        self.shape = (len(matrix),)
        self.matrix = matrix
        self._moved = _Moved([matrix])

    def encode(self, latents: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        (matrix,) = self._moved.like(latents)
        return latents @ matrix.T

    def decode(self, encoded: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        (matrix,) = self._moved.like(encoded)
        return encoded @ matrix


class Tokens(Encoding):
    """For each module m (from 0) two ids: its own, m + 1, and that of its value, int(10 z_m) + M + 1.

    Values go down to a tenth, so that only multiples of a tenth are decoded as they were.
    """

    name = "tokens"

    def __init__(self, num_modules: int):
        self.num_modules = num_modules
        self.shape = (2 * num_modules,)
        self.vocab_size = num_modules + 12  # ids 1..M are modules, M+1..M+11 the values 0.0, 0.1, ... 1.0

    def encode(self, latents: Float[Tensor, "*batch modules"]) -> Int[Tensor, "*batch tokens"]:
        value = _tenths(latents) + self.num_modules + 1
        module = torch.arange(1, self.num_modules + 1, device=latents.device).expand(value.shape)
        return torch.stack([module, value], -1).flatten(-2)

    def decode(self, encoded: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch modules"]:
        return (encoded[..., 1::2] - self.num_modules - 1) / 10


class InvertibleNetwork(Encoding):
    """Three affine couplings, with the order of the modules reversed between them.

    One coupling leaves the first half a of its input as it is; the second half b becomes b * (1 + tanh(s) / 2) + t, where
    (s, t) = MLP(a), with two hidden layers of 2 M sigmoid units. A factor is between 0.5 and 1.5, which bounds how much any
    coupling can shrink or stretch. With an odd number of modules a is the smaller half.
    """

    name = "invertible_nn"

    def __init__(self, num_modules: int, couplings: Sequence[Sequence[tuple[Tensor, Tensor]]]):
        """couplings: for each, (weight `[in, out]`, bias `[out]`) of the three layers of its MLP."""
        self.shape = (num_modules,)
        self._half = num_modules // 2
        self._layers = len(couplings[0])
        self._moved = _Moved([part for layers in couplings for layer in layers for part in layer])

    def encode(self, latents: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        state = latents
        for number, couplings in enumerate(self._couplings(latents)):
            state = state.flip(-1) if number else state
            first, second = state[..., : self._half], state[..., self._half :]
            factor, shift = self._affine(first, couplings)
            state = torch.cat([first, second * factor + shift], -1)
        return state

    def decode(self, encoded: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        state = encoded
        for number, coupling in reversed(list(enumerate(self._couplings(encoded)))):
            first, second = state[..., : self._half], state[..., self._half :]
            factor, shift = self._affine(first, coupling)
            state = torch.cat([first, (second - shift) / factor], -1)
            state = state.flip(-1) if number else state
        return state

    def _couplings(self, like: Tensor) -> list[list[Tensor]]:
        parts, each = self._moved.like(like), 2 * self._layers
        return [parts[start : start + each] for start in range(0, len(parts), each)]

    def _affine(self, first: Tensor, coupling: list[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = first
        for weight, bias in zip(coupling[:-2:2], coupling[1:-2:2], strict=True):
            hidden = torch.sigmoid(hidden @ weight + bias)
        scale, shift = (hidden @ coupling[-2] + coupling[-1]).chunk(2, -1)
        return 1 + torch.tanh(scale) / 2, shift


class IntervalShuffle(Encoding):
    """Tenth i of [0, 1] is moved to tenth `order[i]`, each point keeping its place within a tenth; 1.0 stays.

    Inactive modules move too. What float32 cannot tell from the start of a tenth (2e-7 below it) is taken for it, and the
    last 1e-6 of a tenth for one point, so that rounding never carries a point into another tenth.
    """

    name = "interval_shuffle"

    def __init__(self, num_modules: int, order: Sequence[int]):
        assert sorted(order) == list(range(10)), order
        self.shape = (num_modules,)
        self.order = tuple(order)
        forward = torch.tensor(self.order)
        self._moved = _Moved([forward, forward.argsort()])

    def encode(self, latents: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        return _move_tenths(latents, self._moved.like(latents)[0])

    def decode(self, encoded: Float[Tensor, "*batch modules"]) -> Float[Tensor, "*batch modules"]:
        return _move_tenths(encoded, self._moved.like(encoded)[1])


class FewShot(Encoding):
    """Labelled points of the task in place of z; `encode` takes these examples, which the task makes."""

    name = "fewshot"

    def __init__(self, num_examples: int, example_dim: int):
        self.shape = (num_examples, example_dim)

    def encode(self, latents: Float[Tensor, "*batch examples width"]) -> Float[Tensor, "*batch examples width"]:
        """latents: the examples `[..., num_examples, example_dim]`, a point and the task's answer in each row."""
        check(latents.shape[-2:] == self.shape, "examples", tuple(latents.shape), f"must end in {self.shape}")
        return latents


class _Moved:
    """Tensors made on the CPU, kept on every device and in every dtype that they were asked for in."""

    def __init__(self, parts: Sequence[Tensor]):
        self._parts = list(parts)
        self._kept: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def like(self, tensor: Tensor) -> list[Tensor]:
        key = (tensor.device, tensor.dtype)
        if key not in self._kept:
            self._kept[key] = [part.to(tensor) for part in self._parts]
        return self._kept[key]


def _tenths(values: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """int(10 z) in float32, a value that rounding leaves just below a tenth taken for it; from 0 to 10."""
    return (values.float() * 10 + 2e-6).long().clamp(0, 10)


def _move_tenths(values: Float[Tensor, "*batch"], order: Float[Tensor, "10"]) -> Float[Tensor, "*batch"]:
    tenth = _tenths(values)
    within = (values * 10 - tenth).clamp(0, 1 - 1e-5)
    moved = (order[tenth.clamp(max=9)] + within) / 10
    return torch.where(tenth == 10, values, moved)


def _random_orthogonal(size: int, rng: np.random.Generator) -> np.ndarray:
    """An orthogonal matrix, all equally likely (Haar)."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)  # QR fixes signs by its own convention; this undoes it


def _random_couplings(num_modules: int, rng: np.random.Generator) -> list[list[tuple[Tensor, Tensor]]]:
    first, second = num_modules // 2, num_modules - num_modules // 2
    widths = (first, 2 * num_modules, 2 * num_modules, 2 * second)
    return [
        [
            (torch.from_numpy(COUPLING_STD * rng.standard_normal((a, b))), torch.zeros(b, dtype=torch.float64))
            for a, b in pairwise(widths)
        ]
        for _ in range(NUM_COUPLINGS)
    ]
