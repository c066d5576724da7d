"""Preference grid (P2): imitation of an agent that walks through rooms and picks up what it likes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hyla.configs import check_fractions, check_sizes, check_types
from hyla.errors import check
from hyla.tasks.base import Draws, entropy
from hyla.tasks.encodings import EncodingName, make_encoding
from hyla.tasks.grid import (
    MOVE_NAMES,
    Choose,
    Episodes,
    GridTask,
    State,
    move_table,
    parse_walls,
)
from hyla.tasks.latents import LatentValues, draw_values
from hyla.tasks.support import SupportName, make_support, multi_hot, split_support

WALLS = """\
wwwwwww
w  w  w
w  w  w
ww   ww
w  w  w
w  w  w
wwwwwww"""

NOTHING = 0  # the action that ends an episode; 1 to 4 are the moves

MAX_OBJECTS = 8  # the demonstrator goes through all 2**O sets of them


@dataclass(frozen=True)
class PreferenceConfig:
    """Rooms with num_objects objects; num_hot of num_preferences preferences make a task; which are held out."""

    num_preferences: int = 16
    """Preferences M, each of which gives every feature a value."""
    num_hot: int = 3
    """Most preferences K that make a task: combinations of 1 to K of them."""
    num_features: int = 32
    """Features F; an object has one of them."""
    num_objects: int = 4
    """Objects of an episode."""
    time_limit: int = 8
    """Actions of an episode, at most."""
    discount: float = 0.9
    """What a reward is multiplied with for each step before it."""
    demonstrator: Literal["reference", "optimal"] = "reference"
    """reference: the papers', a stationary policy from time_limit sweeps of value iteration. optimal: the exact optimum
    within the time left."""
    latents: LatentValues = "discrete"
    """Values of the active preferences. khot: 1. discrete: 0.5, 0.6, ..., 1. continuous: between 0.5 and 1."""
    support: SupportName = "random"
    """Which combinations are trained on."""
    held_out_fraction: float = 0.25
    """Share of the combinations held out of training, for supports that do not fix it."""
    validation_fraction: float = 0.0
    """Share of the combinations named by validation_from reserved as split `validation`."""
    validation_from: Literal["train", "held_out"] = "train"
    """Which combinations validation takes its share of; from held_out, the trained ones stay as they are."""
    encoding: EncodingName = "identity"
    """How the task is told to the model."""
    num_examples: int = 50
    """Observations with the demonstrated action, from other episodes of the task, of encoding fewshot."""
    split_seed: int = 0
    """Sets the support, the preferences and the encoding."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        check_sizes(
            self,
            "task",
            {
                "num_preferences": (2, 4096),
                "num_hot": (1, self.num_preferences),
                "num_features": (1, 4096),
                "num_objects": (1, MAX_OBJECTS),
                "time_limit": (1, 1024),
                "num_examples": (1, 65_536),
            },
        )
        check(0 < self.discount <= 1, "task.discount", self.discount, "above 0, at most 1")
        check_fractions(self, "task", "held_out_fraction", "validation_fraction")


class PreferenceGrid(GridTask):
    """Batches of demonstrations in the preference grid; :class:`hyla.tasks.grid.GridTask` has the shapes.

    A task is a latent z in R^M with at most K nonzero entries; an object of feature f is worth `sum_m z_m basis[m, f]` to
    whoever walks onto it, which takes it away. Actions: nothing, which ends the episode; up, right, down, left, which stay
    in place before a wall. Latents: `task [B, M]`, z itself; `kinds [B, O]`, the features; the cells of `objects` and
    `agent`. Splits: `train`; `validation` if reserved; `held_out`: unseen combinations of preferences.

    The reference demonstrator is that of the papers' code: `time_limit` sweeps of value iteration from 0, "nothing" taken
    for staying in place, then at every step the best action of the last sweep; ties go to the lowest action. Values are in
    float32 whatever the dtype of a batch, so that its actions do not depend on it.
    """

    name = "preference"

    def __init__(self, config: PreferenceConfig, seed: int = 0):
        self.config, self.seed = config, seed
        count = config.num_preferences
        self.support = make_support(config.support, count, config.num_hot, config.held_out_fraction, config.split_seed)
        self.combinations = split_support(self.support, config.validation_from, config.validation_fraction)
        self.splits = tuple(self.combinations)
        self.discrete = config.latents != "continuous"
        path = entropy(config.split_seed, "preference", "basis")
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(path)))
        self.basis = torch.from_numpy(rng.standard_normal((count, config.num_features), dtype=np.float32))
        self.walls = parse_walls(WALLS)[None]
        self.free = torch.nonzero(~self.walls.flatten())[:, 0]
        self.num_steps, self.num_kinds, self.discount = config.time_limit, config.num_features, config.discount
        self.action_names = ("nothing", *MOVE_NAMES)
        cells = torch.arange(self.walls.numel())
        self.table = torch.cat([cells[:, None], move_table(self.walls)[0]], -1)  # [C, A]
        # the planner numbers free cells alone
        number_C = torch.full_like(cells, -1).index_copy(0, self.free, torch.arange(len(self.free)))
        self.free_table = number_C[self.table[self.free]]
        width = self.point_dim + len(self.action_names)
        self._finish(
            make_encoding(
                config.encoding, count, config.split_seed, num_examples=config.num_examples, example_dim=width
            )
        )

    def draw_episodes(self, split: str, draws: Draws, batch_size: int, task: Tensor | None = None) -> Episodes:
        device, count = draws.device, self.config.num_objects
        if task is None:
            rows_CK = self._combinations(split, device)
            active_BM = multi_hot(rows_CK[draws.integers(len(rows_CK), batch_size)], self.config.num_preferences)
            task = draw_values(draws, active_BM, self.config.latents)
        free = self._on_device("free", device)
        cells_BO = free[draws.permutations(len(free), batch_size)[:, : count + 1]]
        kinds_BO = draws.integers(self.num_kinds, batch_size, count)
        agent_B = cells_BO[:, -1]
        return Episodes(task, cells_BO[:, :-1], kinds_BO, agent_B, torch.zeros_like(agent_B))

    def values(self, episodes: Episodes) -> Float[Tensor, "batch objects"]:
        """What each object is worth."""
        basis_MF = self._on_device("basis", episodes.task.device).to(episodes.task.dtype)
        return (episodes.task @ basis_MF).gather(1, episodes.kinds)

    def _outcome(self, episodes: Episodes, state: State, action_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        agent_B = self._on_device("table", action_B.device)[state.agent, action_B]
        met_BO = (episodes.objects == agent_B[:, None]) & ~state.taken
        reward_B = torch.where(met_BO, self.values(episodes), 0.0).sum(-1)
        return agent_B, state.taken | met_BO, reward_B, action_B == NOTHING

    def _plan(self, episodes: Episodes) -> Choose:
        """V over sets of objects taken and free cells `[B, 2^O, C]`.

        What an action is worth depends on the cell it leads to alone, U[s, c] = reward of c + discount V[s and c's
        object, c]; then V[s, c] = max of U[s, .] over the cells next to c.
        """
        device, count = episodes.task.device, episodes.objects.shape[1]
        free_C, table_CA = self._on_device("free", device), self._on_device("free_table", device)
        here_BOC = episodes.objects[..., None] == free_C
        bits_O = 2 ** torch.arange(count, device=device)
        bit_BC = (here_BOC * bits_O[:, None]).sum(1)
        values_BC = torch.where(here_BOC, self.values(episodes).float()[..., None], 0.0).sum(1)
        sets_S = torch.arange(2**count, device=device)[:, None]
        with_BSC = sets_S | bit_BC[:, None]
        reward_BSC = torch.where(sets_S == with_BSC, 0.0, values_BC[:, None])
        worth_BSC = torch.zeros_like(reward_BSC)
        optimal, sweeps = self.config.demonstrator == "optimal", []
        for _ in range(self.num_steps):
            after_BSC = reward_BSC + self.discount * worth_BSC.gather(1, with_BSC)
            sweeps.append(after_BSC)
            stay_BSC = torch.zeros_like(after_BSC) if optimal else after_BSC
            moves_BSC4 = after_BSC[..., table_CA[:, 1:]]
            worth_BSC = torch.maximum(stay_BSC, moves_BSC4.amax(-1))
        number_C = torch.zeros(self.walls.numel(), dtype=torch.long, device=device)
        number_C[free_C] = torch.arange(len(free_C), device=device)
        rows_B = torch.arange(len(episodes.agent), device=device)

        def choose(state: State, t: int) -> Tensor:
            after_BSC = sweeps[self.num_steps - 1 - t] if optimal else sweeps[-1]
            set_B = (state.taken * bits_O).sum(-1)
            options_BA = after_BSC[rows_B, set_B].gather(1, table_CA[number_C[state.agent]])
            if optimal:
                options_BA[:, NOTHING] = 0.0
            # argmax of equal values may be any of them
            best_BA = options_BA == options_BA.amax(-1, keepdim=True)
            return (best_BA * torch.arange(5, 0, -1, device=device)).argmax(-1)

        return choose

    def _words(self, episodes: Episodes) -> tuple[list[str], list[str], str]:
        names = [f"feature {kind}" for kind in episodes.kinds[0].tolist()]
        labels = [f"{value:+.2f}" for value in self.values(episodes)[0].tolist()]
        active = [f"{m} ({value:.2g})" for m, value in enumerate(episodes.task[0].tolist()) if value]
        return names, labels, f"Preference{'s' if len(active) > 1 else ''} " + ", ".join(active)

    def _example_episodes(self) -> int:
        # an episode has one action or more, some four on average
        return -(-self.config.num_examples // 2)

    def _combinations(self, split: str, device: torch.device) -> Tensor:
        key = (f"combinations of {split}", device)
        if key not in self._kept:
            self._kept[key] = self.combinations[split].long().to(device)
        return self._kept[key]
