"""The grid worlds as Gymnasium environments: `gymnasium.make("hyla.environments:hyla/Goal-v0")`.

An environment is a batch of one of :mod:`hyla.tasks.grid`: the same step, observations and episodes. Needs `gymnasium`
(`pip install 'hyla[gym]'`), and drawing needs `matplotlib`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hyla.errors import ConfigError, MissingExtraError, check
from hyla.report import episodes as pictures
from hyla.tasks.base import Draws, check_split
from hyla.tasks.goal_grid import GoalConfig, GoalGrid, one_hot_tasks
from hyla.tasks.grid import Episodes, GridTask, State
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid

try:
    import gymnasium
    from gymnasium import spaces
except ImportError:
    raise MissingExtraError("gymnasium", "gym", "hyla.environments") from None


class GridEnv(gymnasium.Env):
    """A grid world as a Gymnasium environment.

    Observations are dicts: `task`, the encoding of the task, and `observation`, normalised, `[point_dim]`. Actions are
    numbers below `len(task.action_names)`. An episode is terminated by action nothing (`preference`) or at the goal
    (`goal`), and truncated at the time limit. `info` holds `episode`, the latents as lists.

    reset: `seed`, as in any environment; `options={"task": z}` sets the task: M numbers, or the four of a goal.
    render_mode: `rgb_array`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self, task: GridTask, split: str = "train", render_mode: Literal["rgb_array"] | None = None, pixels: int = 480
    ):
        """split: where tasks are drawn from. pixels: width and height of a picture."""
        check_split(task, split)  # type: ignore[arg-type]
        modes = self.metadata["render_modes"]
        check(render_mode is None or render_mode in modes, "render_mode", render_mode, f"None or {', '.join(modes)}")
        check(64 <= pixels <= 4096, "pixels", pixels, "from 64 to 4,096")
        self.task, self.split, self.render_mode, self.pixels = task, split, render_mode, pixels
        largest = float(np.sqrt(task.point_dim))  # reached if only one number of an observation is not 0
        observation = spaces.Box(0.0, largest, (task.point_dim,), np.float32)
        layout = task.layout
        if layout.vocab_size is not None:
            encoding = spaces.MultiDiscrete(np.full(layout.encoding_shape, layout.vocab_size))
        else:
            # beyond what any encoding of latents in [0, 1] reaches; wrappers and checks ask for finite bounds
            limit = largest + 4 * layout.encoding_shape[-1]
            encoding = spaces.Box(-limit, limit, layout.encoding_shape, np.float32)
        self.observation_space = spaces.Dict({"task": encoding, "observation": observation})
        self.action_space = spaces.Discrete(len(task.action_names))
        self._episodes: Episodes | None = None
        self._state: State | None = None
        self._trace: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        given = dict(options or {})
        wanted = given.pop("task", None)
        check(not given, "options", sorted(given), "the one option is 'task'")
        number = int(self.np_random.integers(2**62))
        path = (number, self.task.name, self.split, "environment")
        latent = None if wanted is None else self._latent(wanted)
        self._episodes = self.task.draw_episodes(self.split, Draws(*path), 1, latent)
        self._state = self.task.start(self._episodes)
        self._encoding = self._numbers(self.task.encode(self._episodes, Draws(*path, "examples"))[0], "task")
        self._trace = [int(self._state.agent)]
        return self._observation(), self._info()

    def step(self, action: int | np.integer) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        if self._episodes is None or self._state is None:
            raise gymnasium.error.ResetNeeded("reset the environment before its first step")
        check(self.action_space.contains(action), "action", action, f"from 0 to {len(self.task.action_names) - 1}")
        state, reward = self.task.step(self._episodes, self._state, torch.tensor([int(action)]))
        self._state = state
        self._trace.append(int(state.agent))
        return self._observation(), float(reward), bool(state.ended), bool(state.out_of_time), self._info()

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """The present state, `[pixels, pixels, 3]` from 0 to 255, with the path so far."""
        if self.render_mode is None:
            return None
        if self._episodes is None or self._state is None:
            raise gymnasium.error.ResetNeeded("reset the environment before drawing it")
        scene = pictures.Scene(**self.task.scene(self._episodes))
        size = self.task.walls.shape[-1]
        agent = [divmod(cell, size) for cell in self._trace]
        return pictures.frame_pixels(scene, agent, self._state.taken[0].tolist(), self.pixels)

    def _observation(self) -> dict[str, np.ndarray]:
        assert self._episodes is not None
        assert self._state is not None
        seen = self.task.observe(self._episodes, self._state.agent, self._state.taken)[0]
        return {"task": self._encoding.copy(), "observation": self._numbers(seen, "observation")}

    def _numbers(self, tensor: Tensor, name: str) -> np.ndarray:
        return tensor.numpy().astype(self.observation_space[name].dtype)  # type: ignore[index]

    def _info(self) -> dict[str, Any]:
        assert self._episodes is not None
        return {"episode": {name: part[0].tolist() for name, part in self._episodes._asdict().items()}}

    def _latent(self, wanted: Any) -> Tensor:
        """A task as given by the user, `[1, M]`."""
        try:
            values = torch.as_tensor(np.asarray(wanted))
        except TypeError:
            raise ConfigError(f"options['task'] = {wanted!r} is not possible: numbers") from None
        if isinstance(self.task, GoalGrid):
            factors = self.task.config.factors
            whole = values.shape == (4,) and not values.is_floating_point()
            fits = whole and all(0 <= value < size for value, size in zip(values.tolist(), factors, strict=True))
            allowed = f"(quadrant, interaction, maze, object), whole numbers below {factors}"
            check(fits, "options['task']", wanted, allowed)
            return one_hot_tasks(values.long()[None], factors)
        assert isinstance(self.task, PreferenceGrid)
        count = self.task.config.num_preferences
        fits = values.shape == (count,) and bool(((values >= 0) & (values <= 1)).all())
        check(fits, "options['task']", wanted, f"{count} numbers from 0 to 1, one for each preference")
        return values.float()[None]


def make_preference(split: str = "train", render_mode: Any = None, seed: int = 0, **config: Any) -> GridEnv:
    """The preference grid; `config` are fields of :class:`hyla.tasks.preference_grid.PreferenceConfig`."""
    return GridEnv(PreferenceGrid(PreferenceConfig(**config), seed), split, render_mode)


def make_goal(split: str = "train", render_mode: Any = None, seed: int = 0, **config: Any) -> GridEnv:
    """The goal grid; `config` are fields of :class:`hyla.tasks.goal_grid.GoalConfig`."""
    return GridEnv(GoalGrid(GoalConfig(**config), seed), split, render_mode)


for _name, _entry in (("Preference", make_preference), ("Goal", make_goal)):
    if f"hyla/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"hyla/{_name}-v0", _entry)
