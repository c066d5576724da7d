"""How well a language model predicts a text: every token is scored once, whatever the windows that the model reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hyla.errors import ConfigError, check
from hyla.models.base import Model
from hyla.tasks.corpus import tokenize
from hyla.tasks.documents import find_files, read_documents
from hyla.tasks.hub import PREFIX, HubSource, read_split
from hyla.tasks.text import LARGEST_LOGITS, NOTHING, Text, perplexity, token_scores


class Window(NamedTuple):
    """Tokens `first` up to, not including, `last`, which the model reads; it is scored on the tokens from `scored` on."""

    first: int
    last: int
    scored: int


def windows(num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of up to `length` + 1 tokens, of which all but the last are read and all but the first predicted, each
    beginning up to `stride` tokens after the one before it. Every token but the first of the text is scored in exactly one
    of them; after the first window, at least `length - stride + 1` tokens come before it. Raises ConfigError unless
    1 <= stride <= length."""
    check(length >= 1, "window", length, "at least 1")
    check(
        1 <= stride <= length, "stride", stride, f"from 1 to the window, {length}: beyond it tokens would be left out"
    )
    first, scored = 0, 1
    while scored < num_tokens:
        # the last one is moved back, so that it is as long as the others
        first = min(first, max(0, num_tokens - 1 - length))
        last = min(first + length + 1, num_tokens)
        yield Window(first, last, scored)
        scored, first = last, first + stride


@dataclass
class TextScore:
    """What was measured on a text. loss: in nats, of all predicted tokens together; the others follow from it."""

    num_documents: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    total: float = 0.0
    right: float = 0.0

    @property
    def loss(self) -> float:
        """Mean over tokens."""
        return self.total / self.num_tokens

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        data = {name: value for name, value in asdict(self).items() if name not in ("total", "right")}
        bits = self.total / self.num_bytes / math.log(2) if self.num_bytes else None
        means = {"loss": self.loss, "perplexity": perplexity(self.loss), "bits_per_byte": bits}
        return means | {"accuracy": self.right / self.num_tokens} | data


@torch.no_grad()
def score_windows(
    model: Model, pieces: Sequence[tuple[Int[Tensor, " _"], int]], precision: str = "float32"
) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
    """(losses in nats, 1 where the likeliest token is right) of windows, one behind the other. pieces: the tokens of a
    window, and the place in it of the first token that is scored. Shorter ones are filled up on the right, which causal
    attention never sees."""
    device = next(model.parameters()).device
    longest = max(len(tokens) for tokens, _ in pieces) - 1
    inputs = torch.zeros(len(pieces), longest, dtype=torch.int64)
    targets = torch.full((len(pieces), longest), NOTHING)
    for row, (tokens, scored) in enumerate(pieces):
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, scored - 1 : len(tokens) - 1] = tokens[scored:]
    inputs, targets = inputs.to(device), targets.to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        predictions = model(inputs).predictions
    predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    loss, right = token_scores(predictions, targets)
    kept = targets != NOTHING
    return loss[kept], right[kept]


def score_tokens(
    model: Model,
    texts: Iterable[tuple[Int[Tensor, " _"], int]],
    *,
    window: int,
    stride: int,
    batch_size: int,
    precision: str = "float32",
) -> TextScore:
    """The score of texts, each as (token ids, the first of which is not predicted; bytes). window: tokens that the model
    reads at once. batch_size: windows at a time; the result does not depend on it. The model is put back into the mode it
    was in."""
    score, training = TextScore(), model.training
    model.eval()

    def pieces() -> Iterator[tuple[Tensor, int]]:
        for tokens, num_bytes in texts:
            score.num_documents += 1
            score.num_bytes += num_bytes
            for first, last, scored in windows(len(tokens), window, stride):
                yield tokens[first:last], scored - first

    found = pieces()
    while group := list(islice(found, batch_size)):
        losses, right = score_windows(model, group, precision)
        score.num_tokens += len(losses)
        score.total += losses.double().sum().item()
        score.right += right.double().sum().item()
    model.train(training)
    if score.num_tokens == 0:
        raise ConfigError("there is no text to score: nothing, or nothing but white space, was found")
    return score


def score_data(
    model: Model,
    task: Text,
    data: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    precision: str = "float32",
) -> TextScore:
    """The score of all documents of a file, folder, glob or hub's data set (its held-out split), each by itself and with
    its end predicted. window: the training sequence's length by default; stride: half of it."""
    window = task.sequence_length if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    list(windows(2, window, stride))  # what is not possible is met before anything is read
    config = task.config
    if data.startswith(PREFIX):
        texts = read_split(HubSource.parse(data), config.hub_held_out_split, config.text_field, config.hub_documents)
    else:
        files = find_files([data])
        texts = (document.text for path in files for document in read_documents(path, config.text_field))

    def encoded() -> Iterator[tuple[Tensor, int]]:
        for text in texts:
            tokens = tokenize([text], task.tokenizer)
            yield torch.from_numpy(tokens.tokens.astype("int64")), tokens.num_bytes

    batch_size = max(1, LARGEST_LOGITS // (window * task.vocab_size))
    return score_tokens(model, encoded(), window=window, stride=stride, batch_size=batch_size, precision=precision)
