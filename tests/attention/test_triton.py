"""The Triton kernel without a GPU: interpreted against eager, compiled for CUDA, and refused where it cannot run."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hyla.attention import hyper_attention
from hyla.errors import ConfigError

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed: pip install 'hyla[triton]'"
)


def run(*arguments, **environment):
    """A process without the checks of signatures, which would wrap the kernels' source too."""
    environment = {**os.environ, "HYLA_TYPECHECK": "0", "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@needs_triton
def test_interpreted_kernel_equals_eager():
    """Every case of triton_cases.py, in a process of its own: the interpreter is chosen before triton is imported."""
    cases = Path(__file__).with_name("triton_cases.py")
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases), TRITON_INTERPRET="1")
    assert " passed" in out


@needs_triton
def test_kernels_compile_for_cuda():
    """What the interpreter cannot see: types, shapes that matrix units accept, and shared memory within an A100's."""
    program = """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from hyla.attention import triton_kernel as kernels

        names = dict(q="*bf16", k="*bf16", v="*bf16", grad_out="*bf16", grad_q="*bf16", grad_k="*bf16", grad_v="*bf16",
                     out="*fp32", sizes=("i32", "i32"), scale="fp32", bias=("*fp32", *["i64"] * 4),
                     grad_bias=("*fp32", *["i64"] * 4), allowed=("*u8", *["i64"] * 4))
        constants = dict(NUM_HEADS=12, QK_WIDTH=64, V_WIDTH=64, H=16, D=64, DV=32, TILE=16, EPSILON=1e-6, RMS=True,
                         DEEP=True, RELU=True, CAUSAL=True, BIAS=True, MASK=True, PRECISION="ieee", BIAS_GRADIENT=True)
        for kernel in (kernels._forward_kernel, kernels._query_gradient_kernel, kernels._key_gradient_kernel,
                       kernels._value_gradient_kernel):
            signature = {name: names.get(name, "constexpr") for name in kernel.arg_names}
            mine = {name: constants[name] for name in kernel.arg_names if name in constants}
            source = ASTSource(fn=kernel, signature=signature, constexprs=mine)
            compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=dict(num_warps=8, num_stages=1))
            assert "mma" in compiled.asm["ptx"]
            assert compiled.metadata.shared <= 163 * 1024
    """
    run("-c", textwrap.dedent(program))


def test_refused_on_the_cpu():
    """Asked for by name, it says why it cannot run instead of computing something else."""
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"CUDA|the package triton"):
        hyper_attention(query, query, query, backend="triton")
