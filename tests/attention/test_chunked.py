"""The chunked backend against `eager`: outputs, every gradient, masks, dropout, transforms, and memory."""

import subprocess
import sys
import textwrap

import pytest
import torch

from hyla.attention import chunked, eager, hyper_attention
from hyla.attention.functional import causal_mask, choose_backend
from hyla.attention.mechanisms import ACTIVATIONS, MECHANISMS, Mechanism, ValueNetwork
from hyla.errors import ConfigError

NORMS = ["softmax", "none", "rms_head"]
MORE = {
    "softmax depth 4 silu": Mechanism("softmax", ValueNetwork(4, "silu")),
    "none depth 3 gelu": Mechanism("none", ValueNetwork(3, "gelu")),
    "rms_head depth 2 silu": Mechanism("rms_head", ValueNetwork(2, "silu")),
}
# Lengths around multiples of the chunk, and shorter than it.
LENGTHS = [1, 7, 8, 15, 16, 17, 63, 64, 65, 83, 129]


@torch.no_grad()
def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3)) if expected.numel() else 0.0


def guarded(*shape, dtype=torch.float32):
    """Random numbers in the front of a larger block of NaN, so that a read past the end is seen."""
    numel = torch.Size(shape).numel()
    block = torch.full((numel + 512,), float("nan"), dtype=dtype)
    block[:numel] = torch.randn(numel, dtype=dtype)
    return block[:numel].view(shape).requires_grad_()


def in_a_process(program):
    """What a program prints."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def both_backends(query, key, value, mechanism, *, causal=False, allowed=None, weights=(), bias=None, **chunks):
    """(output and gradients of eager, the same of chunked)."""
    visible = allowed
    if causal:
        causal_QK = causal_mask(query.shape[-2], key.shape[-2])
        visible = causal_QK if allowed is None else allowed & causal_QK
    inputs = [query, key, value, *weights] + ([] if bias is None else [bias])
    settings = {"scale": query.shape[-1] ** -0.5, "bias": bias, "value_weights": weights}
    expected, _ = eager.attention(query, key, value, mechanism, allowed=visible, **settings)
    got = chunked.attention(query, key, value, mechanism, allowed=allowed, causal=causal, **settings, **chunks)
    grad = torch.randn_like(expected)
    return (
        [expected, *torch.autograd.grad(expected, inputs, grad)],
        [got, *torch.autograd.grad(got, inputs, grad)],
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", [*MECHANISMS.values(), *MORE.values()], ids=[*MECHANISMS, *MORE])
def test_odd_lengths_equal_eager_in_outputs_and_gradients(mechanism, causal):
    """ATT-06: lengths around the chunk, padding, NaN in the memory after every input. 1e-5 relative to the largest
    magnitude, because codes of `none` are sums without normalisation."""
    for length in [0, *LENGTHS]:
        query, key, value = (guarded(2, 3, length, 8) for _ in range(3))
        weights = [guarded(3, 8, 8) for _ in range(mechanism.value_network.num_further_weights)]
        padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
        padding[1, ..., (length + 1) // 2 :] = False
        expected, got = both_backends(
            query, key, value, mechanism, causal=causal, allowed=padding, weights=weights, query_chunk=64, key_chunk=64
        )
        for name, one, other in zip(["out", "q", "k", "v", "w", "w"], got, expected, strict=False):
            assert one.shape == other.shape
            assert torch.isfinite(one).all(), (length, name)
            assert relative_error(one, other) < 1e-5, (length, name)


@pytest.mark.parametrize("score_norm", NORMS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_longer_length_equals_eager(score_norm, depth):
    """ATT-06's longest length, with fewer heads where eager would need gigabytes."""
    mechanism = Mechanism(score_norm, ValueNetwork(depth))
    heads = 3 if depth == 1 else 2
    query, key, value = (guarded(1, heads, 1334 if depth < 3 else 600, 4) for _ in range(3))
    weights = [guarded(heads, 4, 4) for _ in range(mechanism.value_network.num_further_weights)]
    expected, got = both_backends(query, key, value, mechanism, causal=True, weights=weights, query_chunk=64)
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < 2e-5


@pytest.mark.parametrize("mechanism", [*MECHANISMS.values(), *MORE.values()], ids=[*MECHANISMS, *MORE])
def test_float64_equals_eager_whatever_the_chunks(mechanism):
    """Batch, bias, mask, causal with fewer queries than keys; 1e-10 in float64, so that a fault cannot pass as noise."""
    query = torch.randn(3, 4, 13, 5, dtype=torch.float64, requires_grad=True)
    key = torch.randn(3, 4, 17, 5, dtype=torch.float64, requires_grad=True)
    value = torch.randn(3, 4, 17, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 13, 17, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
        for _ in range(mechanism.value_network.num_further_weights)
    ]
    allowed = torch.rand(3, 1, 13, 17) > 0.2
    for query_chunk, key_chunk in [(0, 0), (1, 1), (4, 5), (13, 16), (26, 17), (32, 64)]:
        expected, got = both_backends(
            query,
            key,
            value,
            mechanism,
            causal=True,
            allowed=allowed,
            weights=weights,
            bias=bias,
            query_chunk=query_chunk,
            key_chunk=key_chunk,
        )
        for one, other in zip(got, expected, strict=True):
            assert relative_error(one, other) < 1e-10, (query_chunk, key_chunk)


@pytest.mark.parametrize(
    "shape", [(1, 1), (4, 1, 1), (9,), (1, 4, 7, 1), (2, 1, 1, 9), (1, 2, 4, 7, 9), (3, 1, 1, 1, 1)]
)
def test_broadcast_bias_and_mask_and_their_gradients(shape):
    """Anything that broadcasts to `[..., H, Q, K]`, as bias and as additive mask, over two batch axes."""
    query = torch.randn(3, 2, 4, 7, 5, dtype=torch.float64)
    key, value = torch.randn(2, 3, 2, 4, 9, 5, dtype=torch.float64)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(shape, dtype=torch.float64)
    mask = mask.masked_fill(mask > 1, float("-inf")).requires_grad_()
    grads = []
    for backend in ("eager", "chunked"):
        out = hyper_attention(query, key, value, bias, mask, causal=True, backend=backend)
        grads.append([out, *torch.autograd.grad(out.square().sum(), [bias, mask])])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("score_norm", NORMS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_queries_without_any_key(score_norm, depth):
    """ATT-01: exactly 0, finite gradients, other rows as without that row."""
    mechanism = Mechanism(score_norm, ValueNetwork(depth))
    query, key, value = (torch.randn(2, 2, size, 8, requires_grad=True) for size in (6, 10, 10))
    weights = [torch.randn(2, 8, 8, requires_grad=True) for _ in range(mechanism.value_network.num_further_weights)]
    allowed = causal_mask(6, 10).expand(2, 1, 6, 10).clone()
    allowed[0, :, 5] = False
    allowed[1] = False  # a whole sequence padded out
    expected, got = both_backends(
        query, key, value, mechanism, allowed=allowed, weights=weights, query_chunk=4, key_chunk=4
    )
    assert got[0][0, :, 5].eq(0).all()
    assert got[0][1].eq(0).all()
    for one, other in zip(got, expected, strict=True):
        assert torch.isfinite(one).all()
        assert relative_error(one, other) < 1e-5


def test_causal_with_more_queries_than_keys():
    """Leading queries have no key and give 0; the gradient to a key that no query may see is exactly 0."""
    query, key, value = (torch.randn(1, 2, size, 3, requires_grad=True) for size in (70, 3, 3))
    expected, got = both_backends(query, key, value, MECHANISMS["hyla"], causal=True, query_chunk=16)
    assert got[0][:, :, :67].eq(0).all()
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mechanism", ["softmax", "hyla", "hyla_plus", "linear"])
def test_half_precision_is_lifted(mechanism, dtype):
    """Both backends compute in float32 and round once, so they differ by a last digit at most."""
    query, key, value = (torch.randn(2, 4, 33, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = [torch.randn(4, 8, 8, dtype=dtype)] if mechanism == "hyla_plus" else []
    results = []
    for backend in ("eager", "chunked"):
        out = hyper_attention(
            query, key, value, causal=True, mechanism=mechanism, value_weights=weights, backend=backend
        )
        results.append([out, *torch.autograd.grad(out.float().square().mean(), [query, key, value])])
    for one, other in zip(*results, strict=True):
        assert one.dtype == dtype
        assert relative_error(one.double(), other.double()) < 2 * torch.finfo(dtype).eps


def test_long_half_precision_sums_are_exact():
    """ATT-05 (e): 70,000 ones summed over keys; a float16 sum would be infinite."""
    ones = torch.ones(1, 1, 70_000, 1, dtype=torch.float16)
    out = hyper_attention(ones[:, :, :1], ones, ones, mechanism="linear", scale=0.5, backend="chunked")
    assert out.item() == 35_008  # 35,000 in float16


def test_autocast_does_not_reach_inside():
    query, key, value = torch.randn(3, 1, 2, 9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hyper_attention(query, key, value, backend="chunked")
    torch.testing.assert_close(inside, hyper_attention(query, key, value, backend="eager"))


def test_grouped_heads():
    query = torch.randn(2, 6, 21, 4, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 21, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = []
    for backend in ("eager", "chunked"):
        out = hyper_attention(query, key, value, causal=True, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), [query, key, value])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize("score_norm", NORMS)
def test_gradcheck(score_norm, activation):
    mechanism = Mechanism(score_norm, ValueNetwork(3, activation))

    def function(query, key, value, bias, weight):
        settings = {"scale": 0.7, "bias": bias, "value_weights": [weight], "causal": True}
        return chunked.attention(query, key, value, mechanism, **settings, query_chunk=2, key_chunk=2)

    shapes = [(1, 2, 3, 2), (1, 2, 5, 2), (1, 2, 5, 2), (2, 3, 5), (2, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs)


def test_second_derivatives_are_refused():
    query = torch.randn(1, 2, 3, 2, requires_grad=True)
    out = hyper_attention(query, query, query, backend="chunked")
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(ConfigError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "hyla", "hyla_plus"])
def test_dropout_drops_the_same_codes_in_the_backward_pass(mechanism, shared):
    """Finite differences under one seed, in float64, over several chunks."""
    inputs = [torch.randn(2, 2, size, 2, dtype=torch.float64, requires_grad=True) for size in (3, 4, 4)]
    weights = [torch.randn(2, 2, 2, dtype=torch.float64)] if mechanism == "hyla_plus" else []

    def function(query, key, value):
        torch.manual_seed(3)
        settings = {"scale": 0.7, "value_weights": weights, "dropout": 0.4, "dropout_shared": shared}
        return chunked.attention(query, key, value, MECHANISMS[mechanism], **settings, query_chunk=2, key_chunk=3)

    assert torch.autograd.gradcheck(function, inputs)


def test_dropout_rate_and_sharing():
    """The share of dropped codes, read off with an identity as values; the rest divided by 1 - dropout."""
    keys = 64
    query, value = torch.zeros(3, 2, 200, 1), torch.eye(keys).expand(3, 2, keys, keys)
    bias = torch.ones(1)  # with mechanism `linear` every code is 1
    settings = {"mechanism": "linear", "dropout": 0.3, "backend": "chunked"}
    codes = hyper_attention(query, torch.zeros(3, 2, keys, 1), value, bias, **settings)
    assert codes.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert codes.eq(0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(codes[0, 0], codes[0, 1])
    assert not torch.equal(codes[0, 0], codes[1, 0])
    assert not torch.equal(codes, hyper_attention(query, torch.zeros(3, 2, keys, 1), value, bias, **settings))
    shared = hyper_attention(query, torch.zeros(3, 2, keys, 1), value, bias, **settings, dropout_shared=True)
    assert torch.equal(shared, shared[:1, :1].expand_as(shared))
    assert shared.eq(0).float().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("mechanism", ["softmax", "hyla", "hyla_plus"])
def test_vmap_of_gradients_equals_a_loop(mechanism):
    """Members with inputs and weights of their own, one input shared, as an ensemble has them."""
    query, value = torch.randn(2, 3, 2, 2, 7, 4, dtype=torch.float64)
    key = torch.randn(2, 2, 7, 4, dtype=torch.float64)
    weights = torch.randn(3, 2, 4, 4, dtype=torch.float64)

    def loss(query, key, value, weight):
        further = [weight] if mechanism == "hyla_plus" else []
        settings = {"mechanism": mechanism, "value_weights": further, "causal": True, "backend": "chunked"}
        return hyper_attention(query, key, value, **settings).square().sum() + weight.sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    together = torch.func.vmap(gradients, in_dims=(0, None, 0, 0))(query, key, value, weights)
    alone = [gradients(query[p], key, value[p], weights[p]) for p in range(3)]
    for one, others in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("randomness", "equal"), [("same", True), ("different", False)])
def test_vmap_draws_dropout_as_asked(randomness, equal):
    def function(query):
        return hyper_attention(query, query, query, dropout=0.5, backend="chunked")

    out = torch.func.vmap(function, randomness=randomness)(torch.ones(2, 1, 2, 9, 2))
    assert torch.equal(out[0], out[1]) is equal


def test_compiles_whole():
    """One graph forward and backward; in a process of its own, where the checks of signatures are not traced too, and
    without a code generator, so that no compiler is needed."""
    in_a_process("""
        import torch
        from hyla.attention import hyper_attention
        def function(query, key, value, bias):
            return hyper_attention(query, key, value, bias, causal=True, backend="chunked").square().sum()
        inputs = [torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3)]
        inputs.append(torch.randn(2, 9, 9, requires_grad=True))
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        expected = torch.autograd.grad(function(*inputs), inputs)
        for one, other in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(one, other)
    """)


def test_auto_takes_chunked_where_eager_would_be_large():
    wide = {"depth": 1, "head_width": 16}  # where native does not pay
    assert choose_backend("auto", **wide, eager_bytes=2**20) == "eager"
    assert choose_backend("auto", **wide, eager_bytes=2**30) == "chunked"
    assert choose_backend("eager", **wide, eager_bytes=2**40) == "eager"
    small, large = (torch.zeros(1, 1, length, 16, requires_grad=True) for length in (8, 4096))
    assert "Attention" not in str(hyper_attention(small, small, small, mechanism="linear").grad_fn)
    (made_by, _), *_ = hyper_attention(large, large, large, mechanism="linear").grad_fn.next_functions
    assert "ttention" in f"{made_by} {made_by.next_functions}"


def test_codes_are_not_to_be_had_from_chunked():
    query = torch.randn(1, 2, 3, 2)
    with pytest.raises(ConfigError, match="return_codes"):
        hyper_attention(query, query, query, backend="chunked", return_codes=True)
    hyper_attention(query, query, query, return_codes=True)


def peak_growth_mib(length: int) -> float:
    """How much the peak of a fresh process grows by one forward and backward pass of HYLA: B=1, H=8, D=64, causal.

    VmHWM rather than `ru_maxrss`, which a process started by a large one inherits from it."""
    printed = in_a_process(f"""
        import pathlib, torch
        from hyla.attention import hyper_attention
        torch.set_num_threads(1)
        def peak():
            return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        def run(length):
            query, key, value = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
            out = hyper_attention(query, key, value, causal=True, backend="chunked")
            out.backward(torch.ones_like(out))
        run(64)
        before = peak()
        run({length})
        print(peak() - before)
    """)
    assert float(printed) > 8 * length * 64 * 4 * 7 / 2**20  # it sees at least the tensors themselves
    return float(printed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc, which only Linux has")
def test_memory_of_a_middling_length():
    """A quarter of the length below within a quarter of its memory; eager would need about 5 GiB."""
    assert peak_growth_mib(2048) < 512


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc, which only Linux has")
def test_memory_of_length_8192():
    """Within 2 GiB, where eager would need about 80; takes half a minute on one core."""
    assert peak_growth_mib(8192) < 2048
