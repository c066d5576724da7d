"""Multi-head attention as an ordinary module: the projections, positions and masks around `hyper_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from hyla.attention import fused
from hyla.attention.cache import KeyValueCache
from hyla.attention.functional import Backend, check_backend, hyper_attention, latent_codes
from hyla.attention.mechanisms import ScoreNorm, ValueNetwork, resolve_mechanism
from hyla.attention.positions import RelativeBias, rotate
from hyla.errors import check

Positions = Literal["none", "t5", "rotary"]

# Standard deviation of a standard normal truncated at 2: drawing from `std / TRUNCATED_STD` gives variance std**2.
TRUNCATED_STD = 0.87962566103423978


NORM_EPSILON = 1e-6


def init_fan_in_(weight: Tensor, fan_in: int) -> None:
    """Truncated normal with variance 1/fan_in, cut at two standard deviations of the parent normal (P1's public code)."""
    std = fan_in**-0.5 / TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with any mechanism (P1, sections 2 and 3). All mechanisms of depth 1 and 2 have the same
    parameters, those of ordinary attention.

    Args:
        embed_dim: width E of the tokens that ask, and of the output.
        num_heads: H, which is also the size of the latent code.
        mechanism, score_norm, value_network: as in :func:`hyla.attention.hyper_attention`.
        num_kv_heads: heads of keys and values; H by default, fewer are shared by H / num_kv_heads query heads.
        qk_dim, v_dim: totals over the query heads; E by default. Each key/value head is as wide as a query head.
        context_dim: width of the tokens attended to in cross-attention; E by default.
        bias: biases in all four projections. qk_norm: LayerNorm, without bias, on the queries and keys of every head.
        dropout: attention dropout on the codes, in training mode. dropout_shared: see `hyper_attention`.
        positions: `none`; `t5`, a relative bias per layer with `num_buckets`, `max_distance` and `bidirectional`; or
            `rotary`, whose slowest frequency `rotary_base` sets.
        backend: as in `hyper_attention`.

    Raises ConfigError where widths do not divide by heads or a name is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mechanism: str = "hyla",
        score_norm: ScoreNorm | None = None,
        value_network: ValueNetwork | None = None,
        num_kv_heads: int | None = None,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        dropout_shared: bool = False,
        positions: Positions = "none",
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        rotary_base: float = 10_000.0,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        qk_dim, v_dim = embed_dim if qk_dim is None else qk_dim, embed_dim if v_dim is None else v_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for given, width in (("qk_dim", qk_dim), ("v_dim", v_dim)):
            field = "embed_dim" if width == embed_dim else given  # the one that the caller named
            divides = width >= num_heads >= 1 and width % num_heads == 0
            check(divides, field, width, f"must be a multiple of num_heads = {num_heads}")
        shares = num_kv_heads >= 1 and num_heads % num_kv_heads == 0
        check(shares, "num_kv_heads", num_kv_heads, f"must divide num_heads = {num_heads}")
        check(0.0 <= dropout < 1.0, "dropout", dropout, "a probability from 0 up to, not including, 1")
        choices = get_args(Positions)
        check(positions in choices, "positions", positions, f"choose from {', '.join(choices)}")
        check_backend(backend)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.qk_depth, self.v_depth = qk_dim // num_heads, v_dim // num_heads
        self.mechanism = resolve_mechanism(mechanism, score_norm, value_network)
        self.dropout, self.dropout_shared = dropout, dropout_shared
        self.positions, self.rotary_base = positions, rotary_base
        self.backend: Backend = backend
        check(positions != "rotary" or self.qk_depth % 2 == 0, "qk_dim", qk_dim, "rotary needs an even width per head")

        where: dict[str, Any] = {"device": device, "dtype": dtype}
        source_dim = embed_dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(embed_dim, qk_dim, bias=bias, **where)
        self.k_proj = nn.Linear(source_dim, num_kv_heads * self.qk_depth, bias=bias, **where)
        self.v_proj = nn.Linear(source_dim, num_kv_heads * self.v_depth, bias=bias, **where)
        self.out_proj = nn.Linear(v_dim, embed_dim, bias=bias, **where)
        self.q_norm = nn.LayerNorm(self.qk_depth, eps=NORM_EPSILON, bias=False, **where) if qk_norm else None
        self.k_norm = nn.LayerNorm(self.qk_depth, eps=NORM_EPSILON, bias=False, **where) if qk_norm else None
        shape = (num_heads, self.v_depth, self.v_depth)
        self.value_weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape, **where)) for _ in range(self.mechanism.value_network.num_further_weights)
        )
        self.relative_bias = None
        if positions == "t5":
            self.relative_bias = RelativeBias(num_heads, num_buckets, max_distance, bidirectional).to(**where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """P1's initialisation: truncated normal with variance 1/fan_in, biases 0. The further layers of a deeper value
        network, which the public code lacks, take fan_in = H Dv like the output projection: they too sum over heads."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            init_fan_in_(projection.weight, projection.in_features)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        for weight in self.value_weights:
            init_fan_in_(weight, self.num_heads * self.v_depth)
        if self.relative_bias is not None:
            self.relative_bias.reset_parameters()

    def extra_repr(self) -> str:
        network = self.mechanism.value_network
        return f"score_norm={self.mechanism.score_norm}, depth={network.depth}, activation={network.activation}"

    def forward(
        self,
        x: Float[Tensor, "*batch queries width"],
        context: Float[Tensor, "*batch keys context_width"] | None = None,
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        key_mask: Bool[Tensor, "*batch keys"] | None = None,
        causal: bool = False,
        bias: Float[Tensor, "..."] | None = None,
        select: slice | None = None,
        keep: Bool[Tensor, "..."] | None = None,
        return_codes: bool = False,
        norm: nn.Module | None = None,
        residual: bool = False,
        cache: KeyValueCache | None = None,
        query_positions: Int[Tensor, "*rows queries"] | None = None,
    ) -> Any:
        """Output `[..., Q, E]`, or the pair (output, codes `[..., H, Q, K]`) with `return_codes`.

        context: tokens to attend to (cross-attention); `x` itself by default. mask: broadcasts to `[..., H, Q, K]`,
        boolean (True = may attend) or additive. key_mask: `[..., K]`, True = a real token, False = padding. bias: added to
        the scaled scores besides the layer's own. select: only these queries are computed (Q is then their number);
        positions, `mask` and `bias` still refer to all queries. keep: the dropout mask of the computed queries, as in
        `hyper_attention`, where it must be repeated. norm and residual: with both, what a pre-norm block computes,
        `x + attention(norm(x))`, fused into the projections where the CPU can; `norm` leaves a `context` as it is.
        cache: the keys and values of earlier calls, to which this call's are added: `x` follows the tokens seen before,
        and `mask` and `key_mask` cover all keys. With a `context` the first call fills it and later ones read it alone.
        query_positions: `[Q]`, or `[..., Q]` with rotary: where the tokens of `x` stand, instead of after those seen (in
        cross-attention: at the last positions of the context, which with a cache nobody can know).
        """
        chosen = x if select is None else x[..., select, :]
        known = cache is not None and context is not None and cache.length > 0  # the context's keys and values
        if context is None and select is None:
            query, key, value = fused.project(x, norm, [self.q_proj, self.k_proj, self.v_proj], self.backend)
        else:
            source, source_norm = (x, norm) if context is None else (context, None)
            (query,) = fused.project(chosen, norm, [self.q_proj], self.backend)
            layers = [] if known else [self.k_proj, self.v_proj]
            key, value = fused.project(source, source_norm, layers, self.backend) or (None, None)
        value = None if value is None else _split_heads(value, self.num_kv_heads)
        places = self._places(x, context, cache, query_positions)
        query, key, value = self._prepare(query, key, value, places, select, cache)
        terms = self._terms(places, key.shape[-2], select, mask, key_mask, causal, bias)
        out = hyper_attention(
            query,
            key,
            value,
            **terms,
            score_norm=self.mechanism.score_norm,
            value_network=self.mechanism.value_network,
            value_weights=list(self.value_weights),
            dropout=self.dropout if self.training else 0.0,
            dropout_shared=self.dropout_shared,
            keep=keep if self.training else None,
            return_codes=return_codes,
            backend=self.backend,
        )
        out_BHQD, codes = out if return_codes else (out, None)
        joined = out_BHQD.transpose(-3, -2).flatten(-2)
        projected = fused.add_projected(chosen if residual else None, joined, self.out_proj, backend=self.backend)
        return (projected, codes) if return_codes else projected

    @torch.no_grad()
    def codes(
        self,
        x: Float[Tensor, "*batch queries width"],
        context: Float[Tensor, "*batch keys context_width"] | None = None,
        *,
        queries: Sequence[int],
        keys: Sequence[int],
        mask: Shaped[Tensor, "..."] | None = None,
        key_mask: Bool[Tensor, "*batch keys"] | None = None,
        causal: bool = False,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "*batch heads chosen_queries chosen_keys"]:
        """The latent codes of the pairs of `queries` and `keys` alone, before dropout, in float32 or better.

        Costs the chosen pairs (with softmax, whose codes depend on every key, the rows of the chosen queries). The other
        arguments as in `forward`. Raises ConfigError for a query or key that is not there; negative ones count from the
        end.
        """
        num_keys = (x if context is None else context).shape[-2]
        where = {"queries": positions_of(queries, x.shape[-2], "queries"), "keys": positions_of(keys, num_keys, "keys")}
        chosen_q, chosen_k = (torch.tensor(places, dtype=torch.long, device=x.device) for places in where.values())
        query, key = self.q_proj(x[..., chosen_q, :]), self.k_proj(x if context is None else context)
        places = self._places(x, context, None, None)
        query, key, _ = self._prepare(query, key, None, places, chosen_q, None)
        terms = self._terms(places, num_keys, chosen_q, mask, key_mask, causal, bias)
        if self.mechanism.score_norm == "softmax":
            return latent_codes(query, key, "softmax", **terms)[..., chosen_k]
        terms |= {name: _columns(terms[name], chosen_k) for name in ("bias", "mask")}
        return latent_codes(query, key[..., chosen_k, :], self.mechanism.score_norm, **terms)

    def _places(
        self, x: Tensor, context: Tensor | None, cache: KeyValueCache | None, query_positions: Tensor | None
    ) -> Places:
        num_queries = x.shape[-2]
        if context is None:
            offset = 0 if cache is None else cache.length
        else:  # with fewer queries than keys the queries are the last positions, as the bottom-right causal mask has it
            offset = context.shape[-2] - num_queries
            unknown = cache is not None and query_positions is None and self.positions != "none"
            check(not unknown, "query_positions", None, "cross-attention with a cache and positions needs them")
        slots = torch.arange(num_queries, device=x.device) + offset
        if query_positions is None:
            return Places(slots, slots, context is not None)
        allowed = "[Q]: only rotary takes positions that differ between sequences"
        check(self.positions == "rotary" or query_positions.dim() == 1, "query_positions", "[..., Q]", allowed)
        return Places(slots, query_positions, context is not None)

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        places: Places,
        select: slice | Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Tensor, Any]:
        """The projected tokens as `hyper_attention` takes them: heads split, normed, rotated, and those of the cache."""
        query = _split_heads(query, self.num_heads)
        key = None if key is None else _split_heads(key, self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), None if key is None else self.k_norm(key)
        if self.positions == "rotary":
            positions = places.positions
            own = positions if select is None else positions[..., select]
            query = rotate(query, _per_head(own), self.rotary_base)
            if key is not None:
                positions = torch.arange(key.shape[-2], device=key.device) if places.crossing else positions
                key = rotate(key, _per_head(positions), self.rotary_base)
        if cache is None:
            assert key is not None
            return query, key, value
        return query, *cache.append(key, value)

    def _terms(
        self,
        places: Places,
        num_keys: int,
        select: slice | Tensor | None,
        mask: Tensor | None,
        key_mask: Tensor | None,
        causal: bool,
        bias: Tensor | None,
    ) -> dict[str, Any]:
        """{bias, mask, causal} as `hyper_attention` takes them, for the selected queries and all keys."""
        key_positions = torch.arange(num_keys, device=places.slots.device)
        slots, positions = places.slots, places.positions
        if select is not None:
            slots, positions = slots[select], positions[..., select]
            mask, bias = _rows(mask, select), _rows(bias, select)
        if self.relative_bias is not None:
            relative_HQK = self.relative_bias(positions, key_positions)
            bias = relative_HQK if bias is None else bias + relative_HQK
        if causal and select is not None:  # the rows of a selection need not end at the last key
            mask = _both(mask, key_positions <= slots[:, None])
            causal = False
        if key_mask is not None:
            allowed = "boolean, True = a real token (the opposite of torch's key_padding_mask)"
            check(key_mask.dtype == torch.bool, "key_mask", key_mask.dtype, allowed)
            mask = _both(mask, key_mask[..., None, None, :])
        return {"bias": bias, "mask": mask, "causal": causal}


class Places(NamedTuple):
    """Where all queries of a call stand: slots `[Q]`, counted in keys; positions `[Q]` or `[..., Q]`, what the position
    scheme takes them for. crossing: whether the keys are of another sequence."""

    slots: Tensor
    positions: Tensor
    crossing: bool


def _per_head(positions: Tensor) -> Tensor:
    """Positions `[..., Q]` that broadcast to `[..., H, Q]`."""
    return positions if positions.dim() == 1 else positions[..., None, :]


def _split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """`[..., T, heads * depth]` to `[..., heads, T, depth]`."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def positions_of(places: Sequence[int], length: int, field: str) -> list[int]:
    """`places` counted from the start; ConfigError, naming `field`, for none of them or for one that does not exist."""
    check(len(places) > 0, field, list(places), "at least one")
    for place in places:
        check(-length <= place < length, field, place, f"there are {length} positions, from 0 or back from -1")
    return [place % length for place in places]


def _rows(tensor: Tensor | None, select: slice | Tensor) -> Tensor | None:
    """The selected queries of something that broadcasts to `[..., H, Q, K]`."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., select, :]


def _columns(tensor: Tensor | None, keys: Tensor) -> Tensor | None:
    """The chosen keys of something that broadcasts to `[..., H, Q, K]`."""
    return tensor if tensor is None or tensor.dim() == 0 or tensor.shape[-1] == 1 else tensor[..., keys]


def _both(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """`mask` (boolean, additive or None) restricted to the pairs that `allowed` also allows."""
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))
