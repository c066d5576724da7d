"""Goal grid (P2): imitation of an agent that walks through a maze to an object and does something with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hyla.configs import check_fractions, check_sizes, check_types
from hyla.errors import ConfigError, check
from hyla.tasks.base import Draws, entropy
from hyla.tasks.encodings import Encoding, FewShot, Identity, make_encoding
from hyla.tasks.grid import (
    MOVE_NAMES,
    UNREACHABLE,
    Choose,
    Episodes,
    GridTask,
    State,
    first_moves,
    move_table,
    random_cells,
    step_counts,
)
from hyla.tasks.support import reserve

GoalSupport = Literal[
    "random", "non_compositional", "without_two_pairs", "within_1_change", "within_2_changes", "within_3_changes"
]

GoalEncoding = Literal["code", "orthogonal", "sentence", "fewshot"]

NUM_QUADRANTS = 4

# One word each, also for the quadrants: "top left" would tell the model that a quadrant it never saw is made of parts that
# it has seen.
QUADRANTS = ("northwest", "northeast", "southwest", "southeast")
INTERACTIONS = ("take", "push", "open", "paint", "wash", "light", "turn", "read", "ring", "hide")
OBJECTS = ("ball", "key", "box", "lamp", "bell", "book", "cup", "coin", "hat", "drum")
MAZES = ("cellar", "garden", "castle", "library", "harbour", "market", "temple", "forest", "station", "museum")
_PATTERN = "go to the OBJECT in the QUADRANT of the MAZE and INTERACTION it".split()
_WORDS = (QUADRANTS, INTERACTIONS, MAZES, OBJECTS)
_PLACES = [_PATTERN.index(word) for word in ("QUADRANT", "INTERACTION", "MAZE", "OBJECT")]

MAX_TRIES = 200  # random draws that may miss the wanted property before it is built in

LOOP_PROBABILITY = 0.1  # of opening a wall that the maze does not need open


@dataclass(frozen=True)
class GoalConfig:
    """Mazes of size x size cells; a task is (quadrant, interaction, maze, object); which of them are held out."""

    size: int = 7
    """Rows and columns of a maze, an odd number."""
    num_interactions: int = 5
    """Things to do with an object, each an action of its own."""
    num_mazes: int = 5
    """Mazes."""
    num_objects: int = 5
    """Kinds of objects."""
    num_distractors: int = 4
    """Objects of other kinds than the goal's, anywhere."""
    min_distance: int = 7
    """Fewest steps from where the agent starts to the goal."""
    time_limit: int | None = None
    """Actions of an episode, at most; by default those of the longest demonstration (48 in the papers' code)."""
    support: GoalSupport = "random"
    """Which tasks are trained on; see :func:`split_tasks`."""
    held_out_fraction: float = 0.25
    """Share of the tasks held out of training, of support random."""
    validation_fraction: float = 0.0
    """Share of the tasks named by validation_from reserved as split `validation`."""
    validation_from: Literal["train", "held_out"] = "train"
    """Which tasks validation takes its share of; from held_out, the trained ones stay as they are."""
    encoding: GoalEncoding = "code"
    """How the task is told to the model. code: the four values, one-hot. orthogonal: those turned by a fixed matrix.
    sentence: words. fewshot: labelled observations of the task."""
    num_examples: int = 50
    """Observations with the demonstrated action, from other episodes of the task, of encoding fewshot."""
    split_seed: int = 0
    """Sets the support, the mazes and the encoding."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        check_sizes(
            self,
            "task",
            {
                "size": (5, 25),
                "num_interactions": (1, len(INTERACTIONS)),
                "num_mazes": (1, len(MAZES)),
                "num_objects": (2, len(OBJECTS)),
                "num_distractors": (0, 16),
                "min_distance": (1, 1024),
                "num_examples": (1, 65_536),
            },
        )
        check(self.size % 2 == 1, "task.size", self.size, "an odd number: mazes are made of cells and walls in turn")
        if self.time_limit is not None:
            check(1 <= self.time_limit <= 1024, "task.time_limit", self.time_limit, "from 1 to 1,024")
        # the corners are free, and never nearer to each other than this
        far = 2 * (self.size - 1)
        allowed = f"at most {far} in mazes of size {self.size}, the distance of opposite corners"
        check(self.min_distance <= far, "task.min_distance", self.min_distance, allowed)
        check_fractions(self, "task", "held_out_fraction", "validation_fraction")

    @property
    def factors(self) -> tuple[int, int, int, int]:
        """How many quadrants, interactions, mazes and objects there are."""
        return NUM_QUADRANTS, self.num_interactions, self.num_mazes, self.num_objects


def split_tasks(config: GoalConfig) -> dict[str, Int[Tensor, "tasks 4"]]:
    """The tasks (quadrant, interaction, maze, object) of every split, in random order, by `split_seed` alone.

    - `random`: every value of every factor occurs in training; `held_out_fraction` of all are held out.
    - `non_compositional`: those of the last quadrant are held out.
    - `without_two_pairs`: those that ask for the first interaction with the first object, or the last with the last, are
      held out (`random_v2` of the papers' code).
    - `within_1_change` (2, 3): trained on are those that differ from (0, 0, 0, 0) in at most so many factors (`1_hot`).
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy(config.split_seed, "goal", "split"))))
    codes = np.array(list(product(*map(range, config.factors))), dtype=np.int64)
    if config.support == "random":
        chosen = _random_tasks(config, codes, rng)
    elif config.support == "non_compositional":
        chosen = codes[:, 0] < NUM_QUADRANTS - 1
    elif config.support == "without_two_pairs":
        last = (config.num_interactions - 1, config.num_objects - 1)
        chosen = (codes[:, [1, 3]] != 0).any(-1) & (codes[:, [1, 3]] != last).any(-1)
    else:
        chosen = (codes > 0).sum(-1) <= int(config.support.removeprefix("within_")[0])
    parts = {
        name: torch.from_numpy(codes[rng.permutation(np.flatnonzero(rows))])
        for name, rows in (("train", chosen), ("held_out", ~chosen))
    }
    fixed = config.support != "random"
    reason = f"of {len(codes)} tasks it would hold out {len(parts['held_out'])}, leaving an empty split"
    check(not fixed or min(map(len, parts.values())) > 0, "task.support", config.support, reason)
    return reserve(parts, config.validation_from, config.validation_fraction)


def _random_tasks(config: GoalConfig, codes: np.ndarray, rng: np.random.Generator) -> Bool[np.ndarray, " tasks"]:
    """Which tasks are trained on: uniform among the choices in which every value occurs, if one of MAX_TRIES does."""
    total, held_out = len(codes), int(len(codes) * config.held_out_fraction)
    count, needed = total - held_out, max(config.factors)
    reason = f"of {total} tasks none would be held out, leaving an empty split"
    check(held_out >= 1 or config.held_out_fraction == 0, "task.held_out_fraction", config.held_out_fraction, reason)
    largest = int(1000 * (total - needed) / total) / 1000
    allowed = f"{needed} tasks or more, for every value to occur in training, and {count} are left; at most {largest:g}"
    check(count >= needed, "task.held_out_fraction", config.held_out_fraction, allowed)
    for _ in range(MAX_TRIES):
        chosen = np.zeros(total, bool)
        chosen[rng.choice(total, count, replace=False)] = True
        if all(len(np.unique(values)) == size for values, size in zip(codes[chosen].T, config.factors, strict=True)):
            return chosen
    # `needed` tasks that have every value of every factor, and random others
    covering = np.stack([rng.permutation(needed) % size for size in config.factors])
    chosen = np.zeros(total, bool)
    chosen[np.ravel_multi_index(tuple(covering), config.factors)] = True
    others = rng.permutation(np.flatnonzero(~chosen))[: count - chosen.sum()]
    chosen[others] = True
    return chosen


def random_mazes(size: int, count: int, seed: int) -> Bool[Tensor, "mazes size size"]:
    """Different random mazes; True is a wall.

    Cells of even row and column are free, and a random spanning tree of them opens the walls between (Kruskal's algorithm,
    walls in random order); each other such wall is opened with probability 0.1, so that some mazes have loops.
    """
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy(seed, "goal", "mazes", size))))
    mazes: list[np.ndarray] = []
    while len(mazes) < count:  # of size 5 there are 192 trees alone, and at most 10 mazes are asked for
        maze = _random_maze(size, rng)
        if not any(np.array_equal(maze, other) for other in mazes):
            mazes.append(maze)
    return torch.from_numpy(np.stack(mazes))


def _random_maze(size: int, rng: np.random.Generator) -> np.ndarray:
    walls = np.ones((size, size), bool)
    walls[::2, ::2] = False
    between = [(row, column) for row in range(size) for column in range(size) if (row + column) % 2]
    part = {(row, column): (row, column) for row in range(0, size, 2) for column in range(0, size, 2)}

    def root(cell: tuple[int, int]) -> tuple[int, int]:
        while part[cell] != cell:
            cell = part[cell]
        return cell

    for at in rng.permutation(len(between)).tolist():
        row, column = between[at]
        down = row % 2
        one, other = root((row - down, column - (1 - down))), root((row + down, column + (1 - down)))
        if one != other or rng.random() < LOOP_PROBABILITY:
            part[one] = other
            walls[row, column] = False
    return walls


class Sentence(Encoding):
    """A task as words: `go to the ball in the northeast of the castle and push it`, the words as ids of a table.

    The papers' code feeds the 17 ids that a tokenizer of 32,000 pieces gives for its sentence to the model as numbers; here
    they are ids, one a word, to be looked up in a table of embeddings (`vocab_size`).
    """

    shape = (len(_PATTERN),)

    def __init__(self, factors: tuple[int, int, int, int]):
        self.factors = factors
        self.vocabulary = (
            *("go", "to", "the", "in", "of", "and", "it"),
            *(name for names, size in zip(_WORDS, factors, strict=True) for name in names[:size]),
        )
        self.vocab_size = len(self.vocabulary)
        number = {word: at for at, word in enumerate(self.vocabulary)}
        self._pattern = torch.tensor([number.get(word, 0) for word in _PATTERN])
        self._first = torch.tensor([number[names[0]] for names in _WORDS])

    def encode(self, latents: Float[Tensor, "*batch numbers"]) -> Int[Tensor, "*batch words"]:
        codes = task_codes(latents, self.factors)
        ids = self._pattern.to(latents.device).expand(*codes.shape[:-1], -1).clone()
        ids[..., _PLACES] = codes + self._first.to(latents.device)
        return ids

    def decode(self, encoded: Int[Tensor, "*batch words"]) -> Float[Tensor, "*batch numbers"]:
        return one_hot_tasks(encoded[..., _PLACES] - self._first.to(encoded.device), self.factors)

    def words(self, ids: Int[Tensor, " words"]) -> str:
        """The sentence of one task."""
        return " ".join(self.vocabulary[at] for at in ids.tolist())


def one_hot_tasks(
    codes: Int[Tensor, "*batch 4"], factors: tuple[int, int, int, int]
) -> Float[Tensor, "*batch numbers"]:
    """Each of the four values one-hot, one after the other."""
    parts = [F.one_hot(code, size) for code, size in zip(codes.unbind(-1), factors, strict=True)]
    return torch.cat(parts, -1).float()


def task_codes(tasks: Float[Tensor, "*batch numbers"], factors: tuple[int, int, int, int]) -> Int[Tensor, "*batch 4"]:
    """The inverse of :func:`one_hot_tasks`."""
    return torch.stack([part.argmax(-1) for part in tasks.split(list(factors), -1)], -1)


class GoalGrid(GridTask):
    """Batches of demonstrations in the goal grid; :class:`hyla.tasks.grid.GridTask` has the shapes.

    A task (quadrant, interaction, maze, object): in that maze, walk to the object of that kind, which lies in that quadrant
    (the middle row and column belong to the north and the west), and do that with it, which ends the episode with a reward
    of 1. Actions: up, right, down, left, which stay in place before a wall or the edge; then the interactions, which do
    nothing anywhere else or if another one is asked for. The demonstrator walks a shortest path, of several moves the
    lowest. The goal, its distractors and the agent start in different cells; the agent walks across objects.

    Latents: `task [B, M]`, the four values one-hot; `code [B, 4]`, the values; `objects [B, O]`, the cells of the goal and
    then of the distractors; `kinds [B, O]`; `agent`, `maze`. Splits: `train`; `validation` if reserved; `held_out`.
    """

    name = "goal"
    discrete = True
    discount = 1.0

    def __init__(self, config: GoalConfig, seed: int = 0, mazes: Bool[Tensor, "mazes size size"] | None = None):
        """mazes: given ones, True is a wall, in place of the random ones."""
        self.config, self.seed = config, seed
        self.tasks = split_tasks(config)
        self.splits = tuple(self.tasks)
        self.walls = random_mazes(config.size, config.num_mazes, config.split_seed) if mazes is None else mazes
        shape = (config.num_mazes, config.size, config.size)
        check(tuple(self.walls.shape) == shape, "mazes", tuple(self.walls.shape), f"must have shape {shape}")
        self.table = move_table(self.walls)
        self.distances = step_counts(self.table)
        self.paths = first_moves(self.table, self.distances)
        self.free = ~self.walls.flatten(1)
        reached_ZCC = self.distances < UNREACHABLE
        self.starts = reached_ZCC & (self.distances >= config.min_distance)  # [Z, start, goal]
        self.goals = self._goal_cells()
        longest = int(torch.where(self.starts, self.distances, 0).max()) + 1
        self.num_steps = longest if config.time_limit is None else config.time_limit
        allowed = f"the longest demonstration has {longest} actions; from {longest}"
        check(self.num_steps >= longest, "task.time_limit", config.time_limit, allowed)
        self.num_kinds = config.num_objects
        self.action_names = (*MOVE_NAMES, *INTERACTIONS[: config.num_interactions])
        self._finish(self._make_encoding())

    def _goal_cells(self) -> Bool[Tensor, "mazes quadrants cells"]:
        """Cells of each quadrant that the agent can start far enough from."""
        config, half = self.config, (self.config.size + 1) // 2
        at = torch.arange(config.size**2)
        quadrant_C = (at // config.size >= half) * 2 + (at % config.size >= half)
        possible_ZC = self.free & self.starts.any(1)
        goals_ZQC = possible_ZC[:, None] & (quadrant_C == torch.arange(NUM_QUADRANTS)[:, None])
        everywhere = bool(goals_ZQC.any(-1).all())
        reason = "some quadrant of a maze has no cell that far from any other; choose a smaller one"
        check(everywhere, "task.min_distance", config.min_distance, reason)
        fewest = int(self.free.sum(-1).min()) - 2
        allowed = f"at most {fewest}: a maze has {fewest + 2} free cells"
        check(config.num_distractors <= fewest, "task.num_distractors", config.num_distractors, allowed)
        return goals_ZQC

    def _make_encoding(self) -> Encoding:
        config, size = self.config, sum(self.config.factors)
        if config.encoding == "code":
            return Identity(size)
        if config.encoding == "orthogonal":
            return make_encoding("orthogonal", size, config.split_seed)
        if config.encoding == "sentence":
            return Sentence(config.factors)
        return FewShot(config.num_examples, self.point_dim + len(self.action_names))

    def draw_episodes(self, split: str, draws: Draws, batch_size: int, task: Tensor | None = None) -> Episodes:
        config, device = self.config, draws.device
        if task is None:
            codes_N4 = self._tasks(split, device)
            task = one_hot_tasks(codes_N4[draws.integers(len(codes_N4), batch_size)], config.factors)
        quadrant_B, _, maze_B, kind_B = task_codes(task, config.factors).unbind(-1)
        goal_B1 = random_cells(self._on_device("goals", device)[maze_B, quadrant_B], draws, 1)
        # mazes have no directions: the starts of a goal are the goals of a start
        starts_BC = self._on_device("starts", device)[maze_B, goal_B1[:, 0]]
        agent_B1 = random_cells(starts_BC, draws, 1)
        free_BC = self._on_device("free", device)[maze_B].scatter(1, torch.cat([goal_B1, agent_B1], 1), False)
        objects_BO = torch.cat([goal_B1, random_cells(free_BC, draws, config.num_distractors)], 1)
        others_BO = draws.integers(config.num_objects - 1, batch_size, config.num_distractors)
        others_BO = others_BO + (others_BO >= kind_B[:, None])  # any kind but the goal's
        return Episodes(task, objects_BO, torch.cat([kind_B[:, None], others_BO], 1), agent_B1[:, 0], maze_B)

    def _outcome(self, episodes: Episodes, state: State, action_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moves = len(MOVE_NAMES)
        wanted_B = task_codes(episodes.task, self.config.factors)[:, 1] + moves
        there_B = state.agent == episodes.objects[:, 0]
        reached_B = there_B & (action_B == wanted_B)
        moved_B = self._on_device("table", action_B.device)[episodes.maze, state.agent, action_B.clamp(max=moves - 1)]
        agent_B = torch.where(action_B < moves, moved_B, state.agent)
        return agent_B, state.taken, reached_B.to(episodes.task.dtype), reached_B

    def _plan(self, episodes: Episodes) -> Choose:
        goal_B = episodes.objects[:, 0]
        interaction_B = task_codes(episodes.task, self.config.factors)[:, 1] + len(MOVE_NAMES)
        paths = self._on_device("paths", goal_B.device)

        def choose(state: State, t: int) -> Tensor:
            move_B = paths[episodes.maze, state.agent, goal_B]
            return torch.where(state.agent == goal_B, interaction_B, move_B)

        return choose

    def _latents(self, episodes: Episodes) -> dict[str, Tensor]:
        return super()._latents(episodes) | {"code": task_codes(episodes.task, self.config.factors)}

    def _example_episodes(self) -> int:
        return -(-self.config.num_examples // (self.config.min_distance + 1))  # no episode has fewer actions

    def _words(self, episodes: Episodes) -> tuple[list[str], list[str], str]:
        sentence = Sentence(self.config.factors)
        names = [OBJECTS[kind] for kind in episodes.kinds[0].tolist()]
        labels = ["goal"] + [""] * (len(names) - 1)
        return names, labels, sentence.words(sentence.encode(episodes.task[0])).capitalize()

    def _tasks(self, split: str, device: torch.device) -> Tensor:
        if split not in self.tasks:
            raise ConfigError(f"split = {split!r} is not possible: task goal has {', '.join(self.splits)}")
        key = (f"tasks of {split}", device)
        if key not in self._kept:
            self._kept[key] = self.tasks[split].to(device)
        return self._kept[key]
