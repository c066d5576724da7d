"""The language model for transformers: against our own transformer, against itself decoding, and beside a tiny Llama."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import hyla  # noqa: E402
from hyla.attention import MECHANISMS  # noqa: E402
from hyla.errors import ConfigError, MissingExtraError  # noqa: E402
from hyla.models.causal_lm import CACHE, HylaConfig, HylaForCausalLM, HylaModel, from_softmax  # noqa: E402
from hyla.models.transformer import Transformer, TransformerConfig  # noqa: E402

VOCAB, PAD = 23, 0
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16, "pad_token_id": PAD}
SCHEMES = ["t5", "rotary", "sinusoidal", "none"]
# every mechanism and every position scheme, and the control
MODELS = [f"{mechanism} {scheme}" for mechanism in MECHANISMS for scheme in SCHEMES]
FEW = ["hyla t5", "softmax rotary", "hyla_plus sinusoidal", "linear none", "llama"]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def build(name, dtype=torch.float64, **options):
    if name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None, **options))
    else:
        mechanism, scheme = name.split()
        model = HylaForCausalLM(HylaConfig(mechanism=mechanism, positions=scheme, **SIZES, **options))
    return model.to(dtype).eval()


def draw_ids(*shape):
    return torch.randint(1, VOCAB, shape)


def assert_close(got, expected, tolerance=1e-10):
    assert (got - expected).abs().max() < tolerance * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", ["causal_lm", "swap"])
def test_without_transformers_it_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = Path(hyla.__file__).parent / "models" / f"{name}.py"
    with pytest.raises(MissingExtraError, match=rf"hyla\.models\.{name} needs .* pip install 'hyla\[hf\]'"):
        runpy.run_path(str(path))


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hyla t5", "softmax rotary", "hyla_plus sinusoidal", "linear none"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_it_is_our_transformer(name, norm):
    model = build(name, norm=norm)
    mechanism, positions = name.split()
    config = TransformerConfig(
        mechanism=mechanism,
        num_layers=2,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        qk_dim=16,
        v_dim=16,
        mlp="swiglu",
        mlp_dim=12,
        norm=norm,
        positions=positions,
        causal=True,
    )
    ours = Transformer(config, sequence_length=16, vocab_size=VOCAB).double()
    names = {"model.embed_tokens.": "embedding.", "model.layers.": "blocks.", "model.norm.": "norm."}
    weights = {}
    for key, tensor in model.state_dict().items():
        for theirs, mine in names.items():
            if key.startswith(theirs):
                weights[mine + key.removeprefix(theirs)] = tensor
    ours.load_state_dict(weights)
    ids = draw_ids(2, 9)
    expected = ours(ids, return_codes=True)
    got = model(ids, output_attentions=True, output_hidden_states=True)
    assert_close(got.logits, expected.predictions, 1e-12)
    for codes, wanted in zip(got.attentions, expected.codes, strict=True):
        assert_close(codes, wanted, 1e-12)
    assert [tuple(hidden.shape) for hidden in got.hidden_states] == [(2, 9, 16)] * 3


def test_initialisation_is_that_of_the_paper():
    model = HylaForCausalLM(HylaConfig(vocab_size=5000, num_hidden_layers=1))
    block = model.model.layers[0]
    for weight, std in (
        (model.model.embed_tokens.weight, 128**-0.5),
        (block.attention.q_proj.weight, 128**-0.5),
        (block.attention.out_proj.weight, 128**-0.5),
        (block.mlp.down.weight, 256**-0.5),
        (block.attention.relative_bias.table, 128**-0.5),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attention.q_proj.weight.abs().max() < 2.01 * 128**-0.5 / 0.8796
    assert (block.attention.q_proj.bias == 0).all()
    assert (block.norm1.weight == 1).all()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["hyla t5", "softmax rotary"])
def test_prb_07_causal_with_codes_of_zero_where_nothing_is_seen(name):
    model, ids = build(name), draw_ids(2, 7)
    real = torch.ones(2, 7)
    real[1, :3] = 0
    got = model(ids, attention_mask=real, output_attentions=True)
    for codes in got.attentions:
        assert codes.shape == (2, 4, 7, 7)
        assert (codes.triu(1) == 0).all()
        assert (codes[1, :, :, :3] == 0).all()
        assert (codes[0].tril().abs().amax(0) > 0).equal(torch.ones(7, 7).tril().bool())
    assert got.logits.isfinite().all()
    changed = ids.clone()
    changed[:, -1] = changed[:, -1] % (VOCAB - 1) + 1
    assert torch.equal(
        model(changed, attention_mask=real).logits[:, :-1], model(ids, attention_mask=real).logits[:, :-1]
    )
    assert torch.equal(model(ids, attention_mask=real).logits, got.logits)


def test_prb_07_another_attention_function_is_refused():
    """For a name that transformers has no mask for, it makes none: padding would be attended to."""
    model = build("hyla t5")
    model.config._attn_implementation_internal = "captured"
    with pytest.raises(ConfigError, match="attn_implementation = 'captured' is not possible"):
        model(draw_ids(1, 3))


def test_eager_and_sdpa_masks_are_the_same():
    ids, real = draw_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    model = build("hyla t5")
    logits = []
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        logits.append(model(ids, attention_mask=real).logits)
    assert_close(*logits, 1e-12)


@pytest.mark.parametrize("name", FEW)
def test_packed_sequences_do_not_see_each_other(name):
    model, first, second = build(name), draw_ids(1, 4), draw_ids(1, 5)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert_close(packed, torch.cat([model(first).logits, model(second).logits], 1))


# --- decoding -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, "llama"])
def test_kv_01_cached_decoding_is_the_full_forward(name):
    """From a dynamic and from a static cache, whose empty end holds NaN-free zeros that nobody may see."""
    model, ids = build(name), draw_ids(2, 5)
    whole = model(ids, use_cache=False).logits
    tolerance = 1e-10 if name != "llama" else 1e-6  # its rotary angles are float32
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=7)):
        steps = [model(ids[:, :2], **{CACHE: cache}).logits]
        steps += [model(ids[:, t : t + 1], **{CACHE: cache}).logits for t in range(2, 5)]
        assert_close(torch.cat(steps, 1), whole, tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", [*(name for name in MODELS if "hyla " in name or "t5" in name), "llama"])
def test_left_padded_batches_are_single_prompts(name):
    model, prompt = build(name), draw_ids(1, 4)
    batch = torch.cat([torch.cat([torch.full((1, 3), PAD), prompt], 1), draw_ids(1, 7)])
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    tolerance = 1e-10 if name != "llama" else 1e-6
    assert_close(model(batch, attention_mask=real).logits[:1, 3:], model(prompt).logits, tolerance)
    # a mask as long as a static cache, whose end is still to come
    cache, whole = StaticCache(config=model.config, max_cache_len=9), torch.nn.functional.pad(real, (0, 2))
    steps = [model(batch[:, :5], attention_mask=whole, **{CACHE: cache}).logits]
    steps.append(model(batch[:, 5:], attention_mask=whole, **{CACHE: cache}).logits)
    assert_close(torch.cat(steps, 1)[:1, 3:], model(prompt).logits, tolerance)
    if name in FEW:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
        together = model.generate(batch, attention_mask=real, **options)
        assert torch.equal(together[:1, 3:], model.generate(prompt, **options))
        assert torch.equal(together[1:], model.generate(batch[1:], **options))


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_generate(name):
    """Greedy, beams and samples: the same from a dynamic cache, a static one, and none."""
    model, ids = build(name), draw_ids(2, 4)
    real = torch.tensor([[0, 1, 1, 1], [1] * 4])
    greedy = ids
    for _ in range(3):
        mask = torch.cat([real, torch.ones(2, greedy.shape[1] - 4, dtype=torch.long)], 1)
        greedy = torch.cat([greedy, model(greedy, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    for kind in ({}, {"num_beams": 3}, {"do_sample": True}):
        found = []
        for cached in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            torch.manual_seed(1)
            options = {"max_new_tokens": 3, "pad_token_id": PAD, "do_sample": False} | kind | cached
            found.append(model.generate(ids, attention_mask=real, **options))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert kind or torch.equal(found[0], greedy)


@torch.no_grad()
def test_half_precision_and_a_row_without_keys():
    """bfloat16 follows float32; a sequence that is all padding gives finite numbers and codes of 0, in both."""
    model, ids = build("hyla t5", torch.float32), draw_ids(2, 6)
    real = torch.tensor([[1] * 6, [0] * 6])
    wide = model(ids, attention_mask=real, output_attentions=True)
    narrow = model.to(torch.bfloat16)(ids, attention_mask=real, output_attentions=True)
    assert narrow.logits.dtype == torch.bfloat16
    assert_close(narrow.logits[0].float(), wide.logits[0], 0.05)
    for outputs in (wide, narrow):
        assert outputs.logits.isfinite().all()
        assert all((codes[1] == 0).all() for codes in outputs.attentions)
    assert model.generate(ids, attention_mask=torch.ones(2, 6), max_new_tokens=2, do_sample=False).shape == (2, 8)


def test_both_names_of_the_cache():
    model, ids = build("hyla t5"), draw_ids(1, 4)
    for name in ("cache", "past_key_values"):
        cache = model(ids[:, :3], use_cache=True)[CACHE]
        assert_close(model(ids[:, 3:], **{name: cache}).logits, model(ids).logits[:, 3:])


# --- saving and loading ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    model = build("hyla_plus rotary", torch.float32, activation="silu", depth=4, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_a_folder_holds_the_mechanism_and_loads_as_it(folder):
    stored = json.loads((folder / "config.json").read_text())
    assert (stored["model_type"], stored["mechanism"], stored["depth"], stored["activation"]) == (
        "hyla",
        "hyla_plus",
        4,
        "silu",
    )
    ids = draw_ids(2, 5)
    direct = HylaForCausalLM.from_pretrained(folder)
    auto = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(auto) is HylaForCausalLM
    assert type(AutoConfig.from_pretrained(folder)) is HylaConfig
    assert torch.equal(direct(ids).logits, auto(ids).logits)
    body = AutoModel.from_pretrained(folder)
    assert type(body) is HylaModel
    assert torch.equal(body(ids).last_hidden_state @ direct.lm_head.weight.T, direct(ids).logits)
    network = direct.model.layers[0].attention.mechanism.value_network
    assert (network.depth, network.activation) == (4, "silu")


@pytest.mark.parametrize("field", ["mechanism", "positions", "score_norm", "logit_scale"])
def test_a_missing_field_fails_with_its_name(folder, field):
    rewrite(folder, lambda config: config.pop(field))
    with pytest.raises(ConfigError, match=f"the config of a HYLA model lacks '{field}'"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_unknown_field_fails_with_its_name(folder):
    rewrite(folder, lambda config: config.update(sliding_window=4))
    with pytest.raises(ConfigError, match="has no field 'sliding_window'"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_unknown_mechanism_or_another_type_of_model_fails(folder, tmp_path):
    rewrite(folder, lambda config: config.update(mechanism="hila"))
    with pytest.raises(ConfigError, match="mechanism = 'hila' is not possible: choose from softmax"):
        AutoModelForCausalLM.from_pretrained(folder)
    build("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="model_type = 'llama' is not possible"):
        HylaForCausalLM.from_pretrained(tmp_path / "llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechansm": "hyla"}, "has no field 'mechansm'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 is not possible: must divide num_attention_heads = 16"),
        ({"hidden_size": 100}, "hidden_size = 100 is not possible: a multiple of num_attention_heads = 16"),
        ({"positions": "alibi"}, "positions = 'alibi' is not possible: must be one of none, t5, rotary, sinusoidal"),
        ({"positions": "rotary", "head_dim": 3}, "head_dim = 3 is not possible: rotary"),
        ({"depth": 0}, "depth = 0 is not possible"),
        ({"norm_eps": "small"}, "norm_eps = 'small' is not possible: must be a number"),
    ],
)
def test_bad_configs(options, message):
    with pytest.raises(ConfigError, match=message):
        HylaConfig(**options)


# --- from the weights of a softmax model ----------------------------------------------------------------------------


def test_a_softmax_llama_is_the_llama_itself(tmp_path):
    """So every part but the mechanism is Llama's: grouped heads, rotary, norms, SwiGLU, masks."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    llama, ids = build("llama", torch.float32, head_dim=6, attention_bias=True, **rope), draw_ids(2, 8)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    same = from_softmax(llama, "softmax")
    got, expected = (model(ids, attention_mask=real, labels=ids) for model in (same, llama))
    assert_close(got.logits[0, 2:], expected.logits[0, 2:], 1e-5)
    assert_close(got.logits[1], expected.logits[1], 1e-5)
    apart = {"attention_mask": torch.ones(2, 8), "position_ids": torch.arange(0, 24, 3)[None]}
    assert_close(same(ids, **apart).logits, llama(ids, **apart).logits, 1e-5)
    assert (same(ids, **apart).logits - same(ids).logits).abs().max() > 1e-5
    llama.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="its outputs differ from that model's"):
        hyla = from_softmax(str(tmp_path))
    assert hyla.config.mechanism == "hyla"
    assert hyla.num_parameters() == llama.num_parameters()
    assert torch.equal(hyla.model.layers[1].attention.out_proj.weight, llama.model.layers[1].self_attn.o_proj.weight)
    assert (hyla(ids).logits - llama(ids).logits).abs().max() > 1e-2


def test_from_softmax_of_our_own_and_what_it_cannot_start_from():
    softmax, ids = build("softmax t5"), draw_ids(1, 6)
    with pytest.warns(UserWarning, match="drew 2 further weights of its value networks"):
        deep = from_softmax(softmax, "hyla_plus")
    assert torch.equal(deep.model.layers[1].mlp.up.weight, softmax.model.layers[1].mlp.up.weight)
    assert torch.equal(from_softmax(softmax, "softmax")(ids).logits, softmax(ids).logits)
    with pytest.raises(ConfigError, match="mechanism = 'linear' is not possible: from_softmax starts from softmax"):
        from_softmax(build("linear t5"))
    with pytest.raises(ConfigError, match="mlp_bias = True is not possible"):
        from_softmax(build("llama", mlp_bias=True))


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model, ids = build(name).train(), draw_ids(2, 6)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:  # which 5.24 calls activation checkpointing
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=True).loss.backward()  # a cache would be filled a second time
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain, 1e-12)


def test_trn_08_every_token_weighs_the_same():
    """Micro-batches with 7 and 2 tokens to predict, accumulated, are one batch of 9."""
    model, ids = build("hyla t5", torch.float32), draw_ids(2, 8)
    labels = ids.clone()
    labels[1, :6] = -100
    whole = model(ids, labels=labels).loss
    count = torch.tensor(9)
    parts = [model(ids[row][None], labels=labels[row][None], num_items_in_batch=count).loss for row in range(2)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    log_p = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert whole.item() == pytest.approx(-(log_p[0].sum() + log_p[1, 5:].sum()).item() / 9, rel=1e-6)


def test_the_trainer_trains_and_resumes_it(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs it; runs where it is installed")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    from transformers import Trainer, TrainingArguments, default_data_collator

    data = [{"input_ids": row, "labels": row} for row in (torch.arange(12)[None] + torch.arange(8)[:, None]) % 7 + 1]

    def trained(folder, steps, resume=None):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_steps=4,
            eval_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
        )
        model = build("hyla t5", torch.float32)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=default_data_collator)
        before = trainer.evaluate()["eval_loss"]
        trainer.train(resume_from_checkpoint=resume)
        return before, trainer.evaluate()["eval_loss"], trainer.model

    before, after, model = trained(tmp_path / "a", 8)
    assert after < 0.8 * before
    _, again, resumed = trained(tmp_path / "b", 8, resume=str(tmp_path / "a" / "checkpoint-4"))
    assert again == after
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


# --- evaluation harness ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
def test_the_evaluation_harness_takes_it():
    """lm-evaluation-harness scores continuations, whole texts and generations as the model itself does."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness brings a hundred packages; runs where it is installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvw")}
    core = Tokenizer(models.WordLevel(words, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="a", eos_token="b")
    model = build("hyla t5", torch.float32)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=2, max_length=12, device="cpu")

    def ask(kind, arguments):
        requests = [Instance(request_type=kind, doc={}, arguments=given, idx=0) for given in arguments]
        return getattr(harness, kind)(requests, disable_tqdm=True)

    pairs = [("c d e", " f g"), ("h", " i j k")]
    for (context, continuation), (score, greedy) in zip(pairs, ask("loglikelihood", pairs), strict=True):
        ids = torch.tensor([[words[word] for word in (context + continuation).split()]])
        log_p = model(ids).logits.log_softmax(-1)[0, :-1]
        number = len(continuation.split())
        chosen = log_p.gather(-1, ids[0, 1:, None])[-number:, 0]
        assert score == pytest.approx(chosen.sum().item(), rel=1e-4)
        assert greedy == bool((log_p.argmax(-1) == ids[0, 1:])[-number:].all())
    (text,) = ask("generate_until", [("c d e", {"until": ["b"], "max_gen_toks": 3, "do_sample": False})])
    expected = model.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=3, do_sample=False, pad_token_id=PAD)
    assert [words[word] for word in text.split()] == expected[0, 3:].tolist()
