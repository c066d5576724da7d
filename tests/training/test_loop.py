"""What the loop asks of the process and the machine that it runs on."""

import json
import platform
import subprocess
import sys

import pytest
import torch

from hyla.errors import ConfigError
from hyla.models.transformer import TransformerConfig
from hyla.runs import read_json
from hyla.tasks.fuzzy_logic import LogicConfig
from hyla.training.config import LoopConfig, TrainConfig
from hyla.training.loop import load_model, resume, train

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


def test_a_run_is_read_where_its_device_is_missing(tmp_path):
    """Trained on a GPU, it is evaluated and exported on a laptop; going on with it there would be another run."""
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "qk_dim": 8, "v_dim": 8, "mlp_dim": 8}
    loop = LoopConfig(steps=1, batch_size=4, eval_samples=4, device="cpu", checkpoint_every=1)
    train(TrainConfig(LogicConfig(num_variables=3), TransformerConfig(**sizes), training=loop), tmp_path / "run")
    weights = load_model(tmp_path / "run")[0].state_dict()

    stored = read_json(tmp_path / "run" / "config.json")
    stored["training"]["device"] = missing = "mps" if torch.cuda.is_available() else "cuda"
    (tmp_path / "run" / "config.json").write_text(json.dumps(stored))
    (tmp_path / "run" / "result.json").unlink()
    model, _, config = load_model(tmp_path / "run")
    assert config.training.device == "auto"
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), weights[name])
    with pytest.raises(ConfigError, match=f"training.device = '{missing}'"):
        resume(tmp_path / "run")
