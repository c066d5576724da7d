"""The hyperteacher's network (P2): a task latent mixes the weights of modules into the weights of a small ReLU network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hyla.errors import check
from hyla.tasks.base import Draws

TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut at 2 standard deviations


@dataclass(frozen=True, eq=False)
class Teacher:
    """y = R^T h_L, where h_0 = x and h_l = relu(sum_m z'_m (Theta_lm^T h_{l-1} + beta_lm)) with z' = z / sqrt(num_hot).

    weights: one Theta_l per hidden layer, `[M, in, out]`. biases: one beta_l per hidden layer, `[M, out]`. readout: R
    `[H, O]`, shared by all tasks, without a bias. num_hot: K, how many modules a task uses at most.

    Raises ConfigError where shapes or types do not fit together.
    """

    weights: tuple[Float[Tensor, "modules _ _"], ...]
    biases: tuple[Float[Tensor, "modules _"], ...]
    readout: Float[Tensor, "_ _"]
    num_hot: int

    def __post_init__(self) -> None:
        check(len(self.weights) >= 1, "teacher.weights", self.weights, "at least one hidden layer is needed")
        count = f"one per hidden layer, and there are {len(self.weights)}"
        check(len(self.biases) == len(self.weights), "teacher.biases", f"{len(self.biases)} tensors", count)
        modules, width = self.weights[0].shape[:2]
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            expected, field = (modules, width, bias.shape[-1]), f"teacher.weights[{layer}]"
            check(weight.shape == expected, field, tuple(weight.shape), f"{expected} goes with the other tensors")
            expected, field = (modules, width := weight.shape[-1]), f"teacher.biases[{layer}]"
            check(bias.shape == expected, field, tuple(bias.shape), f"{expected} goes with the weights")
        shape = tuple(self.readout.shape)
        check(self.readout.shape[0] == width, "teacher.readout", shape, f"the last hidden layer has width {width}")
        kinds = {(tensor.dtype, tensor.device) for tensor in (*self.weights, *self.biases, self.readout)}
        check(len(kinds) == 1, "teacher", kinds, "all tensors must be of one dtype on one device")
        check(1 <= self.num_hot <= modules, "teacher.num_hot", self.num_hot, f"from 1 to the {modules} modules")

    @property
    def num_modules(self) -> int:
        return self.weights[0].shape[0]

    @property
    def point_dim(self) -> int:
        return self.weights[0].shape[1]

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        return tuple(weight.shape[-1] for weight in self.weights)

    @property
    def output_dim(self) -> int:
        return self.readout.shape[-1]

    def to(self, target: torch.dtype | torch.device | str) -> Teacher:
        """The same teacher in another dtype or on another device."""
        weights, biases = (tuple(x.to(target) for x in tensors) for tensors in (self.weights, self.biases))
        return Teacher(weights, biases, self.readout.to(target), self.num_hot)

    def forward(
        self, latents_BM: Float[Tensor, "batch modules"], points_BNI: Float[Tensor, "batch points width"]
    ) -> Float[Tensor, "batch points outputs"]:
        """The answers of B tasks at N points each. Latents and points have the teacher's dtype and device."""
        mixture_BM = latents_BM / math.sqrt(self.num_hot)
        hidden = points_BNI
        for weight, bias in zip(self.weights, self.biases, strict=True):
            mixed_weight = (mixture_BM @ weight.flatten(1)).unflatten(-1, weight.shape[1:])
            hidden = torch.relu(torch.baddbmm((mixture_BM @ bias)[:, None], hidden, mixed_weight))
        return hidden @ self.readout


def draw_teacher(
    seed: int,
    *,
    num_modules: int = 16,
    num_hot: int = 3,
    point_dim: int = 16,
    hidden_dims: tuple[int, ...] = (16,),
    output_dim: int = 16,
    scale: float = math.sqrt(3),
    bias: bool = True,
) -> Teacher:
    """A teacher with weights and readout drawn as in P2, the same for the same seed; float32, on the CPU.

    Weights and readout: truncated normal with variance scale / fan_in, cut at two standard deviations of the parent normal.
    Biases: uniform in [0, 0.5), or 0 without `bias`. A layer's numbers do not depend on how many layers follow, nor a
    module's on how many modules there are.
    """
    sizes = {"num_modules": num_modules, "num_hot": num_hot, "point_dim": point_dim, "output_dim": output_dim}
    sizes |= {f"hidden_dims[{layer}]": width for layer, width in enumerate(hidden_dims)}
    for field, size in sizes.items():
        check(size >= 1, f"teacher.{field}", size, "at least 1")
    check(0 < scale < math.inf, "teacher.scale", scale, "above 0")
    weights, biases, fan_in = [], [], point_dim
    for layer, width in enumerate(hidden_dims):
        draws = [Draws(seed, "teacher", "module", layer, module) for module in range(num_modules)]
        weights.append(torch.stack([_fan_in(draw, scale, fan_in, width) for draw in draws]))
        biases.append(torch.stack([draw.uniform(width) * (0.5 if bias else 0.0) for draw in draws]))
        fan_in = width
    readout = _fan_in(Draws(seed, "teacher", "readout"), scale, fan_in, output_dim)
    return Teacher(tuple(weights), tuple(biases), readout, num_hot)


def _fan_in(draws: Draws, scale: float, fan_in: int, fan_out: int) -> Float[Tensor, "fan_in fan_out"]:
    """Truncated normal numbers `[fan_in, fan_out]`, by the inverse of the distribution function."""
    lowest = torch.special.ndtr(torch.tensor(-2.0, dtype=torch.float64))
    quantiles = lowest + (1 - 2 * lowest) * draws.uniform(fan_in, fan_out, dtype=torch.float64)
    std = math.sqrt(scale / fan_in) / TRUNCATED_STD
    return (std * torch.special.ndtri(quantiles)).float()
