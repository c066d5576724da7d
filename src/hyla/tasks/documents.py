"""Documents from local files: plain text, JSON lines, lists of JSON objects and Parquet, each also compressed."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, BinaryIO, NamedTuple, cast

from hyla.errors import ConfigError, MissingExtraError, check

COMPRESSIONS = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
# what is taken from a folder
KNOWN = (".txt", ".text", ".md", ".rst", *JSON_LINES, ".json", ".parquet")
BUFFER_BYTES = 1 << 17
ROWS_AT_A_TIME = 1024


class Document(NamedTuple):
    """One text, and where it is from, for messages: `path`, or `path, line 3`, `path, row 3`, `path, item 3`."""

    text: str
    source: str


# --- which files ---


def find_files(data: Sequence[str]) -> list[Path]:
    """The files that `data` names, as sorted absolute paths; a file with two names is taken once.

    An entry is a file, a folder or a glob (`**` for any depth). Of a folder, and the folders in it, the files with the
    suffixes of `KNOWN` are taken, without hidden ones; files that are named, or that a glob finds, are taken whatever they
    are called. Raises ConfigError for an entry that leads to no file.
    """
    found: dict[str, str] = {}
    for entry in data:
        for path in _files_of(entry):
            real = os.path.realpath(path)
            found[real] = min(path, found.get(real, path))
    return sorted(Path(path) for path in found.values())


def _files_of(entry: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(entry))
    check(entry != "", "task.data", entry, "name a file, a folder or a glob")
    if os.path.isdir(path):
        return _files_in_folder(entry, path)
    if os.path.isfile(path):
        return [path]
    check(not os.path.lexists(path), "task.data", entry, "neither a file nor a folder, or a link that leads nowhere")
    check(has_magic(entry), "task.data", entry, f"there is no such file or folder (looked for {path})")
    matches = [os.path.abspath(match) for match in glob(os.path.expanduser(entry), recursive=True)]
    check(len(matches) > 0, "task.data", entry, f"nothing matches it (looked for {path})")
    files = [match for match in matches if os.path.isfile(match)]
    check(len(files) > 0, "task.data", entry, "it matches folders alone; name a folder itself, or end it with /**")
    return files


def _files_in_folder(entry: str, root: str) -> list[str]:
    def unreadable(error: OSError) -> None:
        raise ConfigError(f"task.data = {entry!r} is not possible: {error.filename}: {error.strerror}") from error

    files, others = [], Counter()
    visited = {os.path.realpath(root)}  # links to folders are followed, but not in circles
    for folder, folders, names in os.walk(root, onerror=unreadable, followlinks=True):
        entered = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and real not in visited:
                visited.add(real)
                entered.append(name)
        folders[:] = entered
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(path):
                continue
            suffix, compression = _suffixes(name)
            if suffix in KNOWN:
                files.append(path)
            else:
                others[suffix + compression or "no suffix"] += 1
    listed = ", ".join(f"{suffix} ({count})" for suffix, count in others.most_common(10)) or "no files"
    known = " ".join(KNOWN)
    check(len(files) > 0, "task.data", entry, f"of a folder {known} are taken, each also .gz or .zst; it has {listed}")
    return files


def _suffixes(name: str) -> tuple[str, str]:
    """`(".jsonl", ".gz")` for "a.jsonl.gz", `(".txt", "")` for "a.TXT"."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSIONS:
        return os.path.splitext(stem)[1], suffix
    return suffix, ""


# --- what is in them ---


def read_documents(path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file in their order, without those that are white space alone.

    By suffix, before `.gz` or `.zst`: `.jsonl`, `.ndjson` hold one JSON object a line, `.json` that or one list of objects,
    `.parquet` a table, and the text is in `text_field`; every other file is one document. JSON lines and Parquet are read
    as a stream. Text is UTF-8; a byte order mark before it is dropped and everything else kept, `\\r\\n` too.

    Raises ConfigError, with the file and the line, row or byte, for what is not UTF-8, not JSON, lacks the field or holds
    something else there, and for a file that is damaged, cut off or not to be read; MissingExtraError where a package for
    the format is missing.
    """
    suffix, compression = _suffixes(path.name)
    if suffix == ".parquet":
        documents = _from_parquet(path, compression, text_field)
    elif suffix in JSON_LINES or suffix == ".json":
        documents = _from_json(path, suffix, compression, text_field)
    else:
        documents = _whole(path, compression)
    for document in documents:
        if document.text and not document.text.isspace():
            yield document


def checked_text(value: object, text_field: str, source: str) -> str:
    """`value`, found in `text_field`, if it is text; else ConfigError naming `source`."""
    if not isinstance(value, str):
        raise ConfigError(
            f"task.text_field = {text_field!r} is not possible: {source} holds {shortened(value)} there, not text"
        )
    return value


def _whole(path: Path, compression: str) -> Iterator[Document]:
    with _opened(path, compression) as stream:
        data = stream.read()
    mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    yield Document(_decoded(data[mark:], str(path), mark), str(path))


def _from_json(path: Path, suffix: str, compression: str, text_field: str) -> Iterator[Document]:
    hint = "; a .json file holds JSON lines or one list of objects" if suffix == ".json" else ""
    begun, offset = False, 0
    with _opened(path, compression) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                offset = len(codecs.BOM_UTF8)
                line = line[offset:]
            source = f"{path}, line {number}"
            if suffix == ".json" and not begun and line.lstrip().startswith(b"["):
                items = _parsed(_decoded(line + stream.read(), str(path), offset), str(path), hint)
                for item, value in enumerate(items, 1):
                    source = f"{path}, item {item}"
                    yield Document(_field(value, text_field, source, hint), source)
                return
            if line.strip():
                begun = True
                value = _parsed(_decoded(line.rstrip(b"\r\n"), source, offset), source, hint)
                yield Document(_field(value, text_field, source, hint), source)
            offset += len(line)


def _from_parquet(path: Path, compression: str, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", f"reading {path}") from None
    with _opened(path, compression) as stream, tempfile.TemporaryFile() as unpacked:
        if compression:  # a table is read from its end
            shutil.copyfileobj(stream, unpacked, BUFFER_BYTES)
        try:
            file = cast(Any, unpacked if compression else stream)
            with parquet.ParquetFile(file, page_checksum_verification=True) as table:
                _check_field(text_field, table.schema_arrow.names, str(path))
                number = 0
                for batch in table.iter_batches(ROWS_AT_A_TIME, columns=[text_field]):
                    column = batch.column(text_field)
                    is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
                    # as bytes, so that what is not UTF-8 is found with its row
                    for value in (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist():
                        number += 1
                        source = f"{path}, row {number}"
                        if is_text and value is not None:
                            value = _decoded(value, source, 0)
                        yield Document(checked_text(value, text_field, source), source)
        except pyarrow.ArrowException as error:
            raise _unreadable(path, error) from error


def _decoded(data: bytes, source: str, offset: int) -> str:
    """`data`, which begins at byte `offset` of its file, as text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {offset + error.start} (0x{data[error.start]:02x})"
        raise ConfigError(f"task.data: {source} is not UTF-8 at {byte}; convert it to UTF-8") from error


def _parsed(text: str, source: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ConfigError(
            f"task.data: {source} is not JSON: {error.msg} at {line}column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"task.data: {source} cannot be read as JSON: {error}{hint}") from error


def _field(value: object, text_field: str, source: str, hint: str) -> str:
    if not isinstance(value, dict):
        raise ConfigError(f"task.data: {source} is {shortened(value)}, not an object with fields{hint}")
    _check_field(text_field, list(value), source)
    text = checked_text(value[text_field], text_field, source)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(f"task.data: {source} has {half} alone, half of a surrogate pair and no character") from error
    return text


def _check_field(text_field: str, fields: Sequence[str], source: str) -> None:
    listed = ", ".join(fields) or "none"
    check(text_field in fields, "task.text_field", text_field, f"the fields of {source} are {listed}")


# --- bytes ---


@contextmanager
def _opened(path: Path, compression: str) -> Iterator[io.BufferedReader]:
    """A file's bytes, decompressed; what goes wrong while they are read is a ConfigError with the file."""
    try:
        with open(path, "rb") as file:
            if compression == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield io.BufferedReader(cast(Any, unpacked), BUFFER_BYTES)
            elif compression == ".zst":
                yield io.BufferedReader(_ZstdFrames(file, path), BUFFER_BYTES)
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return ConfigError(f"task.data: {path} cannot be read: {reason}")


class _ZstdFrames(io.RawIOBase):
    """All frames of a zstd file as one stream; EOFError where one is cut off, where zstandard's reader merely stops."""

    def __init__(self, file: BinaryIO, path: Path):
        try:
            import zstandard
        except ImportError:
            raise MissingExtraError("zstandard", "text", f"reading {path}") from None
        # files made with --long need windows above the default limit
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._error = zstandard.ZstdError
        self._file = file
        self._frame = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(BUFFER_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ended before the end of a zstd frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(f"{error}") from error
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
