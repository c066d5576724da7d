"""The three architectures of P2 behind one interface."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyla.errors import ConfigError
from hyla.layout import InputLayout
from hyla.models.hypernetwork import Hypernetwork, HypernetworkConfig
from hyla.models.mlp import MLP, MLPConfig
from hyla.models.transformer import Transformer, TransformerConfig

B, N, INPUTS, OUTPUTS = 3, 5, 4, 2
LAYOUTS = {
    "vector": InputLayout((6,), N, INPUTS),
    "several": InputLayout((7, 6), N, INPUTS),
    "tokens": InputLayout((7,), N, INPUTS, vocab_size=11),
}
SMALL = TransformerConfig(
    mechanism="softmax",
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    qk_dim=16,
    v_dim=16,
    mlp_dim=12,
    positions="rotary",
    causal=True,
    bias=False,
    qk_norm=True,
)


def make(architecture, layout):
    torch.manual_seed(0)
    if architecture == "mlp":
        return MLP(MLPConfig(num_layers=3, width=9, token_dim=4), layout=layout, output_dim=OUTPUTS).double()
    if architecture == "hypernetwork":
        return Hypernetwork(HypernetworkConfig(width=9, token_dim=4), layout=layout, output_dim=OUTPUTS).double()
    return Transformer(SMALL, sequence_length=layout.num_tokens, layout=layout, output_dim=OUTPUTS).double()


def rows(layout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(B, N, INPUTS, generator=generator, dtype=torch.float64)
    if layout.vocab_size is not None:
        return torch.randint(layout.vocab_size, (B, *layout.encoding_shape), generator=generator), points
    return torch.randn(B, *layout.encoding_shape, generator=generator, dtype=torch.float64), points


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_packed_and_unpacked(layout):
    encoding, points = rows(layout)
    inputs = layout.pack(encoding, points)
    assert inputs.shape == (B, layout.input_dim)
    again = layout.unpack(inputs)
    assert torch.equal(again[0], encoding)
    assert torch.equal(again[1], points)
    assert again[0].dtype == encoding.dtype
    assert (
        layout.num_tokens
        == N
        + {"vector": 1, "several": 7, "tokens": 7}[next(name for name, other in LAYOUTS.items() if other is layout)]
    )


def test_other_shapes_are_refused():
    layout = LAYOUTS["several"]
    encoding, points = rows(layout)
    with pytest.raises(ConfigError, match=r"encoding = \(6, 7\) is not possible: must end in \(7, 6\)"):
        layout.pack(encoding.mT, points)
    with pytest.raises(ConfigError, match=r"points = \(4, 4\) is not possible: must end in \(5, 4\)"):
        layout.pack(encoding, points[:, 1:])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("architecture", ["mlp", "hypernetwork", "transformer"])
def test_one_interface(architecture, layout):
    model = make(architecture, layout)
    inputs = layout.pack(*rows(layout))
    out = model(inputs, predict_at=slice(layout.num_encoding_tokens, None), keep=None)
    assert out.predictions.shape == (B, N, OUTPUTS)
    assert out.codes is None
    assert out.balance_loss is None
    assert model.num_parameters == sum(p.numel() for p in model.parameters())
    assert model.draw_keep(B, layout.num_tokens) == []
    out.predictions.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    other, _ = rows(layout, seed=1)
    told = model(layout.pack(other, rows(layout)[1])).predictions
    assert not torch.allclose(told[:, -N:], out.predictions), "the encoding is read"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_mlp_is_one_that_reads_encoding_and_point_joined(layout):
    model = make("mlp", layout)
    encoding, points = rows(layout)
    vector = (encoding if layout.vocab_size is None else model.reader.table(encoding)).flatten(1)
    joined = torch.cat([vector[:, None].expand(-1, N, -1), points], -1)
    layers = [layer.linear for layer in model.hidden]
    plain = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())), model.head)
    torch.testing.assert_close(model(layout.pack(encoding, points)).predictions, plain(joined))
    assert [layer.in_features for layer in layers] == [vector.shape[1] + INPUTS, 9, 9]
    assert all((layer.bias == 0).all() for layer in layers)


def test_the_hypernetwork_answers_with_weights_of_each_task():
    layout = LAYOUTS["vector"]
    model = make("hypernetwork", layout)
    encoding, points = rows(layout)
    out = model(layout.pack(encoding, points)).predictions
    for task in range(B):
        generated = model.generator(F.layer_norm(encoding[task], (6,), eps=1e-6))
        weight, bias, readout, offset = generated.split([INPUTS * 9, 9, 9 * OUTPUTS, OUTPUTS])
        hidden = F.relu(points[task] @ weight.view(INPUTS, 9) / INPUTS**0.5 + bias)
        torch.testing.assert_close(out[task], hidden @ readout.view(9, OUTPUTS) / 9**0.5 + offset)


def test_generated_weights_have_the_variance_of_an_ordinary_layer():
    layout = InputLayout((64,), 8, 16)
    torch.manual_seed(0)
    model = Hypernetwork(HypernetworkConfig(width=256), layout=layout, output_dim=16)
    tasks = torch.randn(32, 64)
    generated = model.generator(model.norm(tasks))
    assert abs(generated.var().item() - 1) < 0.05
    x = torch.randn(32, 8, 16)
    hidden = model.hidden(x, generated[:, : model.hidden.num_generated])
    assert abs(hidden.var().item() - 2) < 0.2  # one of the weighted sum, one of the bias


def test_points_of_the_causal_transformer_see_the_encoding_and_no_later_point():
    layout = LAYOUTS["tokens"]
    model = make("transformer", layout)
    encoding, points = rows(layout)
    answered = model(layout.pack(encoding, points), predict_at=slice(layout.num_encoding_tokens, None)).predictions
    changed = points.clone()
    changed[:, 3:] += 1
    later = model(layout.pack(encoding, changed), predict_at=slice(layout.num_encoding_tokens, None)).predictions
    torch.testing.assert_close(later[:, :3], answered[:, :3], rtol=0, atol=1e-12)
    assert not torch.allclose(later[:, 3:], answered[:, 3:])


def test_queries_and_keys_are_normed_and_nothing_has_a_bias():
    model = make("transformer", LAYOUTS["vector"])
    block = model.blocks[0]
    assert [name for name, _ in block.named_parameters() if "bias" in name] == []
    seen = []
    block.attention.q_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(LAYOUTS["vector"].pack(*rows(LAYOUTS["vector"])))
    query = seen[0]
    assert query.shape == (B, 4, N + 1, 4)
    torch.testing.assert_close(query.mean(-1), torch.zeros_like(query.mean(-1)), rtol=0, atol=1e-6)
    torch.testing.assert_close(query.var(-1, correction=0), torch.ones_like(query.mean(-1)), rtol=1e-2, atol=1e-2)


def test_rotary_scores_of_normed_queries_equal_the_written_out_equation():
    """P2's public layer: LayerNorm on each head's queries and keys, rotated, scaled by 1/sqrt(width), causal softmax."""
    from hyla.attention import MultiHeadAttention
    from hyla.attention.positions import rotate

    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2, mechanism="softmax", bias=False, qk_norm=True, positions="rotary").double()
    nn.init.normal_(layer.q_norm.weight)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = (
        F.linear(x, p.weight).view(1, 5, 2, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q = F.layer_norm(q, (4,), layer.q_norm.weight, eps=1e-6)
    k = F.layer_norm(k, (4,), layer.k_norm.weight, eps=1e-6)
    q, k = rotate(q, torch.arange(5)), rotate(k, torch.arange(5))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(layer(x, causal=True), F.linear(out, layer.out_proj.weight))
    codes = layer.codes(x, queries=[4], keys=[0, 4], causal=True)
    torch.testing.assert_close(codes, layer(x, causal=True, return_codes=True)[1][:, :, 4:, [0, 4]])


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (MLPConfig, "width", 0),
        (MLPConfig, "num_layers", -1),
        (HypernetworkConfig, "width", 2**21),
        (MLPConfig, "token_dim", 0),
    ],
)
def test_sizes_are_checked(config, field, value):
    with pytest.raises(ConfigError, match=f"model.{field} = {value}"):
        config(**{field: value})


def test_a_transformer_needs_one_kind_of_input():
    with pytest.raises(ConfigError, match="give one of"):
        Transformer(SMALL, sequence_length=4, input_dim=3, layout=LAYOUTS["vector"], output_dim=2)
    with pytest.raises(ConfigError, match="give one of"):
        Transformer(SMALL, sequence_length=4, input_dim=3)
