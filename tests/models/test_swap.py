"""HYLA in the attention of tiny random models of transformers, which are their own control: swapped to softmax, they
compute what they did."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")

from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache  # noqa: E402

from hyla.attention import MultiHeadAttention, ValueNetwork  # noqa: E402
from hyla.errors import ConfigError  # noqa: E402
from hyla.models.causal_lm import CACHE  # noqa: E402
from hyla.models.swap import LLAMA_LIKE, load_swapped, swap_attention  # noqa: E402

VOCAB, PAD = 23, 0
DIFFERS = "outputs differ from before"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def build(kind="llama", **options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16, "pad_token_id": PAD}
    if kind == "mistral":
        sizes["sliding_window"] = 4
    config = AutoConfig.for_model(kind, **sizes, bos_token_id=None, eos_token_id=None, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def draw_ids(*shape):
    return torch.randint(1, VOCAB, shape)


@torch.no_grad()
@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_swapped_to_softmax_it_computes_what_it_did(kind):
    model, ids = build(kind), draw_ids(2, 8)
    for module in model.modules():  # norms start as ones: make them matter
        if "norm" in type(module).__name__.lower():
            module.weight.data.uniform_(0.5, 1.5)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    before = model(ids, attention_mask=real, output_attentions=True)
    names = list(model.state_dict())
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "attention_mask": real}
    generated = model.generate(ids, **options)
    model.set_attn_implementation("eager")
    weights = model(ids, attention_mask=real, output_attentions=True).attentions
    assert swap_attention(model, "softmax") is model
    after = model(ids, attention_mask=real, output_attentions=True)
    for row, start in ((0, 2), (1, 0)):
        torch.testing.assert_close(after.logits[row, start:], before.logits[row, start:], rtol=0, atol=1e-5)
        for mine, theirs in zip(after.attentions, weights, strict=True):
            torch.testing.assert_close(mine[row, :, start:], theirs[row, :, start:], rtol=0, atol=1e-5)
    assert (after.attentions[0][0, :, :2] == 0).all()  # rows of padding, which see no key
    assert list(model.state_dict()) == names
    assert torch.equal(model.generate(ids, **options), generated)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["hyla", "linear", "hyla_plus"])
def test_cache_masks_codes_and_generation(mechanism):
    model, ids = build(), draw_ids(2, 7)
    with pytest.warns(UserWarning, match=DIFFERS):
        swap_attention(model.double(), mechanism)
    whole = model(ids, use_cache=False, output_attentions=True)
    for codes in whole.attentions:
        assert codes.shape == (2, 4, 7, 7)
        assert (codes.triu(1) == 0).all()
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=10)):
        steps = [model(ids[:, :3], **{CACHE: cache}).logits]
        steps += [model(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(3, 7)]
        torch.testing.assert_close(torch.cat(steps, 1), whole.logits, rtol=0, atol=1e-6)  # Llama's angles are float32
    batch = torch.cat([torch.cat([torch.full((1, 3), PAD), ids[:1, :4]], 1), ids[1:]])
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    alone = model(ids[:1, :4]).logits
    torch.testing.assert_close(model(batch, attention_mask=real).logits[:1, 3:], alone, rtol=0, atol=1e-6)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
    together = model.generate(batch, attention_mask=real, **options)
    assert torch.equal(together[:1, 3:], model.generate(ids[:1, :4], **options))
    static = model.generate(batch, attention_mask=real, cache_implementation="static", **options)
    assert torch.equal(static, together)


def test_it_computes_what_our_layer_computes():
    """One layer of the model, by the layer of hyla with the same weights."""
    model = build()
    with pytest.warns(UserWarning, match=DIFFERS):
        swap_attention(model, layers=[-1])
    assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
    swapped = model.model.layers[1].self_attn
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, qk_dim=24, v_dim=24, bias=False, positions="rotary")
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "out_proj"}
    layer.load_state_dict({f"{ours}.weight": getattr(swapped, name).weight for name, ours in names.items()})
    x, places = torch.randn(2, 5, 16), torch.arange(5)[None]
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min)
    out, _ = swapped(x, position_embeddings=model.model.rotary_emb(x, places), attention_mask=mask)
    torch.testing.assert_close(out, layer(x, causal=True), rtol=0, atol=1e-5)


def test_it_trains():
    model, ids = build(), draw_ids(2, 6)
    with pytest.warns(UserWarning, match="1 weights in each were drawn"):
        swap_attention(model.train(), "hyla_plus")
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(layer.self_attn.value_weights[0].grad.abs().max() > 0 for layer in model.model.layers)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_one_is_loaded_as_it_was_and_never_as_a_llama(tmp_path, tied):
    model, ids = build(tie_word_embeddings=tied), draw_ids(2, 6)
    with pytest.warns(UserWarning, match=DIFFERS):
        swap_attention(model, score_norm="none", value_network=ValueNetwork(3, "gelu"), layers=[1])
    model.save_pretrained(tmp_path)
    again = load_swapped(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="hyla_swapped"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"load this folder with hyla\.models\.swap\.load_swapped"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    del saved["swapped"]["depth"]
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"missing or unknown: \['depth'\]"):
        load_swapped(tmp_path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="model_type = None is not possible"):
        load_swapped(tmp_path)


def test_what_cannot_be_swapped():
    with pytest.raises(ConfigError, match="model_type = 'Linear' is not possible: its attention must be that of llama"):
        swap_attention(torch.nn.Linear(2, 2))
    model = swap_attention(build(), "softmax")
    with pytest.raises(ConfigError, match="already swapped"):
        swap_attention(model)
    with pytest.raises(ConfigError, match="layers = 2 is not possible: there are 2"):
        swap_attention(build(), layers=[2])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="attn_implementation = 'sdpa' is not possible"):
        model(draw_ids(1, 3), use_cache=False)
