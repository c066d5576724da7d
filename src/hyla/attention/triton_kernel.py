"""Attention as a hypernetwork in one Triton kernel forward and three backward: no `[H, Q, K]` or `[Q, K, D]` tensor leaves
the chip. For `rms_head` and `none`, value networks of depth 1 and 2 with relu or identity; softmax attention has
`torch.nn.functional.scaled_dot_product_attention`.

A program holds one tile of queries and walks over tiles of keys (in the kernels of the key and value gradients the other
way round), with ALL heads of a tile at once, since `rms_head` normalises over them and the value network mixes them. Codes
are computed again in the backward pass. The width of the values is cut into blocks, so that a tile fits the chip's memory.
Sums are float32; products take bfloat16 and float16 as they are, and float32 exactly (as TF32 where
`torch.backends.cuda.matmul.allow_tf32` is on).

Checked in Triton's interpreter, and compiled for CUDA; not yet run on a GPU, so `auto` never chooses it. At 16 heads of
width 64 a program needs 96 KiB of shared memory in bfloat16 and 208 KiB in float32.

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
from hyla.errors import ConfigError, check

TILE = 16  # queries and keys of a tile


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
def _dot(left, right, PRECISION: tl.constexpr):
    """Batched over the first axis. Triton's interpreter multiplies the bits of bfloat16, so there it is lifted first."""
    if PRECISION == "lifted":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
           NUM_HEADS: tl.constexpr, H: tl.constexpr, EPSILON: tl.constexpr, RMS: tl.constexpr, CAUSAL: tl.constexpr,
           BIAS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(codes, 1 / root of rms_head, which pairs exist and are allowed) of one tile, `[H, Q, K]`."""
    num_queries, num_keys = sizes
    head_HQK, query_HQK, key_HQK = tl.arange(0, H)[:, None, None], query[None, :, None], key[None, None, :]
    score_HQK = _dot(q_HQD, k_HDK, PRECISION) * scale
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
def _forward_kernel(
    q, k, v, out, bias, allowed, sizes, scale,
    NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, EPSILON: tl.constexpr,
    RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(2).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column = tl.arange(0, H), tl.arange(0, D)
    v_column = tl.program_id(1) * DV + tl.arange(0, DV)
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
            hidden_KQD = _dot(tl.permute(code_HQK, (2, 1, 0)), v_KHD, PRECISION)
            if RELU:
                hidden_KQD = tl.maximum(hidden_KQD, 0.0)
            hidden_QKD = tl.permute(hidden_KQD.to(v.dtype.element_ty), (1, 0, 2))
            out_QHD += _dot(tl.permute(code_HQK, (1, 0, 2)), hidden_QKD, PRECISION)
        else:
            read_HQD = _dot(code_HQK, tl.permute(v_KHD, (1, 0, 2)), PRECISION)
            out_QHD += tl.permute(read_HQD, (1, 0, 2))
    _store(out, out_QHD, head[None, :, None], query[:, None, None], v_column[None, None, :],
           NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip


@triton.jit
def _hidden_layer(code_HQK, v_KHD, grad_QHD, RELU: tl.constexpr, PRECISION: tl.constexpr):
    """(x, gradient of what the activation was applied to), `[K, Q, D]`, of x[q,k] = phi(sum_h a[h,q,k] v[h,k])."""
    hidden_KQD = _dot(tl.permute(code_HQK, (2, 1, 0)), v_KHD, PRECISION)
    grad_QKD = _dot(tl.permute(code_HQK, (1, 2, 0)), grad_QHD, PRECISION)
    grad_KQD = tl.permute(grad_QKD, (1, 0, 2))
    if RELU:
        hidden_KQD = tl.maximum(hidden_KQD, 0.0)
        grad_KQD = tl.where(hidden_KQD > 0.0, grad_KQD, 0.0)
    return hidden_KQD.to(v_KHD.dtype), grad_KQD.to(v_KHD.dtype)


@triton.jit
def _score_gradient(
    code_HQK, root_QK, valid_HQK, v, grad_out, query, key, sizes,
    NUM_HEADS: tl.constexpr, V_WIDTH: tl.constexpr, H: tl.constexpr, DV: tl.constexpr,
    RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of one tile, `[H, Q, K]`."""
    num_queries, num_keys = sizes
    head = tl.arange(0, H)
    typed_HQK = code_HQK.to(v.dtype.element_ty)
    grad_code_HQK = tl.zeros_like(code_HQK)
    for first in range(0, V_WIDTH, DV):
        column = first + tl.arange(0, DV)
        v_KHD = _load(v, head[None, :, None], key[:, None, None], column[None, None, :], NUM_HEADS, num_keys, V_WIDTH)
        grad_QHD = _load(grad_out, head[None, :, None], query[:, None, None], column[None, None, :],
                         NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip
        if DEEP:
            hidden_KQD, grad_KQD = _hidden_layer(typed_HQK, v_KHD, grad_QHD, RELU, PRECISION)
            last_QHK = _dot(grad_QHD, tl.permute(hidden_KQD, (1, 2, 0)), PRECISION)
            grad_code_HQK += tl.permute(last_QHK, (1, 0, 2))
            first_KQH = _dot(grad_KQD, tl.permute(v_KHD, (0, 2, 1)), PRECISION)
            grad_code_HQK += tl.permute(first_KQH, (2, 1, 0))
        else:
            grad_HQD, v_HDK = tl.permute(grad_QHD, (1, 0, 2)), tl.permute(v_KHD, (1, 2, 0))
            grad_code_HQK += _dot(grad_HQD, v_HDK, PRECISION)
    if RMS:
        mean_QK = tl.sum(grad_code_HQK * code_HQK, 0) / NUM_HEADS
        grad_code_HQK = (grad_code_HQK - code_HQK * mean_QK[None, :, :]) * root_QK[None, :, :]
    return tl.where(valid_HQK, grad_code_HQK, 0.0)


@triton.jit
def _query_gradient_kernel(
    q, k, v, grad_out, grad_q, grad_bias, bias, allowed, sizes, scale,
    NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, EPSILON: tl.constexpr,
    RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(1).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    grad_q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column = tl.arange(0, H), tl.arange(0, D)
    query = tl.program_id(0) * TILE + tl.arange(0, TILE)
    q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :], NUM_HEADS, num_queries, QK_WIDTH)
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
        grad_score_HQK = _score_gradient(code_HQK, root_QK, valid_HQK, v, grad_out, query, key, sizes,
                                         NUM_HEADS, V_WIDTH, H, DV, RMS, DEEP, RELU, PRECISION)  # fmt: skip
        grad_q_HQD += _dot(grad_score_HQK.to(k_HKD.dtype), k_HKD, PRECISION)
        if BIAS_GRADIENT:
            pointer, by_batch, by_head, by_query, by_key = grad_bias
            place = head[:, None, None] * by_head + query[None, :, None] * by_query + key[None, None, :] * by_key
            tl.atomic_add(pointer + b * by_batch + place, grad_score_HQK, mask=valid_HQK)
    _store(grad_q, grad_q_HQD * scale, head[:, None, None], query[None, :, None], column[None, None, :],
           NUM_HEADS, num_queries, QK_WIDTH)  # fmt: skip


@triton.jit
def _key_gradient_kernel(
    q, k, v, grad_out, grad_k, bias, allowed, sizes, scale,
    NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, EPSILON: tl.constexpr,
    RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(1).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    grad_k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column = tl.arange(0, H), tl.arange(0, D)
    key = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k_HDK = _load(k, head[:, None, None], key[None, None, :], column[None, :, None], NUM_HEADS, num_keys, QK_WIDTH)
    grad_k_HKD = tl.zeros((H, TILE, D), tl.float32)
    first = 0
    if CAUSAL:  # the first tile of queries that sees the first key of this tile
        first = tl.maximum(0, tl.program_id(0) * TILE - (num_keys - num_queries)) // TILE * TILE
    for first_query in range(first, num_queries, TILE):
        query = first_query + tl.arange(0, TILE)
        q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :],
                      NUM_HEADS, num_queries, QK_WIDTH)  # fmt: skip
        code_HQK, root_QK, valid_HQK = _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
                                              NUM_HEADS, H, EPSILON, RMS, CAUSAL, BIAS, MASK, PRECISION)  # fmt: skip
        grad_score_HQK = _score_gradient(code_HQK, root_QK, valid_HQK, v, grad_out, query, key, sizes,
                                         NUM_HEADS, V_WIDTH, H, DV, RMS, DEEP, RELU, PRECISION)  # fmt: skip
        grad_k_HKD += _dot(tl.permute(grad_score_HQK.to(q_HQD.dtype), (0, 2, 1)), q_HQD, PRECISION)
    _store(grad_k, grad_k_HKD * scale, head[:, None, None], key[None, :, None], column[None, None, :],
           NUM_HEADS, num_keys, QK_WIDTH)  # fmt: skip


@triton.jit
def _value_gradient_kernel(
    q, k, v, grad_out, grad_v, bias, allowed, sizes, scale,
    NUM_HEADS: tl.constexpr, QK_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, EPSILON: tl.constexpr,
    RMS: tl.constexpr, DEEP: tl.constexpr, RELU: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    num_queries, num_keys = sizes
    b = tl.program_id(2).to(tl.int64)
    q += b * NUM_HEADS * num_queries * QK_WIDTH
    k += b * NUM_HEADS * num_keys * QK_WIDTH
    v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_v += b * NUM_HEADS * num_keys * V_WIDTH
    grad_out += b * NUM_HEADS * num_queries * V_WIDTH
    head, column = tl.arange(0, H), tl.arange(0, D)
    v_column = tl.program_id(1) * DV + tl.arange(0, DV)
    key = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k_HDK = _load(k, head[:, None, None], key[None, None, :], column[None, :, None], NUM_HEADS, num_keys, QK_WIDTH)
    v_KHD = _load(v, head[None, :, None], key[:, None, None], v_column[None, None, :], NUM_HEADS, num_keys, V_WIDTH)
    grad_v_KHD = tl.zeros((TILE, H, DV), tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(0, tl.program_id(0) * TILE - (num_keys - num_queries)) // TILE * TILE
    for first_query in range(first, num_queries, TILE):
        query = first_query + tl.arange(0, TILE)
        q_HQD = _load(q, head[:, None, None], query[None, :, None], column[None, None, :],
                      NUM_HEADS, num_queries, QK_WIDTH)  # fmt: skip
        grad_QHD = _load(grad_out, head[None, :, None], query[:, None, None], v_column[None, None, :],
                         NUM_HEADS, num_queries, V_WIDTH)  # fmt: skip
        code_HQK, _, _ = _codes(q_HQD, k_HDK, bias, allowed, b, query, key, sizes, scale,
                                NUM_HEADS, H, EPSILON, RMS, CAUSAL, BIAS, MASK, PRECISION)  # fmt: skip
        code_HQK = code_HQK.to(v.dtype.element_ty)
        if DEEP:
            _, grad_KQD = _hidden_layer(code_HQK, v_KHD, grad_QHD, RELU, PRECISION)
            grad_v_KHD += _dot(tl.permute(code_HQK, (2, 0, 1)), grad_KQD, PRECISION)
        else:
            grad_HQD, code_HKQ = tl.permute(grad_QHD, (1, 0, 2)), tl.permute(code_HQK, (0, 2, 1))
            grad_v_KHD += tl.permute(_dot(code_HKQ, grad_HQD, PRECISION), (1, 0, 2))
    _store(grad_v, grad_v_KHD, head[None, :, None], key[:, None, None], v_column[None, None, :],
           NUM_HEADS, num_keys, V_WIDTH)  # fmt: skip


INTERPRETED = not isinstance(_forward_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 when triton was imported


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
    dtype = query_BHQD.dtype
    _need(query_BHQD.is_cuda or INTERPRETED, f"needs a CUDA device, the tensors are on {query_BHQD.device.type!r}")
    _need(mechanism.score_norm in ("rms_head", "none"), "has no softmax; use torch's scaled_dot_product_attention")
    _need(network.depth <= 2, f"has value networks of depth 1 and 2, not {network.depth}")
    _need(network.depth == 1 or network.activation in ("relu", "identity"), f"has no {network.activation!r}")
    _need(dropout == 0.0, "has no dropout")
    _need(dtype in (torch.float32, torch.bfloat16, torch.float16), f"does not take {dtype}")
    _need(dtype == key_BHKD.dtype == value_BHKD.dtype, "takes query, key and value of one dtype")
    batch = query_BHQD.shape[:-3]
    out_BHQD: Any = _Attention.apply(
        *(
            (tensor.flatten(0, -4) if batch else tensor[None]).contiguous()
            for tensor in (query_BHQD, key_BHKD, value_BHKD)
        ),
        _four_axes(bias, batch),
        _four_axes(allowed, batch),
        (mechanism, float(scale), causal),
    )
    return out_BHQD.unflatten(0, batch) if batch else out_BHQD[0]


def _need(condition: bool, reason: str) -> None:
    check(condition, "backend", "triton", f"the kernel {reason}")


def _four_axes(tensor: Tensor | None, batch: torch.Size) -> Tensor | None:
    """What broadcasts to `[*batch, H, Q, K]` as `[B or 1, H or 1, Q or 1, K or 1]`."""
    if tensor is None:
        return None
    tensor = tensor[(None,) * (len(batch) + 3 - tensor.dim())]
    if any(size != 1 for size in tensor.shape[:-3]):
        tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor.flatten(0, -4) if batch else tensor[None]


def _steps(tensor: Tensor | None, like: Tensor) -> tuple[Any, ...]:
    """A pointer and the strides of the four axes, 0 where the axis broadcasts; without a tensor, something never read."""
    if tensor is None:
        return (like, 0, 0, 0, 0)
    return (tensor, *(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))


def _constants(
    query: Tensor, value: Tensor, bias: Any, allowed: Any, mechanism: Mechanism, causal: bool, widest_block: int
) -> dict[str, Any]:
    """The constants of a kernel; `widest_block`: of the width of the values."""

    def padded(size: int) -> int:
        return max(16, triton.next_power_of_2(size))

    heads, width, v_width = query.shape[1], query.shape[3], value.shape[3]
    return {
        "NUM_HEADS": heads,
        "QK_WIDTH": width,
        "V_WIDTH": v_width,
        "H": padded(heads),
        "D": padded(width),
        "DV": min(padded(v_width), widest_block),
        "TILE": TILE,
        "EPSILON": RMS_EPSILON,
        "RMS": mechanism.score_norm == "rms_head",
        "DEEP": mechanism.value_network.depth == 2,
        "RELU": mechanism.value_network.activation == "relu",
        "CAUSAL": causal,
        "BIAS": bias is not None,
        "MASK": allowed is not None,
        "PRECISION": "lifted" if INTERPRETED else "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "num_warps": 8,
        "num_stages": 1,
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Any, allowed: Any, settings: Any) -> Tensor:
        mechanism, scale, causal = settings
        batch, heads, num_queries, _ = query.shape
        num_keys, width = value.shape[2:]
        out = query.new_empty(batch, heads, num_queries, width, dtype=torch.float32)
        if out.numel():
            mask = allowed.view(torch.uint8) if allowed is not None else None
            constants = _constants(
                query, value, bias, allowed, mechanism, causal, widest_block=128 // query.element_size()
            )
            inputs = (_steps(bias, out), _steps(mask, out), (num_queries, num_keys), scale)
            grid = (triton.cdiv(num_queries, TILE), triton.cdiv(width, constants["DV"]), batch)
            _launch(_forward_kernel, grid, query, key, value, out, *inputs, **constants)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.settings = inputs[5]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, bias, allowed = ctx.saved_tensors
        mechanism, scale, causal = ctx.settings
        batch, _, num_queries, _ = query.shape
        num_keys, width = value.shape[2:]
        grad_out = grad_outputs[0].to(query.dtype).contiguous()
        grad_bias = None
        if ctx.needs_input_grad[3]:
            grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        if grad_out.numel() == 0 or num_keys == 0:
            return *map(torch.zeros_like, (query, key, value)), grad_bias, None, None
        grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
        mask = allowed.view(torch.uint8) if allowed is not None else None
        given = (query, key, value, grad_out)
        inputs = (_steps(bias, query), _steps(mask, query), (num_queries, num_keys), scale)
        constants = _constants(query, value, bias, allowed, mechanism, causal, widest_block=64 // query.element_size())
        grid = (triton.cdiv(num_queries, TILE), batch)
        _launch(_query_gradient_kernel, grid, *given, grad_query, _steps(grad_bias, grad_query), *inputs, **constants,
                BIAS_GRADIENT=grad_bias is not None)  # fmt: skip
        grid = (triton.cdiv(num_keys, TILE), batch)
        _launch(_key_gradient_kernel, grid, *given, grad_key, *inputs, **constants)
        grid = (triton.cdiv(num_keys, TILE), triton.cdiv(width, constants["DV"]), batch)
        _launch(_value_gradient_kernel, grid, *given, grad_value, *inputs, **constants)
        return grad_query, grad_key, grad_value, None if grad_bias is None else grad_bias.to(bias.dtype), None, None


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    try:
        kernel[grid](*args, **constants)
    except triton.runtime.errors.OutOfResources as error:
        heads, width = constants["NUM_HEADS"], max(constants["QK_WIDTH"], constants["V_WIDTH"])
        raise ConfigError(
            f"backend = 'triton' is too large for this GPU at {heads} heads of width {width}: {error}"
        ) from None
