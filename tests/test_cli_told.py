"""The command line with tasks that are told: hyperteacher, preference and goal grids."""

import json
import re

import pytest

from hyla.cli import main

QUICK = ["--steps", "2", "--batch-size", "4", "--training.eval-samples", "8", "--training.final-eval-samples", "8"]


@pytest.fixture
def trained(tmp_path):
    out = tmp_path / "run"
    assert main(["train", "hyperteacher", "--model.width", "8", *QUICK, "--out", str(out)]) == 0
    return out


def architecture_of(path):
    return json.loads((path / "config.json").read_text())["model"]


def test_a_flag_overrides_the_architecture_of_a_file(trained, tmp_path):
    arguments = ["train", "hyperteacher", "--config", str(trained / "config.json")]
    assert main([*arguments, "--out", str(tmp_path / "same")]) == 0
    assert architecture_of(tmp_path / "same") == architecture_of(trained)
    other = [*arguments, "--architecture", "hypernetwork", "--model.width", "4", "--out", str(tmp_path / "other")]
    assert main(other) == 0
    assert architecture_of(tmp_path / "other") == {"architecture": "hypernetwork", "width": 4, "token_dim": 16}


def test_latents_decodes_hidden_layers(trained, tmp_path, capsys):
    out = tmp_path / "decoded"
    assert main(["latents", str(trained), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "R2 of ridge probes" in printed
    assert "hidden.3" in printed
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert names == {"decodability.json", "scores.csv", "decodability.png", "decodability.svg"}
    assert main(["latents", str(trained), "--layers", "1"]) == 2
    assert "only for latent codes" in capsys.readouterr().err


def test_a_policy_is_measured_as_it_acts(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "goal", "--model.width", "8", *QUICK, "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert set(result["played"]) == {"train", "held_out"}
    assert result["played"]["held_out"]["num_episodes"] == 8
    scores = tmp_path / "scores.json"
    assert main(["evaluate", str(out), "--num-samples", "8", "--json", str(scores)]) == 0
    assert "when it acts itself" in capsys.readouterr().out
    assert json.loads(scores.read_text())["played"] == result["played"]


@pytest.mark.parametrize("task", ["hyperteacher", "preference", "goal"])
@pytest.mark.parametrize("form", ["text", "png", "jsonl", "parquet"])
def test_samples(task, form, tmp_path):
    assert main(["sample", task, "-n", "2", "--format", form, "--out", str(tmp_path / "out")]) == 0
    files = list((tmp_path / "out").iterdir())
    assert len(files) == (2 if form == "png" else 1)
    assert all(path.stat().st_size > 100 for path in files)


def test_supports_and_animations(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["sample", "preference", "-n", "1", "--format", "gif", *out]) == 0
    assert main(["sample", "hyperteacher", "--format", "support", "--task.support", "equal", *out]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"preference-train-000.gif", "hyperteacher-support.png", "hyperteacher-support.svg"}
    assert main(["sample", "goal", "--format", "support", *out]) == 2
    assert main(["sample", "hyperteacher", "--format", "gif", *out]) == 2
    assert "no episodes to animate" in " ".join(capsys.readouterr().err.split())


MISTAKES = {
    "train hyperteacher --task.num-hot 17": "num_hot = 17 .* at most num_modules = 16",
    "train hyperteacher --task.support connected": "num_hot",
    "train hyperteacher --task.held-out-fraction 0.99": "held_out_fraction = 0.99",
    "train hyperteacher --architecture lstm": "architecture = 'lstm' .* mlp, transformer, hypernetwork",
    "train logic --architecture mlp": "architecture = 'mlp' .* transformer",
    "train hyperteacher --mechanism hyla": "unknown key 'mechanism' in section 'model'; it has num_layers, width, token",
    "train hyperteacher --architecture hypernetwork --model.num-layers 3": "'num_layers' .* it has width, token_dim",
    "train hyperteacher --task.encoding morse": "encoding",
    "train goal --task.encoding tokens": "encoding",
    "train preference --task.num-objects 9": "num_objects = 9",
    "compare hyperteacher": "invalid choice: 'hyperteacher'",
    "reproduce hyperteacher-support --grid full": "one setting of the optimiser",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(command.split())
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    printed = capsys.readouterr()
    flat = " ".join((printed.out + printed.err).replace("│", " ").split())
    assert re.search(MISTAKES[command], flat), flat
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_said_in_a_line(monkeypatch, tmp_path, capsys):
    def fails(*arguments):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nmore"
        )

    monkeypatch.setattr("hyla.training.loop.Trainer.start", fails)
    assert main(["train", "hyperteacher", "--out", str(tmp_path / "run")]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: not enough memory for these settings")
    assert error.endswith("tried to allocate 9 bytes.")
