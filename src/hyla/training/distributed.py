"""Several processes that train one run together, started by `torchrun`.

Every step's batch is the one that a single process would take; each rank computes the loss of its own rows, weighted by
what they predict, and the sums of all ranks make the gradient. The number of ranks therefore changes rounding alone; but
dropout masks that rows do not share are drawn anew, and a mixture's load is balanced within each part of a batch.

- `ddp` (DistributedDataParallel): every rank holds the whole model.
- `fsdp` (FSDP2, `fully_shard`): weights, gradients and optimiser state are shared out among the ranks, block by block.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyla.errors import HylaError, check

T = TypeVar("T")

FROM_LAUNCHER = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class OtherRankError(HylaError):
    """The first rank has stopped with an error, which it reports itself."""

    def __init__(self, exit_status: int):
        self.exit_status = exit_status
        super().__init__("the first rank has stopped with an error")


LOST = (
    "another rank is gone: it was killed, or says itself what it has met. The launcher's command with `resume RUN` goes on"
    " from the last checkpoint"
)


def lost_rank(error: RuntimeError) -> bool:
    """Whether an error says that a rank no longer answers."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def num_ranks() -> int:
    """How many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Ranks:
    """The processes of a run, one of which is this one. `Ranks.join()` enters the group that `torchrun` has prepared, or is
    a group of one without it."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @classmethod
    def join(cls) -> Ranks:
        """Raises ConfigError where the launcher has not said what is needed."""
        size = num_ranks()
        if size == 1:
            return cls()
        missing = [name for name in FROM_LAUNCHER if name not in os.environ]
        allowed = f"{', '.join(missing)} must be set too; start the ranks with torchrun -m hyla train ..."
        check(not missing, "WORLD_SIZE", size, allowed)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this rank, of a run that asks for `name`."""
        if self.size == 1 or name == "cpu" or not torch.cuda.is_available():
            return name
        check(":" not in name, "training.device", name, "each rank takes a device of its own: cpu, cuda or auto")
        return f"cuda:{os.environ['LOCAL_RANK']}"

    def rows(self, batch_size: int) -> slice:
        """This rank's rows of a batch; ConfigError where there are fewer rows than ranks."""
        allowed = f"at least one sequence for each of {self.size} ranks"
        check(batch_size >= self.size, "training.batch_size", batch_size, allowed)
        return slice(batch_size * self.rank // self.size, batch_size * (self.rank + 1) // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Do `work` on the first rank, while the others wait. Where it fails all of them stop: the others with an
        OtherRankError."""
        if self.size == 1:
            return work()
        error, result = None, None
        if self.first:
            try:
                result = work()
            except Exception as met:
                error = met
        status = [None if error is None else getattr(error, "exit_status", 1)]
        dist.broadcast_object_list(status)
        if error is not None:
            raise error
        if status[0] is not None:
            raise OtherRankError(status[0])
        return result

    def leave(self) -> None:
        """Take the group apart."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Replica:
    """A model whose gradients are summed over the ranks, called as the model itself is.

    kind: `ddp` or `fsdp`.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, kind: str, device: torch.device):
        self.ranks, self.kind, self.model = ranks, kind, model
        self.forward: Callable[..., Any] = model
        if ranks.size == 1:
            return
        if kind == "fsdp":
            shard(model, ranks, device)
            return
        index = [device.index] if device.type == "cuda" else None
        self.forward = nn.parallel.DistributedDataParallel(model, device_ids=index, gradient_as_bucket_view=True)

    @property
    def sharded(self) -> bool:
        return self.kind == "fsdp" and self.ranks.size > 1

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one part of a batch: only the last one exchanges gradients."""
        if self.ranks.size == 1 or last:
            if self.sharded:
                self.model.set_requires_gradient_sync(True)  # type: ignore[operator]
            yield
        elif self.sharded:
            self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield
        else:
            with self.forward.no_sync():  # type: ignore[attr-defined]
                yield

    def scaled(self, loss: Tensor) -> Tensor:
        """What to call `backward` on: both kinds divide by the number of ranks."""
        return loss if self.ranks.size == 1 else loss * self.ranks.size


def shard(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Share the parameters of a model out among the ranks, in place; each block is gathered only while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # nothing in training works in place on what a model answers
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    mesh = init_device_mesh(device.type, (ranks.size,))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be shared out among ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be shared out."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, as `parameter` is placed: on its device, and shared out as it is."""
    value = value.to(parameter.device)
    if not hasattr(parameter, "placements") or value.dim() == 0:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
