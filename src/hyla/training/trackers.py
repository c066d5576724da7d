"""Adapters that also send metrics elsewhere; the run folder stays the source of truth."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from hyla.errors import MissingExtraError
from hyla.runs import Run
from hyla.training.config import TrainConfig, config_to_dict


def flatten(line: dict[str, Any]) -> dict[str, float]:
    """A line of metrics as flat names, `held_out/r2` and the like."""
    flat = {key: value for key, value in line.items() if key not in ("step", "splits")}
    for split, scores in line.get("splits", {}).items():
        flat |= {f"{split}/{name}": value for name, value in scores.items() if name != "num_samples"}
    return flat


def load_extra(module: str, package: str) -> Any:
    """Import an optional tracker, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, package, f"--training.trackers {package}") from error


def check_trackers(config: TrainConfig) -> None:
    """Import every tracker a run asks for, so that a missing one is met before any work starts."""
    for name in config.training.trackers:
        load_extra("torch.utils.tensorboard" if name == "tensorboard" else name, name)


@contextlib.contextmanager
def open_trackers(config: TrainConfig, folder: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that takes a line of metrics and hands it to every tracker of the run."""
    senders: list[Callable[[dict[str, Any]], None]] = []
    with contextlib.ExitStack() as stack:
        for name in config.training.trackers:
            if name == "tensorboard":
                writer = load_extra("torch.utils.tensorboard", name).SummaryWriter(str(folder.path / "tensorboard"))
                stack.callback(writer.close)

                def send_tensorboard(line: dict[str, Any], writer: Any = writer) -> None:
                    for key, value in flatten(line).items():
                        writer.add_scalar(key, value, line["step"])

                senders.append(send_tensorboard)
            else:  # trackio keeps wandb's interface
                tracker = load_extra(name, name)
                options = {"dir": str(folder.path), "id": folder.name, "resume": "allow"} if name == "wandb" else {}
                tracker.init(project="hyla", name=folder.name, config=config_to_dict(config), **options)
                stack.callback(tracker.finish)

                def send(line: dict[str, Any], tracker: Any = tracker) -> None:
                    tracker.log(flatten(line), step=line["step"])

                senders.append(send)

        def send_all(line: dict[str, Any]) -> None:
            for sender in senders:
                sender(line)

        yield send_all
