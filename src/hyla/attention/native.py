"""The `native` backend: the equations of eager.py fused into one C function for the CPU, compiled on first use.

`native.c` (or `across.c`, where heads never meet) is compiled by the machine's C compiler for each mechanism, dtype and set
of head sizes that is met (about a second each), and the result is kept in the user's cache directory. `problem()` says why
this machine cannot do that, `unsupported()` why a call cannot be done here. The pair of operators `hyla::native_attention`
and its backward have fake, autograd and vmap rules; second derivatives are those of eager.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from hyla.attention import eager
from hyla.attention.compiled import constant_result
from hyla.attention.mechanisms import Mechanism, ValueNetwork

SOURCE, ACROSS = (Path(__file__).with_name(name) for name in ("native.c", "across.c"))
HALVES = (torch.bfloat16, torch.float16)  # computed in float32, which costs less than eager's half-precision codes
MAX_WIDTH = 8_192  # heads times width per head: a query's vectors live on the stack

# No -ffast-math: NaN and inf keep their meaning. These two only give up errno and floating-point traps.
FLAGS = ("-O3", "-fPIC", "-std=gnu11", "-fopenmp-simd", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math")
# Tried in turn: a compiler may know no -march=native, a process may have no OpenMP runtime.
EXTRA_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())


# What is compiled to see whether compiling works.
_PROBE = ("rms_head", 2, "relu", 1, 1, 1)


class BuildError(RuntimeError):
    """A C file could not be compiled or loaded; the message says why."""


def cache_folder() -> Path:
    """Where compiled operators are kept: `$XDG_CACHE_HOME/hyla`, by default `~/.cache/hyla`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyla"


@functools.cache
def _compiler() -> tuple[str, str]:
    """(path, version) of the C compiler: `$CC`, or the first of cc, gcc and clang on the PATH."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise BuildError(f"no C compiler was found (looked for {', '.join(names)})")
    return path, _command(path, "--version")


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{words[0]} could not be run: {error}") from None
    if done.returncode:
        raise BuildError(f"{words[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


@functools.cache
def _processor() -> str:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    kept = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "\n".join([platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *kept])


def _apart(score_norm: str, depth: int) -> bool:
    """Whether heads never meet: then across.c puts them side by side."""
    return depth == 1 and score_norm != "rms_head"


def load(
    dtype: torch.dtype,
    score_norm: str,
    depth: int,
    activation: str,
    heads: int,
    qk_depth: int,
    v_depth: int,
    vector_bytes: int = 64,
) -> ctypes.CDLL:
    """The compiled functions for one mechanism, dtype and set of sizes; BuildError if they cannot be had."""
    macros = {"HEADS": heads, "DK": qk_depth, "DV": v_depth, "NORM": score_norm.upper()}
    source = ACROSS if _apart(score_norm, depth) else SOURCE
    return build(source, dtype, **macros, DEPTH=depth, ACTIVATION=activation.upper(), BYTES=vector_bytes)


@functools.cache
def build(source: Path, dtype: torch.dtype, **macros: int | str) -> ctypes.CDLL:
    """The functions of a C file, compiled for a dtype with these macros; BuildError if that cannot be."""
    real, whole = ("float", "int32_t") if dtype == torch.float32 else ("double", "int64_t")
    defines = [f"-D{name}={value}" for name, value in {"REAL": real, "INT": whole, **macros}.items()]
    failures = []
    for extra in EXTRA_FLAGS:
        try:
            return _build(source, [*FLAGS, *extra, *defines])
        except BuildError as error:
            failures.append(str(error))
    raise BuildError(failures[0])


def _build(source: Path, flags: list[str]) -> ctypes.CDLL:
    compiler, version = _compiler()
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = "\0".join([*texts, version, *flags, _processor()])
    library = cache_folder() / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            # Built under a name of its own, then renamed: two processes that build at once both end with a whole file.
            with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
                compiled, linked = f"{folder}/native.o", f"{folder}/native.so"
                _command(compiler, *flags, "-c", str(source), "-o", compiled)
                # Linked without -fopenmp, so that the OpenMP runtime is the one torch has loaded: two runtimes would
                # have two pools of threads, each spinning while the other works.
                _command(compiler, "-shared", compiled, "-o", linked, "-lm")
                os.replace(linked, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} could not be written or loaded: {error}") from None


@constant_result
def problem() -> str | None:
    """Why this machine cannot compile the operator; None if it can. Found out once per process."""
    return _problem()


@functools.cache
def _problem() -> str | None:
    try:
        load(torch.float32, *_PROBE)
    except BuildError as error:
        return str(error)
    return None


def unsupported(device: str, dtypes: set[torch.dtype], depth: int, widths: tuple[int, ...] = (1,)) -> str | None:
    """Why this backend cannot do a call; None if it can. `widths`: heads times width per head, of queries and values."""
    if device != "cpu":
        return f"it runs on the CPU, not on {device}"
    if {torch.float32 if dtype in HALVES else dtype for dtype in dtypes} not in ({torch.float32}, {torch.float64}):
        return f"it takes float64, or float32 and below, for all, not {', '.join(sorted(map(str, dtypes)))}"
    if depth > 2:
        return f"it has value networks of depth 1 and 2, not {depth}"
    if max(widths) > MAX_WIDTH or min(widths) == 0:
        return f"it takes from 1 up to {MAX_WIDTH} for heads times width per head, not {widths}"
    reason = problem()
    return None if reason is None else f"its C code could not be built: {reason}"


def pays(depth: int, head_width: int, large: bool) -> bool:
    """Whether this backend is expected to be the fastest (measured). With a value network, whose hidden layer eager writes
    to memory for every pair: always, except that where this is `large` and heads are wide the chunked matrix products win.
    Without one: up to 8 per head."""
    return head_width <= 8 or (depth > 1 and (head_width <= 32 or not large))


@constant_result
def transformed() -> bool:
    """Whether torch.func, or forward-mode differentiation, takes a derivative here: custom operators have no rule for it.
    vmap alone is fine."""
    below = get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() == TransformType.Grad for level in below)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    *,
    scale: float,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    dropout: float = 0.0,
    keep: Tensor | None = None,
) -> Tensor:
    """The output of `eager.attention`, `[..., H, Q, Dv]` laid out as `[..., Q, H, Dv]` in memory; of half-precision tensors
    in float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    batch, num_keys = query.shape[:-3], key.shape[-2]
    size = batch.numel()
    if keep is not None:
        keep = keep.to(query.dtype) / (1.0 - dropout)
    network = mechanism.value_network
    out_BHQD = native_attention(
        query.reshape(size, *query.shape[-3:]),
        key.reshape(size, *key.shape[-3:]),
        value.reshape(size, *value.shape[-3:]),
        *(_four_axes(tensor, batch, num_keys) for tensor in (bias, allowed, keep)),
        scale,
        mechanism.score_norm,
        network.depth,
        network.activation,
    )
    return out_BHQD.reshape(*batch, *out_BHQD.shape[1:])


def _four_axes(tensor: Tensor | None, batch: torch.Size, num_keys: int) -> Tensor | None:
    """Something that broadcasts to `[*batch, H, Q, K]` as `[1 or B, 1 or H, 1 or Q, K]`."""
    if tensor is None:
        return None
    tensor = tensor.expand(*tensor.shape[:-1], num_keys) if tensor.dim() else tensor.expand(num_keys)
    while tensor.dim() < 3:
        tensor = tensor.unsqueeze(0)
    if all(size == 1 for size in tensor.shape[:-3]):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:])


# What the operators take: tensors [B, H, T, D] with any strides; bias, mask (boolean) and keep (the factor of each code
# under dropout) [1 or a divisor of B, 1 or H, 1 or Q, K], where an entry serves B / its size consecutive sequences.

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, Tensor? keep, "
    "float scale, str score_norm, int depth, str activation"
)


@torch.library.custom_op("hyla::native_attention", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def native_attention(query, key, value, bias, mask, keep, scale, score_norm, depth, activation):
    functions = _functions(query, value, score_norm, depth, activation)
    call, out, _alive = _call(functions, query, key, value, bias, mask, keep, scale, _apart(score_norm, depth))
    call.out = _describe(out)
    _run(functions.hyla_forward, call)
    return out


@torch.library.custom_op(
    "hyla::native_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)
def native_attention_backward(
    grad, query, key, value, bias, mask, keep, scale, score_norm, depth, activation, wants_bias
):
    functions = _functions(query, value, score_norm, depth, activation)
    apart = _apart(score_norm, depth)
    call, _, _alive = _call(functions, query, key, value, bias, mask, keep, scale, apart)
    call.out = _describe(grad)
    grads = tuple(_token_major(tensor) for tensor in (query, key, value))
    call.grad_query, call.grad_key, call.grad_value = map(_describe, grads)
    if not wants_bias:
        _run(functions.hyla_backward, call)
        return *grads, query.new_empty(0)
    # Threads share the entries of a bias that serves several sequences, so each adds to a copy of its own.
    shared = bias.shape[0] < query.shape[0]
    if apart:
        sizes = _side_by_side(bias, query.shape, functions.hyla_lanes()).shape
    else:
        sizes = (bias.shape[0], bias.shape[2], bias.shape[1], _padded(functions, bias.shape[3]))
    partial = query.new_zeros(call.threads if shared else 1, *sizes)
    if apart:
        call.grad_bias = _describe_laid(partial[0], query.shape, functions)
    else:
        call.grad_bias = _describe(partial[0].transpose(1, 2), query.shape[0])
    call.part_bias = partial.stride(0) if shared else 0
    _run(functions.hyla_backward, call)
    if apart:
        return *grads, _one_by_one(partial.sum(0), bias, query.shape)
    return *grads, partial.sum(0).transpose(1, 2)[..., : bias.shape[3]].contiguous()


def _functions(query: Tensor, value: Tensor, score_norm: str, depth: int, activation: str) -> ctypes.CDLL:
    batch, heads, num_keys, lanes = *query.shape[:2], value.shape[2], 64 // query.element_size()
    if _apart(score_norm, depth):
        narrow, wide = (_num_vectors(batch, heads, width) for width in (lanes // 2, lanes))
        halves = narrow < 1.6 * wide  # a vector of half the width costs a little more than half
    else:
        narrow, wide = (-(-num_keys // width) * width for width in (lanes // 2, lanes))  # keys with their padding
        halves = 6 * narrow <= 5 * wide
    sizes = (heads, query.shape[3], value.shape[3])
    return load(query.dtype, score_norm, depth, activation, *sizes, 32 if halves else 64)


def _num_vectors(batch: int, heads: int, lanes: int) -> int:
    """How many vectors hold all heads of all sequences: see across.c."""
    return -(-batch // max(lanes // heads, 1)) * -(-heads // lanes)


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("group", "batch", "head", "token", "depth")
    ]


class _Call(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("batch", "queries", "keys", "threads")]
        + [("scale", ctypes.c_double)]
        + [(name, _Tensor) for name in ("query", "key", "value", "bias", "mask", "keep", "out")]
        + [(name, _Tensor) for name in ("grad_query", "grad_key", "grad_value", "grad_bias")]
        + [("part_bias", ctypes.c_int64)]
    )


def _describe(tensor: Tensor, batch: int | None = None) -> _Tensor:
    """A `[B, H, T, D]` tensor for C; axes of size 1 broadcast where `batch`, the number of sequences, is given."""
    if batch is None:
        return _Tensor(tensor.data_ptr(), 1, *tensor.stride())
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return _Tensor(tensor.data_ptr(), max(batch // tensor.shape[0], 1), *strides)


def _padded(functions: ctypes.CDLL, num_keys: int) -> int:
    lanes = functions.hyla_lanes()
    return -(-num_keys // lanes) * lanes


def _token_major(like: Tensor) -> Tensor:
    """An empty `[B, H, T, D]` tensor whose memory is `[B, T, H, D]`, as the projections around attention have it."""
    batch, heads, tokens, depth = like.shape
    return like.new_empty(batch, tokens, heads, depth).transpose(1, 2)


def _side_by_side(tensor: Tensor, sizes: torch.Size, lanes: int) -> Tensor:
    """A bias `[1 or a divisor of B, 1 or H, 1 or Q, K]` as across.c reads it, `[groups, 1 or Q, K, lanes]`; `sizes` are the
    query's, of which the first two are B and H. One group where all share an entry."""
    (batch, heads), side = sizes[:2], max(lanes // sizes[1], 1)
    each = batch // tensor.shape[0]  # sequences that share an entry
    tensor = tensor.expand(-1, heads, -1, -1)
    if tensor.shape[0] == 1 or each % side == 0:
        tensor = tensor.unsqueeze(1).expand(-1, side, -1, -1, -1)
    else:
        tensor = tensor.repeat_interleave(each, 0)
        tensor = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, -batch % side)).unflatten(0, (-1, side))
    tensor = tensor.permute(0, 3, 4, 1, 2).flatten(3)
    return F.pad(tensor, (0, -tensor.shape[-1] % lanes)).contiguous()


def _one_by_one(laid: Tensor, like: Tensor, sizes: torch.Size) -> Tensor:
    """The gradient of `like` from that of `_side_by_side(like, ...)`."""
    (batch, heads), side = sizes[:2], max(laid.shape[-1] // sizes[1], 1)
    entries = like.shape[0]
    laid = laid[..., : side * heads].unflatten(3, (side, heads)).permute(0, 3, 4, 1, 2)
    if entries == 1 or batch // entries % side == 0:
        grad = laid.sum(1)
    else:
        grad = laid.flatten(0, 1)[:batch].unflatten(0, (entries, -1)).sum(1)
    return (grad.sum(1, keepdim=True) if like.shape[1] == 1 else grad).contiguous()


def _describe_laid(laid: Tensor, sizes: torch.Size, functions: ctypes.CDLL) -> _Tensor:
    groups = -(-sizes[0] // max(functions.hyla_lanes() // sizes[1], 1))
    entry, query, key, _ = (stride if size > 1 else 0 for stride, size in zip(laid.stride(), laid.shape, strict=True))
    return _Tensor(laid.data_ptr(), max(groups // laid.shape[0], 1), entry, key, query, 1)


def _call(functions, query, key, value, bias, mask, keep, scale, apart) -> tuple[_Call, Tensor, list[Tensor]]:
    """(arguments for C, the empty output, tensors that must stay alive during the call)."""
    batch, heads, num_queries, _ = query.shape
    out = query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
    lanes = functions.hyla_lanes()
    threads = max(1, min(torch.get_num_threads(), _num_vectors(batch, heads, lanes) if apart else batch))
    call = _Call(batch, num_queries, key.shape[2], threads, scale)
    call.query, call.key, call.value = map(_describe, (query, key, value))
    alive = []
    for name, tensor in (("bias", bias), ("mask", mask), ("keep", keep)):
        if tensor is None:
            continue
        if apart:
            laid = _side_by_side(tensor.to(query.dtype), query.shape, lanes)
            setattr(call, name, _describe_laid(laid, query.shape, functions))
        else:
            # All heads of a query side by side, since they are read together.
            laid = F.pad(tensor.to(query.dtype).transpose(1, 2), (0, -tensor.shape[-1] % lanes)).contiguous()
            setattr(call, name, _describe(laid.transpose(1, 2), batch))
        alive.append(laid)
    return call, out, alive


def _run(function, call: _Call) -> None:
    if function(ctypes.byref(call)):
        raise MemoryError("hyla's native attention could not allocate its scratch memory")


@native_attention.register_fake
def _(query, key, value, bias, mask, keep, scale, score_norm, depth, activation):
    batch, heads, num_queries, _ = query.shape
    return query.new_empty(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)


@native_attention_backward.register_fake
def _(grad, query, key, value, bias, mask, keep, scale, score_norm, depth, activation, wants_bias):
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if wants_bias else query.new_empty(0)
    return *(_token_major(tensor) for tensor in (query, key, value)), grad_bias


def _keep_inputs(ctx, inputs, output) -> None:
    tensors, ctx.rest = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors)


def _gradient(ctx, grad):
    *tensors, mask, keep = ctx.saved_tensors
    wants_bias = ctx.needs_input_grad[3]
    *grads, grad_bias = native_attention_backward(grad, *tensors, mask, keep, *ctx.rest, wants_bias)
    return *grads, grad_bias if wants_bias else None, *(None for _ in range(6))


def _keep_backward_inputs(ctx, inputs, output) -> None:
    tensors, ctx.rest = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors)


def _second_gradient(ctx, *grads):
    """The derivative of the backward pass, by eager's equations (it is wanted too seldom to be fused)."""
    grad, query, key, value, bias, mask, keep = ctx.saved_tensors
    scale, score_norm, depth, activation, wants_bias = ctx.rest
    with torch.enable_grad():
        given = [tensor for tensor in (grad, query, key, value, bias) if tensor is not None]
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        bias = None if bias is None else leaves[4]
        mechanism = Mechanism(score_norm, ValueNetwork(depth, activation))
        out = _eager(leaves[1], leaves[2], leaves[3], bias, mask, keep, scale, mechanism)
        wanted = leaves[1:] if wants_bias else leaves[1:4]
        first = torch.autograd.grad(out, wanted, leaves[0], create_graph=True)
        second = torch.autograd.grad(first, leaves, grads[: len(wanted)], allow_unused=True)
    return *second, *(None for _ in range(12 - len(second)))


def _eager(query, key, value, bias, mask, keep, scale, mechanism: Mechanism) -> Tensor:
    bias, mask, keep = (_whole_batch(tensor, query.shape[0]) for tensor in (bias, mask, keep))
    score = query @ key.transpose(-1, -2) * scale
    score = score if bias is None else score + bias
    code = eager.normalise_scores(score, mask, mechanism.score_norm)
    return eager.apply_value_network(code if keep is None else code * keep, value, mechanism.value_network)


def _whole_batch(tensor: Tensor | None, batch: int) -> Tensor | None:
    if tensor is None or tensor.shape[0] in (1, batch):
        return tensor
    return tensor.repeat_interleave(batch // tensor.shape[0], 0)


native_attention.register_autograd(_gradient, setup_context=_keep_inputs)
native_attention_backward.register_autograd(_second_gradient, setup_context=_keep_backward_inputs)


def _fold(members: int, tensors, axes) -> list[Tensor | None]:
    """Tensors with vmap's axis made part of the batch; one that all members share and that broadcasts stays as it is."""
    folded = []
    for position, (tensor, axis) in enumerate(zip(tensors, axes, strict=True)):
        if tensor is not None and axis is not None:
            tensor = tensor.movedim(axis, 0).flatten(0, 1)
        elif tensor is not None and not (position >= len(tensors) - 3 and tensor.shape[0] == 1):
            tensor = tensor.expand(members, *tensor.shape).flatten(0, 1)
        folded.append(tensor)
    return folded


@native_attention.register_vmap
def _(info, in_dims, *args):
    out = native_attention(*_fold(info.batch_size, args[:6], in_dims[:6]), *args[6:])
    return out.unflatten(0, (info.batch_size, -1)), 0


@native_attention_backward.register_vmap
def _(info, in_dims, *args):
    members, bias = info.batch_size, args[4]
    tensors = _fold(members, args[:7], in_dims[:7])
    if bias is not None and in_dims[4] is None and bias.shape[0] == 1:  # shared, but each member has a gradient of it
        tensors[4] = bias.expand(members, *bias.shape[1:])
    *grads, grad_bias = native_attention_backward(*tensors, *args[7:])
    grads = [grad.unflatten(0, (members, -1)) for grad in grads]
    return (*grads, grad_bias.unflatten(0, (members, -1)) if args[-1] else grad_bias), (
        0,
        0,
        0,
        0 if args[-1] else None,
    )
