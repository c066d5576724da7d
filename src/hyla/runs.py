"""The run folder: what is in it, how it is read and written. Plain files, no torch.

    runs/NAME/
      config.json      the sections `task`, `model`, `optimizer`, `training`, the `seed`, and under `run` what was found at
                       the start (versions, backend, device, threads)
      metrics.jsonl    one line per logged step, see :class:`MetricsLog`
      checkpoints/     step_00001000/ ... (hyla.training.checkpoint)
      result.json      final scores per split, wall time, steps per second; its presence means that the run has ended

Numbers that are not finite are written as null, so that every file is standard JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from hyla.errors import RunError

CONFIG, METRICS, RESULT, CHECKPOINTS, LOCK = "config.json", "metrics.jsonl", "result.json", "checkpoints", ".lock"


def finite_or_none(value: Any) -> Any:
    """`value` with every number that is not finite replaced by None, in nested dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return value


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader finds the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(finite_or_none(data), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file; :class:`RunError` names the file and the place of a mistake."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise RunError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:  # not text, a number of thousands of digits, endless nesting
        raise RunError(f"{path} cannot be read: {error}") from None


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `path` when the block ends, in place of an older one. Where the block fails,
    nothing of it is left and the older one stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class MetricsLog:
    """`metrics.jsonl`: each line an object with `step`, `loss`, `learning_rate`, `gradient_norm`, `steps_per_second`
    and, where the splits were evaluated, `splits` = {split: {metric: mean}}. Steps rise from line to line."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite_or_none(line), allow_nan=False) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A last line cut short by a kill is left out; a damaged one before it is an error."""
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise RunError(f"{self.path} cannot be read: {error}") from None
        records = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                if number == len(lines):  # no newline behind it: the write was interrupted
                    break
                raise RunError(f"{self.path}, line {number}, column {error.colno}: {error.msg}") from None
            if not isinstance(records[-1], dict) or not isinstance(records[-1].get("step"), int):
                raise RunError(f"{self.path}, line {number}: a line of metrics has a step, not {line[:60]!r}")
        return records

    def keep_until(self, step: int) -> None:
        """Drop the lines of later steps (and a line cut short), as a run does that goes on from a checkpoint."""
        kept = [line for line in self.read() if line["step"] <= step]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)


@dataclass(frozen=True)
class Run:
    """A run folder that exists. `Run(path).config` and the rest read the files each time they are asked."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        config = read_json(self.path / CONFIG)
        if not isinstance(config, dict):
            raise RunError(f"{self.path / CONFIG} does not hold a config, but {str(config)[:60]!r}")
        return config

    @property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.path / METRICS)

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def result(self) -> dict[str, Any] | None:
        """`{"state": "finished" | "diverged", "step", "headline", "splits": {split: {metric: value, "num_samples"}},
        "num_parameters", "wall_seconds", "steps_per_second", "ceiling": {split: value} | null}`; None while unfinished."""
        if not (self.path / RESULT).exists():
            return None
        result = read_json(self.path / RESULT)
        if not isinstance(result, dict) or not {"state", "step"} <= set(result):
            raise RunError(f"{self.path / RESULT} does not hold a result: it lacks state or step")
        return result

    @property
    def state(self) -> str:
        """`finished`, `diverged` or `unfinished`."""
        result = self.result
        return "unfinished" if result is None else result["state"]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, so that two processes never train into it at once (:class:`RunError` for the second)."""
        lock = filelock.FileLock(self.path / LOCK)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            raise RunError(f"{self.path} is in use by another process that is training into it") from None
        try:
            yield
        finally:
            lock.release()


def open_run(path: Path | str) -> Run:
    """The run in `path`; :class:`RunError` says what is missing where there is none."""
    path = Path(path)
    if not path.is_dir():
        raise RunError(f"no run folder at {path}")
    if not (path / CONFIG).exists():
        raise RunError(f"{path} is not a run folder: it holds no {CONFIG}")
    return Run(path)


def check_free(path: Path | str) -> None:
    """Raise :class:`RunError` if a new run cannot be written to `path`; makes nothing."""
    path = Path(path)
    if (path / CONFIG).exists():
        state = Run(path).state
        hint = f"go on with it: hyla resume {path}" if state == "unfinished" else "choose another --out"
        raise RunError(f"{path} holds another run ({state}); {hint}")
    # a lock, or the config that a killed process was about to write, is not a run
    if path.exists() and (not path.is_dir() or any(not _is_leftover(entry.name) for entry in path.iterdir())):
        raise RunError(f"{path} exists and is not an empty folder; choose another --out")
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RunError(f"{path} cannot be made: {parent} is not a folder one may write to")


def _is_leftover(name: str) -> bool:
    return name == LOCK or (name.startswith(f".{CONFIG}.") and name.endswith(".tmp"))


def create_run(path: Path | str, config: dict[str, Any]) -> Run:
    """Make the folder and write `config.json` into it."""
    check_free(path)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / CONFIG, config)
    return Run(path)
