"""What the terminal shows of jobs in every state."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_resume import tiny

from hyla.experiments.engine import Job, Pool
from hyla.experiments.experiment import with_settings
from hyla.experiments.live import Display, estimated_end, live_table, runs_table, summary
from hyla.runs import Run

POOL = Pool(workers=2, cores=4, memory_gib=8.0)


def jobs():
    made = []
    for number, (mechanism, state) in enumerate(
        [("softmax", "finished"), ("softmax", "diverged"), ("hyla", "running"), ("hyla", "waiting"), ("hyla", "failed")]
    ):
        config = replace(with_settings(tiny(steps=100), {"model.mechanism": mechanism}), seed=number)
        made.append(Job(Run(Path(f"run{number}")), config, mechanism, state))
    made[0].steps_per_second = made[2].steps_per_second = 50.0
    made[0].step, made[2].step, made[3].step = 100, 40, 10
    made[4].error = "no luck"
    return made


def shown(*things, terminal=False, height=40):
    console = Console(file=io.StringIO(), width=110, height=height, force_terminal=terminal, color_system=None)
    console.print(*things)
    return console.file.getvalue()


def test_a_line_of_all_jobs():
    line = summary(jobs(), "about 2 min, until 12:00")
    assert line == (
        "5 runs: 1 finished, 1 running, 1 waiting, 1 failed, 1 diverged; 50.0 steps/s; about 2 min, until 12:00"
    )


def test_the_live_table_has_a_row_for_every_variant_that_is_not_done():
    text = shown(live_table(jobs(), "soon", 40))
    (row,) = [line for line in text.splitlines() if line.startswith("hyla")]
    assert row.split() == [
        "hyla",
        "1",
        "1",
        "1",
        "50%",
        "50.0",
    ]  # running, waiting, failed; (40 + 10 + 100) of 300 steps
    assert not any(line.startswith("softmax") for line in text.splitlines())
    many = []
    for number in range(50):
        many += [replace(job, variant=f"row {number}") for job in jobs()[2:4]]
    text = shown(live_table(many, "soon", 24))
    assert len(text.splitlines()) <= 24
    assert "and 32 more variants" in text


def test_a_dry_run_lists_every_run_with_its_state_and_time():
    text = shown(runs_table(jobs(), POOL))
    for number, state in enumerate(["finished", "diverged", "running", "step 10 of 100", "failed: no luck"]):
        (line,) = [line for line in text.splitlines() if f"run{number}" in line]
        assert state in line
    assert "5 runs of 100 steps: 1 finished, 1 running, 1 waiting, 1 failed, 1 diverged" in text
    assert "2 at a time with 2 threads each (from speeds of 2 runs here)" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_what_ends_is_said_once(terminal):
    console = Console(file=io.StringIO(), width=200, height=40, force_terminal=terminal, color_system=None)
    made = jobs()
    with Display(console, POOL) as display:
        display.show(made)
        made[2].state = "finished"
        display.show(made)
        display.show(made)
    text = console.file.getvalue()
    assert "2 of 5 runs were there already" in text
    assert "1 of 5 failed before" in text
    assert text.count("finished: run2") == 1
    assert "finished: run0" not in text


def test_the_estimated_end_names_the_day_only_where_it_is_far():
    assert estimated_end(120.0).startswith("about 2 min, until ")
    assert " on " not in estimated_end(120.0)
    assert " on " in estimated_end(3 * 86_400.0)
