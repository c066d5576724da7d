"""Perplexity of a text (TXT-01): per token, every token scored once at any stride, padding never."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyla.errors import ConfigError
from hyla.models.base import ModelOutput
from hyla.models.transformer import Transformer, TransformerConfig
from hyla.tasks.text import Text, TextConfig, perplexity
from hyla.training.perplexity import score_data, score_tokens, windows
from text_corpus import documents, write_corpus


@given(st.integers(2, 300), st.integers(1, 70), st.data())
def test_every_token_but_the_first_is_scored_once(num_tokens, length, data):
    stride = data.draw(st.integers(1, length))
    scored = []
    for first, last, begin in windows(num_tokens, length, stride):
        assert 0 <= first < begin < last <= num_tokens
        assert last - first <= length + 1
        enough = first == 0 or begin - first >= length - stride + 1
        assert enough
        scored += range(begin, last)
    assert scored == list(range(1, num_tokens))


@pytest.mark.parametrize("stride", [32, 64, 63, 1])
def test_a_thousand_tokens_are_999_predictions(stride):
    assert sum(last - scored for _, last, scored in windows(1_000, 64, stride)) == 999


@pytest.mark.parametrize(("window", "stride", "message"), [
    (0, 1, "window = 0 is not possible: at least 1"),
    (8, 0, "stride = 0 is not possible: from 1 to the window, 8"),
    (8, 9, "stride = 9 is not possible: from 1 to the window, 8: beyond it tokens would be left out"),
])  # fmt: skip
def test_windows_that_would_leave_tokens_out_are_refused(window, stride, message):
    with pytest.raises(ConfigError, match=message):
        list(windows(10, window, stride))


class Told(torch.nn.Module):
    """A model whose loss on every token is known: token n is predicted with a loss of `losses[n]`."""

    def __init__(self, losses):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))
        self.losses = torch.tensor(losses)

    def forward(self, inputs):
        """The next token is the present one plus 1."""
        following = (inputs + 1).clamp(max=len(self.losses) - 1)
        chance = torch.exp(-self.losses[following])
        logits = torch.log((1 - chance) / (len(self.losses) - 1))[..., None].repeat(1, 1, len(self.losses))
        return ModelOutput(logits.scatter(-1, following[..., None], torch.log(chance)[..., None]))


def test_windows_count_by_their_tokens(unchecked):
    """9 tokens at loss 1 and 1 token at loss 9: exp(1.8), not exp of the mean of 1 and 9."""
    model = Told([0.5] + [1.0] * 9 + [9.0])
    tokens = torch.arange(11)
    assert [last - scored for _, last, scored in windows(11, 9, 9)] == [9, 1]
    for batch_size in (1, 2):
        score = score_tokens(model, [(tokens, 11)], window=9, stride=9, batch_size=batch_size).as_dict()
        assert score["num_tokens"] == 10
        assert score["loss"] == pytest.approx(1.8, rel=1e-5)
        assert score["perplexity"] == pytest.approx(6.0496, rel=1e-4)
        assert score["bits_per_byte"] == pytest.approx(18 / 11 / math.log(2), rel=1e-5)


def small_model(mechanism="hyla", vocab_size=50, length=64, **settings):
    config = TransformerConfig(
        mechanism=mechanism,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        qk_dim=8,
        v_dim=8,
        mlp_dim=16,
        causal=True,
        **settings,
    )
    return Transformer(config, sequence_length=length, vocab_size=vocab_size).eval()


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "hyla"])
@pytest.mark.parametrize("stride", [32, 63, 64])
def test_scores_are_those_of_windows_read_one_by_one(mechanism, stride):
    """The result does not depend on the batch size: padding changes nothing and is not scored."""
    model = small_model(mechanism)
    texts = [torch.randint(50, (length,)) for length in (400, 5, 2, 130)]
    total = count = 0
    for tokens in texts:
        for first, last, scored in windows(len(tokens), 64, stride):
            piece = tokens[first:last]
            losses = torch.nn.functional.cross_entropy(
                model(piece[None, :-1]).predictions[0], piece[1:], reduction="none"
            )
            total += losses[scored - first - 1 :].double().sum().item()
            count += last - scored
    for batch_size in (1, 2, 7, 100):
        score = score_tokens(model, [(t, 10) for t in texts], window=64, stride=stride, batch_size=batch_size)
        assert score.num_tokens == count == 399 + 4 + 1 + 129
        assert score.loss == pytest.approx(total / count, rel=1e-6)
    assert model.training is False


def test_more_context_at_smaller_strides():
    """A token is scored with at least window - stride tokens before it: with stride 1 all but the first window's are."""
    found = [min(scored - first for first, _, scored in list(windows(500, 64, stride))[1:]) for stride in (1, 32, 64)]
    assert found == [64, 33, 1]


def test_the_perplexity_of_a_hopeless_model_is_infinite():
    assert perplexity(1e4) == math.inf
    assert perplexity(0.0) == 1.0


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("HYLA_CACHE", str(tmp_path / "cache"))
    corpus = write_corpus(tmp_path / "corpus", 120)
    return Text(TextConfig(data=(str(corpus),), vocab_size=300, sequence_length=16))


def test_a_file_is_scored_document_by_document(task, tmp_path):
    """Every text token and every end of a text is predicted, the first from the end-of-text token alone."""
    model = small_model(vocab_size=task.vocab_size, length=16)
    other = tmp_path / "other.jsonl"
    texts = documents(30)[20:]
    other.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    score = score_data(model, task, str(other))
    lengths = [len(ids) for ids in task.tokenizer.encode(texts)]
    assert (score.num_documents, score.num_tokens) == (10, sum(lengths) + 10)
    assert score.num_bytes == sum(len(text.encode()) for text in texts)
    each = [score_data(model, task, str(path)) for path in separate(texts, tmp_path)]
    assert score.loss == pytest.approx(sum(one.total for one in each) / score.num_tokens, rel=1e-6)


def separate(texts, folder):
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_text(text)
        yield path


def test_what_cannot_be_scored_is_refused(task, tmp_path):
    model = small_model(vocab_size=task.vocab_size, length=16)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="no text to score"):
        score_data(model, task, str(tmp_path / "empty.txt"))
    with pytest.raises(ConfigError, match="nowhere"):
        score_data(model, task, str(tmp_path / "nowhere.txt"))
    with pytest.raises(ConfigError, match="stride = 17"):
        score_data(model, task, str(tmp_path / "empty.txt"), stride=17)
