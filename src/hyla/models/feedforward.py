"""The position-wise networks of a block: GELU and SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hyla.attention import fused
from hyla.attention.functional import Backend
from hyla.attention.layer import init_fan_in_


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer with P1's initialisation: truncated normal with variance 1/fan_in, bias 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    init_fan_in_(layer.weight, inputs)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class FeedForward(nn.Module):
    """`down(gelu(up(x)))` with the tanh approximation of GELU, with biases (P1's tasks) or without (P2's). Backend eager:
    nothing is fused."""

    def __init__(self, width: int, hidden: int, backend: Backend = "auto", bias: bool = True):
        super().__init__()
        self.up, self.down = linear(width, hidden, bias), linear(hidden, width, bias)
        self.backend = backend

    def forward(self, x: Float[Tensor, "*batch width"], norm: nn.Module | None = None) -> Float[Tensor, "*batch width"]:
        """With `norm`, what a pre-norm block computes: `x + down(gelu(up(norm(x))))`."""
        (hidden,) = fused.project(x, norm, [self.up], self.backend)
        residual = None if norm is None else x
        return fused.add_projected(residual, hidden, self.down, gelu=True, backend=self.backend)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` without biases (Shazeer 2020; P1's language models)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = linear(width, hidden, bias=False), linear(width, hidden, bias=False)
        self.down = linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))
