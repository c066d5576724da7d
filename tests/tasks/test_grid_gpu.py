"""The grid worlds on CUDA. Not run anywhere yet for want of a GPU; run by `make test-gpu`."""

import pytest
import torch

from hyla.tasks.goal_grid import GoalConfig, GoalGrid
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; runs where there is one"),
]


@pytest.mark.parametrize("encoding", ["same", "fewshot"])
@pytest.mark.parametrize("name", ["preference", "goal"])
def test_episodes_drawn_on_the_gpu_are_demonstrated_as_on_the_cpu(name, encoding):
    fields = {"encoding": "fewshot"} if encoding == "fewshot" else {}
    task = PreferenceGrid(PreferenceConfig(**fields)) if name == "preference" else GoalGrid(GoalConfig(**fields))
    batch = task.batch("train", 0, 256, device="cuda")
    assert batch.inputs.device.type == batch.targets.device.type == "cuda"
    episodes = task.episodes_of(batch.to("cpu").latents)
    shown = task.demonstrate(episodes)
    # values that are equal but for the last digits may be told apart otherwise
    assert (shown.actions == batch.targets.cpu()).all(-1).double().mean() > 0.99
    points = task.layout.unpack(batch.inputs)[1].cpu()
    same = task.replay(episodes, batch.targets.cpu())
    torch.testing.assert_close(points, task.observe(episodes, same.agent, same.taken), atol=1e-5, rtol=1e-5)
