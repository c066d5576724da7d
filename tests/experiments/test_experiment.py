"""Variants, candidates and seeds: the runs that an experiment names, and what plan.json says of them."""

import json
from dataclasses import replace

import pytest
from test_resume import tiny

from hyla.errors import ConfigError
from hyla.experiments.compare import comparison
from hyla.experiments.experiment import (
    Experiment,
    Variant,
    config_hash,
    run_name,
    setting,
    with_seed,
    with_settings,
)
from hyla.experiments.hypernetwork_paper import budget
from hyla.report.plan import from_json, to_json
from hyla.training.config import config_from_dict, config_to_dict, preset_paper


def test_runs_are_named_by_their_whole_config():
    base = tiny()
    other = replace(base, optimizer=replace(base.optimizer, lr=2e-3))
    assert config_hash(base) != config_hash(other)
    assert run_name(base) == f"logic-hyla-seed0-{config_hash(base)}"
    assert config_hash(config_from_dict(json.loads(json.dumps(config_to_dict(base))))) == config_hash(base)


def test_held_out_sets_come_from_where_they_should():
    base = preset_paper("logic")
    assert with_seed(base, 3, "seed").task.split_seed == 3
    assert with_seed(base, 2, "official").task.split_seed == "official-2"
    with pytest.raises(ConfigError, match="official-5"):
        with_seed(base, 5, "official")
    assert [with_seed(base, seed, "paper").task.split_seed for seed in (0, 5, 2024)] == [
        "official-0",
        5,
        "official-2024",
    ]
    three_terms = with_settings(base, {"task.num_terms": 3})
    assert with_seed(three_terms, 0, "paper").task.split_seed == 0
    fixed = with_settings(base, {"task.split_seed": 7})
    assert {with_seed(fixed, seed, "fixed").task.split_seed for seed in (0, 3)} == {7}
    assert {with_seed(fixed, seed, "fixed").seed for seed in (0, 3)} == {0, 3}


def test_settings_by_dotted_keys():
    config = with_settings(tiny(), {"optimizer.lr": 0.5, "model.mechanism": "linear", "seed": 4})
    assert (config.optimizer.lr, config.model.mechanism, config.seed) == (0.5, "linear", 4)
    assert [setting(config, key) for key in ("optimizer.lr", "seed")] == [0.5, 4]
    with pytest.raises(
        ConfigError, match=r"unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'"
    ):
        with_settings(config, {"model.num_haeds": 4})


def grid():
    rates = tuple(with_settings(tiny(), {"optimizer.lr": lr}) for lr in (1e-3, 3e-3))
    rows = [
        Variant(m, tuple(with_settings(c, {"model.mechanism": m}) for c in rates), reported=m)
        for m in ("softmax", "hyla", "hyla_plus")
    ]
    return Experiment(
        "rates", "Rates", tuple(rows), (0, 1), "custom", "For tests.",
        selection="validation", tuned=("optimizer.lr",), baseline="softmax",
    )  # fmt: skip


def test_runs_come_seed_by_seed_with_all_rows_of_a_seed():
    runs = grid().runs
    assert len({run.name for run in runs}) == 12
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6
    assert [run.variant.name for run in runs[:6]] == ["softmax", "softmax", "hyla", "hyla", "hyla_plus", "hyla_plus"]
    assert all(run.config.seed == run.seed == run.config.task.split_seed for run in runs)


def test_the_plan_names_every_run():
    experiment = grid()
    plan = experiment.plan("hyla sweep rates.toml")
    assert from_json(json.loads(json.dumps(to_json(plan)))) == plan
    assert set(plan.runs) == {run.name for run in experiment.runs}
    assert (plan.metric, plan.task, plan.baseline, plan.selection) == ("r2", "logic", "softmax", "validation")
    hyla = plan.variants[1]
    assert [candidate.settings for candidate in hyla.candidates] == [{"optimizer.lr": 1e-3}, {"optimizer.lr": 3e-3}]
    run = next(r for r in experiment.runs if (r.variant.name, r.candidate, r.seed) == ("hyla", 1, 1))
    assert hyla.candidates[1].runs[1] == run.name
    assert run.config.optimizer.lr == 3e-3


def test_a_part_of_an_experiment():
    experiment = grid()
    assert [v.name for v in experiment.only(["hyla"]).variants] == ["hyla"]
    assert [v.name for v in experiment.only(["hyla*", "hyla"]).variants] == ["hyla", "hyla_plus"]
    assert experiment.only(["hyla"]).baseline is None
    assert experiment.only(["s*", "hyla"]).baseline == "softmax"
    assert {run.name for run in experiment.only(["hyla"]).runs} < {run.name for run in experiment.runs}
    with pytest.raises(ConfigError, match=r"only = 'hylla' is not possible: nothing matches; there are softmax; hyla"):
        experiment.only(["hyla", "hylla"])


def test_an_experiment_needs_rows_and_seeds_each_once():
    experiment = grid()
    for change, message in (
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "each only once"),
        ({"variants": ()}, "variants"),
        ({"variants": experiment.variants[:1] * 2}, "each name only once"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(experiment, **change)


def test_a_comparison_shares_seeds_and_splits_between_mechanisms():
    quick = budget("logic", "quick")
    experiment = comparison(quick, quick.config, ["softmax", "hyla"], [0, 3])
    found = [(r.config.seed, r.config.model.mechanism, r.config.task.split_seed) for r in experiment.runs]
    assert found == [(0, "softmax", 0), (0, "hyla", 0), (3, "softmax", 3), (3, "hyla", 3)]
    assert (experiment.budget, experiment.baseline, experiment.selection) == ("quick", "softmax", "none")
    changed = comparison(quick, with_settings(quick.config, {"training.steps": 850}), ["linear", "hyla"], [0])
    assert (changed.budget, changed.baseline) == ("custom", None)
    assert "Changes settings of the quick budget and trains for 850 steps" in changed.budget_note
    with pytest.raises(ConfigError, match="each only once"):
        comparison(quick, quick.config, ["hyla", "hyla"], [0])
