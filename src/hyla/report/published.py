"""One Markdown page about the experiments in a set of folders: what was measured, and what is not finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from hyla.report import decodability
from hyla.report.comparison import Comparison, steps_text, summarise
from hyla.report.html import duration
from hyla.report.plan import RUNS, read_plan
from hyla.report.statistics import BOOTSTRAP, METHOD
from hyla.report.tables import choice_cells, format_score, lost_text, markdown_table, notes, plain_markdown, score_cells

INTRODUCTION = (
    "Made from the run folders by `hyla report DIR ... --page FILE`; nothing here is written by hand. It says what these "
    "runs measured, at the budget named, and no more."
)


def results_page(folders: Sequence[Path | str], beside: Path | str) -> str:
    """The page, with links relative to the folder `beside`, in which it will lie. Raises RunError as `summarise` does."""
    comparisons = [(Path(folder), summarise(read_plan(folder), folder)) for folder in folders]
    lines = ["# Results", "", INTRODUCTION, "", f"{METHOD} {BOOTSTRAP}", ""]
    lines += ["| experiment | budget | steps | runs | finished |", "|:--|:--|:--|--:|--:|"]
    for _, comparison in comparisons:
        plan = comparison.plan
        anchor = f"[{plain_markdown(plan.title)}](#{_anchor(plan.name)})"
        cells = [anchor, plan.budget, steps_text(comparison.steps), str(len(comparison.runs))]
        lines.append("| " + " | ".join([*cells, str(comparison.states.get("finished", 0))]) + " |")
    lines.append("")
    for folder, comparison in comparisons:
        lines += _experiment(comparison, folder, os.path.relpath(folder.absolute(), Path(beside).absolute()))
    return "\n".join(lines)


def _anchor(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "-" for letter in name.lower())


def _experiment(comparison: Comparison, folder: Path, path: str) -> list[str]:
    plan, place = comparison.plan, quote(Path(path).as_posix())
    lines = [f'<a id="{_anchor(plan.name)}"></a>', "", f"## {plain_markdown(comparison.title)}", ""]
    lines += [f"**{plain_markdown(f'{plan.budget} budget.')}** {plain_markdown(plan.budget_note)}", ""]
    lines += [plain_markdown(_unfinished(comparison)), ""]
    for split in comparison.splits:
        cells = score_cells(comparison, split)
        lines += [f"### {plain_markdown(cells.title)}", "", *markdown_table(cells), ""]
    decoded = decodability.layers(comparison, decodability.read_decodability(folder, plan))
    for cells in decodability.cells(comparison, decoded):
        lines += [f"### {plain_markdown(cells.title)}", "", *markdown_table(cells), ""]
    if decoded:
        lines += [plain_markdown(decodability.NOTE), ""]
    if (chosen := choice_cells(comparison)) is not None:
        lines += [f"### {plain_markdown(chosen.title)}", "", *markdown_table(chosen), ""]
    about = [sentence for sentence in notes(comparison) if sentence != plan.budget_note and METHOD not in sentence]
    lines += [f"- {plain_markdown(sentence)}" for sentence in [*about, *_environment(comparison)]]
    lines += ["", "Repeat it:", "", "```bash", plan.command, "```", ""]
    lines += [f"[Folder]({place}) · [all numbers]({place}/comparison.json) · [plan]({place}/plan.json)", ""]
    lines += ["<details><summary>Every run</summary>", "", "| run | variant | seed | state | steps | score |"]
    lines.append("|:--|:--|--:|:--|--:|--:|")
    lines += [*_runs(comparison, place), "", "</details>", ""]
    return lines


def _unfinished(comparison: Comparison) -> str:
    """What is missing, in a sentence."""
    lost = comparison.lost
    if not lost:
        return f"Finished: all {len(comparison.runs)} runs."
    empty = [
        name for name in comparison.variants if comparison.row(name, comparison.plan.reported_split).summary.count == 0
    ]
    without = f" No result at all for: {', '.join(empty)}." if empty else ""
    count = f"{sum(lost.values())} of {len(comparison.runs)}"
    return f"NOT FINISHED: {count} runs have no score ({lost_text(comparison)}).{without}"


def _environment(comparison: Comparison) -> list[str]:
    """Versions and hardware as the runs found them, and how long they took."""
    found = {key.removeprefix("run."): values for key, values in comparison.settings.items() if key.startswith("run.")}
    sentences = [f"{name}: {', '.join(map(str, values))}" for name, values in found.items()]
    times = [run.wall_seconds for run in comparison.runs if run.wall_seconds is not None]
    where = [f"Made with {'; '.join(sentences)}."] if sentences else []
    return where + ([f"Training time, all runs together: {duration(sum(times))}."] if times else [])


def _runs(comparison: Comparison, place: str) -> list[str]:
    plan, lines = comparison.plan, []
    by_name = {run.name: run for run in comparison.runs}
    for variant in plan.variants:
        for name in variant.runs:
            run = by_name[name]
            label = plain_markdown(name)
            link = label if run.state == "not started" else f"[{label}]({place}/{RUNS}/{quote(name)})"
            state = f"{run.state}: {run.reason}" if run.reason else run.state
            score = format_score(plan.metric, run.scores.get(plan.reported_split)).replace("-", "−")
            cells = [link, plain_markdown(variant.name), str(run.seed), plain_markdown(state), f"{run.steps:,}", score]
            lines.append("| " + " | ".join(cells) + " |")
    return lines
