"""A Transformer as a language model for transformers: the same logits, packed or not, and the same words one by one."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")

from hyla.attention import MECHANISMS  # noqa: E402
from hyla.errors import ConfigError  # noqa: E402
from hyla.models.causal_lm import (  # noqa: E402
    HylaForCausalLM,
    document_mask,
    document_positions,
    from_transformer,
)
from hyla.models.transformer import Transformer, TransformerConfig  # noqa: E402

VOCAB, END = 23, 3
SIZES = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "qk_dim": 24, "v_dim": 24}
SIZES |= {"mlp": "swiglu", "mlp_dim": 12, "norm": "rms", "causal": True}
SCHEMES = ["t5", "rotary", "sinusoidal", "none"]
# every mechanism with one scheme, and every scheme with HYLA
PAIRS = [(mechanism, SCHEMES[i % len(SCHEMES)]) for i, mechanism in enumerate(MECHANISMS)]
PAIRS += [("hyla", scheme) for scheme in SCHEMES if ("hyla", scheme) not in PAIRS]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def build(boundary_token=END, vocab_size=VOCAB, **options):
    model = Transformer(
        TransformerConfig(**SIZES | options), sequence_length=11, vocab_size=vocab_size, boundary_token=boundary_token
    )
    for parameter in model.parameters():  # biases begin at 0 and norms at 1, which would hide a mistake in their names
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def draw_ids(*shape):
    """Token ids, none of them the end of text."""
    ids = torch.randint(0, VOCAB - 1, shape)
    return ids + (ids >= END)


def assert_close(got, expected, tolerance=1e-10):
    assert (got - expected).abs().max() < tolerance * expected.abs().max().clamp(min=1)


def packed_ids():
    """Texts of several lengths, one of them empty; the second sequence begins amid a text."""
    ids = draw_ids(2, 11)
    for row, place in ((0, 0), (0, 5), (0, 6), (1, 4), (1, 10)):
        ids[row, place] = END
    return ids


@torch.no_grad()
@pytest.mark.parametrize(("mechanism", "positions"), PAIRS)
def test_logits_are_the_transformers(mechanism, positions):
    """A width over all heads of 24 in a stream of 16, and sequences of any length."""
    ours = build(mechanism=mechanism, positions=positions)
    model = from_transformer(ours)
    assert not model.training
    for length in (4, 17):
        ids = torch.cat([torch.full((2, 1), END), draw_ids(2, length)], 1)
        assert_close(model(ids).logits, ours(ids).predictions)
    ids = packed_ids()
    if positions == "sinusoidal":
        options = {"attention_mask": document_mask(ids, END)}
    else:
        options = {"position_ids": document_positions(ids, END)}
    packed = model(ids, use_cache=False, **options).logits
    assert_close(packed, ours(ids).predictions)
    assert (packed - model(ids).logits).abs().max() > 1e-6  # without them, attention crosses the boundary


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layer", "bias": False, "qk_norm": True},
        {"score_norm": "softmax", "depth": 4, "activation": "silu"},
        {"num_buckets": 5, "max_distance": 40},
        {"num_kv_heads": None, "attention_dropout": 0.1},
        {"positions": "rotary", "bidirectional": True},
    ],
)
def test_every_choice_of_the_config_arrives(options, tmp_path):
    ours, ids = build(**options), draw_ids(2, 9)
    from_transformer(ours).save_pretrained(tmp_path)
    model = HylaForCausalLM.from_pretrained(tmp_path)  # so they are in its config, not in its weights alone
    assert model.dtype == torch.float64
    assert_close(model(ids).logits, ours(ids).predictions)
    for name in ("attention_dropout", "dropout_shared"):
        assert getattr(model.config, name) == getattr(ours.config, name)


def test_documents():
    ids = torch.tensor([[7, 8, END, 9, END, END, 1]])
    assert document_positions(ids, END).tolist() == [[0, 1, 0, 1, 0, 0, 1]]
    mask = document_mask(ids, END)
    assert mask.shape == (1, 1, 7, 7)
    first = [0, 0, 2, 2, 4, 5, 5]  # the first key that each query sees
    assert mask[0, 0].tolist() == [[first[query] <= key <= query for key in range(7)] for query in range(7)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("mechanism", "positions"), [("softmax", "t5"), ("hyla_plus", "rotary")] + [("hyla", scheme) for scheme in SCHEMES]
)
def test_generation_with_a_cache_is_greedy_by_whole_forwards(mechanism, positions):
    ours = build(mechanism=mechanism, positions=positions)
    model = from_transformer(ours)
    ids = torch.cat([torch.full((2, 1), END), draw_ids(2, 3)], 1)
    got = model.generate(ids, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(ids))
    ended = torch.zeros(2, dtype=torch.bool)
    for _ in range(got.shape[1] - ids.shape[1]):
        following = ours(ids).predictions[:, -1].argmax(-1).masked_fill(ended, END)
        ended |= following == END
        ids = torch.cat([ids, following[:, None]], 1)
    assert torch.equal(got, ids)


def test_weights_are_copies_and_tokens_have_their_roles():
    ours = build()
    model = from_transformer(ours)
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (END, END, END)
    assert model.generation_config.eos_token_id == END
    assert config.max_position_embeddings == 11
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == ours.num_parameters
    before = model.lm_head.weight.clone()
    with torch.no_grad():
        ours.embedding.weight.zero_()
    assert torch.equal(model.lm_head.weight, before)
    crossing = from_transformer(build(None), end_of_text=5, sequence_length=64).config
    assert (crossing.eos_token_id, crossing.max_position_embeddings, crossing.num_buckets) == (5, 64, 11)
    assert from_transformer(build(None)).config.eos_token_id is None
    assert from_transformer(build().train()).training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp": "gelu"}, "model.mlp = 'gelu' is not possible: HylaForCausalLM has only 'swiglu'"),
        ({"mlp": "mixture"}, "model.mlp = 'mixture'"),
        ({"causal": False}, "model.causal = False"),
        ({"qk_dim": 16}, "model.qk_dim = 16 is not possible: .* model.v_dim = 24"),
        ({"bidirectional": True, "num_buckets": 8}, "model.bidirectional = True"),
    ],
)
def test_what_it_cannot_be_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        from_transformer(build(**options))


def test_only_token_ids_and_one_end_of_text():
    ours = Transformer(TransformerConfig(**SIZES), sequence_length=4, input_dim=2, output_dim=1)
    with pytest.raises(ConfigError, match="vocab_size = None is not possible"):
        from_transformer(ours)
    with pytest.raises(ConfigError, match=r"end_of_text = 5 is not possible: .* boundary token, 3"):
        from_transformer(build(), end_of_text=5)
