"""What the two grid worlds (P2) share: walls, moves, shortest paths, observations, episodes and the imitation of them.

Cells are numbered row by row, cell = row * size + column. Everything runs on whole batches of episodes, on any device, and
there is one `step` for each world: demonstrations, rollouts and the Gymnasium environment all go through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hyla.layout import InputLayout
from hyla.tasks.base import Batch, Draws, Stream, ToldTask, check_split
from hyla.tasks.encodings import Encoding, FewShot

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
"""Rows and columns that up, right, down and left go."""

MOVE_NAMES = ("up", "right", "down", "left")

PADDING = -1  # target of a step after the end of an episode

RMS_EPS = 1e-6

UNREACHABLE = 2**15  # steps to a cell that no path leads to


def parse_walls(text: str) -> Bool[Tensor, "rows columns"]:
    """Walls of a maze drawn in text, one line a row: `w` is a wall, a space is free."""
    return torch.tensor([[character == "w" for character in line] for line in text.splitlines()])


def move_table(walls_SS: Bool[Tensor, "*mazes rows columns"]) -> Int[Tensor, "*mazes cells 4"]:
    """The cell that each move leads to from each cell; it stays where an edge or a wall is in the way."""
    rows, columns = walls_SS.shape[-2:]
    row_SS, column_SS = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    here_SS = row_SS * columns + column_SS
    tables = []
    for down, right in MOVES:
        to_row, to_column = (row_SS + down).clamp(0, rows - 1), (column_SS + right).clamp(0, columns - 1)
        tables.append(torch.where(walls_SS[..., to_row, to_column], here_SS, to_row * columns + to_column))
    return torch.stack(tables, -1).flatten(-3, -2)


def step_counts(moves_CA: Int[Tensor, "*mazes cells 4"]) -> Int[Tensor, "*mazes cells cells"]:
    """The fewest moves from each cell (first index) to each other, `UNREACHABLE` where none lead there."""
    cells = moves_CA.shape[-2]
    counts_CC = torch.full((*moves_CA.shape[:-1], cells), UNREACHABLE)
    counts_CC.diagonal(dim1=-2, dim2=-1).fill_(0)
    for _ in range(cells):
        # one more move first: the counts of the cells it leads to, plus 1
        after_CAC = counts_CC.gather(-2, moves_CA.flatten(-2)[..., None].expand(*moves_CA.shape[:-2], -1, cells))
        shorter_CC = torch.minimum(counts_CC, after_CAC.unflatten(-2, (cells, 4)).amin(-2) + 1)
        if torch.equal(shorter_CC, counts_CC):
            break
        counts_CC = shorter_CC
    return counts_CC.clamp(max=UNREACHABLE)


def first_moves(
    moves_CA: Int[Tensor, "*mazes cells 4"], counts_CC: Int[Tensor, "*mazes cells cells"]
) -> Int[Tensor, "*mazes cells cells"]:
    """The move that begins a shortest path from each cell (first index) to each other, the lowest if several do."""
    cells = moves_CA.shape[-2]
    after_CAC = counts_CC.gather(-2, moves_CA.flatten(-2)[..., None].expand(*moves_CA.shape[:-2], -1, cells))
    # argmax of equal values may be any of them; of these, all different, it is the lowest move
    nearer_CAC = after_CAC.unflatten(-2, (cells, 4)) < counts_CC[..., None, :]
    return (nearer_CAC * torch.tensor([4, 3, 2, 1])[:, None]).argmax(-2)


def rms_normalised(values: Float[Tensor, "*batch numbers"]) -> Float[Tensor, "*batch numbers"]:
    """Rows divided by the root of their mean square plus 1e-6."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + RMS_EPS)


class Episodes(NamedTuple):
    """What is fixed before the first step. `task [B, M]`: the latent. `objects [B, O]`: their cells. `kinds [B, O]`: what
    they are. `agent [B]`: the cell it starts from. `maze [B]`: the number of the maze."""

    task: Tensor
    objects: Tensor
    kinds: Tensor
    agent: Tensor
    maze: Tensor

    def rows(self, which: Tensor) -> Episodes:
        """Some of the episodes."""
        return Episodes(*(part[which] for part in self))


class State(NamedTuple):
    """Where B episodes are. `agent [B]`: its cell. `taken [B, O]`: objects picked up. `steps [B]`: actions so far.
    `ended [B]`: by an action. `out_of_time [B]`: by the time limit."""

    agent: Tensor
    taken: Tensor
    steps: Tensor
    ended: Tensor
    out_of_time: Tensor

    @property
    def done(self) -> Tensor:
        return self.ended | self.out_of_time


class Trajectory(NamedTuple):
    """B episodes of up to T actions. `actions [B, T]`: `PADDING` after the end. `rewards [B, T]`: what each action brought.
    `agent [B, T]`, `taken [B, T, O]`: before each action. `last`: the state after all of them."""

    actions: Tensor
    rewards: Tensor
    agent: Tensor
    taken: Tensor
    last: State


Choose = Callable[[State, int], Tensor]
"""Actions `[B]` from the state before step t (from 0)."""


class GridTask(ToldTask, ABC):
    """Imitation of demonstrations in a grid world; the two tasks below fill in the world.

    Inputs: rows of `layout`, an encoding of the task, then the observation before each of `num_steps` actions. Targets
    `[B, num_steps]`: the demonstrated actions, -1 after the end of an episode. Latents: `task [B, M]` and the rest of
    :class:`Episodes`. Scores: `accuracy`, the share of an episode's actions that are right; `episode_accuracy`, 1 where
    all of them are; `loss`.

    An observation has, for every cell, one number for each kind of object, one for the agent and one for a wall, each 0 or
    1; flattened (cell by cell) and divided by the root of its mean square.
    """

    name: str
    headline = "accuracy"
    config: Any
    seed: int
    splits: tuple[str, ...]
    discrete: bool
    encoding: Encoding
    num_steps: int
    """Actions of an episode, at most."""
    num_kinds: int
    action_names: tuple[str, ...]
    walls: Bool[Tensor, "mazes size size"]
    discount: float

    def _finish(self, encoding: Encoding) -> None:
        """The attributes that follow from those of the world."""
        self.encoding = encoding
        self.layout = InputLayout(encoding.shape, self.num_steps, self.point_dim, encoding.vocab_size)
        self.output_dim = len(self.action_names)
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    @property
    def point_dim(self) -> int:
        """Numbers of an observation."""
        return self.walls[0].numel() * (self.num_kinds + 2)

    # --- the world, filled in by each task ---

    @abstractmethod
    def draw_episodes(self, split: str, draws: Draws, batch_size: int, task: Tensor | None = None) -> Episodes:
        """New episodes of a split, or of given tasks `[B, M]`, on the device of `draws`."""

    @abstractmethod
    def _plan(self, episodes: Episodes) -> Choose:
        """What the demonstrator does."""

    @abstractmethod
    def _outcome(self, episodes: Episodes, state: State, action_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(agent, taken, reward, ended) after an action, whatever the time."""

    def scene(self, episodes: Episodes) -> dict[str, Any]:
        """The first of some episodes as plain values, to be drawn: `walls`, rows of booleans; `objects`, their (row,
        column); for each object a number (`kinds`), its name (`kind_names`) and what is special about it (`labels`);
        `title`, the task in words."""
        kinds = episodes.kinds[0].tolist()
        names, labels, title = self._words(episodes)
        return {
            "walls": self.walls[int(episodes.maze[0])].tolist(),
            "objects": [divmod(cell, self.walls.shape[-1]) for cell in episodes.objects[0].tolist()],
            "kinds": kinds,
            "kind_names": names,
            "labels": labels,
            "title": title,
        }

    @abstractmethod
    def _words(self, episodes: Episodes) -> tuple[list[str], list[str], str]:
        """The names of the first episode's objects, what is special about each, and its task."""

    @abstractmethod
    def _example_episodes(self) -> int:
        """Episodes to draw for the examples of `fewshot`."""

    # --- what follows from it ---

    def start(self, episodes: Episodes) -> State:
        """The state before the first action."""
        no_B = torch.zeros_like(episodes.agent, dtype=torch.bool)
        taken_BO = torch.zeros_like(episodes.objects, dtype=torch.bool)
        return State(episodes.agent, taken_BO, torch.zeros_like(episodes.agent), no_B, no_B)

    def step(self, episodes: Episodes, state: State, action_B: Int[Tensor, " batch"]) -> tuple[State, Tensor]:
        """(the next state, rewards `[B]`) after an action of each episode; those that are done stay as they are."""
        agent_B, taken_BO, reward_B, ended_B = self._outcome(episodes, state, action_B)
        done_B = state.done
        steps_B = torch.where(done_B, state.steps, state.steps + 1)
        following = State(
            torch.where(done_B, state.agent, agent_B),
            torch.where(done_B[:, None], state.taken, taken_BO),
            steps_B,
            torch.where(done_B, state.ended, ended_B),
            torch.where(done_B, state.out_of_time, ~ended_B & (steps_B >= self.num_steps)),
        )
        return following, torch.where(done_B, 0.0, reward_B)

    def roll(self, episodes: Episodes, choose: Choose) -> Trajectory:
        """The episodes under a policy, up to the time limit."""
        state, parts = self.start(episodes), []
        for t in range(self.num_steps):
            action_B = choose(state, t)
            following, reward_B = self.step(episodes, state, action_B)
            parts.append((torch.where(state.done, PADDING, action_B), reward_B, state.agent, state.taken))
            state = following
        actions, rewards, agent, taken = (torch.stack(part, 1) for part in zip(*parts, strict=True))
        return Trajectory(actions, rewards, agent, taken, state)

    def demonstrate(self, episodes: Episodes) -> Trajectory:
        """The demonstrator's actions."""
        return self.roll(episodes, self._plan(episodes))

    def replay(self, episodes: Episodes, actions_BT: Int[Tensor, "batch steps"]) -> Trajectory:
        """The episodes under given actions; those after the end, such as `PADDING`, do nothing."""
        return self.roll(episodes, lambda state, t: actions_BT[:, t].clamp(min=0))

    def returns(self, trajectory: Trajectory) -> Float[Tensor, " batch"]:
        """Sums of rewards, each discounted by the steps before it."""
        rewards_BT = trajectory.rewards
        return rewards_BT @ self.discount ** torch.arange(rewards_BT.shape[1], device=rewards_BT.device)

    def observe(
        self,
        episodes: Episodes,
        agent: Int[Tensor, "*batch"],
        taken: Bool[Tensor, "*batch objects"],
        dtype: torch.dtype = torch.float32,
    ) -> Float[Tensor, "*batch numbers"]:
        """Normalised observations `[B, point_dim]` (`[B, T, point_dim]`) of agents `[B]` (`[B, T]`)."""
        return rms_normalised(self.raw_observations(episodes, agent, taken, dtype).flatten(-3))

    def raw_observations(
        self, episodes: Episodes, agent: Tensor, taken: Tensor, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*batch size size channels"]:
        """Observations before they are normalised: kinds of objects, the agent, walls."""
        size, channels = self.walls.shape[-1], self.num_kinds + 2
        walls = self._on_device("walls", agent.device)[episodes.maze]
        walls, objects, kinds = (
            part.view(len(agent), *[1] * (agent.ndim - 1), *part.shape[1:])
            for part in (walls, episodes.objects, episodes.kinds)
        )
        seen = torch.zeros(*agent.shape, size * size * channels, dtype=dtype, device=agent.device)
        places = (objects * channels + kinds).expand(taken.shape)
        seen.scatter_(-1, places, (~taken).to(dtype))
        seen.scatter_(-1, (agent * channels + self.num_kinds)[..., None], 1.0)
        seen = seen.unflatten(-1, (size, size, channels))
        seen[..., -1] = walls.to(dtype).expand(seen.shape[:-1])
        return seen

    def encode(self, episodes: Episodes, draws: Draws, dtype: torch.dtype = torch.float32) -> Tensor:
        """The encoding of each episode's task, `[B, *encoding.shape]`; the examples of `fewshot` come from `draws`."""
        if not isinstance(self.encoding, FewShot):
            return self.encoding.encode(episodes.task.to(dtype))
        batch_size, (wanted, _) = len(episodes.agent), self.encoding.shape
        repeats = self._example_episodes()
        others = self.draw_episodes("", draws, batch_size * repeats, episodes.task.repeat_interleave(repeats, 0))
        shown = self.demonstrate(others)
        agent, taken, actions = (
            part.unflatten(0, (batch_size, repeats)).flatten(1, 2) for part in (shown.agent, shown.taken, shown.actions)
        )
        # real steps first, in random order; where there are too few, they are gone through again
        real_BX = actions != PADDING
        keys_BX = draws.uniform(*actions.shape, dtype=torch.float64) + (~real_BX).double()
        turns_X = torch.arange(wanted, device=actions.device)
        chosen_BN = keys_BX.argsort(-1).gather(1, turns_X % real_BX.sum(-1, keepdim=True))
        # step -> episode, whose objects the observation shows
        episode_B1 = torch.arange(batch_size, device=actions.device)[:, None] * repeats
        flat = (episode_B1 + chosen_BN // self.num_steps).flatten()
        agent_N = agent.gather(1, chosen_BN).flatten()
        taken_NO = taken.gather(1, chosen_BN[..., None].expand(-1, -1, taken.shape[-1])).flatten(0, 1)
        points = self.observe(others.rows(flat), agent_N, taken_NO, dtype).unflatten(0, (batch_size, wanted))
        answers = F.one_hot(actions.gather(1, chosen_BN), len(self.action_names)).to(dtype)
        return self.encoding.encode(torch.cat([points, answers], -1))

    def batch(
        self,
        split: str,
        index: int,
        batch_size: int,
        *,
        stream: Stream = "training",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        path = (self.seed, self.name, split, stream, index)
        episodes = self.episodes(split, index, batch_size, stream=stream, device=device)
        shown = self.demonstrate(episodes)
        points_BTI = self.observe(episodes, shown.agent, shown.taken, dtype)
        encoding = self.encode(episodes, Draws(*path, "examples", device=device), dtype)
        latents = self._latents(episodes)
        return Batch(self.layout.pack(encoding, points_BTI), shown.actions, latents)

    def episodes(
        self,
        split: str,
        index: int,
        batch_size: int,
        *,
        stream: Stream = "training",
        device: torch.device | str = "cpu",
    ) -> Episodes:
        """The episodes of batch number `index` of a split."""
        check_split(self, split)  # type: ignore[arg-type]  # the subclasses are tasks
        return self.draw_episodes(split, Draws(self.seed, self.name, split, stream, index, device=device), batch_size)

    def episodes_of(self, latents: Mapping[str, Tensor]) -> Episodes:
        """The episodes of a batch, from its latents."""
        return Episodes(*(latents[name] for name in Episodes._fields))

    def _latents(self, episodes: Episodes) -> dict[str, Tensor]:
        return dict(episodes._asdict())

    def loss(self, predictions: Float[Tensor, "batch steps actions"], batch: Batch) -> Float[Tensor, ""]:
        """Cross-entropy averaged over the actions of all episodes."""
        return F.cross_entropy(predictions.flatten(0, 1), batch.targets.flatten(), ignore_index=PADDING)

    def weights(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Actions of each episode."""
        return (batch.targets != PADDING).sum(-1)

    def scores(self, predictions: Float[Tensor, "batch steps actions"], batch: Batch) -> dict[str, Tensor]:
        """`accuracy`, `episode_accuracy` and `loss` of each episode, `[B]`."""
        real_BT = batch.targets != PADDING
        right_BT = (predictions.argmax(-1) == batch.targets) & real_BT
        loss_BT = F.cross_entropy(predictions.movedim(-1, 1), batch.targets, ignore_index=PADDING, reduction="none")
        count_B = real_BT.sum(-1)  # never 0: every episode has a first action
        right_B = right_BT.sum(-1)
        return {
            "accuracy": right_B.to(loss_BT.dtype) / count_B,
            "episode_accuracy": (right_B == count_B).to(loss_BT.dtype),
            "loss": loss_BT.sum(-1) / count_B,
        }

    def _on_device(self, name: str, device: torch.device) -> Tensor:
        """A table of the world, by the name of its attribute, on a device."""
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = getattr(self, name).to(device)
        return self._kept[key]


def random_cells(allowed_BC: Bool[Tensor, "batch cells"], draws: Draws, count: int) -> Int[Tensor, "batch count"]:
    """Different random cells of each row's allowed ones, of which there must be `count`."""
    keys_BC = draws.uniform(*allowed_BC.shape, dtype=torch.float64)
    return torch.where(allowed_BC, keys_BC, -1.0).topk(count, -1).indices
