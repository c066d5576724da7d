"""What the README says can be run is run; what it names is there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from hyla import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_the_library_example_runs():
    (code,) = blocks("python")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == (2, 10, 64)
    assert names["codes"].shape == (2, 8, 10, 10)
    assert names["pair"].shape == (8,)
    assert names["batch"].inputs.shape == (32, 32, 5)
    assert names["batch"].latents["term_bits"].shape == (32, 2, 4)
    assert set(names["scores"]) == {"r2", "loss"}
    assert [code.shape for code in names["out"].codes] == [(32, 8, 32, 32), (32, 8, 1, 32)]
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20


def test_every_file_it_names_exists():
    names = set(re.findall(r"\]\(((?!http)[^)#]+)\)", README))
    assert len(names) > 5
    missing = [name for name in names if not (ROOT / name).exists()]
    assert missing == []


class ReachedError(Exception):
    """The command was understood and would have started."""


COMMANDS = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if "hyla " in line]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def reached(*arguments, **options):
        raise ReachedError

    monkeypatch.setattr("hyla.training.loop.Trainer.start", reached)
    monkeypatch.setattr("hyla.training.loop.Trainer.resume", reached)
    monkeypatch.setattr("hyla.training.loop.load_model", reached)
    monkeypatch.setattr("hyla.training.generate.open_language_model", reached)
    monkeypatch.setattr("hyla.training.export.export_run", reached)
    monkeypatch.setattr("hyla.experiments.engine.run_experiment", reached)
    monkeypatch.setattr("hyla.report.build.write_report", reached)
    monkeypatch.setattr("hyla.latents.decodability.has_encoding", lambda path: False)
    monkeypatch.setattr("hyla.latents.read.write_analysis", reached)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    words = shlex.split(command)
    if words[0] == "torchrun":  # what each of its processes is asked
        words = words[words.index("-m") + 1 :]
    assert words[0].split("/")[-1] == "hyla"
    if "--config" in words:
        path = tmp_path / words[words.index("--config") + 1]
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    monkeypatch.setattr("hyla.training.ensemble.Ensemble.start", reached)
    monkeypatch.setattr("hyla.bench.bench_train", reached)
    if words[1] == "sample" or "--dry-run" in words:
        assert cli.main(words[1:]) == 0
        return
    with pytest.raises(ReachedError):
        cli.main(words[1:])


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("bash")), flags=re.M):
        assert f"\n{target}:" in makefile


def test_settings_it_names_exist(capsys):
    from hyla.training.config import TrainConfig

    for section, key in re.findall(r"`--(model|task|optimizer|training)\.([a-z-]+)", README):
        assert hasattr(getattr(TrainConfig(), section), key.replace("-", "_"))
