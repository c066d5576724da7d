"""A trained text run as a folder that transformers loads, text from either, and what else reads a text run."""

import json
import sys

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf; runs where it is installed")
pytest.importorskip("tokenizers", reason="task text needs it; runs where it is installed")

from hyla import cli  # noqa: E402
from hyla.errors import ConfigError, MissingExtraError, RunError  # noqa: E402
from hyla.experiments.samples import draw_samples, text_tokens, write_samples  # noqa: E402
from hyla.latents.collect import collect  # noqa: E402
from hyla.latents.readings import reading_of  # noqa: E402
from hyla.models.causal_lm import HylaForCausalLM  # noqa: E402
from hyla.models.transformer import TransformerConfig, same_document  # noqa: E402
from hyla.runs import read_json  # noqa: E402
from hyla.tasks.fuzzy_logic import LogicConfig  # noqa: E402
from hyla.tasks.text import Text, TextConfig  # noqa: E402
from hyla.training.config import LoopConfig, OptimizerConfig, TrainConfig, config_from_dict  # noqa: E402
from hyla.training.export import export_run  # noqa: E402
from hyla.training.generate import Sampling, generate, open_language_model  # noqa: E402
from hyla.training.loop import load_model, train  # noqa: E402

END = "<|endoftext|>"
WORDS = "the king saw a horse and walked to the old castle, where rain :smile: fell [on] grey stones: Ünï 👋".split()
LENGTH = 16


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `corpus.jsonl`, and `run`, trained on it for 3 steps."""
    folder = tmp_path_factory.mktemp("text")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, draw.integers(0, 20))) for _ in range(150)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "qk_dim": 16, "v_dim": 16, "mlp_dim": 8}
    config = TrainConfig(
        TextConfig(data=(str(folder / "corpus.jsonl"),), vocab_size=280, sequence_length=LENGTH, held_out_fraction=0.1),
        TransformerConfig(mlp="swiglu", norm="rms", causal=True, **sizes),
        OptimizerConfig(lr=0.05, warmup_steps=0),
        LoopConfig(steps=3, batch_size=8, eval_every=2, checkpoint_every=1, keep_checkpoints=3, eval_samples=8),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYLA_CACHE", str(folder / "cache"))
        train(config, folder / "run")
        export_run(folder / "run", folder / "hf")
        yield folder


def run_command(capsys, *arguments):
    """(exit status, output, errors) of a command."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


@pytest.fixture
def terminal(tmp_path, monkeypatch, unchecked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", cli.Terminal(width=100))
    monkeypatch.setattr(cli, "errors", cli.Terminal(width=100, stderr=True))


# --- export -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_transformers_load_it_and_compute_the_same(place):
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "hf")
    ours, task, _ = load_model(place / "run")
    assert type(model) is HylaForCausalLM
    text = "the king saw grey\n stones: Ü👋"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == task.tokenizer.encode([text])[0].tolist()
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (END, END, END)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == task.tokenizer.end_id
    assert model.config.max_position_embeddings == LENGTH
    ids = torch.tensor([[task.tokenizer.end_id, *ids]])
    assert tokenizer(tokenizer.bos_token + text, add_special_tokens=False).input_ids == ids[0].tolist()
    torch.testing.assert_close(model(ids).logits, ours(ids).predictions, atol=1e-5, rtol=1e-5)


def test_the_card_loads_the_model_and_tells_its_scores(place, monkeypatch, capsys):
    card = (place / "hf" / "README.md").read_text()
    monkeypatch.chdir(place / "hf")
    exec(compile(card.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(f"{END}Once")
    result = read_json(place / "run" / "result.json")
    for split, scores in result["splits"].items():
        assert f"| {split} | {scores['loss']:.4f} |" in card
    assert "- **Mechanism**: `hyla`" in card
    assert "`corpus.jsonl`" in card
    assert str(place) not in card  # folders of the machine that it was trained on are nobody's business
    assert card.startswith("---\nlibrary_name: transformers\n")


@pytest.mark.parametrize(("step", "told"), [(2, "At step 2; "), (1, "Not measured at step 1.")])
def test_an_earlier_step_has_its_own_weights_and_scores(step, told, place, tmp_path):
    export_run(place / "run", tmp_path / "early", step)
    assert told in (tmp_path / "early" / "README.md").read_text()
    ours, _, _ = load_model(place / "run", step)
    table = HylaForCausalLM.from_pretrained(tmp_path / "early").lm_head.weight
    assert torch.equal(table, ours.embedding.weight)


def test_all_of_it_or_nothing(place, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"out = .* is not possible: it exists"):
        export_run(place / "run", tmp_path)
    with pytest.raises(RunError):
        export_run(place / "run", tmp_path / "out", step=77)

    def fail(self, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(HylaForCausalLM, "save_pretrained", fail)
        with pytest.raises(OSError, match="disk full"):
            export_run(place / "run", tmp_path / "out")
    train(
        TrainConfig(LogicConfig(num_points=4), training=LoopConfig(steps=1, eval_samples=4, final_eval_samples=4)),
        tmp_path / "logic",
    )
    for refused in (
        lambda: export_run(tmp_path / "logic", tmp_path / "out"),
        lambda: open_language_model(tmp_path / "logic"),
    ):
        with pytest.raises(ConfigError, match=r"task\.name = 'logic' is not possible: .* hyla train text"):
            refused()
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hyla.models.causal_lm")
    with pytest.raises(MissingExtraError, match=r"pip install 'hyla\[hf\]'"):
        export_run(place / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["logic"]


# --- generate ---------------------------------------------------------------------------------------------------------

PROMPTS = ("", "the king", "rain fell on the old castle where a horse walked to grey stones: Ü")  # the last is too long


@torch.no_grad()
def test_greedy_text_is_the_transformers_own_by_whole_forwards(place):
    """Batched over prompts of different lengths, one of them longer than the sequences of training."""
    ours, task, _ = load_model(place / "run")
    tokenizer, end = task.tokenizer, task.tokenizer.end_id
    model, _ = open_language_model(place / "hf")
    found = list(generate(model, tokenizer, PROMPTS, Sampling(num_tokens=12, temperature=0.0)))
    for prompt, generated in zip(PROMPTS, found, strict=True):
        given = tokenizer.encode([prompt])[0].tolist()
        ids = [end, *given]
        for _ in range(12):
            ids.append(int(ours(torch.tensor([ids])).predictions[0, -1].argmax()))
            if ids[-1] == end:
                break
        ended = ids[-1] == end
        ids = ids[1:-1] if ended else ids[1:]
        assert generated == (tokenizer.decode(ids), len(ids), ended)
        assert generated.text.startswith(prompt)
    assert len(tokenizer.encode([PROMPTS[-1]])[0]) > LENGTH


def test_a_text_ends_where_the_model_ends_it(place):
    model, tokenizer = open_language_model(place / "run")
    drawn = [one for one in generate(model, tokenizer, ("the",), Sampling(num_tokens=40, top_k=0, num=66))]
    assert len(drawn) == 66  # more than are written side by side
    assert any(one.ended for one in drawn)
    for one in drawn:
        assert END not in one.text
        assert one.text.startswith("the")
        assert one.ended or one.num_tokens == 40 + len(tokenizer.encode(["the"])[0])


def test_the_same_seed_writes_the_same_and_leaves_torchs_own_generator(place):
    model, tokenizer = open_language_model(place / "run")
    state = torch.random.get_rng_state()
    first, again = (list(generate(model, tokenizer, PROMPTS, Sampling(20, num=2))) for _ in range(2))
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first != list(generate(model, tokenizer, PROMPTS, Sampling(20, num=2, seed=1)))
    likeliest = [
        list(generate(model, tokenizer, PROMPTS, Sampling(20, **how))) for how in ({"temperature": 0.0}, {"top_k": 1})
    ]
    assert likeliest[0] == likeliest[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature = -0.5 is not possible"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"num_tokens": 0}, "num_tokens = 0"),
        ({"num": 0}, "num = 0"),
        ({"num": 2, "temperature": 0.0}, "num = 2 is not possible: at temperature 0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_samplings(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


@pytest.mark.usefixtures("terminal")
def test_the_commands(place, tmp_path, capsys):
    status, out, _ = run_command(capsys, "export", place / "run", "--out", "there")
    assert status == 0
    assert {line.rpartition("/")[2] for line in out.split()} == {path.name for path in (tmp_path / "there").iterdir()}
    flags = ["--prompt", "rain :smile: [on]", "the", "--num-tokens", "30", "-n", "2"]
    told = [run_command(capsys, "generate", folder, *flags) for folder in (place / "run", "there")]
    assert told[0] == told[1]
    status, out, err = told[0]
    assert status == 0
    assert out.count("--- prompt") == 4
    assert out.count("rain :smile: [on]") == 2  # as it is, and no picture or mark-up
    assert f"sequences of {LENGTH}" in err
    status, out, err = run_command(capsys, "generate", "there", "--temperature", "0", "--num-tokens", "3")
    assert (status, err) == (0, "")
    assert "---" not in out
    for mistake, message in (
        (["generate", "nothing", "--temperature", "-1"], "temperature = -1.0"),
        (["generate", "nothing"], "no run folder at nothing"),
        (["generate", "there", "--step", "1"], "step = 1"),
        (["export", place / "run", "--out", "there"], "out = 'there'"),
    ):
        status, _, err = run_command(capsys, *mistake)
        assert status == 2
        assert message in err


# --- sample and latents -----------------------------------------------------------------------------------------------


def text_task(place):
    return Text(TextConfig(data=(str(place / "corpus.jsonl"),), vocab_size=280, sequence_length=LENGTH))


def test_samples_are_the_sequences_that_evaluation_reads(place, tmp_path):
    """Together they are the split, without padding, and documents stand apart."""
    task = text_task(place)
    tokens, end = task.tokens("held_out").tokens, task.tokenizer.end_id
    pieces = [text_tokens(one) for _, one in draw_samples(task, "held_out", 10**6)]
    assert len(pieces) == task.size("held_out")
    assert np.concatenate([piece[:-1] for piece in pieces]).tolist() == tokens[:-1].tolist()
    assert pieces[-1][-1] == end
    shown = list(write_samples(task, "held_out", 4, "text", None))
    for text, piece in zip(shown, pieces, strict=False):
        head, *lines = text.split("\n")
        assert head.startswith("--- text-held_out")
        assert lines.count(END) == piece.count(end)
        assert "".join(lines) == task.tokenizer.decode(piece)
    (path,) = write_samples(task, "train", 3, "parquet", tmp_path)
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert rows == [json.loads(line) for line in write_samples(task, "train", 3, "jsonl", None)]
    for row in rows:
        assert len(row["tokens"]) == LENGTH + 1
        assert row["text"] == task.tokenizer.decode(row["tokens"])


@pytest.mark.usefixtures("terminal")
def test_what_makes_no_sense_of_text_says_so(place, capsys, tmp_path):
    data = ["--data", place / "corpus.jsonl", "--task.vocab-size", "280"]
    for form in ("png", "gif", "support"):
        status, _, err = run_command(capsys, "sample", "text", *data, "--format", form, "--out", "pictures")
        assert status == 2
        assert f"format = '{form}' is not possible: text cannot be drawn" in err
    status, _, err = run_command(capsys, "sample", "text")
    assert status == 2
    assert "task.data = ()" in err
    status, out, _ = run_command(capsys, "sample", "text", *data, "-n", "2")
    assert status == 0
    assert out.count("--- text-train") == 2
    assert list(tmp_path.iterdir()) == []
    config = config_from_dict(read_json(place / "run" / "config.json"))
    with pytest.raises(ConfigError, match=r"task\.name = 'text' is not possible: codes are labelled"):
        reading_of(config)  # as `hyla latents` asks before anything else


@torch.no_grad()
def test_codes_of_a_text_run_are_collected_within_documents(place):
    model, task, _ = load_model(place / "run")
    queries, keys = (-1, 5), (0, 4, 5)
    got = collect(model, task, queries=queries, keys=keys, num_samples=20)
    ids = torch.from_numpy(np.array(got.inputs("held_out")))
    expected = model(ids, return_codes=True).codes
    for layer, codes_BHQK in enumerate(expected):
        chosen = codes_BHQK[:, :, list(queries)][..., list(keys)].permute(0, 2, 3, 1)
        np.testing.assert_allclose(got.codes(layer, "held_out"), chosen.numpy(), atol=1e-5)
    apart = ~same_document(ids == task.boundary_token)[:, 0][:, [15, 5]][..., list(keys)].numpy()
    assert apart.any()
    assert (got.codes(0, "held_out")[apart] == 0).all()
    with pytest.raises(ConfigError, match="num_samples = 4096 is not possible: split train has"):
        collect(model, task, queries=queries, keys=keys)
