"""Fused linear layers against the modules that they stand for: outputs, every gradient, and when they are not used.

Tolerances are those of test_native.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from golden_values import relative_error
from hyla.attention import fused, native

REASON = native.problem()
pytestmark = pytest.mark.skipif(
    REASON is not None or fused.gemm(torch.float32) is None,
    reason="no C compiler here, or a torch without BLAS's symbols",
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def made(*modules):
    """Modules with random biases, scales and shifts."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)
    return modules


def assert_same(function, leaves):
    """`function(backend)` gives tensors; they and their gradients for all leaves agree between eager and fused."""
    results = []
    for backend in ("eager", "auto"):
        outs = function(backend)
        cotangents = [
            torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2)) for out in outs
        ]
        results.append([*outs, *torch.autograd.grad(outs, leaves, cotangents)])
    for expected, found in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) < TOLERANCE[found.dtype]


@pytest.fixture(autouse=True)
def fused_at_any_size(monkeypatch):
    monkeypatch.setattr(fused, "MIN_ROWS", 1)


@pytest.fixture
def counted(monkeypatch):
    """How often the fused operator has been called."""
    calls, original = [], fused.fused_linear
    monkeypatch.setattr(fused, "fused_linear", lambda *args: (calls.append(1), original(*args))[1])
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "inputs", "widths"),
    [((1,), 1, [1]), ((2, 63), 17, [33]), ((2, 3, 65), 32, [16, 5, 16]), ((7, 128), 64, [64, 128])],
)
def test_projections_equal_the_modules(shape, inputs, widths, threads, dtype, counted):
    norm, *layers = made(nn.LayerNorm(inputs, eps=1e-3), *(nn.Linear(inputs, width) for width in widths))
    x = torch.randn(*shape, inputs, dtype=dtype, requires_grad=True)
    torch.set_num_threads(threads)
    for before in (norm, None):
        modules = nn.ModuleList([*layers, *([norm] if before else [])]).to(dtype)
        assert_same(lambda backend, n=before: fused.project(x, n, layers, backend), [x, *modules.parameters()])
    torch.set_num_threads(1)
    assert len(counted) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("shape", "inputs", "width"), [((1,), 1, 1), ((2, 63), 17, 33), ((7, 128), 256, 128)])
@pytest.mark.parametrize("gelu", [True, False])
def test_residual_sums_equal_the_modules(shape, inputs, width, gelu, dtype, counted):
    (layer,) = made(nn.Linear(inputs, width, dtype=dtype))
    x = torch.randn(*shape, inputs, dtype=dtype, requires_grad=True)
    residual = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    for added in (residual, None):
        leaves = [x, *layer.parameters(), *([] if added is None else [added])]
        assert_same(lambda backend, r=added: [fused.add_projected(r, x, layer, gelu, backend)], leaves)
    assert len(counted) == 2


def test_inputs_of_any_layout_and_inputs_that_need_no_gradient():
    norm, layer = made(nn.LayerNorm(8, dtype=torch.float64), nn.Linear(8, 6, dtype=torch.float64))
    x = torch.randn(4, 8, 5, dtype=torch.float64)[1:, :, ::2].transpose(1, 2)
    for before in (norm, None):
        parameters = [*layer.parameters(), *([] if before is None else before.parameters())]
        assert_same(lambda backend, n=before: fused.project(x, n, [layer], backend), parameters)
    assert_same(lambda backend: [fused.add_projected(None, x, layer, True, backend)], [*layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gelu_is_accurate_everywhere(dtype):
    x = torch.cat([3 * torch.randn(37, dtype=dtype), torch.tensor([0.0, -1e4, 1e4], dtype=dtype)]).requires_grad_()
    one = nn.Linear(1, 1, dtype=dtype)
    nn.init.ones_(one.weight)
    nn.init.zeros_(one.bias)
    exact = F.gelu(x.double(), approximate="tanh")
    wanted = torch.autograd.grad(exact.sum(), x)[0]
    found = fused.add_projected(None, x[:, None], one, gelu=True)
    assert relative_error(found[:, 0], exact) < TOLERANCE[dtype]
    assert relative_error(torch.autograd.grad(found.sum(), x)[0], wanted) < TOLERANCE[dtype]
    assert fused.add_projected(None, torch.full((1, 1), float("nan"), dtype=dtype), one, gelu=True).isnan().all()


def test_gradcheck_with_second_derivatives():
    norm, one, two = made(nn.LayerNorm(3), nn.Linear(3, 2), nn.Linear(3, 2))
    nn.ModuleList([norm, one, two]).double()
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)

    def normed(x, *parameters):
        scale, shift, *rest = parameters
        return tuple(fused.fused_linear(x, scale, shift, rest[::2], rest[1::2], None, 1e-6, False))

    def activated(x, residual, weight, bias):
        return fused.fused_linear(x, None, None, [weight], [bias], residual, 0.0, True)[0]

    given = [*norm.parameters(), *one.parameters(), *two.parameters()]
    assert torch.autograd.gradcheck(normed, (x, *given))
    assert torch.autograd.gradgradcheck(normed, (x, *given))
    assert torch.autograd.gradgradcheck(activated, (x, residual, *one.parameters()))
    assert torch.autograd.gradgradcheck(lambda *given: activated(x.detach(), *given), (residual, *one.parameters()))


@pytest.mark.usefixtures("unchecked")
def test_operators_keep_torchs_rules():
    x, grad = torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    weights, biases = [torch.randn(3, 4, requires_grad=True)], [torch.randn(3, requires_grad=True)]
    scale, shift = (torch.randn(4, requires_grad=True) for _ in range(2))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    args = (x, scale, shift, weights, biases, grad.clone().requires_grad_(), 1e-6, False)
    passed = dict.fromkeys(checks, "SUCCESS")
    assert torch.library.opcheck(fused.fused_linear, args, test_utils=checks) == passed
    backward = ([grad.requires_grad_()], x, None, None, weights, 0.0, True, True)
    assert torch.library.opcheck(fused.fused_linear_backward, backward, test_utils=checks) == passed


def test_vmap_over_everything_or_some(counted):
    norm, layer = (module.double() for module in made(nn.LayerNorm(4), nn.Linear(4, 4)))
    x, shared = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    stack = {
        name: torch.randn(3, *parameter.shape, dtype=torch.float64, requires_grad=True)
        for name, parameter in nn.ModuleList([norm, layer]).named_parameters()
    }

    class Both(nn.ModuleList):
        def forward(self, x, residual, backend):
            (hidden,) = fused.project(x, self[0], [self[1]], backend)
            return fused.add_projected(residual, hidden, self[1], True, backend)

    both = Both([norm, layer])
    assert_same(
        lambda backend: [
            torch.vmap(lambda p, x: torch.func.functional_call(both, p, (x, shared, backend)))(stack, x),
            torch.vmap(lambda p: torch.func.functional_call(both, p, (shared, shared, backend)))(stack),
        ],
        [x, *stack.values()],
    )
    assert counted


def test_what_it_cannot_do_is_left_to_the_modules(counted, monkeypatch):
    x, norm, layer = torch.randn(2, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def loss(x):
        return fused.add_projected(x, fused.project(x, norm, [layer])[0], layer).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x).sum(), torch.zeros(()), rtol=0, atol=100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.project(x, None, [layer])[0].dtype == torch.bfloat16
    fused.project(x, nn.RMSNorm(4), [layer])
    fused.project(x, None, [nn.Linear(4, 4, bias=False)])
    fused.project(x[:0], None, [layer])
    seen = []
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    fused.project(x, norm, [layer])
    handle.remove()
    assert seen
    assert not counted
    fused.project(x, norm, [layer])
    assert counted
    monkeypatch.setattr(fused, "MIN_ROWS", 3)
    del counted[:]
    fused.project(x, norm, [layer])
    assert not counted
    monkeypatch.setattr(fused, "MIN_ROWS", 1)
    monkeypatch.setattr(fused, "MAX_WEIGHTS", 15)
    fused.project(x, norm, [layer])
    assert not counted


COMPILE = """
import torch
from hyla.models.transformer import Block, TransformerConfig
block, x = Block(TransformerConfig(embed_dim=16, mlp_dim=32), 5), torch.randn(2, 5, 16, requires_grad=True)
def function(x):
    return block(x, None, None, slice(3, None), None, False)[0].square().sum()
compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
leaves = [x, *block.parameters()]
expected, found = (torch.autograd.grad(f(x), leaves) for f in (function, compiled))
print(all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True)))
"""


def test_a_block_compiles_whole():
    # in a process of its own: torch.compile cannot trace the checks of signatures that tests run with
    environment = os.environ | {"PYTHONPATH": str(Path(native.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
