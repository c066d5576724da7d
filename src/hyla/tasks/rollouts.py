"""Policies let loose in a grid world: what they reach there, rather than how well they predict demonstrations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hyla.errors import ConfigError, check
from hyla.tasks.base import Draws, Stream
from hyla.tasks.grid import Episodes, GridTask, State, Trajectory

Policy = Callable[[Tensor], Tensor]
"""From rows `[B, input_dim]` of a task's layout to logits `[B, num_steps, actions]`, or of all tokens `[B, T, actions]`."""


def roll_policy(
    policy: Policy,
    task: GridTask,
    episodes: Episodes,
    draws: Draws,
    dtype: torch.dtype = torch.float32,
) -> Trajectory:
    """Play B episodes at once, taking the action with the largest logit at every step.

    At step t the policy reads rows that hold the observations up to t, zeros after them, and its answer at t counts; so a
    causal model sees the history as in training, and a model of single points its present observation. draws: of the
    examples of encoding `fewshot`.
    """
    encoding = task.encode(episodes, draws, dtype)
    shape = (len(episodes.agent), task.num_steps, task.point_dim)
    points_BTI = torch.zeros(shape, dtype=dtype, device=episodes.agent.device)

    def choose(state: State, t: int) -> Tensor:
        if bool(state.done.all()):  # nothing is left to be decided
            return torch.zeros_like(state.agent)
        points_BTI[:, t] = task.observe(episodes, state.agent, state.taken, dtype)
        return _answers(policy, task, task.layout.pack(encoding, points_BTI))[:, t].argmax(-1)

    return task.roll(episodes, choose)


def play(
    policy: Policy,
    task: GridTask,
    split: str,
    num_episodes: int,
    *,
    batch_size: int = 128,
    stream: Stream = "evaluation",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """What a policy reaches in `num_episodes` episodes of a split, those that batches 0, 1, ... of `stream` demonstrate.

    Both tasks: `return`, the mean of the discounted sums of rewards; `demonstrator_return`, that of the demonstrator in the
    same episodes; `actions`, per episode; `num_episodes`. Task `preference`: `relative_return`, the one mean divided by the
    other (NaN where the demonstrator's is 0), and `matched`, the share of episodes with no less than the demonstrator's
    return. Task `goal`: `success`, the share of episodes that reach the goal in time.
    """
    check(num_episodes >= 1, "num_episodes", num_episodes, "at least 1")
    check(batch_size >= 1, "batch_size", batch_size, "at least 1")
    own, shown, steps = [], [], []
    for index in range(-(-num_episodes // batch_size)):
        # whole batches are drawn, since what is drawn depends on their size
        episodes = task.episodes(split, index, batch_size, stream=stream, device=device)
        draws = Draws(task.seed, task.name, split, stream, index, "examples", device=device)
        with torch.no_grad():
            played = roll_policy(policy, task, episodes, draws, dtype)
        own.append(task.returns(played))
        shown.append(task.returns(task.demonstrate(episodes)))
        steps.append(played.last.steps)
    own_N, shown_N, steps_N = (torch.cat(part)[:num_episodes].double() for part in (own, shown, steps))
    found = {"return": own_N.mean().item(), "demonstrator_return": shown_N.mean().item()}
    if task.name == "goal":
        found["success"] = (own_N > 0).double().mean().item()
    else:
        best = found["demonstrator_return"]
        found["relative_return"] = found["return"] / best if best else float("nan")
        # the same objects in another order may differ in the last digits
        found["matched"] = (own_N >= shown_N - 1e-5).double().mean().item()
    return found | {"actions": steps_N.mean().item(), "num_episodes": num_episodes}


def _answers(policy: Policy, task: GridTask, rows: Tensor) -> Tensor:
    """A policy's logits `[B, num_steps, actions]`."""
    logits = policy(rows)
    expected = (len(rows), task.num_steps, task.output_dim)
    if logits.ndim == 3 and logits.shape[1] == task.sequence_length:
        logits = logits[:, task.predict_at]
    if tuple(logits.shape) != expected:
        raise ConfigError(f"the policy answers with shape {tuple(logits.shape)}, and should with {expected}")
    return logits
