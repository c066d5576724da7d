"""The tokens of local files, made once and kept in a cache on disk: every run on the same files shares them.

    CACHE/tokenizers/KEY/   tokenizer.json of a tokenizer trained on these files
    CACHE/tokens/KEY/       train.bin, held_out.bin (token ids), train_starts.npy, ... (where documents begin), info.json

CACHE is the folder `text` in $HYLA_CACHE, by default in ~/.cache/hyla. Every document begins with the end-of-text token,
and one more ends each split: every text token and every end of a text is predicted once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import filelock
import numpy as np

from hyla.errors import ConfigError, RunError
from hyla.runs import read_json, whole_folder, write_json
from hyla.tasks.documents import find_files, read_documents
from hyla.tasks.tokenizer import TOKENIZER, TextTokenizer, load_tokenizer, train_tokenizer

SPLITS: tuple[str, ...] = ("train", "held_out")
INFO = "info.json"
VERSION = 1  # of what lies in the cache
FEW_DOCUMENTS = 100  # with fewer, whole documents make too coarse a held-out part
ENCODED_AT_ONCE = 256  # documents


def cache_folder() -> Path:
    """Where tokens and tokenizers are kept."""
    return Path(os.environ.get("HYLA_CACHE") or Path.home() / ".cache" / "hyla") / "text"


def held_out(text: str, fraction: float, split_seed: int | str) -> bool:
    """Whether a document is held out: decided by its text alone, so that copies of it never lie on both sides."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(split_seed).encode()[:64]).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """A document without its last `fraction`, and that; cut behind a line or else a word, where there is one nearby."""
    place = round(len(text) * (1 - fraction))
    for mark in ("\n", " "):
        found = text.rfind(mark, place // 2, place)
        if found >= 0:
            return text[: found + 1], text[found + 1 :]
    return text[:place], text[place:]


@dataclass(frozen=True)
class SplitTokens:
    """The tokens `[N]` of one split, where its documents begin `[documents]`, and the size of their text in bytes."""

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first."""
        return len(self.tokens) - 1


def token_dtype(tokenizer: TextTokenizer) -> np.dtype:
    """The smallest type that holds every token id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def tokenize(texts: Iterable[str], tokenizer: TextTokenizer) -> SplitTokens:
    """The tokens of documents, in memory."""
    parts, starts, at, num_bytes = [], [], 0, 0
    for size, ids in _encoded(texts, tokenizer):
        parts.append(ids)
        starts.append(at)
        at, num_bytes = at + len(ids), num_bytes + size
    tokens = np.concatenate([*parts, [tokenizer.end_id]]).astype(token_dtype(tokenizer))
    return SplitTokens(tokens, np.array(starts, dtype=np.int64), num_bytes)


def _encoded(texts: Iterable[str], tokenizer: TextTokenizer) -> Iterator[tuple[int, np.ndarray]]:
    """(bytes of its text, token ids) of each document, the end-of-text token first."""
    texts = iter(texts)
    while group := list(islice(texts, ENCODED_AT_ONCE)):
        for text, ids in zip(group, tokenizer.encode(group), strict=True):
            if len(ids) == 0:
                shown = shorten(text, 40)
                raise ConfigError(
                    f"task.tokenizer is not possible: it knows nothing of a document that begins {shown!r}; take one that "
                    "knows every byte"
                )
            yield len(text.encode()), np.concatenate([[tokenizer.end_id], ids])


@dataclass(frozen=True)
class Corpus:
    """Local files as documents in splits.

    data: files, folders and globs. text_field: of JSON lines and Parquet. by: whether whole documents are held out or the
    tail of each; `auto` takes the tails where there are fewer than 100 documents. Nothing is read before it is asked for.
    """

    data: tuple[str, ...]
    text_field: str
    held_out_fraction: float
    held_out_by: str
    split_seed: int | str

    def tokenizer(self, vocab_size: int) -> TextTokenizer:
        """A tokenizer trained on the documents of split `train`, from the cache where it was trained before."""
        folder = cache_folder() / "tokenizers" / self._key("tokenizer", vocab_size)

        def train(target: Path) -> None:
            texts = (text for split, text in self.documents() if split == "train")
            train_tokenizer(texts, vocab_size).save(target)

        _cached(folder, _tokenizer_is_whole, train)
        return load_tokenizer(str(folder))

    def tokens(self, tokenizer: TextTokenizer) -> tuple[dict[str, SplitTokens], dict[str, Any]]:
        """(the tokens of every split, memory-mapped; what they are made of: `files` with their digests, `documents`,
        `tokens` and `bytes` of each split, `held_out_by`, `tokenizer`)."""
        folder = cache_folder() / "tokens" / self._key("tokens", tokenizer.digest)
        dtype = token_dtype(tokenizer)
        _cached(folder, lambda found: _tokens_are_whole(found, dtype), lambda target: self._write(target, tokenizer))
        info = read_json(folder / INFO)
        splits = {}
        for split in SPLITS:
            tokens = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
            starts = np.load(folder / f"{split}_starts.npy", mmap_mode="r")
            splits[split] = SplitTokens(tokens, starts, info["bytes"][split])
        return splits, info

    def documents(self) -> Iterator[tuple[str, str]]:
        """(split, text) of all documents, in the order of the files. With tails held out, a document comes twice."""
        by = self._held_out_by()
        for path in find_files(self.data):
            for document in read_documents(path, self.text_field):
                if by == "document":
                    out = held_out(document.text, self.held_out_fraction, self.split_seed)
                    yield SPLITS[out], document.text
                else:
                    parts = zip(SPLITS, cut_tail(document.text, self.held_out_fraction), strict=True)
                    yield from ((split, text) for split, text in parts if text)

    def _held_out_by(self) -> str:
        if self.held_out_by != "auto":
            return self.held_out_by
        every = (document for path in find_files(self.data) for document in read_documents(path, self.text_field))
        return "tail" if sum(1 for _ in islice(every, FEW_DOCUMENTS)) < FEW_DOCUMENTS else "document"

    def _key(self, *further: object) -> str:
        """The same for the same files, as far as name, size and time of change tell, and the same settings."""
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in find_files(self.data)]
        settings = (VERSION, self.text_field, self.held_out_fraction, self.held_out_by, self.split_seed, *further)
        return hashlib.blake2b(repr((files, settings)).encode(), digest_size=16).hexdigest()

    def _write(self, folder: Path, tokenizer: TextTokenizer) -> None:
        """Tokens of every split, written as they are made."""
        dtype = token_dtype(tokenizer)
        starts: dict[str, list[int]] = {split: [] for split in SPLITS}
        totals, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        documents = self.documents()
        with contextlib.ExitStack() as stack:
            files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
            while group := list(islice(documents, ENCODED_AT_ONCE)):
                for split, file in files.items():
                    for size, ids in _encoded([text for name, text in group if name == split], tokenizer):
                        file.write(ids.astype(dtype).tobytes())
                        starts[split].append(totals[split])
                        totals[split] += len(ids)
                        sizes[split] += size
            for split, file in files.items():
                file.write(np.array([tokenizer.end_id], dtype).tobytes())
                totals[split] += 1
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave info.json beside tokens that are not there
        for split in SPLITS:
            np.save(folder / f"{split}_starts.npy", np.array(starts[split], dtype=np.int64))
        counts = {split: len(starts[split]) for split in SPLITS}
        info = {"files": file_digests(self.data), "documents": counts, "tokens": totals, "bytes": sizes}
        write_json(folder / INFO, info | {"held_out_by": self._held_out_by(), "tokenizer": tokenizer.digest})


def file_digests(data: Sequence[str]) -> list[dict[str, Any]]:
    """Path, bytes and digest of each file."""
    found = []
    for path in find_files(data):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        found.append({"path": str(path), "bytes": path.stat().st_size, "blake2b": digest})
    return found


def _tokenizer_is_whole(folder: Path) -> bool:
    try:
        read_json(folder / TOKENIZER)
    except RunError:
        return False
    return True


def _tokens_are_whole(folder: Path, dtype: np.dtype) -> bool:
    """Whether the files are as long as info.json says: of a file cut short, what is left would be trained on unnoticed."""
    try:
        info = read_json(folder / INFO)
        return all(
            (folder / f"{split}.bin").stat().st_size == info["tokens"][split] * dtype.itemsize
            and len(np.load(folder / f"{split}_starts.npy", mmap_mode="r")) == info["documents"][split]
            for split in SPLITS
        )
    except (RunError, OSError, EOFError, ValueError, KeyError):
        return False


def _cached(folder: Path, is_whole: Callable[[Path], bool], make: Callable[[Path], None]) -> None:
    """Have `make` fill `folder`, unless it is there and whole. Of several processes one does; others wait."""
    if is_whole(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"tokens are kept there, and it cannot be made: {error.strerror}; set HYLA_CACHE to another folder"
        raise ConfigError(f"HYLA_CACHE = {str(cache_folder())!r} is not possible: {allowed}") from None
    with filelock.FileLock(f"{folder}.lock"):
        if not is_whole(folder):
            with whole_folder(folder) as target:
                make(target)


def changed_files(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Names of files that are new, gone or other than before; none where the same content lies in another folder."""
    if [item["blake2b"] for item in before] == [item["blake2b"] for item in now]:
        return []
    old, new = ({item["path"]: item["blake2b"] for item in items} for items in (before, now))
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
