"""Position schemes: T5 relative bias, rotary, sinusoidal."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hyla.attention.compiled import constant_result
from hyla.errors import check


@lru_cache
def bucket_thresholds(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket but the first, for distances in one direction.

    The first half of the buckets hold one distance each; bucket `half + j` starts where
    `log(distance / half) / log(max_distance / half) * (num_buckets - half) >= j`. Near a whole number this is compared as
    exact integer powers, so that a distance on a boundary can never fall one bucket low through rounding.
    """
    half = num_buckets // 2
    rest = num_buckets - half
    check(half >= 1, "num_buckets", num_buckets, "at least 2 buckets in each direction")
    possible = max_distance > half
    check(
        possible,
        "max_distance",
        max_distance,
        f"must exceed {half}, the distances that {num_buckets} buckets hold singly",
    )
    thresholds = list(range(1, half + 1))
    for j in range(1, rest):
        start = half * (max_distance / half) ** (j / rest)  # off by far less than 1, so search from just below
        if abs(start - round(start)) > 1e-6 + 1e-12 * start:  # far above the rounding of `start`
            thresholds.append(max(thresholds[-1], math.ceil(start)))
            continue
        distance = max(thresholds[-1], int(start) - 1)
        while distance**rest < half ** (rest - j) * max_distance**j:
            distance += 1
        thresholds.append(distance)
    return tuple(thresholds)


@constant_result
def _thresholds(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """`bucket_thresholds`, which torch.compile takes as a constant instead of tracing its loop."""
    return bucket_thresholds(num_buckets, max_distance)


def relative_position_bucket(
    relative: Int[Tensor, "*shape"], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, "*shape"]:
    """T5 bucket of `relative` = key position - query position.

    Not bidirectional: all keys to the right of the query share bucket 0. Bidirectional: the second half of the buckets is
    theirs. Raises ConfigError where `max_distance` leaves no room for the logarithmic half of the buckets.
    """
    if bidirectional:
        check(num_buckets % 2 == 0, "num_buckets", num_buckets, "bidirectional buckets must be even in number")
        num_buckets //= 2
        distance, offset = relative.abs(), (relative > 0).long() * num_buckets
    else:
        distance, offset = (-relative).clamp(min=0), torch.zeros_like(relative)
    thresholds = torch.tensor(_thresholds(num_buckets, max_distance), device=relative.device)
    return torch.bucketize(distance, thresholds, right=True) + offset


class RelativeBias(nn.Module):
    """T5's learned bias: one number per head and bucket, added to the scores. Table `[H, buckets]`, initialised normal
    with standard deviation 1/sqrt(buckets) (P1's public code)."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int, bidirectional: bool = False):
        super().__init__()
        bucket_thresholds(num_buckets // 2 if bidirectional else num_buckets, max_distance)  # refuse early
        check(not bidirectional or num_buckets % 2 == 0, "num_buckets", num_buckets, "even when bidirectional")
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(num_heads, num_buckets))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.num_buckets**-0.5)

    def forward(
        self, query_positions: Int[Tensor, " queries"], key_positions: Int[Tensor, " keys"]
    ) -> Float[Tensor, "heads queries keys"]:
        relative = key_positions[None, :] - query_positions[:, None]
        bucket_QK = relative_position_bucket(relative, self.num_buckets, self.max_distance, self.bidirectional)
        return self.table[:, bucket_QK]


def rotate(
    x: Float[Tensor, "*batch tokens depth"], positions: Int[Tensor, "*rows tokens"], base: float = 10_000.0
) -> Float[Tensor, "*batch tokens depth"]:
    """Rotary positions (Su et al. 2021): pairs (i, i + D/2) turn by `position * base**(-2i/D)`. D must be even.
    Positions broadcast to `[..., T]`."""
    depth = x.shape[-1]
    check(depth % 2 == 0, "width per head", depth, "rotary positions need an even number")
    compute = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (-torch.arange(0, depth, 2, device=x.device, dtype=compute) / depth)
    angle = positions.to(compute)[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(compute).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def sinusoidal(
    positions: Int[Tensor, "*rows tokens"], width: int, dtype: torch.dtype
) -> Float[Tensor, "*rows tokens width"]:
    """Sinusoidal positions (Vaswani et al. 2017), sines in the first half and cosines in the second. Even width."""
    check(width % 2 == 0, "width", width, "sinusoidal positions need an even number")
    compute = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=compute) / width
    angle = positions.to(compute)[..., None] * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat([angle.sin(), angle.cos()], -1).to(dtype)
