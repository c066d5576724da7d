"""Documents streamed from a hub with the package `datasets`, in an order that stops and resumes exactly.

The order is made here and not by `IterableDataset.shuffle`, whose buffer is no part of the position that it saves
(https://github.com/huggingface/datasets/issues/7901). Nor is `IterableDataset.state_dict` used, which stood still after a
resume (https://github.com/huggingface/datasets/issues/8308): a shard and a row in it say the same, and to go on from them
costs no more, since `datasets` too reads a shard from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from hyla.errors import ConfigError, HylaError, MissingExtraError, RunError, check
from hyla.tasks.base import Draws
from hyla.tasks.documents import Document, checked_text

if TYPE_CHECKING:
    from datasets import IterableDataset

PREFIX = "hf:"
ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class HubSource:
    """A dataset of a hub, or a folder in the layout of one; config: which of its subsets, None for the only one."""

    name: str
    config: str | None = None

    @classmethod
    def parse(cls, entry: str) -> HubSource:
        """`hf:allenai/c4:en`, `hf:NAME` or `hf:FOLDER` as a source. Raises ConfigError for anything else."""
        check(entry.startswith(PREFIX), "task.data", entry, "a dataset of the hub is written hf:NAME or hf:NAME:CONFIG")
        name, config = entry.removeprefix(PREFIX), None
        if ":" in name and not Path(name).expanduser().is_dir():
            name, config = name.rsplit(":", 1)
        check(name != "" and config != "", "task.data", entry, "write hf:NAME or hf:NAME:CONFIG")
        is_folder = Path(name).expanduser().is_dir()
        return cls(str(Path(name).expanduser()) if is_folder else name, config)

    def __str__(self) -> str:
        return PREFIX + self.name + (f":{self.config}" if self.config else "")


class _Place(NamedTuple):
    """Where in the stream: `position` documents into a block that begins at `row` of the epoch's shard number `shard`.

    Later places compare as greater.
    """

    epoch: int
    block: int
    shard: int
    row: int
    position: int


class DocumentStream:
    """The documents of one of `num_parts` disjoint parts of a split, without end, epoch after epoch.

    The parts together are the whole split. A part is every `num_parts`-th shard (file) where the shards divide evenly, else
    every `num_parts`-th row. Documents of white space alone are left out. Each epoch orders a part's shards anew, and
    documents within consecutive blocks of `block` of them; the order depends on seed, part and epoch alone. With block 1
    every epoch is in the order of the files.

    `state()` is the place after the last document given, as plain JSON values; a stream made with it goes on with exactly
    the documents that were left, and reads one shard up to that place again. It fits only the same split, parts, block and
    seed. opened: the split, where it is open already, so that the hub is not asked again for every part.

    Raises ConfigError where the split, the text or the connection is missing, and RunError for a state that does not fit.
    """

    def __init__(
        self,
        source: HubSource,
        split: str,
        text_field: str,
        *,
        part: int,
        num_parts: int,
        block: int,
        seed: int,
        state: Mapping[str, Any] | None = None,
        opened: HubSplit | None = None,
    ):
        check(num_parts >= 1, "num_parts", num_parts, "at least 1")
        check(0 <= part < num_parts, "part", part, f"0 to {num_parts - 1}")
        check(block >= 1, "block", block, "at least 1")
        self._split = opened or HubSplit(source, split, text_field)
        num_shards = self._split.num_shards
        by_shards = num_shards % num_parts == 0
        self._shards = list(range(part, num_shards, num_parts) if by_shards else range(num_shards))
        self._share = (0, 1) if by_shards else (part, num_parts)
        self._fits = {"part": part, "num_parts": num_parts, "block": block, "seed": seed, "num_shards": num_shards}
        self._place = _Place(0, 0, 0, 0, 0) if state is None else self._restored(state)
        self._following = self._place  # where the next block begins, once this one is read
        self._reader: Iterator[tuple[int, int, Document]] | None = None
        self._documents: list[Document] = []  # of this block, those not yet given, last first

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        while not self._documents:
            self._read_block()
        document = self._documents.pop()
        # a finished block is left at once, so that resuming does not read it again
        self._place = self._place._replace(position=self._place.position + 1) if self._documents else self._following
        return document

    def state(self) -> dict[str, Any]:
        """The place after the last document given, in plain JSON values."""
        return {**self._place._asdict(), "of": dict(self._fits)}

    def _read_block(self) -> None:
        place, block, seed = self._place, self._fits["block"], self._fits["seed"]
        # kept only if reading succeeds: whoever tries again after an error then starts from the same place
        reader, self._reader = self._reader or self._rows(place), None
        rows = list(islice(reader, block))
        if not rows:
            check(place != (place.epoch, 0, 0, 0, 0), "task.data", str(self._split), self._nothing())
            self._place = self._following = _Place(place.epoch + 1, 0, 0, 0, 0)
            return
        if place.position >= len(rows):
            raise RunError(f"the saved place in {self._split} is past the end of its block: the data has changed since")
        order = [0]
        if len(rows) > 1:
            draws = Draws(seed, "text", self._fits["part"], place.epoch, place.block)
            order = draws.permutations(len(rows)).tolist()
        self._documents = [rows[index][2] for index in order[place.position :]][::-1]
        shard, row, _ = rows[-1]
        self._following = _Place(place.epoch, place.block + 1, shard, row + 1, 0)
        self._reader = reader

    def _rows(self, start: _Place) -> Iterator[tuple[int, int, Document]]:
        """The rest of an epoch, shard after shard: each document with its row and its shard's number in the order."""
        shards, (part, num_parts) = self._shards, self._share
        if self._fits["block"] > 1:
            draws = Draws(self._fits["seed"], "text", self._fits["part"], start.epoch, "shards")
            shards = [shards[index] for index in draws.permutations(len(shards)).tolist()]
        for number in range(start.shard, len(shards)):
            first_row = start.row if number == start.shard else 0
            # a row's part depends on nothing but shard and row, so that parts stay disjoint whatever the order
            for row, document in self._split.documents(shards[number], first_row, part - shards[number], num_parts):
                yield number, row, document

    def _restored(self, state: Mapping[str, Any]) -> _Place:
        saved = state.get("of", {})
        for name, value in self._fits.items():
            if saved.get(name) != value:
                reason = f"it was saved with {name} = {saved.get(name)!r}, and here it is {value!r}"
                raise RunError(f"the saved place in {self._split} does not fit: {reason}")
        place = [state.get(name, -1) for name in _Place._fields]
        if not all(isinstance(value, int) and value >= 0 for value in place):
            raise RunError(f"the saved place in {self._split} is damaged: {dict(state)}")
        return _Place(*place)

    def _nothing(self) -> str:
        part, num_parts = self._fits["part"], self._fits["num_parts"]
        return f"part {part} of {num_parts} has no documents but white space"


def read_split(source: HubSource, split: str, text_field: str, limit: int | None) -> Iterator[str]:
    """The first `limit` documents (None: all) of a split in the order of its files, without those of white space alone.

    Raises ConfigError as :class:`DocumentStream` does.
    """
    opened = HubSplit(source, split, text_field)
    documents = (
        document.text for shard in range(opened.num_shards) for _, document in opened.documents(shard, 0, 0, 1)
    )
    return islice(documents, limit)


class HubSplit:
    """One split of a dataset, read shard by shard. Raises ConfigError as :class:`DocumentStream` does."""

    def __init__(self, source: HubSource, split: str, text_field: str):
        try:
            import datasets
        except ImportError:
            raise MissingExtraError("datasets", "text", f"reading {source}") from None
        self.source, self._name = source, f"{source}, split {split}"
        self._text_field = text_field
        with _explained(source):
            dataset = datasets.load_dataset(source.name, source.config, split=split, streaming=True)
            assert isinstance(dataset, datasets.IterableDataset)
            columns = dataset.column_names
        if columns is not None:  # None where only reading tells
            self._check_column(columns)
            dataset = dataset.select_columns([text_field])
        self._dataset: IterableDataset = dataset.with_format("arrow")
        self.num_shards: int = dataset.num_shards

    def __str__(self) -> str:
        return self._name

    def documents(self, shard: int, first_row: int, part: int, num_parts: int) -> Iterator[tuple[int, Document]]:
        """Row and document of the rows from `first_row` on whose number is `part` modulo `num_parts`."""
        tables: Any = self._dataset.shard(num_shards=self.num_shards, index=shard).iter(ROWS_AT_A_TIME)
        end = 0
        with _explained(self.source):
            for table in tables:
                begin, end = end, end + table.num_rows
                start = max(begin, first_row)
                start += (part - start) % num_parts
                if start >= end:
                    continue
                self._check_column(table.column_names)
                values = table.column(self._text_field).slice(start - begin).to_pylist()[::num_parts]
                for row, value in zip(range(start, end, num_parts), values, strict=True):
                    document = Document(value, f"{self._name}, shard {shard + 1}, row {row + 1}")
                    checked_text(value, self._text_field, document.source)
                    if value and not value.isspace():
                        yield row, document

    def _check_column(self, columns: list[str]) -> None:
        listed = ", ".join(columns) or "none"
        check(
            self._text_field in columns,
            "task.text_field",
            self._text_field,
            f"the columns of {self._name} are {listed}",
        )


@contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    """Whatever `datasets`, its readers and its network libraries raise, as one line that names the source."""
    try:
        yield
    except HylaError:
        raise
    except Exception as error:
        reason = shorten(str(error), 400, placeholder=" ...") or type(error).__name__
        raise ConfigError(f"task.data = {str(source)!r} cannot be read: {reason}") from error
