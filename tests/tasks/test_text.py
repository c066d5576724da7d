"""Text as a task: tokenizers, the store of tokens, and sequences that use every token as they should."""

import json
import os
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyla.errors import ConfigError, RunError
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.tasks.base import Task
from hyla.tasks.corpus import Corpus, cache_folder, cut_tail, held_out, tokenize
from hyla.tasks.text import NOTHING, Text, TextConfig
from hyla.tasks.tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer, train_tokenizer
from text_corpus import documents, write_corpus

END = 0  # the id of END_OF_TEXT in tokenizers that are trained here


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder with 150 documents; the cache lies beside it."""
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "corpus", 150)


def text(corpus, seed=0, folder=None, **settings):
    config = {"data": (str(corpus),), "vocab_size": 300, "sequence_length": 16, "held_out_fraction": 0.2} | settings
    return Text(TextConfig(**config), seed, folder)


# --- tokenizers ---


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(documents(50), 400)


@given(st.text())
def test_every_text_comes_back_from_its_tokens(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert END not in ids


def test_a_special_token_spelled_out_in_a_document_is_text(tokenizer):
    (ids,) = tokenizer.encode([f"before {END_OF_TEXT} after"])
    assert tokenizer.end_id == END
    assert END not in ids
    assert tokenizer.decode([*ids, END]) == f"before {END_OF_TEXT} after{END_OF_TEXT}"


def test_a_tokenizer_is_read_from_a_file_and_a_folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        again = load_tokenizer(str(name))
        assert (again.digest, again.vocab_size, again.end_of_text) == (
            tokenizer.digest,
            tokenizer.vocab_size,
            END_OF_TEXT,
        )


def test_a_given_tokenizer_neither_cuts_nor_pads(tokenizer, tmp_path):
    """Sentence encoders come with a truncation, which would cut every document."""
    tokenizer.save(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    data["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": END_OF_TEXT}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    long = "one two three four five six seven"
    assert (load_tokenizer(str(tmp_path)).encode([long])[0] == tokenizer.encode([long])[0]).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.json", "task.tokenizer = .*missing.json' is not possible: no such file"),
        ("broken.json", "task.tokenizer = .*broken.json' is not possible: a tokenizer.json, a folder"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, name, message):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path / name))


def test_the_token_between_documents_must_exist(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    with pytest.raises(ConfigError, match=r"task.end_of_text = '<stop>' is not possible"):
        load_tokenizer(str(tmp_path), "<stop>")
    with pytest.raises(ConfigError, match=r"task\.vocab_size = 256 is not possible"):
        train_tokenizer(["a"], 256)


# --- what is held out ---


@given(st.text(min_size=1), st.floats(0, 0.99))
def test_cutting_a_tail_loses_nothing(text, fraction):
    assert "".join(cut_tail(text, fraction)) == text


def test_copies_of_a_document_lie_on_one_side():
    drawn = [held_out(text, 0.3, 0) for text in documents(400)]
    assert 80 < sum(drawn) < 160
    assert drawn == [held_out(text, 0.3, 0) for text in documents(400)]
    assert drawn != [held_out(text, 0.3, 1) for text in documents(400)]


def test_splits_share_no_document(corpus):
    task = text(corpus)
    found = {split: decoded_documents(task, split) for split in task.splits}
    assert sorted(found["train"] + found["held_out"]) == sorted(documents(150))
    assert not set(found["train"]) & set(found["held_out"])
    assert 15 < len(found["held_out"]) < 45


def test_few_documents_lose_their_tails(tmp_path, monkeypatch):
    """One file of text, as people have it, is split though it is one document."""
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    book = tmp_path / "book.txt"
    book.write_text("\n".join(documents(200)))
    task = text(book)
    train, out = (decoded_documents(task, split) for split in task.splits)
    assert len(train) == len(out) == 1
    assert train[0] + out[0] == book.read_text()
    assert len(out[0]) / len(book.read_text()) == pytest.approx(0.2, abs=0.02)


def test_the_tokenizer_sees_no_held_out_document(corpus):
    task = text(corpus)
    trained = [document for split, document in task._corpus.documents() if split == "train"]
    assert task.tokenizer.digest == train_tokenizer(trained, 300).digest


def decoded_documents(task, split):
    tokens = np.asarray(task.tokens(split).tokens)
    pieces = task.tokenizer.decode(tokens).split(END_OF_TEXT)
    assert pieces[0] == pieces[-1] == ""  # the end-of-text token comes first and last
    assert (tokens[np.asarray(task.tokens(split).starts)] == task.tokenizer.end_id).all()
    return pieces[1:-1]


# --- sequences ---


def test_it_is_a_task(corpus):
    assert isinstance(text(corpus), Task)


def test_an_epoch_predicts_every_token_once(corpus):
    task = text(corpus)
    count = task.size("train")
    batches = [task.batch("train", index, 7) for index in range(-(-count // 7))]
    targets = torch.cat([batch.targets for batch in batches])[:count]
    seen = Counter(targets.flatten().tolist())
    tokens = Counter(np.asarray(task.tokens("train").tokens).tolist())
    tokens[END] -= 1  # the first of all is not predicted
    left = sum((tokens - seen).values())
    assert not seen - tokens
    assert left == task.tokens("train").num_predicted - count * 16 < 16  # what does not fill a sequence


def test_targets_are_the_next_inputs(corpus):
    task = text(corpus)
    batch = task.batch("train", 2, 5)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.shape == batch.targets.shape == (5, 16)


def test_sequences_are_pieces_of_documents(corpus):
    """Between two ends of a text lies a part of one document, a whole one where both are in sight."""
    task = text(corpus, sequence_length=200)
    known = documents(150)
    for row in task.batch("train", 0, 4).inputs:
        first, *whole, last = task.tokenizer.decode(row.tolist()).split(END_OF_TEXT)
        assert len(whole) > 1
        assert set(whole) <= set(known)
        assert any(document.endswith(first) for document in known)
        assert any(document.startswith(last) for document in known)


def test_epochs_have_orders_of_their_own(corpus):
    task = text(corpus)
    count = task.size("train")
    epochs = [
        [task._training_sequence(epoch * count + i, "training").tobytes() for i in range(count)] for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1]
    assert len(set(epochs[0])) > 0.9 * count


def test_batches_are_functions_of_seed_and_index(corpus):
    task, again, other = text(corpus), text(corpus), text(corpus, seed=1)
    far = task.batch("train", 1_000, 4)  # many epochs on
    assert torch.equal(far.inputs, again.batch("train", 1_000, 4).inputs)
    assert not torch.equal(far.inputs, other.batch("train", 1_000, 4).inputs)
    rows = task.batch("train", 3, 10, rows=slice(4, 7))
    assert torch.equal(rows.inputs, task.batch("train", 3, 10).inputs[4:7])


def test_evaluation_reads_held_out_text_once_and_in_order(corpus):
    task = text(corpus)
    count = task.size("held_out")
    batches = [task.batch("held_out", index, 8, stream="evaluation") for index in range(-(-count // 8))]
    assert sum(map(len, batches)) == count
    targets = torch.cat([batch.targets for batch in batches]).flatten()
    assert targets[targets != NOTHING].tolist() == task.tokens("held_out").tokens[1:].tolist()
    assert (targets != NOTHING).sum() == task.tokens("held_out").num_predicted


def test_means_weigh_every_token_equally(corpus):
    """The last sequence of held-out text is short: the loss is the mean over tokens all the same."""
    from hyla.training.loop import evaluate

    task = text(corpus)
    model = small_model(task)
    found = evaluate(model, task, ["held_out"], 10_000)["held_out"]
    assert found["num_samples"] == task.size("held_out")
    total = 0.0
    for index in range(task.size("held_out")):
        batch = task.batch("held_out", index, 1, stream="evaluation")
        total += torch.nn.functional.cross_entropy(
            model(batch.inputs).predictions[0], batch.targets[0], ignore_index=NOTHING, reduction="sum"
        ).item()
    assert found["loss"] == pytest.approx(total / task.tokens("held_out").num_predicted, rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    bits = found["loss"] * task.tokens("held_out").num_predicted / task.tokens("held_out").num_bytes / np.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits)


def small_model(task, **settings):
    options = {
        "num_layers": 2,
        "embed_dim": 16,
        "num_heads": 2,
        "qk_dim": 8,
        "v_dim": 8,
        "mlp": "swiglu",
        "mlp_dim": 16,
    }
    config = TransformerConfig(causal=True, **(options | settings))
    length = task.sequence_length
    return Transformer(
        config, sequence_length=length, vocab_size=task.vocab_size, boundary_token=task.boundary_token
    ).eval()


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla", "hyla_plus"])
@pytest.mark.parametrize("positions", ["t5", "rotary", "none"])
def test_attention_does_not_cross_documents(corpus, mechanism, positions):
    """What comes before a document changes nothing in it; unless attention may cross."""
    for crossing in (False, True):
        task = text(corpus, cross_documents=crossing)
        model = small_model(task, mechanism=mechanism, positions=positions).double()
        inputs = torch.tensor([[5, 6, 7, END, 8, 9, END, 10], [11, 12, 13, END, 8, 9, END, 10]])
        out = model(inputs).predictions
        assert torch.equal(out[0, 3:], out[1, 3:]) is not crossing
        alone = model(inputs[:, 3:]).predictions
        assert torch.allclose(out[:, 3:6], alone[:, :3], rtol=0, atol=1e-12) is not crossing


def test_gradients_do_not_cross_documents(corpus):
    model = small_model(text(corpus)).double()
    x = torch.tensor([[5, 6, END, 8, 9]])
    embedded = model.embed(x).detach().requires_grad_()
    model.embed = lambda inputs: embedded
    model(x).predictions[0, 3:].square().sum().backward()
    assert (embedded.grad[0, :2] == 0).all()
    assert (embedded.grad[0, 2:] != 0).any(-1).all()


# --- the cache, and what a run keeps ---


def test_tokens_are_made_once(corpus, monkeypatch):
    first = text(corpus)
    first.batch("train", 0, 2)
    monkeypatch.setattr(TextTokenizer, "encode", lambda *arguments: pytest.fail("tokenised again"))
    again = text(corpus)
    assert torch.equal(again.batch("train", 0, 2).inputs, first.batch("train", 0, 2).inputs)
    assert text(corpus, sequence_length=8).size("train") >= 2 * first.size("train")


CACHED = ("train.bin", "held_out.bin", "train_starts.npy", "held_out_starts.npy", "info.json", "tokenizer.json")


@pytest.mark.parametrize("file", CACHED)
@pytest.mark.parametrize("left", [0, 8, 100])
def test_tokens_that_were_cut_short_are_made_again(corpus, file, left):
    """Else a run would train on what is left of them and nobody would notice."""
    before = text(corpus)
    batches = {split: before.batch(split, 0, 2) for split in ("train", "held_out")}
    found = list(cache_folder().rglob(file))
    assert found
    for path in found:
        assert path.stat().st_size > left
        os.truncate(path, left)
    again = text(corpus)
    for split, batch in batches.items():
        assert torch.equal(again.batch(split, 0, 2).inputs, batch.inputs)


def test_of_two_that_tokenise_at_once_one_does(corpus, monkeypatch):
    counts = []
    write = Corpus._write
    monkeypatch.setattr(Corpus, "_write", lambda *a: (counts.append(1), write(*a))[1])
    tokenizer = text(corpus).tokenizer
    threads = [threading.Thread(target=lambda: text(corpus)._corpus.tokens(tokenizer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 1


def test_nothing_is_left_of_tokens_that_could_not_be_made(corpus, unchecked):
    (corpus / "more.jsonl").write_text('{"text": "fine"}\n{"text": 7}\n')
    with pytest.raises(ConfigError, match=r"more.jsonl"):
        text(corpus).batch("train", 0, 2)
    assert not list(cache_folder().rglob("*.bin"))


def test_a_run_keeps_its_tokenizer_and_notices_changed_text(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    task = text(corpus)
    task.write(run)
    assert {"tokenizer.json", "tokenizer_config.json", "data.json"} == {path.name for path in run.iterdir()}
    resumed = text(corpus, folder=run)
    assert torch.equal(resumed.batch("train", 0, 2).inputs, task.batch("train", 0, 2).inputs)
    (corpus / "documents.jsonl").write_text(json.dumps({"text": "something else " * 50}) + "\n")
    assert text(corpus, folder=run).tokenizer.digest == task.tokenizer.digest  # which needs no text
    with pytest.raises(RunError, match=r"not what it was trained on: .*documents.jsonl changed"):
        text(corpus, folder=run).batch("train", 0, 2)


def test_the_same_text_in_another_folder_is_the_same(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    text(corpus).write(run)
    corpus.rename(tmp_path / "moved")
    moved = text(tmp_path / "moved", folder=run)
    assert len(moved.batch("train", 0, 2)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ()}, r"task.data = \(\) is not possible: name files"),
        ({"sequence_length": 100_000}, r"task.data = .* split train has [\d,]+ tokens, and needs at least 100,000"),
        (
            {"held_out_fraction": 1e-9, "held_out_by": "document"},
            "split held_out has 0 tokens.*, or --task.held-out-by tail",
        ),
        ({"held_out_fraction": 1.0}, "task.held_out_fraction = 1.0 is not possible"),
        ({"held_out_fraction": 0.0}, "task.held_out_fraction = 0.0 is not possible: above 0"),
        ({"vocab_size": 10}, "task.vocab_size = 10 is not possible: from 257"),
        ({"data": ("hf:a", "b")}, "files and folders, or one hf:NAME"),
        ({"held_out_by": "word"}, "task.held_out_by = 'word' is not possible: must be one of auto, document, tail"),
    ],
)
def test_what_cannot_be_is_refused_by_name(corpus, unchecked, settings, message):
    with pytest.raises(ConfigError, match=message):
        text(corpus, **settings).batch("train", 0, 2)


def test_tokens_in_memory_are_those_on_disk(corpus):
    task = text(corpus)
    texts = [document for split, document in task._corpus.documents() if split == "held_out"]
    ours, stored = tokenize(texts, task.tokenizer), task.tokens("held_out")
    assert np.array_equal(ours.tokens, stored.tokens)
    assert np.array_equal(ours.starts, stored.starts)
    assert ours.num_bytes == stored.num_bytes == sum(len(text.encode()) for text in texts)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 9))
def test_any_documents_become_sequences(tokenizer, texts, length):
    """Oracle: the tokens joined by hand."""
    joined = np.concatenate([np.concatenate([[END], tokenizer.encode([text])[0]]) for text in texts] + [[END]])
    assert np.array_equal(tokenize(texts, tokenizer).tokens, joined)
    task = Text(replace(TextConfig(), sequence_length=length))
    task.__dict__ |= {
        "tokenizer": tokenizer,
        "_local": ({split: tokenize(texts, tokenizer) for split in task.splits}, {}),
    }
    rows = [task.batch("held_out", i, 1, stream="evaluation") for i in range(task.size("held_out"))]
    assert torch.cat([row.targets[row.targets != NOTHING] for row in rows]).tolist() == joined[1:].tolist()
    if task.size("train"):
        ids = {tuple(task._training_sequence(i, "training")) for i in range(task.size("train"))}
        assert all(len(row) == length + 1 for row in ids)
