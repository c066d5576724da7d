"""How tasks that come with an encoding hand it to models: the one thing that both of them know."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hyla.errors import check


@dataclass(frozen=True)
class InputLayout:
    """How a row of `Batch.inputs` holds an encoding of the task, then the points it is to be applied to.

    encoding_shape: `(D,)` one vector, `(T, D)` several, or `(T,)` token ids of a table with `vocab_size` entries (ids are
    exact in float32). num_points, point_dim: N points of width I.
    """

    encoding_shape: tuple[int, ...]
    num_points: int
    point_dim: int
    vocab_size: int | None = None

    @property
    def encoding_size(self) -> int:
        """Numbers of an encoding."""
        return math.prod(self.encoding_shape)

    @property
    def num_encoding_tokens(self) -> int:
        """Tokens that a sequence model reads before the points."""
        return 1 if len(self.encoding_shape) == 1 and self.vocab_size is None else self.encoding_shape[0]

    @property
    def num_tokens(self) -> int:
        return self.num_encoding_tokens + self.num_points

    @property
    def input_dim(self) -> int:
        """Numbers of a row."""
        return self.encoding_size + self.num_points * self.point_dim

    def pack(
        self, encoding: Shaped[Tensor, "*batch ..."], points_BNI: Float[Tensor, "*batch points width"]
    ) -> Float[Tensor, "*batch numbers"]:
        """Rows from encodings `[B, *encoding_shape]` and points `[B, N, I]`; ConfigError for other shapes."""
        shape = tuple(encoding.shape[points_BNI.dim() - 2 :])
        check(shape == self.encoding_shape, "encoding", shape, f"must end in {self.encoding_shape}")
        shape, wanted = tuple(points_BNI.shape[-2:]), (self.num_points, self.point_dim)
        check(shape == wanted, "points", shape, f"must end in {wanted}")
        flat = encoding.flatten(-len(self.encoding_shape)).to(points_BNI.dtype)
        return torch.cat([flat, points_BNI.flatten(-2)], -1)

    def unpack(self, inputs: Float[Tensor, "*batch numbers"]) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`: (encoding, points); token ids come back as integers."""
        encoding, points = inputs.split([self.encoding_size, self.num_points * self.point_dim], -1)
        encoding = encoding.unflatten(-1, self.encoding_shape)
        encoding = encoding.long() if self.vocab_size is not None else encoding
        return encoding, points.unflatten(-1, (self.num_points, self.point_dim))
