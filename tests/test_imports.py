"""DESIGN's import rule, read from the source: who may import whom, and what works without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hyla

ROOT = Path(hyla.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

BASE = {"errors", "configs", "runs"}
# package or module -> the parts of hyla it may import besides itself
ALLOWED = {
    "errors": set(),
    "configs": {"errors"},
    "runs": {"errors", "configs"},
    "report": BASE,
    "attention": {"errors", "configs"},
    "layout": {"errors"},  # how tasks with an encoding hand it to models
    "tasks": BASE | {"layout"},
    "models": BASE | {"attention", "layout"},
    "training": BASE | {"attention", "models", "tasks"},
    "latents": BASE | {"attention", "models", "tasks", "training", "report"},
    "plain": {"attention"},  # the yardstick that bench times; it shares the buckets of positions and no more
    "environments": BASE | {"tasks", "report"},  # Gymnasium's, with pictures
    "theory": BASE | {"attention", "models", "tasks"},
    "bench": BASE | {"attention", "models", "tasks", "training", "latents", "report", "plain"},
    "experiments": BASE | {"attention", "models", "tasks", "training", "latents", "theory", "report"},
}
ALLOWED["cli"] = set(ALLOWED) | {"__main__"}
ALLOWED["__main__"] = {"cli"}
WITHOUT_TORCH = {"errors", "configs", "runs", "report"}


def part_of(path):
    """`attention` for src/hyla/attention/layer.py, `runs` for src/hyla/runs.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """The dotted name of everything that a module imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name, not relative"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def name_of(path):
    return str(path.relative_to(ROOT))


# hyla/__init__.py is left out: it names its parts for type checkers, and loads them when they are asked for.
@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) != "__init__"], ids=name_of)
def test_imports_point_downwards(path):
    part = part_of(path)
    assert part in ALLOWED, f"give {part} a place in the import rule"
    allowed = ALLOWED[part] | {part, "__version__"}
    for name in imported(path):
        if name.startswith("hyla."):
            assert name.split(".")[1] in allowed, f"{part} must not import {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in WITHOUT_TORCH], ids=name_of)
def test_reading_runs_and_reporting_imports_no_torch(path):
    assert not [name for name in imported(path) if name.split(".")[0] in ("torch", "jaxtyping", "safetensors")]


def test_reports_are_built_without_torch():
    """Imports them all in a fresh process."""
    modules = [path.relative_to(ROOT.parent).with_suffix("") for path in MODULES if part_of(path) in WITHOUT_TORCH]
    names = [".".join(module.parts).removesuffix(".__init__") for module in modules]
    assert {"hyla.errors", "hyla.configs", "hyla.runs", "hyla.report", "hyla.report.tables"} <= set(names)
    code = f"import sys, hyla, {', '.join(names)}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout


def test_no_module_has_a_name_that_says_nothing():
    names = {part for path in MODULES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"utils", "util", "core", "common", "helpers", "misc"}


@pytest.mark.parametrize("name", hyla.__all__)
def test_every_public_name_resolves(name):
    assert getattr(hyla, name) is not None
    assert name in dir(hyla)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'hypper_attention'"):
        _ = hyla.hypper_attention
