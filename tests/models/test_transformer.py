import pytest
import torch

from golden_values import Case, flax_parameters, load_parameters, names, relative_error
from hyla.errors import ConfigError
from hyla.models.transformer import Transformer, TransformerConfig


def golden_model(size):
    config = TransformerConfig(
        mechanism=size["mechanism"],
        num_layers=size["num_layers"],
        embed_dim=size["emb_dim"],
        num_heads=size["num_heads"],
        qk_dim=size["qk_dim"],
        v_dim=size["v_dim"],
        mlp_dim=size["mlp_dim"],
        num_buckets=size["relative_position_max_dist"],
        max_distance=size["relative_position_max_dist"],
    )
    sizes = {"sequence_length": size["T"], "input_dim": size["input_dim"], "output_dim": size["output_dim"]}
    return Transformer(config, **sizes).double()


@pytest.mark.parametrize("name", names("transformer"))
def test_equals_the_public_transformer(name):
    case = Case("transformer", name)
    model = golden_model(case.size)
    load_parameters(model, case, "param")
    out = model(case["x"]).predictions
    (out * case["cotangent"]).sum().backward()
    assert relative_error(out, case["out"]) < 1e-9
    for flax_name, (parameter, convert) in flax_parameters(model).items():
        assert relative_error(parameter.grad, convert(case[f"grad/{flax_name}"])) < 1e-9, flax_name


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla", "hyla_plus"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", ["t5", "rotary", "sinusoidal", "none"])
@pytest.mark.parametrize("select", [slice(-1, None), slice(-4, None), slice(2, 5)])
def test_answers_at_some_positions_are_those_of_all(mechanism, causal, positions, select):
    config = TransformerConfig(mechanism=mechanism, causal=causal, positions=positions, embed_dim=16, mlp_dim=8)
    model = Transformer(config, sequence_length=9, input_dim=3, output_dim=2).double()
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    key_mask = torch.arange(9) < torch.tensor([[9], [7]])
    every = model(x, key_mask=key_mask, return_codes=True)
    some = model(x, predict_at=select, key_mask=key_mask, return_codes=True)
    torch.testing.assert_close(some.predictions, every.predictions[:, select], rtol=0, atol=1e-12)
    torch.testing.assert_close(some.codes[-1], every.codes[-1][:, :, select], rtol=0, atol=1e-12)
    torch.testing.assert_close(some.codes[0], every.codes[0], rtol=0, atol=0)
    plain = model(x, key_mask=key_mask)
    assert plain.codes is None
    assert torch.equal(plain.predictions, every.predictions)


def test_causal_outputs_do_not_depend_on_the_future():
    config = TransformerConfig(causal=True, embed_dim=16, mlp_dim=8)
    model = Transformer(config, sequence_length=6, input_dim=3, output_dim=2).double()
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    model(x).predictions[:, 3].sum().backward()
    assert (x.grad[:, 4:] == 0).all()
    assert (x.grad[:, :4] != 0).any()


def test_token_table_is_tied_to_the_output():
    config = TransformerConfig(embed_dim=16, mlp="swiglu", norm="rms", causal=True)
    model = Transformer(config, sequence_length=5, vocab_size=11).double()
    tokens = torch.randint(11, (2, 5))
    logits = model(tokens).predictions
    assert logits.shape == (2, 5, 11)
    hidden = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    model(tokens)
    torch.testing.assert_close(logits, hidden[0] @ model.embedding.weight.T / 4.0)
    assert model.head is None
    assert all("bias" not in name for name, _ in model.blocks[0].mlp.named_parameters())
    assert isinstance(model.norm, torch.nn.LayerNorm)
    assert isinstance(model.blocks[0].norm1, torch.nn.RMSNorm)


def test_mechanisms_have_the_same_parameters():
    sizes = {"sequence_length": 8, "input_dim": 5, "output_dim": 1}
    shapes = []
    for mechanism in ("softmax", "linear", "hyla", "hyla_softmax", "hyla_linear"):
        model = Transformer(TransformerConfig(mechanism=mechanism), **sizes)
        shapes.append({name: tuple(p.shape) for name, p in model.named_parameters()})
    assert all(other == shapes[0] for other in shapes)
    deeper = Transformer(TransformerConfig(mechanism="hyla_plus"), **sizes)
    assert dict(deeper.named_parameters())["blocks.0.attention.value_weights.0"].shape == (8, 2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_dim": 17}, r"model.qk_dim = 17 .* multiple of model.num_heads = 8"),
        ({"mechanism": "hylla"}, r"model.mechanism = 'hylla' .* one of softmax, linear"),
        ({"num_heads": 0}, r"model.num_heads = 0"),
        ({"num_heads": 4.0}, r"model.num_heads = 4.0 .* whole number"),
        ({"num_kv_heads": 3}, r"model.num_kv_heads = 3 .* divide model.num_heads = 8"),
        ({"top_k": 5}, r"model.top_k = 5"),
        ({"attention_dropout": 1.0}, r"model.attention_dropout = 1.0"),
        ({"positions": "rotary", "qk_dim": 8}, r"model.qk_dim = 8 .* even"),
        ({"backend": "flash"}, r"model.backend = 'flash' .* auto"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_configs_name_the_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**fields)


def test_too_short_for_its_buckets():
    with pytest.raises(ConfigError, match=r"max_distance = 16 .* 16, the distances that 32 buckets"):
        Transformer(TransformerConfig(num_buckets=32, max_distance=16), sequence_length=9, input_dim=3, output_dim=1)
