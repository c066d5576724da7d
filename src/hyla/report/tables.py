"""The table of a comparison: what each mechanism scored on each split, over seeds, beside what was reported.

`summarise` reads run folders into a :class:`Comparison`, plain data that `comparison.json` keeps; everything else in
`hyla.report` starts from it, so that tables and figures can be made again without the runs, and without torch.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shlex
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hyla.errors import RunError
from hyla.runs import Run, read_json, write_json

COMPARISON = "comparison.json"
HEADLINES = {"logic": "r2", "sraven": "accuracy"}
SPLIT_LABELS = {
    "held_out": "held-out combinations",
    "train": "trained combinations",
    "validation": "combinations kept for validation",
    "unseen_terms": "unseen terms",
}
SPREAD_NOTE = (
    "Ours: mean ± standard deviation over the seeds that finished (n − 1 in the denominator); "
    "– where fewer than two did."
)


@dataclass(frozen=True)
class Reported:
    """A figure that others report for a mechanism and split.

    spread: None where none was given; spread_kind says what it is. note: where the figures of this source come from;
    caveat: what is uncertain about this one, empty for most.
    """

    source: str
    mean: float
    spread: float | None
    spread_kind: str
    steps: int
    setting: str
    note: str
    caveat: str


@dataclass(frozen=True)
class RunSummary:
    """One run. `scores` has the headline metric of each split, None where there is no value: a diverged or unfinished
    run has none. `curve` is ((step, {split: value}), ...), from the lines of `metrics.jsonl` that evaluated splits.
    `reason` says why a run diverged. `path` is relative to the folder of the comparison."""

    name: str
    path: str
    mechanism: str
    seed: int
    state: str
    reason: str | None
    steps: int
    wall_seconds: float | None
    num_parameters: int | None
    scores: dict[str, float | None]
    curve: tuple[tuple[int, dict[str, float | None]], ...]


@dataclass(frozen=True)
class Row:
    """One mechanism on one split. `seeds` and `values` run over all its runs, with None for a run without a value.

    num_values: n, the runs that finished with a finite score. standard_deviation: over those, n - 1 in the denominator,
    None where n < 2; standard_error: that over sqrt(n). num_undefined: runs that finished without a finite score.
    steps: fewest and most steps of the runs that finished. ceiling: the best score that any observer could reach, mean
    over the runs that state it.
    """

    mechanism: str
    split: str
    seeds: tuple[int, ...]
    values: tuple[float | None, ...]
    mean: float | None
    standard_deviation: float | None
    standard_error: float | None
    num_values: int
    num_diverged: int
    num_unfinished: int
    num_undefined: int
    steps: tuple[int, int] | None
    reported: tuple[Reported, ...]
    ceiling: float | None


@dataclass(frozen=True)
class Comparison:
    """All that the report shows. `settings`: each key of the runs' config, dotted, with its different values."""

    task: str
    budget: str
    budget_note: str
    metric: str
    command: str
    settings: dict[str, tuple[Any, ...]]
    rows: tuple[Row, ...]
    runs: tuple[RunSummary, ...]

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.mechanism for run in self.runs))

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.split for row in self.rows))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def steps(self) -> tuple[int, int] | None:
        """Fewest and most steps among the runs that finished."""
        return step_range(run for run in self.runs if run.state == "finished")

    @property
    def title(self) -> str:
        """Names the budget and its steps, so that a quick comparison is never taken for the paper's."""
        names = self.mechanisms
        who = ", ".join(names) if len(names) <= 4 else f"{len(names)} mechanisms"
        return f"{self.task}: {who} ({self.budget} budget, {steps_text(self.steps)})"

    def rows_of(self, split: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.split == split)

    def ceiling(self, split: str) -> float | None:
        """Mean of the ceilings that the mechanisms' rows state; None where there is none."""
        found = [row.ceiling for row in self.rows_of(split) if row.ceiling is not None]
        return statistics.fmean(found) if found else None

    def row(self, mechanism: str, split: str) -> Row:
        return next(row for row in self.rows if (row.mechanism, row.split) == (mechanism, split))


# --- from run folders to a comparison ---------------------------------------------------------------------------------


def summarise(
    runs: Sequence[Run],
    *,
    task: str,
    budget: str,
    budget_note: str,
    command: str | None = None,
    base: Path | str | None = None,
) -> Comparison:
    """Read `runs`, one per mechanism and seed, into a :class:`Comparison`.

    Every run is counted, whatever became of it. command: what to type to repeat the comparison (default: `hyla compare`
    with these mechanisms, seeds and budget). base: the folder the comparison will lie in, to which the runs' paths are
    written relative (default: DIR for runs in DIR/runs/NAME). Raises :class:`RunError` for no runs, for two runs of one
    mechanism and seed, and for runs that report different metrics.
    """
    if not runs:
        raise RunError("there are no runs to compare")
    base = Path(base) if base is not None else runs[0].path.absolute().parent.parent
    configs = [run.config for run in runs]
    metric = _headline(runs, task)
    summaries = tuple(_summarise_run(run, config, metric, base) for run, config in zip(runs, configs, strict=True))
    seen: dict[tuple[str, int], str] = {}
    for summary in summaries:
        key = (summary.mechanism, summary.seed)
        if key in seen:
            raise RunError(f"two runs of {key[0]} with seed {key[1]}: {seen[key]} and {summary.path}")
        seen[key] = summary.path

    mechanisms = list(dict.fromkeys(summary.mechanism for summary in summaries))
    splits = _splits(summaries)
    ceilings = [(run.result or {}).get("ceiling") or {} for run in runs]
    rows = []
    for split in splits:
        for mechanism in mechanisms:
            mine = [i for i, summary in enumerate(summaries) if summary.mechanism == mechanism]
            rows.append(
                _row(
                    [summaries[i] for i in mine], [configs[i] for i in mine], [ceilings[i] for i in mine], split, metric
                )
            )
    if command is None:
        seeds = ",".join(str(seed) for seed in sorted({summary.seed for summary in summaries}))
        words = ["hyla", "compare", task, "--mechanisms", ",".join(mechanisms), "--seeds", seeds, "--budget", budget]
        command = shlex.join(words)
    return Comparison(task, budget, budget_note, metric, command, _settings(configs), tuple(rows), summaries)


def _headline(runs: Sequence[Run], task: str) -> str:
    found = dict.fromkeys(result["headline"] for run in runs if (result := run.result))
    if len(found) > 1:
        raise RunError(f"the runs report different metrics: {', '.join(found)}")
    if found:
        return next(iter(found))
    if task in HEADLINES:
        return HEADLINES[task]
    metrics = (name for run in runs for _, splits in _evaluations(run) for split in splits.values() for name in split)
    return next(metrics, "score")


def _evaluations(run: Run) -> list[tuple[int, dict[str, dict[str, float | None]]]]:
    return [(line["step"], line["splits"]) for line in run.metrics.read() if line.get("splits")]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _summarise_run(run: Run, config: dict[str, Any], metric: str, base: Path) -> RunSummary:
    result, evaluations = run.result or {}, _evaluations(run)
    state = run.state
    curve = tuple(
        (step, {split: _number(metrics.get(metric)) for split, metrics in splits.items()})
        for step, splits in evaluations
    )
    finished = state == "finished"
    splits = dict.fromkeys([*result.get("splits", {}), *(split for _, scores in curve for split in scores)])
    scores = {s: _number(result.get("splits", {}).get(s, {}).get(metric)) if finished else None for s in splits}
    lines = run.metrics.read()
    return RunSummary(
        name=run.name,
        path=Path(os.path.relpath(run.path.absolute(), base.absolute())).as_posix(),
        mechanism=config["model"]["mechanism"],
        seed=config["seed"],
        state=state,
        reason=result.get("reason"),
        steps=result.get("step", lines[-1]["step"] if lines else 0),
        wall_seconds=_number(result.get("wall_seconds")),
        num_parameters=result.get("num_parameters"),
        scores=scores,
        curve=curve,
    )


def _splits(summaries: Sequence[RunSummary]) -> list[str]:
    """Every split that some run has, the held-out one first: it is what the comparison is about."""
    found = list(dict.fromkeys(split for summary in summaries for split in summary.scores))
    found = found or ["held_out"]  # nothing was evaluated, because all diverged, say: they are counted all the same
    first = [split for split in ("held_out", "train") if split in found]
    return first + [split for split in found if split not in first]


def _row(
    runs: Sequence[RunSummary],
    configs: Sequence[dict[str, Any]],
    ceilings: Sequence[dict[str, Any]],
    split: str,
    metric: str,
) -> Row:
    values = [run.scores.get(split) for run in runs]
    present = [value for value in values if value is not None]
    deviation = statistics.stdev(present) if len(present) > 1 else None
    ceiling = [value for one in ceilings if (value := _number(one.get(split))) is not None]
    states = [run.state for run in runs]
    steps = step_range(run for run in runs if run.state == "finished")
    figures = [reported_figures(c["task"], c["model"], split, metric, steps) for c in configs]
    return Row(
        mechanism=runs[0].mechanism,
        split=split,
        seeds=tuple(run.seed for run in runs),
        values=tuple(values),
        mean=statistics.fmean(present) if present else None,
        standard_deviation=deviation,
        standard_error=None if deviation is None else deviation / math.sqrt(len(present)),
        num_values=len(present),
        num_diverged=states.count("diverged"),
        num_unfinished=states.count("unfinished"),
        num_undefined=states.count("finished") - len(present),
        steps=steps,
        reported=figures[0] if all(figure == figures[0] for figure in figures) else (),
        ceiling=statistics.fmean(ceiling) if ceiling else None,
    )


def _settings(configs: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    def flatten(value: Any, key: str) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                yield from flatten(item, f"{key}.{name}" if key else name)
        else:
            yield key, value if isinstance(value, str | int | float | bool | None) else str(value)

    settings: dict[str, list[Any]] = {}
    for config in configs:
        for key, value in flatten(config, ""):
            values = settings.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: tuple(values) for key, values in settings.items()}


def step_range(runs: Iterable[RunSummary]) -> tuple[int, int] | None:
    """Fewest and most steps of `runs`; None for no runs."""
    steps = [run.steps for run in runs]
    return (min(steps), max(steps)) if steps else None


# --- what others report -----------------------------------------------------------------------------------------------


def reported_figures(
    task: dict[str, Any], model: dict[str, Any], split: str, metric: str, steps: tuple[int, int] | None
) -> tuple[Reported, ...]:
    """The figures of `experiments/reported.toml` for runs with these `task` and `model` sections, on one split.

    A table counts only if the sections agree with every key it names and set none that it wants unset. steps: fewest and
    most steps of the runs, for tables that hold for one number of steps only.
    """
    text = resources.files("hyla").joinpath("experiments/reported.toml").read_text(encoding="utf-8")
    figures = []
    for table in tomllib.loads(text)["table"]:
        mechanism = model.get("mechanism")
        figure = table["splits"].get(split, {}).get(mechanism)
        wanted = [(task, table["task"]), (model, table["model"])]
        agrees = all(mine.get(key) == value for mine, theirs in wanted for key, value in theirs.items())
        agrees = agrees and all(model.get(key) is None for key in table["model_unset"])
        at_these_steps = not table["steps_must_agree"] or steps == (table["steps"], table["steps"])
        if figure is None or metric != table["metric"] or not agrees or not at_these_steps:
            continue
        mean, spread = (*figure, None)[:2]
        scale = table["divide_by"]
        figures.append(
            Reported(
                source=table["source"],
                mean=round(mean / scale, 6),
                spread=None if spread is None else round(spread / scale, 6),
                spread_kind=table["spread"],
                steps=table["steps"],
                setting=table["setting"],
                note=table["note"],
                caveat=table.get("caveats", {}).get(mechanism, ""),
            )
        )
    return tuple(figures)


# --- comparison.json --------------------------------------------------------------------------------------------------


def write_comparison(folder: Path | str, comparison: Comparison) -> Path:
    """Write `comparison.json` into `folder`, which is made if needed."""
    path = Path(folder) / COMPARISON
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, to_json(comparison))
    return path


def read_comparison(folder: Path | str) -> Comparison:
    """The comparison kept in `folder`; :class:`RunError` where there is none or it is damaged."""
    path = Path(folder) / COMPARISON
    data = read_json(path)
    try:
        return from_json(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{path} is not a comparison: {type(error).__name__}: {error}") from None


def to_json(comparison: Comparison) -> dict[str, Any]:
    """`comparison` as plain dicts and lists."""
    return asdict(comparison)


def from_json(data: dict[str, Any]) -> Comparison:
    """The inverse of :func:`to_json`."""
    rows = [
        {
            **row,
            "seeds": tuple(row["seeds"]),
            "values": tuple(row["values"]),
            "steps": None if row["steps"] is None else tuple(row["steps"]),
            "reported": tuple(Reported(**figure) for figure in row["reported"]),
        }
        for row in data["rows"]
    ]
    runs = [{**run, "curve": tuple((step, scores) for step, scores in run["curve"])} for run in data["runs"]]
    return Comparison(
        **{
            **data,
            "settings": {key: tuple(values) for key, values in data["settings"].items()},
            "rows": tuple(Row(**row) for row in rows),
            "runs": tuple(RunSummary(**run) for run in runs),
        }
    )


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanCurve:
    """Mean over the finished runs of a mechanism at the steps where each has a value, with least and greatest."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_runs: int


def run_curve(run: RunSummary, split: str) -> tuple[list[int], list[float]]:
    """Steps and values of one run on one split, without the steps that have no finite value."""
    points = [(step, value) for step, scores in run.curve if (value := scores.get(split)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def mean_curve(comparison: Comparison, mechanism: str, split: str) -> MeanCurve:
    """See :class:`MeanCurve`. Diverged and unfinished runs are left out: they would bend the mean where they end."""
    finished = [run for run in comparison.runs if run.mechanism == mechanism and run.state == "finished"]
    curves = [dict(zip(*run_curve(run, split), strict=True)) for run in finished]
    curves = [curve for curve in curves if curve]
    steps = tuple(sorted(set.intersection(*(set(curve) for curve in curves)))) if curves else ()
    values = [[curve[step] for curve in curves] for step in steps]
    return MeanCurve(
        steps,
        tuple(statistics.fmean(at_step) for at_step in values),
        tuple(min(at_step) for at_step in values),
        tuple(max(at_step) for at_step in values),
        len(curves),
    )


# --- words and numbers ------------------------------------------------------------------------------------------------


def metric_label(metric: str) -> str:
    """The name of a metric with its unit: scores that are accuracies are shown in percent."""
    return {"r2": "R²", "accuracy": "accuracy (%)"}.get(metric, metric)


def format_score(metric: str, value: float | None) -> str:
    """`value` as shown everywhere: R2 to 3 places, accuracy in percent to 1; an en dash for no value."""
    if value is None:
        return "–"
    if metric == "accuracy":
        return f"{100 * value:.1f}"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def format_mean(metric: str, mean: float | None, spread: float | None) -> str:
    """`mean ± spread`, or an en dash where there is no mean."""
    return "–" if mean is None else f"{format_score(metric, mean)} ± {format_score(metric, spread)}"


def format_reported(metric: str, figure: Reported) -> str:
    """A reported figure, without ± where no spread was given, with * where there is a caveat."""
    text = format_score(metric, figure.mean)
    if figure.spread is not None:
        text += f" ± {format_score(metric, figure.spread)}"
    return f"{text} *" if figure.caveat else text


def steps_text(steps: tuple[int, int] | None) -> str:
    """`600 steps`, or `300 to 600 steps`, or `no run finished`."""
    if steps is None:
        return "no run finished"
    return f"{steps[0]:,} steps" if steps[0] == steps[1] else f"{steps[0]:,} to {steps[1]:,} steps"


def seeds_text(row: Row) -> str:
    """`3`, or `1 of 3 (1 diverged, 1 unfinished)`: how many runs the mean is over, and what became of the others."""
    lost = {"diverged": row.num_diverged, "unfinished": row.num_unfinished, "not finite": row.num_undefined}
    named = ", ".join(f"{number} {name}" for name, number in lost.items() if number)
    return f"{row.num_values} of {len(row.seeds)} ({named})" if named else str(row.num_values)


def reported_columns(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """(source, steps) of every kind of reported figure among `rows`, in order: the columns that the tables need."""
    return list(dict.fromkeys((figure.source, figure.steps) for row in rows for figure in row.reported))


def reported_cell(metric: str, row: Row, column: tuple[str, int]) -> str:
    """What `row` shows in a column of :func:`reported_columns`."""
    figures = [figure for figure in row.reported if (figure.source, figure.steps) == column]
    return format_reported(metric, figures[0]) if figures else "–"


def notes(comparison: Comparison) -> list[str]:
    """The sentences that belong under the table: what this budget can show, what ± means, where figures come from."""
    sentences = [comparison.budget_note, SPREAD_NOTE]
    figures = [figure for row in comparison.rows for figure in row.reported]
    for source, steps in reported_columns(comparison.rows):
        if comparison.steps and comparison.steps != (steps, steps):
            sentences.append(f"{source} trained for {steps:,} steps, these runs for {steps_text(comparison.steps)}.")
    sentences += dict.fromkeys(f"{figure.note} Setting: {figure.setting}." for figure in figures)
    sentences += dict.fromkeys(f"* {figure.caveat}" for figure in figures if figure.caveat)
    if any(row.ceiling is not None for row in comparison.rows):
        sentences.append(
            "Ceiling: the score of an ideal observer that knows how puzzles are drawn; some are ambiguous."
        )
    return [sentence for sentence in sentences if sentence]


# --- the table in several forms ---------------------------------------------------------------------------------------


def split_label(split: str) -> str:
    """`held_out (held-out combinations)`: the split's name and what it holds."""
    return f"{split} ({SPLIT_LABELS[split]})" if split in SPLIT_LABELS else split


def rich_table(comparison: Comparison) -> Group:
    """The table for the terminal: one block per split, the notes underneath. Needs 80 columns."""
    metric = comparison.metric
    parts: list[Text | Table] = [Text(comparison.title, style="bold"), Text()]
    for split in comparison.splits:
        rows = comparison.rows_of(split)
        columns, ceiling = reported_columns(rows), comparison.ceiling(split)
        with_ceiling = "" if ceiling is None else f"; ceiling {format_score(metric, ceiling)}"
        parts.append(Text(f"{split_label(split)}: {metric_label(metric)}{with_ceiling}", style="underline"))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("mechanism", overflow="fold")
        table.add_column("mean ± sd", justify="right", no_wrap=True)
        table.add_column("seeds", overflow="fold")
        for source, steps in columns:
            table.add_column(Text(f"{source},\n{steps:,} steps"), justify="right", no_wrap=True)
        for row in rows:
            reported = [Text(reported_cell(metric, row, column)) for column in columns]
            mean = Text(format_mean(metric, row.mean, row.standard_deviation))
            table.add_row(Text(row.mechanism), mean, Text(seeds_text(row)), *reported)
        parts += [table, Text()]
    parts += [Text(sentence, style="dim" if number else "") for number, sentence in enumerate(notes(comparison))]
    return Group(*parts)


def to_markdown(comparison: Comparison) -> str:
    """The table and its notes in GitHub's Markdown."""

    def plain(text: str) -> str:
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
        return "".join(f"\\{letter}" if letter in "\\`*[]|" else letter for letter in text)

    metric, columns = comparison.metric, reported_columns(comparison.rows)
    with_ceiling = any(row.ceiling is not None for row in comparison.rows)
    head = ["split", "mechanism", f"{metric_label(metric)}, mean ± sd", "standard error", "seeds"]
    head += [f"{source}, {steps:,} steps" for source, steps in columns] + ["ceiling"] * with_ceiling
    lines = [f"# {plain(comparison.title)}", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "|".join([":--", ":--", "--:", "--:", ":--", *["--:"] * (len(head) - 5)]) + "|")
    for row in comparison.rows:
        cells = [row.split, row.mechanism, format_mean(metric, row.mean, row.standard_deviation)]
        cells += [format_score(metric, row.standard_error), seeds_text(row)]
        cells += [reported_cell(metric, row, column) for column in columns]
        cells += [format_score(metric, row.ceiling)] * with_ceiling
        lines.append("| " + " | ".join(plain(cell) for cell in cells) + " |")
    lines += ["", *(line for sentence in notes(comparison) for line in (plain(sentence), ""))]
    return "\n".join([*lines, "```", comparison.command, "```", ""])


def to_csv(comparison: Comparison) -> str:
    """One line per run and split, unrounded, with the reported figures and the ceiling beside it."""
    columns = reported_columns(comparison.rows)
    head = ["task", "budget", "split", "metric", "mechanism", "seed", "state", "value", "steps", "wall_seconds"]
    head += ["num_parameters", "run", "path", "ceiling"]
    for source, _ in columns:
        name = source.lower().replace(" ", "_")
        head += [f"{name}_mean", f"{name}_spread", f"{name}_spread_kind", f"{name}_steps"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for split in comparison.splits:
        for run in comparison.runs:
            row = comparison.row(run.mechanism, split)
            line: list[Any] = [comparison.task, comparison.budget, split, comparison.metric, run.mechanism, run.seed]
            line += [run.state, run.scores.get(split), run.steps, run.wall_seconds, run.num_parameters]
            line += [run.name, run.path, row.ceiling]
            for column in columns:
                figure = next((f for f in row.reported if (f.source, f.steps) == column), None)
                line += [figure.mean, figure.spread, figure.spread_kind, figure.steps] if figure else [None] * 4
            writer.writerow(line)
    return file.getvalue()
