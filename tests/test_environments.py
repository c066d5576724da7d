"""The grid worlds as Gymnasium environments."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from hyla.environments import GridEnv
from hyla.errors import ConfigError
from hyla.tasks.base import Draws
from hyla.tasks.goal_grid import GoalConfig, GoalGrid
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid

PREFERENCE = {"num_preferences": 4, "num_hot": 2, "num_features": 6, "num_examples": 5}
GOAL = {"num_interactions": 2, "num_mazes": 2, "num_objects": 3, "num_examples": 5}


@pytest.mark.parametrize(
    ("name", "config", "encoding"),
    [
        ("Preference", PREFERENCE, "invertible_nn"),
        ("Preference", PREFERENCE, "tokens"),
        ("Goal", GOAL, "orthogonal"),
        ("Goal", GOAL, "sentence"),
        ("Goal", GOAL, "fewshot"),
    ],
)
def test_gymnasium_finds_nothing_to_complain_about(name, config, encoding):
    render_mode = "rgb_array" if encoding == "sentence" else None  # drawing takes most of the time
    env = gymnasium.make(
        f"hyla.environments:hyla/{name}-v0", render_mode=render_mode, split="held_out", encoding=encoding, **config
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=render_mode is None)


def make_goal(**options):
    return GridEnv(GoalGrid(GoalConfig(**GOAL)), **options)


def test_an_environment_is_a_batch_of_one():
    """The demonstrator's actions bring the rewards and observations of the batched demonstration."""
    for task in (PreferenceGrid(PreferenceConfig(**PREFERENCE)), GoalGrid(GoalConfig(**GOAL))):
        env = GridEnv(task, "held_out")
        for seed in range(5):
            seen, info = env.reset(seed=seed)
            episodes = task.episodes_of({name: torch.tensor([value]) for name, value in info["episode"].items()})
            shown = task.demonstrate(episodes)
            points = task.observe(episodes, shown.agent, shown.taken)[0].numpy()
            assert (seen["task"] == task.encode(episodes, Draws(0))[0].numpy()).all()
            for t, action in enumerate(shown.actions[0].tolist()):
                assert (seen["observation"] == points[t]).all()
                seen, reward, terminated, truncated, _ = env.step(action)
                assert reward == pytest.approx(shown.rewards[0, t].item())
                if terminated or truncated:
                    break
            assert int(shown.last.steps) == t + 1
            assert (terminated, truncated) == (bool(shown.last.ended), bool(shown.last.out_of_time))


def test_episodes_follow_the_seed_and_the_task_asked_for():
    env = make_goal()
    (_, first), (_, second), (_, again) = env.reset(seed=5), env.reset(), env.reset(seed=5)
    assert first == again != second
    _, info = env.reset(options={"task": (3, 1, 0, 2)})
    assert info["episode"]["task"] == [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]
    preference = GridEnv(PreferenceGrid(PreferenceConfig(**PREFERENCE)))
    seen, _ = preference.reset(options={"task": [0.5, 0, 0, 1]})
    assert seen["task"].tolist() == [0.5, 0, 0, 1]


def test_the_time_limit_truncates():
    env = make_goal()
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(env.task.num_steps)]
    assert ends == [(False, False)] * (env.task.num_steps - 1) + [(False, True)]


def test_a_picture_shows_the_agent_move():
    env = make_goal(render_mode="rgb_array", pixels=96)
    env.reset(seed=0)
    before = env.render()
    move = next(a for a in range(4) if int(env.task.table[env._episodes.maze, env._state.agent, a]) != env._state.agent)
    env.step(move)
    after = env.render()
    assert before.shape == after.shape == (96, 96, 3)
    assert before.dtype == np.uint8
    changed = (before != after).any(-1).mean()
    assert 0 < changed < 0.15  # two cells of 49, and no more
    assert make_goal().render() is None


@pytest.mark.usefixtures("unchecked")
def test_wrong_requests_say_what_is_possible():
    env = make_goal()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    with pytest.raises(ConfigError, match=r"options\['task'\] = \(4, 0, 0, 0\) .* whole numbers below \(4, 2, 2, 3\)"):
        env.reset(options={"task": (4, 0, 0, 0)})
    with pytest.raises(ConfigError, match=r"options = \['goal'\] .* the one option is 'task'"):
        env.reset(options={"goal": 1})
    with pytest.raises(ConfigError, match=r"4 numbers from 0 to 1"):
        GridEnv(PreferenceGrid(PreferenceConfig(**PREFERENCE))).reset(options={"task": [0, 0, 2, 0]})
    with pytest.raises(ConfigError, match=r"render_mode = 'human' .* rgb_array"):
        make_goal(render_mode="human")
    with pytest.raises(ValueError, match=r"split = 'test' .* train, held_out"):
        make_goal(split="test")
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"action = 6 .* from 0 to 5"):
        env.step(6)
