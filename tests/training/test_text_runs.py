"""Runs of task text: resumed exactly, from files and from a stream, and measured on other text."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from hyla import cli
from hyla.errors import ConfigError, RunError
from hyla.runs import open_run
from hyla.training.checkpoint import MODEL, OPTIMIZER, checkpoint_path
from hyla.training.config import TrainConfig, preset_c4_50m, preset_default, preset_tiny
from hyla.training.loop import Trainer, resume, train
from text_corpus import documents, write_corpus

STEPS = 12


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return write_corpus(tmp_path / "corpus", 130)


def config_of(data, **task) -> TrainConfig:
    base = preset_tiny("text")
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 16}
    loop = {"steps": STEPS, "batch_size": 4, "log_every": 1, "eval_every": 5, "checkpoint_every": 4, "threads": 1}
    loop |= {"eval_samples": 8, "final_eval_samples": 20, "keep_checkpoints": 9}
    return replace(
        base,
        task=replace(base.task, data=(str(data),), vocab_size=300, sequence_length=16, **task),
        model=replace(base.model, attention_dropout=0.1, **sizes),
        optimizer=replace(base.optimizer, warmup_steps=2),
        training=replace(base.training, **loop),
    )


def content(path):
    """What must be equal bit for bit."""
    lines = [{k: v for k, v in line.items() if k != "steps_per_second"} for line in open_run(path).metrics.read()]
    last = checkpoint_path(path / "checkpoints", STEPS)
    return lines, open_run(path).result["splits"], (last / MODEL).read_bytes(), (last / OPTIMIZER).read_bytes()


def stopped_at(config, path, *steps):
    """Train, stopped after each of `steps` and gone on with."""
    trainer = Trainer.start(config, path)
    for step in steps:
        with trainer.recording():
            while trainer.step < step:
                trainer.record(*trainer.update(1e-3), 1e-3)
            trainer.save()
        trainer = Trainer.resume(path)
        assert trainer.step == step
    return trainer


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_resumed_twice_is_the_run_left_alone(corpus, tmp_path, streamed):
    data, task = corpus, {}
    if streamed:
        folder = tmp_path / "set"
        folder.mkdir()
        for name, texts in (("train", documents(150)[:120]), ("validation", documents(150)[120:])):
            lines = [json.dumps({"text": text}) + "\n" for text in texts]
            (folder / f"{name}.jsonl").write_text("".join(lines))
        data, task = f"hf:{folder}", {"num_streams": 2, "shuffle_block": 7}
    config = config_of(data, **task)
    config = replace(config, optimizer=replace(config.optimizer, schedule="constant", warmup_steps=0, lr=1e-3))
    train(config, tmp_path / "whole")
    stopped_at(config, tmp_path / "parts", 3, 7).run()
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    if streamed:
        places = [
            json.loads((checkpoint_path(tmp_path / "parts" / "checkpoints", step) / "state.json").read_text())["data"]
            for step in (3, 4, 7, 8, 12)
        ]
        assert [place["0"]["number"] for place in places] == [2 * step for step in (3, 4, 7, 8, 12)]


def test_a_killed_run_resumes(corpus, tmp_path):
    """kill -9 in the middle; the weights end bit for bit as they would have."""
    path, code = tmp_path / "killed", "import sys; from hyla.training.loop import resume; resume(sys.argv[1])"
    config = config_of(corpus)
    train(config, tmp_path / "whole")
    Trainer.start(config, path)
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 100
    while not checkpoint_path(path / "checkpoints", 4).exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if open_run(path).result is None:
        resume(path)
    assert content(path)[2:] == content(tmp_path / "whole")[2:]


def test_text_that_has_changed_is_not_trained_on(corpus, tmp_path):
    stopped_at(config_of(corpus), tmp_path / "run", 3)
    (corpus / "documents.jsonl").write_text('{"text": "%s"}\n' % ("other " * 200))
    with pytest.raises(RunError, match=r"is not what it was trained on: .*documents.jsonl changed"):
        Trainer.resume(tmp_path / "run").run()


def test_any_text_is_measured_from_the_command_line(corpus, tmp_path, capsys):
    train(config_of(corpus), tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text(" ".join(documents(20)))
    found = {}
    for stride in (1, 8, 16):
        out = tmp_path / f"{stride}.json"
        words = ["evaluate", str(tmp_path / "run"), "--data", str(other), str(corpus), "--json", str(out)]
        assert cli.main([*words, "--stride", str(stride)]) == 0
        found[stride] = json.loads(out.read_text())
    assert "perplexity" in capsys.readouterr().out
    counts = {score["data"][str(other)]["num_tokens"] for score in found.values()}
    assert len(counts) == 1
    assert {score["stride"] for score in found.values()} == {1, 8, 16}
    assert found[1]["data"][str(corpus)]["num_documents"] == 130


@pytest.mark.parametrize(("words", "message"), [
    (["--stride", "2"], "stride = 2 is not possible: it is for --data"),
    (["--data", "x.txt", "--split", "train"], "give --split or --data"),
    (["--data", "x.txt"], "task.data = .*x.txt"),
    (["--data", "README.md", "--stride", "17"], "stride = 17 is not possible"),
])  # fmt: skip
def test_mistakes_in_measuring_are_named(corpus, tmp_path, capsys, unchecked, words, message):
    import re

    stopped_at(config_of(corpus), tmp_path / "run", 1)
    assert cli.main(["evaluate", str(tmp_path / "run"), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_data_are_for_text_alone(tmp_path, capsys):
    base = preset_default("logic")
    config = replace(base, training=replace(base.training, steps=1, batch_size=2, eval_samples=2, final_eval_samples=2))
    config = replace(
        config,
        model=replace(config.model, embed_dim=16, mlp_dim=8),
        optimizer=replace(config.optimizer, warmup_steps=0),
    )
    train(config, tmp_path / "logic")
    assert cli.main(["evaluate", str(tmp_path / "logic"), "--data", "x.txt"]) == 2
    assert "is of task logic, not text" in capsys.readouterr().err


def test_nothing_is_made_where_text_is_missing(tmp_path, capsys, unchecked):
    for words in ([], ["--data", str(tmp_path / "nowhere")]):
        assert cli.main(["train", "text", *words, "--out", str(tmp_path / "run")]) == 2
        assert "task.data = " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_cannot_work_is_refused_before_anything_is_read(corpus):
    config = config_of(corpus)
    with pytest.raises(ConfigError, match=r"model.causal = False is not possible"):
        replace(config, model=replace(config.model, causal=False))
    streamed = replace(config.task, data=("hf:somebody/something",), num_streams=3)
    with pytest.raises(ConfigError, match=r"training.batch_size = 4 .* multiple of task.num_streams = 3"):
        replace(config, task=streamed)


def test_a_sequence_longer_than_the_text_is_refused_at_once(corpus, tmp_path):
    """Before a model with as many buckets of positions is built."""
    config = config_of(corpus)
    with pytest.raises(ConfigError, match="needs at least 1,000,000"):
        train(replace(config, task=replace(config.task, sequence_length=1_000_000)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_knows_nothing_of_a_document_is_refused(corpus, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(documents(50), trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False))
    tokenizer.save(str(tmp_path / "words.json"))
    (corpus / "other.txt").write_text("Привет мир")
    config = config_of(corpus, tokenizer=str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match="knows nothing of a document that begins 'Привет мир'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_elsewhere_says_where_its_text_was(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of("corpus")
    stopped_at(config, tmp_path / "run", 3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"the run was started where this is .*corpus/documents.jsonl"):
        Trainer.resume(tmp_path / "run").run()


def test_the_papers_model_has_50_million_parameters():
    """The vocabulary is that of T5: 32,100 tokens."""
    from hyla.models.transformer import Transformer

    config = preset_c4_50m("text")
    import torch

    with torch.device("meta"):
        model = Transformer(config.model, sequence_length=config.task.sequence_length, vocab_size=32_100)
    assert model.num_parameters == pytest.approx(50e6, rel=0.02)
    loop = config.training
    assert loop.steps * loop.batch_size * config.task.sequence_length == pytest.approx(130e9, rel=1e-4)
    assert loop.batch_size % config.task.num_streams == 0
