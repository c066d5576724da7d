"""Collect latent codes (and hidden activations) of a model over a task's splits, into memory or a memory-mapped store.

Codes are computed beside the forward pass, by hooks that only read, for the chosen pairs alone: the model's output keeps
every bit, its backend stays what it was, and the whole `[B, H, Q, K]` never exists.

A store is a folder that appears when it is whole:

    collection.json     what was collected: layers, queries, keys, splits, the run it came from
    SPLIT/NAME.npy      one array per name, first axis the samples: `codes.0` [N, Q, K, H] of the first layer ...,
                        `activations.0`, `inputs`, `targets`, `predictions`, `latents.NAME`, `scores.NAME`
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyla.attention import MultiHeadAttention
from hyla.errors import RunError, check
from hyla.runs import read_json, whole_folder, write_json
from hyla.tasks.base import GeneratedTask, Stream, Task, check_split

BATCH = GeneratedTask.evaluation_batch
COLLECTION = "collection.json"


@dataclass(frozen=True)
class Collection:
    """What was collected. Arrays are numpy's, memory-mapped where they lie in a folder; the first axis is the samples N.

    layers: names of the attention layers, first to last. queries, keys: token positions. activations: names of submodules.
    source: what the caller says of where it came from. splits: samples of each.
    """

    layers: tuple[str, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    activations: tuple[str, ...]
    splits: Mapping[str, int]
    source: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, np.ndarray]]  # split -> name -> array

    def codes(self, layer: str | int, split: str) -> np.ndarray:
        """`[N, Q, K, H]`, float32, of a layer by name or number."""
        return self._array(split, f"codes.{self._number(self.layers, layer, 'layer')}")

    def activation(self, name: str, split: str) -> np.ndarray:
        """The output of a submodule at the collected positions, `[N, P, width]` (`[N, width]` where it has no tokens)."""
        return self._array(split, f"activations.{self._number(self.activations, name, 'activation')}")

    def latent(self, name: str, split: str) -> np.ndarray:
        """A task latent, such as `rules` or `term_bits`."""
        return self._array(split, f"latents.{name}")

    def score(self, name: str, split: str) -> np.ndarray:
        """A score of each sequence, such as `accuracy`."""
        return self._array(split, f"scores.{name}")

    def inputs(self, split: str) -> np.ndarray:
        return self._array(split, "inputs")

    def targets(self, split: str) -> np.ndarray:
        return self._array(split, "targets")

    def predictions(self, split: str) -> np.ndarray:
        return self._array(split, "predictions")

    def _array(self, split: str, name: str) -> np.ndarray:
        check(split in self.arrays, "split", split, f"collected were {', '.join(self.arrays)}")
        check(name in self.arrays[split], "name", name, f"collected were {', '.join(self.arrays[split])}")
        return self.arrays[split][name]

    @staticmethod
    def _number(names: Sequence[str], wanted: str | int, field: str) -> int:
        if isinstance(wanted, str):
            check(wanted in names, field, wanted, f"collected were {', '.join(names) or 'none'}")
            return names.index(wanted)
        check(-len(names) <= wanted < len(names), field, wanted, f"{len(names)} were collected")
        return wanted % len(names)


def attention_layers(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """The attention layers of any model by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}


def choose_layers(model: nn.Module, layers: Sequence[str | int] | None) -> dict[str, MultiHeadAttention]:
    """Those of `attention_layers` that are named, or numbered from 0 (back from -1); all for None."""
    found = attention_layers(model)
    names = list(found)
    if layers is None:
        return found
    chosen = []
    for layer in layers:
        there = layer in names if isinstance(layer, str) else -len(names) <= layer < len(names)
        allowed = f"the model's attention layers are {', '.join(names) or 'none'}"
        check(there, "layers", layer, allowed if isinstance(layer, str) else f"counted from 0, {allowed}")
        chosen.append(layer if isinstance(layer, str) else names[layer])
    check(len(set(chosen)) == len(chosen), "layers", list(layers), "each only once")
    return {name: found[name] for name in chosen}


def layer_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """(x, context, masks) that an attention layer attends with, from what a hook of its call is given."""
    x, *rest = args
    norm = kwargs.get("norm")
    masks = {name: kwargs[name] for name in ("mask", "key_mask", "causal", "bias") if name in kwargs}
    return x if norm is None else norm(x), rest[0] if rest else kwargs.get("context"), masks


@torch.no_grad()
def collect(
    model: nn.Module,
    task: Task,
    *,
    queries: Sequence[int],
    keys: Sequence[int],
    splits: Sequence[str] = ("train", "held_out"),
    num_samples: int = 4_096,
    layers: Sequence[str | int] | None = None,
    activations: Sequence[str] = (),
    positions: Sequence[int] = (-1,),
    stream: Stream = "evaluation",
    source: Mapping[str, Any] | None = None,
    path: Path | str | None = None,
) -> Collection:
    """Codes of the pairs of `queries` and `keys` in chosen layers, with what generated the sequences beside them.

    Args:
        model: any module with `MultiHeadAttention` layers (none are needed for activations alone) that answers
            `model(inputs, predict_at=...)` with an object that has `predictions`. It is run in evaluation mode, without
            gradients, and put back into the mode it was in.
        task: draws the sequences; `num_samples` of each split, the first of `stream`.
        queries, keys: token positions; negative ones count from the end.
        layers: names of attention layers or numbers; all by default.
        activations: names of submodules (`model.named_modules()`) whose outputs are collected too, at the token
            `positions` where they have tokens (the last axis but one). A submodule that answers several things gives its
            first.
        source: plain values that say where this came from; kept with the collection.
        path: folder for a memory-mapped store, which may be larger than memory; None keeps arrays in memory.

    Raises ConfigError for a layer, split, position or submodule that does not exist, for more samples than a split has, for
    codes that are asked of a model without attention, and for a store that does not fit on the disk; RunError where `path`
    is taken.
    """
    check(num_samples >= 1, "num_samples", num_samples, "at least 1")
    check(len(splits) > 0, "splits", list(splits), "at least one")
    for split in splits:
        check_split(task, split)
        available = task.size(split)
        enough = available is None or num_samples <= available
        check(enough, "num_samples", num_samples, f"split {split} has {available} sequences")
    chosen = choose_layers(model, layers)
    modules = dict(model.named_modules())
    for name in activations:
        check(name in modules and name != "", "activations", name, f"submodules are {', '.join(filter(None, modules))}")
    check(bool(chosen) or bool(activations), "layers", "none", "the model has no attention layers; name activations")
    plan = _Plan(model, task, chosen, tuple(queries), tuple(keys), tuple(activations), tuple(positions), stream)
    parameter = next(model.parameters())
    size = task.evaluation_batch  # so that the sequences are those that evaluations measure
    training = model.training
    model.eval()
    try:
        probe = plan.batch(splits[0], 0)  # what cannot work is met before there is a folder
        shapes = {name: (tuple(array.shape[1:]), array.dtype) for name, array in probe.items()}
        described = {
            "format": 1,
            "layers": list(chosen),
            "queries": [query % task.sequence_length for query in queries],
            "keys": [key % task.sequence_length for key in keys],
            "activations": list(activations),
            "splits": dict.fromkeys(splits, num_samples),
            "source": dict(source or {}) | {"task": task.name, "dtype": str(parameter.dtype).removeprefix("torch.")},
        }
        with _storage(path, splits, shapes, num_samples, described) as arrays:
            for split in splits:
                for index in range(math.ceil(num_samples / size)):
                    rows = slice(index * size, min((index + 1) * size, num_samples))
                    for name, array in plan.batch(split, index).items():
                        arrays[split][name][rows] = array[: rows.stop - rows.start]
    finally:
        model.train(training)
    if path is not None:
        return open_collection(path)
    return _collection(described, arrays)


@dataclass(frozen=True)
class _Plan:
    """One forward pass, and all that is kept of it."""

    model: nn.Module
    task: Task
    layers: Mapping[str, MultiHeadAttention]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    activations: tuple[str, ...]
    positions: tuple[int, ...]
    stream: Stream

    def batch(self, split: str, index: int) -> dict[str, np.ndarray]:
        parameter = next(self.model.parameters())
        size = self.task.evaluation_batch
        batch = self.task.batch(split, index, size, stream=self.stream, dtype=parameter.dtype).to(parameter.device)
        kept: dict[str, Tensor] = {}
        with contextlib.ExitStack() as hooks:
            for number, layer in enumerate(self.layers.values()):
                hooks.callback(self._read_codes(layer, kept, f"codes.{number}"))
            for number, name in enumerate(self.activations):
                hooks.callback(self._read_output(self.model.get_submodule(name), kept, f"activations.{number}"))
            predictions = self.model(batch.inputs, predict_at=self.task.predict_at).predictions
        kept |= {"inputs": batch.inputs, "targets": batch.targets, "predictions": predictions}
        kept |= {f"latents.{name}": value for name, value in batch.latents.items()}
        scores = self.task.scores(predictions.to(parameter.dtype), batch)
        kept |= {f"scores.{name}": value for name, value in scores.items()}
        return {name: _numpy(value) for name, value in kept.items()}

    def _read_codes(self, layer: MultiHeadAttention, kept: dict[str, Tensor], name: str) -> Any:
        """A hook that notes the codes of the chosen pairs, from the layer's own inputs."""

        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, context, masks = layer_call(args, kwargs)
            codes_BHQK = layer.codes(x, context, queries=self.queries, keys=self.keys, **masks)
            kept[name] = codes_BHQK.permute(0, 2, 3, 1)

        return layer.register_forward_pre_hook(read, with_kwargs=True).remove

    def _read_output(self, module: nn.Module, kept: dict[str, Tensor], name: str) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            if first.dim() > 2:
                for place in self.positions:
                    last = first.shape[-2]
                    check(-last <= place < last, "positions", place, f"the submodule answers {last} tokens here")
                first = first[..., list(self.positions), :]
            kept[name] = first

        return module.register_forward_hook(read).remove


def _numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


@contextlib.contextmanager
def _storage(
    path: Path | str | None,
    splits: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    num_samples: int,
    described: Mapping[str, Any],
) -> Iterator[dict[str, dict[str, np.ndarray]]]:
    """Arrays to fill: in memory, or in a folder that takes its name once they are whole."""
    if path is None:
        yield {
            split: {name: np.empty((num_samples, *shape), dtype) for name, (shape, dtype) in shapes.items()}
            for split in splits
        }
        return
    path = Path(path)
    if path.exists():
        raise RunError(f"{path} exists; choose another folder for the collection")
    num_bytes = sum(num_samples * math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()) * len(splits)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    fits = num_bytes + 2**20 <= free
    reason = f"it needs {num_bytes / 2**20:,.0f} MiB and {parent} has {free / 2**20:,.0f} MiB free"
    check(fits, "num_samples", num_samples, reason)
    with whole_folder(path) as folder:
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for split in splits:
            (folder / split).mkdir()
            arrays[split] = {
                name: np.lib.format.open_memmap(
                    folder / split / f"{name}.npy", mode="w+", dtype=dtype, shape=(num_samples, *shape)
                )
                for name, (shape, dtype) in shapes.items()
            }
        yield arrays
        for split in splits:
            for array in arrays[split].values():
                assert isinstance(array, np.memmap)
                array.flush()
        write_json(folder / COLLECTION, described)


def open_collection(path: Path | str) -> Collection:
    """The collection in a folder, its arrays memory-mapped and read-only; RunError where there is none or it is damaged."""
    path = Path(path)
    described = read_json(path / COLLECTION)
    try:
        arrays = {
            split: {
                file.name.removesuffix(".npy"): np.load(file, mmap_mode="r")
                for file in sorted((path / split).glob("*.npy"))
            }
            for split in described["splits"]
        }
        collection = _collection(described, arrays)
    except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
        raise RunError(f"{path} is not a whole collection: {type(error).__name__}: {error}") from None
    for split, count in collection.splits.items():
        wanted = [f"codes.{number}" for number in range(len(collection.layers))] + ["inputs", "targets", "predictions"]
        wanted += [f"activations.{number}" for number in range(len(collection.activations))]
        for name in wanted:
            array = collection.arrays[split].get(name)
            if array is None or len(array) != count:
                raise RunError(f"{path} is not a whole collection: {split}/{name}.npy is missing or of another length")
    return collection


def _collection(described: Mapping[str, Any], arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Collection:
    fields = {name: tuple(described[name]) for name in ("layers", "queries", "keys", "activations")}
    return Collection(**fields, splits=described["splits"], source=described["source"], arrays=arrays)
