"""Every form of the table, read back."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from hyla.report import tables
from hyla.report.comparison import summarise
from hyla.report.tables import format_mean, format_score, seeds_text


def printed(comparison, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(tables.rich_table(comparison))
    return console.file.getvalue()


@pytest.fixture
def comparison(make_run, compare):
    runs = [make_run("softmax", s, {"held_out": 0.5 + 0.1 * s, "train": 0.7}, curve=[(300, {"held_out": -2.5e4})])
            for s in range(2)]  # fmt: skip
    runs += [make_run("hyla_linear_no_rms_head", 0, {"held_out": 0.25, "train": 0.5}, steps=600)]
    runs += [make_run("hyla_linear_no_rms_head", 1, state="diverged", steps=40)]
    return compare(runs)


@pytest.fixture
def clear(make_run, compare):
    """The intervals of softmax and hyla lie far apart."""
    values = {"softmax": [0.50, 0.51, 0.52], "hyla": [0.80, 0.81, 0.82]}
    runs = [make_run(m, s, {"held_out": v}, name=f"clear-{m}-{s}") for m in values for s, v in enumerate(values[m])]
    return compare(runs)


@pytest.fixture
def chosen(make_run, make_plan, tmp_path):
    """Two settings of hyla, the second better on validation; softmax with one."""
    grid = []
    for lr, value in ((0.001, 0.4), (0.003, 0.6)):
        scores = [{"validation": value + 0.01 * seed, "held_out": 0.9 - value} for seed in (0, 1)]
        grid.append([make_run("hyla", seed, scores[seed], name=f"grid-{lr}-{seed}", lr=lr) for seed in (0, 1)])
    plain = [make_run("softmax", s, {"validation": 0.5, "held_out": 0.5}, name=f"plain-{s}") for s in (0, 1)]

    def make(selection):
        return summarise(make_plan({"softmax": plain, "hyla": grid}, selection=selection), tmp_path)

    return make


# --- terminal ---------------------------------------------------------------------------------------------------------


def test_terminal_table(comparison):
    text = printed(comparison)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:3] == [
        "logic: softmax, hyla_linear_no_rms_head (quick budget, 600 steps)",
        "",
        "held_out (held-out combinations): R²",
    ]
    words = " ".join(text.split())
    assert "softmax 0.550 ± 0.071 -0.085 to 1.000 2 0.633 ± 0.023 covers" in words
    for part in ("0.250 ± –", "1 of 2", "0.569 ± 0.043 *", "too few seeds"):
        assert part in words
    assert (
        "held_out, difference to softmax, seed by seed (95% interval) hyla_linear_no_rms_head -0.250 too few seeds"
        in words
    )
    assert comparison.plan.budget_note in words
    assert "* The summary leaves open" in text
    assert "P1 trained for 50,000 steps, these runs for 600 steps" in words


def test_best_is_bold_and_only_then(clear, comparison):
    def bold(shown):
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        console.print(tables.rich_table(shown))
        return [line for line in console.file.getvalue().splitlines() if line.startswith("\x1b[1m") and " ± " in line]

    (line,) = bold(clear)
    assert "hyla" in line
    assert bold(comparison) == []
    assert "No row is marked as best" in printed(comparison)
    assert "Bold: its interval lies above" in printed(clear)


@pytest.mark.parametrize("form", [printed, tables.to_markdown, tables.to_latex])
def test_a_choice_by_the_reported_split_is_labelled_everywhere(chosen, form):
    assert tables.OPTIMISTIC in " ".join(form(chosen("reported")).split())
    assert tables.OPTIMISTIC not in " ".join(form(chosen("validation")).split())
    assert "chosen by the validation split" in " ".join(form(chosen("validation")).split())


# --- Markdown ---------------------------------------------------------------------------------------------------------


def test_markdown(comparison):
    lines = tables.to_markdown(comparison).splitlines()
    assert lines[0] == "# logic: softmax, hyla_linear_no_rms_head (quick budget, 600 steps)"
    start = lines.index("## held_out (held-out combinations): R²")
    assert lines[start + 2 : start + 5] == [
        "| variant | mean ± sd | 95% interval | seeds | difference to softmax (95% interval) | P1, 50,000 steps "
        "| our interval and P1 |",
        "|:--|--:|--:|:--|--:|--:|:--|",
        "| softmax | 0.550 ± 0.071 | −0.085 to 1.000 | 2 | – | 0.633 ± 0.023 | covers |",
    ]
    assert all(line.count("|") == 8 for line in lines[start + 2 : start + 6])
    assert comparison.plan.budget_note.replace("<", "&lt;") in lines


def test_markdown_marks_the_best_row_alone(clear):
    text = tables.to_markdown(clear)
    assert "| **hyla** | **0.810 ± 0.010** |" in text
    assert text.count("**") == 4


def test_markdown_shows_what_was_chosen(chosen):
    lines = tables.to_markdown(chosen("validation")).splitlines()
    start = lines.index("## What was chosen (by validation (validation combinations))")
    assert lines[start + 4 : start + 6] == [
        "| hyla | lr 0.001 | 0.405 ± 0.007 | 2 of 2 |  |",
        "| **hyla** | **lr 0.003** | 0.605 ± 0.007 | 2 of 2 | chosen |",
    ]


# --- CSV --------------------------------------------------------------------------------------------------------------


def test_runs_csv_parses_back(comparison, make_run, compare):
    odd = compare([make_run('odd, "quoted"\nname', 0, {"held_out": 1 / 3}, name="a, b")])
    (row,) = csv.DictReader(io.StringIO(tables.runs_csv(odd)))
    assert (row["mechanism"], row["run"], float(row["value"])) == ('odd, "quoted"\nname', "a, b", 1 / 3)

    rows = list(csv.DictReader(io.StringIO(tables.runs_csv(comparison))))
    assert len(rows) == 4 * 2  # runs, splits
    values = [float(r["value"]) for r in rows if (r["mechanism"], r["split"]) == ("softmax", "held_out")]
    assert sum(values) / 2 == comparison.row("softmax", "held_out").summary.mean
    lost = [r for r in rows if r["state"] == "diverged"]
    assert [(r["value"], r["steps"], r["seed"], r["reason"]) for r in lost] == [("", "40", "1", "loss nan")] * 2


def test_scores_csv_holds_every_statistic(comparison, chosen):
    rows = {(r["variant"], r["split"]): r for r in csv.DictReader(io.StringIO(tables.scores_csv(comparison)))}
    assert len(rows) == 4
    for (variant, split), found in rows.items():
        row = comparison.row(variant, split)
        numbers = row.summary
        expected = [numbers.count, numbers.mean, numbers.standard_deviation, numbers.standard_error]
        expected += [*(numbers.interval or (None, None)), *(numbers.bootstrap or (None, None))]
        names = ["n", "mean", "standard_deviation", "standard_error", "interval_low", "interval_high"]
        names += ["bootstrap_low", "bootstrap_high"]
        assert [found[name] for name in names] == ["" if value is None else str(value) for value in expected]
    lost = rows["hyla_linear_no_rms_head", "held_out"]
    assert (lost["lost"], lost["difference_to"], lost["difference_n"]) == ("1 diverged", "softmax", "1")
    assert (lost["p1_mean"], lost["p1_verdict"], lost["min_steps"]) == ("0.5691", "too few seeds", "600")
    first = next(csv.DictReader(io.StringIO(tables.scores_csv(chosen("reported")))))
    assert first["selection"] == "reported"


# --- LaTeX ------------------------------------------------------------------------------------------------------------


def assert_latex(text):
    """Environments and braces nest, rows have as many cells as columns, no special letter is left bare."""
    stack = []
    for line in text.splitlines():
        code = re.sub(r"(?<!\\)%.*", "", line)
        for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", code):
            if kind == "begin":
                stack.append(name)
            else:
                assert stack.pop() == name
        if found := re.search(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", code):
            columns = len(found[1])
        bare = re.sub(r"\\[\\{}_%&$#]", "", code)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert "#" not in bare
        if code.endswith(r"\\"):
            assert stack[-1] == "tabular"
            assert bare.count("&") == columns - 1
        else:
            assert "&" not in bare
        outside = re.sub(r"\$[^$]*\$|\\label\{[^}]*\}", "", bare)
        assert not set("_^<>|") & set(outside)
    assert stack == []


@pytest.fixture
def odd(make_run, compare):
    name = r"""a_b & 50% of $x^2$ {#1} \frac <~> "q" | é ± − – ² × ’ 中"""
    return compare([make_run(name, s, {"held_out": -0.5 * s}, name=f"r{s}") for s in range(3)], title=name)


def test_latex_is_well_formed(comparison, chosen, odd):
    for shown in (comparison, chosen("validation"), odd):
        text = tables.to_latex(shown)
        assert_latex(text)
        assert {r"\toprule", r"\midrule", r"\bottomrule"} <= set(text.splitlines())
    text = tables.to_latex(comparison)
    assert r"softmax & 0.550 $\pm$ 0.071 & $-$0.085 to 1.000 & 2 & -- & 0.633 $\pm$ 0.023 & covers \\" in text
    assert r"\textbf" not in text.split(r"\noindent")[0]


def test_latex_marks_the_best_row(clear):
    assert r"\textbf{hyla} & \textbf{0.810 $\pm$ 0.010} &" in tables.to_latex(clear)


PDFLATEX = shutil.which("pdflatex")


@pytest.mark.skipif(PDFLATEX is None, reason="no pdflatex here; runs where TeX with booktabs is installed")
def test_latex_compiles(comparison, chosen, odd, tmp_path):
    body = "\n".join(tables.to_latex(shown) for shown in (comparison, chosen("validation"), odd))
    page = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "page.tex").write_text(page, encoding="utf-8")
    command = [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 10_000


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("r2", 0.6328, "0.633"),
        ("r2", -0.09, "-0.090"),
        ("r2", -53211.4, "-53,211"),
        ("accuracy", 0.5656, "56.6"),
        ("accuracy", 0.0, "0.0"),
        ("r2", None, "–"),
    ],
)
def test_numbers(metric, value, text):
    assert format_score(metric, value) == text


def test_one_seed_has_no_spread(make_run, compare):
    row = compare([make_run("hyla", 0, {"held_out": 0.5})]).row("hyla", "held_out")
    assert format_mean("r2", row.summary.mean, row.summary.standard_deviation) == "0.500 ± –"
    assert seeds_text(row) == "1"


@pytest.mark.parametrize(
    ("axis", "label"), [("held_out_fraction", "held-out fraction"), ("task.num_points", "points"), ("width", "width")]
)
def test_axes_have_names_for_people(axis, label):
    assert tables.axis_label(axis) == label


def test_ceiling_is_named(make_run, compare, sraven_task):
    run = make_run("hyla", 0, {"held_out": 0.6}, task=sraven_task, ceiling={"held_out": 0.85})
    assert "held_out (held-out combinations): accuracy (%); ceiling 85.0" in printed(compare([run]))
