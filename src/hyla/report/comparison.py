"""From a plan and its run folders to a :class:`Comparison`: what each variant scored on each split, over seeds.

`comparison.json` is a Comparison as plain data, for other programs. Tables, figures and the page start from it too, so that
no number is computed twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hyla.errors import RunError
from hyla.report.plan import ERRORS, LOWER_IS_BETTER, PLAN, RUNS, Candidate, Plan, Setting, Variant
from hyla.report.reported import Reported, reported_figures, reported_names
from hyla.report.statistics import BOUNDS, Summary, Verdict, distinguishable, paired_difference, summary, verdict
from hyla.runs import CONFIG, RESULT, Run, read_json, write_json

COMPARISON = "comparison.json"
LOST = ("diverged", "failed", "unfinished", "not started", "not finite")
"""What can become of a run that has no score, in the order in which it is told."""


@dataclass(frozen=True)
class RunSummary:
    """One run. state: `finished`, `diverged`, `failed`, `unfinished` or `not started`; `reason` says why it diverged or
    failed. `scores` has the headline metric of each split, None where there is no value: only a finished run has any.
    `curve` is ((step, {split: value}), ...), from the lines of `metrics.jsonl` that evaluated splits. `path` is relative
    to the folder of the experiment."""

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
class Difference:
    """Our score less that of the variant `to`, seed by seed, over the seeds where both have one."""

    to: str
    summary: Summary


@dataclass(frozen=True)
class Row:
    """One variant on one split. `seeds`, `runs` (names) and `values` run over the runs of the chosen candidate, with None
    for a run without a value; they are empty where no candidate could be chosen.

    lost: how many runs have no value, by what became of them; of all candidates where none could be chosen. steps: fewest
    and most steps of the runs that finished. verdicts: for each reported figure, where our interval lies seen from it.
    ceiling: the best score that any observer could reach, mean over the runs that state it.
    """

    variant: str
    mechanism: str
    split: str
    seeds: tuple[int, ...]
    runs: tuple[str, ...]
    values: tuple[float | None, ...]
    summary: Summary
    lost: dict[str, int]
    steps: tuple[int, int] | None
    reported: tuple[Reported, ...]
    verdicts: tuple[Verdict, ...]
    ceiling: float | None
    difference: Difference | None


@dataclass(frozen=True)
class CandidateScore:
    """What one candidate scored on the split that the choice is made by. `values` run over its seeds."""

    settings: dict[str, Setting]
    runs: tuple[str, ...]
    values: tuple[float | None, ...]
    summary: Summary


@dataclass(frozen=True)
class Choice:
    """Which candidate of a variant is shown. selected: its place, None where no run of any has finished. complete:
    whether every run of every candidate has ended, so that the choice is final."""

    variant: str
    candidates: tuple[CandidateScore, ...]
    selected: int | None
    complete: bool

    @property
    def note(self) -> str:
        """Empty for a final choice; otherwise among how many settings it was made so far."""
        if self.complete or len(self.candidates) == 1:
            return ""
        if self.selected is None:
            return "not chosen yet: no run has finished"
        most = self.candidates[self.selected].summary.count
        rivals = sum(candidate.summary.count == most for candidate in self.candidates)
        return f"chosen among {rivals} of {len(self.candidates)} settings so far"


@dataclass(frozen=True)
class Comparison:
    """All that a report shows. `settings`: each key of the runs' configs, dotted, with its different values."""

    plan: Plan
    settings: dict[str, tuple[Any, ...]]
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    runs: tuple[RunSummary, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.plan.variants)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.split for row in self.rows))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def steps(self) -> tuple[int, int] | None:
        """Fewest and most steps among the runs that finished."""
        return step_range(self.runs)

    @property
    def title(self) -> str:
        """Names the budget and its steps, so that a quick comparison is never taken for the paper's."""
        return f"{self.plan.title} ({self.plan.budget} budget, {steps_text(self.steps)})"

    @property
    def states(self) -> dict[str, int]:
        """How many runs there are in each state."""
        found = [run.state for run in self.runs]
        return {state: found.count(state) for state in ("finished", *LOST) if state in found}

    @property
    def lost(self) -> dict[str, int]:
        """How many runs have no score on the split that the experiment is about, by what became of them."""
        found = [_fate(run) for run in self.runs if run.scores.get(self.plan.reported_split) is None]
        return {state: found.count(state) for state in LOST if state in found}

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.plan.variants if variant.name == name)

    def row(self, variant: str, split: str) -> Row:
        return next(row for row in self.rows if (row.variant, row.split) == (variant, split))

    def rows_of(self, split: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.split == split)

    def runs_of(self, variant: str) -> tuple[RunSummary, ...]:
        """The runs of the variant's chosen candidate; none where none could be chosen."""
        names = self.row(variant, self.splits[0]).runs
        by_name = {run.name: run for run in self.runs}
        return tuple(by_name[name] for name in names)

    def ceiling(self, split: str) -> float | None:
        """Mean of the ceilings that the rows state; None where there is none."""
        found = [row.ceiling for row in self.rows_of(split) if row.ceiling is not None]
        return statistics.fmean(found) if found else None

    @property
    def groups(self) -> tuple[tuple[Setting, ...], ...]:
        """The different values of the axes, in the plan's order: only variants of one group compare with each other."""
        return tuple(dict.fromkeys(self.group(name) for name in self.variants))

    def group(self, variant: str) -> tuple[Setting, ...]:
        axes = self.variant(variant).axes
        return tuple(axes[axis] for axis in self.plan.axes)

    def is_best(self, row: Row) -> bool:
        """Whether the row's interval lies on the better side of that of every other row of its split and group. Where
        intervals touch, or another row has none, nobody is best."""
        others = [other for other in self.rows_of(row.split) if self.group(other.variant) == self.group(row.variant)]
        others.remove(row)
        sign = -1 if self.plan.metric in LOWER_IS_BETTER else 1
        return others != [] and all(_is_better(row.summary, other.summary, sign) for other in others)


def _is_better(mine: Summary, other: Summary, sign: int) -> bool:
    better = mine.mean is not None and other.mean is not None and sign * mine.mean > sign * other.mean
    return better and distinguishable(mine.interval, other.interval)


def summarise(plan: Plan, folder: Path | str) -> Comparison:
    """Read the runs that `plan` names under `folder`/runs into a :class:`Comparison`.

    Every run is counted, whatever became of it; a folder that is missing, or in which nothing was logged yet, has not been
    started. Raises :class:`RunError` naming the file for one that is damaged or belongs to another run.
    """
    folder = Path(folder)
    for variant in plan.variants:
        known = variant.reported is None or variant.reported in reported_names()
        if not known:
            key = f"variants[{variant.name!r}].reported"
            raise RunError(f"{folder / PLAN}, key {key}: reported.toml has nothing on {variant.reported!r}")
    failures = _failures(folder / ERRORS)
    found: dict[str, _Read] = {}
    for variant in plan.variants:
        for candidate in variant.candidates:
            for seed, name in candidate.runs.items():
                if name not in found:
                    found[name] = _read_run(folder, name, variant.mechanism, seed, plan.metric, failures)
                elif found[name].summary.seed != seed:
                    raise RunError(f"{folder / PLAN} names {name} for seeds {found[name].summary.seed} and {seed}")
    splits = _splits(plan, [read.summary for read in found.values()])
    choices = {variant.name: _choose(plan, variant, found) for variant in plan.variants}
    scored = {(variant.name, split): _row(plan, variant, choices[variant.name], split, found)
              for split in splits for variant in plan.variants}  # fmt: skip
    rows = []
    for (name, split), row in scored.items():
        other = _counterpart(plan, name)
        rows.append(row if other is None else _with_difference(row, scored[other, split]))
    runs = tuple(read.summary for read in found.values())
    configs = [read.config for read in found.values() if read.config]
    return Comparison(plan, _settings(configs), tuple(rows), tuple(choices.values()), runs)


def write_comparison(folder: Path | str, comparison: Comparison) -> Path:
    """Write `comparison.json` into `folder`, which is made if needed."""
    path = Path(folder) / COMPARISON
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(comparison))
    return path


# --- reading runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    summary: RunSummary
    config: dict[str, Any]  # empty where there is none yet
    ceiling: dict[str, float | None]


def _failures(path: Path) -> dict[str, str]:
    """Run -> why it failed, from errors.json; nothing where there is none."""
    if not path.exists():
        return {}
    data = read_json(path)
    try:
        return {name: str(entry["error"]) for name, entry in data.items()}
    except (AttributeError, KeyError, TypeError):
        raise RunError(f'{path} must hold {{run: {{"error": ..., "attempts": ...}}}}') from None


def _read_run(folder: Path, name: str, mechanism: str, seed: int, metric: str, failures: Mapping[str, str]) -> _Read:
    path = folder / RUNS / name
    run = Run(path)
    where = f"{RUNS}/{name}"
    has_files = run.metrics.path.exists() or (path / RESULT).exists()
    if not has_files and not (path / CONFIG).exists():
        state, reason = ("failed", failures[name]) if name in failures else ("not started", None)
        return _Read(RunSummary(name, where, mechanism, seed, state, reason, 0, None, None, {}, ()), {}, {})
    config, result, lines = run.config, run.result or {}, run.metrics.read()
    for section in ("task", "model"):
        if not isinstance(config.get(section), dict):
            raise RunError(f"{path / CONFIG} does not hold a config: it lacks {section}")
    if config.get("seed") != seed:
        raise RunError(f"{path / CONFIG} has seed {config.get('seed')!r}, where {folder / PLAN} says {seed}")
    state = result.get("state", "unfinished" if lines else "not started")
    reason = result.get("reason")
    if not result and name in failures:
        state, reason = "failed", failures[name]
    if state not in ("finished", *LOST):
        raise RunError(f"{path / RESULT}: state {state!r} is neither finished nor diverged")
    if state == "finished" and result.get("headline") != metric:
        raise RunError(
            f"{path / RESULT} has the metric {result.get('headline')!r}, where {folder / PLAN} says {metric}"
        )
    curve = tuple((line["step"], _scores(line["splits"], metric, run.metrics.path)) for line in lines
                  if line.get("splits"))  # fmt: skip
    final = _scores(result.get("splits", {}), metric, path / RESULT)
    splits = dict.fromkeys([*final, *(split for _, scores in curve for split in scores)])
    ceiling, step = result.get("ceiling") or {}, result.get("step", lines[-1]["step"] if lines else 0)
    if not isinstance(ceiling, dict) or not isinstance(step, int):
        raise RunError(f"{path / RESULT} does not hold a result: step {step!r}, ceiling {ceiling!r}")
    summarised = RunSummary(
        name=name,
        path=where,
        mechanism=mechanism,
        seed=seed,
        state=state,
        reason=reason,
        steps=step,
        wall_seconds=_number(result.get("wall_seconds")),
        num_parameters=result.get("num_parameters"),
        scores={split: final.get(split) if state == "finished" else None for split in splits},
        curve=curve,
    )
    return _Read(summarised, config, {split: _number(value) for split, value in ceiling.items()})


def _scores(splits: Any, metric: str, path: Path) -> dict[str, float | None]:
    """The metric on each of {split: {metric: value}}."""
    try:
        return {split: _number(metrics.get(metric)) for split, metrics in splits.items()}
    except AttributeError:
        raise RunError(f"{path}: splits must hold {{split: {{metric: value}}}}, not {str(splits)[:60]!r}") from None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _splits(plan: Plan, runs: Iterable[RunSummary]) -> list[str]:
    """Every split that some run has, the one first that the experiment is about, whether or not any run has it."""
    found = dict.fromkeys(split for run in runs for split in run.scores)
    first = [plan.reported_split, *(["train"] if "train" in found else [])]
    return list(dict.fromkeys([*first, *found]))


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


# --- choosing candidates, making rows ---------------------------------------------------------------------------------


def _choose(plan: Plan, variant: Variant, found: Mapping[str, _Read]) -> Choice:
    """The candidate with the most seeds that finished with a score, among those the one with the best mean; the first
    of equals. A plan that selects nothing shows its only candidate, however far that is."""
    split = "validation" if plan.selection == "validation" else plan.reported_split
    scores = []
    for candidate in variant.candidates:
        values = tuple(found[name].summary.scores.get(split) for name in candidate.runs.values())
        scores.append(
            CandidateScore(candidate.settings, tuple(candidate.runs.values()), values, _summary(values, plan))
        )
    ended = all(found[name].summary.state in ("finished", "diverged", "failed") for name in variant.runs)
    if plan.selection == "none":
        return Choice(variant.name, tuple(scores), 0, ended)
    best, sign = None, -1 if plan.metric in LOWER_IS_BETTER else 1
    for place, score in enumerate(scores):
        if score.summary.mean is None:
            continue
        rank = (score.summary.count, sign * score.summary.mean)
        if best is None or rank > best[0]:
            best = (rank, place)
    return Choice(variant.name, tuple(scores), None if best is None else best[1], ended)


def _summary(values: Sequence[float | None], plan: Plan) -> Summary:
    return summary(values, BOUNDS.get(plan.metric, (-math.inf, math.inf)))


def _row(plan: Plan, variant: Variant, choice: Choice, split: str, found: Mapping[str, _Read]) -> Row:
    chosen = Candidate({}, {}) if choice.selected is None else variant.candidates[choice.selected]
    reads = [found[name] for name in chosen.runs.values()]
    values = tuple(read.summary.scores.get(split) for read in reads)
    counted = reads if choice.selected is not None else [found[name] for name in variant.runs]
    lost = [_fate(read.summary) for read in counted if read.summary.scores.get(split) is None]
    steps = step_range(read.summary for read in reads)
    ceilings = [ceiling for read in reads if (ceiling := read.ceiling.get(split)) is not None]
    figures = [
        reported_figures(variant.reported, read.config["task"], read.config["model"], split, plan.metric, steps)
        for read in reads
        if read.config and variant.reported is not None
    ]
    reported = figures[0] if figures and all(figure == figures[0] for figure in figures) else ()
    numbers = _summary(values, plan)
    return Row(
        variant=variant.name,
        mechanism=variant.mechanism,
        split=split,
        seeds=tuple(chosen.runs),
        runs=tuple(chosen.runs.values()),
        values=values,
        summary=numbers,
        lost={state: lost.count(state) for state in LOST if state in lost},
        steps=steps,
        reported=reported,
        verdicts=tuple(verdict(numbers.interval, figure.mean) for figure in reported),
        ceiling=statistics.fmean(ceilings) if ceilings else None,
        difference=None,
    )


def _fate(run: RunSummary) -> str:
    """What became of a run that has no score."""
    return "not finite" if run.state == "finished" else run.state


def _counterpart(plan: Plan, name: str) -> str | None:
    """The variant that `name` is compared with: the baseline, or where variants differ in axes, that with the baseline's
    mechanism and the same axes. None for the baseline itself and where there is no such variant."""
    variants = {variant.name: variant for variant in plan.variants}
    mine, baseline = variants[name], variants.get(plan.baseline or "")
    if baseline is None or name == baseline.name:
        return None
    if mine.axes == baseline.axes or len({variant.mechanism for variant in plan.variants}) == 1:
        return baseline.name
    same = (v.name for v in plan.variants if (v.mechanism, v.axes) == (baseline.mechanism, mine.axes))
    other = next(same, None)
    return None if other == name else other


def _with_difference(row: Row, other: Row) -> Row:
    mine, theirs = (dict(zip(one.seeds, one.values, strict=True)) for one in (row, other))
    return replace(row, difference=Difference(other.variant, paired_difference(mine, theirs)))


def step_range(runs: Iterable[RunSummary]) -> tuple[int, int] | None:
    """Fewest and most steps of those of `runs` that finished; None where none did."""
    steps = [run.steps for run in runs if run.state == "finished"]
    return (min(steps), max(steps)) if steps else None


def steps_text(steps: tuple[int, int] | None) -> str:
    """`600 steps`, or `300 to 600 steps`, or `no run finished`."""
    if steps is None:
        return "no run finished"
    return f"{steps[0]:,} steps" if steps[0] == steps[1] else f"{steps[0]:,} to {steps[1]:,} steps"


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanCurve:
    """Mean over the finished runs of a variant at the steps where each has a value, with least and greatest."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_runs: int


def run_curve(run: RunSummary, split: str) -> tuple[list[int], list[float]]:
    """Steps and values of one run on one split, without the steps that have no finite value."""
    points = [(step, value) for step, scores in run.curve if (value := scores.get(split)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def mean_curve(comparison: Comparison, variant: str, split: str) -> MeanCurve:
    """See :class:`MeanCurve`. Diverged and unfinished runs are left out: they would bend the mean where they end."""
    finished = [run for run in comparison.runs_of(variant) if run.state == "finished"]
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
