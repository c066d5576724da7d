"""Attention as a hypernetwork in one Triton kernel forward and two backward: no `[H, Q, K]` or `[Q, K, D]` tensor leaves
the chip. For `rms_head` and `none`, value networks of depth 1 and 2 with relu or identity; softmax attention has
`torch.nn.functional.scaled_dot_product_attention`.

A program holds one tile of queries and walks over tiles of keys (in the kernel of the key and value gradients the other way
round), with ALL heads of a tile at once, since `rms_head` normalises over them and the value network mixes them. Codes are
computed again in the backward pass. Sums are float32; products take bfloat16 and float16 as they are, and float32 exactly
(as TF32 where `torch.backends.cuda.matmul.allow_tf32` is on).

Axes in names: H heads, Q queries and K keys of a tile, D width per head. Heads and widths are padded to powers of two, at
least 16, which matrix units ask for; the padding is 0 and adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyla.attention.mechanisms import RMS_EPSILON, Mechanism
from hyla.errors import check

TILE = 16  # queries and keys of a tile

# ruff: noqa: N803, N806


@triton.jit
def _load(pointer, head, row, column, NUM_HEADS, num_rows, WIDTH):
    """A tile of a contiguous `[H, rows, D]`; the three index tensors broadcast and so choose the order of the axes."""
    inside = (head < NUM_HEADS) & (row < num_rows) & (column < WIDTH)
    return tl.load(pointer + (head * num_rows + row) * WIDTH + column, mask=inside, other=0.0)


@triton.jit
def _store(pointer, tile, head, row, column, NUM_HEADS, num_rows, WIDTH):
    inside = (head < NUM_HEADS) & (row < num_rows) & (column < WIDTH)
    tl.store(pointer + (head * num_rows + row) * WIDTH + column, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
           NUM_HEADS: tl.constexpr, H: tl.constexpr, EPSILON: tl.constexpr, RMS: tl.constexpr, CAUSAL: tl.constexpr,
           BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(codes, 1 / root of rms_head, which pairs exist and are allowed) of one tile, `[H, Q, K]`."""
    num_queries, num_keys = sizes
    head_HQK, query_HQK, key_HQK = tl.arange(0, H)[:, None, None], query[None, :, None], key[None, None, :]
    score_HQK = tl.dot(q_HQD, k_HDK, input_precision=PRECISION) * scale
    valid_HQK = (head_HQK < NUM_HEADS) & (query_HQK < num_queries) & (key_HQK < num_keys)
    if BIAS:
        pointer, by_batch, by_head, by_query, by_key = bias
        place = b * by_batch + head_HQK * by_head + query_HQK * by_query + key_HQK * by_key
        score_HQK += tl.load(pointer + place, mask=valid_HQK, other=0.0).to(tl.float32)
    if CAUSAL:
        valid_HQK = valid_HQK & (key_HQK <= query_HQK + (num_keys - num_queries))
    if MASK:
        pointer, by_batch, by_head, by_query, by_key = allowed
        place = b * by_batch + head_HQK * by_head + query_HQK * by_query + key_HQK * by_key
        valid_HQK = valid_HQK & (tl.load(pointer + place, mask=valid_HQK, other=0) != 0)
    score_HQK = tl.where(valid_HQK, score_HQK, 0.0)
    root_QK = tl.rsqrt(tl.sum(score_HQK * score_HQK, 0) / NUM_HEADS + EPSILON)
    if RMS:
        score_HQK = score_HQK * root_QK[None, :, :]
    return score_HQK, root_QK, valid_HQK


@triton.jit
def _forward_kernel(q, k, v, out, bias, allowed, sizes, scale,
                    NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
                    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
                    EPSILON: tl.constexpr, RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr,
                    CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(1).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column, v_column = tl.arange(0, H), tl.arange(0, D), tl.arange(0, DV)
    query = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :], NUM_HEADS, num_queries, QK_WIDTH)
    out_QHD = tl.zeros((TILE, H, DV), tl.float32)
    last_key = num_keys
    if CAUSAL:  # tiles of keys that no query of this tile may see are left out
        last_key = tl.minimum(num_keys, (tl.program_id(0) + 1) * TILE + num_keys - num_queries)
    for first_key in range(0, last_key, TILE):
        key = first_key + tl.arange(0, TILE)
        k_HDK = _load(k, head[:, None, None], key[None, None, :], column[None, :, None], NUM_HEADS, num_keys, QK_WIDTH)
        code_HQK, _, _ = _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
                                NUM_HEADS, H, EPSILON, RMS, CAUSAL, BIAS, MASK, PRECISION)  # fmt: skip
        code_HQK = code_HQK.to(v.dtype.element_ty)
        v_KHD = _load(v, head[None, :, None], key[:, None, None], v_column[None, None, :], NUM_HEADS, num_keys, V_WIDTH)
        if DEEP:
            hidden_KQD = tl.dot(tl.permute(code_HQK, (2, 1, 0)), v_KHD, input_precision=PRECISION)
            if RELU:
                hidden_KQD = tl.maximum(hidden_KQD, 0.0)
            hidden_QKD = tl.permute(hidden_KQD.to(v.dtype.element_ty), (1, 0, 2))
            out_QHD += tl.dot(tl.permute(code_HQK, (1, 0, 2)), hidden_QKD, input_precision=PRECISION)
        else:
            read_HQD = tl.dot(code_HQK, tl.permute(v_KHD, (1, 0, 2)), input_precision=PRECISION)
            out_QHD += tl.permute(read_HQD, (1, 0, 2))
    _store(out, out_QHD, head[None, :, None], query[:, None, None], v_column[None, None, :],
           NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip


@triton.jit
def _tile_gradients(code_HQK, root_QK, valid_HQK, v_KHD, grad_QHD,
                    NUM_HEADS: tl.constexpr, RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """(gradient of the scores `[H, Q, K]`, of the values `[K, H, D]`) that one tile of pairs contributes."""
    typed_HQK = code_HQK.to(v_KHD.dtype)
    if DEEP:
        mixed_KQD = tl.dot(tl.permute(typed_HQK, (2, 1, 0)), v_KHD, input_precision=PRECISION)
        hidden_KQD = tl.maximum(mixed_KQD, 0.0) if RELU else mixed_KQD
        # out[q,h] = sum_k a[q,h,k] x[q,k]
        hidden_QDK = tl.permute(hidden_KQD.to(v_KHD.dtype), (1, 2, 0))
        grad_code_HQK = tl.permute(tl.dot(grad_QHD, hidden_QDK, input_precision=PRECISION), (1, 0, 2))
        grad_hidden_QKD = tl.dot(tl.permute(typed_HQK, (1, 2, 0)), grad_QHD, input_precision=PRECISION)
        # x[q,k] = phi(sum_h a[q,h,k] v[h,k])
        grad_mixed_KQD = tl.permute(grad_hidden_QKD, (1, 0, 2))
        if RELU:
            grad_mixed_KQD = tl.where(mixed_KQD > 0.0, grad_mixed_KQD, 0.0)
        grad_mixed_KQD = grad_mixed_KQD.to(v_KHD.dtype)
        grad_code_KQH = tl.dot(grad_mixed_KQD, tl.permute(v_KHD, (0, 2, 1)), input_precision=PRECISION)
        grad_code_HQK += tl.permute(grad_code_KQH, (2, 1, 0))
        grad_v_KHD = tl.dot(tl.permute(typed_HQK, (2, 0, 1)), grad_mixed_KQD, input_precision=PRECISION)
    else:
        grad_HQD = tl.permute(grad_QHD, (1, 0, 2))
        grad_code_HQK = tl.dot(grad_HQD, tl.permute(v_KHD, (1, 2, 0)), input_precision=PRECISION)
        grad_v_HKD = tl.dot(tl.permute(typed_HQK, (0, 2, 1)), grad_HQD, input_precision=PRECISION)
        grad_v_KHD = tl.permute(grad_v_HKD, (1, 0, 2))
    if RMS:
        mean_QK = tl.sum(grad_code_HQK * code_HQK, 0) / NUM_HEADS
        grad_code_HQK = (grad_code_HQK - code_HQK * mean_QK[None, :, :]) * root_QK[None, :, :]
    return tl.where(valid_HQK, grad_code_HQK, 0.0), grad_v_KHD


@triton.jit
def _query_gradient_kernel(q, k, v, grad_out, grad_q, grad_bias, bias, allowed, sizes, scale,
                           NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
                           H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
                           EPSILON: tl.constexpr, RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr,
                           CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
                           BIAS_GRADIENT: tl.constexpr):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(1).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    grad_q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column, v_column = tl.arange(0, H), tl.arange(0, D), tl.arange(0, DV)
    query = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :], NUM_HEADS, num_queries, QK_WIDTH)
    grad_QHD = _load(grad_out, head[None, :, None], query[:, None, None], v_column[None, None, :],
                     NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip
    grad_q_HQD = tl.zeros((H, TILE, D), tl.float32)
    last_key = num_keys
    if CAUSAL:
        last_key = tl.minimum(num_keys, (tl.program_id(0) + 1) * TILE + num_keys - num_queries)
    for first_key in range(0, last_key, TILE):
        key = first_key + tl.arange(0, TILE)
        k_HKD = _load(k, head[:, None, None], key[None, :, None], column[None, None, :], NUM_HEADS, num_keys, QK_WIDTH)
        code_HQK, root_QK, valid_HQK = _codes(
            q_HQD, tl.permute(k_HKD, (0, 2, 1)), bias, allowed, b, query, key, sizes, scale,
            NUM_HEADS, H, EPSILON, RMS, CAUSAL, BIAS, MASK, PRECISION)  # fmt: skip
        v_KHD = _load(v, head[None, :, None], key[:, None, None], v_column[None, None, :], NUM_HEADS, num_keys, V_WIDTH)
        grad_score_HQK, _ = _tile_gradients(code_HQK, root_QK, valid_HQK, v_KHD, grad_QHD,
                                            NUM_HEADS, RMS, DEEP, RELU, PRECISION)  # fmt: skip
        grad_q_HQD += tl.dot(grad_score_HQK.to(k_HKD.dtype), k_HKD, input_precision=PRECISION)
        if BIAS_GRADIENT:
            pointer, by_batch, by_head, by_query, by_key = grad_bias
            place = head[:, None, None] * by_head + query[None, :, None] * by_query + key[None, None, :] * by_key
            tl.atomic_add(pointer + b * by_batch + place, grad_score_HQK, mask=valid_HQK)
    _store(grad_q, grad_q_HQD * scale, head[:, None, None], query[None, :, None], column[None, None, :],
           NUM_HEADS, num_queries, QK_WIDTH)  # fmt: skip


@triton.jit
def _key_value_gradient_kernel(q, k, v, grad_out, grad_k, grad_v, bias, allowed, sizes, scale,
                               NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
                               H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
                               EPSILON: tl.constexpr, RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr,
                               CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
                               PRECISION: tl.constexpr):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(1).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    grad_k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column, v_column = tl.arange(0, H), tl.arange(0, D), tl.arange(0, DV)
    key = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k_HDK = _load(k, head[:, None, None], key[None, None, :], column[None, :, None], NUM_HEADS, num_keys, QK_WIDTH)
    v_KHD = _load(v, head[None, :, None], key[:, None, None], v_column[None, None, :], NUM_HEADS, num_keys, V_WIDTH)
    grad_k_HKD = tl.zeros((H, TILE, D), tl.float32)
    grad_v_KHD = tl.zeros((TILE, H, DV), tl.float32)
    first = 0
    if CAUSAL:  # the first tile of queries that sees the first key of this tile
        first = tl.maximum(0, tl.program_id(0) * TILE - (num_keys - num_queries)) // TILE * TILE
    for first_query in range(first, num_queries, TILE):
        query = first_query + tl.arange(0, TILE)
        q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :],
                      NUM_HEADS, num_queries, QK_WIDTH)  # fmt: skip
        grad_QHD = _load(grad_out, head[None, :, None], query[:, None, None], v_column[None, None, :],
                         NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip
        code_HQK, root_QK, valid_HQK = _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
                                              NUM_HEADS, H, EPSILON, RMS, CAUSAL, BIAS, MASK, PRECISION)  # fmt: skip
        grad_score_HQK, more_v_KHD = _tile_gradients(code_HQK, root_QK, valid_HQK, v_KHD, grad_QHD,
                                                     NUM_HEADS, RMS, DEEP, RELU, PRECISION)  # fmt: skip
        grad_v_KHD += more_v_KHD
        grad_k_HKD += tl.dot(tl.permute(grad_score_HQK.to(q_HQD.dtype), (0, 2, 1)), q_HQD, input_precision=PRECISION)
    _store(grad_k, grad_k_HKD * scale, head[:, None, None], key[None, :, None], column[None, None, :],
           NUM_HEADS, num_keys, QK_WIDTH)  # fmt: skip
    _store(grad_v, grad_v_KHD, head[None, :, None], key[:, None, None], v_column[None, None, :],
           NUM_HEADS, num_keys, V_WIDTH)  # fmt: skip


def attention(
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    mechanism: Mechanism,
    *,
    scale: float,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """The output of `eager.attention`, for tensors of one dtype, float32 or a half precision.

    First derivatives only. The gradient of `bias` is summed by atomic additions: over batch elements in no fixed order.

    Raises ConfigError, saying why, for what the kernel does not do.
    """
    network = mechanism.value_network
    interpreted = not isinstance(_forward_kernel, triton.JITFunction)
    dtype = query_BHQD.dtype
    _need(query_BHQD.is_cuda or interpreted, f"needs a CUDA device, the tensors are on {query_BHQD.device.type!r}")
    _need(mechanism.score_norm in ("rms_head", "none"), "has no softmax; use torch's scaled_dot_product_attention")
    _need(network.depth <= 2, f"has value networks of depth 1 and 2, not {network.depth}")
    _need(network.depth == 1 or network.activation in ("relu", "identity"), f"has no {network.activation!r}")
    _need(dropout == 0.0, "has no dropout")
    _need(dtype in (torch.float32, torch.bfloat16, torch.float16), f"does not take {dtype}")
    _need(dtype == key_BHKD.dtype == value_BHKD.dtype, "takes query, key and value of one dtype")
    batch = query_BHQD.shape[:-3]
    out_BHQD: Any = _Attention.apply(
        *(tensor.reshape(-1, *tensor.shape[-3:]).contiguous() for tensor in (query_BHQD, key_BHKD, value_BHKD)),
        _four_axes(bias, batch),
        _four_axes(allowed, batch),
        (mechanism, float(scale), causal),
    )
    return out_BHQD.reshape(*batch, *out_BHQD.shape[1:])


def _need(condition: bool, reason: str) -> None:
    check(condition, "backend", "triton", f"the kernel {reason}")


def _four_axes(tensor: Tensor | None, batch: torch.Size) -> Tensor | None:
    """What broadcasts to `[*batch, H, Q, K]` as `[B or 1, H or 1, Q or 1, K or 1]`."""
    if tensor is None:
        return None
    tensor = tensor[(None,) * (len(batch) + 3 - tensor.dim())]
    if any(size != 1 for size in tensor.shape[:-3]):
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor.reshape(-1, *tensor.shape[-3:])


def _steps(tensor: Tensor | None, like: Tensor) -> tuple[Any, ...]:
    """A pointer and the strides of the four axes, 0 where the axis broadcasts; without a tensor, something never read."""
    if tensor is None:
        return (like, 0, 0, 0, 0)
    return (tensor, *(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))


def _constants(query: Tensor, value: Tensor, bias: Any, allowed: Any, mechanism: Mechanism, causal: bool) -> dict[str, Any]:
    def padded(size: int) -> int:
        return max(16, triton.next_power_of_2(size))

    heads, width, v_width = query.shape[1], query.shape[3], value.shape[3]
    return {
        "NUM_HEADS": heads,
        "QK_WIDTH": width,
        "V_WIDTH": v_width,
        "H": padded(heads),
        "D": padded(width),
        "DV": padded(v_width),
        "TILE": TILE,
        "EPSILON": RMS_EPSILON,
        "RMS": mechanism.score_norm == "rms_head",
        "DEEP": mechanism.value_network.depth == 2,
        "RELU": mechanism.value_network.activation == "relu",
        "CAUSAL": causal,
        "BIAS": bias is not None,
        "MASK": allowed is not None,
        "PRECISION": "tf32" if query.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "num_warps": 8,
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Any, allowed: Any, settings: Any) -> Tensor:
        mechanism, scale, causal = settings
        batch, heads, num_queries, _ = query.shape
        out = query.new_empty(batch, heads, num_queries, value.shape[-1], dtype=torch.float32)
        if out.numel():
            mask = allowed.view(torch.uint8) if allowed is not None else None
            _forward_kernel[(triton.cdiv(num_queries, TILE), batch)](
                query, key, value, out, _steps(bias, out), _steps(mask, out), (num_queries, key.shape[2]), scale,
                **_constants(query, value, bias, allowed, mechanism, causal),
            )  # fmt: skip
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.settings = inputs[5]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, key, value, bias, allowed = ctx.saved_tensors
        mechanism, scale, causal = ctx.settings
        grad_out = grad_out.to(query.dtype).contiguous()
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        grad_bias = None
        if ctx.needs_input_grad[3]:
            grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        if grad_out.numel():
            mask = allowed.view(torch.uint8) if allowed is not None else None
            batch, _, num_queries, _ = query.shape
            shared = (_steps(bias, query), _steps(mask, query), (num_queries, key.shape[2]), scale)
            constants = _constants(query, value, bias, allowed, mechanism, causal)
            _query_gradient_kernel[(triton.cdiv(num_queries, TILE), batch)](
                query, key, value, grad_out, grad_query, _steps(grad_bias, grad_query), *shared, **constants,
                BIAS_GRADIENT=grad_bias is not None,
            )  # fmt: skip
            if key.shape[2]:
                _key_value_gradient_kernel[(triton.cdiv(key.shape[2], TILE), batch)](
                    query, key, value, grad_out, grad_key, grad_value, *shared, **constants
                )
        else:
            grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        return grad_query, grad_key, grad_value, None if grad_bias is None else grad_bias.to(bias.dtype), None, None
