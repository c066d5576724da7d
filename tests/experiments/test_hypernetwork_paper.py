"""The paper's experiments: the right runs, at the paper's sizes, and docstrings that say what they are."""

import functools
import re
from collections import Counter

import pytest

from hyla.errors import ConfigError
from hyla.experiments.cost import duration, seconds_each, seconds_left
from hyla.experiments.experiment import setting
from hyla.experiments.hypernetwork_paper import EXPERIMENTS, Request, budget
from hyla.report.tables import SPLIT_LABELS
from hyla.training.config import config_to_dict, make_task, preset_paper

EVERY = pytest.mark.parametrize("name", EXPERIMENTS)


@functools.cache
def made(name, budget_name="paper"):
    """An experiment, whose runs are listed once for all tests."""
    return EXPERIMENTS[name](Request(budget_name))


@pytest.mark.parametrize("task", ["logic", "sraven"])
def test_budgets_differ_in_steps_alone_and_say_what_they_show(task):
    sections = []
    for name in ("quick", "short", "paper"):
        planned = budget(task, name)
        assert len(planned.note) > 40
        data = config_to_dict(planned.config)
        data.pop("training")
        data["optimizer"].pop("warmup_steps")
        sections.append(data)
    assert sections[0] == sections[1] == sections[2]
    paper = budget(task, "paper").config
    assert paper.training.steps == {"logic": 50_000, "sraven": 156_250}[task]
    assert paper.training.final_eval_samples == {"logic": 16_000, "sraven": 51_200}[task]


def test_an_unknown_budget_is_refused(unchecked):
    with pytest.raises(ConfigError, match="budget = 'huge'"):
        budget("logic", "huge")


@EVERY
@pytest.mark.parametrize("name_of_budget", ["quick", "paper"])
def test_every_budget_has_a_plan_and_says_what_it_shows(name, name_of_budget):
    experiment = made(name, name_of_budget)
    plan = experiment.plan("hyla reproduce")
    assert (plan.name, plan.budget) == (name, name_of_budget)
    steps = {run.config.training.steps for run in experiment.runs}
    assert f"{min(steps):,}" in plan.budget_note
    assert len(plan.runs) == len(experiment.runs)  # no two rows train the same
    assert {variant.mechanism for variant in plan.variants} >= {"softmax", "hyla"}
    assert plan.baseline is not None
    if name_of_budget == "quick":
        assert plan.selection == "none"
        left = seconds_left(seconds_each([(run.config, 0, None) for run in experiment.runs]), 2)
        assert left < 8 * 60, duration(left)


@EVERY
def test_the_paper_budget_selects_on_combinations_it_does_not_report(name):
    experiment = made(name)
    assert experiment.selection == "validation"
    sizes = Counter((run.variant.name, run.seed) for run in experiment.runs)
    assert set(sizes.values()) == {8 if name == "sraven-scaling" else 4}
    config = experiment.runs[0].config
    assert config.task.split_seed == f"official-{experiment.seeds[0]}"
    splits = make_task(config).combinations
    assert {"train", "validation", "held_out"} <= set(splits) <= set(SPLIT_LABELS)
    rows = {split: {tuple(map(int, row)) for row in splits[split]} for split in ("train", "validation", "held_out")}
    assert not rows["validation"] & (rows["train"] | rows["held_out"])
    # what is trained on is the paper's own set
    usual = EXPERIMENTS[name](Request("short", seeds=experiment.seeds)).runs[0].config
    plain = make_task(usual).combinations
    assert rows["train"] == {tuple(map(int, row)) for row in plain["train"]}
    assert rows["validation"] | rows["held_out"] == {tuple(map(int, row)) for row in plain["held_out"]}


@EVERY
def test_docstrings_say_what_it_costs_and_how_to_run_it(name):
    text = EXPERIMENTS[name].__doc__
    assert f"hyla reproduce {name} --budget paper" in text
    for part in ("Command:", "Cost:", "Reported:"):
        assert part in text
    (runs,) = re.findall(r"Cost: (\d+) runs", text)
    assert int(runs) == len(made(name).runs)


def test_what_is_asked_of_an_experiment():
    assert Request("quick").selection == "none"
    assert Request("paper").selection == "validation"
    assert Request("paper", grid="first").selection == "none"
    assert Request("short", grid="full", select="reported").selection == "reported"
    with pytest.raises(ConfigError, match=r"select = 'validation' .* add --grid full"):
        _ = Request("quick", select="validation").selection
    with pytest.raises(ConfigError, match=r"select = 'none' .* validation or reported"):
        _ = Request("paper", select="none").selection
    headline = EXPERIMENTS["logic-headline"]
    assert headline(Request("paper", seeds=(5, 6))).seeds == (5, 6)
    reported = headline(Request("paper", select="reported"))
    assert "optimistic" in reported.budget_note
    assert reported.runs[0].config.task.validation_fraction == 0  # nothing is taken from the reported split
    first = headline(Request("short")).runs[0].config
    assert (first.optimizer.lr, first.optimizer.weight_decay) == (1e-3, 0.1)


def test_the_headline_has_the_papers_setting():
    run = EXPERIMENTS["sraven-headline"](Request("paper", grid="first")).runs[0]
    paper = config_to_dict(preset_paper("sraven"))
    found = config_to_dict(run.config)
    assert (found["model"], found["optimizer"]) == (paper["model"] | {"mechanism": "softmax"}, paper["optimizer"])
    kept = {"validation_from": "held_out", "validation_fraction": 0.2}  # whether or not there is a choice to make yet
    assert found["task"] == paper["task"] | {"split_seed": "official-0"} | kept
    assert found["training"] == paper["training"] | {"eval_every": 5_000, "eval_samples": 4_096}


def test_the_sweep_covers_its_axes():
    experiment = made("logic-sweep", "quick")
    places = {(v.axes["num_points"], v.axes["held_out_fraction"]) for v in experiment.variants}
    assert places == {(n, f) for n in (16, 32, 64, 96) for f in (0.3, 0.5, 0.7)}
    for run in experiment.runs:
        assert run.variant.axes == {key: setting(run.config, f"task.{key}") for key in experiment.axes}
    assert experiment.only(["hyla, 16*"]).axes == experiment.axes


def test_ablations_have_every_row():
    for name in ("logic-ablation", "sraven-ablation"):
        rows = {v.name: v for v in made(name, "quick").variants}
        assert len(rows) == 10
        mixture = rows["mixture of experts"]
        model = mixture.candidates[0].model
        assert (model.mechanism, model.mlp, mixture.reported) == ("softmax", "mixture", None)
        assert all(row.mechanism == row.reported == name for name, row in rows.items() if row is not mixture)


def test_scaling_multiplies_every_width_and_goes_along_one_axis_at_a_time():
    experiment = made("sraven-scaling")
    base = preset_paper("sraven")
    for run in experiment.runs:
        model, axes = run.config.model, run.variant.axes
        for name in ("num_heads", "embed_dim", "qk_dim", "v_dim", "mlp_dim"):
            assert getattr(model, name) == getattr(base.model, name) * axes["width"]
        assert model.num_layers == axes["depth"]
        assert run.config.training.steps * run.config.training.batch_size == axes["million_instances"] * 1_000_000
        assert sum([axes["width"] != 1, axes["depth"] != 4, axes["million_instances"] != 20]) <= 1
    assert {run.config.optimizer.warmup_steps for run in experiment.runs} == {1_000, 3_000}


def test_latents_of_sraven_are_the_headlines_runs():
    names = [[run.name for run in made(f"sraven-{n}").runs] for n in ("latents", "headline")]
    assert names[0] == names[1]
    logic = made("logic-latents").runs[0].config
    assert (logic.task.num_points, logic.task.held_out_fraction, logic.seed) == (96, 0.5, 2024)
    assert logic.task.split_seed == "official-2024"


def test_one_setting_of_budget_paper_is_part_of_the_whole_grid():
    """What `--grid first` has trained is not trained again when the grid is."""
    first, full = (EXPERIMENTS["logic-headline"](Request("paper", grid=grid)) for grid in ("first", "full"))
    assert {run.name for run in first.runs} < {run.name for run in full.runs}
    assert first.selection == "none"
    assert "other four fifths" in first.budget_note
