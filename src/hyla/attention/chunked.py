"""The equations of `eager` with memory linear in length: codes are computed for a few queries at a time, and again in the
backward pass, so that no `[H, Q, K]` or `[Q, K, D]` tensor ever exists whole.

Queries are taken in chunks against all the keys that they may see, because a softmax and a causal mask need whole rows; a
value network then takes those keys in chunks, because its hidden layers are D / H times larger than the codes. Keys that a
causal mask hides from a whole chunk of queries are skipped. Half precision is lifted to float32.

First derivatives only. A dense bias or mask that the caller passes at `[H, Q, K]` or `[Q, K]` (T5's relative bias is one)
is of course quadratic by itself, and so is its gradient; it is read in slices and never enlarged.

Axes in names are those of `eager`, and N: queries of a chunk over its batch, B Q together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hyla.attention import eager
from hyla.attention.mechanisms import RMS_EPSILON, Mechanism
from hyla.errors import ConfigError

CODE_BYTES = 2**20  # of the codes of one chunk of queries: several tensors of this size are alive at once
HIDDEN_BYTES = 2**19  # of one hidden layer of a value network: small enough to stay in a core's cache
MIN_ROWS = 16  # queries per chunk, however many keys: below it products of matrices are too thin to be fast


def attention(
    query_BHQD: Float[Tensor, "*batch heads queries qk_depth"],
    key_BHKD: Float[Tensor, "*batch heads keys qk_depth"],
    value_BHKD: Float[Tensor, "*batch heads keys depth"],
    mechanism: Mechanism,
    *,
    scale: float,
    bias: Float[Tensor, "..."] | None = None,
    additive: Float[Tensor, "..."] | None = None,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    value_weights: Sequence[Float[Tensor, "heads depth depth"]] = (),
    dropout: float = 0.0,
    dropout_shared: bool = False,
    query_chunk: int = 0,
    key_chunk: int = 0,
) -> Float[Tensor, "*batch heads queries depth"]:
    """The output of `eager.attention`. `bias` and `additive` are both added to the scores; all three of them broadcast.

    query_chunk, key_chunk: queries, and keys of a value network, per chunk; 0 chooses them from the sizes. The result does
    not depend on them, except for which codes dropout drops: they are drawn per chunk from a generator that is seeded from
    torch's global one, so a seed gives another draw than `eager`'s, with the same distribution.
    """
    batch = query_BHQD.shape[:-3]
    seed = torch.randint(2**31, ()) if dropout > 0.0 else None
    network = mechanism.value_network
    settings = (mechanism.score_norm, network.depth, network.activation, float(scale), causal)
    out_BHQD: Any = _Attention.apply(
        (*settings, dropout, dropout_shared, query_chunk, key_chunk),
        *(tensor.flatten(0, -4) if batch else tensor[None] for tensor in (query_BHQD, key_BHKD, value_BHKD)),
        *(_four_axes(tensor, batch) for tensor in (bias, additive, allowed)),
        seed,
        *value_weights,
    )
    return out_BHQD.unflatten(0, batch) if batch else out_BHQD[0]


def _four_axes(tensor: Tensor | None, batch: Sequence[int]) -> Tensor | None:
    """What broadcasts to `[*batch, H, Q, K]` as `[B or 1, H or 1, Q or 1, K or 1]`."""
    if tensor is None:
        return None
    tensor = tensor[(None,) * (len(batch) + 3 - tensor.dim())]
    if all(size == 1 for size in tensor.shape[:-3]):
        return tensor.flatten(0, -4) if batch else tensor[None]
    return tensor.expand(*batch, *tensor.shape[-3:]).flatten(0, -4)  # copies where only some batch axes broadcast


class Chunk(NamedTuple):
    batch: slice
    queries: slice
    num_keys: int  # the first keys, the only ones that these queries may see

    def of(self, tensor: Tensor) -> Tensor:
        """This chunk's part of what broadcasts to `[B, H, Q, K]`, as a view."""
        if tensor.shape[0] > 1:
            tensor = tensor[self.batch]
        if tensor.shape[2] > 1:
            tensor = tensor[:, :, self.queries]
        return tensor[..., : self.num_keys]

    @property
    def size(self) -> tuple[int, int]:
        return self.batch.stop - self.batch.start, self.queries.stop - self.queries.start


@dataclass
class _Problem:
    """One call: its tensors, lifted to the type that is computed in, and its settings; in the order of `INPUTS`."""

    query_BHQD: Tensor  # noqa: N815
    key_BHKD: Tensor  # noqa: N815
    value_BHKD: Tensor  # noqa: N815
    bias: Tensor | None
    additive: Tensor | None
    allowed: Tensor | None
    value_weights: list[Tensor]
    seed: Tensor | None
    score_norm: Any
    depth: int
    activation: str
    scale: float
    causal: bool
    dropout: float
    dropout_shared: bool
    query_chunk: int
    key_chunk: int

    def __post_init__(self) -> None:
        compute = torch.promote_types(self.query_BHQD.dtype, torch.float32)
        self.query_BHQD, self.key_BHKD = self.query_BHQD.to(compute), self.key_BHKD.to(compute)
        self.value_BHKD = self.value_BHKD.to(compute)
        self.value_weights = [weight.to(compute) for weight in self.value_weights]
        # Keys first, so that a chunk of keys is one block of memory.
        self.value_KBHD = self.value_BHKD.permute(2, 0, 1, 3).contiguous() if self.depth > 1 else None

    def budget(self, cpu_bytes: int) -> int:
        """A GPU is given larger chunks: it has no use for a small cache, and starting an operation costs it more."""
        return cpu_bytes if self.query_BHQD.device.type == "cpu" else 64 * cpu_bytes

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of queries; whole batch elements together where they are small."""
        batch, heads, num_queries, _ = self.query_BHQD.shape
        num_keys = self.key_BHKD.shape[2]
        row_bytes = max(1, heads * num_keys * self.query_BHQD.element_size())
        rows = self.query_chunk or max(MIN_ROWS, self.budget(CODE_BYTES) // row_bytes)
        batch_step = max(1, rows // max(1, num_queries))
        for b in range(0, batch, batch_step):
            for q in range(0, num_queries, rows):
                last = min(q + rows, num_queries)
                visible = min(num_keys, last + num_keys - num_queries) if self.causal else num_keys
                if visible > 0:
                    yield Chunk(slice(b, min(b + batch_step, batch)), slice(q, last), visible)

    def key_slices(self, chunk: Chunk) -> Iterator[slice]:
        batch, rows = chunk.size
        hidden_bytes = batch * rows * self.value_BHKD.shape[-1] * self.value_BHKD.element_size()
        step = self.key_chunk or max(1, self.budget(HIDDEN_BYTES) // max(1, hidden_bytes))
        return (slice(k, min(k + step, chunk.num_keys)) for k in range(0, chunk.num_keys, step))

    def codes(self, chunk: Chunk) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(codes before dropout, 1 / root of `rms_head`, allowed pairs, what dropout multiplies the codes by)."""
        query_BHQD = self.query_BHQD[chunk.batch, :, chunk.queries] * self.scale
        score_BHQK = query_BHQD @ self.key_BHKD[chunk.batch, :, : chunk.num_keys].transpose(-1, -2)
        for added in (self.bias, self.additive):
            if added is not None:
                score_BHQK += chunk.of(added)
        allowed = chunk.of(self.allowed) if self.allowed is not None else None
        if self.causal:
            last_key = self.key_BHKD.shape[2] - self.query_BHQD.shape[2]  # of query 0: aligned bottom-right
            positions = torch.arange(chunk.num_keys, device=score_BHQK.device)
            queries = torch.arange(chunk.queries.start, chunk.queries.stop, device=score_BHQK.device)
            causal_QK = positions <= queries[:, None] + last_key
            allowed = causal_QK if allowed is None else allowed & causal_QK
        root_B1QK = None
        if self.score_norm == "rms_head":
            if allowed is not None:
                score_BHQK.masked_fill_(~allowed, 0.0)
            root_B1QK = torch.rsqrt(score_BHQK.square().mean(1, keepdim=True) + RMS_EPSILON)
            code_BHQK = score_BHQK.mul_(root_B1QK)
        else:
            code_BHQK = eager.normalise_scores(score_BHQK, allowed, self.score_norm)
        return code_BHQK, root_B1QK, allowed, self.kept(chunk, code_BHQK)

    def kept(self, chunk: Chunk, code_BHQK: Tensor) -> Tensor | None:
        """0 where dropout drops a code, 1 / (1 - dropout) elsewhere; the same in every call for a chunk."""
        if self.seed is None:
            return None
        number = 0 if self.dropout_shared else chunk.batch.start * self.query_BHQD.shape[2]
        number += chunk.queries.start
        generator = torch.Generator(code_BHQK.device).manual_seed(int(self.seed) + number)
        shape = code_BHQK.shape[-2:] if self.dropout_shared else code_BHQK.shape
        keep = torch.rand(shape, generator=generator, device=code_BHQK.device) >= self.dropout
        return keep.to(code_BHQK.dtype) / (1.0 - self.dropout)

    def hidden_layers(self, chunk: Chunk, code_KBQH: Tensor, keys: slice) -> list[tuple[Tensor, Tensor]]:
        """(before, after) the activation, for every hidden layer of the value networks of a chunk of pairs: `[K, N, D]`.

        relu and identity work in place, so that both are the same tensor; relu's derivative can be read off either."""
        assert self.value_KBHD is not None
        mixed_KND = (code_KBQH @ self.value_KBHD[keys, chunk.batch]).flatten(1, 2)
        layers = [(mixed_KND, _activate(mixed_KND, self.activation))]
        code_KNH = code_KBQH.flatten(1, 2)
        for weight_HOI in self.value_weights:
            mixed_KND = torch.zeros_like(mixed_KND)
            for head, weight_OI in enumerate(weight_HOI):  # one head at a time: all of them would be H times the memory
                mixed_KND.addcmul_(code_KNH[..., head, None], layers[-1][1] @ weight_OI.T)
            layers.append((mixed_KND, _activate(mixed_KND, self.activation)))
        return layers


def _activate(mixed: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return mixed.relu_()
    if activation == "identity":
        return mixed
    return {"silu": F.silu, "gelu": F.gelu}[activation](mixed)


def _activation_gradient(grad: Tensor, mixed: Tensor, activation: str) -> Tensor:
    """`grad * phi'(mixed)`, laid out in memory as `mixed` is."""
    out = torch.empty_like(mixed)
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(grad, mixed, 0.0, grad_input=out)
    if activation == "silu":
        return torch.ops.aten.silu_backward.grad_input(grad, mixed, grad_input=out)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward.grad_input(grad, mixed, grad_input=out)
    return out.copy_(grad)


def _by_query(tensor_BHQX: Tensor) -> Tensor:
    """`[B, H, Q, X]` to `[N, H, X]`, without a copy for one batch element."""
    return tensor_BHQX.transpose(1, 2).flatten(0, 1)


INPUTS = """Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? additive, Tensor? allowed,
    Tensor[] value_weights, Tensor? seed, str score_norm, int depth, str activation, float scale, bool causal,
    float dropout, bool dropout_shared, int query_chunk, int key_chunk"""


@torch.library.custom_op("hyla::chunked_attention", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def _forward(*inputs: Any) -> Tensor:
    query, _, value = inputs[:3]
    with torch.autocast(query.device.type, enabled=False):
        problem = _Problem(*inputs)
        out_BHQD = problem.query_BHQD.new_zeros(*query.shape[:-1], value.shape[-1])
        for chunk in problem.chunks():
            code_BHQK, _, _, kept = problem.codes(chunk)
            if kept is not None:
                code_BHQK = code_BHQK * kept
            if problem.depth == 1:
                read = code_BHQK @ problem.value_BHKD[chunk.batch, :, : chunk.num_keys]
            else:
                read = _read_value_networks(problem, chunk, code_BHQK)
            out_BHQD[chunk.batch, :, chunk.queries] = read
    return out_BHQD


def _read_value_networks(problem: _Problem, chunk: Chunk, code_BHQK: Tensor) -> Tensor:
    batch, rows = chunk.size
    code_NHK = _by_query(code_BHQK)
    out_NHD = code_NHK.new_zeros(*code_NHK.shape[:2], problem.value_BHKD.shape[-1])
    for keys in problem.key_slices(chunk):
        code_KBQH = code_BHQK[..., keys].permute(3, 0, 2, 1).contiguous()
        hidden_KND = problem.hidden_layers(chunk, code_KBQH, keys)[-1][1]
        out_NHD.baddbmm_(code_NHK[..., keys], hidden_KND.transpose(0, 1))
    return out_NHD.unflatten(0, (batch, rows)).transpose(1, 2)


@torch.library.custom_op(
    "hyla::chunked_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, bool needs_bias, bool needs_additive, {INPUTS}) -> Tensor[]",
)
def _backward(grad_out: Tensor, needs_bias: bool, needs_additive: bool, *inputs: Any) -> list[Tensor]:
    """Gradients of query, key, value, bias, additive (those two empty where not needed) and each of `value_weights`."""
    query, key, value, bias, additive, _, value_weights = inputs[:7]
    with torch.autocast(query.device.type, enabled=False):
        problem = _Problem(*inputs)
        grad_query_BHQD = torch.zeros_like(problem.query_BHQD)
        grad_key_BHKD = torch.zeros_like(problem.key_BHKD)
        grad_value_BHKD = torch.zeros_like(problem.value_BHKD)
        grad_weights = [torch.zeros_like(weight) for weight in problem.value_weights]
        grad_added = [
            torch.zeros_like(added, dtype=torch.promote_types(added.dtype, torch.float32))
            if added is not None and needed
            else None
            for added, needed in ((bias, needs_bias), (additive, needs_additive))
        ]
        for chunk in problem.chunks():
            keys = slice(0, chunk.num_keys)
            code_BHQK, root_B1QK, allowed_BHQK, kept = problem.codes(chunk)
            used_BHQK = code_BHQK if kept is None else code_BHQK * kept
            grad_out_BHQD = grad_out[chunk.batch, :, chunk.queries].to(code_BHQK.dtype)
            if problem.depth == 1:
                grad_code_BHQK = grad_out_BHQD @ problem.value_BHKD[chunk.batch, :, keys].transpose(-1, -2)
                grad_value_BHKD[chunk.batch, :, keys] += used_BHQK.transpose(-1, -2) @ grad_out_BHQD
            else:
                grad_code_BHQK = _value_network_gradients(
                    problem, chunk, used_BHQK, grad_out_BHQD, grad_value_BHKD, grad_weights
                )
            if kept is not None:
                grad_code_BHQK *= kept
            grad_score_BHQK = _score_gradient(grad_code_BHQK, code_BHQK, root_B1QK, allowed_BHQK, problem.score_norm)
            grad_query_BHQD[chunk.batch, :, chunk.queries] = (
                grad_score_BHQK @ problem.key_BHKD[chunk.batch, :, keys] * problem.scale
            )
            grad_key_BHKD[chunk.batch, :, keys] += grad_score_BHQK.transpose(-1, -2) @ (
                problem.query_BHQD[chunk.batch, :, chunk.queries] * problem.scale
            )
            for grad in grad_added:
                if grad is not None:
                    part = chunk.of(grad)
                    part += grad_score_BHQK.sum_to_size(part.shape)
    grads = [grad_query_BHQD.to(query.dtype), grad_key_BHKD.to(key.dtype), grad_value_BHKD.to(value.dtype)]
    for added, grad in zip((bias, additive), grad_added, strict=True):
        grads.append(query.new_empty(0) if added is None or grad is None else grad.to(added.dtype))
    return grads + [grad.to(weight.dtype) for grad, weight in zip(grad_weights, value_weights, strict=True)]


def _score_gradient(
    grad_code_BHQK: Tensor, code_BHQK: Tensor, root_B1QK: Tensor | None, allowed: Tensor | None, score_norm: str
) -> Tensor:
    """The gradient of the scores from that of the codes; `grad_code_BHQK` is overwritten."""
    if score_norm == "softmax":  # 0 wherever the code is, so at every masked pair
        grad_code_BHQK -= (grad_code_BHQK * code_BHQK).sum(-1, keepdim=True)
        return grad_code_BHQK.mul_(code_BHQK)
    if root_B1QK is not None:
        grad_code_BHQK -= code_BHQK * (grad_code_BHQK * code_BHQK).mean(1, keepdim=True)
        grad_code_BHQK *= root_B1QK
    return grad_code_BHQK if allowed is None else grad_code_BHQK.masked_fill_(~allowed, 0.0)


def _value_network_gradients(
    problem: _Problem,
    chunk: Chunk,
    code_BHQK: Tensor,
    grad_out_BHQD: Tensor,
    grad_value_BHKD: Tensor,
    grad_weights: list[Tensor],
) -> Tensor:
    """The gradient of the codes of one chunk; those of values and weights are added to what is passed."""
    assert problem.value_KBHD is not None
    code_NHK, grad_out_NHD = _by_query(code_BHQK), _by_query(grad_out_BHQD).contiguous()
    grad_code_BHQK = torch.empty_like(code_BHQK)
    for keys in problem.key_slices(chunk):
        code_KBQH = code_BHQK[..., keys].permute(3, 0, 2, 1).contiguous()
        code_KNH = code_KBQH.flatten(1, 2)
        layers = problem.hidden_layers(chunk, code_KBQH, keys)
        # The last layer: out[n,h] = sum_k a[n,h,k] x[n,k].
        grad_code_NHK = grad_out_NHD @ layers[-1][1].permute(1, 2, 0)
        grad_code_BHQK[..., keys] = grad_code_NHK.unflatten(0, chunk.size).transpose(1, 2)
        grad_hidden_KND = (code_NHK[..., keys].transpose(1, 2) @ grad_out_NHD).transpose(0, 1)
        # The layers between: z = sum_h a_h W_h x.
        for i in reversed(range(len(problem.value_weights))):
            grad_mixed_KND = _activation_gradient(grad_hidden_KND, layers[i + 1][0], problem.activation)
            hidden_KND = layers[i][1]
            grad_hidden_KND = torch.zeros_like(hidden_KND)
            grad_code_HKN = []
            for head, weight_OI in enumerate(problem.value_weights[i]):
                grad_code_HKN.append((grad_mixed_KND * (hidden_KND @ weight_OI.T)).sum(-1))
                weighted_KND = code_KNH[..., head, None] * grad_mixed_KND
                grad_weights[i][head] += weighted_KND.flatten(0, 1).T @ hidden_KND.flatten(0, 1)
                grad_hidden_KND += weighted_KND @ weight_OI
            grad_code_HKBQ = torch.stack(grad_code_HKN).unflatten(-1, chunk.size)
            grad_code_BHQK[..., keys] += grad_code_HKBQ.permute(2, 0, 3, 1)
        # The first layer: z = sum_h a_h v_h.
        grad_mixed_KND = _activation_gradient(grad_hidden_KND, layers[0][0], problem.activation)
        grad_mixed_KBQD = grad_mixed_KND.unflatten(1, chunk.size)
        grad_code_KBQH = grad_mixed_KBQD @ problem.value_KBHD[keys, chunk.batch].transpose(-1, -2)
        grad_code_BHQK[..., keys] += grad_code_KBQH.permute(1, 3, 2, 0)
        grad_value_KBHD = code_KBQH.transpose(-1, -2) @ grad_mixed_KBQD
        grad_value_BHKD[chunk.batch, :, keys] += grad_value_KBHD.permute(1, 2, 0, 3)
    return grad_code_BHQK


# What torch.compile, autograd and vmap need to know about the two operators.


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    compute = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=compute)


@_backward.register_fake
def _(grad_out, needs_bias, needs_additive, query, key, value, bias, additive, allowed, value_weights, *_: Any):
    added = ((bias, needs_bias), (additive, needs_additive))
    grads_added = [torch.empty_like(tensor) if needed else query.new_empty(0) for tensor, needed in added]
    return [*map(torch.empty_like, (query, key, value)), *grads_added, *map(torch.empty_like, value_weights)]


def _one_by_one(function: Any, info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
    """The vmap rule: member after member, since every member is a large problem."""

    def member(index: int) -> list[Any]:
        pairs = zip(inputs, in_dims, strict=True)
        return [x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x for x, dim in pairs]

    results = [function.apply(*member(index)) for index in range(info.batch_size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(items) for items in zip(*results, strict=True)), (0,) * len(results[0])


class _Attention(torch.autograd.Function):
    """`_forward`, with `_backward` as its derivative. Inputs: the settings, seven tensors or None, the value weights."""

    @staticmethod
    def forward(settings: tuple[Any, ...], *tensors: Any) -> Tensor:
        return _forward(*tensors[:6], list(tensors[7:]), tensors[6], *settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.settings = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        needs_bias, needs_additive = ctx.needs_input_grad[4:6]
        # torch.compile passes a context too many to a function inside a backward pass, and needs no vmap rule.
        gradients: Any = _Gradients.forward if torch.compiler.is_compiling() else _Gradients.apply
        grads = gradients(ctx.settings, needs_bias, needs_additive, *grad_outputs, *ctx.saved_tensors)
        bias, additive = grads[3] if needs_bias else None, grads[4] if needs_additive else None
        return (None, *grads[:3], bias, additive, None, None, *grads[5:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return _one_by_one(_Attention, info, in_dims, *inputs)


class _Gradients(torch.autograd.Function):
    """`_backward`, which has no derivative itself."""

    @staticmethod
    def forward(
        settings: Any, needs_bias: bool, needs_additive: bool, grad: Tensor, *tensors: Any
    ) -> tuple[Tensor, ...]:
        weights = list(tensors[7:])
        return tuple(_backward(grad, needs_bias, needs_additive, *tensors[:6], weights, tensors[6], *settings))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise ConfigError("backend = 'chunked' has first derivatives only; 'eager' has higher ones too")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return _one_by_one(_Gradients, info, in_dims, *inputs)
