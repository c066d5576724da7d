"""Many runs trained as one model whose parameters have a leading axis P.

Each member is an ordinary :class:`Trainer` with its own folder, data, dropout, learning rate, weight decay and clipping;
only the forward and backward pass are shared (`torch.func.vmap` over stacked parameters). A member's parameters are views
into the stack, so that evaluation, checkpoints and the optimiser work on them as on any model, and a member ends as the
run it would have been alone (to rounding: a batched product may add in another order). A member that diverges ends alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyla.errors import ConfigError, DivergedError, RunError, check
from hyla.models.transformer import TransformerConfig
from hyla.runs import RESULT, check_free, read_json, write_json
from hyla.tasks.base import Batch
from hyla.training.checkpoint import is_whole, list_checkpoints
from hyla.training.config import TrainConfig, config_to_dict
from hyla.training.loop import (
    InterruptedRunError,
    Progress,
    Trainer,
    apply_gradients,
    compute_loss,
    seed_dropout,
    stop_signals,
)
from hyla.training.optimizer import learning_rate

AXES = ("seeds", "lr", "weight_decay")
MEMBERS = "ensemble.json"  # the names of the members' folders


def member_configs(base: TrainConfig, axes: Mapping[str, Sequence[int | float]]) -> list[TrainConfig]:
    """The grid over `axes`: `seeds` = [n] for the n seeds from `base.seed` on, `lr` and `weight_decay` values.

    Raises ConfigError for an axis that does not exist or has no value.
    """
    for name, values in axes.items():
        check(name in AXES, "ensemble", name, f"axes are {', '.join(AXES)}")
        check(len(values) > 0, f"ensemble.{name}", values, "at least one value")
    check(len(axes.get("seeds", [1])) == 1, "ensemble.seeds", axes.get("seeds"), "one number: how many seeds")
    (count,) = axes.get("seeds", [1])
    check(count >= 1 and int(count) == count, "ensemble.seeds", count, "a whole number, at least 1")
    seeds = [base.seed + offset for offset in range(int(count))]
    rates = axes.get("lr", [base.optimizer.lr])
    decays = axes.get("weight_decay", [base.optimizer.weight_decay])
    return [
        replace(base, seed=seed, optimizer=replace(base.optimizer, lr=lr, weight_decay=decay))
        for seed, lr, decay in product(seeds, rates, decays)
    ]


def member_name(config: TrainConfig) -> str:
    """The folder of a member."""
    optimizer = config.optimizer
    return f"seed{config.seed}-lr{optimizer.lr:g}-wd{optimizer.weight_decay:g}"


def is_ensemble(folder: Path) -> bool:
    """Whether a folder was made by :meth:`Ensemble.start`."""
    return (folder / MEMBERS).exists()


def check_stackable(configs: Sequence[TrainConfig]) -> None:
    """Raise ConfigError unless the members differ in nothing but seeds, learning rate, weight decay and clipping."""
    check(len(configs) >= 1, "ensemble", len(configs), "at least one member")

    def shared(config: TrainConfig) -> dict[str, Any]:
        data = config_to_dict(config)
        data.pop("seed")
        data["task"].pop("split_seed")
        for key in ("lr", "weight_decay", "clip_norm"):
            data["optimizer"].pop(key)
        return data

    first = shared(configs[0])
    for config in configs[1:]:
        for section, values in shared(config).items():
            if values != first[section]:
                raise ConfigError(
                    f"members of an ensemble must agree in section {section!r}: {first[section]}, {values}"
                )
    model = configs[0].model
    if isinstance(model, TransformerConfig):
        redrawn = model.backend in ("chunked", "triton") and model.attention_dropout > 0
        allowed = "with dropout an ensemble needs auto, eager or native, which repeat a member's own masks"
        check(not redrawn, "model.backend", model.backend, allowed)
    names = [member_name(config) for config in configs]
    check(len(set(names)) == len(names), "ensemble", names, "members must differ in seed, lr or weight_decay")


class Ensemble:
    """P runs in progress, trained together; all at the same step."""

    def __init__(self, members: Sequence[Trainer]):
        check_stackable([member.config for member in members])
        self.members = list(members)
        self.alive = list(members)
        self._signal: int | None = None
        self._stack()

    def _request_stop(self, number: int) -> None:
        self._signal = number

    @classmethod
    def start(cls, configs: Sequence[TrainConfig], folder: Path | str) -> Ensemble:
        """New runs in `folder/MEMBER`; nothing is written unless all of them can be."""
        check_stackable(configs)
        paths = [Path(folder) / member_name(config) for config in configs]
        for path in paths:
            check_free(path)
        members = [Trainer.start(config, path) for config, path in zip(configs, paths, strict=True)]
        write_json(Path(folder) / MEMBERS, [path.name for path in paths])
        return cls(members)

    @classmethod
    def resume(cls, folder: Path | str) -> Ensemble:
        """The members in `folder` that have not ended, from the newest step that all of them have whole."""
        paths = [Path(folder) / name for name in read_json(Path(folder) / MEMBERS)]
        begun = [path for path in paths if not (path / RESULT).exists()]
        if not begun:
            raise RunError(f"all {len(paths)} members in {folder} have ended; nothing to resume")
        whole = [{step for step, path in list_checkpoints(run / "checkpoints") if is_whole(path)} for run in begun]
        step = max(set.intersection(*whole), default=0)
        return cls([Trainer.resume(path, step) for path in begun])

    @property
    def step(self) -> int:
        return self.alive[0].step

    def _stack(self) -> None:
        """Move the parameters of the living members into one stack, and make theirs views into it."""
        models = [member.model for member in self.alive]
        self.stack: dict[str, Tensor] = {}
        for name, _ in models[0].named_parameters():
            parameters = [model.get_parameter(name) for model in models]
            stacked = torch.stack([parameter.detach() for parameter in parameters]).requires_grad_()
            self.stack[name] = stacked
            for index, parameter in enumerate(parameters):
                parameter.data = stacked.detach()[index]

    def update(self) -> list[tuple[Tensor, Tensor, float]]:
        """One step of every living member: (loss, gradient norm, learning rate) of each."""
        first = self.alive[0]
        loop, task, model = first.config.training, first.task, first.model
        batches = [member.next_batch() for member in self.alive]
        inputs = torch.stack([batch.inputs for batch in batches])
        targets = torch.stack([batch.targets for batch in batches])
        keeps = []
        for member in self.alive:
            seed_dropout(member.config.seed, member.step)
            keeps.append(model.draw_keep(loop.batch_size, task.sequence_length, task.predict_at))
        keep = [torch.stack(layer) for layer in zip(*keeps, strict=True)]

        def member_loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor, keep: list[Tensor]) -> Tensor:
            return compute_loss(model, task, Batch(inputs, targets, {}), parameters=parameters, keep=keep)

        with first.autocast():
            losses = torch.func.vmap(member_loss)(self.stack, inputs, targets, keep)
        losses.sum().backward()
        results = []
        for index, member in enumerate(self.alive):
            for name, parameter in member.model.named_parameters():
                gradient = self.stack[name].grad
                parameter.grad = None if gradient is None else gradient[index]
            rate = learning_rate(member.config.optimizer, member.step, loop.steps)
            norm = apply_gradients(member.model, member.optimizer, rate, member.config.optimizer.clip_norm)
            results.append((losses[index].detach(), norm, rate))
        for stacked in self.stack.values():
            stacked.grad = None
        return results

    def run(self, progress: Progress | None = None) -> dict[str, dict[str, Any]]:
        """Train every member to its end; {member: the content of its `result.json`}.

        A member that diverges is ended and left out from then on. Raises InterruptedRunError after Ctrl-C or SIGTERM, when
        all members have saved.
        """
        results: dict[str, dict[str, Any]] = {}
        with contextlib.ExitStack() as stack:
            for member in self.alive:
                stack.enter_context(member.recording())
            stack.enter_context(stop_signals(self._request_stop))
            while self.alive and self.step < self.alive[0].config.training.steps:
                if self._signal is not None:  # told to all between two steps, so that all save the same one
                    for member in self.alive:
                        member.stop(self._signal)
                interrupted, ended = None, []
                for member, (loss, norm, rate) in zip(list(self.alive), self.update(), strict=True):
                    try:
                        member.record(loss, norm, rate, progress)
                    except DivergedError:
                        results[member.folder.name] = member.folder.result or {}
                        ended.append(member)
                    except InterruptedRunError as error:
                        interrupted = error
                if interrupted is not None:
                    raise InterruptedRunError(
                        interrupted.exit_status - 128, self.members[0].folder.path.parent, self.step
                    )
                if ended:
                    self.alive = [member for member in self.alive if member not in ended]
                    if self.alive:
                        self._stack()
            for member in self.alive:
                results[member.folder.name] = member.finish()
        return results
