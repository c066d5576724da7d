"""Episodes as text, pictures, animations and rows."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from hyla.errors import ConfigError, MissingExtraError
from hyla.experiments.samples import write_samples
from hyla.report.episodes import Course, Scene, animate_episode, draw_episode, episode_text
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.goal_grid import GoalConfig, GoalGrid
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid

SCENE = Scene(
    walls=[[False, False, True], [False, False, False]],
    objects=[(0, 1), (1, 2)],
    kinds=[3, 14],
    kind_names=["feature 3", "feature 14"],
    labels=["+0.50", "-1.25"],
    title="Preference 0 (1)",
)
COURSE = Course(
    actions=["up", "left", "right", "nothing"],
    rewards=[0.0, 0.0, 0.5, 0.0],
    agent=[(1, 0), (0, 0), (0, 0), (0, 1), (0, 1)],
    taken=[[False, False]] * 3 + [[True, False]] * 2,
)


def test_text_shows_the_map_the_objects_and_every_action():
    assert episode_text(SCENE, COURSE).splitlines() == [
        "Preference 0 (1)",
        "",
        "  . a #",
        "  @ . b",
        "",
        "  a  feature 3  +0.50",
        "  b  feature 14  -1.25",
        "",
        "Demonstration:",
        "   1  up",
        "   2  left",
        "   3  right, picks up a, +0.50",
        "   4  nothing",
    ]


def test_an_animation_has_a_frame_for_every_state(tmp_path):
    with Image.open(animate_episode(SCENE, COURSE, tmp_path / "new" / "a.gif", seconds=0.25)) as gif:
        durations = []
        for n in range(gif.n_frames):
            gif.seek(n)
            durations.append(gif.info["duration"])
    assert durations == [250, 250, 250, 250, 2000]


def test_pictures_differ_where_episodes_do(tmp_path):
    one = draw_episode(SCENE, COURSE, tmp_path / "one.png").read_bytes()
    assert one == draw_episode(SCENE, COURSE, tmp_path / "again.png").read_bytes()
    moved = replace(COURSE, agent=[(1, 0), (1, 0), (0, 0), (0, 1), (0, 1)])
    assert one != draw_episode(SCENE, moved, tmp_path / "moved.png").read_bytes()


@pytest.mark.parametrize(
    "task",
    [
        PreferenceGrid(PreferenceConfig(num_preferences=4, num_hot=2)),
        GoalGrid(GoalConfig(size=5, num_mazes=2, min_distance=3)),
    ],
    ids=lambda task: task.name,
)
def test_samples_of_every_form(task, tmp_path):
    (row,) = [json.loads(line) for line in write_samples(task, "held_out", 1, "jsonl", None)]
    (text,) = write_samples(task, "held_out", 1, "text", None)
    assert text.startswith(f"--- {task.name}-held_out 0\n{row['title']}\n")
    steps = [line.split()[1].rstrip(",") for line in text.split("Demonstration:\n")[1].splitlines()]
    assert steps == row["answer"]
    assert len(row["agent"]) == len(row["rewards"]) + 1 == len(steps) + 1
    batch = task.batch("held_out", 0, 512, stream="evaluation")
    assert [task.action_names[action] for action in batch.targets[0].tolist() if action >= 0] == steps
    for form in ("png", "gif"):
        (path,) = write_samples(task, "held_out", 1, form, tmp_path)
        assert path == tmp_path / f"{task.name}-held_out-000.{form}"
        with Image.open(path) as image:
            assert image.format == form.upper()


def test_what_stands_still_is_not_animated(tmp_path):
    with pytest.raises(ConfigError, match=r"format = 'gif' .* task logic has no episodes to animate; --format png"):
        list(write_samples(FuzzyLogic(LogicConfig()), "train", 1, "gif", tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hyla\[report\]'"):
        animate_episode(SCENE, COURSE, tmp_path / "a.gif")
