"""Members of an ensemble end as the runs they would have been alone."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_resume import STEPS, tiny

from hyla.errors import ConfigError, RunError
from hyla.runs import open_run
from hyla.training.config import config_to_dict
from hyla.training.ensemble import Ensemble, member_configs, member_name
from hyla.training.loop import InterruptedRunError, Trainer, load_model, train


def variants():
    base = tiny(precision="float64", steps=12)
    return {
        "logic": base,
        "sraven": tiny("sraven", precision="float64", steps=12),
        "independent dropout": replace(base, model=replace(base.model, dropout_shared=False)),
        "mixture": replace(base, model=replace(base.model, mlp="mixture")),
        "softmax": replace(base, model=replace(base.model, mechanism="softmax", attention_dropout=0.0)),
        "hyla_plus": replace(base, model=replace(base.model, mechanism="hyla_plus")),
    }


def assert_equal_runs(path, alone, tolerance):
    one, two = (load_model(folder)[0].state_dict() for folder in (path, alone))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=tolerance, msg=name)
    lines = zip(open_run(path).metrics.read(), open_run(alone).metrics.read(), strict=True)
    for ours, theirs in lines:
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=10 * tolerance, rel=10 * tolerance)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e3 * tolerance)
        assert ("splits" in ours) == ("splits" in theirs)


@pytest.mark.parametrize("name", variants())
def test_members_equal_solo_runs(name, tmp_path):
    """CVP-04: other seeds, rates, decays and clipping; in float64, so that a difference is a fault and not rounding."""
    base = variants()[name]
    wild = replace(base.optimizer, lr=0.1, clip_norm=1.0)
    configs = [
        base,
        replace(base, seed=1, optimizer=wild, task=replace(base.task, split_seed=1)),
        replace(base, seed=2, optimizer=replace(base.optimizer, weight_decay=0.5, clip_norm=0.05)),
    ]
    results = Ensemble.start(configs, tmp_path / "together").run()
    assert {result["state"] for result in results.values()} == {"finished"}
    for config in configs:
        train(config, tmp_path / "alone" / member_name(config))
        assert_equal_runs(tmp_path / "together" / member_name(config), tmp_path / "alone" / member_name(config), 1e-9)


def test_members_equal_solo_runs_in_float32(tmp_path):
    configs = member_configs(tiny(), {"seeds": [3]})
    Ensemble.start(configs, tmp_path / "together").run()
    for config in configs:
        train(config, tmp_path / "alone" / member_name(config))
        assert_equal_runs(tmp_path / "together" / member_name(config), tmp_path / "alone" / member_name(config), 1e-5)


def test_a_member_that_diverges_does_not_touch_the_others(tmp_path):
    """CVP-04: one member goes NaN at step 10, another has a rate 100 times as large under clipping."""
    base = tiny(precision="float64")
    hot = replace(base, seed=1, optimizer=replace(base.optimizer, lr=0.1, clip_norm=1.0))
    configs = [base, hot, replace(base, seed=2)]
    ensemble = Ensemble.start(configs, tmp_path / "together")
    victim = ensemble.members[2]

    def poison(line):
        if victim.step == 9:
            with torch.no_grad():
                victim.model.head.weight[0, 0] = float("nan")

    results = ensemble.run(poison)
    states = [results[member_name(config)]["state"] for config in configs]
    assert states == ["finished", "finished", "diverged"]
    assert results[member_name(configs[2])]["step"] == 10
    for config in configs[:2]:
        train(config, tmp_path / "alone" / member_name(config))
        assert_equal_runs(tmp_path / "together" / member_name(config), tmp_path / "alone" / member_name(config), 1e-9)


def test_members_are_trainable_leaves_that_share_storage(tmp_path):
    ensemble = Ensemble.start(member_configs(tiny(), {"seeds": [2]}), tmp_path)
    before = [p.clone() for p in ensemble.members[1].model.parameters()]
    assert all(stacked.is_leaf and stacked.requires_grad for stacked in ensemble.stack.values())
    ensemble.update()  # the first step has rate 0
    for member in ensemble.members:
        member.step = 1
    ensemble.update()
    after = list(ensemble.members[1].model.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    for name, parameter in ensemble.members[1].model.named_parameters():
        assert torch.equal(parameter, ensemble.stack[name][1])


START = """
import json, os, signal, sys
from hyla.training.config import config_from_dict
from hyla.training.ensemble import Ensemble
configs = [config_from_dict(data) for data in json.loads(sys.argv[2])]
ensemble = Ensemble.start(configs, sys.argv[1])
ensemble.run(lambda line: os.kill(os.getpid(), signal.SIGKILL) if line["step"] == 19 else None)
"""


def test_killed_and_resumed_it_ends_the_same(tmp_path):
    """TRN-01 for ensembles: killed with -9 in the middle of step 19, after one member has logged it."""
    configs = member_configs(tiny(), {"seeds": [2], "lr": [1e-3, 3e-3]})
    Ensemble.start(configs, tmp_path / "alone").run()
    data = json.dumps([config_to_dict(config) for config in configs])
    command = [sys.executable, "-c", START, str(tmp_path / "killed"), data]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    Ensemble.resume(tmp_path / "killed").run()
    for config in configs:
        one, two = (tmp_path / folder / member_name(config) for folder in ("killed", "alone"))
        weights = [load_model(path)[0].state_dict() for path in (one, two)]
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
        logged = [[(line["step"], line["loss"]) for line in open_run(path).metrics.read()] for path in (one, two)]
        assert logged[0] == logged[1]
        assert [step for step, _ in logged[0]] == list(range(1, STEPS + 1))
    with pytest.raises(RunError, match="have ended"):
        Ensemble.resume(tmp_path / "killed")


def test_asked_to_stop_all_members_save_the_same_step(tmp_path):
    configs = member_configs(tiny(), {"seeds": [3]})
    ensemble = Ensemble.start(configs, tmp_path)

    def stop(line):
        if line["step"] == 6 and ensemble.members[1].step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match=r"stopped at step \d"):
        ensemble.run(stop)
    again = Ensemble.resume(tmp_path)
    assert len({member.step for member in again.members}) == 1
    assert again.step in (6, 7)


def test_an_extracted_member_is_an_ordinary_run(tmp_path):
    configs = member_configs(tiny(), {"seeds": [2]})
    ensemble = Ensemble.start(configs, tmp_path)
    with pytest.raises(InterruptedRunError):
        ensemble.run(lambda line: os.kill(os.getpid(), signal.SIGTERM) if line["step"] == 8 else None)
    member = Trainer.resume(tmp_path / member_name(configs[1]))
    result = member.run()
    assert (result["state"], result["step"]) == ("finished", STEPS)


def test_grids():
    base = tiny()
    configs = member_configs(base, {"seeds": [2], "lr": [1e-3, 3e-3], "weight_decay": [0.1, 0.03]})
    assert len({member_name(config) for config in configs}) == 8
    assert {(c.seed, c.optimizer.lr, c.optimizer.weight_decay) for c in configs} == {
        (s, lr, wd) for s in (0, 1) for lr in (1e-3, 3e-3) for wd in (0.1, 0.03)
    }
    with pytest.raises(ConfigError, match="axes are seeds, lr, weight_decay"):
        member_configs(base, {"num_heads": [4]})
    with pytest.raises(ConfigError, match=r"ensemble.seeds = 0"):
        member_configs(base, {"seeds": [0]})


def test_members_that_do_not_fit_together_are_refused(tmp_path):
    base = tiny()
    other = replace(base, seed=1, model=replace(base.model, embed_dim=32))
    with pytest.raises(ConfigError, match="must agree in section 'model'"):
        Ensemble.start([base, other], tmp_path / "out")
    with pytest.raises(ConfigError, match="members must differ"):
        Ensemble.start([base, base], tmp_path / "out")
    assert not (tmp_path / "out").exists()
