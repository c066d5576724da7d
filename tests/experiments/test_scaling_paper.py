"""The second paper's experiments: the right runs, at its sizes, and docstrings that say what they are."""

import functools
import re
from dataclasses import replace
from math import comb

import pytest

from hyla.errors import ConfigError
from hyla.experiments.cost import duration, num_weights, peak_gib, seconds_each, seconds_left, step_seconds
from hyla.experiments.hypernetwork_paper import Request
from hyla.experiments.scaling_paper import EXPERIMENTS
from hyla.models.mlp import MLPConfig
from hyla.tasks.support import make_support
from hyla.training.config import make_task, preset_paper

EVERY = pytest.mark.parametrize("name", EXPERIMENTS)


@functools.cache
def made(name, budget_name="paper"):
    """An experiment, whose runs are listed once for all tests; of budget paper, which has three seeds, only the first."""
    return EXPERIMENTS[name](Request(budget_name, seeds=(0,) if budget_name == "paper" else None))


@EVERY
@pytest.mark.parametrize("budget_name", ["quick", "short", "paper"])
def test_every_budget_has_a_plan_and_says_what_it_shows(name, budget_name):
    experiment = made(name, budget_name)
    plan = experiment.plan("hyla reproduce")
    assert (plan.name, plan.budget) == (name, budget_name)
    (steps,) = {run.config.training.steps for run in experiment.runs}
    assert f"{steps:,}" in plan.budget_note
    assert len(plan.runs) == len(experiment.runs)  # no two rows train the same
    assert "decodability" in plan.figures
    assert len(experiment.seeds) == (3 if budget_name == "short" else 1)
    if budget_name == "quick":
        left = seconds_left(seconds_each([(run.config, 0, None) for run in experiment.runs]), 2)
        assert left < 4 * 60, duration(left)
    if budget_name != "paper":  # every one can be made; the largest of the paper take minutes
        for config in {run.config.task: run.config for run in experiment.runs if run.seed == 0}.values():
            assert {"train", "held_out"} <= set(make_task(config).splits)


def test_there_are_three_seeds():
    assert EXPERIMENTS["hyperteacher-connected"](Request("paper")).seeds == (0, 1, 2)


@EVERY
def test_docstrings_say_what_it_costs_and_how_to_run_it(name):
    text = EXPERIMENTS[name].__doc__
    for part in ("Setting:", f"Command: hyla reproduce {name} --budget short", "Cost:", "Reported:"):
        assert part in text
    assert int(re.findall(r"budget paper (\d+)\s+runs", text)[0]) == 3 * len(made(name).runs)
    assert int(re.findall(r"[Bb]udget\s+short: (\d+)\s+runs", text)[0]) == len(made(name, "short").runs)


@EVERY
def test_paper_budgets_have_the_papers_optimiser(name):
    for run in made(name).runs:
        optimizer, loop = run.config.optimizer, run.config.training
        assert (optimizer.schedule, optimizer.warmup_steps, optimizer.decay) == ("constant", 0, "matrices")
        assert (loop.batch_size, loop.precision) == (128, "float32")
        assert run.config.task.split_seed == run.seed
        assert (optimizer.lr, optimizer.weight_decay, loop.steps) == {
            "hyperteacher": (3e-4, 0.003, 300_000),
            "preference": (1e-4, 1e-3, 3_000_000),
            "goal": (1e-3, 0.03, 200_000),
        }[run.config.task_name]


def test_rows_of_the_data_experiments_name_the_combinations_they_train_on():
    for name in ("hyperteacher-data", "hyperteacher-scaling-law", "preference-data"):
        for variant in made(name, "short").variants:
            task, axes = variant.candidates[0].task, variant.axes
            count = task.num_preferences if name.startswith("preference") else task.num_modules
            total = sum(comb(count, size) for size in range(1, task.num_hot + 1))
            support = make_support(task.support, count, task.num_hot, task.held_out_fraction, 0)
            assert axes["trained_tasks"] == len(support.train)
            assert f"{len(support.train):,} of {total:,} trained" in variant.name


def test_both_supports_of_pairs_are_measured_on_the_same_combinations():
    tasks = [make_task(variant.candidates[0]) for variant in made("hyperteacher-connected", "short").variants]
    held_out = [{tuple(row) for row in task.combinations["held_out"].tolist()} for task in tasks]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize(("changes", "field"), [({"grid": "full"}, "grid"), ({"select": "validation"}, "select")])
def test_there_is_no_grid_to_choose_from(changes, field):
    with pytest.raises(ConfigError, match=f"{field} = "):
        EXPERIMENTS["hyperteacher-support"](Request("short", **changes))


def test_costs_grow_with_the_model():
    paper = preset_paper("hyperteacher")
    assert num_weights(paper) == pytest.approx(3 * 1024**2, rel=0.03)
    assert 0.3 < step_seconds(paper) < 0.6
    smaller = replace(paper, model=replace(paper.model, width=512))
    assert 3 < step_seconds(paper) / step_seconds(smaller) < 4.1
    assert step_seconds(preset_paper("hyperteacher", "hypernetwork")) < 0.1 * step_seconds(paper)
    sizes = [peak_gib(preset_paper("hyperteacher", name)) for name in ("hypernetwork", "mlp", "transformer")]
    assert all(0.3 < size < 3 for size in sizes)
    assert isinstance(paper.model, MLPConfig)
