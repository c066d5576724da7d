"""Hidden neurons linear in the number of modules are enough: a hyperteacher written as a plain ReLU network (P2).

The teacher multiplies module m's linear forms by the task latent z_m, which a ReLU network cannot do exactly. Here each
product becomes a difference of two squares, each square a sum of ReLUs, arranged to vanish with z_m: modules that a task
does not use add no error. `docs/theory.md` derives the construction and its bound step by step.

Axes: M modules, I inputs of a layer, J its units, P = M J products, N hidden neurons, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hyla.errors import ConfigError, check
from hyla.tasks.teacher import Teacher

MAX_BYTES = 4 * 2**30  # of a network's parameters

# Products are built for linear forms this much larger than can occur, so that rounding never opens a closed gate.
ROOM = 1 + 1e-9


@dataclass(frozen=True, eq=False)
class Approximation:
    """A plain ReLU network that answers as a teacher does, up to an error.

    network: float64, on the CPU; maps `[..., M + I]`, a task latent and a point, to `[..., O]`. bound: no output is further
    from the teacher's than this, for any input of the domain, in exact arithmetic (rounding in float64 adds some 1e-14 of
    the outputs' size). num_hidden: hidden neurons of all layers.
    """

    network: nn.Sequential
    bound: float
    num_hidden: int

    def forward(
        self, latents_BM: Float[Tensor, "batch modules"], points_BNI: Float[Tensor, "batch points width"]
    ) -> Float[Tensor, "batch points outputs"]:
        """The answers of B tasks at N points each; the same call as `Teacher.forward`."""
        latents_BNM = latents_BM[:, None].expand(-1, points_BNI.shape[1], -1)
        return self.network(torch.cat([latents_BNM, points_BNI], -1))


def approximate(teacher: Teacher, error: float, *, smallest: float = 0.5, max_bytes: int = MAX_BYTES) -> Approximation:
    """A plain ReLU network within `error` of the teacher: two hidden layers for each of the teacher's.

    The domain: points in [-1, 1]^I; at most `teacher.num_hot` latents are not 0, and those lie in [smallest, 1]. With the
    values of P2, `smallest` is 0.5; where latents are only 0 or 1, `smallest=1` makes the network exact with the fewest
    neurons; below 0.5, all of [0, 1] is allowed, for about 1.4 times the neurons.

    error: largest difference allowed in any output.

    Raises ConfigError where a setting cannot work, or where parameters would need more than `max_bytes`.
    """
    teacher = teacher.to("cpu").to(torch.float64)
    layers, bound = _plan(teacher, error, smallest)
    if _num_bytes(teacher, layers) > max_bytes:
        raise ConfigError(_too_large(teacher, error, smallest, max_bytes, layers))
    values = _Values.above(smallest)
    modules: list[nn.Module] = []
    for depth, layer in enumerate(layers):
        first, offset, second = _layer_weights(layer, values, teacher.num_hot, keep_latents=depth + 1 < len(layers))
        modules += [_linear(first, offset), nn.ReLU(), _linear(second), nn.ReLU()]
    modules.append(_linear(teacher.readout.T))
    return Approximation(nn.Sequential(*modules), bound, _num_hidden(teacher, layers))


def num_hidden(teacher: Teacher, error: float, *, smallest: float = 0.5) -> int:
    """Hidden neurons that `approximate` would take, without building anything."""
    teacher = teacher.to("cpu").to(torch.float64)
    return _num_hidden(teacher, _plan(teacher, error, smallest)[0])


def memorised_hidden(num_modules: int, num_hot: int, hidden_dims: tuple[int, ...]) -> int:
    """Hidden neurons of a network that keeps the teacher's hidden units once for each combination of 1 to K modules.

    With `num_hot = num_modules` that is 2^M - 1 copies. Enough only where latents are 0 or 1.
    """
    check(1 <= num_hot <= num_modules, "num_hot", num_hot, f"from 1 to the {num_modules} modules")
    return sum(math.comb(num_modules, count) for count in range(1, num_hot + 1)) * sum(hidden_dims)


class _Values(NamedTuple):
    """Latents that are not 0 are centre + reach w with |w| <= 1. curved: what multiplies the product w v."""

    centre: float
    reach: float
    curved: float
    even: bool

    @classmethod
    def above(cls, smallest: float) -> _Values:
        if smallest < 0.5:  # 0 is w = -1, within the range: there the interpolant is symmetric if its segments are even
            return cls(centre=0.5, reach=0.5, curved=0.5, even=True)
        # 0 is w = -centre / reach <= -3, where all gates are closed
        if smallest == 1:
            return cls(centre=1.0, reach=1 / 3, curved=0.0, even=False)
        half = max((1 - smallest) / 2, 1e-4)  # a smaller reach would magnify rounding
        return cls(centre=(1 + smallest) / 2, reach=half, curved=half, even=False)


class _Layer(NamedTuple):
    """One hidden layer of the teacher, ready to be written as ReLUs.

    Linear form j of module m is u_mj = middle_mj + radius_mj v_mj, where v_mj = sum_i direction_mij h_i - shift_mj lies
    within (-1, 1). segments: of the interpolant for its product. direction `[M, I, J]`, the others `[M, J]`.
    """

    direction: Tensor
    shift: Tensor
    middle: Tensor
    radius: Tensor
    segments: Tensor


def _plan(teacher: Teacher, error: float, smallest: float) -> tuple[list[_Layer], float]:
    """The layers, and the proven bound (at most `error`)."""
    check(1e-9 <= error < math.inf, "error", error, "at least 1e-9; rounding in float64 is not far below")
    check(0 <= smallest <= 1, "smallest", smallest, "from 0 to 1, the largest latent")
    finite = all(tensor.isfinite().all() for tensor in (*teacher.weights, *teacher.biases, teacher.readout))
    check(finite, "teacher", teacher, "all of its numbers must be finite")
    values = _Values.above(smallest)
    root = math.sqrt(teacher.num_hot)
    low_I, high_I = (sign * torch.ones(teacher.point_dim, dtype=torch.float64) for sign in (-1, 1))
    drift_I = torch.zeros(teacher.point_dim, dtype=torch.float64)  # how far inputs of the layer are from the teacher's
    layers = []
    for depth, (weight_MIJ, bias_MJ) in enumerate(zip(teacher.weights, teacher.biases, strict=True)):
        allowed = error / len(teacher.weights) / max(_amplification(teacher, depth), 1e-300)  # per unit of this layer
        middle_I, half_I = (high_I + low_I) / 2, (high_I - low_I) / 2
        radius_MJ = (torch.einsum("mij,i->mj", weight_MIJ.abs(), half_I) * ROOM).clamp(min=1e-12)
        middle_MJ = bias_MJ + torch.einsum("mij,i->mj", weight_MIJ, middle_I)
        # K modules at most, each with the factor 1 / sqrt(K), may together use up what is allowed
        segments_MJ = (values.curved * radius_MJ * root / allowed).sqrt().ceil().clamp(min=1).long()
        if values.even:
            segments_MJ += segments_MJ % 2
        wrong_MJ = values.curved * radius_MJ / segments_MJ**2
        direction_MIJ = weight_MIJ / radius_MJ[:, None]
        shift_MJ = torch.einsum("mij,i->mj", direction_MIJ, middle_I)
        layers.append(_Layer(direction_MIJ, shift_MJ, middle_MJ, radius_MJ, segments_MJ))
        drift_I = _most(teacher, wrong_MJ + torch.einsum("mij,i->mj", weight_MIJ.abs(), drift_I))
        high_I = _most(teacher, (middle_MJ + radius_MJ).relu() + wrong_MJ)
        low_I = torch.zeros_like(high_I)
    return layers, (drift_I @ teacher.readout.abs()).max().item()


def _most(teacher: Teacher, each_MJ: Float[Tensor, "modules units"]) -> Float[Tensor, " units"]:
    """The largest sum over at most K modules, times 1 / sqrt(K), of numbers that are not negative."""
    return each_MJ.topk(teacher.num_hot, dim=0).values.sum(0) / math.sqrt(teacher.num_hot)


def _amplification(teacher: Teacher, depth: int) -> float:
    """How much an output can change for each 1 that all units of hidden layer `depth` are wrong by."""
    drift_J = torch.ones(teacher.hidden_dims[depth], dtype=torch.float64)
    for weight_MIJ in teacher.weights[depth + 1 :]:
        # K times the worst module rather than the worst K: then no module's neurons depend on how many others there are
        drift_J = math.sqrt(teacher.num_hot) * torch.einsum("mij,i->mj", weight_MIJ.abs(), drift_J).amax(0)
    return (drift_J @ teacher.readout.abs()).max().item()


def _layer_weights(
    layer: _Layer, values: _Values, num_hot: int, keep_latents: bool
) -> tuple[Float[Tensor, "neurons inputs"], Float[Tensor, " neurons"], Float[Tensor, "outputs neurons"]]:
    """Weights and biases into the neurons that make the products, from (z, h); weights out of them, to (z, the units'
    sums) with `keep_latents`, else to the sums alone."""
    segments_P = layer.segments.flatten()
    num_modules, num_inputs, num_units = layer.direction.shape
    num_products = num_modules * num_units
    module_P = torch.arange(num_modules).repeat_interleave(num_units)
    unit_P = torch.arange(num_units).repeat(num_modules)
    direction_PI = layer.direction.transpose(1, 2).flatten(0, 1)
    shift_P, radius_P = layer.shift.flatten(), layer.radius.flatten()

    # one row per inner knot t of the interpolant of a product: knots -2 + 4 k / S for k = 1 .. S - 1
    product_T = torch.arange(num_products).repeat_interleave(segments_P - 1)
    number_T = torch.cat([torch.arange(1, segments) for segments in segments_P.tolist()])
    spacing_P = 4 / segments_P.double()  # from knot to knot
    knot_T = -2 + number_T * spacing_P[product_T]

    # neurons: z_m; the gate w_m + 2 that a module's products share; w + v + 2 per product; w + v - t and w - v - t per knot
    latents, gates = torch.arange(num_modules), torch.arange(num_modules) + num_modules
    starts = torch.arange(num_products) + 2 * num_modules
    rises = torch.arange(len(product_T)) + 2 * num_modules + num_products
    falls = rises + len(product_T)
    num_neurons = 2 * num_modules + num_products + 2 * len(product_T)

    into = torch.zeros(num_neurons, num_modules + num_inputs, dtype=torch.float64)
    offset = torch.zeros(num_neurons, dtype=torch.float64)
    into[latents, latents] = 1.0
    rows = torch.cat([gates, starts, rises, falls])
    into[rows, torch.cat([latents, module_P, module_P[product_T], module_P[product_T]])] = 1 / values.reach
    into[starts, num_modules:], offset[starts] = direction_PI, 2 - shift_P
    into[rises, num_modules:], offset[rises] = direction_PI[product_T], -knot_T - shift_P[product_T]
    into[falls, num_modules:], offset[falls] = -direction_PI[product_T], -knot_T + shift_P[product_T]
    offset[gates] = 2.0
    offset[rows] -= values.centre / values.reach

    sums = torch.zeros(num_units, num_neurons, dtype=torch.float64)
    mixing = 1 / math.sqrt(num_hot)
    slope_P = mixing * radius_P * (values.centre - 2 * values.curved + values.curved * spacing_P / 2)
    bend_T = mixing * (radius_P * values.curved * spacing_P / 2)[product_T]
    sums[:, latents] = mixing * layer.middle.T
    sums[:, gates] = -slope_P.reshape(num_modules, num_units).T
    sums[unit_P, starts] = slope_P
    sums[unit_P[product_T], rises] = bend_T
    sums[unit_P[product_T], falls] = -bend_T
    kept = torch.eye(num_modules if keep_latents else 0, num_neurons, dtype=torch.float64)
    return into, offset, torch.cat([kept, sums])


def _linear(weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def _layer_sizes(teacher: Teacher, layers: list[_Layer]) -> list[tuple[int, int, int]]:
    """Of each of the teacher's layers: inputs, neurons that make the products, neurons after them."""
    sizes, width = [], teacher.point_dim
    for depth, layer in enumerate(layers):
        neurons = int((2 * layer.segments - 1).sum()) + 2 * teacher.num_modules
        after = teacher.hidden_dims[depth] + (teacher.num_modules if depth + 1 < len(layers) else 0)
        sizes.append((teacher.num_modules + width, neurons, after))
        width = teacher.hidden_dims[depth]
    return sizes


def _num_hidden(teacher: Teacher, layers: list[_Layer]) -> int:
    return sum(neurons + after for _, neurons, after in _layer_sizes(teacher, layers))


def _num_bytes(teacher: Teacher, layers: list[_Layer]) -> int:
    numbers = sum(neurons * (inputs + 1 + after) for inputs, neurons, after in _layer_sizes(teacher, layers))
    return 8 * (numbers + teacher.readout.numel())


def _too_large(teacher: Teacher, error: float, smallest: float, max_bytes: int, layers: list[_Layer]) -> str:
    """The message for a network that does not fit, with an error that does."""
    neurons, needed = _num_hidden(teacher, layers), _num_bytes(teacher, layers)
    fitting, least = error, 2 if _Values.above(smallest).even else 1
    while _num_bytes(teacher, layers) > max_bytes and any((layer.segments > least).any() for layer in layers):
        fitting *= 2
        layers, _ = _plan(teacher, fitting, smallest)
    fits = _num_bytes(teacher, layers) <= max_bytes
    instead = f"error = {fitting:.3g} fits" if fits else "no error does, the teacher is too large"
    return (
        f"error = {error!r} is not possible: the network would have {neurons:,} hidden neurons, and its parameters need "
        f"{needed:,} bytes, more than max_bytes = {max_bytes:,}; {instead}"
    )
