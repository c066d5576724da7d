"""Local files: what every kind holds comes back as it was written, and every way to fail names its place."""

import builtins
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hyla.errors import ConfigError, MissingExtraError
from hyla.tasks.documents import Document, find_files, read_documents

TEXTS = ["first", "", "  \t\n ", "two\r\nlines\r\n", "line\u2028separator\u2029 and \x85next", "Grüße 语言 🐍", "last"]
KEPT = [text for text in TEXTS if text.strip()]


def json_lines(texts, ascii_only=True):
    return "".join(json.dumps({"id": n, "text": text}, ensure_ascii=ascii_only) + "\n" for n, text in enumerate(texts))


def write_parquet(path, texts, rows=2):
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
    parquet.write_table(table, path, rows, write_page_checksum=True)


def frames(data, size=1000):
    """`data` as many zstd frames."""
    return b"".join(zstandard.compress(data[start : start + size]) for start in range(0, len(data), size))


def members(data, size=1000):
    return b"".join(gzip.compress(data[start : start + size]) for start in range(0, len(data), size))


def zstd(data):
    """As the program zstd writes it, with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstd}


def texts_of(path, text_field="text"):
    return [document.text for document in read_documents(Path(path), text_field)]


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def failure(path, text_field="text"):
    """The message of reading a file that cannot be read; it has one line and names the file."""
    with pytest.raises(ConfigError) as caught:
        texts_of(path, text_field)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# --- what is read ---


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines(tmp_path, suffix, ascii_only, compression):
    path = write(tmp_path / f"a{suffix}{compression}", PACK[compression](json_lines(TEXTS, ascii_only).encode()))
    assert list(read_documents(path, "text")) == [
        Document(text, f"{path}, line {number}") for number, text in enumerate(TEXTS, 1) if text.strip()
    ]


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", ["", "\ufeff", "\n \n"])
def test_a_list_of_json_objects(tmp_path, before, indent, compression):
    data = before + json.dumps([{"text": text} for text in TEXTS], indent=indent, ensure_ascii=False)
    path = write(tmp_path / f"a.json{compression}", PACK[compression](data.encode()))
    assert texts_of(path) == KEPT
    assert [document.source for document in read_documents(path, "text")][1] == f"{path}, item 4"


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_parquet(tmp_path, kind, compression):
    table = pyarrow.table({"text": pyarrow.array(TEXTS).cast(kind), "texts": [1] * len(TEXTS)})
    parquet.write_table(table, tmp_path / "plain", row_group_size=2)
    path = write(tmp_path / f"a.parquet{compression}", PACK[compression]((tmp_path / "plain").read_bytes()))
    assert list(read_documents(path, "text")) == [
        Document(text, f"{path}, row {number}") for number, text in enumerate(TEXTS, 1) if text.strip()
    ]


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.rst", "README", "a.jsonl.txt", "archive.jsonl-old"])
def test_every_other_file_is_one_document(tmp_path, name, compression):
    text = "\r\n".join(KEPT)
    path = write(tmp_path / (name + compression), PACK[compression](("\ufeff" + text).encode()))
    assert list(read_documents(path, "text")) == [Document(text, str(path))]


def test_a_byte_order_mark_is_dropped_at_the_start_alone(tmp_path):
    assert texts_of(write(tmp_path / "a.txt", "\ufeffa\ufeffb")) == ["a\ufeffb"]
    assert texts_of(write(tmp_path / "a.jsonl", "\ufeff" + json_lines(["a"]))) == ["a"]
    assert texts_of(write(tmp_path / "a.jsonl.zst", frames(("\ufeff" + json_lines(["a", "b"])).encode(), size=1))) == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz", "a.jsonl.zst", "a.json.zst"])
@pytest.mark.parametrize("text", ["", "\ufeff", "\n", " \r\n\r\n"])
def test_files_of_white_space_have_no_documents(tmp_path, name, text):
    assert texts_of(write(tmp_path / name, PACK[Path(name).suffix if name.count(".") > 1 else ""](text.encode()))) == []


def test_blank_lines_and_a_missing_last_newline_lose_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert [tuple(document) for document in read_documents(path, "text")] == [
        ("a", f"{path}, line 1"),
        ("b", f"{path}, line 4"),
    ]


def test_empty_tables_and_lists_have_no_documents(tmp_path):
    write_parquet(tmp_path / "a.parquet", [])
    assert texts_of(tmp_path / "a.parquet") == []
    assert texts_of(write(tmp_path / "a.json", "[]")) == []


@pytest.mark.parametrize("pack", [members, frames, zstandard.compress, gzip.compress])
@pytest.mark.parametrize("size", [997, 200_000])
def test_no_line_is_lost_where_compressed_blocks_end(tmp_path, pack, size):
    texts = [f"{n} " + "x" * (n * 37 % 400) for n in range(2000)] + ["y" * 300_000]
    data = json_lines(texts).encode()
    packed = pack(data, size) if pack in (members, frames) else pack(data)
    path = write(tmp_path / ("a.jsonl.gz" if pack in (members, gzip.compress) else "a.jsonl.zst"), packed)
    assert texts_of(path) == texts


def test_skippable_frames_and_long_windows_of_zstd(tmp_path):
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"extra"
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = zstandard.compress(b"a ") + skippable + long.compress(b"b ") + long.flush() + zstandard.compress(b"c")
    assert texts_of(write(tmp_path / "a.txt.zst", data)) == ["a b c"]


def test_json_lines_are_read_as_a_stream(tmp_path):
    """The first document comes before what would fail later on is read."""
    for name, pack in {"a.jsonl": bytes, "a.jsonl.gz": gzip.compress, "a.jsonl.zst": zstandard.compress}.items():
        broken = json_lines([f"{n}" for n in range(100)]) + "{"
        documents = read_documents(write(tmp_path / name, pack(broken.encode())), "text")
        assert [next(documents).text for _ in range(100)] == [f"{n}" for n in range(100)]
        with pytest.raises(ConfigError, match="line 101 is not JSON"):
            next(documents)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"))),
    compression=st.sampled_from(list(PACK)),
    size=st.integers(1, 50),
)
def test_any_texts_come_back(folder, texts, compression, size):
    kept = [text for text in texts if text and not text.isspace()]
    split = {"": lambda data: data, ".gz": lambda data: members(data, size), ".zst": lambda data: frames(data, size)}[
        compression
    ]
    assert texts_of(write(folder / f"a.jsonl{compression}", split(json_lines(texts, False).encode()))) == kept
    items = json.dumps([{"text": text} for text in texts])
    assert texts_of(write(folder / f"a.json{compression}", split(items.encode()))) == kept
    write_parquet(folder / "plain", texts)
    assert texts_of(write(folder / f"a.parquet{compression}", split((folder / "plain").read_bytes()))) == kept
    text = "".join(texts).removeprefix("\ufeff")
    whole = texts_of(write(folder / f"a.txt{compression}", split(b"\xef\xbb\xbf" + text.encode())))
    assert whole == ([text] if text and not text.isspace() else [])


# --- what cannot be read ---


@pytest.mark.parametrize("compression", PACK)
def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path, compression):
    pack = PACK[compression]
    assert "not UTF-8 at byte 3 (0xff)" in failure(write(tmp_path / f"a.txt{compression}", pack(b"abc\xff")))
    assert "not UTF-8 at byte 5 (0xff)" in failure(write(tmp_path / f"b.txt{compression}", pack(b"\xef\xbb\xbfab\xff")))
    line = b'{"text": "a"}\n'
    lines = write(tmp_path / f"a.jsonl{compression}", pack(line * 2 + b'{"text": "\xe4"}\n'))
    assert failure(lines).startswith(f"task.data: {lines}, line 3 is not UTF-8 at byte {2 * len(line) + 10} (0xe4)")
    marked = write(tmp_path / f"b.jsonl{compression}", pack(b"\xef\xbb\xbf" + line + b"\xe4"))
    assert f"line 2 is not UTF-8 at byte {3 + len(line)} (0xe4)" in failure(marked)
    assert "not UTF-8 at byte 0 (0xff)" in failure(write(tmp_path / f"c.txt{compression}", pack("a".encode("utf-16"))))


def test_parquet_text_that_is_not_utf8_is_named_with_its_row(tmp_path):
    buffers = pyarrow.array([b"ab", b"c\xff"], pyarrow.binary()).buffers()
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert "row 2 is not UTF-8 at byte 1 (0xff)" in failure(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON: Expecting property name"),
        ("text", "line 2 is not JSON: Expecting value at column 1"),
        ('{"text": "cut o', "line 2 is not JSON: Unterminated string"),
        ('{"text": "a"} {"text": "b"}', "line 2 is not JSON: Extra data at column 15"),
        ("[1, 2]", "line 2 is [1, 2], not an object"),
        ('"a"', "line 2 is 'a', not an object"),
        (
            '{"body": "a", "id": 3}',
            "task.text_field = 'text' is not possible: the fields of {path}, line 2 are body, id",
        ),
        ("{}", "the fields of {path}, line 2 are none"),
        ('{"text": null}', "line 2 holds None there, not text"),
        ('{"text": 5}', "line 2 holds 5 there, not text"),
        ('{"text": ["a"]}', "line 2 holds ['a'] there, not text"),
        ('{"text": "a\\ud800b"}', "line 2 has \\ud800 alone, half of a surrogate pair"),
        ('{"text": ' + "9" * 5000 + "}", "line 2 cannot be read as JSON: Exceeds the limit"),
        ("[" * 200_000, "line 2 cannot be read as JSON: maximum recursion depth"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_bad_lines_are_named(tmp_path, suffix, line, said):
    path = write(tmp_path / f"a{suffix}", '{"text": "a"}\n' + line + "\n")
    assert said.replace("{path}", str(path)) in failure(path)


def test_surrogate_pairs_in_json_are_characters(tmp_path):
    assert texts_of(write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\udc0d"}')) == ["🐍"]


def test_bad_lists_and_other_json_files_are_named(tmp_path):
    assert "item 2 holds 5 there, not text" in failure(write(tmp_path / "a.json", '[{"text": "a"}, {"text": 5}]'))
    assert "item 1 is 'a', not an object" in failure(write(tmp_path / "b.json", '["a"]'))
    cut = failure(write(tmp_path / "c.json", '[\n{"text": "a"},\n{"text": "b"'))
    assert "is not JSON: Expecting ',' delimiter at line 3" in cut
    assert "JSON lines or one list of objects" in failure(write(tmp_path / "d.json", '{\n  "text": "a"\n}'))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1, 2], "row 1 holds 1 there, not text"),
        (["a", None], "row 2 holds None there, not text"),
        ([b"a", b"b"], "row 1 holds b'a' there, not text"),
        ([["a"], ["b"]], "row 1 holds ['a'] there, not text"),
        ([{"text": "a"}] * 2, "row 1 holds {'text': 'a'} there, not text"),
    ],
)
def test_bad_columns_are_named(tmp_path, column, said):
    parquet.write_table(pyarrow.table({"text": column, "other": [1, 2]}), tmp_path / "a.parquet")
    assert said in failure(tmp_path / "a.parquet")
    assert f"the fields of {tmp_path}/a.parquet are text, other" in failure(tmp_path / "a.parquet", "tex")


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet"])
def test_truncated_and_damaged_files_are_named(tmp_path, name, compression):
    texts = [os.urandom(50).hex() for _ in range(1000)]
    if name == "a.parquet":
        write_parquet(tmp_path / "plain", texts, 100)
        data = (tmp_path / "plain").read_bytes()
    else:
        data = json_lines(texts).encode()
    packed = PACK[compression](data)
    for kept in (5, len(packed) // 2, len(packed) - 1):
        assert "cannot be read" in failure(write(tmp_path / (name + compression), packed[:kept]))
    # between two frames the file would look whole
    assert "cannot be read" in failure(write(tmp_path / (name + compression), packed + packed[: len(packed) // 2]))
    assert "cannot be read" in failure(write(tmp_path / (name + compression), data[:500]))
    middle = len(packed) // 2
    damaged = packed[:middle] + bytes(byte ^ 255 for byte in packed[middle : middle + 50]) + packed[middle + 50 :]
    failure(write(tmp_path / (name + compression), damaged))


def test_truncated_parquet_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", [os.urandom(50).hex() for _ in range(1000)], 100)
    data = (tmp_path / "a.parquet").read_bytes()
    for kept in (0, 3, len(data) // 2, len(data) - 1):
        assert "cannot be read" in failure(write(tmp_path / "a.parquet", data[:kept]))
    holes = data[:1000] + bytes(1000) + data[2000:]
    assert "cannot be read" in failure(write(tmp_path / "a.parquet", holes))


def test_a_file_that_is_gone_is_named(tmp_path):
    for name in ("a.txt", "a.jsonl.gz", "a.parquet"):
        assert "No such file" in failure(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.txt.zst", "zstandard", "text"), ("a.parquet", "pyarrow", "parquet")]
)
def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch, name, package, extra):
    real = builtins.__import__

    def without(module, *args, **kwargs):
        if module.split(".")[0] == package:
            raise ImportError(module)
        return real(module, *args, **kwargs)

    write(tmp_path / name, b"")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"{package}.*hyla\[{extra}\]"):
        texts_of(tmp_path / name)


# --- which files ---


@pytest.fixture
def tree(tmp_path, monkeypatch):
    names = (
        "b.txt a.jsonl.gz sub/c.MD sub/deep/d.parquet.zst sub/page.html sub.txt/e.rst script.py .hidden.txt .git/f.txt"
    )
    for name in names.split():
        write(tmp_path / "data" / name, b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def found(*data):
    return [os.path.relpath(path) for path in find_files(list(data))]


def test_a_folder_gives_known_kinds_sorted_without_hidden_ones(tree):
    expected = ["data/a.jsonl.gz", "data/b.txt", "data/sub/c.MD", "data/sub/deep/d.parquet.zst", "data/sub.txt/e.rst"]
    assert found("data") == found(str(tree)) == found("data/") == expected
    assert all(path.is_absolute() for path in find_files(["data"]))


@pytest.mark.parametrize(
    "name",
    [f"a{suffix}{packed}" for suffix in ".txt .text .md .rst .jsonl .ndjson .json .parquet".split() for packed in PACK],
)
def test_kinds_taken_from_a_folder(tmp_path, name):
    path = write(tmp_path / name, b"")
    assert find_files([str(tmp_path)]) == [path]


def test_named_and_globbed_files_are_taken_whatever_they_are_called(tree):
    assert found("data/script.py", "data/.hidden.txt") == ["data/.hidden.txt", "data/script.py"]
    assert found("data/sub/*.html") == ["data/sub/page.html"]
    assert found("data/*") == ["data/a.jsonl.gz", "data/b.txt", "data/script.py"]
    assert found("data/**/*.[rm]*", "data/**/*.MD") == ["data/sub/c.MD", "data/sub.txt/e.rst"]
    assert found("data/**") == found("data", "data/script.py", "data/sub/page.html")


def test_a_file_with_two_names_is_taken_once(tree):
    assert found("data/b.txt", "data/*.txt", "data/../data/b.txt", str(tree / "b.txt")) == ["data/b.txt"]
    (tree / "z.txt").symlink_to("b.txt")
    assert found("data/*.txt") == found("data/z.txt", "data/b.txt") == ["data/b.txt"]


def test_the_order_of_entries_does_not_matter(tree):
    assert found("data/sub", "data/b.txt") == found("data/b.txt", "data/sub")


def test_links_to_folders_are_followed_but_not_in_circles(tree, tmp_path):
    write(tmp_path / "elsewhere" / "g.txt", b"x")
    before = found("data")
    (tree / "sub" / "link").symlink_to(tmp_path / "elsewhere")
    (tree / "sub" / "up").symlink_to(tree)
    assert sorted(found("data")) == sorted(before + ["data/sub/link/g.txt"])


def test_names_with_the_signs_of_globs_are_found_as_files(tmp_path, monkeypatch):
    folder = tmp_path / "a[1]"
    write(folder / "b*[2].py", b"x")
    monkeypatch.chdir(folder)
    assert found("b*[2].py") == found("*.py") == ["b*[2].py"]


def test_home_is_understood(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/data/b.txt", "~/data/*.py") == ["data/b.txt", "data/script.py"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", "name a file"),
        ("nowhere", "no such file or folder"),
        ("data/nothing.txt", "no such file or folder"),
        ("data/*.csv", "nothing matches"),
        ("nowhere/**/*.txt", "nothing matches"),
        ("data/s*b", "folders alone"),
        ("broken", "leads nowhere"),
        ("empty", "it has no files"),
        ("pages", r"\.txt.*\.parquet are taken, each also \.gz or \.zst; it has \.html\.gz \(3\), no suffix \(1\)"),
    ],
)
def test_entries_that_lead_to_nothing_are_named(tree, tmp_path, entry, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("gone")
    for name in ("1.html.gz", "2.html.gz", "deep/3.html.gz", "README", ".hidden.txt"):
        write(tmp_path / "pages" / name, b"x")
    with pytest.raises(ConfigError, match=said) as caught:
        find_files(["data", entry])
    assert f"task.data = {entry!r}" in str(caught.value)
