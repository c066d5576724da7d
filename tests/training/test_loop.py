"""What the loop asks of the process that it runs in."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from hyla.training.loop import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    tensors = [torch.ones(2**21) for _ in range(6)]  # 8 MiB each, 2,048 pages
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_a_step_uses_the_memory_of_the_last_one():
    default, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, word], text=True, capture_output=True, check=True).stdout)
        for word in ("default", "keep")
    )
    assert kept < 1_000  # page faults; by default usually more than 10,000
    assert kept <= max(default, 100)
