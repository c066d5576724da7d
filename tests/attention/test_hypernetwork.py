"""The hypernetwork view: the network of every pair, applied to the key's token, gives exactly what the pair adds."""

import pytest
import torch

from hyla.attention import (
    MECHANISMS,
    Mechanism,
    MultiHeadAttention,
    ValueNetwork,
    output_change,
    pair_contributions,
    pair_network,
    value_parameters,
)
from hyla.errors import ConfigError

SETTINGS = MECHANISMS | {
    "depth 4": Mechanism("rms_head", ValueNetwork(4)),
    "gelu, depth 3": Mechanism("none", ValueNetwork(3, "gelu")),
    "softmax, depth 3": Mechanism("softmax", ValueNetwork(3, "silu")),
}
every_mechanism = pytest.mark.parametrize("name", SETTINGS)

# how a layer is built and called: (options of the layer, arguments of forward besides x)
CALLS = {
    "plain": ({}, {}),
    "grouped heads, causal, rotary": ({"num_kv_heads": 2, "positions": "rotary"}, {"causal": True}),
    "no biases, t5": ({"bias": False, "positions": "t5"}, {}),
    "padding, bias": ({}, {"key_mask": [True, True, False, True, False], "bias": True}),
    "cross-attention, causal": ({"context_dim": 5, "positions": "t5"}, {"context": True, "causal": True}),
}


def build(name, options, arguments):
    """(layer, x, arguments of forward) in float64, with biases that are not 0."""
    torch.manual_seed(0)
    mechanism = SETTINGS[name]
    layer = MultiHeadAttention(
        6,
        4,
        score_norm=mechanism.score_norm,
        value_network=mechanism.value_network,
        qk_dim=8,
        v_dim=12,
        dtype=torch.float64,
        **options,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    x = torch.randn(5, 6, dtype=torch.float64)
    given = dict(arguments)
    if "context" in given:
        given["context"], x = torch.randn(5, 5, dtype=torch.float64), x[:4]
    if "key_mask" in given:
        given["key_mask"] = torch.tensor(given["key_mask"])
    if "bias" in given:
        given["bias"] = torch.randn(4, len(x), 5, dtype=torch.float64)
    return layer, x, given


@every_mechanism
@pytest.mark.parametrize("call", CALLS)
def test_the_networks_of_all_pairs_add_up_to_the_layers_output(name, call):
    layer, x, given = build(name, *CALLS[call])
    out_QE, codes_HQK = layer(x, **given, return_codes=True)
    tokens = given.get("context", x)
    parts_QKE = torch.stack(
        [
            torch.stack([pair_network(layer, x, q, k, **given)(tokens[k]) for k in range(len(tokens))])
            for q in range(len(x))
        ]
    )
    total_QE = parts_QKE.sum(1) + value_parameters(layer).output_bias
    torch.testing.assert_close(total_QE, out_QE, rtol=1e-12, atol=1e-12)
    contributions_QKE = pair_contributions(layer, codes_HQK, tokens)
    torch.testing.assert_close(contributions_QKE, parts_QKE, rtol=1e-12, atol=1e-12)


@every_mechanism
def test_weights_are_explicit_matrices(name):
    layer, x, given = build(name, {}, {})
    network, depth = pair_network(layer, x, 3, -2, **given), SETTINGS[name].value_network.depth
    shapes = [(6, 6)] if depth == 1 else [(3, 6)] + [(3, 3)] * (depth - 2) + [(6, 3)]
    assert [tuple(weight.shape) for weight in network.weights] == shapes
    assert network.bias.shape == (shapes[0][0],)
    # the first matrix by hand, head by head
    code = layer(x, return_codes=True)[1][:, 3, 3]
    torch.testing.assert_close(network.code, code, rtol=0, atol=1e-14)
    expected = torch.zeros(shapes[0], dtype=torch.float64)
    for h in range(4):
        value = layer.v_proj.weight[3 * h : 3 * h + 3]
        output = layer.out_proj.weight[:, 3 * h : 3 * h + 3]
        expected += code[h] * (output @ value if depth == 1 else value)
    torch.testing.assert_close(network.weights[0], expected, rtol=1e-13, atol=1e-13)


@every_mechanism
@pytest.mark.parametrize("call", CALLS)
def test_codes_of_chosen_pairs_equal_the_whole_ones(name, call):
    layer, x, given = build(name, *CALLS[call])
    codes_HQK = layer(x, **given, return_codes=True)[1]
    chosen = layer.codes(x, **given, queries=[-1, 0], keys=[3, 1, 0])
    torch.testing.assert_close(chosen, codes_HQK[:, [-1, 0]][:, :, [3, 1, 0]], rtol=1e-13, atol=1e-13)


@every_mechanism
def test_codes_of_a_batch_with_an_additive_mask(name):
    layer, _, _ = build(name, {"positions": "t5"}, {})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    mask = torch.randn(2, 1, 5, 5, dtype=torch.float64).masked_fill(torch.rand(2, 1, 5, 5) < 0.3, float("-inf"))
    whole = layer(x, mask=mask, return_codes=True)[1]
    torch.testing.assert_close(layer.codes(x, mask=mask, queries=[2], keys=[4, 0]), whole[:, :, [2]][..., [4, 0]])


@every_mechanism
def test_a_changed_code_changes_the_output_by_its_contribution(name):
    layer, x, _ = build(name, {}, {})
    old = layer(x, return_codes=True)[1]
    new = old.clone()
    new[:, 1, 2] = torch.randn(4, dtype=torch.float64)
    expected = (pair_contributions(layer, new, x) - pair_contributions(layer, old, x)).sum(1)
    change = output_change(layer, x, [2], old[:, [1]][..., [2]], new[:, [1]][..., [2]])
    torch.testing.assert_close(change[0], expected[1], rtol=1e-12, atol=1e-12)
    assert expected[[0, 2, 3, 4]].abs().max() == 0


def test_mistakes_are_named():
    layer, x, _ = build("hyla", {}, {})
    for arguments, message in (
        ({"query": 5, "key": 0}, r"queries = 5 .* 5 positions"),
        ({"query": 0, "key": -6}, r"keys = -6"),
    ):
        with pytest.raises(ConfigError, match=message):
            pair_network(layer, x, **arguments)
    with pytest.raises(ConfigError, match=r"queries = .* at least one"):
        layer.codes(x, queries=[], keys=[0])


def test_a_batch_is_refused_by_name(unchecked):
    layer, x, _ = build("hyla", {}, {})
    with pytest.raises(ConfigError, match=r"x = \(1, 5, 6\) .* \[tokens, width\]"):
        pair_network(layer, x[None], 0, 0)
