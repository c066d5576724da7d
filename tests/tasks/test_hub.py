"""Streams of documents: each once, in one order, however often it stops and resumes. Folders stand in for the hub."""

import builtins
import gzip
import json
from functools import cache
from itertools import islice

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from hyla.errors import ConfigError, MissingExtraError, RunError
from hyla.tasks import hub
from hyla.tasks.hub import DocumentStream, HubSource, read_split

PLACE = ("epoch", "block", "shard", "row", "position")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No network, and nothing written outside the test's folder, also where `datasets` was imported before."""
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "home" / name))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_jsonl_gz(path, rows):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)


WRITE = {".jsonl": write_jsonl, ".jsonl.gz": write_jsonl_gz, ".parquet": write_parquet}


@pytest.fixture
def make(tmp_path):
    """Write a dataset folder: one file per list of texts."""

    def write(*shards, suffix=".jsonl", split="train", field="text"):
        folder = tmp_path / "dataset"
        folder.mkdir(exist_ok=True)
        for number, texts in enumerate(shards):
            rows = [{"id": n, field: text} for n, text in enumerate(texts)]
            WRITE[suffix](folder / f"{split}-{number:03}{suffix}", rows)
        return HubSource.parse(f"hf:{folder}")

    return write


def numbered(count, num_shards=1):
    """`count` texts "0", "1" ... in consecutive shards of about the same size."""
    texts = [str(n) for n in range(count)]
    ends = [round(count * (shard + 1) / num_shards) for shard in range(num_shards)]
    return [texts[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture
def open_once(monkeypatch):
    """Find a dataset's files once: most of the time of a small stream. What was found holds no place."""
    monkeypatch.setattr(datasets, "load_dataset", cache(datasets.load_dataset))


def stream(source, *, part=0, num_parts=1, block=10, seed=0, state=None):
    return DocumentStream(source, "train", "text", part=part, num_parts=num_parts, block=block, seed=seed, state=state)


def take(documents, count):
    return [document.text for document in islice(documents, count)]


def place(documents):
    """The saved position, as it comes back from a file."""
    state = json.loads(json.dumps(documents.state()))
    return tuple(state[name] for name in PLACE)


def resumed(source, documents, **settings):
    return stream(source, state=json.loads(json.dumps(documents.state())), **settings)


# --- order and resuming ---


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_two_resumes_give_every_document_once_in_the_same_order(make, num_shards, suffix):
    """The case of huggingface/datasets#8308: 100 documents, a block of 10, stop at 20, at 45, and finish."""
    source = make(*numbered(100, num_shards), suffix=suffix)
    uninterrupted = take(stream(source), 100)
    assert sorted(uninterrupted, key=int) == [str(n) for n in range(100)]
    assert uninterrupted != sorted(uninterrupted, key=int)

    given, documents = [], stream(source)
    for stop in (20, 45, 100):
        before = place(documents)
        while len(given) < stop:
            given.append(next(documents).text)
            assert place(documents) > before
            before = place(documents)
        documents = resumed(source, documents)
        assert place(documents) == before
    assert given == uninterrupted


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
@pytest.mark.parametrize("block", [7, 1000])
def test_resuming_after_any_number_of_documents_over_two_epochs(open_once, make, num_shards, num_parts, block):
    source = make(*numbered(41, num_shards))
    for part in range(num_parts):
        settings = {"part": part, "num_parts": num_parts, "block": block, "seed": 5}
        expected = take(stream(source, **settings), 90)
        documents, given = stream(source, **settings), []
        for count in (0, 1, 3, 3, 10, 14, 1, 27, 31):
            given += take(documents, count)
            documents = resumed(source, documents, **settings)
        assert given == expected
        again = resumed(source, documents, **settings)
        assert place(again) == place(documents)
        assert take(again, 20) == take(documents, 20)


def test_many_rows_and_blocks_that_cross_tables_and_shards(make, monkeypatch):
    source = make(*numbered(500, 4))
    expected = take(stream(source, block=90), 1100)
    monkeypatch.setattr(hub, "ROWS_AT_A_TIME", 11)
    assert take(stream(source, block=90), 1100) == expected
    documents = stream(source, block=90)
    given = take(documents, 317)
    assert given + take(resumed(source, documents, block=90), 783) == expected


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
def test_parts_are_disjoint_and_together_the_split_in_every_epoch(open_once, make, num_shards, num_parts):
    source = make(*numbered(60, num_shards))
    parts = []
    for part in range(num_parts):
        documents = stream(source, part=part, num_parts=num_parts, block=4)
        epochs = [[], [], []]
        document = next(documents)
        while documents.state()["epoch"] < 3:
            epochs[documents.state()["epoch"]].append(document.text)
            document = next(documents)
        parts.append(epochs)
        assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
        assert abs(len(epochs[0]) - 60 / num_parts) < 2
    assert sorted(int(text) for part in parts for text in part[0]) == list(range(60))


def test_whole_shards_go_to_a_part_where_they_divide_evenly(make):
    shards = numbered(60, 6)
    source = make(*shards)
    assert set(take(stream(source, part=1, num_parts=3), 20)) == {*shards[1], *shards[4]}


def test_epochs_seeds_and_parts_have_orders_of_their_own(open_once, make):
    source = make(*numbered(60, 3))
    documents = stream(source, block=20)
    first, second = take(documents, 60), take(documents, 60)
    assert sorted(first) == sorted(second)
    assert first != second
    assert take(stream(source, block=20), 60) == first
    assert take(stream(source, block=20, seed=1), 60) != first
    # the shards' order changes too
    assert len({int(take(stream(source, block=2, seed=seed), 1)[0]) // 20 for seed in range(20)}) == 3


def test_a_block_is_shuffled_within_itself(make):
    documents = stream(make(*numbered(60)), block=20)
    for block in range(3):
        texts = [int(text) for text in take(documents, 20)]
        assert sorted(texts) == list(range(20 * block, 20 * block + 20))
        assert texts != sorted(texts)


def test_block_one_is_the_order_of_the_files(make):
    source = make(*numbered(30, 3))
    assert take(stream(source, block=1), 60) == [str(n) for n in range(30)] * 2


def test_empty_documents_are_left_out_and_do_not_count(open_once, make):
    texts = [text for n in range(40) for text in (str(n), "", " \n")[: 1 + n % 3]] + [""] * 30
    source = make([""] * 20, texts, [" "])
    expected = take(stream(source, block=7), 80)
    assert sorted(expected[:40], key=int) == [str(n) for n in range(40)] == sorted(expected[40:], key=int)
    for stop in range(0, 80, 7):
        documents = stream(source, block=7)
        take(documents, stop)
        assert take(resumed(source, documents, block=7), 80 - stop) == expected[stop:]


def test_documents_say_where_they_are_from(make):
    source = make(["a", "b"], ["c"])
    assert [document.source for document in islice(stream(source, block=1), 3)] == [
        f"{source}, split train, shard 1, row 1",
        f"{source}, split train, shard 1, row 2",
        f"{source}, split train, shard 2, row 1",
    ]


@pytest.mark.parametrize("suffix", WRITE)
def test_text_comes_as_it_is(make, suffix):
    texts = ["a\r\nb", "line\u2028separator", "Grüße 🐍", "\ufeffmark", "x" * 100_000]
    assert take(stream(make(texts, suffix=suffix), block=1), 5) == texts


def test_an_error_does_not_lose_documents_for_who_tries_again(make, monkeypatch):
    source = make(*numbered(50))
    expected = take(stream(source), 50)
    documents = stream(source)
    given = take(documents, 20)
    read = hub.HubSplit.documents

    def failing(self, *arguments):
        yield from islice(read(self, *arguments), 5)
        raise ConfigError("the line is dead")

    documents._reader = None  # read anew, as after an error
    with monkeypatch.context() as broken:
        broken.setattr(hub.HubSplit, "documents", failing)
        with pytest.raises(ConfigError, match="dead"):
            next(documents)
    assert given + take(documents, 30) == expected


def test_first_documents_of_a_split(make):
    source = make(["a", "", "b"], ["c", "d"], split="validation")
    make(["other"], split="train")
    assert list(read_split(source, "validation", "text", None)) == ["a", "b", "c", "d"]
    assert list(read_split(source, "validation", "text", 3)) == ["a", "b", "c"]
    assert list(read_split(source, "validation", "text", 100)) == ["a", "b", "c", "d"]
    assert list(read_split(source, "train", "text", None)) == ["other"]


# --- names ---


@pytest.mark.parametrize(
    ("entry", "name", "config"),
    [("hf:allenai/c4:en", "allenai/c4", "en"), ("hf:wikitext", "wikitext", None), ("hf:a/b:c-1.0", "a/b", "c-1.0")],
)
def test_names_of_the_hub(entry, name, config):
    source = HubSource.parse(entry)
    assert source == HubSource(name, config)
    assert str(source) == entry


def test_folders_may_have_colons_and_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a:b").mkdir()
    assert HubSource.parse(f"hf:{tmp_path}/a:b") == HubSource(f"{tmp_path}/a:b", None)
    assert HubSource.parse("hf:~/a:b:en") == HubSource(f"{tmp_path}/a:b", "en")


@pytest.mark.parametrize("entry", ["allenai/c4", "hf:", "hf::en", "hf:allenai/c4:", ""])
def test_other_names_are_refused(entry):
    with pytest.raises(ConfigError, match="hf:NAME:CONFIG"):
        HubSource.parse(entry)


def test_a_config_of_a_folder_is_chosen(tmp_path):
    for name in ("en", "de"):
        (tmp_path / "data" / name).mkdir(parents=True)
        write_jsonl(tmp_path / "data" / name / "train.jsonl", [{"text": name}])
    configs = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("en", "de")]
    (tmp_path / "data" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    folder = f"hf:{tmp_path}/data"
    assert list(read_split(HubSource.parse(f"{folder}:de"), "train", "text", None)) == ["de"]
    for entry, said in {folder: "Config name is missing.*de", f"{folder}:fr": "'fr' not found.*de"}.items():
        with pytest.raises(ConfigError, match=said):
            stream(HubSource.parse(entry))


# --- errors ---


def refused(action, kind=ConfigError):
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_there_is_named(make, tmp_path):
    source = make(["a"])
    assert "task.data = 'hf:no/such:en' cannot be read: Couldn't reach" in refused(
        lambda: stream(HubSource("no/such", "en"))
    )
    assert "nowhere" in refused(lambda: stream(HubSource(f"{tmp_path}/nowhere")))
    (tmp_path / "empty").mkdir()
    assert "any data files" in refused(lambda: stream(HubSource(f"{tmp_path}/empty")))
    said = refused(lambda: DocumentStream(source, "test", "text", part=0, num_parts=1, block=1, seed=0))
    assert said.startswith(f"task.data = '{source}' cannot be read")
    assert "Available splits: ['train']" in said
    assert "Available splits" in refused(lambda: list(read_split(source, "test", "text", None)))


@pytest.mark.parametrize(
    "error", [ConnectionError("no\nroute"), TimeoutError(), RuntimeError("scripts are not supported")]
)
def test_whatever_the_package_raises_is_one_line(make, monkeypatch, error):
    def failing(*args, **kwargs):
        raise error

    source = make(["a"])
    monkeypatch.setattr(datasets, "load_dataset", failing)
    reason = " ".join(str(error).split()) or type(error).__name__
    assert refused(lambda: stream(source)) == f"task.data = '{source}' cannot be read: {reason}"


@pytest.mark.parametrize("suffix", WRITE)
def test_a_missing_field_is_named_with_the_columns(make, suffix):
    source = make(["a"], field="body", suffix=suffix)
    expected = f"task.text_field = 'text' is not possible: the columns of {source}, split train are id, body"
    assert refused(lambda: next(stream(source))) == expected
    assert refused(lambda: list(read_split(source, "train", "text", 1))) == expected


@pytest.mark.parametrize("suffix", WRITE)
@pytest.mark.parametrize(("value", "shown"), [(5, "5"), (None, "None"), (["a"], "['a']")])
def test_values_that_are_not_text_are_named(make, suffix, value, shown):
    rows = [value, value] if value is not None else ["a", value]
    row = rows.index(value) + 1
    assert f"shard 1, row {row} holds {shown} there, not text" in refused(
        lambda: take(stream(make(rows, suffix=suffix)), 2)
    )


def test_damage_in_a_later_shard_is_named(make, tmp_path):
    source = make(["a"], ["b"])
    (tmp_path / "dataset" / "train-001.jsonl").write_text('{"text": "b"}\n{"text": ')
    documents = stream(source, block=1)
    assert next(documents).text == "a"
    assert "cannot be read" in refused(lambda: next(documents))


@pytest.mark.parametrize("texts", [["", " "], []])
def test_a_split_without_documents_ends_with_an_error(make, texts):
    source = make(["", *texts])
    assert "part 0 of 1 has no documents" in refused(lambda: next(stream(source)))
    assert "part 2 of 3 has no documents" in refused(lambda: next(stream(make(["a", "b"]), part=2, num_parts=3)))


@pytest.mark.parametrize(("name", "value"), [("part", 1), ("part", -1), ("num_parts", 0), ("block", 0)])
def test_impossible_settings_are_named(make, name, value):
    source = make(["a"])
    assert f"{name} = {value}" in refused(lambda: stream(source, **{name: value}))


@pytest.mark.parametrize("changed", [{"seed": 1}, {"block": 9}, {"part": 1, "num_parts": 2}])
def test_a_place_saved_with_other_settings_is_refused(make, changed):
    source = make(*numbered(30))
    documents = stream(source)
    take(documents, 5)
    name, value = next(iter(changed.items()))
    said = refused(lambda: resumed(source, documents, **changed), RunError)
    assert f"saved with {name} = {documents.state()['of'][name]}, and here it is {value}" in said


def test_a_place_in_data_that_changed_is_refused(make):
    documents = stream(make(*numbered(30)))
    take(documents, 25)
    assert "past the end" in refused(lambda: next(resumed(make(*numbered(22)), documents)), RunError)
    assert "num_shards = 1" in refused(lambda: resumed(make(*numbered(30, 2)), documents), RunError)


@pytest.mark.parametrize("damage", [{"row": -1}, {"row": "3"}, {"block": None}])
def test_a_damaged_place_is_refused(make, damage):
    source = make(["a"])
    state = {**stream(source).state(), **damage}
    assert "damaged" in refused(lambda: stream(source, state=state), RunError)


def test_the_missing_package_is_named_with_its_extra(make, monkeypatch):
    real, source = builtins.__import__, make(["a"])

    def without(module, *args, **kwargs):
        if module == "datasets":
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"datasets.*hyla\[text\]"):
        stream(source)


def test_nothing_is_written_outside_the_home_of_the_hub(make, tmp_path):
    take(stream(make(["a"])), 3)
    assert {path.name for path in tmp_path.iterdir()} <= {"dataset", "home"}
