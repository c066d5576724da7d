import builtins
import sys
import types
from dataclasses import replace

import pytest
from test_resume import tiny

from hyla.errors import MissingExtraError
from hyla.runs import open_run
from hyla.training.loop import train
from hyla.training.trackers import check_trackers, flatten


def test_lines_are_flattened():
    line = {"step": 3, "loss": 0.5, "splits": {"held_out": {"r2": 0.1, "num_samples": 9}}}
    assert flatten(line) == {"loss": 0.5, "held_out/r2": 0.1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_what_the_run_folder_holds(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    train(tiny(trackers=("tensorboard",)), tmp_path / "run")
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = open_run(tmp_path / "run").metrics.read()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]
    assert [e.step for e in events.Scalars("held_out/r2")] == [line["step"] for line in lines if "splits" in line]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_are_called_as_their_interface_asks(name, tmp_path, monkeypatch):
    calls = []
    fake = types.ModuleType(name)
    for function in ("init", "log", "finish"):
        setattr(fake, function, lambda *args, function=function, **kwargs: calls.append((function, args, kwargs)))
    monkeypatch.setitem(sys.modules, name, fake)
    config = tiny(trackers=(name,))
    train(config, tmp_path / "run")
    assert [call[0] for call in calls] == ["init", *["log"] * config.training.steps, "finish"]
    assert calls[0][2]["name"] == "run"
    assert calls[0][2]["config"]["model"]["num_heads"] == 4
    assert [call[2]["step"] for call in calls[1:-1]] == list(range(1, config.training.steps + 1))


def test_a_missing_tracker_is_named_before_any_work(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    importing = builtins.__import__

    def without(name, *arguments, **options):
        if name == "trackio":
            raise ImportError(name)
        return importing(name, *arguments, **options)

    monkeypatch.setattr("importlib.import_module", without)
    config = replace(tiny(), training=replace(tiny().training, trackers=("trackio",)))
    with pytest.raises(MissingExtraError, match=r"pip install 'hyla\[trackio\]'"):
        check_trackers(config)
