"""The command `hyla`. Exit status: 0 done; 1 a run failed or diverged; 2 a mistake in what was asked, met before any work;
130 stopped by Ctrl-C and 143 by SIGTERM, with a checkpoint saved."""

import argparse
import contextlib
import inspect
import io
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hyla.configs import unknown_key
from hyla.errors import ConfigError, HylaError, RunError, check
from hyla.runs import read_json, write_json

# Short names of flags that are typed often.
SHORTCUTS = {
    "--mechanism": "--model.mechanism",
    "--steps": "--training.steps",
    "--eval-every": "--training.eval-every",
    "--batch-size": "--training.batch-size",
    "--device": "--training.device",
    "--lr": "--optimizer.lr",
    "--weight-decay": "--optimizer.weight-decay",
    "--data": "--task.data",
    "--tokenizer": "--task.tokenizer",
}
OF_TEXT = ("--data", "--tokenizer")

SECONDS_BETWEEN_LINES = 10  # of progress, where there is no bar because the output is no terminal


class Terminal(Console):
    """A console that prints paths and names as they are, and goes on when whoever reads its output has seen enough."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # processes that a launcher has started to train one run
FIRST_RANK = RANKS == 1 or os.environ.get("RANK", "0") == "0"
SHARED = ("train", "resume")  # the commands that ranks can share
SECONDS_TO_BE_ENDED = 5  # within which a launcher ends the other ranks once one has failed

console = Terminal(quiet=not FIRST_RANK)
errors = Terminal(stderr=True)


# --- train ------------------------------------------------------------------------------------------------------------

TRAIN = """Train one model on {task} into a run folder.

Flags override --config, --config overrides --preset. Short names: {shortcuts}.

Examples:
{examples}
  hyla train {task} --config runs/first/config.json --seed 1 --out runs/second
  hyla train {task} --model.num-layers 3 --optimizer.clip-norm 1 --training.precision bf16
  hyla train {task} --ensemble seeds=2 lr=1e-3,3e-3 --out runs/grid"""

ATTENTION_EXAMPLES = """\
  hyla train {task} --mechanism hyla --steps 3000 --seed 0 --out runs/first
  hyla train {task} --preset paper --mechanism softmax --task.split-seed official-0"""
TEXT_EXAMPLES = """\
  hyla train text --data corpus/ --preset tiny --mechanism hyla --out runs/first
  hyla train text --data book.txt 'notes/**/*.md' --tokenizer tokenizer.json
  torchrun --nproc-per-node 8 -m hyla train text --preset c4-50m --mechanism hyla"""
TOLD_EXAMPLES = """\
  hyla train {task} --model.width 256 --steps 3000 --seed 0 --out runs/first
  hyla train {task} --architecture transformer --mechanism hyla --steps 3000
  hyla train {task} --preset paper --task.support non_compositional"""


def train_command(argv: list[str]) -> int:
    task, argv = _task("hyla train", "Train one model on a task.", argv)
    from hyla.training.config import TrainConfig, presets_of
    from hyla.training.ensemble import Ensemble, member_configs
    from hyla.training.loop import Trainer
    from hyla.training.trackers import check_trackers

    @dataclass(frozen=True)
    class Train(TrainConfig):
        seed: int = 0
        """Sets initialisation and data; the held-out set is set by --task.split-seed."""
        out: Path | None = None
        """Run folder to make; runs/TASK-MECHANISM-seedN by default."""
        preset: Literal["default", "paper", "tiny", "c4-50m"] = "default"
        """default: the paper's sizes and few steps. paper: the paper's steps and schedule too. Of text also tiny, which
        trains in minutes on a laptop, and c4-50m, which is the paper's."""
        config: Path | None = None
        """config.json of a run to repeat, or a file that holds some of its keys."""
        architecture: Literal["mlp", "transformer", "hypernetwork"] = "transformer"
        """What learns the task, at its paper's size; logic and sraven train transformers."""
        ensemble: tuple[str, ...] = ()
        """Train many runs as one model: seeds=8, or a grid such as seeds=2 lr=1e-3,3e-3 weight_decay=0.1,0.03. Each
        becomes an ordinary run in a folder of --out."""

    base = _base_config(task, argv, presets_of(task))
    parts = _parts(base) | {"architecture": base.architecture_name}
    examples = TEXT_EXAMPLES if task == "text" else ATTENTION_EXAMPLES if task in COMPARED else TOLD_EXAMPLES
    examples = examples.format(task=task)
    description = TRAIN.format(task=task, shortcuts=_shortcut_text(task), examples=examples)
    arguments = _parse(Train, argv, f"hyla train {task}", description, default=Train(**parts), config=base)
    config = TrainConfig(**_parts(arguments))
    name = f"{task}-{config.mechanism}-seed{config.seed}"
    out = arguments.out or Path("runs") / name
    check_trackers(config)
    if arguments.ensemble:
        check(RANKS == 1, "ensemble", arguments.ensemble, "an ensemble is for one process, not for torchrun's")
        configs = member_configs(config, _ensemble_axes(arguments.ensemble))
        return _run_ensemble(Ensemble.start(configs, out), out)
    trainer = Trainer.start(config, out)
    return _run_trainer(trainer, out)


RESUME = """Go on with a run that was interrupted, from its newest whole checkpoint.

Weights, metrics and logged steps end up bit for bit as if it had never stopped, on the same machine with the same number
of threads and backend; what differs is said.

Example:
  hyla resume runs/first"""


def resume_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Resume:
        run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        """Run folder."""

    arguments = _parse(Resume, argv, "hyla resume", RESUME)
    from hyla.experiments.engine import stop_with_engine

    stop_with_engine()
    from hyla.training.ensemble import Ensemble, is_ensemble
    from hyla.training.loop import Trainer

    if is_ensemble(arguments.run):
        check(RANKS == 1, "run", str(arguments.run), "an ensemble is for one process, not for torchrun's")
        ensemble = Ensemble.resume(arguments.run)
        _show_notes([f"{member.folder.name}: {note}" for member in ensemble.members for note in member.notes])
        return _run_ensemble(ensemble, arguments.run)
    trainer = Trainer.resume(arguments.run)
    return _run_trainer(trainer, arguments.run)


def _run_trainer(trainer: Any, out: Path) -> int:
    config = trainer.config
    start = f"at step {trainer.step}" if trainer.step else f"{trainer.model.num_parameters:,} parameters"
    title = f"{config.task_name} {config.mechanism} seed {config.seed}"
    _show_notes(trainer.notes)
    console.print(f"{title}, {start}, on {trainer.device}, into {out}", soft_wrap=True)
    if trainer.about:
        console.print(trainer.about, soft_wrap=True)
    with _bar() as bar:
        line_of = bar.add_task(title, total=config.training.steps, completed=trainer.step, note="")
        shown = time.monotonic()

        def progress(line: dict[str, Any]) -> None:
            nonlocal shown
            note = f"loss {line['loss']:.4f}  {line['steps_per_second']:.0f} steps/s"
            bar.update(line_of, completed=line["step"], note=note)
            if "splits" in line:
                scores = "  ".join(f"{s} {v[trainer.task.headline]:.3f}" for s, v in line["splits"].items())
                bar.console.print(f"step {line['step']:>7}  {trainer.task.headline}: {scores}")
            elif not console.is_terminal and time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                bar.console.print(f"step {line['step']:>7}  {note}")
                shown = time.monotonic()

        result = trainer.run(progress)
    trainer.ranks.leave()
    if not trainer.ranks.first:
        return 0
    console.print(_score_table(result["splits"], result["ceiling"], f"{title}, {result['step']} steps"))
    if result.get("played"):
        console.print(_score_table(result["played"], None, "what the model reaches when it acts itself"))
    console.print(f"{out / 'result.json'}", soft_wrap=True)
    return 0


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes if FIRST_RANK else ():
        errors.print(f"note: {note}", style="yellow", soft_wrap=True)


def _ensemble_axes(words: Sequence[str]) -> dict[str, list[int | float]]:
    """`seeds=8 lr=1e-3,3e-3` as {"seeds": [8], "lr": [0.001, 0.003]}."""
    axes: dict[str, list[int | float]] = {}
    for word in words:
        name, _, values = word.partition("=")
        check(name not in axes, "ensemble", word, "each axis once")
        try:
            axes[name] = [int(value) if name == "seeds" else float(value) for value in values.split(",")]
        except ValueError:
            raise ConfigError(
                f"ensemble = {word!r} is not possible: write NAME=NUMBER,NUMBER, such as seeds=8"
            ) from None
    return axes


def _run_ensemble(ensemble: Any, out: Path) -> int:
    first = ensemble.members[0]
    steps, count = first.config.training.steps, len(ensemble.members)
    title = f"{first.config.task_name} {first.config.mechanism}, {count} members"
    console.print(f"{title}, from step {ensemble.step}, on {first.device}, into {out}")
    with _bar() as bar:
        line_of = bar.add_task(title, total=steps, completed=ensemble.step, note="")

        def progress(line: dict[str, Any]) -> None:
            note = f"{line['steps_per_second'] * len(ensemble.alive):.0f} member steps/s"
            bar.update(line_of, completed=line["step"], note=note)

        results = ensemble.run(progress)
    metric = first.task.headline
    table = Table(title=f"{title}: {metric}", title_justify="left", title_style="bold")
    for name in ("member", "state", *first.task.splits):
        table.add_column(name)
    for name, result in results.items():
        scores = [_number(result["splits"].get(split, {}).get(metric)) for split in first.task.splits]
        table.add_row(name, result["state"], *scores)
    console.print(table)
    return 0 if all(result["state"] == "finished" for result in results.values()) else 1


# --- evaluate ---------------------------------------------------------------------------------------------------------

EVALUATE = """Measure a run's model on its splits, with fresh sequences.

Examples:
  hyla evaluate runs/first
  hyla evaluate runs/first --split held_out --num-samples 51200
  hyla evaluate runs/first --step 1000 --json scores.json
  hyla evaluate runs/language --data book.txt corpus/ --stride 32      perplexity of any text, by a run of task text"""


def evaluate_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Evaluate:
        run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        """Run folder."""
        split: str | None = None
        """One split or several, comma-separated; all of the task's by default."""
        num_samples: int = 16_000
        """Sequences per split."""
        step: int | None = None
        """Checkpoint to use; the last one by default."""
        json: Path | None = None
        """Also write the scores to this file."""
        data: tuple[str, ...] = ()
        """Text to measure a language model on instead: files, folders, globs; a line of the table each."""
        window: int | None = None
        """Tokens that a language model reads at once; as many as in training by default."""
        stride: int | None = None
        """Tokens from one window to the next: a smaller one gives every token more context, and each is still scored once.
        Half of the window by default."""

    arguments = _parse(Evaluate, argv, "hyla evaluate", EVALUATE)
    check(arguments.num_samples >= 1, "num_samples", arguments.num_samples, "at least 1")
    for name in ("window", "stride"):
        value = getattr(arguments, name)
        check(value is None or arguments.data != (), name, value, "it is for --data")
    check(arguments.split is None or not arguments.data, "split", arguments.split, "give --split or --data")
    if arguments.json is not None:
        fits = arguments.json.absolute().parent.is_dir() and not arguments.json.is_dir()
        check(fits, "json", str(arguments.json), "a file in a folder that exists")
    from hyla.training.loop import evaluate, load_model, play_episodes, task_ceiling

    model, task, config = load_model(arguments.run, arguments.step)
    if arguments.data:
        return _evaluate_text(arguments, model, task, config.training.precision)
    splits = tuple(arguments.split.split(",")) if arguments.split else task.splits
    for split in splits:
        check(split in task.splits, "split", split, f"task {task.name} has {', '.join(task.splits)}")
    scores = evaluate(model, task, splits, arguments.num_samples, config.training.precision)
    console.print(
        _score_table(scores, task_ceiling(task), f"{arguments.run}, up to {arguments.num_samples:,} sequences a split")
    )
    played = play_episodes(model, task, splits, min(arguments.num_samples, 1_024))
    if played:
        console.print(_score_table(played, None, "what the model reaches when it acts itself"))
    if arguments.json is not None:
        found = {"run": str(arguments.run), "splits": scores} | ({"played": played} if played else {})
        write_json(arguments.json, found)
    return 0


def _evaluate_text(arguments: Any, model: Any, task: Any, precision: str) -> int:
    """Perplexity of texts."""
    from hyla.tasks.text import Text
    from hyla.training.perplexity import score_data

    if not isinstance(task, Text):
        raise ConfigError(
            f"data = {arguments.data!r} is not possible: {arguments.run} is of task {task.name}, not text"
        )
    window = task.sequence_length if arguments.window is None else arguments.window
    stride = max(1, window // 2) if arguments.stride is None else arguments.stride
    found = {
        data: score_data(model, task, data, window=window, stride=stride, precision=precision).as_dict()
        for data in arguments.data
    }
    title = f"{arguments.run}, windows of {window} tokens, a new one every {stride}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("text", overflow="fold")
    for name in ("loss", "perplexity", "bits/byte", "accuracy", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for data, score in found.items():
        means = (_number(score[name]) for name in ("loss", "perplexity", "bits_per_byte", "accuracy"))
        table.add_row(data, *means, f"{score['num_tokens']:,}")
    console.print(table)
    if arguments.json is not None:
        write_json(arguments.json, {"run": str(arguments.run), "window": window, "stride": stride, "data": found})
    return 0


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _score_table(splits: dict[str, dict[str, float]], ceiling: dict[str, float] | None, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    first = next(iter(splits.values()))
    (count,) = {"num_samples", "num_episodes"} & set(first)
    metrics = [name for name in first if name != count]
    table.add_column("split")
    for name in metrics:
        table.add_column(name.replace("_", " "), justify="right")
    if ceiling:
        table.add_column("ideal observer", justify="right")
    table.add_column("episodes" if count == "num_episodes" else "sequences", justify="right")
    for split, scores in splits.items():
        cells = [_number(scores[name]) for name in metrics] + ([_number(ceiling[split])] if ceiling else [])
        table.add_row(split, *cells, f"{scores[count]:,}")
    return table


# --- export, generate -------------------------------------------------------------------------------------------------

EXPORT = """Write the model of a text run as a folder of Hugging Face transformers: weights, configs, tokenizer, model card.

`import hyla.models.causal_lm`, then AutoModelForCausalLM and AutoTokenizer load it. Needs: pip install 'hyla[hf]'

Examples:
  hyla export runs/first --out models/first
  hyla export runs/first --out models/early --step 1000"""


def export_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Export:
        run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        """Run folder of task text."""
        out: Path
        """Folder to make."""
        step: int | None = None
        """Checkpoint to use; the last one by default."""

    arguments = _parse(Export, argv, "hyla export", EXPORT)
    from hyla.training.export import export_run

    _quiet_transformers()
    folder = export_run(arguments.run, arguments.out, arguments.step)
    for path in sorted(folder.iterdir()):
        console.print(str(path), soft_wrap=True)
    return 0


GENERATE = """Write text with the model of a text run, or of a folder that hyla export made.

A prompt is the beginning of a text; without one the model begins itself. Needs: pip install 'hyla[hf]'

Examples:
  hyla generate runs/first --prompt "Once upon a time"
  hyla generate runs/first --prompt "Once" "The king" -n 3 --seed 1
  hyla generate models/first --num-tokens 500 --temperature 0"""


def generate_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Generate:
        run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
        """Run folder of task text, or an exported one."""
        prompt: tuple[str, ...] = ()
        """How texts begin, one or several; by default with nothing."""
        num_tokens: int = 100
        """New tokens of a text, unless the model ends it earlier."""
        temperature: float = 0.8
        """Lower is more cautious; 0 always takes the likeliest token."""
        top_k: int = 50
        """Draw from so many of the likeliest tokens; 0 for all."""
        seed: int = 0
        """The same seed writes the same texts."""
        num: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
        """Texts for each prompt."""
        step: int | None = None
        """Checkpoint to use; the last one by default."""

    arguments = _parse(Generate, argv, "hyla generate", GENERATE)
    from hyla.training.generate import Sampling, generate, open_language_model

    names = [field.name for field in fields(Sampling)]
    sampling = Sampling(**{name: getattr(arguments, name) for name in names})
    _quiet_transformers()
    model, tokenizer = open_language_model(arguments.run, arguments.step)
    texts = list(generate(model, tokenizer, arguments.prompt or ("",), sampling))
    for number, generated in enumerate(texts):
        if len(texts) > 1:
            place = f"prompt {number // sampling.num + 1}, text {number % sampling.num + 1}"
            console.print(f"--- {place}", soft_wrap=True)
        console.print(generated.text, soft_wrap=True, highlight=False)
    meant, longest = model.config.max_position_embeddings, max(generated.num_tokens for generated in texts)
    if longest > meant:
        _show_notes([f"texts of up to {longest:,} tokens, from a model that was trained on sequences of {meant:,}"])
    return 0


def _quiet_transformers() -> None:
    """Leave the terminal to what the command prints."""
    with contextlib.suppress(ImportError):  # who needs it says how to get it
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


# --- compare, reproduce, sweep: three ways to name runs for one engine ------------------------------------------------

COMPARE = """Train mechanisms side by side on {task} and show how each generalises to unseen combinations.

Trains whatever is missing, resumes what was interrupted, leaves what is finished; then writes the table, the figures and
the page, which `hyla report` makes again at any time. Every key of a run can be set as in `hyla train`.

Examples:
  hyla compare {task} --mechanisms softmax,linear,hyla --seeds 0,1,2 --budget quick
  hyla compare {task} --mechanisms hyla,hyla_linear,hyla_no_rms_head --budget short --out runs/ablation
  hyla compare {task} --budget paper --splits official --jobs 8 --dry-run"""


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """What compare, reproduce and sweep have in common."""

    out: Path | None = None
    """Folder of the experiment; runs/NAME by default."""
    jobs: int | None = None
    """Runs trained at a time; one per core by default."""
    cores: int | None = None
    """CPU cores to use, shared out among the runs at a time; all of them by default."""
    memory_gib: float | None = None
    """Train only as many runs at a time as fit into this memory; all of the machine's by default."""
    dry_run: bool = False
    """List every run, its state and the time that is left; train and write nothing."""
    retry_failed: bool = False
    """Also train runs that failed before."""
    fail_fast: bool = False
    """Stop at the first run that fails."""


SWITCHES = ("--dry-run", "--retry-failed", "--fail-fast", "--reference", "--numbers-only")


def compare_command(argv: list[str]) -> int:
    task, argv = _task("hyla compare", "Train mechanisms side by side and show how each generalises.", argv, COMPARED)
    from hyla.attention import MECHANISMS
    from hyla.experiments.compare import comparison
    from hyla.experiments.hypernetwork_paper import BudgetName, budget
    from hyla.training.config import TrainConfig

    @dataclass(frozen=True)
    class Compare(EngineFlags, TrainConfig):
        mechanisms: str = "softmax,linear,hyla"
        """Comma-separated."""
        seed: int = 0
        """Not used: see --seeds."""
        seeds: str = "0,1,2"
        """Comma-separated; each sets initialisation, data and, with --splits seed, the held-out set."""
        budget: BudgetName = "quick"
        """How long to train: quick is minutes, short hours, paper the paper's steps."""
        splits: Literal["seed", "official", "fixed"] = "seed"
        """seed: held-out set from each run's seed, as in the paper. official: the public code's own sets (seeds 0, 1, 2,
        2024). fixed: the one of --task.split-seed."""

    planned = budget(task, _early(argv, "budget", get_args(BudgetName), "quick"))
    base = planned.config
    description = COMPARE.format(task=task)
    arguments = _parse(Compare, argv, f"hyla compare {task}", description, default=Compare(**_parts(base)), config=base)
    mechanisms = [name.strip() for name in arguments.mechanisms.split(",")]
    for name in mechanisms:
        check(name in MECHANISMS, "mechanisms", name, f"choose from {', '.join(MECHANISMS)}")
    config = TrainConfig(**_parts(arguments))
    seeds = _numbers("seeds", arguments.seeds)
    experiment = comparison(planned, config, mechanisms, seeds, arguments.splits)
    out = Path("runs") / f"{experiment.name}-{arguments.budget}"
    return _run_experiment(experiment, arguments, out, ["compare", task, *argv])


REPRODUCE = """{doc}

Examples:
  hyla reproduce {name} --budget quick
  hyla reproduce {name} --budget paper --dry-run
  hyla reproduce {name} --budget paper --only 'hyla*' --seeds 0 --jobs 8"""


def reproduce_command(argv: list[str]) -> int:
    from hyla.experiments import hypernetwork_paper, scaling_paper
    from hyla.experiments.hypernetwork_paper import BudgetName, Grid, Request

    experiments = hypernetwork_paper.EXPERIMENTS | scaling_paper.EXPERIMENTS
    summaries = {name: (make.__doc__ or "").partition("\n")[0] for name, make in experiments.items()}
    name = _choose("hyla reproduce", "Run an experiment of the papers.", summaries, argv, "EXPERIMENT")
    argv = argv[1:]

    @dataclass(frozen=True)
    class Reproduce(EngineFlags):
        budget: BudgetName = "quick"
        """How long to train: quick is minutes where possible, short hours, paper the paper's steps and grid."""
        seeds: str | None = None
        """Comma-separated; the experiment's own by default."""
        only: str | None = None
        """Comma-separated names or mechanisms of rows, with * and ? for any letters, such as 'hyla*,softmax'."""
        grid: Grid | None = None
        """Hyperparameters. full: the paper's grid, as in budget paper by default. first: one setting."""
        select: Literal["validation", "reported"] | None = None
        """What chooses among the grid for each row. validation, the default: scores on combinations kept for this.
        reported: scores on the reported split, which is optimistic."""

    make = experiments[name]
    _check_flags(argv, Reproduce)
    doc = re.sub(
        r"(?<!\n)\n(?=\w+: )", "\n\n", inspect.getdoc(make) or ""
    )  # a paragraph for each of Setting, Cost, ...
    description = REPRODUCE.format(doc=doc, name=name)
    arguments = _parse(Reproduce, argv, f"hyla reproduce {name}", description)
    seeds = None if arguments.seeds is None else tuple(_numbers("seeds", arguments.seeds))
    experiment = make(Request(arguments.budget, arguments.grid, arguments.select, seeds))
    if arguments.only is not None:
        experiment = experiment.only([pattern.strip() for pattern in arguments.only.split(",")])
    out = Path("runs") / f"{name}-{arguments.budget}"
    return _run_experiment(experiment, arguments, out, ["reproduce", name, *argv])


SWEEP = """Train a grid or a random search over any settings, written down in a TOML file (docs/experiments.md).

Examples:
  hyla sweep examples/sweep.toml --dry-run
  hyla sweep examples/sweep.toml --out runs/rates --jobs 4"""


def sweep_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Sweep(EngineFlags):
        file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.toml")]
        """The sweep file."""

    _check_flags(argv, Sweep)
    arguments = _parse(Sweep, argv, "hyla sweep", SWEEP)
    from hyla.experiments.sweep import read_sweep

    experiment = read_sweep(arguments.file)
    return _run_experiment(experiment, arguments, Path("runs") / experiment.name, ["sweep", *argv])


def _run_experiment(experiment: Any, arguments: Any, out: Path, words: list[str]) -> int:
    from hyla.experiments.engine import make_pool, read_jobs, run_experiment
    from hyla.experiments.live import Display, runs_table
    from hyla.latents.read import check_extras as check_latents_extras
    from hyla.report.build import check_extras, write_report
    from hyla.report.tables import rich_table

    out = arguments.out or out
    pool = make_pool(len({run.name for run in experiment.runs}), arguments.jobs, arguments.cores, arguments.memory_gib)
    if arguments.dry_run:
        jobs = read_jobs(experiment.runs, out, retry_failed=arguments.retry_failed)
        console.print(f"{experiment.title}: {experiment.budget} budget, into {out}", soft_wrap=True)
        console.print(runs_table(jobs, pool))
        return 0
    check_extras()
    if experiment.after is not None:
        check_latents_extras()
    console.print(f"{experiment.title}: {experiment.budget} budget, into {out}", soft_wrap=True)
    with Display(console, pool) as display:
        plan, jobs = run_experiment(
            experiment,
            out,
            pool,
            command=shlex.join(["hyla", *words]),
            retry_failed=arguments.retry_failed,
            fail_fast=arguments.fail_fast,
            progress=display.show,
        )
    report = write_report(out, plan)
    console.print(rich_table(report.comparison))
    for path in report.files:
        console.print(str(path), soft_wrap=True)
    for job in jobs:
        if job.state == "failed":
            errors.print(f"failed: {job.name}: {job.error}", style="red", soft_wrap=True)
    if any(job.state == "failed" for job in jobs):
        errors.print("to try what failed again: the same command with --retry-failed", style="yellow")
    return 0 if all(job.state == "finished" for job in jobs) else 1


# --- report -----------------------------------------------------------------------------------------------------------

REPORT = """Rebuild the tables, figures and page of experiments from their run folders.

An experiment is what `hyla compare` and its like leave in --out: plan.json and runs/. Needs no training and no torch, and
counts whatever has not finished.

Examples:
  hyla report runs/compare-logic-quick
  hyla report results/* --page docs/results.md"""


def report_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class ReportFolders:
        folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")]
        """Folders of experiments."""
        page: Path | None = None
        """Also write one Markdown page about all of them to this file."""

    arguments = _parse(ReportFolders, argv, "hyla report", REPORT)
    check(len(arguments.folders) > 0, "folders", [], "at least one")
    if arguments.page is not None:
        fits = arguments.page.absolute().parent.is_dir() and not arguments.page.is_dir()
        check(fits, "page", str(arguments.page), "a file in a folder that exists")
    from hyla.report.build import write_report
    from hyla.report.published import results_page
    from hyla.report.tables import rich_table

    for folder in arguments.folders:
        report = write_report(folder)
        console.print(rich_table(report.comparison))
        for path in report.files:
            console.print(str(path), soft_wrap=True)
    if arguments.page is not None:
        text = results_page(arguments.folders, arguments.page.absolute().parent)
        arguments.page.write_text(text, encoding="utf-8")
        console.print(str(arguments.page), soft_wrap=True)
    return 0


PUBLISH = """Copy an experiment as it can be shared: configs, metrics, results, and the weights of every run (of a run that
has not ended the whole newest checkpoint, so that it can go on elsewhere).

Examples:
  hyla publish runs/logic-headline-paper --out results/logic-headline
  hyla publish runs/hyperteacher-support-short --out results/hyperteacher-support --numbers-only"""


def publish_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Publish:
        folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
        """Folder of an experiment."""
        out: Path
        """Folder of the copy; an older copy is replaced."""
        numbers_only: bool = False
        """Leave out the weights, which may be large."""

    arguments = _parse(Publish, argv, "hyla publish", PUBLISH)
    from hyla.experiments.publish import publish
    from hyla.report.comparison import summarise
    from hyla.report.plan import read_plan

    paths = publish(arguments.folder, arguments.out, arguments.numbers_only)
    for path in paths:
        console.print(str(path), soft_wrap=True)
    lost = summarise(read_plan(arguments.out), arguments.out).lost
    if lost:
        words = ", ".join(f"{count} {state}" for state, count in lost.items())
        errors.print(f"note: this experiment has runs without a score: {words}", style="yellow", soft_wrap=True)
    return 0


# --- latents ----------------------------------------------------------------------------------------------------------

LATENTS = """Read the latent codes of trained models: how well they tell which operation is applied, where they lie, and
what the answer does when they are replaced. Of models that are told their task (hyperteacher and the grid worlds): how well
the task can be decoded from every hidden layer.

Writes latents/ into the run: scores.json and .csv, figures, and index.html, a page to explore. Several runs are shown
beside each other, in --out. Needs: pip install 'hyla[latents,report]'

Examples:
  hyla latents runs/first
  hyla latents runs/first --splits train,held_out,unseen_terms --layers 1,2 --project pca
  hyla latents runs/hyla runs/softmax --out runs/codes"""


def latents_command(argv: list[str]) -> int:
    @dataclass(frozen=True)
    class Latents:
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
        """Run folders."""
        splits: str = "train,held_out"
        """Comma-separated; decoders are fitted on the first and scored on the others."""
        layers: str = "all"
        """all, or numbers from 1, comma-separated."""
        queries: str | None = None
        """Token positions, comma-separated, in place of the task's own; -1 is the last."""
        keys: str | None = None
        """Token positions of the keys."""
        project: Literal["tsne", "pca", "umap"] = "tsne"
        """How codes are drawn in the plane (umap: pip install 'hyla[umap]')."""
        num_samples: int = 4_096
        """Sequences per split."""
        num_points: int = 1_500
        """Points drawn."""
        num_replaced: int = 512
        """Sequences answered again with replaced codes; 0 for none."""
        reference: bool = False
        """Also show what the public code's faulty ridge regression gives (fuzzy logic)."""
        step: int | None = None
        """Checkpoint to use; the last one by default."""
        seed: int = 0
        """Of projections, controls and intervals."""
        out: Path | None = None
        """Folder to write; RUN/latents for one run by default, runs/latents for several."""

    arguments = _parse(Latents, argv, "hyla latents", LATENTS)
    from hyla.latents.analysis import Options
    from hyla.latents.decodability import has_encoding
    from hyla.latents.read import write_analysis

    check(len(arguments.runs) >= 1, "runs", "", "at least one run folder")
    default = arguments.runs[0] / "latents" if len(arguments.runs) == 1 else Path("runs/latents")
    out = arguments.out or default
    if any(has_encoding(path) for path in arguments.runs):
        return _decode(arguments, out)
    layers = None if arguments.layers == "all" else tuple(n - 1 for n in _numbers("layers", arguments.layers))
    check(layers is None or min(layers) >= 0, "layers", arguments.layers, "all, or numbers from 1")
    names = ("project", "num_samples", "num_points", "num_replaced", "reference", "step", "seed")
    options = Options(
        splits=tuple(arguments.splits.split(",")),
        layers=layers,
        queries=_positions("queries", arguments.queries),
        keys=_positions("keys", arguments.keys),
        **{name: getattr(arguments, name) for name in names},
    )
    command = shlex.join(["hyla", "latents", *argv])
    analysis, files = write_analysis(arguments.runs, out, options, command, errors.print)
    for table in _latents_tables(analysis):
        console.print(table)
    for path in files:
        if path.suffix in (".html", ".csv"):
            console.print(str(path), soft_wrap=True)
    console.print(f"{out / 'figures'}", soft_wrap=True)
    return 0


# What does not apply to models that are told their task, with its default.
ONLY_OF_CODES = {
    "layers": "all",
    "queries": None,
    "keys": None,
    "project": "tsne",
    "num_samples": 4_096,
    "num_points": 1_500,
    "num_replaced": 512,
    "reference": False,
}


def _decode(arguments: Any, out: Path) -> int:
    from hyla.latents.decodability import Options, decode_runs

    for name, default in ONLY_OF_CODES.items():
        given = getattr(arguments, name)
        check(given == default, name, given, "only for latent codes; these runs are decoded from whole hidden layers")
    options = Options(splits=tuple(arguments.splits.split(",")), step=arguments.step, seed=arguments.seed)
    rows, files = decode_runs(arguments.runs, out, options)
    for run, lines in rows.items():
        table = Table(title=f"{run}: R2 of ridge probes", title_justify="left", title_style="bold")
        for name in ("activations of", "target", "split", "R2", "95% interval", "control"):
            table.add_column(name, justify="right" if name in ("R2", "95% interval", "control") else "left")
        for line in lines:
            interval = "–" if line["low"] is None else f"{_number(line['low'])} to {_number(line['high'])}"
            scores = (_number(line["r2"]), interval, _number(line["control"]))
            table.add_row(line["layer"], line["target"], line["split"], *scores)
        console.print(table)
    for path in files:
        console.print(str(path), soft_wrap=True)
    return 0


def _positions(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} = {text!r} is not possible: token positions, separated by commas") from None


def _latents_tables(analysis: dict[str, Any]) -> Iterator[Table]:
    """For each model and probe, what its codes tell on unseen combinations layer by layer; then the causal check."""
    for model in analysis["models"]:
        rows = [(layer["title"], row) for layer in [*model["layers"], *model["others"]] for row in layer["probes"]]
        rows = [(title, row) for title, row in rows if row["test"] != row["train"] and row["metric"] != "accuracy"]
        for kind in dict.fromkeys((row["target"], row["metric"], row["test"]) for _, row in rows):
            mine = [(title, row) for title, row in rows if (row["target"], row["metric"], row["test"]) == kind]
            target, metric, split = kind
            title = f"{model['name']}: {metric} of the {target}, {split} ({mine[0][1]['tasks']} tasks)"
            table = Table(title=title, title_justify="left", title_style="bold")
            for name in ("codes of", metric, "95% interval", "chance", "control"):
                table.add_column(name, justify="left" if name == "codes of" else "right")
            for where, row in mine:
                interval = "–" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
                name = f"{where} (reference)" if "reference" in row["probe"] else where
                scores = [_number(row[key]) for key in ("value", "chance", "control")]
                table.add_row(name, scores[0], interval, *scores[1:])
            yield table
        causal = [(layer["title"], layer["causal"]) for layer in model["layers"] if layer["causal"]]
        if causal:
            title = f"{model['name']}: answers after codes are replaced, {causal[0][1]['effect_unit']}"
            table = Table(title=title, title_justify="left", title_style="bold")
            for name in ("codes of", "another class's mean", "own class's mean (control)"):
                table.add_column(name, justify="left" if name == "codes of" else "right")
            for where, found in causal:
                table.add_row(where, _number(found["other"]), _number(found["same"]))
            yield table


# --- sample -----------------------------------------------------------------------------------------------------------

SAMPLE = """Show examples of {task}, as a person or a program would read them.

Examples:
{examples}
  hyla sample {task}{data} -n 10000 --format jsonl --out samples     (or parquet: pip install 'hyla[parquet]')"""

SAMPLE_EXAMPLES = """\
  hyla sample {task} -n 3 --split held_out
  hyla sample {task} -n 2 --format png --out samples"""
TEXT_SAMPLE_EXAMPLES = """\
  hyla sample text --data corpus/ -n 3 --split held_out
  hyla sample text --data 'corpus/*.jsonl' --task.tokenizer runs/first/tokenizer.json"""


def sample_command(argv: list[str]) -> int:
    task_name, argv = _task("hyla sample", "Show examples of a task.", argv)
    from hyla.experiments.samples import check_drawable, write_samples
    from hyla.training.config import TASKS

    task_config, make = TASKS[task_name].config, TASKS[task_name].task

    @dataclass(frozen=True)
    class Sample:
        task: task_config  # type: ignore[valid-type]
        """Settings of the task."""
        num: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 3
        """How many."""
        split: str = "train"
        """Split to draw from."""
        format: Literal["text", "png", "gif", "support", "jsonl", "parquet"] = "text"
        """text goes to the terminal unless --out is given; gif animates an episode; support draws which combinations are
        trained on."""
        out: Path | None = None
        """Folder to write into; needed for pictures and parquet."""
        seed: int = 0
        """Seed of the data."""

    data, examples = (" --data corpus/", TEXT_SAMPLE_EXAMPLES) if task_name == "text" else ("", SAMPLE_EXAMPLES)
    description = SAMPLE.format(task=task_name, data=data, examples=examples.format(task=task_name))
    arguments = _parse(Sample, argv, f"hyla sample {task_name}", description, default=Sample(task=task_config()))
    check(arguments.num >= 1, "num", arguments.num, "at least 1")
    check(arguments.seed >= 0, "seed", arguments.seed, "0 or more")
    task = make(arguments.task, arguments.seed)
    check(arguments.split in task.splits, "split", arguments.split, f"task {task.name} has {', '.join(task.splits)}")
    if arguments.format in ("png", "gif", "support"):
        check_drawable(task, arguments.format)
    needs_folder = arguments.format in ("png", "gif", "support", "parquet") and arguments.out is None
    check(not needs_folder, "out", None, f"--format {arguments.format} needs a folder, such as --out samples")
    for item in write_samples(task, arguments.split, arguments.num, arguments.format, arguments.out):
        console.print(str(item), soft_wrap=True, highlight=task_name != "text")
    return 0


# --- bench ------------------------------------------------------------------------------------------------------------

BENCH = """Measure speed on this machine, as ratios against a named baseline in the same process.

Correctness is checked first: what computes something else is not timed.

Examples:
  hyla bench train --against plain --json train.json
  hyla bench attention --mechanisms softmax,hyla --against eager,sdpa
  hyla bench scaling --mechanisms hyla --out figures"""


def bench_command(argv: list[str]) -> int:
    kinds = {
        "train": "one training step at the paper's sizes, against textbook PyTorch",
        "attention": "attention alone, against its plain equations and torch's own",
        "scaling": "how step time and memory grow with each size",
    }
    kind, argv = _choose("hyla bench", BENCH, kinds, argv, "WHAT"), argv[1:]
    baseline = {"train": "plain", "attention": "eager,sdpa", "scaling": ""}[kind]

    @dataclass(frozen=True)
    class Bench:
        mechanisms: str = "softmax,hyla"
        """Comma-separated."""
        tasks: str = "logic,sraven"
        """Of the training step; comma-separated."""
        against: str = baseline
        """Baselines, comma-separated: plain for train; eager, sdpa for attention."""
        repeats: int = 15
        """Timed calls of each; the median counts."""
        threads: int | None = None
        """CPU threads; torch's own choice by default."""
        json: Path | None = None
        """Also write the rows to this file."""
        out: Path | None = None
        """Folder for the figure of scaling."""

    arguments = _parse(Bench, argv, f"hyla bench {kind}", BENCH)
    check(arguments.repeats >= 1, "repeats", arguments.repeats, "at least 1")
    check(arguments.threads is None or arguments.threads >= 1, "threads", arguments.threads, "at least 1")
    import torch

    from hyla import bench

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    mechanisms = arguments.mechanisms.split(",")
    errors.print(f"checking correctness, then timing {arguments.repeats} calls of each ...")
    where = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    if kind == "scaling":
        return _bench_scaling(arguments, mechanisms, where)
    if kind == "train":
        check(arguments.against == "plain", "against", arguments.against, "plain")
        rows = bench.bench_train(arguments.tasks.split(","), mechanisms, arguments.repeats)
    else:
        baselines = arguments.against.split(",")
        rows = bench.bench_attention(bench.ATTENTION_SIZES, mechanisms, baselines, arguments.repeats)
    table = Table(title=f"{kind}: {where}", title_justify="left", title_style="bold")
    for name in ("task", "mechanism", "baseline"):
        table.add_column(name)
    for name in ("ours ms", "baseline ms", "baseline / ours"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.ours_ms:.1f}", f"{row.baseline_ms:.1f}", f"{row.ratio:.2f}")
        table.add_row(row.task, row.mechanism, row.baseline, *numbers)
    console.print(table)
    if arguments.json is not None:
        write_json(arguments.json, {"kind": kind, "where": where, "rows": [row.as_dict() for row in rows]})
    return 0


def _bench_scaling(arguments: Any, mechanisms: list[str], where: str) -> int:
    from dataclasses import asdict

    from hyla import bench
    from hyla.report.figures import check_matplotlib, scaling_curves

    if arguments.out is not None:
        check_matplotlib()
    points = bench.bench_scaling(mechanisms, arguments.repeats)
    table = Table(title=f"scaling: {where}", title_justify="left", title_style="bold")
    for name in ("mechanism", "axis", "values", "step ms", "time exponent", "peak MiB", "memory exponent"):
        table.add_column(name)
    exponents = {}
    for mechanism in mechanisms:
        for axis in bench.SCALING_AXES:
            mine = [point for point in points if (point.mechanism, point.axis) == (mechanism, axis)]
            slopes = tuple(bench.fitted_exponent(mine, quantity) for quantity in ("step_ms", "peak_mib"))
            exponents[mechanism, axis] = slopes
            ends = (mine[0], mine[-1])
            cells = (
                " to ".join(f"{getattr(point, name):.0f}" for point in ends)
                for name in ("value", "step_ms", "peak_mib")
            )
            values, times, memory = cells
            table.add_row(mechanism, axis, values, times, f"{slopes[0]:.2f}", memory, f"{slopes[1]:.2f}")
    console.print(table)
    rows = [asdict(point) for point in points]
    if arguments.json is not None:
        write_json(arguments.json, {"kind": "scaling", "where": where, "rows": rows})
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for path in scaling_curves(rows, exponents, arguments.out / "scaling"):
            console.print(str(path), soft_wrap=True)
    return 0


# --- what the commands share ------------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train_command, "Train one model on a task into a run folder."),
    "resume": (resume_command, "Go on with a run that was interrupted, bit for bit."),
    "evaluate": (evaluate_command, "Measure a run's model on its splits."),
    "export": (export_command, "Write a text run's model as a folder of Hugging Face transformers."),
    "generate": (generate_command, "Write text with a text run's model."),
    "compare": (compare_command, "Train mechanisms side by side; table, figure and page of how each generalises."),
    "reproduce": (reproduce_command, "Run a named experiment of the paper: its rows, grid and seeds."),
    "sweep": (sweep_command, "Train a grid or random search of your own, from a TOML file."),
    "publish": (publish_command, "Copy an experiment as it can be shared: numbers and weights."),
    "report": (report_command, "Rebuild tables, figures and page of experiments from their run folders."),
    "latents": (latents_command, "Read a model's latent codes: probes, projections, what the answer owes to them."),
    "bench": (bench_command, "Measure speed on this machine against a named baseline."),
    "sample": (sample_command, "Show or export examples of a task."),
}

HELP = """Attention as a hypernetwork: train, compare and look into attention mechanisms on compositional tasks.

Examples:
  hyla compare logic --budget quick             softmax, linear and HYLA side by side, in minutes
  hyla train sraven --mechanism hyla            one run
  hyla sample sraven -n 1                       a puzzle to solve
  hyla train logic --help                       every setting of a run"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no ∧ or – shows a ? rather than fail
            stream.reconfigure(errors="replace")
    try:
        if argv and argv[0] == "--version":
            from hyla import __version__

            print(f"hyla {__version__}")
            return 0
        command = _choose("hyla", HELP, {name: text for name, (_, text) in COMMANDS.items()}, argv, "COMMAND")
        if RANKS > 1 and command not in SHARED:
            allowed = f"hyla {command} is for one process; torchrun is for hyla {' and '.join(SHARED)}"
            raise ConfigError(f"WORLD_SIZE = {RANKS} is not possible: {allowed}")
        return COMMANDS[command][0](argv[1:])
    except HylaError as error:
        stopped = error.exit_status > 128  # by a signal, as asked
        if FIRST_RANK or not stopped:
            _complain(str(error) if stopped else f"error: {error}")
        return error.exit_status
    except SystemExit as error:  # of the parsers, which have said why
        if error.code and not FIRST_RANK:
            _wait_to_be_ended()
        raise
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError as error:
        _complain(f"error: not enough memory for these settings: {error}")
        return 1
    except RuntimeError as error:
        if RANKS > 1:
            from hyla.training.distributed import LOST, lost_rank

            if lost_rank(error):
                _complain(f"error: {LOST}")
                return 1
        if "allocate" not in str(error) and "out of memory" not in str(error):  # torch's words for it
            raise
        reason = str(error).partition("\n")[0]
        _complain(f"error: not enough memory for these settings: {reason}")
        return 1
    except OSError as error:  # a full disk, a folder that may not be written to
        named = error.filename is not None and error.strerror
        _complain(f"error: {error.filename}: {error.strerror}" if named else f"error: {error}")
        return 1
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on where it was")
        return 130


def _complain(message: str) -> None:
    """Say what went wrong. The first rank does so at once; the others mostly have met the same, and the launcher ends them
    before they speak."""
    if not FIRST_RANK:
        _wait_to_be_ended()
    errors.print(message, style="red", soft_wrap=True)


def _wait_to_be_ended() -> None:
    time.sleep(SECONDS_TO_BE_ENDED)


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """What is printed in here, only the first rank prints."""
    with contextlib.ExitStack() as stack:
        if not FIRST_RANK:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _choose(prog: str, description: str, choices: dict[str, str], argv: list[str], metavar: str) -> str:
    """The first word of argv, which must be one of `choices`; prints help or an error and exits otherwise."""
    if argv and argv[0] in choices:
        return argv[0]
    parser = argparse.ArgumentParser(
        prog, usage=f"{prog} {metavar} ...", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("choice", metavar=metavar, choices=list(choices), help="one of")
    width = max(map(len, choices))
    parser.epilog = f"{metavar} is one of\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in choices.items())
    parser.epilog += f"\n\nMore of each: {prog} {next(iter(choices))} --help"
    with _said_once():
        if argv:
            parser.parse_args(argv[:1])
        parser.print_help()
    raise SystemExit(2)


# What each task is about; the paper of the first two compares attention mechanisms on them.
TASK_TEXTS = {
    "logic": "fuzzy logic: regression of functions made of known terms in unseen combinations",
    "sraven": "symbolic Raven's matrices: unseen combinations of known rules",
    "hyperteacher": "regression of networks made of known modules in unseen combinations",
    "preference": "imitation in rooms: what is liked is made of known preferences in unseen combinations",
    "goal": "imitation in mazes: unseen combinations of place, object, action and maze",
    "text": "language modelling on files of one's own, or on a hub's data set",
}
COMPARED = ("logic", "sraven")


def _task(
    prog: str, description: str, argv: list[str], names: Sequence[str] = tuple(TASK_TEXTS)
) -> tuple[str, list[str]]:
    texts = {name: TASK_TEXTS[name] for name in names}
    return _choose(prog, description, texts, argv, "TASK"), argv[1:]


def _parse(cls: type, argv: list[str], prog: str, description: str, default: Any = None, config: Any = None) -> Any:
    """Parse argv into a dataclass with tyro; a flag that no setting has is refused with the nearest one."""
    own = {field.name for field in fields(cls)}
    argv = [_long_name(word, following, own) for word, following in zip(argv, [*argv[1:], ""], strict=False)]
    if config is not None:
        _check_flags(argv, cls, config)
    options: dict[str, Any] = {} if default is None else {"default": default}
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    with _said_once():
        return tyro.cli(cls, args=argv, prog=prog, description=description, config=markers, **options)


def _long_name(word: str, following: str, own: set[str]) -> str:
    """A flag as tyro knows it: its full name, and a switch with its value. own: settings of the command itself, which
    have no longer name."""
    name, equals, value = word.partition("=")
    if name.removeprefix("--").replace("-", "_") in own and name.replace("_", "-") not in SWITCHES:
        return word
    if word.replace("_", "-") in SWITCHES and following not in ("True", "False"):
        return f"{word}=True"
    return SHORTCUTS.get(name.replace("_", "-"), name) + equals + value


def _shortcut_text(task: str) -> str:
    kept = {short: full for short, full in SHORTCUTS.items() if task == "text" or short not in OF_TEXT}
    return ", ".join(f"{short} for {full}" for short, full in kept.items())


def _check_flags(argv: list[str], cls: type, config: Any = None) -> None:
    """Refuse a flag (or KEY=VALUE word) whose key does not exist, in the words used for config files. config: of a command
    that takes the settings of a run."""
    known = {"": [field.name for field in fields(cls)]}
    if config is not None:
        known |= {
            name: [f.name for f in fields(getattr(config, name))] for name in ("task", "model", "optimizer", "training")
        }
        for short, full in SHORTCUTS.items():
            section, _, key = full.removeprefix("--").replace("-", "_").partition(".")
            known[""] += [short.removeprefix("--").replace("-", "_")] if key in known[section] else []
    for word in argv:
        path = word.partition("=")[0].removeprefix("--").replace("-", "_")
        section, _, key = path.rpartition(".")
        if word in ("-h", "--help") or not (word.startswith("--") or ("=" in word and section in known and section)):
            continue
        if config is None and section:
            raise unknown_key(path, known, "")
        if section not in known:
            raise ConfigError(f"unknown section {section!r} in {word!r}; there are {', '.join(filter(None, known))}")
        if key not in known[section]:
            raise unknown_key(key, known, section)
        if not word.startswith("--"):
            raise ConfigError(
                f"{word!r} is no flag; write --{section}.{key.replace('_', '-')} {word.partition('=')[2]}"
            )


def _early(argv: list[str], name: str, choices: Sequence[str] | None, default: str | None) -> Any:
    """The value of a flag that decides the defaults of all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", default=default)
    try:
        found, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"--{name}: {error}") from None
    value = getattr(found, name)
    if choices is not None:
        allowed = f"choose from {', '.join(choices)}"
        check(value in choices or (value is None and default is None), name, value, allowed)
    return value


def _base_config(task: str, argv: list[str], presets: dict[str, Any]) -> Any:
    """The config that flags override: the preset, overridden by the file."""
    from hyla.training.config import TASKS, config_from_dict, default_model

    preset = _early(argv, "preset", tuple(presets), "default")
    path = _early(argv, "config", None, None)
    architecture = _early(argv, "architecture", TASKS[task].architectures, None)
    base = presets[preset](task, architecture)
    if path is None:
        return base
    try:
        config = config_from_dict(read_json(Path(path)), base)
        if architecture is None or architecture == config.architecture_name:
            return config
        return replace(config, model=default_model(task, architecture))  # the flag overrides the file
    except RunError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _parts(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("task", "model", "optimizer", "training", "seed")}


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} = {text!r} is not possible: whole numbers, separated by commas") from None
    check(all(number >= 0 for number in numbers), name, text, "each 0 or more")
    return numbers


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("steps  {task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield bar
