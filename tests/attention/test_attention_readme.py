"""The page beside the attention code: its example runs, and its table is what the code does."""

import re
from pathlib import Path

import hyla.attention
from hyla.attention import MECHANISMS, MultiHeadAttention

README = (Path(hyla.attention.__file__).parent / "README.md").read_text()


def test_the_example_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})


def test_the_table_lists_every_mechanism_as_it_is():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d) \| (\w*) ?\| .* \| (0|\$H D_v\^2\$) \|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == list(MECHANISMS)
    ordinary = sum(parameter.numel() for parameter in MultiHeadAttention(12, 3, mechanism="softmax").parameters())
    for name, score_norm, depth, activation, extra in rows:
        mechanism = MECHANISMS[name]
        network = mechanism.value_network
        assert (mechanism.score_norm, network.depth) == (score_norm, int(depth))
        assert network.depth == 1 or network.activation == activation
        count = sum(parameter.numel() for parameter in MultiHeadAttention(12, 3, mechanism=name).parameters())
        assert count - ordinary == (0 if extra == "0" else 3 * 4 * 4)


def test_mathematics_is_closed():
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert all(line.count("$") % 2 == 0 for line in prose.splitlines())
