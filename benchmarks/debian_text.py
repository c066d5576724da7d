"""Text that Debian packages, as a corpus for `hyla train text`: one JSON line per document, one file per source.

    apt-get install linux-doc-6.1 python3.11-doc anarchism bible-kjv-text bible-kjv
    python benchmarks/debian_text.py corpus

writes corpus/train/{linux,python,anarchism}.jsonl; corpus/shift/bible.jsonl, a text of another kind to measure on; and the
documents that runs hold out by default once more, corpus/held_out/*.jsonl, to measure on each source by itself.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hyla.tasks.corpus import held_out
from hyla.tasks.text import TextConfig

DOC = Path("/usr/share/doc")
# package -> what is taken of it; the sources of the manuals, not the pages made from them
SOURCES = {
    "linux": ("linux-doc-6.1/Documentation", r"^(?!translations/).*\.(rst|txt)(\.gz)?$"),
    "python": ("python3.11/html/_sources", r"\.rst\.txt$"),
    "anarchism": ("anarchism/markdown", r"\.(md|markdown)(\.gz)?$"),
}


def documents(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """(name, text) of every file of a folder whose path in it matches; those that are not UTF-8 are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and re.search(pattern, str(path.relative_to(folder))):
            content = path.read_bytes()
            try:
                text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield str(path.relative_to(folder)), text


def bible_books() -> Iterator[tuple[str, str]]:
    """The books of the King James Bible, a verse a line."""
    printed = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    books: dict[str, list[str]] = {}
    for line in printed.splitlines():
        book, verse = re.match(r"(\d?[A-Za-z]+?)\d+:\d+ (.*)", line).groups()  # type: ignore[union-attr]
        books.setdefault(book, []).append(verse)
    for book, verses in books.items():
        yield book, "\n".join(verses) + "\n"


def write(path: Path, found: Iterator[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = size = 0
    with open(path, "w", encoding="utf-8") as file:
        for name, text in found:
            file.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(text.encode())
    print(f"{path}: {count:,} documents, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name, (folder, pattern) in SOURCES.items():
        found = list(documents(DOC / folder, pattern))
        write(out / "train" / f"{name}.jsonl", iter(found))
        fraction, seed = TextConfig.held_out_fraction, TextConfig.split_seed
        write(out / "held_out" / f"{name}.jsonl", (pair for pair in found if held_out(pair[1], fraction, seed)))
    write(out / "shift" / "bible.jsonl", bible_books())
