"""Every backend on CUDA against eager in float64. Not run anywhere yet for want of a GPU; run by `make test-gpu`."""

import importlib.util

import pytest
import torch

from hyla.attention import hyper_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; runs where there is one"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mechanism", ["softmax", "linear", "linear_rms_head", "hyla", "hyla_linear", "hyla_plus"])
@pytest.mark.parametrize("backend", ["eager", "chunked", "triton"])
@pytest.mark.parametrize(("heads", "length"), [(8, 256), (12, 111)])
def test_backends_agree(backend, mechanism, dtype, heads, length):
    """Output and gradients, relative to the largest magnitude: 1e-4 in float32 (TF32 off), a few steps of bfloat16."""
    if backend == "triton" and mechanism in ("softmax", "hyla_plus"):
        pytest.skip(
            "the kernel has rms_head and none, value networks of depth 1 and 2; its errors are tested elsewhere"
        )
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed: pip install 'hyla[triton]'")
    inputs = [torch.randn(2, heads, length, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(heads, length, length, device="cuda", requires_grad=True))
    if mechanism == "hyla_plus":
        inputs.append((torch.randn(heads, 32, 32, device="cuda") / 32).requires_grad_())
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool, device="cuda")
    mask[1, ..., length // 2 :] = False

    def run(inputs, backend):
        query, key, value, bias, *weights = inputs
        settings = {"mechanism": mechanism, "value_weights": weights, "causal": True, "backend": backend}
        out = hyper_attention(query, key, value, bias, mask, **settings)
        return [out, *torch.autograd.grad(out.double().square().mean(), inputs)]

    exact = run([tensor.detach().double().requires_grad_() for tensor in inputs], "eager")
    for one, other in zip(run(inputs, backend), exact, strict=True):
        assert torch.isfinite(one).all()
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < (1e-4 if dtype == torch.float32 else 0.1)
