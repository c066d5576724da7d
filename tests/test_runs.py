import json
import math
import subprocess
import sys

import pytest

from hyla.errors import RunError
from hyla.runs import MetricsLog, check_free, create_run, open_run, read_json, write_json


def test_numbers_that_are_not_finite_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, 1.5, [None]], "b": {"c": None}}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_mistake_in_a_file_has_its_place(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(RunError, match=r"a.json, line 2, column 6"):
        read_json(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match=r"b\.json cannot be read"):
        read_json(tmp_path / "b.json")
    with pytest.raises(RunError, match=r"c\.json does not exist"):
        read_json(tmp_path / "c.json")


def test_a_line_cut_short_is_left_out_and_then_dropped(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    for step in (1, 2, 3):
        log.append({"step": step, "loss": math.nan})
    with open(log.path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in log.read()] == [1, 2, 3]
    log.keep_until(2)
    assert log.path.read_text() == '{"step": 1, "loss": null}\n{"step": 2, "loss": null}\n'
    log.append({"step": 3})
    assert [line["step"] for line in log.read()] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2, column \d+"):
        MetricsLog(tmp_path / "metrics.jsonl").read()


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path):
    create_run(tmp_path / "run", {"a": 1})
    with pytest.raises(RunError, match=r"holds another run \(unfinished\); go on with it: hyla resume"):
        check_free(tmp_path / "run")
    write_json(tmp_path / "run" / "result.json", {"state": "finished", "step": 1})
    with pytest.raises(RunError, match=r"holds another run \(finished\)"):
        create_run(tmp_path / "run", {"a": 2})
    assert open_run(tmp_path / "run").config == {"a": 1}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="not an empty folder"):
        check_free(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="not an empty folder"):
        check_free(tmp_path / "file")
    with pytest.raises(RunError, match="not a folder one may write to"):
        check_free(tmp_path / "file" / "run")
    check_free(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(RunError, match="no run folder at"):
        open_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"is not a run folder: it holds no config.json"):
        open_run(tmp_path)


def test_states(tmp_path):
    run = create_run(tmp_path / "run", {})
    assert run.state == "unfinished"
    for state in ("finished", "diverged"):
        write_json(run.path / "result.json", {"state": state, "step": 1})
        assert run.state == state


def test_a_second_process_is_kept_out(tmp_path):
    run = create_run(tmp_path / "run", {})
    code = "import sys; from hyla.runs import open_run\nwith open_run(sys.argv[1]).locked(): print('in')"
    with run.locked():
        done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False)
        assert "is in use by another process" in done.stderr
        assert done.stdout == ""
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "in\n"
