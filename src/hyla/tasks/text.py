"""Language modelling on any text (P1, section 6): documents, packed into sequences of tokens.

Documents are put one behind the other and cut into sequences; attention does not cross from one into another unless asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hyla.configs import check_sizes, check_types
from hyla.errors import ConfigError, RunError, check
from hyla.runs import read_json, write_json
from hyla.tasks.base import Batch, Stream, check_split, entropy
from hyla.tasks.corpus import Corpus, SplitTokens, changed_files, tokenize
from hyla.tasks.hub import PREFIX, HubSource, HubSplit, read_split
from hyla.tasks.text_stream import PackedStream
from hyla.tasks.tokenizer import TOKENIZER, TextTokenizer, load_tokenizer, train_tokenizer

NOTHING = -100  # a target that is not predicted
DATA = "data.json"  # in the run folder: what the tokens are made of
LARGEST_LOGITS = 2**24  # numbers of an evaluated batch's logits, so that it takes tens of MiB


@dataclass(frozen=True)
class TextConfig:
    """Where text comes from, how it becomes tokens, and what is held out."""

    data: tuple[str, ...] = ()
    """Files, folders and globs (text, JSON lines, Parquet; .gz and .zst too), or one hf:NAME[:CONFIG] that is streamed."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, or a model's name on the hub; by default one is trained on the text."""
    vocab_size: int = 4_096
    """Tokens of a tokenizer that is trained."""
    end_of_text: str | None = None
    """The token between documents; by default the usual one of the tokenizer."""
    sequence_length: int = 128
    """Tokens T of a sequence."""
    cross_documents: bool = False
    """Whether attention sees the documents before its own in the same sequence."""
    text_field: str = "text"
    """Field of JSON lines, column of Parquet and hub data sets."""
    held_out_fraction: float = 0.05
    """Share of local text that is held out."""
    held_out_by: Literal["auto", "document", "tail"] = "auto"
    """Hold out whole documents, or the tail of each; auto takes the tails where there are fewer than 100 documents."""
    split_seed: int | str = 0
    """Which documents are held out."""
    hub_train_split: str = "train"
    """Split of a hub's data set to train on."""
    hub_held_out_split: str = "validation"
    """Split of a hub's data set to measure on."""
    hub_documents: int = 10_000
    """Documents of a hub's data set to measure on, and to train a tokenizer on."""
    shuffle_block: int = 4_096
    """Documents of a hub's data set that are put into random order at a time."""
    num_streams: int = 8
    """Disjoint parts of a hub's data set that are read side by side; each gives an equal share of every batch."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        sizes = {"vocab_size": (257, 2**20), "sequence_length": (1, 2**20), "hub_documents": (1, 10**9)}
        check_sizes(self, "task", sizes | {"shuffle_block": (1, 10**7), "num_streams": (1, 2**16)})
        fraction = self.held_out_fraction
        check(0 < fraction < 1, "task.held_out_fraction", fraction, "above 0, below 1: text is always measured on too")
        hub = [item for item in self.data if item.startswith(PREFIX)]
        check(not hub or len(self.data) == 1, "task.data", self.data, "files and folders, or one hf:NAME[:CONFIG]")

    @property
    def hub(self) -> HubSource | None:
        """The data set to stream, where `data` names one."""
        return HubSource.parse(self.data[0]) if self.data and self.data[0].startswith(PREFIX) else None


class Text:
    """Sequences of tokens, each predicting the next.

    Inputs `[B, T]` and targets `[B, T]`: token ids; targets are -100 where nothing is predicted. No latents. Scores: `loss`
    in nats, `accuracy` of the likeliest token, both means over tokens; also `perplexity` and `bits_per_byte`.

    Splits: `train` and `held_out`. Local files are tokenised once (:mod:`hyla.tasks.corpus`). In every epoch documents are
    put into another order, joined, cut into sequences, and these shuffled: training batch i is a function of seed and i
    alone. Evaluation reads held-out text in order, every token predicted once. A hub's data set is streamed
    (:mod:`hyla.tasks.text_stream`): batch i is the same function, but costs the reading of what comes before it, unless
    `seek` was given the `position` that a checkpoint holds.

    folder: of the run, whose tokenizer is taken once it has one.
    """

    name = "text"
    headline = "loss"
    lower_is_better = True
    scores_by_answer = True
    discrete = False
    layout = None
    predict_at = slice(None)
    splits: tuple[str, ...] = ("train", "held_out")

    def __init__(self, config: TextConfig, seed: int = 0, folder: Path | None = None):
        self.config, self.seed, self.folder = config, seed, folder
        self._orders: dict[int | str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._streams: dict[int, PackedStream] = {}
        self._positions: dict[int, dict[str, Any]] = {}

    # --- tokens ---

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The run's own; or the one that is asked for; or one trained on the text."""
        config = self.config
        if self.folder is not None and (self.folder / TOKENIZER).exists():
            return load_tokenizer(str(self.folder), config.end_of_text)
        if config.tokenizer is not None:
            return load_tokenizer(config.tokenizer, config.end_of_text)
        if config.hub is not None:
            texts = read_split(config.hub, config.hub_train_split, config.text_field, config.hub_documents)
            return train_tokenizer(texts, config.vocab_size)
        return self._corpus.tokenizer(config.vocab_size)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def output_dim(self) -> int:
        return self.vocab_size

    @property
    def input_dim(self) -> int:
        return 1

    @property
    def sequence_length(self) -> int:
        return self.config.sequence_length

    @property
    def boundary_token(self) -> int | None:
        """The token where attention begins anew; None where it crosses documents."""
        return None if self.config.cross_documents else self.tokenizer.end_id

    @property
    def evaluation_batch(self) -> int:
        unit = 1 if self.config.hub is None else self.config.num_streams
        return max(1, LARGEST_LOGITS // (self.sequence_length * self.vocab_size * unit)) * unit

    @property
    def _corpus(self) -> Corpus:
        config = self.config
        allowed = "name files, folders, globs or hf:NAME[:CONFIG], such as --data corpus/"
        check(config.data != (), "task.data", config.data, allowed)
        by, fraction = config.held_out_by, config.held_out_fraction
        return Corpus(config.data, config.text_field, fraction, by, config.split_seed)

    @cached_property
    def _local(self) -> tuple[dict[str, SplitTokens], dict[str, Any]]:
        started = self.folder is not None and (self.folder / DATA).exists()
        before = read_json(self.folder / DATA)["files"] if self.folder is not None and started else []
        try:
            tokens, info = self._corpus.tokens(self.tokenizer)
        except ConfigError as error:
            if not before or not Path(before[0]["path"]).exists():
                raise
            where = before[0]["path"]
            raise RunError(f"{error}; the run was started where this is {where}: go on with it from there") from None
        if started:
            changed = changed_files(before, info["files"])
            if changed:
                names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
                raise RunError(f"the text of {self.folder} is not what it was trained on: {names} changed")
        for split, least in (("train", self.sequence_length), ("held_out", 1)):
            count, named = tokens[split].num_predicted, " ".join(self.config.data)
            allowed = f"split {split} has {max(count, 0):,} tokens, and needs at least {least:,}; give more text"
            if split == "held_out" and info["held_out_by"] == "document":
                allowed += ", or --task.held-out-by tail"
            check(count >= least, "task.data", named, allowed)
        return tokens, info

    def tokens(self, split: str) -> SplitTokens:
        """The tokens of a split that lies here as a whole: any of local files, `held_out` of a hub's data set."""
        check_split(self, split)
        return self._hub_held_out if self.config.hub is not None else self._local[0][split]

    @cached_property
    def _hub_train(self) -> HubSplit:
        config = self.config
        assert config.hub is not None
        return HubSplit(config.hub, config.hub_train_split, config.text_field)

    @cached_property
    def _hub_held_out(self) -> SplitTokens:
        config = self.config
        assert config.hub is not None
        texts = read_split(config.hub, config.hub_held_out_split, config.text_field, config.hub_documents)
        return tokenize(texts, self.tokenizer)

    def prepare(self) -> str:
        """Read what every split needs, so that what cannot be used is met before any work; what was found, in words."""
        held_out = self.tokens("held_out")
        words = f"vocabulary of {self.vocab_size:,}, {held_out.num_predicted:,} tokens held out"
        if self.config.hub is not None:
            return f"{self.config.hub}, {self._hub_train.num_shards:,} files, {words}"
        _, info = self._local
        by = {"document": "as whole documents", "tail": "as the tails of documents"}[info["held_out_by"]]
        counts = f"{info['documents']['train']:,} documents, {info['tokens']['train']:,} tokens"
        return f"{counts}, {words} {by}"

    def write(self, folder: Path) -> None:
        """Put into a run folder what a later reader of it needs: the tokenizer, and what the tokens are made of."""
        if (folder / TOKENIZER).exists():
            return
        if self.config.hub is None:
            write_json(folder / DATA, self._local[1])
        self.tokenizer.save(folder)

    # --- batches ---

    def size(self, split: str) -> int | None:
        """How many sequences the evaluation of a split can read; None of a stream."""
        check_split(self, split)
        if split == "train":
            return None if self.config.hub is not None else self._num_sequences
        return -(-self.tokens(split).num_predicted // self.sequence_length)

    @property
    def _num_sequences(self) -> int:
        """Training sequences of an epoch."""
        return self.tokens("train").num_predicted // self.sequence_length

    def batch(
        self,
        split: str,
        index: int,
        batch_size: int,
        *,
        stream: Stream = "training",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        rows: slice = slice(None),
    ) -> Batch:
        """Sequences `index * batch_size` and following; of these, the `rows` alone. Evaluation ends with the split."""
        check_split(self, split)
        numbers = range(index * batch_size, (index + 1) * batch_size)[rows]
        if split == "train" and self.config.hub is not None:
            pieces = self._streamed(index, batch_size, numbers, stream)
        elif split == "train":
            kept = numbers if stream == "training" else range(numbers.start, min(numbers.stop, self._num_sequences))
            pieces = [self._training_sequence(number, stream) for number in kept]
        else:
            length, tokens = self.sequence_length, self.tokens(split).tokens
            kept = range(numbers.start, min(numbers.stop, self.size(split) or 0))
            pieces = [tokens[number * length : (number + 1) * length + 1].astype(np.int64) for number in kept]
        return packed(pieces, self.sequence_length, self.tokenizer.end_id, torch.device(device))

    def _training_sequence(self, number: int, stream: Stream) -> np.ndarray:
        """T + 1 tokens of the documents of an epoch, joined in its order."""
        epoch, number = divmod(number, self._num_sequences)
        documents, ends, sequences = self._order(epoch if stream == "training" else stream)
        split, start = self.tokens("train"), sequences[number] * self.sequence_length
        parts, missing = [], self.sequence_length + 1
        at = int(np.searchsorted(ends, start, side="right"))
        while missing and at < len(documents):
            document = documents[at]
            first = split.starts[document]
            last = split.starts[document + 1] if document + 1 < len(split.starts) else split.num_predicted
            skipped = start - (ends[at] - (last - first)) if not parts else 0
            parts.append(split.tokens[first + skipped : last][:missing])
            missing -= len(parts[-1])
            at += 1
        if missing:  # the end of the last document
            parts.append(split.tokens[-1:])
        return np.concatenate(parts).astype(np.int64)

    def _order(self, epoch: int | str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents in their order, where each ends among the joined tokens, sequences in their order) of an epoch."""
        if epoch not in self._orders:
            split = self.tokens("train")
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self._words(epoch))))
            documents = generator.permutation(len(split.starts))
            lengths = np.diff(split.starts, append=split.num_predicted)
            if len(self._orders) > 1:  # one that goes on, and the one of evaluation
                self._orders = {name: order for name, order in self._orders.items() if isinstance(name, str)}
            order = documents, lengths[documents].cumsum(), generator.permutation(self._num_sequences)
            self._orders[epoch] = order
        return self._orders[epoch]

    def _words(self, *path: int | str) -> list[int]:
        return entropy(self.seed, self.name, "train", *path)

    # --- a hub's data set ---

    def _streamed(self, index: int, batch_size: int, numbers: range, stream: Stream) -> list[np.ndarray]:
        """The sequences of a batch, from the parts that its rows belong to."""
        config = self.config
        each = batch_size // config.num_streams
        allowed = f"must be a multiple of task.num_streams = {config.num_streams}"
        check(batch_size % config.num_streams == 0, "training.batch_size", batch_size, allowed)
        pieces = []
        for part in sorted({number % batch_size // each for number in numbers}):
            key = part if stream == "training" else -1 - part
            if key not in self._streams:
                self._streams[key] = PackedStream(
                    self._hub_train,
                    config,
                    self.tokenizer,
                    part=part,
                    seed=self._words(stream)[0],
                    position=self._positions.get(key),
                )
            sequences = self._streams[key].read(index * each, each)
            first = index * batch_size + part * each
            pieces += [sequences[number - first] for number in numbers if first <= number < first + each]
        return pieces

    def position(self) -> dict[str, Any] | None:
        """Where a streamed training set has been read to, part by part, as plain values; None for local files."""
        if self.config.hub is None:
            return None
        read = {str(part): stream.position() for part, stream in self._streams.items() if part >= 0}
        return {str(part): position for part, position in self._positions.items()} | read

    def seek(self, position: dict[str, Any] | None) -> None:
        """Go on from a `position`: batches that follow it are read without what comes before them."""
        self._positions = {int(part): value for part, value in (position or {}).items()}
        self._streams = {}

    # --- loss and scores ---

    def loss(self, predictions: Float[Tensor, "batch tokens vocabulary"], batch: Batch) -> Float[Tensor, ""]:
        """Cross-entropy in nats, averaged over the predicted tokens; 0 where there are none."""
        total = F.cross_entropy(
            predictions.flatten(0, 1), batch.targets.flatten(), ignore_index=NOTHING, reduction="sum"
        )
        return total / self.weights(batch).sum().clamp(min=1)

    def weights(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Predicted tokens of each sequence."""
        return (batch.targets != NOTHING).sum(-1)

    def scores(self, predictions: Float[Tensor, "batch tokens vocabulary"], batch: Batch) -> dict[str, Tensor]:
        """`loss` in nats and `accuracy`, means over each sequence's predicted tokens."""
        loss_BT, right_BT = token_scores(predictions, batch.targets)
        count_B = self.weights(batch).clamp(min=1)
        return {"loss": loss_BT.sum(-1) / count_B, "accuracy": right_BT.sum(-1) / count_B}

    def summary(self, split: str, scores: dict[str, float]) -> dict[str, float]:
        """`perplexity`, e to the loss; `bits_per_byte` where the size of the text is known: it compares tokenizers."""
        found = {"perplexity": perplexity(scores["loss"])}
        if self.config.hub is None or split == "held_out":
            tokens = self.tokens(split)
            found["bits_per_byte"] = scores["loss"] * tokens.num_predicted / tokens.num_bytes / math.log(2)
        return found


def perplexity(loss: float) -> float:
    """e to the mean loss of a token in nats; infinite beyond what a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


def token_scores(
    predictions: Float[Tensor, "batch tokens vocabulary"], targets: Int[Tensor, "batch tokens"]
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """(loss in nats, 1 where the likeliest token is right), both 0 where nothing is predicted."""
    loss_BT = F.cross_entropy(predictions.movedim(-1, 1), targets, ignore_index=NOTHING, reduction="none")
    right_BT = (predictions.argmax(-1) == targets) & (targets != NOTHING)
    return loss_BT, right_BT.to(loss_BT.dtype)


def packed(pieces: Sequence[np.ndarray], length: int, end_id: int, device: torch.device) -> Batch:
    """A batch of sequences of up to `length` + 1 tokens; shorter ones are filled up on the right, and predict nothing
    there."""
    inputs = torch.full((len(pieces), length), end_id, dtype=torch.int64)
    targets = torch.full((len(pieces), length), NOTHING, dtype=torch.int64)
    for row, piece in enumerate(pieces):
        ids = torch.from_numpy(piece)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = ids[1:]
    return Batch(inputs.to(device), targets.to(device), {})
