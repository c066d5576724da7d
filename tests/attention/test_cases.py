"""Numerical traps that other libraries fell into: rows without a key, causal alignment, half precision."""

import pytest
import torch
from tests.attention.test_properties import (
    SETTINGS,
    assert_same,
    draw,
    every_mechanism,
    needs_compiler,
    on_eager,
    parts,
    random_layer,
    tensors,
)

from hyla.attention import hyper_attention


def run(arguments, **options):
    """Output, codes, and the gradients of a sum of their squares to every tensor, the additive bias included."""
    leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in tensors(arguments).items()}
    out, codes = hyper_attention(**arguments | leaves, return_codes=True, **options)
    (out.square().sum() + codes.square().sum()).backward()
    return out.detach(), codes.detach(), {key: leaf.grad for key, leaf in leaves.items()}


# --- ATT-01: a query whose keys are all masked ----------------------------------------------------------------------


def att_01_mask(kind):
    """Row 5 has no key; rows 0 to 4 see the keys of the causal triangle, of the padding mask, or of both."""
    rows = torch.arange(6)[:, None] < 5
    padding, triangle = torch.arange(10) % 3 != 1, torch.ones(6, 10, dtype=torch.bool).tril()
    return {"padding": padding & rows, "causal": triangle & rows, "causal+padding": triangle & padding & rows}[kind]


@every_mechanism
@pytest.mark.parametrize("kind", ["padding", "causal", "causal+padding"])
@pytest.mark.parametrize("additive", [False, True])
def test_att_01_row_without_a_key(name, kind, additive):
    arguments = draw(name, batch=(1,), heads=2, queries=6, keys=10, qk_depth=8, depth=8)
    mask = att_01_mask(kind)
    given = torch.zeros(6, 10, dtype=torch.float64).masked_fill(~mask, -torch.inf) if additive else mask
    out, codes, gradients = run(arguments, mask=given)
    assert (out[:, :, 5] == 0).all()
    assert (codes[:, :, 5] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (gradients["query"][:, :, 5] == 0).all()
    assert (gradients["bias"][:, 5] == 0).all()

    without = arguments | {"query": arguments["query"][:, :, :5], "bias": arguments["bias"][:, :5]}
    out_without, codes_without, gradients_without = run(without, mask=mask[:5])
    assert_same(out[:, :, :5], out_without)
    assert_same(codes[:, :, :5], codes_without)
    assert_same(gradients["query"][:, :, :5], gradients_without["query"])
    for key in ("key", "value"):
        assert_same(gradients[key], gradients_without[key])


@every_mechanism
@pytest.mark.parametrize("causal", [False, True])
def test_att_01_sequence_that_is_all_padding(name, causal):
    arguments = draw(name, heads=2, queries=6, keys=10, qk_depth=8, depth=8)
    real = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 10)
    out, codes, gradients = run(arguments, mask=real, causal=causal)
    assert (out[1] == 0).all()
    assert (codes[1] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    alone = arguments | {key: arguments[key][:1] for key in ("query", "key", "value")}
    out_alone, codes_alone, gradients_alone = run(alone, causal=causal)
    assert_same(out[:1], out_alone)
    assert_same(codes[:1], codes_alone)
    for key in ("query", "key", "value"):
        assert (gradients[key][1] == 0).all()
        assert_same(gradients[key][:1], gradients_alone[key])


@on_eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_att_01_in_every_dtype(name, dtype):
    arguments = draw(name, batch=(1,), heads=2, queries=6, keys=10, qk_depth=8, depth=8, dtype=dtype)
    out, codes, gradients = run(arguments, mask=att_01_mask("causal"), scale=0.1)  # small: nothing beyond float16
    assert (out[:, :, 5] == 0).all()
    assert (codes[:, :, 5] == 0).all()
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@every_mechanism
def test_att_01_layer_answers_its_output_bias(name):
    layer = random_layer(name)
    x = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    key_mask = torch.tensor([True, False])[:, None].expand(2, 6)
    out = layer(x, key_mask=key_mask)
    assert torch.equal(out[1], layer.out_proj.bias.expand(6, 6))
    assert_same(out[0], layer(x[0]))
    out.square().sum().backward()
    assert (x.grad[1] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


# --- ATT-03: causal masks of sequences of unequal length ------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", pytest.param("softmax (native)", marks=needs_compiler)])
def test_att_03_last_query_sees_every_key(name):
    query, key = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2)
    value = torch.arange(8.0).view(1, 1, 4, 2)
    out = hyper_attention(query, key, value, causal=True, mechanism="softmax", backend=parts(name)[1])
    assert out.flatten().tolist() == [3.0, 4.0]


@every_mechanism
def test_att_03_fewer_queries_are_the_last_rows(name):
    """The last 3 of 7 queries alone: outputs, codes and gradients of the 7 x 7 result's last rows."""
    arguments = draw(name, queries=7, keys=7)
    last = arguments | {"query": arguments["query"][..., 4:, :], "bias": arguments["bias"][:, 4:]}
    leaves = [arguments[key].requires_grad_() for key in ("key", "value")]
    out, codes = hyper_attention(**arguments, causal=True, return_codes=True)
    some, some_codes = hyper_attention(**last, causal=True, return_codes=True)
    assert_same(some, out[..., 4:, :])
    assert_same(some_codes, codes[..., 4:, :])
    expected = torch.autograd.grad(out[..., 4:, :].square().sum(), leaves)
    for got, wanted in zip(torch.autograd.grad(some.square().sum(), leaves), expected, strict=True):
        assert_same(got, wanted)


@every_mechanism
def test_att_03_more_queries_than_keys(name):
    """5 queries, 2 keys: the first 3 have no key and give 0, the last 2 are the 2 x 2 result."""
    arguments = draw(name, queries=5, keys=2)
    out, codes, gradients = run(arguments, causal=True)
    assert (out[..., :3, :] == 0).all()
    assert (codes[..., :3, :] == 0).all()
    assert (gradients["query"][..., :3, :] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    square = arguments | {"query": arguments["query"][..., 3:, :], "bias": arguments["bias"][:, 3:]}
    assert_same(out[..., 3:, :], run(square, causal=True)[0])


# --- ATT-05: half precision, which eager alone takes ----------------------------------------------------------------

every_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def rms_head_codes(score_H, dtype):
    """Codes of one pair with these scores, and the gradient of their sum to the queries."""
    query = torch.as_tensor(score_H).to(dtype)[:, None, None].requires_grad_()
    ones = torch.ones(len(query), 1, 1, dtype=dtype)
    options = {"mechanism": "linear_rms_head", "scale": 1.0, "return_codes": True}
    out, codes = hyper_attention(query, ones, ones, **options)
    assert out.dtype == codes.dtype == dtype
    codes.sum().backward()
    return codes.detach().flatten(), query.grad


@every_half
def test_att_05_rms_of_large_scores(dtype):
    codes, gradient = rms_head_codes([1000.0] * 8, dtype)
    assert codes.tolist() == [1.0] * 8
    assert gradient.isfinite().all()


@every_half
def test_att_05_rms_of_zero_scores(dtype):
    codes, gradient = rms_head_codes([0.0] * 8, dtype)
    assert codes.tolist() == [0.0] * 8
    assert gradient.flatten().tolist() == pytest.approx([1000.0] * 8, rel=0.01)  # 1 / sqrt(epsilon)


@every_half
def test_att_05_rms_of_small_scores(dtype):
    scores = torch.randn(8) * 0.058
    codes, _ = rms_head_codes(scores, dtype)
    in_float32, _ = rms_head_codes(scores.to(dtype).float(), torch.float32)
    torch.testing.assert_close(codes.float(), in_float32, rtol=0.01, atol=0)


@every_half
def test_att_05_rms_of_one_head_is_the_sign(dtype):
    for score, sign in ((3.0, 1.0), (-0.5, -1.0)):
        codes, _ = rms_head_codes([score], dtype)
        assert codes.item() == pytest.approx(sign, abs=1e-5)


@every_half
@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if SETTINGS[name].value_network.activation in ("relu", "identity")]
)
def test_att_05_long_sums(name, dtype):
    """One query, 70000 keys with code 1 (softmax: 1/70000), whose values 1 or 0.25 are summed in float32 and rounded once.

    70000 is beyond float16, whose largest number 65504 is returned, not inf; 17500 fits, as does its gradient to the
    query (twice that in depth 2), and must be right.
    """
    arguments = draw(name, batch=(), heads=1, queries=1, keys=70_000, qk_depth=1, depth=1, dtype=dtype)
    arguments |= {key: torch.ones_like(arguments[key]) for key in ("query", "key")} | {"bias": None}
    arguments["value_weights"] = [torch.ones_like(weight) for weight in arguments["value_weights"]]
    for number in (1.0, 0.25):
        arguments["value"] = torch.full_like(arguments["value"], number)
        leaves = {key: arguments[key].clone().requires_grad_() for key in ("query", "key", "value")}
        out = hyper_attention(**arguments | leaves, scale=1.0)
        out.sum().backward()
        softmax, depth = SETTINGS[name].score_norm == "softmax", SETTINGS[name].value_network.depth
        exact = 70_000.0 * number * (1 / 70_000) ** depth if softmax else 70_000.0 * number
        expected = torch.tensor(exact).clamp(max=torch.finfo(dtype).max).to(dtype)
        # rounding to the dtype; float16 has steps of 6e-8 near softmax's tiny codes
        torch.testing.assert_close(out.flatten(), expected[None], rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert out.isfinite().all()
        assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
