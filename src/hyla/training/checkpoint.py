"""Checkpoints: written whole or not at all, read only if whole.

    checkpoints/step_00001000/   model.safetensors, optimizer.safetensors, state.json

`state.json` holds the step, the best score so far and the size and digest of the other two, so that a truncated or damaged
checkpoint is recognised before anything is loaded. A checkpoint appears under its name by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hyla.errors import CheckpointError, NoWholeCheckpointError, RunError
from hyla.runs import finite_or_none, read_json

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read: its step, its state and what newer ones were skipped, with the reason."""

    path: Path
    step: int
    state: dict[str, Any]
    skipped: tuple[str, ...]


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{int(step):08d}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all checkpoints, oldest first, whole or not."""
    found = []
    for path in folder.glob("step_*") if folder.is_dir() else ():
        number = path.name.removeprefix("step_")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return sorted(found)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, named after the parameters it belongs to."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            tensors[f"{names[id(parameter)]}/{key}"] = value.detach().contiguous()
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what :func:`optimizer_tensors` took."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = value.to(parameters[name].device)


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    before_rename: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint under a temporary name, flush it to the disk, rename it.

    Raises CheckpointError with the path and the size needed when the disk is full or the folder cannot be written to; the
    checkpoints already there are not touched. `before_rename` lets tests stop the write at its most delicate moment.
    """
    final = checkpoint_path(folder, step)
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    contents = {MODEL: save(weights), OPTIMIZER: save(optimizer_tensors(model, optimizer))}
    digests = {
        name: {"bytes": len(content), "blake2b": hashlib.blake2b(content).hexdigest()}
        for name, content in contents.items()
    }
    document = finite_or_none({"step": step, **state, "files": digests})
    contents[STATE] = json.dumps(document, indent=1, allow_nan=False).encode()
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_strays(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=folder))
        for name, content in contents.items():
            with open(temporary / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        before_rename()
        _rename(temporary, final)
        _sync_folder(folder)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(map(len, contents.values()))
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = f"the disk is full ({error.strerror})" if full else error.strerror or str(error)
        raise CheckpointError(f"checkpoint {final} could not be written ({needed:,} bytes needed): {reason}") from error
    return final


def _remove_strays(folder: Path) -> None:
    """Delete what writers that no longer live have left unfinished."""
    for stray in folder.glob(f"{TEMPORARY}*"):
        try:
            os.kill(int(stray.name.removeprefix(TEMPORARY).partition("-")[0]), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(stray, ignore_errors=True)
        except PermissionError:  # it lives, as another user
            continue


def _rename(temporary: Path, final: Path) -> None:
    """Give a written checkpoint its name; an older one of the same step, damaged or of a run begun again, gives way."""
    for _ in range(100):  # another save of the same step may come in between
        try:
            os.rename(temporary, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        aside = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, aside)
        shutil.rmtree(aside)
    raise OSError(errno.EEXIST, "others keep writing the same checkpoint")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(path: Path) -> dict[str, Any]:
    """The state of a checkpoint; RunError says what is wrong with one that is not whole."""
    state = read_json(path / STATE)
    if not isinstance(state, dict) or not {"step", "best", "seconds", "files"} <= set(state):
        raise RunError(f"{path / STATE} lacks step, best, seconds or files")
    files, best = state["files"], state["best"]
    sound = isinstance(files, dict) and MODEL in files  # a published run that has ended keeps the weights alone
    sound = sound and all(isinstance(entry, dict) and {"bytes", "blake2b"} <= set(entry) for entry in files.values())
    sound = sound and isinstance(state["seconds"], int | float) and (best is None or {"step", "score"} <= set(best))
    if not sound:
        raise RunError(f"{path / STATE} does not hold what a checkpoint's state holds")
    if path.name != checkpoint_path(path.parent, state["step"]).name:
        raise RunError(f"{path / STATE} is of step {state['step']}, not of the step in the folder's name")
    for name, expected in files.items():
        file = path / name
        if not file.exists():
            raise RunError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise RunError(f"{file} has {size:,} bytes instead of {expected['bytes']:,}")
        if hashlib.blake2b(file.read_bytes()).hexdigest() != expected["blake2b"]:
            raise RunError(f"{file} is damaged: its digest is not the one written in {STATE}")
    return state


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be loaded."""
    try:
        verify(path)
    except RunError:
        return False
    return True


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None
) -> Loaded | None:
    """Load the newest whole checkpoint (or exactly `step`) into `model` and `optimizer`; None if there is none at all.

    Raises RunError, naming every file and what is wrong with it, when there are checkpoints but none is whole.
    """
    candidates = list_checkpoints(folder)
    if step is not None:
        candidates = [(s, path) for s, path in candidates if s == step]
        if not candidates:
            raise RunError(f"no checkpoint of step {step} in {folder}")
    skipped: list[str] = []
    for at, path in reversed(candidates):
        try:
            state = verify(path)
            if optimizer is not None and OPTIMIZER not in state["files"]:
                raise RunError(f"{path} holds the weights alone, not the optimiser's state")
        except RunError as error:
            skipped.append(str(error))
            continue
        weights = load_file(path / MODEL)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise RunError(f"{path / MODEL} does not fit the model of config.json: {error}") from None
        if optimizer is not None:
            restore_optimizer(model, optimizer, load_file(path / OPTIMIZER))
        return Loaded(path, at, state, tuple(skipped))
    if skipped:
        raise NoWholeCheckpointError("no whole checkpoint is left:\n  " + "\n  ".join(skipped))
    return None


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`."""
    for step, path in list_checkpoints(folder)[:-keep]:
        if step != best:
            shutil.rmtree(path, ignore_errors=True)
