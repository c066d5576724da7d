"""Attention as a hypernetwork, written as its equations: slow, plain, and the oracle of every other backend.

Symbols and the derivation are in README.md beside this file (P1, sections 2 and 3). Axes in names: B batch (any leading
shape), H heads, Q queries, K keys, D width per head, I and O the inputs and outputs of a layer of the value network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hyla.attention.mechanisms import RMS_EPSILON, Mechanism, ScoreNorm, ValueNetwork


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """A context in which products keep the precision of their inputs (the meta device has no autocast)."""
    return contextlib.nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def normalise_scores(
    score_BHQK: Float[Tensor, "*batch heads queries keys"],
    allowed_BHQK: Bool[Tensor, "..."] | None,
    score_norm: ScoreNorm,
) -> Float[Tensor, "*batch heads queries keys"]:
    """Latent codes from scores (P1, equations 4 and 9); exactly 0 for every pair that is not allowed."""
    if score_norm == "softmax":
        if allowed_BHQK is None:
            return score_BHQK.softmax(-1)
        # The lowest finite number instead of -inf: a row without any key then has finite values and gradients, and the
        # second fill makes it exactly 0.
        lowest = torch.finfo(score_BHQK.dtype).min
        return score_BHQK.masked_fill(~allowed_BHQK, lowest).softmax(-1).masked_fill(~allowed_BHQK, 0.0)
    if allowed_BHQK is not None:
        score_BHQK = score_BHQK.masked_fill(~allowed_BHQK, 0.0)
    if score_norm == "none":
        return score_BHQK
    mean_square_B1QK = score_BHQK.square().mean(-3, keepdim=True)  # over the heads of one pair
    return score_BHQK * torch.rsqrt(mean_square_B1QK + RMS_EPSILON)


def apply_value_network(
    code_BHQK: Float[Tensor, "*batch heads queries keys"],
    value_BHKD: Float[Tensor, "*batch heads keys depth"],
    value_network: ValueNetwork,
    value_weights: Sequence[Float[Tensor, "heads depth depth"]] = (),
) -> Float[Tensor, "*batch heads queries depth"]:
    """What each query reads, per head and before the output projection (P1, equations 3 and 8).

    depth 1: `out[h,q] = sum_k a[h,q,k] v[h,k]`. Deeper: `x[q,k] = phi(sum_h a[h,q,k] v[h,k])`, then for each further
    weight `x[q,k] = phi(sum_h a[h,q,k] W_h x[q,k])`, and last `out[h,q] = sum_k a[h,q,k] x[q,k]`.
    """
    if value_network.depth == 1:
        return code_BHQK @ value_BHKD
    hidden_BQKD = value_network.activate(torch.einsum("...hqk,...hkd->...qkd", code_BHQK, value_BHKD))
    for weight_HOI in value_weights:
        mapped_BHQKO = torch.einsum("...qki,hoi->...hqko", hidden_BQKD, weight_HOI)
        hidden_BQKD = value_network.activate(torch.einsum("...hqk,...hqko->...qko", code_BHQK, mapped_BHQKO))
    return torch.einsum("...hqk,...qkd->...hqd", code_BHQK, hidden_BQKD)


def draw_keep(
    score_shape: Sequence[int], dropout: float, shared: bool, device: torch.device | None = None
) -> Bool[Tensor, "..."]:
    """A dropout mask for scores of this shape, True = kept, from torch's global generator.

    shared: one mask `[Q, K]` for the whole batch and all heads, as in the public code, so that a pair keeps its whole
    code or loses it; otherwise every number of every code is dropped independently.
    """
    shape = tuple(score_shape)[-2:] if shared else tuple(score_shape)
    return torch.rand(shape, device=device, dtype=torch.float32) >= dropout


def drop_codes(code_BHQK: Tensor, keep: Bool[Tensor, "..."], dropout: float) -> Tensor:
    """Attention dropout: zero the codes that are not kept and divide the rest by `1 - dropout`."""
    return code_BHQK * keep / (1.0 - dropout)


def latent_codes(
    query_BHQD: Float[Tensor, "*batch heads queries qk_depth"],
    key_BHKD: Float[Tensor, "*batch heads keys qk_depth"],
    score_norm: ScoreNorm,
    *,
    scale: float,
    bias: Float[Tensor, "..."] | None = None,
    allowed: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "*batch heads queries keys"]:
    """The codes, before dropout, in float32 or better. `bias` is added to the scaled scores; `allowed` (True = may attend)
    broadcasts to them."""
    compute = torch.promote_types(query_BHQD.dtype, torch.float32)
    with without_autocast(query_BHQD.device.type):
        score_BHQK = query_BHQD.to(compute) @ key_BHKD.to(compute).transpose(-1, -2) * scale
        if bias is not None:
            score_BHQK = score_BHQK + bias.to(compute)
        return normalise_scores(score_BHQK, allowed, score_norm)


def attention(
    query_BHQD: Float[Tensor, "*batch heads queries qk_depth"],
    key_BHKD: Float[Tensor, "*batch heads keys qk_depth"],
    value_BHKD: Float[Tensor, "*batch heads keys depth"],
    mechanism: Mechanism,
    *,
    scale: float,
    bias: Float[Tensor, "..."] | None = None,
    allowed: Bool[Tensor, "..."] | None = None,
    value_weights: Sequence[Float[Tensor, "heads depth depth"]] = (),
    dropout: float = 0.0,
    keep: Bool[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "*batch heads queries depth"], Float[Tensor, "*batch heads queries keys"]]:
    """(output, codes before dropout), with `bias` and `allowed` as in `latent_codes`; `keep`, the dropout mask, broadcasts
    to the codes.

    Half precision is lifted to float32 here and rounded once, at the end, by the caller.
    """
    code_BHQK = latent_codes(query_BHQD, key_BHKD, mechanism.score_norm, scale=scale, bias=bias, allowed=allowed)
    with without_autocast(query_BHQD.device.type):
        used_BHQK = code_BHQK if keep is None else drop_codes(code_BHQK, keep, dropout)
        weights = [weight.to(code_BHQK.dtype) for weight in value_weights]
        out_BHQD = apply_value_network(used_BHQK, value_BHKD.to(code_BHQK.dtype), mechanism.value_network, weights)
    return out_BHQD, code_BHQK


def generate_value_network(
    code_H: Float[Tensor, " heads"], layer_weights: Sequence[Float[Tensor, "heads _ _"]]
) -> list[Float[Tensor, "_ _"]]:
    """The weight matrices that one latent code generates: `sum_h a_h W_h` for each layer (P1, equations 5 and 8)."""
    return [torch.einsum("h,hoi->oi", code_H, weight_HOI) for weight_HOI in layer_weights]


def per_pair_attention(
    code_HQK: Float[Tensor, "heads queries keys"],
    source_KE: Float[Tensor, "keys width"],
    layer_weights: Sequence[Float[Tensor, "heads _ _"]],
    value_bias_HD: Float[Tensor, "heads depth"],
    value_network: ValueNetwork,
) -> Float[Tensor, "queries width_out"]:
    """The hypernetwork, literally: for each pair generate its network, apply it to the key's token, sum over keys.

    layer_weights: per head, the value projection `[H, Dv, E]`, the further weights and the output projection
    `[H, E, Dv]`, so `max(depth, 2)` of them: ordinary attention is a linear network of two factors, whose hidden
    vectors may differ between heads, so it uses `sum_h a_h Wo_h Wv_h`. The output bias is left to the caller.
    """
    num_queries, num_keys = code_HQK.shape[1:]
    out_QE = source_KE.new_zeros(num_queries, layer_weights[-1].shape[1])
    for q in range(num_queries):
        for k in range(num_keys):
            code_H = code_HQK[:, q, k]
            if value_network.depth == 1:
                value_HOI, output_HOI = layer_weights
                product_HOI = output_HOI @ value_HOI
                bias_HE = torch.einsum("hed,hd->he", output_HOI, value_bias_HD)
                contribution_E = generate_value_network(code_H, [product_HOI])[0] @ source_KE[k] + code_H @ bias_HE
            else:
                *hidden_layers, last = generate_value_network(code_H, layer_weights)
                hidden_D = hidden_layers[0] @ source_KE[k] + code_H @ value_bias_HD
                for weight_OI in hidden_layers[1:]:
                    hidden_D = weight_OI @ value_network.activate(hidden_D)
                contribution_E = last @ value_network.activate(hidden_D)
            out_QE[q] = out_QE[q] + contribution_E
    return out_QE
