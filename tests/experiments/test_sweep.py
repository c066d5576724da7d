"""Sweep files: which runs they name, and that every mistake is met before the first of them."""

import tomllib
from pathlib import Path

import pytest

from hyla.errors import ConfigError
from hyla.experiments.experiment import setting
from hyla.experiments.sweep import read_sweep, sweep

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.toml"


def made(text):
    return sweep(tomllib.loads('name = "x"\ntask = "logic"\n' + text))


def values(experiment, key):
    return [setting(candidate, key) for variant in experiment.variants for candidate in variant.candidates]


def test_the_example():
    experiment = read_sweep(EXAMPLE)
    assert [variant.name for variant in experiment.variants] == ["softmax", "hyla"]
    assert {len(variant.candidates) for variant in experiment.variants} == {4}
    assert len({run.name for run in experiment.runs}) == 16
    assert experiment.tuned == ("optimizer.lr", "optimizer.weight_decay")
    assert (experiment.selection, experiment.baseline, experiment.budget) == ("validation", "softmax", "custom")
    config = experiment.runs[0].config
    assert (config.task.validation_from, config.task.validation_fraction) == ("held_out", 0.2)
    assert (config.task.num_points, config.training.steps) == (16, 300)
    # rows are tried with the same settings
    first, second = experiment.variants
    assert values(experiment, "optimizer.weight_decay")[:4] == values(experiment, "optimizer.weight_decay")[4:]
    assert all(0.01 <= decay <= 0.3 for decay in values(experiment, "optimizer.weight_decay"))
    assert [c.optimizer for c in first.candidates] == [c.optimizer for c in second.candidates]


def test_without_a_selection_every_point_is_a_row():
    experiment = made(
        '[grid]\n"model.mechanism" = ["hyla", "linear"]\n"task.num_points" = [8, 16]\n"optimizer.lr" = [1, 1.0]'
    )
    assert [v.name for v in experiment.variants] == [
        "hyla, num_points 8, lr 1.0",
        "hyla, num_points 16, lr 1.0",
        "linear, num_points 8, lr 1.0",
        "linear, num_points 16, lr 1.0",
    ]
    assert experiment.axes == ("task.num_points", "optimizer.lr")
    assert dict(experiment.variants[1].axes) == {"task.num_points": 16, "optimizer.lr": 1.0}
    assert experiment.figures == ("scores", "curves", "heat_map", "scaling")
    assert experiment.plan("hyla sweep").axes == experiment.axes
    assert {variant.mechanism for variant in experiment.variants[:2]} == {"hyla"}


def test_architectures_make_rows_of_tasks_that_are_told():
    experiment = sweep(
        {"name": "small", "task": "hyperteacher", "base": {"training": {"steps": 20}}}
        | {"grid": {"model.architecture": ["mlp", "hypernetwork"], "model.width": [8, 16]}}
    )
    assert [v.name for v in experiment.variants] == [
        "mlp, width 8", "mlp, width 16", "hypernetwork, width 8", "hypernetwork, width 16",
    ]  # fmt: skip
    assert experiment.axes == ("model.width",)
    assert [variant.mechanism for variant in experiment.variants] == ["mlp", "mlp", "hypernetwork", "hypernetwork"]
    assert {variant.reported for variant in experiment.variants} == {None}
    assert {run.config.model.width for run in experiment.runs} == {8, 16}
    with pytest.raises(ConfigError, match=r"model\.architecture = 'lstm'"):
        sweep({"name": "small", "task": "hyperteacher", "grid": {"model.architecture": ["lstm"]}})


def test_keys_may_be_written_without_quotes_and_base_has_sections():
    base = '[base]\npreset = "paper"\nmodel.num_layers = 1\n[base.training]\nsteps = 700\n'
    (run,) = made(f"seeds = [3]\n{base}[grid]\noptimizer.lr = [0.5]").runs
    config = run.config
    assert (config.optimizer.lr, config.model.num_layers, config.training.steps, config.seed) == (0.5, 1, 700, 3)
    assert config.optimizer.schedule == "reference"


def test_a_grid_of_600_points_has_no_duplicates():
    lines = ['"optimizer.lr" = ' + str([round(1e-4 * i, 6) for i in range(1, 21)])]
    lines += ['"optimizer.weight_decay" = ' + str([round(0.01 * i, 4) for i in range(1, 11)])]
    lines += ['"model.mechanism" = ["softmax", "linear", "hyla", "hyla"]']
    experiment = made("[grid]\n" + "\n".join(lines))
    assert len(experiment.runs) == 600
    assert len({run.name for run in experiment.runs}) == 600


RANDOM = """
select = "reported"
[random]
samples = {samples}
seed = {seed}
"optimizer.lr" = {{ log_uniform = [1e-4, 1e-2] }}
"model.num_layers" = {{ int_uniform = [1, 3] }}
"model.activation" = {{ choice = ["relu", "gelu"] }}
{more}
"""


def test_random_draws_depend_on_their_own_number_alone():
    def draws(samples, seed=0, more=""):
        return made(RANDOM.format(samples=samples, seed=seed, more=more))

    few, many = draws(5), draws(60)
    rates = values(many, "optimizer.lr")
    assert values(few, "optimizer.lr") == rates[:5]
    wider = draws(5, more='"task.num_points" = { choice = [8] }\n"optimizer.clip_norm" = { uniform = [0.5, 1.5] }')
    assert values(wider, "optimizer.lr") == rates[:5]
    assert all(0.5 <= norm <= 1.5 for norm in values(wider, "optimizer.clip_norm"))
    assert values(draws(5, seed=1), "optimizer.lr") != rates[:5]
    assert len(set(rates)) > 55  # of four significant digits
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 15 < sum(rate < 1e-3 for rate in rates) < 45  # even in the logarithm
    assert set(values(many, "model.num_layers")) == {1, 2, 3}
    assert set(values(many, "model.activation")) == {"relu", "gelu"}


def test_the_same_draw_twice_is_one_candidate():
    experiment = made('select = "reported"\n[random]\nsamples = 20\n"model.num_layers" = { choice = [1, 2] }')
    assert sorted(values(experiment, "model.num_layers")) == [1, 2]


GRID = '[grid]\n"optimizer.lr" = [1e-3]\n'
MISTAKES = {
    # CLI-03
    '[grid]\n"model.num_haeds" = [4]': r"unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'",
    "[grid]\nnum_heads = [4]": r"unknown key 'num_heads' in the top level; did you mean 'model.num_heads'",
    '[grid]\n"modle.num_heads" = [4]': r"unknown key 'modle.num_heads' .* did you mean 'model.num_heads'",
    '[random]\nsamples = 2\n"optimizer.lrr" = { choice = [1] }': r"did you mean 'optimizer.lr'",
    "[base.model]\nnum_haeds = 4\n" + GRID: r"unknown key 'num_haeds' in section 'model'; did you mean 'model.num_heads'",
    "[base.modle]\nnum_heads = 4\n" + GRID: r"unknown key 'modle' in the top level; did you mean 'model'",
    "sedes = [0]\n" + GRID: r"unknown key 'sedes' in the top level; did you mean 'seeds'",
    '[grid]\n"optimizer.lr" = []': r"grid.optimizer.lr = \[\] is not possible: at least one value",
    '[grid]\n"optimizer.lr" = 1e-3': r"grid.optimizer.lr = 0.001 .* list",
    '[grid]\n"optimizer.lr" = ["fast"]': r"optimizer.lr = 'fast' is not possible: must be a number",
    '[grid]\n"optimizer.lr" = [true]': r"optimizer.lr = True .* must be a number",
    '[grid]\n"optimizer.lr" = [nan]': r"optimizer.lr = nan",
    '[grid]\n"optimizer.lr" = [0.0]': r"optimizer.lr = 0.0 .* above 0",
    '[grid]\n"model.num_layers" = [1.5]': r"model.num_layers = 1.5 .* whole number",
    '[grid]\n"model.mechanism" = ["hylla"]': r"model.mechanism = 'hylla' .* softmax",
    '[grid]\n"model.num_heads" = [3]': r"model.qk_dim = 16 .* model.num_heads = 3",
    '[grid]\n"training.trackers" = [["wandb"]]': r"training.trackers = \['wandb'\]",
    "[grid]\nseed = [0, 1]": r"write seeds = ",
    '[grid]\n"task.name" = ["sraven"]': r"write task = ",
    '[grid]\n"task.split_seed" = [0, 1]': r"splits = 'fixed'",
    "[base.task]\nsplit_seed = 4\n" + GRID: r"splits = 'fixed'",
    "": r"grid = {} is not possible: at least one axis",
    '[random]\n"optimizer.lr" = { choice = [1] }': r"random.samples = None",
    "[random]\nsamples = 0": r"random.samples = 0",
    "[random]\nsamples = 3": r"at least one axis",
    '[random]\nsamples = 2\n"optimizer.lr" = { log_unifrom = [1, 2] }': r"did you mean 'random.optimizer.lr.log_uniform'",
    '[random]\nsamples = 2\n"optimizer.lr" = { log_uniform = [0, 2] }': r"log_uniform = \[0, 2\] .* both above 0",
    '[random]\nsamples = 2\n"optimizer.lr" = { uniform = [2, 1] }': r"uniform = \[2, 1\] .* low < high",
    '[random]\nsamples = 2\n"model.num_layers" = { int_uniform = [1, 2.5] }': r"two whole numbers",
    '[random]\nsamples = 2\n"model.mechanism" = { choice = ["hyla"] }': r"make it an axis of \[grid\]",
    'select = "reported"\nvariants = []\n[grid]\n"model.mechanism" = ["hyla"]': r"must name model.mechanism",
    '[random]\nsamples = 2\n"optimizer.lr" = [1e-3]': r"one of { choice",
    GRID + '[random]\nsamples = 2\n"optimizer.lr" = { choice = [1] }': r"drawn at random too",
    "seeds = []\n" + GRID: r"seeds = \[\]",
    "seeds = [0, 0]\n" + GRID: r"each only once",
    'seeds = ["0"]\n' + GRID: r"seeds = \['0'\]",
    'select = "best"\n' + GRID: r"select = 'best' .* validation, reported, none",
    'splits = "official"\nseeds = [5]\n' + GRID: r"official-5",
    'variants = ["optimizer.lr"]\n[grid]\n"model.mechanism" = ["hyla"]\n"optimizer.lr" = [1]': r"every axis makes rows",
    'select = "reported"\nvariants = "model.mechanism"\n' + GRID: r"variants = 'model.mechanism' .* optimizer.lr",
    'baseline = "softmax"\n' + GRID: r"baseline = 'softmax' .* the rows are lr 0.001",
    '[base]\npreset = "papre"\n' + GRID: r"preset = 'papre'",
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named(text, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('name = "x"\ntask = "logic"\n' + text)
    with pytest.raises(ConfigError, match=MISTAKES[text]) as met:
        read_sweep(path)
    assert str(met.value).startswith(f"{path}: ")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('task = "logic"', "name = None"),
        ('name = "x"', "task = None"),
        ('name = "a/b"\ntask = "logic"', "name = 'a/b'"),
        ('name = ".."\ntask = "logic"', "name = '..'"),
        ('name = "x"\ntask = "chess"', "task = 'chess' .* logic, sraven"),
        ("grid = 4", "name = None"),
        ('name = "x"\ntask = "logic"\ngrid = 4', "grid = 4"),
        ('name = "x"\ntask = "logic"\nbase = 4', "base = 4"),
        ('name = "x"\ntask = "logic"\nrandom = 4', "random = 4"),
    ],
)
def test_what_every_file_needs(content, message, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_sweep(path)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('name = "x"\ntask "logic"\n', r"wrong.toml, line 2, column 6: \w+"),
        ('name = "x"\n[grid]\n"optimizer.lr" = [1e-3,, 2]\n', r"wrong.toml, line 3, column \d+: \w+"),
        ('name = "x"\n[grid]\n"optimizer.lr" = [1e-3', r"wrong.toml, line 3, column 23: \w+"),
        ('name = "x"\nname = "y"\n', r"wrong.toml, line 2, column \d+: \w+"),
    ],
)
def test_a_mistake_of_syntax_has_its_place(content, place, tmp_path):
    (tmp_path / "wrong.toml").write_text(content)
    with pytest.raises(ConfigError, match=place):
        read_sweep(tmp_path / "wrong.toml")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.toml cannot be read: No such file"):
        read_sweep(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml cannot be read: it is not text"):
        read_sweep(tmp_path / "binary.toml")
