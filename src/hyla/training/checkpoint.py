"""Checkpoints: written whole or not at all, read only if whole.

    checkpoints/step_00001000/   model.safetensors, optimizer.safetensors, state.json

`state.json` holds the step, the best score so far and the size and digest of the other two, so that a truncated or damaged
checkpoint is recognised before anything is loaded. A checkpoint appears under its name by one rename.

A run whose model is shared out among ranks (`training.parallel = fsdp`) has the files of `torch.distributed.checkpoint` in
place of the first two: each rank writes its own part. Any number of ranks reads both kinds.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from hyla.errors import CheckpointError, NoWholeCheckpointError, RunError
from hyla.runs import finite_or_none, read_json
from hyla.training.distributed import Ranks, like, own_part

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SHARDED = ".metadata"  # of torch.distributed.checkpoint: which part lies in which file
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
        optimizer.state[parameters[name]][entry] = like(value, parameters[name])


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
    contents[STATE] = _state_file(step, state, digests)
    needed = sum(map(len, contents.values()))
    temporary = None
    with _explained(final, needed, lambda: temporary):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_strays(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir=folder))
        for name, content in contents.items():
            _write_flushed(temporary / name, content)
        before_rename()
        _rename(temporary, final)
        _sync_folder(folder)
    return final


def save_sharded(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write a checkpoint of a model that is shared out, each rank its own part, with the promises of
    :func:`save_checkpoint`. All ranks must call it, and reach the same folder."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_parts

    final = checkpoint_path(folder, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    needed = sum(own_part(tensor).nbytes for tensor in model.parameters()) * 3 * ranks.size  # two moments
    temporary = Path(ranks.gather(str(folder / f"{TEMPORARY}{os.getpid()}-step_{step}"))[0])

    def begin() -> None:
        with _explained(final, needed, lambda: temporary):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_strays(folder)
            temporary.mkdir()

    def end() -> None:
        with _explained(final, needed, lambda: temporary):
            files = {}
            for path in sorted(temporary.iterdir()):
                content = path.read_bytes()
                files[path.name] = {"bytes": len(content), "blake2b": hashlib.blake2b(content).hexdigest()}
            _write_flushed(temporary / STATE, _state_file(step, state, files))
            _rename(temporary, final)
            _sync_folder(folder)

    ranks.on_first(begin)
    try:
        save_parts({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)
    except CheckpointException as error:  # what all ranks have met, each with its traceback
        met = next(iter(error.failures.values()))[0]
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_could_not(final, needed, met)) from error
    ranks.on_first(end)


def _state_file(step: int, state: dict[str, Any], files: dict[str, Any]) -> bytes:
    """The content of state.json."""
    document = finite_or_none({"step": step, **state, "files": files})
    return json.dumps(document, indent=1, allow_nan=False).encode()


def _write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explained(final: Path, needed: int, temporary: Callable[[], Path | None]) -> Iterator[None]:
    """Turn an error of the disk into a CheckpointError, and leave nothing half written."""
    try:
        yield
    except OSError as error:
        unfinished = temporary()
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_could_not(final, needed, error)) from error


def _could_not(final: Path, needed: int, error: BaseException) -> str:
    reason = str(error)
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = f"the disk is full ({error.strerror})" if full else error.strerror or reason
    return f"checkpoint {final} could not be written ({needed:,} bytes needed): {reason}"


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
    # a published run that has ended keeps the weights alone
    sound = isinstance(files, dict) and (MODEL in files or SHARDED in files)
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
            if optimizer is not None and not {OPTIMIZER, SHARDED} & set(state["files"]):
                raise RunError(f"{path} holds the weights alone, not the optimiser's state")
        except RunError as error:
            skipped.append(str(error))
            continue
        try:
            if SHARDED in state["files"]:
                _load_sharded(path, model, optimizer)
            else:
                _load_whole(path, model, optimizer)
        except RuntimeError as error:
            raise RunError(f"{path} does not fit the model of config.json: {error}") from None
        return Loaded(path, at, state, tuple(skipped))
    if skipped:
        raise NoWholeCheckpointError("no whole checkpoint is left:\n  " + "\n  ".join(skipped))
    return None


def _load_whole(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    weights = load_file(path / MODEL)
    own = model.state_dict()
    model.load_state_dict({name: like(value, own[name]) if name in own else value for name, value in weights.items()})
    if optimizer is not None:
        restore_optimizer(model, optimizer, load_file(path / OPTIMIZER))


def _load_sharded(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Every rank, or one process alone, reads what it needs of all parts."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    wanted: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        wanted["optimizer"] = get_optimizer_state_dict(model, optimizer)
    alone = not torch.distributed.is_initialized()
    try:
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load_parts(wanted, checkpoint_id=path, no_dist=alone)
    except CheckpointException as error:
        raise RuntimeError(next(iter(error.failures.values()))[0]) from None
    if optimizer is None:
        model.load_state_dict(wanted["model"])
        return
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of step `best`."""
    for step, path in list_checkpoints(folder)[:-keep]:
        if step != best:
            shutil.rmtree(path, ignore_errors=True)
