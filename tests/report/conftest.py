"""Prepared run folders, written with the library's own functions."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyla.report.comparison import Comparison, summarise
from hyla.report.plan import Candidate, Plan, Variant
from hyla.report.reported import reported_names
from hyla.runs import Run, create_run, write_json

NOTE = "600 steps show that <everything> works, and nothing about the paper's figures."

LOGIC = {"name": "logic", "num_variables": 4, "num_terms": 2, "num_points": 32, "known_fraction": 0.75}
LOGIC |= {"held_out_fraction": 0.7, "probe": "none", "split_seed": 0}
SRAVEN = {"name": "sraven", "num_features": 4, "num_values": 8, "num_rows": 3, "num_columns": 3}
SRAVEN |= {"held_out_fraction": 0.25, "permute_features": True, "reject_ambiguous": False}
MODEL = {"score_norm": None, "depth": None, "activation": None, "num_layers": 2, "embed_dim": 128, "num_heads": 8}
MODEL |= {"qk_dim": 16, "v_dim": 16, "mlp": "gelu", "mlp_dim": 256, "norm": "layer", "positions": "t5", "causal": False}
SRAVEN_MODEL = MODEL | {"num_layers": 4, "num_heads": 16, "qk_dim": 64, "v_dim": 64}

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run("softmax", 0, {"held_out": 0.5}) writes `tmp_path/runs/softmax-seed0` and opens it.

    curve: [(step, {split: value})]. state "unfinished" writes no result, "diverged" one with a reason.
    """

    def make(
        mechanism: str,
        seed: int,
        scores: dict[str, float | None] | None = None,
        *,
        state: str = "finished",
        steps: int = 600,
        curve: list[tuple[int, dict[str, float | None]]] | None = None,
        task: dict[str, Any] = LOGIC,
        model: dict[str, Any] | None = None,
        ceiling: dict[str, float] | None = None,
        name: str | None = None,
        lr: float = 0.001,
    ) -> Run:
        sraven = task["name"] == "sraven"
        metric = "accuracy" if sraven else "r2"
        sizes = model if model is not None else SRAVEN_MODEL if sraven else MODEL
        config = {"task": task, "model": {"mechanism": mechanism} | sizes, "optimizer": {"lr": lr}}
        config |= {"training": {"steps": steps}, "seed": seed, "run": {"torch": "2.13.0", "backend": "eager"}}
        run = create_run(tmp_path / "runs" / (name or f"{mechanism}-seed{seed}"), config)
        for step, values in curve or []:
            run.metrics.append({"step": step - 1, "loss": 1.0})
            run.metrics.append({"step": step, "loss": 1.0, "splits": {s: {metric: v} for s, v in values.items()}})
        if state != "unfinished":
            splits = {split: {metric: value, "num_samples": 16} for split, value in (scores or {}).items()}
            result = {"state": state, "step": steps, "headline": metric, "splits": splits, "num_parameters": 151_265}
            result |= {"wall_seconds": 12.5, "steps_per_second": 48.0, "ceiling": ceiling}
            write_json(run.path / "result.json", result | ({"reason": "loss nan"} if state == "diverged" else {}))
        return run

    return make


@pytest.fixture
def hide_package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """hide_package("plotly"): from here on it is as if that were not installed."""

    def hide(package: str) -> None:
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name.startswith(package):
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)

    return hide


@pytest.fixture
def logic_task() -> dict[str, Any]:
    return dict(LOGIC)


@pytest.fixture
def sraven_task() -> dict[str, Any]:
    return dict(SRAVEN)


@pytest.fixture
def model_sizes() -> dict[str, Any]:
    return dict(MODEL)


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """make_plan({"softmax": [run, run]}) is a plan of one candidate per variant; a list of lists is several candidates.

    axes: {variant: {axis: value}}. Everything else replaces a field of the plan.
    """

    def make(variants: dict[str, list[Any]], axes: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Plan:
        made, found = [], axes or {}
        for name, runs in variants.items():
            candidates = runs if isinstance(runs[0], list) else [runs]
            mechanism = candidates[0][0].config["model"]["mechanism"]
            made.append(
                Variant(
                    name=name,
                    mechanism=mechanism,
                    axes=found.get(name, {}),
                    reported=mechanism if mechanism in reported_names() else None,
                    candidates=tuple(
                        Candidate(
                            {"optimizer.lr": runs[0].config["optimizer"]["lr"]},
                            {run.config["seed"]: run.name for run in runs},
                        )
                        for runs in candidates
                    ),
                )
            )
        task = candidates[0][0].config["task"]["name"]
        first = next(iter(variants))
        fields: dict[str, Any] = {"name": f"compare-{task}", "title": f"{task}: {', '.join(variants)}", "task": task}
        fields |= {"budget": "quick", "budget_note": NOTE, "command": f"hyla compare {task} --budget quick"}
        fields |= {"metric": "accuracy" if task == "sraven" else "r2", "baseline": first if len(variants) > 1 else None}
        fields |= {"selection": "none", "reported_split": "held_out", "axes": tuple(found.get(first, {}))}
        return Plan(**fields | {"figures": ("scores", "curves"), "variants": tuple(made)} | changes)

    return make


@pytest.fixture
def compare(make_plan, tmp_path: Path) -> Callable[..., Comparison]:
    """compare(runs) is the comparison of these runs, a variant per mechanism; keywords as for make_plan."""

    def make(runs: list[Run], **changes: Any) -> Comparison:
        variants: dict[str, list[Run]] = {}
        for run in runs:
            variants.setdefault(run.config["model"]["mechanism"], []).append(run)
        return summarise(make_plan(variants, **changes), tmp_path)

    return make
