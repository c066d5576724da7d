"""The native backend against eager: outputs, every gradient, and what it does where it cannot run.

Tolerance, relative to the largest magnitude: 1e-10 in float64, where both sides round at 1e-16; 1e-5 in float32, where
scores near 0 in every head make `rms_head` magnify rounding.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from golden_values import Case, names, out_projection, projection, relative_error
from hyla.attention import MultiHeadAttention, ValueNetwork, choose_backend, hyper_attention, native
from hyla.attention.compiled import constant_result
from hyla.errors import ConfigError
from hyla.models.transformer import Transformer, TransformerConfig

REASON = native.problem()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the C code cannot be built here: {REASON}")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MECHANISMS = ["softmax", "linear", "linear_rms_head", "hyla", "hyla_no_rms_head", "hyla_softmax"]


def inputs(batch, heads, queries, keys, depth=2, v_depth=3, dtype=torch.float64):
    """query, key, value as the projections make them: views of `[B, T, H * D]`."""
    sizes = ((queries, depth), (keys, depth), (keys, v_depth))
    return [
        torch.randn(batch, tokens, heads * width, dtype=dtype).unflatten(-1, (heads, -1)).transpose(1, 2)
        for tokens, width in sizes
    ]


def both(tensors, bias=None, **settings):
    """[output and gradients] of eager and of native, with the same random numbers."""
    results = []
    given = [*tensors] if bias is None else [*tensors, bias]
    for backend in ("eager", "native"):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        torch.manual_seed(1)
        out = hyper_attention(*leaves, backend=backend, **settings)
        cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
        results.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    return results


def assert_same(tensors, bias=None, **settings):
    expected, found = both(tensors, bias, **settings)
    for name, a, b in zip(("out", "query", "key", "value", "bias"), expected, found, strict=False):
        assert a.shape == b.shape
        if a.numel():
            error = (a - b).abs().max() / a.abs().max().clamp_min(1e-30)
            assert error <= TOLERANCE[a.dtype], (name, error.item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_equals_eager_at_odd_sizes(mechanism, dtype):
    for queries, keys in [(1, 1), (2, 7), (7, 2), (16, 16), (17, 16), (5, 17), (1, 63), (63, 111), (4, 36), (33, 32)]:
        bias = torch.randn(4, queries, keys, dtype=dtype)
        assert_same(inputs(2, 4, queries, keys, dtype=dtype), bias, mechanism=mechanism)
        assert_same(inputs(2, 4, queries, keys, dtype=dtype), mechanism=mechanism, scale=0.3)


@pytest.mark.parametrize(("heads", "width", "queries", "keys"), [(8, 2, 32, 32), (16, 4, 36, 36), (16, 4, 4, 36)])
@pytest.mark.parametrize("mechanism", ["softmax", "hyla"])
def test_equals_eager_at_the_sizes_of_the_paper(mechanism, heads, width, queries, keys):
    bias = torch.randn(heads, queries, keys)
    assert_same(inputs(5, heads, queries, keys, width, width, torch.float32), bias, mechanism=mechanism)


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (5, 1), (7, 2), (4, 3), (3, 8), (2, 12), (1, 16), (2, 20)])
@pytest.mark.parametrize(("qk_depth", "v_depth"), [(1, 4), (3, 2), (8, 32)])
def test_any_number_of_heads_side_by_side(batch, heads, qk_depth, v_depth, mechanism):
    for dtype in (torch.float64, torch.float32):
        tensors = inputs(batch, heads, 5, 6, qk_depth, v_depth, dtype)
        for entries, few in ((batch, heads), (1, heads), (batch, 1)):
            mask = torch.rand(entries, few, 5, 6) > 0.3
            bias = torch.randn(entries, few, 5, 6, dtype=dtype)
            assert_same(tensors, bias, mask=mask, mechanism=mechanism)


@pytest.mark.parametrize("activation", ["identity", "silu", "gelu"])
def test_other_activations(activation):
    assert_same(inputs(2, 4, 5, 17), mechanism="hyla", value_network=ValueNetwork(2, activation))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_masks(mechanism):
    tensors, bias = inputs(3, 4, 9, 11), torch.randn(4, 9, 11, dtype=torch.float64)
    padding = (torch.arange(11) < torch.tensor([[11], [6], [0]]))[:, None, None, :]  # one sequence has no key at all
    pairs = torch.rand(3, 4, 9, 11) > 0.5
    pairs[0, :, 3] = False
    additive = torch.randn(9, 11, dtype=torch.float64).masked_fill(torch.rand(9, 11) > 0.6, float("-inf"))
    for mask in (padding, pairs, pairs[:1], pairs[:, :1], pairs[0, 0], pairs[0, :, :1], additive):
        for causal in (False, True):
            assert_same(tensors, bias, mask=mask, causal=causal, mechanism=mechanism)
    assert_same(inputs(2, 4, 11, 5), causal=True, mechanism=mechanism)  # the leading queries see nothing
    out = hyper_attention(*tensors, bias, mask=padding, mechanism=mechanism, backend="native")
    assert (out[2] == 0).all()
    out = hyper_attention(*tensors, bias, mask=pairs, mechanism=mechanism, backend="native")
    assert (out[0, :, 3] == 0).all()


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (11,), (9, 1), (9, 11), (4, 1, 1), (4, 1, 11), (1, 9, 11), (3, 1, 1, 1), (3, 4, 9, 11), (1, 4, 9, 11)],
)
@pytest.mark.parametrize("mechanism", ["linear", "hyla"])
def test_bias_broadcasts_and_its_gradient_is_summed(shape, mechanism):
    assert_same(inputs(3, 4, 9, 11), torch.randn(shape, dtype=torch.float64), mechanism=mechanism)


@pytest.mark.parametrize("mechanism", ["linear", "hyla"])
def test_threads(mechanism):
    torch.set_num_threads(3)
    try:
        for batch, heads in ((7, 4), (5, 16), (2, 3)):
            for entries in (1, batch):
                bias = torch.randn(entries, heads, 9, 11, dtype=torch.float64)
                assert_same(inputs(batch, heads, 9, 11), bias, mechanism=mechanism)
    finally:
        torch.set_num_threads(1)


def test_leading_sizes():
    for leading in [(), (2, 3), (1, 1, 2)]:
        tensors = [tensor[0].expand(*leading, *tensor.shape[1:]) for tensor in inputs(1, 4, 5, 7)]
        for shape in [(*leading, 4, 5, 7), (4, 5, 7)]:
            assert_same(tensors, torch.randn(shape, dtype=torch.float64), mechanism="hyla")
    query, key, value = inputs(3, 4, 5, 7)
    assert_same((query, key[:1], value[0]), mechanism="hyla")  # they broadcast
    for batch, queries, keys in [(0, 3, 3), (2, 0, 3), (2, 3, 0)]:
        for mechanism in MECHANISMS:
            assert_same(inputs(batch, 4, queries, keys), mechanism=mechanism)


def test_grouped_heads():
    query, (_, key, value) = inputs(2, 4, 5, 7)[0], inputs(2, 2, 5, 7)
    assert_same((query, key, value), torch.randn(4, 5, 7, dtype=torch.float64), mechanism="hyla")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_dropout_draws_what_eager_draws(mechanism, shared):
    bias = torch.randn(4, 9, 11, dtype=torch.float64)
    settings = {"dropout": 0.4, "dropout_shared": shared, "mechanism": mechanism, "mask": torch.rand(9, 11) > 0.2}
    assert_same(inputs(3, 4, 9, 11), bias, **settings)


def test_any_strides():
    batch, heads, tokens, depth = 3, 4, 17, 2
    full = torch.randn(batch + 1, 2 * tokens, heads + 1, 3 * depth, dtype=torch.float64)
    strided = full[1:, ::2, 1:, 1 :: depth + 1].transpose(1, 2)
    turned = torch.randn(depth, tokens, heads, batch, dtype=torch.float64).permute(3, 2, 1, 0)
    value = torch.randn(batch, heads, 3, tokens, dtype=torch.float64).transpose(-1, -2)
    assert_same((strided, turned, value), torch.randn(heads, tokens, tokens, dtype=torch.float64).transpose(1, 2))
    one = torch.randn(1, 1, 1, depth, dtype=torch.float64).expand(batch, heads, tokens, depth)
    assert_same((one, turned, value))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_reads_nothing_beside_its_inputs_and_writes_all_its_outputs(mechanism, monkeypatch):
    """Inputs are windows into NaN; what is allocated without being set is NaN too."""

    def window(tensor):
        around = torch.full([size + 2 for size in tensor.shape], float("nan"), dtype=tensor.dtype)
        inside = around[tuple(slice(1, -1) for _ in tensor.shape)]
        return inside.copy_(tensor)

    tensors, bias = inputs(3, 4, 9, 11), torch.randn(4, 9, 11, dtype=torch.float64)
    mask = torch.rand(3, 1, 9, 11) > 0.3
    (expected, _), new_empty = both(tensors, bias, mask=mask, mechanism=mechanism), torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args: new_empty(*args).fill_(float("nan")))
    _, found = both([window(tensor) for tensor in tensors], window(bias), mask=mask, mechanism=mechanism)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-10 * a.abs().max().item())


def test_a_value_that_is_not_finite_stays_visible():
    for mechanism in MECHANISMS:
        query, key, value = inputs(2, 4, 5, 7)
        query[0, 1, 2, 0] = float("nan")
        out = hyper_attention(query, key, value, mechanism=mechanism, backend="native")
        assert out[0, 1, 2].isnan().all(), mechanism
        assert out[1].isfinite().all()


@pytest.mark.parametrize("mechanism", ["softmax", "hyla", "hyla_no_rms_head"])
def test_gradcheck_with_second_derivatives(mechanism):
    tensors = [tensor[:, :, :3, :].requires_grad_() for tensor in inputs(2, 4, 3, 3)]
    bias = torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])

    def function(*args):
        return hyper_attention(*args, mask=mask, mechanism=mechanism, backend="native")

    assert torch.autograd.gradcheck(function, (*tensors, bias))
    assert torch.autograd.gradgradcheck(function, (*tensors, bias))


@pytest.mark.parametrize("mechanism", ["hyla", "softmax"])
def test_vmap_over_everything_or_some(mechanism):
    tensors = [torch.stack([tensor, 2 * tensor, -tensor]) for tensor in inputs(2, 2, 5, 7)]
    bias = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    for axes in [(0, 0, 0, 0), (0, None, 0, None), (None, 0, None, 0)]:
        results = []
        for backend in ("eager", "native"):
            args = [x if axis == 0 else x[0] for x, axis in zip((*tensors, bias), axes, strict=True)]
            args = [x.detach().requires_grad_() for x in args]
            out = torch.vmap(
                lambda *each, b=backend: hyper_attention(*each, mask, mechanism=mechanism, backend=b), in_dims=axes
            )(*args)
            results.append([out, *torch.autograd.grad(out.square().sum(), args)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_torch_func_goes_to_eager():
    query, key, value = inputs(2, 4, 5, 7)

    def loss(query, backend):
        return hyper_attention(query, key, value, backend=backend).square().sum()

    found, expected = torch.func.grad(loss)(query, "auto"), torch.func.grad(loss)(query, "eager")
    assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.grad(loss)(query, "native")


@pytest.mark.usefixtures("unchecked")
def test_operators_keep_torchs_rules():
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 4, 5, 7)]
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    rest = (None, None, 0.5, "rms_head", 2, "relu")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    passed = dict.fromkeys(checks, "SUCCESS")
    assert torch.library.opcheck(native.native_attention, (*tensors, bias, *rest), test_utils=checks) == passed
    grad = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    given = (grad, *tensors, bias, *rest, True)
    assert torch.library.opcheck(native.native_attention_backward, given, test_utils=checks) == passed


@pytest.mark.parametrize("name", [name for name in names("attention") if "/0/" in name])
def test_equals_the_public_layer(name):
    case = Case("attention", name)
    size = case.size
    widths = {"qk_dim": size["H"] * size["dk"], "v_dim": size["H"] * size["dv"]}
    settings = {"mechanism": size["mechanism"], "backend": "native", "dtype": torch.float64}
    layer = MultiHeadAttention(size["E"], size["H"], **widths, **settings)
    modules = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj, "o": layer.out_proj}
    converts = {letter: projection if letter != "o" else out_projection for letter in modules}
    with torch.no_grad():
        for letter, module in modules.items():
            module.weight.copy_(converts[letter](case[f"w{letter}"]))
            module.bias.copy_(case[f"b{letter}"].reshape(-1))
    given = {key: case[key].requires_grad_() for key in ("x", "context", "bias") if key in case}
    out = layer(**given, **({"mask": case["mask"]} if "mask" in case else {}))
    (out * case["cotangent"]).sum().backward()
    assert relative_error(out, case["out"]) < 1e-10
    for key, tensor in given.items():
        assert relative_error(tensor.grad, case[f"grad_{key}"]) < 1e-10, key
    for letter, module in modules.items():
        assert relative_error(module.weight.grad, converts[letter](case[f"grad_w{letter}"])) < 1e-10
        assert relative_error(module.bias.grad, case[f"grad_b{letter}"].reshape(-1)) < 1e-10


def test_says_what_it_cannot_do():
    query, key, value = inputs(1, 4, 3, 3, dtype=torch.float32)
    weights = [torch.randn(4, 3, 3)]
    deeper = {"mechanism": "hyla_plus", "value_weights": weights}
    hyper_attention(query, key, value, **deeper)  # auto: eager
    with pytest.raises(ConfigError, match=r"backend = 'native' is not possible: .*depth 1 and 2, not 3"):
        hyper_attention(query, key, value, **deeper, backend="native")
    mixed = [query, key.double(), value]
    with pytest.raises(ConfigError, match="float64, or float32 and below"):
        hyper_attention(*mixed, backend="native")
    assert choose_backend("auto") == choose_backend("native") == "native"
    assert (
        choose_backend("eager") == choose_backend("auto", device="cuda") == choose_backend("auto", depth=3) == "eager"
    )
    assert choose_backend("auto", dtype=torch.bfloat16) == "native"
    # wide heads without a value network are faster as matrix products
    assert choose_backend("auto", depth=1, head_width=64) == "eager"
    assert choose_backend("native", depth=1, head_width=64) == choose_backend("auto", head_width=64) == "native"
    with pytest.raises(ConfigError, match="not on cuda"):
        choose_backend("native", device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla", "hyla_softmax"])
def test_half_precision_is_computed_in_float32(dtype, mechanism):
    """Outputs and gradients are those of the same numbers in float32, rounded; a float32 bias may stand beside them, as
    autocast has it."""
    tensors = [tensor.to(dtype) for tensor in inputs(2, 4, 5, 7, dtype=torch.float32)]
    bias = torch.randn(4, 5, 7)
    results = {}
    for kind in (dtype, torch.float32):
        query, key, value = (tensor.to(kind, copy=True).requires_grad_() for tensor in tensors)
        shift = bias.clone().requires_grad_()
        out = hyper_attention(query, key, value, shift, causal=True, mechanism=mechanism, backend="native")
        assert out.dtype == kind
        (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results[kind] = [out.detach(), *(tensor.grad for tensor in (query, key, value, shift))]
    for half, whole in zip(results[dtype], results[torch.float32], strict=True):
        assert relative_error(half.float(), whole) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_codes_beside_the_output():
    query, key, value = inputs(2, 4, 5, 7)
    out, codes = hyper_attention(query, key, value, causal=True, return_codes=True, backend="native")
    assert torch.equal(out, hyper_attention(query, key, value, causal=True, backend="native"))
    expected = hyper_attention(query, key, value, causal=True, return_codes=True, backend="eager")[1]
    torch.testing.assert_close(codes, expected, rtol=0, atol=1e-12)


def test_backend_changes_in_the_middle_of_training():
    def losses(backends):
        torch.manual_seed(3)
        config = TransformerConfig(embed_dim=32, mlp_dim=32, attention_dropout=0.1)
        model = Transformer(config, sequence_length=9, input_dim=3, output_dim=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x = torch.randn(16, 9, 3)
        found = []
        for backend in backends:
            for block in model.blocks:
                block.attention.backend = block.mlp.backend = backend
            loss = (model(x, predict_at=slice(-1, None)).predictions[:, 0, 0] - x.mean((1, 2))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    eager = losses(["eager"] * 20)
    assert (losses(["eager"] * 10 + ["native"] * 10) - eager).abs().max() < 1e-5
    assert (losses(["native"] * 20) - eager).abs().max() < 1e-5


USE = """
import sys, torch
from hyla.attention import choose_backend, hyper_attention, native
x = torch.ones(1, 2, 3, 2)
for backend in sys.argv[1:]:
    try:
        print(choose_backend(backend), hyper_attention(x, x, x, backend=backend).sum().item())
    except ValueError as error:
        print(error)
"""


def start(cache, *backends, **environment):
    source = Path(native.__file__).parents[2]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(source), "CC": ""} | environment
    command = [sys.executable, "-c", USE, *backends]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out.splitlines()


def test_without_a_compiler_auto_is_eager_and_native_says_why(tmp_path):
    auto, named = finish(start(tmp_path / "cache", "auto", "native", PATH=str(tmp_path)))
    assert auto.startswith("eager ")
    assert "backend = 'native' is not possible" in named
    assert "no C compiler was found (looked for cc, gcc, clang)" in named
    (tmp_path / "file").write_text("")
    auto, named = finish(start(tmp_path / "file", "auto", "native"))  # a cache that cannot be written
    assert auto.startswith("eager ")
    assert "could not be written" in named


COMPILE = """
import torch
from hyla.attention import hyper_attention
tensors = [torch.randn(2, 4, tokens, 3, dtype=torch.float64, requires_grad=True) for tokens in (5, 7, 7)]
tensors.append(torch.randn(4, 5, 7, dtype=torch.float64, requires_grad=True))
def function(*args):
    return hyper_attention(*args, causal=True, backend="native").square().sum()
compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
expected, found = (torch.autograd.grad(f(*tensors), tensors) for f in (function, compiled))
print(all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)))
"""


def test_compiles_whole():
    # in a process of its own: torch.compile cannot trace the checks of signatures that tests run with
    environment = os.environ | {"PYTHONPATH": str(Path(native.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_two_processes_build_at_once(tmp_path):
    processes = [start(tmp_path, "native") for _ in range(2)]
    first, second = map(finish, processes)
    assert first == second
    assert first[0].startswith("native ")
    assert {path.suffix for path in (tmp_path / "hyla").iterdir()} == {".so"}  # nothing half built is left


def test_the_mark_of_a_constant_is_the_one_torch_sets():
    ours, theirs = constant_result(lambda: 1), torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(theirs) != {}


def test_a_process_that_never_compiles_does_not_load_the_compiler():
    code = "import sys, hyla.training.loop; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
