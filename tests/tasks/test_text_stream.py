"""A data set that is streamed: the batches of a run do not depend on where it was stopped, or on who reads which part."""

import json
from itertools import pairwise

import pytest
import torch

from hyla.errors import ConfigError
from hyla.tasks.text import NOTHING, Text, TextConfig
from text_corpus import documents

STREAMS, BATCH, LENGTH = 2, 4, 16


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set of 100 documents in four shards, in a folder that `datasets` reads like a hub's."""
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder, texts = tmp_path / "set", documents(120)
    folder.mkdir()
    for shard in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[shard:100:4]]
        (folder / f"train-0000{shard}-of-00004.jsonl").write_text("".join(lines))
    lines = [json.dumps({"text": text}) + "\n" for text in texts[100:]]
    (folder / "validation.jsonl").write_text("".join(lines))
    return f"hf:{folder}"


def text(hub, seed=0, **settings):
    config = {"data": (hub,), "vocab_size": 300, "sequence_length": LENGTH, "num_streams": STREAMS, "shuffle_block": 10}
    return Text(TextConfig(**(config | settings)), seed)


def batches(task, first, count, rows=slice(None)):
    return [task.batch("train", index, BATCH, rows=rows).inputs for index in range(first, first + count)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_is_a_function_of_its_index(hub):
    task = text(hub)
    whole = batches(task, 0, 12)
    assert same(batches(text(hub), 7, 3), whole[7:10])  # reached from the start
    assert same(batches(task, 3, 2), whole[3:5])  # back again
    assert same(batches(task, 11, 1), whole[11:])
    assert not same(batches(text(hub, seed=1), 0, 2), whole[:2])


def test_positions_resume_exactly_and_move_on(hub):
    """TRN-06: stopped twice, and resumed by way of JSON; positions never stand still."""
    whole = batches(text(hub), 0, 60)
    task, read, places = text(hub), [], []
    for stop in (20, 45, 60):
        while len(read) < stop:
            read += batches(task, len(read), 1)
            places.append(json.loads(json.dumps(task.position())))
        task = text(hub)
        task.seek(places[-1])
    assert same(read, whole)
    order = ("epoch", "block", "shard", "row", "position")
    for part in map(str, range(STREAMS)):
        found = [(*(place[part]["documents"][name] for name in order), place[part]["skip"]) for place in places]
        assert all(before < after for before, after in pairwise(found))
        assert [place[part]["number"] for place in places] == [(i + 1) * BATCH // STREAMS for i in range(60)]


def test_resuming_reads_only_what_follows(hub, monkeypatch):
    task = text(hub)
    whole = batches(task, 0, 12)
    later = text(hub)
    later.seek(task.position())
    encoded = []
    tokenizer = later.tokenizer
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, texts: (encoded.extend(texts), encode(self, texts))[1])
    following = batches(later, 12, 1)
    assert len(encoded) < 15
    monkeypatch.undo()
    assert same(following, batches(text(hub), 12, 1))
    assert not same(following, whole[:1])


def test_every_token_of_the_first_epoch_is_trained_on_once(hub):
    task = text(hub)
    expected = {number: document for number, document in enumerate(documents(100))}
    joined = {part: [] for part in range(STREAMS)}
    for batch in batches(task, 0, 60):
        for row, ids in enumerate(batch.tolist()):
            joined[row * STREAMS // BATCH] += ids
    found = [piece for ids in joined.values() for piece in task.tokenizer.decode(ids).split("<|endoftext|>")[1:-1]]
    numbers = [int(piece.partition(":")[0]) for piece in found]
    epoch = numbers[: len(set(numbers))]
    assert all(expected[number] == piece for number, piece in zip(numbers, found, strict=True))
    for part, ids in joined.items():
        mine = [int(p.partition(":")[0]) for p in task.tokenizer.decode(ids).split("<|endoftext|>")[1:-1]]
        assert len(set(mine[:50])) == 50, part  # once each before any comes again
        assert mine[:50] != mine[50 : 50 + len(mine[50:])][:50]
    assert len(epoch) == 100


def test_ranks_read_disjoint_parts_of_one_batch(hub):
    """SWP-03: what two ranks draw is what one draws, without reading the other's documents."""
    whole, ranks = batches(text(hub), 0, 10), [text(hub), text(hub)]
    halves = [batches(task, 0, 10, slice(2 * rank, 2 * rank + 2)) for rank, task in enumerate(ranks)]
    assert same([torch.cat(parts) for parts in zip(*halves, strict=True)], whole)
    assert [set(task.position()) for task in ranks] == [{"0"}, {"1"}]
    together = ranks[0].position() | ranks[1].position()
    resumed = text(hub)  # on one rank
    resumed.seek(together)
    assert same(batches(resumed, 10, 3), batches(text(hub), 10, 3))


def test_held_out_is_the_other_split(hub):
    task = text(hub)
    tokens = task.tokens("held_out")
    pieces = task.tokenizer.decode(tokens.tokens).split("<|endoftext|>")
    assert pieces[1:-1] == documents(120)[100:]
    count = task.size("held_out")
    batch = task.batch("held_out", 0, count, stream="evaluation")
    assert (batch.targets != NOTHING).sum() == tokens.num_predicted
    assert task.size("train") is None
    assert "bits_per_byte" in task.summary("held_out", {"loss": 1.0})
    assert task.summary("train", {"loss": 1.0}) == {"perplexity": pytest.approx(2.71828, rel=1e-5)}


def test_evaluating_does_not_move_training(hub):
    task = text(hub)
    first = batches(task, 0, 2)
    shown = task.batch("train", 0, 4, stream="evaluation").inputs
    assert not torch.equal(shown, first[0])
    assert same(batches(task, 2, 2), batches(text(hub), 2, 2))
    assert torch.equal(task.batch("train", 0, 4, stream="evaluation").inputs, shown)


def test_a_batch_must_divide_into_the_streams(hub):
    with pytest.raises(
        ConfigError, match=r"training.batch_size = 5 is not possible: must be a multiple of task.num_streams = 2"
    ):
        text(hub).batch("train", 0, 5)
