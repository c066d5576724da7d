"""What is published in results/ is whole, can be read by this version, and keeps its names."""

from pathlib import Path

import pytest

from hyla.experiments.experiment import run_name
from hyla.report.comparison import summarise
from hyla.report.plan import RUNS, read_plan
from hyla.report.published import results_page
from hyla.runs import CHECKPOINTS, Run
from hyla.training.config import config_from_dict
from hyla.training.loop import evaluate, load_model

ROOT = Path(__file__).parent.parent
EXPERIMENTS = sorted(path.parent for path in (ROOT / "results").glob("*/plan.json"))
RUN_FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/runs/*/config.json"))
WITH_WEIGHTS = [path for path in RUN_FOLDERS if (path / CHECKPOINTS).exists()]


def name_of(path):
    return path.name


def test_something_is_published():
    assert EXPERIMENTS
    assert WITH_WEIGHTS


@pytest.mark.parametrize("path", RUN_FOLDERS, ids=name_of)
def test_a_published_run_would_not_be_trained_again(path):
    """A run's name is the hash of its config. Where this fails because a config field was added, leave the field out of the
    hash while it has its default: a run without it is the same run."""
    assert run_name(config_from_dict(Run(path).config)) == path.name


@pytest.mark.parametrize("path", WITH_WEIGHTS, ids=name_of)
def test_published_weights_give_the_published_scores(path):
    """Of runs that have ended, on the first sequences of what was measured, so not to the last digit."""
    result = Run(path).result
    model, task, config = load_model(path)
    if result is None:
        return
    scores = evaluate(model, task, ["held_out"], 2_048, config.training.precision)
    metric = task.headline
    assert scores["held_out"][metric] == pytest.approx(result["splits"]["held_out"][metric], abs=0.05)


def test_the_results_page_is_made_from_the_folders():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == results_page(EXPERIMENTS, ROOT / "docs")


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name_of)
def test_every_run_that_is_there_is_in_the_plan(folder):
    comparison = summarise(read_plan(folder), folder)
    named = {run.name for run in comparison.runs}
    assert {path.name for path in (folder / RUNS).iterdir()} <= named
