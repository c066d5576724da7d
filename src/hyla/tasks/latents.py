"""Values of a task latent's active entries (P2)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hyla.tasks.base import Draws

LatentValues = Literal["khot", "discrete", "continuous"]
DISCRETE_VALUES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def draw_values(
    draws: Draws, active_BM: Float[Tensor, "batch modules"], values: LatentValues
) -> Float[Tensor, "batch modules"]:
    """Task latents whose nonzero entries are those of `active_BM` (0 or 1).

    khot: 1. discrete: uniform among `DISCRETE_VALUES`. continuous: 0.5 + 0.5 e_m / (1 + sum e) with exponential e over the
    active entries, so that they lie between 0.5 and 1.
    """
    if values == "khot":
        return active_BM
    if values == "discrete":
        choices = torch.tensor(DISCRETE_VALUES, dtype=active_BM.dtype, device=active_BM.device)
        return active_BM * choices[draws.integers(len(choices), *active_BM.shape)]
    weights = -torch.log1p(-draws.uniform(*active_BM.shape, dtype=torch.float64)) * active_BM
    share = weights / (1 + weights.sum(-1, keepdim=True))
    return (active_BM * (0.5 + 0.5 * share)).to(active_BM.dtype)
