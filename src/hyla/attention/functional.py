"""The front door: one function for every mechanism, with the shapes and masks of torch's scaled_dot_product_attention."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hyla.attention import chunked, eager, native
from hyla.attention.mechanisms import Mechanism, ScoreNorm, ValueNetwork, resolve_mechanism
from hyla.errors import ConfigError, check

Backend = Literal["auto", "eager", "native", "chunked", "triton"]

# The largest tensor that `auto` lets eager make. On a CPU chunked is as fast from about 10 MiB and several times faster
# above; a GPU wants few large operations for as long as memory allows.
EAGER_BYTES_CPU, EAGER_BYTES_GPU = 2**25, 2**30


def check_backend(backend: str) -> None:
    """Raise ConfigError unless `backend` is the name of one; whether it can run is for `choose_backend` to say."""
    check(backend in get_args(Backend), "backend", backend, f"choose from {', '.join(get_args(Backend))}")


def choose_backend(
    backend: Backend = "auto",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    depth: int = 2,
    head_width: int = 1,
    eager_bytes: int = 0,
) -> str:
    """The backend that calls with this setting run on; a run's config records it. `depth` of the value network,
    `head_width` the larger of the widths per head, `eager_bytes` the size of eager's largest tensor.

    auto: `native` where it can run and pays, else `eager` where its largest tensor is small, else `chunked`.
    Raises ConfigError, saying why, where a backend asked for by name cannot run.
    """
    check_backend(backend)
    return _choose(backend, native.unsupported(device, {dtype}, depth), device, depth, head_width, eager_bytes)


def _choose(
    backend: Backend, not_native: str | None, device: str, depth: int, head_width: int, eager_bytes: int
) -> str:
    if backend == "native" and not_native is not None:
        raise ConfigError(f"backend = 'native' is not possible: {not_native}")
    if backend == "triton":
        check(device == "cuda" or _interpreted(), "backend", backend, f"it runs on CUDA, not on {device}")
    if backend != "auto":
        return backend
    large = eager_bytes > (EAGER_BYTES_CPU if device == "cpu" else EAGER_BYTES_GPU)
    if not_native is None and native.pays(depth, head_width, large):
        return "native"
    return "chunked" if large else "eager"


def _interpreted() -> bool:
    """Whether Triton's kernels are interpreted, on CPU tensors, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def largest_eager_bytes(query: Tensor, value: Tensor, mechanism: Mechanism) -> int:
    """Size of the largest tensor of `eager`: codes `[..., H, Q, K]`, a hidden layer `[..., Q, K, D]`, or a hidden layer per
    head `[..., H, Q, K, D]` where the value network has further weights."""
    heads, depth = query.shape[-3], value.shape[-1]
    per_pair = {1: heads, 2: max(heads, depth)}.get(mechanism.value_network.depth, heads * depth)
    pairs = math.prod(query.shape[:-3]) * query.shape[-2] * value.shape[-2]
    return pairs * per_pair * torch.promote_types(query.dtype, torch.float32).itemsize


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Bool[Tensor, "queries keys"]:
    """True where a query may attend to a key, aligned bottom-right: the last query sees every key."""
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


def split_mask(
    mask: Shaped[Tensor, "..."], score_dtype: torch.dtype
) -> tuple[Bool[Tensor, "..."], Float[Tensor, "..."] | None]:
    """(allowed, additive) of a boolean or additive mask.

    In an additive mask -inf and anything below half of the dtype's lowest number (`finfo.min`, as some libraries write;
    float32's in a float64 mask) mean "masked": added to a score that is not passed through a softmax they would be values.
    """
    if mask.dtype == torch.bool:
        return mask, None
    check(
        mask.is_floating_point(), "mask", mask.dtype, "boolean (True = may attend) or floating point (added to scores)"
    )
    lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min)
    allowed = mask > lowest / 2
    return allowed, mask.masked_fill(~allowed, 0.0).to(score_dtype)


def _same_batch(*tensors: Tensor) -> list[Tensor]:
    """The tensors, their sizes before the last three broadcast."""
    leading = [tuple(tensor.shape[:-3]) for tensor in tensors]
    if all(sizes == leading[0] for sizes in leading):
        return list(tensors)
    try:
        batch = torch.broadcast_shapes(*leading)
    except RuntimeError:
        raise ConfigError(f"the leading sizes of query, key and value do not fit each other: {leading}") from None
    return [tensor.expand(*batch, *tensor.shape[-3:]) for tensor in tensors]


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether `tensor` broadcasts to `shape` without enlarging it."""
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.dim() <= len(shape) and all(size in (1, whole) for size, whole in pairs)


def _round_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float16:  # unnormalised sums over many keys can exceed 65504: the largest number, not inf
        limit = torch.finfo(dtype).max
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


def _backend_of_call(
    backend: Backend,
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    return_codes: bool,
) -> str:
    """The backend of one call: `choose_backend`'s, with what only the call itself can tell."""
    if backend == "eager":
        return backend
    dtypes = {tensor.dtype for tensor in (query, key, value, bias) if tensor is not None}
    widths = (query.shape[-3] * query.shape[-1], query.shape[-3] * value.shape[-1])
    not_native = native.unsupported(query.device.type, dtypes, mechanism.value_network.depth, widths)
    derived = native.transformed()
    if derived:
        not_native = "torch.func and forward-mode differentiation need operators of torch's own"
    whole = return_codes or keep is not None or derived  # what eager alone can do besides native
    depth, head_width = mechanism.value_network.depth, max(query.shape[-1], value.shape[-1])
    eager_bytes = 0 if whole else largest_eager_bytes(query, value, mechanism)
    name = _choose(backend, not_native, query.device.type, depth, head_width, eager_bytes)
    if name in ("chunked", "triton"):
        check(
            not return_codes, "return_codes", True, f"backend {name!r} never holds all codes; ask for 'eager' or 'auto'"
        )
        check(keep is None, "keep", "a mask", f"backend {name!r} draws its own; ask for 'eager' or 'auto'")
    return name


def _sum(bias: Tensor | None, additive: Tensor | None) -> Tensor | None:
    """What is added to the scores."""
    if bias is None or additive is None:
        return additive if bias is None else bias
    return bias + additive


def _and_causal(allowed: Tensor | None, causal: bool, query: Tensor, num_keys: int) -> Tensor | None:
    """`allowed`, without the keys that a causal query does not see."""
    if not causal:
        return allowed
    causal_QK = causal_mask(query.shape[-2], num_keys, query.device)
    return causal_QK if allowed is None else allowed & causal_QK


def latent_codes(
    query: Float[Tensor, "*batch heads queries qk_depth"],
    key: Float[Tensor, "*batch kv_heads keys qk_depth"],
    score_norm: ScoreNorm,
    *,
    bias: Float[Tensor, "..."] | None = None,
    mask: Shaped[Tensor, "..."] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "*batch heads queries keys"]:
    """The codes alone, before dropout, in float32 or better; arguments as in `hyper_attention`."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    allowed = additive = None
    if mask is not None:
        allowed, additive = split_mask(mask, torch.promote_types(query.dtype, torch.float32))
    bias, allowed = _sum(bias, additive), _and_causal(allowed, causal, query, key.shape[-2])
    return eager.latent_codes(query, key, score_norm, scale=scale, bias=bias, allowed=allowed)


def hyper_attention(
    query: Float[Tensor, "*batch heads queries qk_depth"],
    key: Float[Tensor, "*key_batch kv_heads keys key_depth"],
    value: Float[Tensor, "*value_batch value_heads value_keys depth"],
    bias: Float[Tensor, "..."] | None = None,
    mask: Shaped[Tensor, "..."] | None = None,
    causal: bool = False,
    mechanism: str = "hyla",
    *,
    score_norm: ScoreNorm | None = None,
    value_network: ValueNetwork | None = None,
    value_weights: Sequence[Float[Tensor, "heads depth depth"]] = (),
    dropout: float = 0.0,
    dropout_shared: bool = False,
    keep: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    return_codes: bool = False,
    backend: Backend = "auto",
) -> Any:
    """Attention as a hypernetwork (P1): scores, latent codes, the value network they configure, summed over keys.

        s[h,q,k] = scale q[h,q].k[h,k] + bias[h,q,k],   a = normalise(s)          the latent code of the pair (q,k)
        x[q,k]   = phi(sum_h a[h,q,k] v[h,k])                                     the value network's hidden layer
        x[q,k]   = phi(sum_h a[h,q,k] W_h x[q,k])       for each W in value_weights
        out[h,q] = sum_k a[h,q,k] x[q,k]                (depth 1, ordinary attention: sum_k a[h,q,k] v[h,k])

    Args:
        query: `[..., H, Q, D]`. Its leading sizes and those of key and value broadcast.
        key: `[..., Hkv, K, D]`; H must be a multiple of Hkv, whose heads are repeated before the codes (grouped heads).
        value: `[..., Hkv, K, Dv]`.
        bias: finite numbers that broadcast to `[..., H, Q, K]`, added to the scaled scores.
        mask: broadcasts to `[..., H, Q, K]`; boolean (True = may attend) or additive (-inf and `finfo.min` = masked). The
            code of a masked pair is exactly 0 in every mechanism; a query without any key gives exactly 0.
        causal: a query sees no later key, aligned bottom-right: with fewer queries than keys the last query sees every
            key; with more, the leading queries see none. May be combined with `mask`.
        mechanism: a name of `hyla.attention.MECHANISMS`; `score_norm` and `value_network` replace its parts.
        value_weights: `depth - 2` tensors `[H, Dv, Dv]` (outputs, inputs), the further layers of the value network.
        dropout: probability of dropping codes, after normalisation; the caller passes 0 in evaluation.
        dropout_shared: one dropout mask `[Q, K]` for the whole batch and all heads (the public code's).
        keep: the dropout mask itself, broadcast to `[..., H, Q, K]` (True = kept), instead of one drawn from torch's
            global generator; for callers that must repeat it.
        scale: of the scores; 1/sqrt(D) by default.
        return_codes: also return the codes `[..., H, Q, K]`, before dropout; the output is the same.
        backend: `auto` (the rule of `choose_backend`), `eager` (the equations, written out), `native` (compiled for this
            CPU on first use), `chunked` (memory linear in length) or `triton` (a kernel for CUDA). The last two return no
            codes and have first derivatives only. A backend asked for by name that cannot run raises an error saying why.

    Returns:
        `[..., H, Q, Dv]` in the dtype of `value`, before any output projection; with `return_codes` a pair of it and the
        codes. Statistics over heads and sums over keys are float32 or better; a float16 result beyond 65504 (possible
        where codes are not normalised over keys) is returned as 65504.

    Raises:
        ConfigError (a ValueError): shapes that do not fit, an unknown mechanism, a wrong number of `value_weights`.
    """
    chosen = resolve_mechanism(mechanism, score_norm, value_network)
    for field, tensor in (("query", query), ("key", key), ("value", value)):
        check(tensor.dim() >= 3, field, tuple(tensor.shape), "at least three axes, [..., heads, tokens, width]")
    heads, _, qk_depth = query.shape[-3:]
    kv_heads, num_keys = key.shape[-3:-1]
    check(key.shape[-1] == qk_depth, "key", tuple(key.shape), f"its last size must be the query's, {qk_depth}")
    fits = value.shape[-3:-1] == key.shape[-3:-1]
    check(fits, "value", tuple(value.shape), f"heads and keys must be those of the key, {tuple(key.shape[-3:-1])}")
    repeats = kv_heads > 0 and heads % kv_heads == 0
    check(repeats, "key", tuple(key.shape), f"the query's {heads} heads must be a multiple of its {kv_heads} heads")
    needed = chosen.value_network.num_further_weights
    if len(value_weights) != needed:
        depth = chosen.value_network.depth
        check(False, "value_weights", f"{len(value_weights)} tensors", f"depth {depth} takes {needed} [H, Dv, Dv]")
    shape = (heads, value.shape[-1], value.shape[-1])
    for weight in value_weights:
        check(tuple(weight.shape) == shape, "value_weights", tuple(weight.shape), f"[H, Dv, Dv] is {shape} here")
    check(0.0 <= dropout < 1.0, "dropout", dropout, "a probability from 0 up to, not including, 1")
    check_backend(backend)
    query, key, value = _same_batch(query, key, value)
    score_shape = (*query.shape[:-1], num_keys)
    for field, tensor in (("bias", bias), ("mask", mask), ("keep", keep)):
        if tensor is not None and not _broadcasts(tensor, score_shape):
            check(False, field, tuple(tensor.shape), f"must broadcast to [..., H, Q, K], {score_shape} here")

    if kv_heads != heads:
        key = key.repeat_interleave(heads // kv_heads, dim=-3)
        value = value.repeat_interleave(heads // kv_heads, dim=-3)
    keep = keep if dropout > 0.0 else None
    scale = 1.0 / math.sqrt(qk_depth) if scale is None else scale
    allowed = additive = None
    if mask is not None:
        allowed, additive = split_mask(mask, torch.promote_types(query.dtype, torch.float32))
    name = _backend_of_call(backend, chosen, query, key, value, bias, keep, return_codes)
    if name == "chunked":
        out = chunked.attention(
            query,
            key,
            value,
            chosen,
            scale=scale,
            bias=bias,
            additive=additive,
            allowed=allowed,
            causal=causal,
            value_weights=value_weights,
            dropout=dropout,
            dropout_shared=dropout_shared,
        )
        return _round_to(out, value.dtype)

    bias = _sum(bias, additive)
    if name == "triton":
        try:
            from hyla.attention import triton_kernel
        except ImportError:
            raise ConfigError("backend = 'triton' needs the package triton: pip install 'hyla[triton]'") from None
        masks: dict[str, Any] = {"bias": bias, "allowed": allowed, "causal": causal}
        out = triton_kernel.attention(query, key, value, chosen, scale=scale, dropout=dropout, **masks)
        return _round_to(out, value.dtype)

    allowed = _and_causal(allowed, causal, query, num_keys)
    if dropout > 0.0 and keep is None:
        keep = eager.draw_keep(score_shape, dropout, dropout_shared, query.device)
    scores: dict[str, Any] = {"scale": scale, "bias": bias, "allowed": allowed}
    drops: dict[str, Any] = {"dropout": dropout, "keep": keep}
    if name == "native":
        out = _round_to(native.attention(query, key, value, chosen, **scores, **drops), value.dtype)
        if not return_codes:
            return out
        return out, _round_to(eager.latent_codes(query, key, chosen.score_norm, **scores), query.dtype)
    out, codes = eager.attention(query, key, value, chosen, **scores, **drops, value_weights=value_weights)
    out = _round_to(out, value.dtype)
    return (out, _round_to(codes, query.dtype)) if return_codes else out
