"""Prepared run folders, written with the library's own functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyla.runs import Run, create_run, write_json

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

    curve: [(step, {split: value})]. state "unfinished" writes no result, "diverged" one without scores.
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
    ) -> Run:
        sraven = task["name"] == "sraven"
        metric = "accuracy" if sraven else "r2"
        sizes = model if model is not None else SRAVEN_MODEL if sraven else MODEL
        config = {"task": task, "model": {"mechanism": mechanism} | sizes, "optimizer": {"lr": 0.001}}
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
def logic_task() -> dict[str, Any]:
    return dict(LOGIC)


@pytest.fixture
def sraven_task() -> dict[str, Any]:
    return dict(SRAVEN)


@pytest.fixture
def model_sizes() -> dict[str, Any]:
    return dict(MODEL)
