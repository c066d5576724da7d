"""The guide's examples run."""

import re
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs" / "latents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_example_of_the_guide_runs(block):
    names = {}
    exec(compile(block, "docs/latents.md", "exec"), names)
    if "codes" in names:
        assert names["codes"].codes("blocks.1.attention", "held_out").shape == (500, 1, 1, 8)
        assert names["codes"].activation("blocks.0.mlp", "held_out").shape == (500, 1, 128)
        assert names["found"].rows.num_test_groups == 46
    else:
        assert [tuple(weight.shape) for weight in names["network"].weights] == [(2, 16), (16, 2)]
