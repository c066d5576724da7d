"""The report of an experiment, rebuilt whole from `plan.json` and the run folders. Every command that trains ends here.

DIR/comparison.json   all numbers, for other programs
DIR/index.html        the page, whole in itself
DIR/tables/           scores.md, scores.tex, scores.csv, runs.csv
DIR/figures/          scores, curves, heat_map, scaling, decodability as .png, .svg and .pdf
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyla.errors import RunError
from hyla.report import decodability, document, figures, html, tables
from hyla.report.comparison import Comparison, summarise, write_comparison
from hyla.report.plan import Plan, read_plan

PAGE, TABLES, FIGURES = "index.html", "tables", "figures"


@dataclass(frozen=True)
class Report:
    """What a report says, and the files it lies in."""

    comparison: Comparison
    files: tuple[Path, ...]


def check_extras() -> None:
    """Raise MissingExtraError before any work starts if figures or the page could not be made in the end."""
    figures.check_matplotlib()
    document.check_plotly()


def write_report(folder: Path | str, plan: Plan | None = None) -> Report:
    """Rebuild the report of the experiment in `folder`. plan: that of its `plan.json` by default.

    Raises :class:`RunError` naming the file that is missing or damaged, before anything is written.
    """
    folder = Path(folder)
    check_extras()
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}")
    comparison = summarise(plan or read_plan(folder), folder)
    decoded = decodability.layers(comparison, decodability.read_decodability(folder, comparison.plan))
    (folder / TABLES).mkdir(exist_ok=True)
    texts = {
        "scores.md": tables.to_markdown(comparison, decodability.cells(comparison, decoded)),
        "scores.tex": tables.to_latex(comparison),
        "scores.csv": tables.scores_csv(comparison),
        "runs.csv": tables.runs_csv(comparison),
    }
    files = [write_comparison(folder, comparison)]
    for name, text in texts.items():
        path = folder / TABLES / name
        path.write_text(text, encoding="utf-8")
        files.append(path)
    files += figures.draw_figures(comparison, folder / FIGURES)
    if decoded:
        files += decodability.draw(comparison, decoded, folder / FIGURES / "decodability")
    names = [path.relative_to(folder).as_posix() for path in files]
    files.append(html.write_page(comparison, folder / PAGE, names, decoded))
    return Report(comparison, tuple(files))
