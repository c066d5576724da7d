"""The command line as a user meets it: messages, exit statuses, and that a mistake leaves nothing behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyla import cli
from hyla.attention import choose_backend
from hyla.runs import open_run, read_json

SMALL = (
    "--steps 6 --optimizer.warmup-steps 2 --batch-size 4 --task.num-points 4 --model.embed-dim 8 --model.mlp-dim 8 "
    "--training.eval-samples 16 --training.final-eval-samples 16 --training.log-every 2 --eval-every 4"
).split()

pytestmark = pytest.mark.usefixtures("unchecked")


def run(capsys, *arguments):
    """(exit status, output, errors) of a command."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse and tyro end this way
        status = stop.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", cli.Console(width=100))
    monkeypatch.setattr(cli, "errors", cli.Console(width=100, stderr=True))


MISTAKES = {
    # CLI-03
    "train logic --model.num-haeds 4": r"unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'",
    "train logic model.num_haeds=4": r"unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'",
    "train logic model.num_heads=4": r"no flag; write --model.num-heads 4",
    "train logic --num-heads 4": r"unknown key 'num_heads' in the top level; did you mean 'model.num_heads'",
    "train logic --modle.num-heads 4": r"unknown section 'modle' .* task, model, optimizer, training",
    "train logic --task.num-features 4": r"unknown key 'num_features' in section 'task'",
    "compare logic --model.num-haeds 4": r"did you mean 'model.num_heads'",
    "resume runs/nothing --num-heads 4": r"--num-heads",
    "train logic --model.num-heads 5": r"model.qk_dim = 16 .* model.num_heads = 5",
    "train logic --steps x": r"--training.steps",
    "train logic --steps 0": r"training.steps = 0",
    "train logic --steps 100 --optimizer.schedule reference": r"more than twice the warm-up of 100",
    "train logic --mechanism hylla": r"hylla.*softmax",
    "train logic --preset papre": r"preset = 'papre' .* default, paper",
    "train logic --config absent.json": r"absent.json does not exist",
    "train logic --seed -1": r"seed = -1",
    "train logic --task.num-terms 13": r"task.num_terms = 13",
    "train sraven --task.num-values 2": r"task.num_values = 2",
    "train sraven --task.split-seed official-7": r"task.split_seed = 'official-7'",
    "train logic --device cuda:99": r"training.device = 'cuda:99' is not possible here",
    "train logic --device quantum": r"training.device = 'quantum'",
    "train logic --ensemble seeds=x": r"ensemble = 'seeds=x'",
    "train logic --ensemble heads=2": r"axes are seeds, lr, weight_decay",
    "train chess": r"invalid choice: 'chess'",
    "trian logic": r"invalid choice: 'trian'",
    "compare logic --mechanisms softmax,hylla": r"mechanisms = 'hylla'",
    "compare logic --mechanisms softmax,softmax": r"each only once",
    "compare logic --seeds 0,x": r"seeds = '0,x' .* whole numbers",
    "compare logic --seeds -1": r"seeds",
    "compare logic --budget endless": r"budget = 'endless'",
    "compare logic --splits official --seeds 5": r"official-5",
    "compare logic --jobs 0": r"jobs = 0",
    "compare logic --memory-gib 0.01": r"memory_gib = 0.01 .* alone needs about",
    "compare logic --device cuda:99": r"training.device = 'cuda:99' is not possible here",
    "reproduce logic-headlin": r"invalid choice: 'logic-headlin'",
    "reproduce logic-headline --budget endless": r"endless.*quick.*short.*paper",
    "reproduce logic-headline --sedes 0": r"unknown key 'sedes' in the top level; did you mean 'seeds'",
    "reproduce logic-headline --model.num-heads 4": r"unknown key 'model.num_heads'",
    "reproduce logic-headline --only hylla,softmax": r"only = 'hylla' .* there are softmax; linear; hyla",
    "reproduce logic-headline --select validation": r"select = 'validation' .* add --grid full",
    "reproduce logic-headline --seeds 0,0": r"each only once",
    "reproduce logic-headline --cores 0 --dry-run": r"cores = 0",
    "sweep": r"FILE.toml",
    "sweep absent.toml": r"absent.toml cannot be read",
    "sweep absent.toml --dry-rum": r"unknown key 'dry_rum' in the top level; did you mean 'dry_run'",
    "sample logic --split test": r"split = 'test' .* train, held_out, unseen_terms",
    "sample logic -n 0": r"num = 0",
    "sample sraven --format png": r"needs a folder",
    "sample sraven --format png --task.num-features 6 --out pictures": r"6 features",
    "evaluate nothing": r"no run folder at nothing",
    "resume nothing": r"no run folder at nothing",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing(command, capsys, tmp_path):
    status, out, err = run(capsys, *command.split())
    assert status == 2
    flat = " ".join((out + err).replace("│", " ").split())
    assert re.search(MISTAKES[command], flat), flat
    assert list(tmp_path.iterdir()) == []


CONFIGS = {
    '{"model": {"num_haeds": 4}}': r"wrong.json: unknown key 'num_haeds' in section 'model'; did you mean 'model.num",
    '{"num_heads": 4}': r"unknown key 'num_heads' in the top level; did you mean 'model.num_heads'",
    '{"modle": {}}': r"unknown key 'modle' in the top level; did you mean 'model'",
    '{"model": {"num_heads": "4"}}': r"model.num_heads = '4' .* whole number",
    '{"model": 4}': r"section 'model' must hold keys and values",
    '{"task": {"name": "chess"}}': r"task.name = 'chess'",
    '{"task": {"name": "sraven"}}': r"task.name = 'sraven' .* this is a config for logic",
    '{"model": {"num_heads": 4,}}': r"wrong.json, line 1, column \d+",
    '{"model": {\n "num_heads": 4\n "num_layers": 2}}': r"wrong.json, line 3, column 2",
    "[]": r"a config holds sections",
    "": r"wrong.json, line 1, column 1",
}


@pytest.mark.parametrize("content", CONFIGS)
def test_a_mistake_in_a_file_is_named_and_leaves_nothing(content, capsys, tmp_path):
    (tmp_path / "wrong.json").write_text(content)
    status, _, err = run(capsys, "train", "logic", "--config", "wrong.json")
    assert status == 2
    assert re.search(CONFIGS[content], err), err
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]


def test_resume_refuses_a_config_with_an_unknown_key(capsys, tmp_path):
    assert run(capsys, "train", "logic", *SMALL, "--out", "a")[0] == 0
    (tmp_path / "a" / "result.json").unlink()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["model"]["num_haeds"] = 4
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    status, _, err = run(capsys, "resume", "a")
    assert status == 2
    assert "unknown key 'num_haeds' in section 'model'" in err
    assert not (tmp_path / "a" / "result.json").exists()


@pytest.mark.parametrize(
    "arguments",
    ["--help", "train --help", "train logic --help", "train sraven --help", "resume --help", "evaluate --help"]
    + ["compare --help", "compare sraven --help", "sample logic --help", "sample --help"]
    + ["reproduce --help", "reproduce sraven-scaling --help", "sweep --help"],
)
def test_help_reads_well(arguments, capsys):
    status, out, _ = run(capsys, *arguments.split())
    assert status == 0
    if len(arguments.split()) == 3 or arguments.split()[0] in ("--help", "resume", "evaluate"):
        assert "Example" in out
    assert "hyla" in out
    assert "RUN" in out or arguments.split()[0] not in ("resume", "evaluate")


def test_no_command_shows_help_and_fails(capsys):
    status, out, _ = run(capsys)
    assert status == 2
    assert all(command in out for command in cli.COMMANDS)


def test_a_run_that_is_all_warm_up_says_so(capsys):
    """The last of 6 updates is number 5 of a warm-up over 10."""
    status, _, err = run(
        capsys, "train", "logic", *SMALL, "--optimizer.warmup-steps", "10", "--lr", "2e-3", "--out", "a"
    )
    assert status == 0
    flat = " ".join(err.split())
    assert "all 6 steps are warm-up (optimizer.warmup_steps = 10): the learning rate gets no further than 0.001" in flat


def test_train_evaluate_and_repeat(capsys, tmp_path):
    status, out, err = run(capsys, "train", "logic", "--mechanism", "softmax", *SMALL, "--seed", "3", "--out", "a")
    assert status == 0
    assert err == ""
    assert "held_out" in out
    config = open_run("a").config
    assert (config["model"]["mechanism"], config["seed"], config["task"]["num_points"]) == ("softmax", 3, 4)
    assert config["run"]["backend"] == choose_backend("auto")
    lines = open_run("a").metrics.read()
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert set(lines[0]) == {"step", "loss", "learning_rate", "gradient_norm", "steps_per_second"}
    assert set(lines[1]["splits"]) == {"train", "held_out", "unseen_terms"}

    status, _, err = run(capsys, "train", "logic", *SMALL, "--out", "a")
    assert status == 2
    assert "a holds another run (finished)" in err
    (tmp_path / "a" / "result.json").unlink()
    status, _, err = run(capsys, "train", "logic", *SMALL, "--out", "a")
    assert status == 2
    assert "hyla resume a" in err
    assert run(capsys, "resume", "a")[0] == 0

    # flags override the file, the file overrides the preset
    again = ["train", "logic", "--preset", "paper", "--config", "a/config.json", "--out", "b", "--lr", "0.5"]
    assert run(capsys, *again)[0] == 0
    repeated = open_run("b").config
    assert repeated["optimizer"] == config["optimizer"] | {"lr": 0.5}
    assert {key: repeated[key] for key in ("task", "model", "training", "seed")} == {
        key: config[key] for key in ("task", "model", "training", "seed")
    }

    status, out, _ = run(capsys, "evaluate", "a", "--split", "held_out", "--num-samples", "16", "--json", "s.json")
    assert status == 0
    scores = json.loads((tmp_path / "s.json").read_text())["splits"]
    assert scores == {"held_out": open_run("a").result["splits"]["held_out"]}
    status, _, err = run(capsys, "evaluate", "a", "--split", "test")
    assert status == 2
    assert "split = 'test'" in err


def test_sraven_shows_the_ideal_observer(capsys):
    flags = "--task.num-features 1 --task.num-values 4 --steps 30 --batch-size 64 --model.num-layers 1"
    flags += " --training.final-eval-samples 64 --training.eval-samples 16"
    status, out, _ = run(capsys, "train", "sraven", *flags.split(), "--out", "a")
    assert status == 0
    result = open_run("a").result
    assert 0 < result["ceiling"]["held_out"] <= 1
    assert "ideal observer" in out
    # so few puzzles exist that some were trained on, and the result says so
    assert result["shared_with_training"]["train"]["total"] == 64
    assert result["shared_with_training"]["train"]["shared"] > 0


@pytest.mark.parametrize("task", ["logic", "sraven"])
@pytest.mark.parametrize("form", ["text", "jsonl", "parquet", "png"])
def test_samples_in_every_format(task, form, capsys, tmp_path):
    status, out, _ = run(capsys, "sample", task, "-n", "2", "--split", "held_out", "--format", form, "--out", "there")
    assert status == 0
    files = sorted((tmp_path / "there").iterdir())
    assert all(path.name in out for path in files)
    if form == "png":
        assert [path.stat().st_size > 10_000 for path in files] == [True, True]
        return
    (path,) = files
    if form == "text":
        assert path.read_text().count("Answer") == 2
        return
    if form == "jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["number"] for row in rows] == [0, 1]
    assert all(row["task"] == task and row["split"] == "held_out" for row in rows)
    if task == "logic":
        assert rows[0]["values"][-1] == rows[0]["answer"]
        assert len(rows[0]["points"]) == 32
    else:
        assert rows[0]["panels"][-1][-1] == rows[0]["answer"]


def test_compare_trains_what_is_missing_and_nothing_twice(capsys, tmp_path):
    flags = ["compare", "logic", "--seeds", "1", *SMALL, "--optimizer.schedule", "cosine", "--jobs", "2", "--out", "c"]
    status, out, _ = run(capsys, *flags, "--mechanisms", "softmax,hyla", "--dry-run")
    assert status == 0
    assert "2 runs of 6 steps: 2 waiting" in out
    assert "since no run has begun" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []

    status, out, _ = run(capsys, *flags, "--mechanisms", "softmax,hyla")
    assert status == 0, out
    runs = {path.name: path for path in (tmp_path / "c" / "runs").iterdir()}
    assert len(runs) == 2
    before = {name: (path / "result.json").stat().st_mtime_ns for name, path in runs.items()}
    assert {"plan.json", "comparison.json", "index.html"} <= {path.name for path in (tmp_path / "c").iterdir()}
    assert "custom" in (tmp_path / "c" / "index.html").read_text()

    status, out, _ = run(capsys, *flags, "--mechanisms", "softmax,hyla,linear")
    assert status == 0
    assert "2 of 3 runs were there already" in out
    assert len(list((tmp_path / "c" / "runs").iterdir())) == 3
    after = {name: (path / "result.json").stat().st_mtime_ns for name, path in runs.items()}
    assert after == before
    seeds = {path.name: open_run(path).config for path in (tmp_path / "c" / "runs").iterdir()}
    assert all(config["task"]["split_seed"] == config["seed"] == 1 for config in seeds.values())

    status, out, _ = run(capsys, *flags, "--mechanisms", "softmax,hyla,linear", "--dry-run")
    assert "3 runs of 6 steps: 3 finished" in out


def test_reproduce_end_to_end(capsys, tmp_path, monkeypatch):
    """A tiny experiment whose hyperparameters are chosen on validation combinations."""
    from hyla.experiments import hypernetwork_paper as paper
    from hyla.experiments.experiment import with_settings
    from hyla.report.plan import read_plan

    def tiny(request):
        """A tiny one."""
        keys = {"training.steps": 6, "training.batch_size": 4, "training.eval_samples": 16, "training.log_every": 3}
        keys |= {
            "training.final_eval_samples": 64,
            "model.embed_dim": 8,
            "model.mlp_dim": 8,
            "optimizer.warmup_steps": 2,
        }
        base = with_settings(paper.budget("logic", request.budget).config, keys)
        rows = [paper.row(base, mechanism) for mechanism in ("softmax", "hyla")]
        return paper.experiment(request, name="tiny", title="Tiny", rows=rows, shows=paper.SHOWS["logic"])

    monkeypatch.setitem(paper.EXPERIMENTS, "tiny", tiny)
    monkeypatch.setitem(paper.GRID, "logic", {"optimizer.lr": (1e-3, 1e29), "optimizer.weight_decay": (0.1,)})
    words = ["reproduce", "tiny", "--grid", "full", "--only", "hyla", "--out", "r"]
    status, out, _ = run(capsys, *words)
    assert status == 1  # one of the two diverged, and is counted
    plan = read_plan(tmp_path / "r")
    assert (plan.selection, plan.command) == ("validation", "hyla reproduce tiny --grid full --only hyla --out r")
    first, wild = (open_run(tmp_path / "r" / "runs" / name) for name in plan.runs)
    assert (first.state, wild.state) == ("finished", "diverged")
    assert first.config["task"]["split_seed"] == "official-0"
    assert set(first.result["splits"]) == {"train", "validation", "held_out", "unseen_terms"}
    assert f"diverged: {wild.name}" in out
    (choice,) = read_json(tmp_path / "r" / "comparison.json")["choices"]
    assert choice["candidates"][choice["selected"]]["runs"] == [first.name]
    assert "the other four fifths" in (tmp_path / "r" / "index.html").read_text()

    status, out, _ = run(capsys, *words, "--dry-run")
    assert status == 0
    assert "2 runs of 6 steps: 1 finished, 1 diverged" in out


def test_sweep_lists_its_runs(capsys, tmp_path):
    example = Path(__file__).parent.parent / "examples" / "sweep.toml"
    status, out, _ = run(capsys, "sweep", example, "--dry-run", "--jobs", "2", "--cores", "4")
    assert status == 0
    assert "16 runs of 300 steps: 16 waiting" in out
    assert "2 at a time with 2 threads each" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "wrong.toml").write_text('name = "x"\ntask = "logic"\n[grid]\n"model.num_haeds" = [4]\n')
    status, _, err = run(capsys, "sweep", "wrong.toml")
    assert status == 2
    assert "wrong.toml: unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'" in err
    (tmp_path / "wrong.toml").write_text('name = "x"\ntask "logic"\n')
    status, _, err = run(capsys, "sweep", "wrong.toml")
    assert status == 2
    assert "wrong.toml, line 2, column 6" in err
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_ensemble(capsys, tmp_path):
    flags = ["train", "logic", *SMALL, "--ensemble", "seeds=2", "lr=1e-3,3e-3", "--out", "grid"]
    status, out, _ = run(capsys, *flags)
    assert status == 0
    names = sorted(path.name for path in (tmp_path / "grid").iterdir() if path.is_dir())
    assert names == ["seed0-lr0.001-wd0.1", "seed0-lr0.003-wd0.1", "seed1-lr0.001-wd0.1", "seed1-lr0.003-wd0.1"]
    assert all(name in out for name in names)
    assert all(open_run(tmp_path / "grid" / name).state == "finished" for name in names)
    status, _, err = run(capsys, "resume", "grid")
    assert status == 2
    assert "all 4 members in grid have ended" in err


def test_version(capsys):
    import hyla

    assert run(capsys, "--version") == (0, f"hyla {hyla.__version__}\n", "")


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m hyla sample logic -n 300 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("--- logic-train 0")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
