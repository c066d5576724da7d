"""Trains runs with several ranks, for tests: `python ranks_program.py FOLDER`.

`FOLDER/groups.json` holds groups `{"ranks": number, "jobs": [job, ...]}`. A job is a dict: `path` of a run; `copy` of
another one that it begins as; `config` to start it with, or none to resume it; `stop_at`, the step during which rank
`stop_rank` alone is asked to stop; or `unequal` (:func:`unequal_step`). What each rank has met lies behind in
`met-GROUP-RANK.json`.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

from hyla.errors import HylaError
from hyla.models.base import Model, ModelOutput
from hyla.tasks.base import Batch
from hyla.training.config import config_from_dict
from hyla.training.distributed import Ranks, Replica, own_part, whole
from hyla.training.loop import Trainer


def digest(trainer: Trainer) -> str:
    """Of a rank's weights, all of them."""
    content = b"".join(whole(value).detach().numpy().tobytes() for value in trainer.model.state_dict().values())
    return hashlib.blake2b(content).hexdigest()


def run_job(job: dict) -> dict:
    met = {}
    trainer = None
    try:
        if job.get("config") is None:
            trainer = Trainer.resume(job["path"])
        else:
            trainer = Trainer.start(config_from_dict(job["config"]), job["path"])
        met |= {
            "notes": trainer.notes,
            "begun_at": trainer.step,
            "own": sum(own_part(p).numel() for p in trainer.model.parameters()),
        }
        if job.get("stop_at") is not None and trainer.ranks.rank == job.get("stop_rank", 0):
            update = trainer.update

            def stopping(lr):
                if trainer.step + 1 == job["stop_at"]:
                    trainer.stop(signal.SIGTERM)
                return update(lr)

            trainer.update = stopping
        met["result"] = trainer.run()
    except HylaError as error:
        met |= {"error": type(error).__name__, "message": str(error), "status": error.exit_status}
    if trainer is not None:
        met |= {"step": trainer.step, "weights": digest(trainer)}
    return met


class Constant(Model):
    """Answers every position alike: with a loss of 1 nat where token 0 is right, of 9 where token 1 is."""

    def __init__(self):
        super().__init__()
        rest = 1 - torch.tensor([-1.0, -9.0], dtype=torch.float64).exp().sum()
        self.logits = nn.Parameter(torch.tensor([-1.0, -9.0, rest.log().item()], dtype=torch.float64))

    def forward(self, inputs, *, predict_at=None, keep=None):
        return ModelOutput(self.logits.expand(*inputs.shape, 3))


def unequal_batch() -> Batch:
    """Nine tokens at loss 1 in the first sequence, one token at loss 9 in the second."""
    targets = torch.full((2, 9), -100)
    targets[0], targets[1, 4] = 0, 1
    return Batch(torch.zeros(2, 9, dtype=torch.int64), targets, {})


def unequal_step(job: dict) -> dict:
    """Loss and gradient of one step on a batch whose sequences predict unequally much."""
    batch = unequal_batch()
    trainer = Trainer.start(config_from_dict(job["config"]), job["path"])
    trainer.model = Constant()
    trainer.replica = Replica(trainer.model, trainer.ranks, trainer.config.training.parallel, trainer.device)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), 1.0)
    trainer.next_batch = lambda: batch.rows(trainer.rows)
    before = whole(trainer.model.logits).detach().clone()
    loss, norm = trainer.update(1.0)
    gradient = before - whole(trainer.model.logits).detach()  # of a rate of 1
    return {"loss": loss.item(), "norm": norm.item(), "gradient": gradient.tolist()}


def run_rank(rank: int, size: int, port: int, jobs: list[dict], answers: Path) -> None:
    """One process of a group, given by the environment as `torchrun` does."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    warnings.simplefilter("error")
    ranks, met = Ranks.join(), []
    for job in jobs:
        if "copy" in job:
            ranks.on_first(lambda job=job: shutil.copytree(job["copy"], job["path"]))
        met.append(unequal_step(job) if "unequal" in job else run_job(job))
        answers.write_text(json.dumps(met))
    ranks.leave()


def main(folder: Path) -> int:
    """Forks the ranks of each group in `groups.json`, one group after the other, so that all share one import."""
    for number, group in enumerate(json.loads((folder / "groups.json").read_text())):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(group["ranks"]):
            child = os.fork()
            if child == 0:
                try:
                    run_rank(rank, group["ranks"], port, group["jobs"], folder / f"met-{number}-{rank}.json")
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
