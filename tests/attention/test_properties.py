"""What must hold for every mechanism: hand-computed values, invariances, other oracles, shapes, dtypes, transforms."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, stack_module_state

from hyla.attention import (
    MECHANISMS,
    Mechanism,
    MultiHeadAttention,
    ValueNetwork,
    generate_value_network,
    hyper_attention,
    native,
    per_pair_attention,
)
from hyla.attention.eager import apply_value_network, draw_keep, drop_codes, normalise_scores
from hyla.attention.mechanisms import ACTIVATIONS
from hyla.errors import ConfigError

SETTINGS = MECHANISMS | {
    "hyla_plus, depth 4": Mechanism("rms_head", ValueNetwork(4)),
    "silu": Mechanism("rms_head", ValueNetwork(2, "silu")),
    "gelu, depth 3": Mechanism("none", ValueNetwork(3, "gelu")),
    "softmax, depth 3": Mechanism("softmax", ValueNetwork(3)),
}
# the same on the compiled backend, where it has them; eager is the definition
needs_compiler = pytest.mark.skipif(native.problem() is not None, reason="needs a C compiler; runs where there is one")
NATIVE = [f"{name} (native)" for name, mechanism in SETTINGS.items() if mechanism.value_network.depth <= 2]
on_eager = pytest.mark.parametrize("name", SETTINGS)
every_mechanism = pytest.mark.parametrize(
    "name", [*SETTINGS, *(pytest.param(name, marks=needs_compiler) for name in NATIVE)]
)


def parts(name):
    """(mechanism, backend) of a test's name."""
    mechanism = SETTINGS[name.removesuffix(" (native)")]
    return mechanism, "native" if name in NATIVE else "eager"


def assert_same(got, expected):
    """Equal up to the order of float64 sums (some 1e-15 each), relative to the largest magnitude."""
    atol = 1e-12 * max([1.0, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def draw(name, seed=0, batch=(2,), heads=3, queries=4, keys=5, qk_depth=2, depth=3, dtype=torch.float64):
    """Random keyword arguments of `hyper_attention`, without masks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mechanism, backend = parts(name)
    network = mechanism.value_network
    return {
        "query": normal(*batch, heads, queries, qk_depth),
        "key": normal(*batch, heads, keys, qk_depth),
        "value": normal(*batch, heads, keys, depth),
        "bias": normal(heads, queries, keys),
        "score_norm": mechanism.score_norm,
        "value_network": network,
        "value_weights": [normal(heads, depth, depth) for _ in range(network.num_further_weights)],
        "backend": backend,
    }


def tensors(arguments):
    return {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}


def random_layer(name, embed_dim=6, num_heads=3, **options):
    """A float64 layer in evaluation mode whose parameters, biases included, are all random."""
    mechanism, backend = parts(name)
    choices = {"score_norm": mechanism.score_norm, "value_network": mechanism.value_network, "backend": backend}
    options = choices | {"v_dim": 3 * num_heads} | options
    layer = MultiHeadAttention(embed_dim, num_heads, dtype=torch.float64, **options).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    return layer


def some_mask(*shape, seed=3):
    """About a third of the pairs masked, and the first query without any key."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.35
    mask[..., 0, :] = False
    return mask


# --- tiny values, by hand -------------------------------------------------------------------------------------------


def column(*numbers):
    """One number per head, as the scores or codes `[H, 1, 1]` of a single pair."""
    return torch.tensor(numbers, dtype=torch.float64)[:, None, None]


def test_softmax_by_hand():
    codes = normalise_scores(torch.tensor([[[0.0, math.log(3.0)]]]), None, "softmax")
    torch.testing.assert_close(codes, torch.tensor([[[0.25, 0.75]]]))


def test_none_by_hand():
    assert normalise_scores(column(3.0, -4.0), None, "none").flatten().tolist() == [3.0, -4.0]


def test_rms_head_by_hand():
    """(9 + 16) / 2 = 12.5 is the mean square of the two heads of the pair."""
    codes = normalise_scores(column(3.0, -4.0), None, "rms_head")
    root = math.sqrt(12.5 + 1e-6)
    assert codes.flatten().tolist() == pytest.approx([3 / root, -4 / root], rel=1e-14)


def test_ordinary_attention_by_hand():
    code = torch.tensor([[[1.0, -2.0]]])  # one head, one query, two keys
    value = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])
    assert apply_value_network(code, value, ValueNetwork(1)).tolist() == [[[-5.0, 4.0]]]


def activated(activation, *numbers):
    """The textbook formulas, in plain Python."""
    formula = {
        "relu": lambda x: max(x, 0.0),
        "silu": lambda x: x / (1 + math.exp(-x)),
        "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "identity": lambda x: x,
    }[activation]
    return [formula(x) for x in numbers]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_network_of_depth_2_by_hand(activation):
    """Heads (1, -2) mix the values (1, 2) and (3, -1) to (-5, 4); each head reads the activated pair times its code."""
    code, value = column(1.0, -2.0), torch.tensor([[[1.0, 2.0]], [[3.0, -1.0]]], dtype=torch.float64)
    out = apply_value_network(code, value, ValueNetwork(2, activation))
    x, y = activated(activation, -5.0, 4.0)
    assert out.flatten().tolist() == pytest.approx([x, y, -2 * x, -2 * y], rel=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_network_of_depth_3_by_hand(activation):
    """The further layer of the pair is `1 W_1 - 2 W_2 = [[1, -2], [0, 3]]` (rows are outputs)."""
    code, value = column(1.0, -2.0), torch.tensor([[[1.0, 2.0]], [[3.0, -1.0]]], dtype=torch.float64)
    weight = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, -1.0]]], dtype=torch.float64)
    out = apply_value_network(code, value, ValueNetwork(3, activation), [weight])
    x, y = activated(activation, -5.0, 4.0)
    x, y = activated(activation, x - 2 * y, 3 * y)
    assert out.flatten().tolist() == pytest.approx([x, y, -2 * x, -2 * y], rel=1e-12)


def test_contributions_of_the_keys_are_summed():
    """Two keys with codes 1 and 2 in one head: relu(1 * -1) + 2 relu(2 * 3) = 12, where relu of the sum would give 5."""
    code, value = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[-1.0], [3.0]]])
    assert apply_value_network(code, value, ValueNetwork(2)).item() == 12.0


def test_generated_weights_by_hand():
    first = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])  # two heads, one output, two inputs
    second = torch.tensor([[[1.0]], [[10.0]]])
    generated = generate_value_network(torch.tensor([2.0, -1.0]), [first, second])
    assert [weight.tolist() for weight in generated] == [[[-1.0, 0.0]], [[-8.0]]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_keep_zero(activation):
    assert ValueNetwork(2, activation).activate(torch.zeros(1)).item() == 0.0


# --- the definition and other oracles -------------------------------------------------------------------------------


@every_mechanism
def test_layer_is_the_network_of_every_pair(name):
    """Codes from the layer, everything else from its weights: generate the pair's network, apply it, sum over keys."""
    layer = random_layer(name)
    x, context = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    mask, bias = some_mask(3, 4, 5), torch.randn(3, 4, 5, dtype=torch.float64)
    out, code_HQK = layer(x, context, mask=mask, bias=bias, return_codes=True)
    first = layer.v_proj.weight.unflatten(0, (3, -1))
    last = layer.out_proj.weight.unflatten(1, (3, -1)).transpose(0, 1)
    weights = [first, *layer.value_weights, last]
    value_bias = layer.v_proj.bias.unflatten(0, (3, -1))

    def contribution(keys):
        return per_pair_attention(
            code_HQK[:, :, keys], context[keys], weights, value_bias, layer.mechanism.value_network
        )

    assert_same(out, contribution(slice(None)) + layer.out_proj.bias)
    by_key = torch.stack([contribution(slice(k, k + 1)) for k in range(5)])
    assert_same(out, by_key.sum(0) + layer.out_proj.bias)
    assert_same(out[0], layer.out_proj.bias)  # the query without a key


@pytest.mark.parametrize("mask_shape", [None, (4, 5), (2, 1, 1, 5), (2, 3, 4, 5)])
def test_softmax_equals_torch_attention(mask_shape):
    arguments = draw("softmax")
    mask = None
    if mask_shape is not None:
        mask = (
            some_mask(*mask_shape)
            if mask_shape[-2] > 1
            else torch.arange(5) < torch.tensor([3, 0])[:, None, None, None]
        )
    bias = arguments["bias"] if mask is None else arguments["bias"].masked_fill(~mask, -torch.inf)
    query, key, value = (arguments[key] for key in ("query", "key", "value"))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.expand(2, 3, 4, 5))
    assert_same(hyper_attention(**arguments, mask=mask), expected)
    scaled = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    assert_same(hyper_attention(query, key, value, mechanism="softmax", scale=0.3), scaled)


def test_softmax_layer_equals_torch_layer():
    """nn.MultiheadAttention, where True means masked, with the same weights: outputs, codes and gradients."""
    ours = random_layer("softmax", 8, 4, v_dim=8)
    theirs = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    x, context = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    mask, key_mask = some_mask(4, 5), torch.arange(5) < torch.tensor([[5], [3]])
    mask[:, 0] = True  # torch's layer gives NaN where a query has no key
    expected, expected_codes = theirs(
        x, context, context, key_padding_mask=~key_mask, attn_mask=~mask, average_attn_weights=False
    )
    out, codes = ours(x, context, mask=mask, key_mask=key_mask, return_codes=True)
    assert_same(out, expected)
    assert_same(codes, expected_codes)
    out.square().sum().backward()
    expected.square().sum().backward()
    gradient = torch.cat([projection.weight.grad for projection in projections])
    assert_same(gradient, theirs.in_proj_weight.grad)
    assert_same(ours.out_proj.weight.grad, theirs.out_proj.weight.grad)


@every_mechanism
def test_gradcheck(name):
    arguments = draw(name, batch=(), queries=2, keys=3)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    weights = arguments.pop("value_weights")
    rest = {key: value for key, value in arguments.items() if not isinstance(value, torch.Tensor)}
    leaves = [tensor.requires_grad_() for tensor in [*tensors(arguments).values(), *weights]]

    def run(query, key, value, bias, *weights):
        call = {"value_weights": weights, "return_codes": True, **rest}
        return *hyper_attention(query, key, value, bias, **call), hyper_attention(
            query, key, value, bias, mask, **call
        )[0]

    assert torch.autograd.gradcheck(run, leaves)


# --- invariances ----------------------------------------------------------------------------------------------------


@every_mechanism
@given(seed=st.integers(0, 2**31), order=st.permutations(range(3)))
@settings(deadline=None, max_examples=5)
def test_permuting_heads_permutes_heads(name, seed, order):
    arguments = draw(name, seed)
    permuted = {key: tensor[..., order, :, :] for key, tensor in tensors(arguments).items()}
    permuted["value_weights"] = [weight[order] for weight in arguments["value_weights"]]
    out, codes = hyper_attention(**arguments, return_codes=True)
    out_permuted, codes_permuted = hyper_attention(**arguments | permuted, return_codes=True)
    assert_same(out_permuted, out[:, order])
    assert_same(codes_permuted, codes[:, order])


@every_mechanism
def test_permuting_the_heads_of_a_layer_changes_nothing(name):
    layer = random_layer(name, positions="t5", num_buckets=4, max_distance=4)
    permuted, order = copy.deepcopy(layer), torch.tensor([2, 0, 1])
    with torch.no_grad():
        for projection in (permuted.q_proj, permuted.k_proj, permuted.v_proj):
            for parameter in projection.parameters():
                parameter.copy_(parameter.unflatten(0, (3, -1))[order].flatten(0, 1))
        weight = permuted.out_proj.weight
        weight.copy_(weight.unflatten(1, (3, -1))[:, order].flatten(1))
        for parameter in (permuted.relative_bias.table, *permuted.value_weights):
            parameter.copy_(parameter[order])
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert not torch.equal(permuted.q_proj.weight, layer.q_proj.weight)
    assert_same(permuted(x, causal=True), layer(x, causal=True))


@every_mechanism
@given(seed=st.integers(0, 2**31), order=st.permutations(range(5)))
@settings(deadline=None, max_examples=5)
def test_permuting_keys_changes_nothing(name, seed, order):
    arguments = draw(name, seed)
    mask = some_mask(4, 5)
    permuted = {key: arguments[key][..., order, :] for key in ("key", "value")} | {
        "bias": arguments["bias"][..., order]
    }
    out = hyper_attention(**arguments, mask=mask)
    assert_same(hyper_attention(**arguments | permuted, mask=mask[:, order]), out)


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-2, 1e6))
@settings(deadline=None)
def test_rms_head_ignores_the_scale_of_the_scores(seed, scale):
    score = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    code, scaled = normalise_scores(score, None, "rms_head"), normalise_scores(scale * score, None, "rms_head")
    smallest = score.square().mean(0).min().item() * min(1.0, scale) ** 2
    # epsilon lowers a code by the factor (1 + epsilon / mean square)**-0.5
    torch.testing.assert_close(scaled, code, rtol=1e-6 / smallest + 1e-13, atol=0)


@pytest.mark.parametrize("name", ["linear_rms_head", "hyla", "hyla_plus"])
def test_rms_head_codes_have_mean_square_one(name):
    _, codes = hyper_attention(**draw(name, heads=8), scale=1e4, return_codes=True)
    # scale 1e4 makes the mean square some 1e8, so that epsilon counts for 1e-14
    torch.testing.assert_close(codes.square().mean(-3), torch.ones(2, 4, 5, dtype=torch.float64), rtol=1e-9, atol=0)


@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (6, 2)])
def test_causal_gradients_to_the_future_are_exactly_zero(name, queries, keys):
    arguments = draw(name, queries=queries, keys=keys)
    sources = [arguments[key].requires_grad_() for key in ("key", "value", "bias")]
    out = hyper_attention(**arguments, causal=True)
    assert all((gradient != 0).any() for gradient in torch.autograd.grad(out.sum(), sources, retain_graph=True))
    for q in range(queries):
        key_grad, value_grad, bias_grad = torch.autograd.grad(out[..., q, :].sum(), sources, retain_graph=True)
        seen = max(keys - queries + q + 1, 0)
        assert (key_grad[..., seen:, :] == 0).all()
        assert (value_grad[..., seen:, :] == 0).all()
        assert (bias_grad[:, q, seen:] == 0).all()
        assert (bias_grad[:, :q] == 0).all()
        assert (bias_grad[:, q + 1 :] == 0).all()


@every_mechanism
def test_layer_is_causal(name):
    layer = random_layer(name, positions="t5", num_buckets=4, max_distance=4)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x, causal=True)[:, 2].sum(), x)
    assert (gradient[:, 3:] == 0).all()
    assert (gradient[:, :3] != 0).any()


@every_mechanism
def test_returning_codes_changes_no_bit(name):
    arguments, layer = draw(name), random_layer(name, dropout=0.3).train()
    out, codes = hyper_attention(**arguments, causal=True, return_codes=True)
    assert torch.equal(hyper_attention(**arguments, causal=True), out)
    assert codes.shape == (2, 3, 4, 5)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    torch.manual_seed(1)
    out, codes = layer(x, return_codes=True)
    torch.manual_seed(1)
    assert torch.equal(layer(x), out)
    assert torch.equal(layer.eval()(x, return_codes=True)[1], codes)  # codes are those before dropout


# --- masks ----------------------------------------------------------------------------------------------------------


@every_mechanism
def test_masked_pairs_have_code_zero_and_leave_the_others_alone(name):
    arguments, mask = draw(name), some_mask(2, 3, 4, 5)
    out, codes = hyper_attention(**arguments, mask=mask, return_codes=True)
    assert (codes.masked_select(~mask) == 0).all()
    assert (codes.masked_select(mask) != 0).all()
    assert (out[..., 0, :] == 0).all()
    if arguments["score_norm"] == "none":
        free = hyper_attention(**arguments, return_codes=True)[1]
        assert torch.equal(codes.masked_select(mask), free.masked_select(mask))


@every_mechanism
@pytest.mark.parametrize(
    "shape", [(5,), (1, 5), (4, 1), (4, 5), (1, 4, 5), (3, 1, 1), (2, 1, 1, 5), (2, 1, 4, 5), (1,)]
)
def test_masks_and_biases_broadcast_like_the_scores(name, shape):
    arguments = draw(name)
    mask = torch.rand(shape) > 0.4
    whole = hyper_attention(**arguments, mask=mask.expand(2, 3, 4, 5))
    assert torch.equal(hyper_attention(**arguments, mask=mask), whole)
    arguments["bias"] = torch.randn(shape, dtype=torch.float64)
    whole = hyper_attention(**arguments | {"bias": arguments["bias"].expand(2, 3, 4, 5)})
    assert torch.equal(hyper_attention(**arguments), whole)


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_additive_masks(name, dtype):
    """-inf and the lowest number mask, exactly like False; finite numbers are added to the scores."""
    arguments, mask = draw(name), some_mask(4, 5)
    expected, expected_codes = hyper_attention(**arguments, mask=mask, return_codes=True)
    for low in (-torch.inf, torch.finfo(dtype).min, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)):
        additive = torch.zeros(4, 5, dtype=dtype).masked_fill(~mask, low)
        out, codes = hyper_attention(**arguments, mask=additive, return_codes=True)
        assert torch.equal(out, expected)
        assert torch.equal(codes, expected_codes)
    added = torch.randn(4, 5).to(dtype)
    both = hyper_attention(**arguments, mask=added.masked_fill(~mask, -torch.inf))
    summed = arguments | {"bias": arguments["bias"] + added.double()}
    assert_same(both, hyper_attention(**summed, mask=mask))


@every_mechanism
def test_gradients_reach_an_additive_mask(name):
    arguments, additive = draw(name), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    bias = arguments["bias"].requires_grad_()
    masked = additive.masked_fill(~some_mask(4, 5), -torch.inf)
    hyper_attention(**arguments, mask=masked).square().sum().backward()
    assert_same(additive.grad, bias.grad.sum(0))
    assert (additive.grad[0] == 0).all()


@every_mechanism
@pytest.mark.parametrize("additive", [False, True])
def test_a_layer_joins_its_masks(name, additive):
    """`mask`, `key_mask`, `causal` and `select` together are one mask, and the rows of one result."""
    layer = random_layer(name, positions="t5", num_buckets=4, max_distance=4)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    mask, key_mask = some_mask(1, 3, 5, 5), torch.arange(5) < torch.tensor([[5], [3]])
    bias = torch.randn(5, 5, dtype=torch.float64)
    joined = mask & key_mask[:, None, None, :] & torch.ones(5, 5).tril().bool()
    expected = layer(x, mask=joined, bias=bias)
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    assert_same(layer(x, mask=mask, key_mask=key_mask, causal=True, bias=bias), expected)
    for rows in (slice(1, 4), slice(-1, None), slice(0, 0)):
        some = layer(x, mask=mask, key_mask=key_mask, causal=True, bias=bias, select=rows)
        assert_same(some, expected[:, rows])
    no_rows = {"mask": mask[..., :1, :], "bias": bias[:1]}
    assert_same(layer(x, **no_rows, select=slice(1, 4)), layer(x, **no_rows)[:, 1:4])


# --- shapes, dtypes, layouts ----------------------------------------------------------------------------------------


@every_mechanism
@pytest.mark.parametrize("batch", [(), (1,), (2, 1, 3)])
def test_leading_sizes_of_any_rank(name, batch):
    arguments = draw(name, batch=batch)
    out, codes = hyper_attention(**arguments, causal=True, return_codes=True)
    assert out.shape == (*batch, 3, 4, 3)
    assert codes.shape == (*batch, 3, 4, 5)
    flat = {key: arguments[key].reshape(-1, *arguments[key].shape[-3:]) for key in ("query", "key", "value")}
    flat_out = hyper_attention(**arguments | flat, causal=True)
    assert_same(out, flat_out.reshape(out.shape))
    layer, x = random_layer(name), torch.randn(*batch, 5, 6, dtype=torch.float64)
    key_mask = torch.arange(5).expand(*batch, 5) < 3
    flat_out = layer(x.reshape(-1, 5, 6), key_mask=key_mask.reshape(-1, 5))
    assert_same(layer(x, key_mask=key_mask), flat_out.reshape(x.shape))


@every_mechanism
def test_leading_sizes_broadcast(name):
    """Queries shared by the batch, as learned ones are."""
    arguments = draw(name)
    shared = arguments["query"][:1]
    out = hyper_attention(**arguments | {"query": shared})
    assert_same(out, hyper_attention(**arguments | {"query": shared.expand(2, -1, -1, -1)}))


@every_mechanism
def test_layout_in_memory_does_not_matter(name):
    arguments = draw(name)
    strided = {key: tensor.mT.contiguous().mT for key, tensor in tensors(arguments).items()}
    strided["value_weights"] = [weight.mT.contiguous().mT for weight in arguments["value_weights"]]
    assert not strided["query"].is_contiguous()
    assert_same(hyper_attention(**arguments | strided), hyper_attention(**arguments))


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_input(name, dtype):
    arguments = draw(name, queries=9, keys=17, dtype=dtype)
    exact = {key: tensor.double() for key, tensor in tensors(arguments).items()}
    exact["value_weights"] = [weight.double() for weight in arguments["value_weights"]]
    results = hyper_attention(**arguments, causal=True, return_codes=True)
    for got, expected in zip(
        results, hyper_attention(**arguments | exact, causal=True, return_codes=True), strict=True
    ):
        assert got.dtype == dtype
        # one rounding to the dtype at the end, and float32 on the way
        tolerance = (torch.finfo(dtype).eps + 2e-5 * (dtype != torch.float64)) * expected.abs().max().item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance + 1e-14)


@every_mechanism
def test_autocast_leaves_the_sums_in_float32(name):
    arguments = draw(name, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hyper_attention(**arguments), hyper_attention(**arguments))
        inside = hyper_attention(**arguments)
    assert torch.equal(inside, hyper_attention(**arguments))


@on_eager
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_ones(name, kv_heads):
    arguments = draw(name, heads=4)
    arguments |= {key: arguments[key][:, :kv_heads] for key in ("key", "value")}
    index = torch.arange(4) // (4 // kv_heads)  # neighbouring query heads share a key/value head
    repeated = {key: arguments[key][:, index] for key in ("key", "value")}
    assert torch.equal(hyper_attention(**arguments), hyper_attention(**arguments | repeated))

    layer = random_layer(name, 8, 4, num_kv_heads=kv_heads)
    whole = random_layer(name, 8, 4)
    state = layer.state_dict()
    for key in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        state[key] = state[key].unflatten(0, (kv_heads, -1))[index].flatten(0, 1)
    whole.load_state_dict(state)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert_same(layer(x), whole(x))


@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(4, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_lengths(name, queries, keys, causal):
    arguments = draw(name, queries=queries, keys=keys)
    leaves = [tensor.requires_grad_() for tensor in tensors(arguments).values()]
    out, codes = hyper_attention(**arguments, causal=causal, return_codes=True)
    assert out.shape == (2, 3, queries, 3)
    assert codes.shape == (2, 3, queries, keys)
    assert (out == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(out.sum(), leaves))
    layer = random_layer(name, positions="t5")
    x, context = torch.randn(2, queries, 6, dtype=torch.float64), torch.randn(2, keys, 6, dtype=torch.float64)
    assert torch.equal(layer(x, context, causal=causal), layer.out_proj.bias.expand(2, queries, 6))


@every_mechanism
def test_copies_and_saved_weights_give_the_same_layer(name):
    layer = random_layer(name, positions="t5")
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    other = random_layer(name, positions="t5")
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_further_layers_start_with_fan_in_over_all_heads():
    """Variance 1 / (H Dv), like the output projection: both sum over heads and widths."""
    layer = MultiHeadAttention(256, 8, mechanism="hyla_plus")
    (weight,) = layer.value_weights
    assert weight.shape == (8, 32, 32)
    assert weight.std().item() * 256**0.5 == pytest.approx(1.0, abs=0.05)  # 8192 draws: 5 standard errors are 0.04
    assert layer.out_proj.weight.std().item() * 256**0.5 == pytest.approx(1.0, abs=0.02)


# --- dropout --------------------------------------------------------------------------------------------------------


def used_codes(shared, keys=40):  # on eager, which divides: native multiplies by 1 / 0.9
    """Codes as they are used and before dropout: with the identity as values the output of `linear` is its codes."""
    arguments = draw("linear", heads=4, queries=30, keys=keys)
    arguments["value"] = torch.eye(keys, dtype=torch.float64).expand(2, 4, keys, keys)
    return hyper_attention(**arguments, dropout=0.1, dropout_shared=shared, return_codes=True)


def test_shared_dropout_drops_whole_pairs():
    used, codes = used_codes(shared=True)
    kept = used != 0
    assert torch.equal(kept, kept[:1, :1].expand_as(kept))
    assert torch.equal(used, torch.where(kept, codes / 0.9, 0.0))
    assert kept[0, 0].double().mean().item() == pytest.approx(0.9, abs=0.05)  # 1200 pairs: 5 deviations are 0.043


def test_independent_dropout():
    used, codes = used_codes(shared=False)
    kept = used != 0
    assert torch.equal(used, torch.where(kept, codes / 0.9, 0.0))
    share = kept.double().mean().item()
    assert share == pytest.approx(0.9, abs=0.016)  # 9600 numbers: 5 deviations are 0.0153
    both = (kept[:, 0] & kept[:, 1]).double().mean().item()
    assert both == pytest.approx(0.81, abs=0.04)  # independent of other heads: 5 deviations of 2400 are 0.04
    assert (kept[0] & kept[1]).double().mean().item() == pytest.approx(0.81, abs=0.03)


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_preserves_the_expected_codes(shared):
    codes = torch.randn(3, 4, 5)
    mean = torch.stack([drop_codes(codes, draw_keep(codes.shape, 0.1, shared), 0.1) for _ in range(4000)]).mean(0)
    # one draw deviates by |code| sqrt(0.1 / 0.9) = |code| / 3; 5 standard errors of 4000
    assert ((mean - codes).abs() <= codes.abs() / 3 * 5 / 4000**0.5).all()


@every_mechanism
def test_every_layer_of_the_value_network_uses_the_same_dropped_codes(name):
    arguments = draw(name)
    torch.manual_seed(5)
    out, codes = hyper_attention(**arguments, dropout=0.4, dropout_shared=True, return_codes=True)
    torch.manual_seed(5)
    dropped = drop_codes(codes, draw_keep(codes.shape, 0.4, True), 0.4)
    assert (dropped == 0).any()
    expected = apply_value_network(dropped, arguments["value"], arguments["value_network"], arguments["value_weights"])
    assert_same(out, expected)


@every_mechanism
def test_a_layer_drops_in_training_only(name):
    layer = random_layer(name, dropout=0.5)
    plain = random_layer(name)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer.train()(x), layer(x)) is False


# --- transforms -----------------------------------------------------------------------------------------------------


@every_mechanism
def test_vmap_over_the_batch_equals_the_batch(name):
    arguments = draw(name, batch=(4,))
    rest = {key: value for key, value in arguments.items() if key not in ("query", "key", "value")}
    mask = some_mask(4, 3, 4, 5)

    def one(query, key, value, mask):
        return hyper_attention(query, key, value, mask=mask, causal=True, return_codes=True, **rest)

    triple = (arguments["query"], arguments["key"], arguments["value"])
    for got, expected in zip(torch.vmap(one)(*triple, mask), one(*triple, mask), strict=True):
        assert_same(got, expected)


@on_eager
def test_vmap_over_stacked_parameters_equals_a_loop(name):
    layers = [random_layer(name, positions="t5", num_buckets=4, max_distance=4, backend="auto") for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    key_mask = torch.arange(5) < torch.tensor([[5], [3]])

    def loss(state, x):
        return functional_call(layers[0], (state, buffers), (x,), {"key_mask": key_mask}).square().mean()

    gradients = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(parameters, x)
    for p, layer in enumerate(layers):
        layer(x, key_mask=key_mask).square().mean().backward()
        for key, parameter in layer.named_parameters():
            assert_same(gradients[key][p], parameter.grad)


# In a process of its own: the checker of signatures that the tests install stands between torch.compile and the code.
COMPILE = """
import warnings
import torch
from hyla.attention import MECHANISMS, MultiHeadAttention
warnings.simplefilter("error")
torch.set_num_threads(1)
for name in MECHANISMS:
    torch._dynamo.reset()
    layer = MultiHeadAttention(8, 4, mechanism=name, positions="t5", dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    options = {"key_mask": torch.arange(5) < torch.tensor([[5], [3]]), "causal": True, "return_codes": True}
    results = []
    for module in (layer, compiled):
        layer.zero_grad()
        out, codes = module(x, **options)
        (out.square().sum() + codes.square().sum()).backward()
        results.append([out.detach(), codes.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-12)
    print(name)
"""


def test_compiles_without_graph_breaks_and_equals_eager():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(MECHANISMS)


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "hylla"}, r"mechanism = 'hylla' .* choose from softmax, linear"),
        ({"score_norm": "rms"}, r"score_norm = 'rms' .* softmax, none, rms_head"),
        ({"backend": "abacus"}, r"backend = 'abacus' .* auto, eager"),
        ({"key": torch.ones(2, 3, 5, 4)}, r"key = \(2, 3, 5, 4\) .* the query's, 2"),
        ({"key": torch.ones(3, 3, 5, 2), "value": torch.ones(3, 3, 5, 3)}, r"query, key and value .*\(2,\), \(3,\)"),
        ({"key": torch.ones(2, 2, 5, 2), "value": torch.ones(2, 2, 5, 3)}, r"key = .* 3 heads .* multiple of its 2"),
        ({"key": torch.ones(2, 0, 5, 2), "value": torch.ones(2, 0, 5, 3)}, r"key = .* multiple of its 0"),
        ({"value": torch.ones(2, 3, 4, 3)}, r"value = \(2, 3, 4, 3\) .* \(3, 5\)"),
        ({"value_weights": []}, r"value_weights = '0 tensors' .* depth 3 takes 1"),
        ({"value_weights": [torch.ones(3, 3, 2)]}, r"value_weights = \(3, 3, 2\) .* \(3, 3, 3\)"),
        ({"mask": torch.ones(2, 4, 5, dtype=torch.bool)}, r"mask = \(2, 4, 5\) .* \(2, 3, 4, 5\)"),
        ({"mask": torch.ones(7, 2, 3, 4, 5, dtype=torch.bool)}, r"mask = \(7, 2, 3, 4, 5\) .* \(2, 3, 4, 5\)"),
        ({"mask": torch.ones(4, 5, dtype=torch.uint8)}, r"mask = torch.uint8 .* boolean"),
        ({"bias": torch.ones(3, 4, 6)}, r"bias = \(3, 4, 6\) .* \(2, 3, 4, 5\)"),
        ({"dropout": 1.0}, r"dropout = 1.0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes_in_a_call_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        hyper_attention(**draw("hyla_plus", dtype=torch.float32) | changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, r"embed_dim = 12 .* multiple of num_heads = 5"),
        ({"num_heads": 0}, r"embed_dim = 12 .* multiple of num_heads = 0"),
        ({"qk_dim": 0}, r"qk_dim = 0 .* multiple of num_heads = 4"),
        ({"v_dim": 10}, r"v_dim = 10 .* multiple of num_heads = 4"),
        ({"num_kv_heads": 3}, r"num_kv_heads = 3 .* divide num_heads = 4"),
        ({"num_kv_heads": 0}, r"num_kv_heads = 0 .* divide num_heads = 4"),
        ({"dropout": -0.1}, r"dropout = -0.1"),
        ({"positions": "alibi"}, r"positions = 'alibi' .* none, t5, rotary"),
        ({"mechanism": "attention"}, r"mechanism = 'attention'"),
        ({"backend": "flash"}, r"backend = 'flash'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_mistakes_in_a_layer_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        MultiHeadAttention(**{"embed_dim": 12, "num_heads": 4} | options)


@needs_compiler
def test_native_says_why_it_cannot():
    with pytest.raises(ConfigError, match=r"backend = 'native' .* depth 1 and 2, not 3"):
        hyper_attention(**draw("hyla_plus") | {"backend": "native"})
    arguments = draw("hyla (native)")
    query = arguments.pop("query")
    with pytest.raises(ConfigError, match=r"backend = 'native' .* torch.func"):
        torch.func.grad(lambda query: hyper_attention(query, **arguments).sum())(query)


@on_eager
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, at the first jvp
def test_auto_takes_any_derivative(name):
    arguments = draw(name) | {"backend": "auto"}
    query = arguments.pop("query")

    def run(query):
        return hyper_attention(query, **arguments).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(leaf), leaf)
    assert_same(torch.func.grad(run)(query), expected)
    direction = torch.randn_like(query)
    _, tangent = torch.func.jvp(run, (query,), (direction,))
    assert_same(tangent, (expected * direction).sum())


@pytest.mark.usefixtures("unchecked")
def test_mistakes_in_a_value_network_are_named():
    with pytest.raises(ConfigError, match="depth = 0"):
        ValueNetwork(0)
    with pytest.raises(ConfigError, match=r"activation = 'tanh' .* relu, silu, gelu, identity"):
        ValueNetwork(2, "tanh")
    with pytest.raises(ConfigError, match="score_norm = 'l2'"):
        Mechanism("l2", ValueNetwork(2))
