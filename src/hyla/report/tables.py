"""A comparison's tables: for the terminal, as Markdown, LaTeX (booktabs) and CSV; and the words and numbers they share."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hyla.report.comparison import Comparison, Difference, Row, steps_text
from hyla.report.plan import LOWER_IS_BETTER, Plan, Setting
from hyla.report.reported import Reported
from hyla.report.statistics import METHOD, Interval, verdict

SPLIT_LABELS = {
    "held_out": "held-out combinations",
    "train": "trained combinations",
    "validation": "validation combinations",
    "unseen_terms": "unseen terms",
}
TEXT_LABELS = {"held_out": "held-out text", "train": "trained text"}  # of task text
OPTIMISTIC = "chosen on the reported split: optimistic"

# --- words and numbers ------------------------------------------------------------------------------------------------


def metric_label(metric: str) -> str:
    """The name of a metric with its unit: scores that are accuracies are shown in percent."""
    return {"r2": "R²", "accuracy": "accuracy (%)", "loss": "loss (nats per token)"}.get(metric, metric)


def split_words(plan: Plan, split: str) -> str:
    """What a split holds: `held-out combinations`, of language models `held-out text`."""
    labels = TEXT_LABELS if plan.task == "text" else SPLIT_LABELS
    return labels.get(split, split)


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


def format_interval(metric: str, interval: Interval | None) -> str:
    """`low to high`, or an en dash."""
    return "–" if interval is None else " to ".join(format_score(metric, end) for end in interval)


def format_difference(metric: str, difference: Difference | None) -> str:
    """`+mean (low to high)`, or an en dash."""
    if difference is None or difference.summary.mean is None:
        return "–"
    mean = format_score(metric, difference.summary.mean)
    mean = mean if difference.summary.mean < 0 else f"+{mean}"
    interval = difference.summary.interval
    return mean if interval is None else f"{mean} ({format_interval(metric, interval)})"


def difference_word(difference: Difference) -> str:
    """Whether the interval of a paired difference leaves its sign open."""
    words = {"covers": "not distinguishable", "above": "higher", "below": "lower", "too few seeds": "too few seeds"}
    return words[verdict(difference.summary.interval, 0.0)]


def format_reported(metric: str, figure: Reported) -> str:
    """A reported figure, without ± where no spread was given, with * where there is a caveat."""
    text = format_score(metric, figure.mean)
    if figure.spread is not None:
        text += f" ± {format_score(metric, figure.spread)}"
    return f"{text} *" if figure.caveat else text


def seeds_text(row: Row) -> str:
    """`3`, or `1 of 3 (1 diverged, 1 unfinished)`: how many runs the mean is over, and what became of the others."""
    named = ", ".join(f"{number} {state}" for state, number in row.lost.items())
    total = row.summary.count + sum(row.lost.values())
    return f"{row.summary.count} of {total} ({named})" if named else str(row.summary.count)


def lost_text(comparison: Comparison) -> str:
    """`1 diverged, 2 not started`: the runs without a score; empty where all have one."""
    return ", ".join(f"{count} {state}" for state, count in comparison.lost.items())


def split_label(plan: Plan, split: str) -> str:
    """`held_out (held-out combinations)`: the split's name and what it holds."""
    return f"{split} ({split_words(plan, split)})" if split in SPLIT_LABELS else split


def settings_text(settings: dict[str, Setting]) -> str:
    """`lr 0.001, weight_decay 0.1`: keys without their section."""
    return ", ".join(f"{key.rpartition('.')[2]} {setting_text(value)}" for key, value in settings.items()) or "–"


def setting_text(value: Setting) -> str:
    """A setting as read by people: `none`, `0.7`, `32`, `hyla`."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def axis_label(axis: str) -> str:
    """The name of an axis for people: `held_out_fraction` as `held-out fraction`, `task.num_points` as `points`."""
    return axis.rpartition(".")[2].removeprefix("num_").replace("held_out", "held-out").replace("_", " ")


def reported_columns(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """(source, steps) of every kind of reported figure among `rows`, in order: the columns that the tables need."""
    return list(dict.fromkeys((figure.source, figure.steps) for row in rows for figure in row.reported))


def reported_cell(metric: str, row: Row, column: tuple[str, int]) -> tuple[str, str]:
    """What `row` shows in a column of :func:`reported_columns`, and where our interval lies seen from it."""
    for figure, word in zip(row.reported, row.verdicts, strict=True):
        if (figure.source, figure.steps) == column:
            return format_reported(metric, figure), word
    return "–", "–"


def difference_title(comparison: Comparison) -> str | None:
    """`difference to softmax`; None where there is nothing to compare with."""
    others = dict.fromkeys(row.difference.to for row in comparison.rows if row.difference is not None)
    if not others:
        return None
    if len(others) == 1:
        return f"difference to {next(iter(others))}"
    return f"difference to {comparison.variant(comparison.plan.baseline or '').mechanism} with the same settings"


def notes(comparison: Comparison) -> list[str]:
    """The sentences that belong under the table: what this budget can show, how settings were chosen, how intervals are
    made, where figures come from."""
    plan = comparison.plan
    sentences = [plan.budget_note, selection_note(comparison)]
    sentences += [f"{choice.variant}: {choice.note}." for choice in comparison.choices if choice.note]
    sentences.append(f"Mean ± standard deviation over the seeds that finished (n − 1 in the denominator). {METHOD}")
    if any(len([name for name in comparison.variants if comparison.group(name) == group]) > 1
           for group in comparison.groups):  # fmt: skip
        best = any(comparison.is_best(row) for row in comparison.rows)
        side = "below" if plan.metric in LOWER_IS_BETTER else "above"
        marked = f"Bold: its interval lies {side} that of every other row it compares with."
        sentences.append(marked if best else f"No row is marked as best: no interval lies {side} all others.")
    figures = [figure for row in comparison.rows for figure in row.reported]
    if figures:
        sentences.append(
            "Beside a reported figure: whether our interval covers it, or lies above or below it. The spread of the "
            "figure itself is not taken into account."
        )
    for source, steps in reported_columns(comparison.rows):
        if comparison.steps and comparison.steps != (steps, steps):
            sentences.append(
                f"{source} trained for {steps:,} steps, these runs for {steps_text(comparison.steps)}: the figures are "
                "a goal, not a check."
            )
    sentences += dict.fromkeys(f"{figure.note} Setting: {figure.setting}." for figure in figures)
    sentences += dict.fromkeys(f"* {figure.caveat}" for figure in figures if figure.caveat)
    if any(row.ceiling is not None for row in comparison.rows):
        sentences.append(
            "Ceiling: the score of an ideal observer that knows how puzzles are drawn; some are ambiguous."
        )
    return [sentence for sentence in sentences if sentence]


def selection_note(comparison: Comparison) -> str:
    """How one candidate of each variant was chosen; empty where there was nothing to choose."""
    plan = comparison.plan
    keys = dict.fromkeys(
        key for v in plan.variants if len(v.candidates) > 1 for c in v.candidates for key in c.settings
    )
    if plan.selection == "none" or not keys:
        return ""
    what = f"Settings ({', '.join(keys)}) of each row were"
    if plan.selection == "reported":
        return f"{what} {OPTIMISTIC}."
    return f"{what} chosen by the validation split: combinations that are never trained on and in no reported split."


# --- the score table, in cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """A table as plain text: (title, whether its cells are numbers) of each column, rows of cells, the rows in bold."""

    title: str
    head: list[tuple[str, bool]]
    rows: list[list[str]]
    bold: set[int]


def score_cells(comparison: Comparison, split: str) -> Cells:
    """One row per variant on `split`."""
    metric, rows = comparison.plan.metric, comparison.rows_of(split)
    columns, difference = reported_columns(rows), difference_title(comparison)
    head = [("variant", False), ("mean ± sd", True), ("95% interval", True), ("seeds", False)]
    head += [(f"{difference} (95% interval)", True)] if difference else []
    for source, steps in columns:
        head += [(f"{source}, {steps:,} steps", True), (f"our interval and {source}", False)]
    ceiling = comparison.ceiling(split)
    label = f"{split_label(comparison.plan, split)}: {metric_label(metric)}"
    label += "" if ceiling is None else f"; ceiling {format_score(metric, ceiling)}"
    cells = []
    for row in rows:
        numbers = row.summary
        line = [row.variant, format_mean(metric, numbers.mean, numbers.standard_deviation)]
        line += [format_interval(metric, numbers.interval), seeds_text(row)]
        line += [format_difference(metric, row.difference)] if difference else []
        for column in columns:
            line += reported_cell(metric, row, column)
        cells.append(line)
    return Cells(label, head, cells, {place for place, row in enumerate(rows) if comparison.is_best(row)})


def choice_cells(comparison: Comparison) -> Cells | None:
    """What was chosen: one row per candidate of the variants that have several; None where nothing was chosen."""
    plan, rows, bold = comparison.plan, [], set()
    for choice in comparison.choices:
        if len(choice.candidates) == 1:
            continue
        for place, candidate in enumerate(choice.candidates):
            numbers = candidate.summary
            chosen = choice.note or "chosen" if place == choice.selected else ""
            bold |= {len(rows)} if chosen else set()
            mean = format_mean(plan.metric, numbers.mean, numbers.standard_deviation)
            finished = f"{numbers.count} of {len(candidate.values)}"
            rows.append([choice.variant, settings_text(candidate.settings), mean, finished, chosen])
    if not rows:
        return None
    split = "validation" if plan.selection == "validation" else plan.reported_split
    label = OPTIMISTIC if plan.selection == "reported" else f"by {split_label(plan, split)}"
    head = [("variant", False), ("settings", False), (f"{metric_label(plan.metric)} on {split}, mean ± sd", True)]
    return Cells(f"What was chosen ({label})", [*head, ("seeds", True), ("", False)], rows, bold)


# --- the terminal -----------------------------------------------------------------------------------------------------


def rich_table(comparison: Comparison) -> Group:
    """The table for the terminal: one block per split, differences and notes underneath. Needs 80 columns."""
    metric = comparison.plan.metric
    parts: list[Text | Table] = [Text(comparison.title, style="bold"), Text()]
    for split in comparison.splits:
        cells, rows = score_cells(comparison, split), comparison.rows_of(split)
        columns = reported_columns(rows)
        parts.append(Text(cells.title, style="underline"))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("variant", overflow="fold")
        table.add_column("mean ± sd", justify="right", no_wrap=True)
        table.add_column("95% interval", justify="right", no_wrap=True)
        table.add_column("seeds", overflow="fold")
        for source, steps in columns:
            table.add_column(Text(f"{source},\n{steps:,} steps"), justify="right", no_wrap=True)
        for place, row in enumerate(rows):
            reported = [Text("\n".join(dict.fromkeys(reported_cell(metric, row, column)))) for column in columns]
            line = [Text(cell) for cell in cells.rows[place][:4]]
            table.add_row(*line, *reported, style="bold" if place in cells.bold else None)
        parts += [table, Text()]
    parts += _difference_lines(comparison)
    parts += [Text(sentence, style="dim" if number else "") for number, sentence in enumerate(notes(comparison))]
    return Group(*parts)


def _difference_lines(comparison: Comparison) -> list[Text | Table]:
    """The paired differences on the split that the experiment is about."""
    title, split = difference_title(comparison), comparison.plan.reported_split
    if title is None:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=False)
    for row in comparison.rows_of(split):
        if row.difference is not None:
            text = format_difference(comparison.plan.metric, row.difference)
            table.add_row(Text(row.variant), Text(text), Text(difference_word(row.difference)))
    return [Text(f"{split}, {title}, seed by seed (95% interval)", style="underline"), table, Text()]


# --- Markdown, LaTeX, CSV ---------------------------------------------------------------------------------------------


def plain_markdown(text: str) -> str:
    """`text` as it is, in Markdown."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    text = "".join(f"\\{letter}" if letter in "\\`*[]|" else letter for letter in text)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\_", text)  # between letters it is no emphasis


def markdown_table(cells: Cells) -> list[str]:
    """The lines of a table in GitHub's Markdown."""
    lines = ["| " + " | ".join(plain_markdown(title) for title, _ in cells.head) + " |"]
    lines.append("|" + "|".join("--:" if number else ":--" for _, number in cells.head) + "|")
    for place, row in enumerate(cells.rows):
        words = [plain_markdown(cell.replace("-", "−") if number else cell)
                 for cell, (_, number) in zip(row, cells.head, strict=True)]  # fmt: skip
        words = [f"**{word}**" if place in cells.bold and word and i < 2 else word for i, word in enumerate(words)]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def to_markdown(comparison: Comparison, further: Sequence[Cells] = ()) -> str:
    """The tables and their notes in GitHub's Markdown. further: tables of other things, after those of scores."""
    lines = [f"# {plain_markdown(comparison.title)}", ""]
    tables = [score_cells(comparison, split) for split in comparison.splits]
    for cells in [*tables, *filter(None, [choice_cells(comparison)]), *further]:
        lines += [f"## {plain_markdown(cells.title)}", "", *markdown_table(cells), ""]
    lines += [line for sentence in notes(comparison) for line in (plain_markdown(sentence), "")]
    return "\n".join([*lines, "```", comparison.plan.command, "```", ""])


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "<": r"$<$", ">": r"$>$", "|": r"$|$", '"': "''",
    "±": r"$\pm$", "−": "$-$", "–": "--", "²": "$^2$", "×": r"$\times$", "’": "'", "‘": "`", "“": "``", "”": "''",
}  # fmt: skip


def plain_latex(text: str) -> str:
    """`text` as it is, in LaTeX. What pdflatex has no letter for becomes a question mark."""
    letters = (_LATEX.get(letter, letter) for letter in " ".join(text.split()))
    return "".join(letter if letter.isprintable() and ord(letter[0]) < 256 else "?" for letter in letters)


def latex_table(cells: Cells, label: str) -> list[str]:
    """The lines of a `table` with booktabs rules (\\usepackage{booktabs})."""
    columns = "".join("r" if number else "l" for _, number in cells.head)
    lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{plain_latex(cells.title)}}}"]
    lines += [rf"\label{{tab:{label}}}", rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    lines += [" & ".join(plain_latex(title) for title, _ in cells.head) + r" \\", r"\midrule"]
    for place, row in enumerate(cells.rows):
        words = [plain_latex(cell.replace("-", "−") if number else cell)
                 for cell, (_, number) in zip(row, cells.head, strict=True)]  # fmt: skip
        if place in cells.bold:
            words[:2] = [rf"\textbf{{{word}}}" for word in words[:2]]
        lines.append(" & ".join(words) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]


def to_latex(comparison: Comparison) -> str:
    """The tables as `table` environments, the notes as a comment on top and a paragraph in the end."""
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in comparison.plan.name)
    lines = [r"% \usepackage{booktabs}", f"% made by: {' '.join(comparison.plan.command.split())}", ""]
    title = plain_latex(comparison.title)
    for split in comparison.splits:
        cells = score_cells(comparison, split)
        lines += latex_table(Cells(f"{comparison.title}. {cells.title}", cells.head, cells.rows, cells.bold),
                             f"{name}-{split.replace('_', '-')}")  # fmt: skip
    if (chosen := choice_cells(comparison)) is not None:
        lines += latex_table(chosen, f"{name}-chosen")
    words = " ".join(plain_latex(sentence) for sentence in notes(comparison))
    return "\n".join([*lines, rf"\noindent{{\footnotesize \textbf{{{title}.}} {words}\par}}", ""])


def scores_csv(comparison: Comparison) -> str:
    """One line per variant and split, unrounded, with every statistic."""
    plan, columns = comparison.plan, reported_columns(comparison.rows)
    head = ["experiment", "task", "budget", "selection", "split", "metric", "variant", "mechanism", *plan.axes]
    head += ["settings", "n", "mean", "standard_deviation", "standard_error", "interval_low", "interval_high"]
    head += ["bootstrap_low", "bootstrap_high", "lost", "min_steps", "max_steps", "ceiling", "difference_to"]
    head += ["difference_n", "difference_mean", "difference_low", "difference_high"]
    for source, _ in columns:
        name = _column_name(source)
        head += [f"{name}_mean", f"{name}_spread", f"{name}_spread_kind", f"{name}_steps", f"{name}_verdict"]
    chosen = {choice.variant: choice for choice in comparison.choices}
    lines = []
    for row in comparison.rows:
        choice, numbers = chosen[row.variant], row.summary
        settings = "" if choice.selected is None else settings_text(choice.candidates[choice.selected].settings)
        line: list[Any] = [plan.name, plan.task, plan.budget, plan.selection, row.split, plan.metric, row.variant]
        line += [row.mechanism, *(comparison.variant(row.variant).axes[axis] for axis in plan.axes), settings]
        line += [numbers.count, numbers.mean, numbers.standard_deviation, numbers.standard_error]
        line += [*(numbers.interval or (None, None)), *(numbers.bootstrap or (None, None))]
        line += ["; ".join(f"{number} {state}" for state, number in row.lost.items()), *(row.steps or (None, None))]
        line.append(row.ceiling)
        if row.difference is None:
            line += [None] * 5
        else:
            ours = row.difference.summary
            line += [row.difference.to, ours.count, ours.mean, *(ours.interval or (None, None))]
        line += _reported_values(row, columns)
        lines.append(line)
    return _csv(head, lines)


def runs_csv(comparison: Comparison) -> str:
    """One line per run of any candidate, variant and split, unrounded."""
    plan = comparison.plan
    head = ["experiment", "task", "budget", "split", "metric", "variant", "mechanism", *plan.axes, "settings", "chosen"]
    head += ["seed", "state", "value", "steps", "wall_seconds", "num_parameters", "run", "path", "reason"]
    runs = {run.name: run for run in comparison.runs}
    lines = []
    for split in comparison.splits:
        for variant, choice in zip(plan.variants, comparison.choices, strict=True):
            for place, candidate in enumerate(variant.candidates):
                for seed, name in candidate.runs.items():
                    run = runs[name]
                    line: list[Any] = [plan.name, plan.task, plan.budget, split, plan.metric, variant.name]
                    line += [variant.mechanism, *(variant.axes[axis] for axis in plan.axes)]
                    line += [settings_text(candidate.settings), int(place == choice.selected), seed, run.state]
                    line += [run.scores.get(split), run.steps, run.wall_seconds, run.num_parameters, name, run.path]
                    lines.append([*line, run.reason])
    return _csv(head, lines)


def _reported_values(row: Row, columns: Sequence[tuple[str, int]]) -> list[Any]:
    line: list[Any] = []
    for column in columns:
        pairs = zip(row.reported, row.verdicts, strict=True)
        found = next(((f, word) for f, word in pairs if (f.source, f.steps) == column), None)
        if found is None:
            line += [None] * 5
        else:
            figure, word = found
            line += [figure.mean, figure.spread, figure.spread_kind, figure.steps, word]
    return line


def _column_name(source: str) -> str:
    return source.lower().replace(" ", "_")


def _csv(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return file.getvalue()
