"""The hypernetwork view of a layer: the network that each pair's latent code generates, and what it adds (P1, section 2).

For a query q and a key k with code a, a layer adds to its output at q

    softmax, linear, ...    W x_k + b                  W = sum_h a_h Wo_h Wv_h,  b = sum_h a_h Wo_h bv_h
    depth 2, 3, ...         W_L phi(... phi(W_1 x_k + b))   W_l = sum_h a_h W_l,h,  b = sum_h a_h bv_h

and the output is the sum of that over keys, plus the output bias once. Symbols as in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hyla.attention.eager import generate_value_network
from hyla.attention.layer import MultiHeadAttention, positions_of
from hyla.attention.mechanisms import ValueNetwork
from hyla.errors import check


@dataclass(frozen=True)
class PairNetwork:
    """The value network of one query-key pair; calling it on the key's token gives what the pair adds to the output.

    code: `[H]`. weights: its matrices (outputs, inputs), one `[E, E]` in ordinary attention, else `[Dv, E]`, any `[Dv, Dv]`
    and `[E, Dv]`. bias: added after the first of them, `[E]` or `[Dv]`. value_network: has the activation between them.
    """

    code: Float[Tensor, " heads"]
    weights: tuple[Float[Tensor, "_ _"], ...]
    bias: Float[Tensor, " _"]
    value_network: ValueNetwork

    def __call__(self, token: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width_out"]:
        hidden = token @ self.weights[0].T + self.bias
        for weight in self.weights[1:]:
            hidden = self.value_network.activate(hidden) @ weight.T
        return hidden


@dataclass(frozen=True)
class ValueParameters:
    """What all pair networks of a layer are mixed from, per query head.

    layers: `[H, Dv, E]` (value projection), any `[H, Dv, Dv]` and `[H, E, Dv]` (output projection). bias: `[H, Dv]`, of
    the value projection. output_bias: `[E]`. Zeros where the layer has no biases.
    """

    layers: tuple[Float[Tensor, "heads _ _"], ...]
    bias: Float[Tensor, "heads depth"]
    output_bias: Float[Tensor, " width"]


def value_parameters(layer: MultiHeadAttention) -> ValueParameters:
    """The parameters of `layer` as a hypernetwork reads them; grouped value heads are repeated for their query heads."""
    heads, repeats = layer.num_heads, layer.num_heads // layer.num_kv_heads
    value_HDE = layer.v_proj.weight.unflatten(0, (layer.num_kv_heads, -1)).repeat_interleave(repeats, 0)
    output_HED = layer.out_proj.weight.unflatten(1, (heads, -1)).transpose(0, 1)
    bias_HD, output_bias_E = value_HDE.new_zeros(value_HDE.shape[:2]), output_HED.new_zeros(output_HED.shape[1])
    if layer.v_proj.bias is not None:
        bias_HD = layer.v_proj.bias.unflatten(0, (layer.num_kv_heads, -1)).repeat_interleave(repeats, 0)
    if layer.out_proj.bias is not None:
        output_bias_E = layer.out_proj.bias
    return ValueParameters((value_HDE, *layer.value_weights, output_HED), bias_HD, output_bias_E)


def pair_network(
    layer: MultiHeadAttention,
    x: Float[Tensor, "queries width"],
    query: int,
    key: int,
    context: Float[Tensor, "keys context_width"] | None = None,
    **masks: Any,
) -> PairNetwork:
    """The network that `layer` generates for one pair of the sequence `x` (attending to `context`, or to itself).

    masks: `mask`, `key_mask`, `causal` and `bias` as in the layer's `forward`. Dropout does not act. Raises ConfigError
    for a position that is not there; negative ones count from the end.
    """
    for name, tokens in (("x", x), ("context", context)):
        if tokens is not None:
            check(tokens.dim() == 2, name, tuple(tokens.shape), "[tokens, width], of one sequence")
    code_H = layer.codes(x, context, queries=[query], keys=[key], **masks)[:, 0, 0]
    network, parameters = layer.mechanism.value_network, value_parameters(layer)
    if network.depth == 1:
        value_HDE, output_HED = parameters.layers
        bias_E = torch.einsum("h,hed,hd->e", code_H, output_HED, parameters.bias)
        return PairNetwork(code_H, tuple(generate_value_network(code_H, [output_HED @ value_HDE])), bias_E, network)
    weights = generate_value_network(code_H, parameters.layers)
    return PairNetwork(code_H, tuple(weights), code_H @ parameters.bias, network)


def pair_contributions(
    layer: MultiHeadAttention,
    codes: Float[Tensor, "*batch heads queries keys"],
    tokens: Float[Tensor, "*batch keys width"],
) -> Float[Tensor, "*batch queries keys width_out"]:
    """What pairs with these codes add to the output of `layer`: `tokens` are the keys', in the order of the codes.

    The layer's output at a query is the sum over all of its keys, plus the output bias. The codes need not be those that
    the layer would compute, so that "what if this pair had that code" can be asked.
    """
    parameters, network = value_parameters(layer), layer.mechanism.value_network
    value_HDE, *further, output_HED = parameters.layers
    value_BHKD = torch.einsum("...ke,hde->...hkd", tokens, value_HDE) + parameters.bias[:, None]
    if network.depth == 1:
        return torch.einsum("...hqk,...hkd,hed->...qke", codes, value_BHKD, output_HED)
    hidden_BQKD = network.activate(torch.einsum("...hqk,...hkd->...qkd", codes, value_BHKD))
    for weight_HOI in further:
        hidden_BQKD = network.activate(torch.einsum("...hqk,hoi,...qki->...qko", codes, weight_HOI, hidden_BQKD))
    return torch.einsum("...hqk,hed,...qkd->...qke", codes, output_HED, hidden_BQKD)


def output_change(
    layer: MultiHeadAttention,
    tokens: Float[Tensor, "*batch all_keys width"],
    keys: Sequence[int],
    old_codes: Float[Tensor, "*batch heads queries keys"],
    new_codes: Float[Tensor, "*batch heads queries keys"],
) -> Float[Tensor, "*batch queries width_out"]:
    """How the output of `layer` changes if pairs with the `keys` (of all `tokens`) had `new_codes` for `old_codes`."""
    chosen = tokens[..., positions_of(keys, tokens.shape[-2], "keys"), :]
    difference = pair_contributions(layer, new_codes, chosen) - pair_contributions(layer, old_codes, chosen)
    return difference.sum(-2)
