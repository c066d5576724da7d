"""Sequences of tokens from a data set that is streamed: read in order, from a position that a checkpoint can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hyla.tasks.hub import DocumentStream, HubSplit
from hyla.tasks.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from hyla.tasks.text import TextConfig


START: dict[str, Any] = {"number": 0, "documents": None, "skip": 0}


class PackedStream:
    """The documents of one part of a data set, joined and cut into sequences of T + 1 tokens; the last token of one is the
    first of the next.

    `read(first, count)` gives the same sequences whatever was read before. What follows the last reading is read on; other
    places are reached from the start, or from `position`, where that lies before them.
    """

    def __init__(
        self,
        split: HubSplit,
        config: TextConfig,
        tokenizer: TextTokenizer,
        *,
        part: int,
        seed: int,
        position: dict[str, Any] | None = None,
    ):
        self.split, self.config, self.tokenizer, self.part, self.seed = split, config, tokenizer, part, seed
        self._begin(position)
        self._last: tuple[int, list[np.ndarray]] = (self.number, [])

    def _begin(self, position: dict[str, Any] | None) -> None:
        """Stand where `position` says, or at the start."""
        position = position or START
        self.number: int = position["number"]
        """Sequences that come before."""
        config = self.config
        self._documents = DocumentStream(
            self.split.source,
            config.hub_train_split,
            config.text_field,
            part=self.part,
            num_parts=config.num_streams,
            block=config.shuffle_block,
            seed=self.seed,
            state=position["documents"],
            opened=self.split,
        )
        self._before, self._skip = position["documents"], 0
        self._rest = np.empty(0, np.int64)
        self._pull()
        self._skip = position["skip"]
        self._rest = self._rest[self._skip :]

    def _pull(self) -> None:
        """Take one more document behind what is left of the last one."""
        self._before, self._skip = self._documents.state(), -len(self._rest)
        (ids,) = self.tokenizer.encode([next(self._documents).text])
        self._rest = np.concatenate([self._rest, [self.tokenizer.end_id], ids])

    def _next(self) -> np.ndarray:
        length = self.config.sequence_length
        while len(self._rest) <= length:
            self._pull()
        sequence, self._rest = self._rest[: length + 1], self._rest[length:]
        self._skip += length
        self.number += 1
        return sequence

    def read(self, first: int, count: int) -> list[np.ndarray]:
        """Sequences `first` and following."""
        if self._last[0] == first and len(self._last[1]) == count:
            return self._last[1]
        if first < self.number:
            self._begin(None)
        while self.number < first:
            self._next()
        self._last = (first, [self._next() for _ in range(count)])
        return self._last[1]

    def position(self) -> dict[str, Any]:
        """Where the next sequence begins: the state before the document that it begins in, and that document's tokens that
        lie before it."""
        return {"number": self.number, "documents": self._before, "skip": self._skip}
