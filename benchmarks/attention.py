"""Time and memory of the attention backends, forward and backward, against eager and torch's own softmax attention.

    python benchmarks/attention.py [--lengths 256,512,1024] [--heads 8] [--width 64] [--batch 1] [--mechanism hyla]
                                   [--dtype float32] [--threads 1] [--repeats 5] [--json FILE]

Every backend is first compared with eager, outputs and gradients, at a small size; a wrong one is not timed. Repeats of all
backends alternate, because the speed of a shared machine drifts; the median counts. Where eager's largest tensor passes
`--eager-gib`, eager is left out. Memory: on CUDA the peak that the pass allocates; on a CPU the growth of the peak of a
fresh process, so each is measured in a process of its own (Linux). `compiled` is eager through torch.compile, on CUDA only;
`sdpa` is torch's scaled_dot_product_attention, which computes softmax attention whatever the mechanism: a yardstick.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hyla.attention import hyper_attention, resolve_mechanism
from hyla.attention.functional import largest_eager_bytes
from hyla.errors import ConfigError

BACKENDS = ("eager", "native", "chunked", "triton", "compiled", "sdpa")


def passes(backend: str, mechanism: str) -> Callable[..., torch.Tensor]:
    """Causal attention of query, key, value and the weights of the value network."""
    if backend == "sdpa":
        return lambda query, key, value, *_: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
    name = "eager" if backend == "compiled" else backend

    def attend(query, key, value, *weights):
        settings = {"mechanism": mechanism, "value_weights": weights, "causal": True, "backend": name}
        return hyper_attention(query, key, value, **settings)

    return torch.compile(attend) if backend == "compiled" else attend


def draw(args: argparse.Namespace, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    further = resolve_mechanism(args.mechanism).value_network.num_further_weights
    shapes = [(args.batch, args.heads, length, args.width)] * 3 + [(args.heads, args.width, args.width)] * further
    scales = [1.0] * 3 + [args.width**-0.5] * further
    drawn = [torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, scales, strict=True)]
    return [tensor.to(args.device, dtype).requires_grad_() for tensor in drawn]


def forward_backward(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attend(*inputs)
    used = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)]
    if out.is_cuda:
        torch.cuda.synchronize()
    return [tensor.detach() for tensor in used if tensor is not None]


def reason_against(backend: str, args: argparse.Namespace) -> str | None:
    """Why this backend is not timed: it cannot run, or its result is wrong."""
    if backend == "compiled" and args.device == "cpu":
        return "only timed on CUDA"
    dtype = getattr(torch, args.dtype)
    inputs = draw(args, 48, dtype)
    expected = "softmax" if backend == "sdpa" else args.mechanism
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    if backend == "sdpa":
        inputs, exact = inputs[:3], exact[:3]
    try:
        got = forward_backward(passes(backend, args.mechanism), inputs)
    except ConfigError as error:
        return str(error)
    for one, other in zip(got, forward_backward(passes("eager", expected), exact), strict=True):
        error = float((one.double() - other).abs().max() / other.abs().max())
        if not error < (1e-4 if dtype == torch.float32 else 0.1):
            return f"WRONG: differs from eager by {error:.1e}"
    return None


def peak_mib(backend: str, args: argparse.Namespace, length: int) -> float:
    """Peak memory of one forward and backward pass, above its inputs."""
    if args.device == "cuda":
        inputs = draw(args, length, getattr(torch, args.dtype))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_backward(passes(backend, args.mechanism), inputs)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, __file__, "--memory-of", backend, "--lengths", str(length), "--heads", str(args.heads)]
    command += ["--width", str(args.width), "--batch", str(args.batch), "--mechanism", args.mechanism]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak_of_this_process() -> float:
    """In MiB. Not `ru_maxrss`, which a process started by a large one inherits from it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def print_own_peak(args: argparse.Namespace) -> None:
    attend, dtype = passes(args.memory_of, args.mechanism), getattr(torch, args.dtype)
    forward_backward(attend, draw(args, 16, dtype))
    inputs = draw(args, args.lengths[0], dtype)
    before = peak_of_this_process()
    forward_backward(attend, inputs)
    print(peak_of_this_process() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="256,512,1024", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mechanism", default="hyla")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager-gib", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    if args.memory_of:
        return print_own_peak(args)

    reasons = {backend: reason_against(backend, args) for backend in BACKENDS}
    for backend, reason in reasons.items():
        if reason is not None:
            print(f"{backend}: not timed; {reason}")
    rows = []
    print(f"{'backend':>9} {'length':>7} {'ms':>9} {'eager / it':>10} {'peak MiB':>9}")
    for length in args.lengths:
        inputs = draw(args, length, getattr(torch, args.dtype))
        eager_bytes = largest_eager_bytes(inputs[0], inputs[2], resolve_mechanism(args.mechanism))
        fits = eager_bytes <= args.eager_gib * 2**30
        timed = [name for name in BACKENDS if reasons[name] is None and (fits or name not in ("eager", "compiled"))]
        attends = {name: passes(name, args.mechanism) for name in timed}
        times: dict[str, list[float]] = {name: [] for name in timed}
        for repeat in range(args.repeats + 1):
            for name in timed:
                start = time.perf_counter()
                forward_backward(attends[name], inputs)
                if repeat:  # the first warms up
                    times[name].append(1e3 * (time.perf_counter() - start))
        medians = {name: statistics.median(times[name]) for name in timed}
        for name in timed:
            ratio = medians["eager"] / medians[name] if "eager" in medians else None
            row = {"backend": name, "length": length, "ms": medians[name], "eager_over_it": ratio}
            row["peak_mib"] = peak_mib(name, args, length)
            rows.append(row)
            shown = f"{ratio:10.2f}" if ratio is not None else f"{'-':>10}"
            print(f"{name:>9} {length:>7} {row['ms']:9.1f} {shown} {row['peak_mib']:9.0f}", flush=True)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "memory_of")}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"date": now, "torch": torch.__version__, "settings": settings, "not_timed": reasons}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
