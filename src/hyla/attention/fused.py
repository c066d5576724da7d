"""Linear layers fused on the CPU with the LayerNorm or GELU before them and the residual sum after them.

`project` and `add_projected` are written out in modules, and that is what runs wherever the fused operator
`hyla::fused_linear` (fused.c, compiled as native.py does) cannot: on a GPU, in other dtypes, for norms and layers of other
kinds or with hooks, for few rows, under autocast and torch.func's derivatives. Both compute the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyla.attention import native
from hyla.attention.compiled import constant_result

SOURCE = Path(__file__).with_name("fused.c")
TILE, MAX_LAYERS = 128, 3  # as in fused.c
MIN_ROWS = 2**11  # with fewer, calling it costs more than it saves
MAX_WEIGHTS = 2**18  # numbers: what the second-level cache holds beside a tile


def project(x: Tensor, norm: nn.Module | None, layers: Sequence[nn.Module], backend: str = "auto") -> list[Tensor]:
    """`[layer(norm(x)) for layer in layers]`, the norm computed once."""
    if not _fuses(backend, x, layers, norm):
        normed = x if norm is None else norm(x)
        return [layer(normed) for layer in layers]
    scale, shift, epsilon = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return fused_linear(x, scale, shift, weights, biases, None, epsilon, False)


def add_projected(
    residual: Tensor | None, x: Tensor, layer: nn.Module, gelu: bool = False, backend: str = "auto"
) -> Tensor:
    """`residual + layer(x)`, or with `gelu` (the tanh approximation) `residual + layer(gelu(x))`."""
    if not _fuses(backend, x, [layer]):
        out = layer(F.gelu(x, approximate="tanh") if gelu else x)
        return out if residual is None else residual + out
    return fused_linear(x, None, None, [layer.weight], [layer.bias], residual, 0.0, gelu)[0]


def _fuses(backend: str, x: Tensor, layers: Sequence[nn.Module], norm: nn.Module | None = None) -> bool:
    if backend == "eager" or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    if not x.numel() or x.numel() // x.shape[-1] < MIN_ROWS:
        return False
    if any(type(layer) is not nn.Linear for layer in layers) or not (norm is None or type(norm) is nn.LayerNorm):
        return False
    size = 0
    for module in layers if norm is None else [*layers, norm]:
        parameters = list(module.parameters(recurse=False))
        if len(parameters) != 2 or any(parameter.dtype != x.dtype for parameter in parameters):  # weight and bias
            return False
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
        size += parameters[0].numel()
    if size > MAX_WEIGHTS:
        return False
    if torch.is_autocast_enabled("cpu") or native.transformed():
        return False
    return native.problem() is None and gemm(x.dtype) is not None


@constant_result
def gemm(dtype: torch.dtype) -> int | None:
    """The address of the BLAS library's matrix product that torch itself uses; None if it cannot be found."""
    return _gemm(dtype)


@functools.cache
def _gemm(dtype: torch.dtype) -> int | None:
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = getattr(ctypes.CDLL(str(library)), "sgemm_" if dtype == torch.float32 else "dgemm_")
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value
    return None


_INPUTS = "Tensor x, Tensor? scale, Tensor? shift, Tensor[] weights"


@torch.library.custom_op(
    "hyla::fused_linear",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor[] biases, Tensor? residual, float epsilon, bool gelu) -> Tensor[]",
)
def fused_linear(x, scale, shift, weights, biases, residual, epsilon, gelu):
    """Outputs `[..., width]`, one for each weight `[width, inputs]`, of `x [..., inputs]`."""
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    call, alive = _call(x, scale, shift, epsilon, gelu)
    for index, (weight, bias, out) in enumerate(zip(weights, biases, outs, strict=True)):
        turned = weight.T.contiguous()
        call.layer[index] = _Layer(turned.data_ptr(), bias.data_ptr(), out.data_ptr(), weight.shape[0])
        alive.append(turned)
    if residual is not None:
        residual = residual.contiguous()
        call.residual = residual.data_ptr()
    _run(x.dtype, "hyla_forward", call)
    return outs


@torch.library.custom_op(
    "hyla::fused_linear_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, {_INPUTS}, float epsilon, bool gelu, bool wants_x) -> (Tensor, Tensor)",
)
def fused_linear_backward(grads, x, scale, shift, weights, epsilon, gelu, wants_x):
    """(gradient of x, empty unless wanted; those of the parameters, flat: weights, then biases, scale, shift)."""
    call, alive = _call(x, scale, shift, epsilon, gelu)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else x.new_empty(0)
    parts = x.new_zeros(call.threads, _num_parameters(x, scale, weights))
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        weight, grad = weight.contiguous(), grad.contiguous()
        call.layer[index] = _Layer(weight.data_ptr(), None, grad.data_ptr(), weight.shape[0])
        alive += [weight, grad]
    call.grad_x = grad_x.data_ptr() if wants_x else None
    call.grads, call.copy = parts.data_ptr(), parts.shape[1]
    _run(x.dtype, "hyla_backward", call)
    return grad_x, parts.sum(0)


def _num_parameters(x: Tensor, scale: Tensor | None, weights: Sequence[Tensor]) -> int:
    return sum(weight.numel() + weight.shape[0] for weight in weights) + (0 if scale is None else 2 * x.shape[-1])


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "bias", "out")] + [("width", ctypes.c_int64)]


class _Call(ctypes.Structure):
    _fields_ = (
        [("gemm", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("rows", "inputs", "layers", "gelu", "threads")]
        + [("epsilon", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in ("x", "scale", "shift", "residual", "grad_x", "grads")]
        + [("copy", ctypes.c_int64), ("layer", _Layer * MAX_LAYERS)]
    )


def _call(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, epsilon: float, gelu: bool
) -> tuple[_Call, list[Tensor]]:
    """(arguments for C, tensors that must stay alive during the call)."""
    alive = [tensor.contiguous() for tensor in (x, scale, shift) if tensor is not None]
    pointers = [tensor.data_ptr() for tensor in alive]
    rows = x.numel() // x.shape[-1]
    call = _Call(gemm(x.dtype), rows, x.shape[-1], 0, gelu, min(torch.get_num_threads(), -(-rows // TILE)), epsilon)
    call.x, call.scale, call.shift = pointers if scale is not None else (*pointers, None, None)
    return call, alive


def _run(dtype: torch.dtype, name: str, call: _Call) -> None:
    call.layers = sum(layer.width > 0 for layer in call.layer)
    if getattr(native.build(SOURCE, dtype, BYTES=64), name)(ctypes.byref(call)):
        raise MemoryError("hyla's fused linear layer could not allocate its scratch memory")


@fused_linear.register_fake
def _(x, scale, shift, weights, biases, residual, epsilon, gelu):
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@fused_linear_backward.register_fake
def _(grads, x, scale, shift, weights, epsilon, gelu, wants_x):
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else x.new_empty(0)
    return grad_x, x.new_empty(_num_parameters(x, scale, weights))


def _keep_inputs(ctx, inputs, output) -> None:
    x, scale, shift, weights, _, residual, *ctx.rest = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x, scale, shift, *weights)


def _gradient(ctx, grads):
    x, scale, shift, *weights = ctx.saved_tensors
    wants_x = ctx.needs_input_grad[0]
    grad_x, flat = fused_linear_backward(grads, x, scale, shift, weights, *ctx.rest, wants_x)
    sizes = [weight.numel() for weight in weights] + [weight.shape[0] for weight in weights]
    sizes += [] if scale is None else 2 * [x.shape[-1]]
    pieces = flat.split(sizes)
    grad_weights = [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=False)]
    grad_biases, norm = list(pieces[len(weights) : 2 * len(weights)]), pieces[2 * len(weights) :]
    grad_scale, grad_shift = norm if norm else (None, None)
    residual = grads[0] if ctx.has_residual else None
    return grad_x if wants_x else None, grad_scale, grad_shift, grad_weights, grad_biases, residual, None, None


def _keep_backward_inputs(ctx, inputs, output) -> None:
    grads, x, scale, shift, weights, *ctx.rest = inputs
    ctx.layers = len(weights)
    ctx.save_for_backward(x, scale, shift, *grads, *weights)


def _second_gradient(ctx, *seconds):
    """The derivative of the backward pass, by torch's own functions (it is wanted too seldom to be fused)."""
    epsilon, gelu, wants_x = ctx.rest
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors if tensor is not None]
        first_grad, first_weight = len(leaves) - 2 * ctx.layers, len(leaves) - ctx.layers
        x, norm, grads, weights = (
            leaves[0],
            leaves[1:first_grad],
            leaves[first_grad:first_weight],
            leaves[first_weight:],
        )
        before = F.layer_norm(x, x.shape[-1:], norm[0], norm[1], epsilon) if norm else x
        before = F.gelu(before, approximate="tanh") if gelu else before
        biases = [weight.new_zeros(weight.shape[0], requires_grad=True) for weight in weights]
        outs = [F.linear(before, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        *first, grad_x = torch.autograd.grad(outs, [*weights, *biases, *norm, x], grads, create_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in first])
        results = [grad_x, flat] if wants_x else [flat]
        found = list(torch.autograd.grad(results, leaves, seconds[-len(results) :], allow_unused=True))
    scale_and_shift = found[1:first_grad] if norm else (None, None)
    return found[first_grad:first_weight], found[0], *scale_and_shift, found[first_weight:], None, None, None


fused_linear.register_autograd(_gradient, setup_context=_keep_inputs)
fused_linear_backward.register_autograd(_second_gradient, setup_context=_keep_backward_inputs)


def _member(args, axes, index: int) -> list:
    """The arguments of one member of a vmapped call."""
    return [
        _member(arg, axis, index)
        if isinstance(arg, list | tuple)
        else arg
        if axis is None or arg is None
        else arg.select(axis, index)
        for arg, axis in zip(args, axes, strict=True)
    ]


@fused_linear.register_vmap
def _(info, in_dims, *args):
    members = [fused_linear(*_member(args, in_dims, index)) for index in range(info.batch_size)]
    outs = [torch.stack(each) for each in zip(*members, strict=True)]
    return outs, [0] * len(outs)


@fused_linear_backward.register_vmap
def _(info, in_dims, *args):
    members = [fused_linear_backward(*_member(args, in_dims, index)) for index in range(info.batch_size)]
    return tuple(torch.stack(each) for each in zip(*members, strict=True)), (0, 0)
