"""Cases of the Triton kernel, run by test_triton.py in a process with TRITON_INTERPRET=1: tensors on the CPU, no GPU."""

import pytest
import torch

from hyla.attention import eager, hyper_attention, triton_kernel
from hyla.attention.functional import causal_mask
from hyla.attention.mechanisms import Mechanism, ValueNetwork
from hyla.errors import ConfigError

MECHANISMS = {
    f"{norm} depth {depth} {activation}": Mechanism(norm, ValueNetwork(depth, activation))
    for norm in ("rms_head", "none")
    for depth, activation in ((1, "relu"), (2, "relu"), (2, "identity"))
}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that is not initialised holds NaN, so that an element a kernel forgets is seen."""

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return poisoned

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def guarded(*shape, dtype=torch.float32):
    """Random numbers between two stretches of NaN, so that a read outside is seen."""
    numel = torch.Size(shape).numel()
    block = torch.full((numel + 512,), float("nan"), dtype=dtype)
    block[256 : 256 + numel] = torch.randn(numel, dtype=dtype)
    return block[256 : 256 + numel].view(shape).requires_grad_()


def check_close(got, expected, tolerance=1e-5):
    """Errors relative to the largest magnitude."""
    for name, one, other in zip(["out", "q", "k", "v", "bias"], got, expected, strict=False):
        assert torch.isfinite(one).all(), name
        if one.numel():
            error = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-3)
            assert float(error.detach()) < tolerance, name


def compare(query, key, value, mechanism, *, bias=None, allowed=None, causal=False, tolerance=1e-5):
    """Output and gradients against eager in float64; returns the output."""
    visible = allowed
    if causal:
        causal_QK = causal_mask(query.shape[-2], key.shape[-2])
        visible = causal_QK if allowed is None else allowed & causal_QK
    inputs = [query, key, value] + ([] if bias is None else [bias])
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    settings = {"scale": 0.4, "bias": exact[3] if bias is not None else None, "allowed": visible}
    expected, _ = eager.attention(*exact[:3], mechanism, **settings)
    settings = {"scale": 0.4, "bias": bias, "allowed": allowed, "causal": causal}
    got = triton_kernel.attention(query, key, value, mechanism, **settings)
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, inputs, grad)
    assert [tensor.dtype for tensor in gradients] == [tensor.dtype for tensor in inputs]
    check_close([got, *gradients], [expected, *torch.autograd.grad(expected, exact, grad.double())], tolerance)
    return got


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 17])
def test_lengths_around_the_tile(mechanism, causal, length):
    """Three heads of width 8, so that heads, widths and lengths are all padded; padding of the second sequence."""
    query, key, value = (guarded(2, 3, length, 8) for _ in range(3))
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[1, ..., (length + 1) // 2 :] = False
    compare(query, key, value, mechanism, causal=causal, allowed=padding)


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
@pytest.mark.parametrize(("queries", "keys"), [(5, 37), (37, 5)])
def test_queries_and_keys_of_different_number(mechanism, queries, keys):
    """Causal aligns bottom-right; leading queries without any key give exactly 0."""
    query, key, value = guarded(1, 5, queries, 4), guarded(1, 5, keys, 4), guarded(1, 5, keys, 6)
    out = compare(query, key, value, mechanism, causal=True)
    assert out[:, :, : max(0, queries - keys)].eq(0).all()


@pytest.mark.parametrize("heads", [1, 12, 17])
def test_heads_and_wide_values(heads):
    """Not powers of two, and more than the 16 that padding starts at; values wider than one block."""
    query, key, value = guarded(1, heads, 18, 20), guarded(1, heads, 18, 20), guarded(1, heads, 18, 40)
    # With one head a code is the sign of its score, and the gradient of a query the small difference of large numbers.
    tolerance = 1e-4 if heads == 1 else 1e-5
    compare(query, key, value, MECHANISMS["rms_head depth 2 relu"], causal=True, tolerance=tolerance)


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 1, 1), (7,), (3, 17, 7), (2, 1, 1, 7), (2, 2, 3, 17, 7), (2, 1, 1, 1, 1)]
)
def test_broadcast_bias_and_its_gradient(shape):
    query, key, value = guarded(2, 2, 3, 17, 5), guarded(2, 2, 3, 7, 5), guarded(2, 2, 3, 7, 5)
    compare(query, key, value, MECHANISMS["rms_head depth 2 relu"], bias=guarded(*shape), causal=True)


@pytest.mark.parametrize("mechanism", MECHANISMS.values(), ids=MECHANISMS)
def test_queries_without_any_key(mechanism):
    query, key, value = (guarded(2, 2, size, 8) for size in (6, 10, 10))
    allowed = torch.rand(2, 1, 6, 10) > 0.3
    allowed[0, :, 5] = False
    allowed[1] = False
    out = compare(query, key, value, mechanism, allowed=allowed)
    assert out[0, :, 5].eq(0).all()
    assert out[1].eq(0).all()


@pytest.mark.parametrize("mechanism", ["rms_head depth 2 relu", "none depth 1 relu"])
def test_bfloat16(mechanism):
    """Codes, hidden layers and gradients of scores are rounded to bfloat16 for the matrix units, each by up to 0.004 of
    itself; the gradient of a query is a difference of such numbers."""
    query, key, value = (guarded(2, 4, 20, 8, dtype=torch.bfloat16) for _ in range(3))
    compare(query, key, value, MECHANISMS[mechanism], causal=True, tolerance=0.1)


def test_through_the_front_door():
    """Grouped heads, an additive mask with -inf, a bias."""
    query, key, value = guarded(2, 6, 9, 4), guarded(2, 2, 9, 4), guarded(2, 2, 9, 4)
    bias = guarded(6, 9, 9)
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 5:] = float("-inf")
    results = []
    for backend in ("eager", "triton"):
        out = hyper_attention(query, key, value, bias, mask, causal=True, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), [query, key, value, bias])])
    check_close(results[1], results[0])


def test_nothing_to_do():
    for shape in [(0, 2, 3, 4), (1, 2, 0, 4)]:
        compare(*(torch.randn(shape, requires_grad=True) for _ in range(3)), MECHANISMS["rms_head depth 2 relu"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mechanism": "softmax"}, "scaled_dot_product_attention"),
        ({"mechanism": "hyla_plus", "value_weights": [torch.zeros(2, 4, 4)]}, "depth 1 and 2, not 3"),
        ({"value_network": ValueNetwork(2, "silu")}, "no 'silu'"),
        ({"dropout": 0.1}, "no dropout"),
        ({"return_codes": True}, "return_codes"),
    ],
)
def test_what_it_does_not_do_is_said(settings, reason):
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=reason):
        hyper_attention(query, query, query, backend="triton", **settings)
    with pytest.raises(ConfigError, match="float64"):
        hyper_attention(query.double(), query.double(), query.double(), backend="triton")
