from dataclasses import replace
from itertools import combinations, product

import networkx
import pytest
import torch
from grid_worlds import free_graph, read_observations, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from golden_values import arrays
from hyla.errors import ConfigError
from hyla.tasks.base import Draws, overlap_rate
from hyla.tasks.goal_grid import (
    GoalConfig,
    GoalGrid,
    Sentence,
    one_hot_tasks,
    random_mazes,
    split_tasks,
    task_codes,
)
from hyla.tasks.grid import UNREACHABLE, Episodes, first_moves, move_table, parse_walls, step_counts
from hyla.tasks.rollouts import play, roll_policy

SMALL = GoalConfig(num_interactions=2, num_mazes=2, num_objects=3, num_distractors=2)


def golden_task():
    """The measured mazes, and their 48 episodes."""
    data = {name.removeprefix("goal/"): torch.from_numpy(value).long() for name, value in arrays("grids").items()}
    config = GoalConfig(num_interactions=3, num_mazes=2, num_objects=3, num_distractors=2)
    task = GoalGrid(config, mazes=data["mazes"].bool())
    codes = data["task_codes"]
    cells = data["positions_goal_distractors_agent"] @ torch.tensor([7, 1])
    kinds = torch.cat([codes[:, 3:], data["distractors"]], 1)
    episodes = Episodes(one_hot_tasks(codes, config.factors), cells[:, :-1], kinds, cells[:, -1], codes[:, 2])
    return task, episodes, data


def test_equals_the_public_demonstrations():
    task, episodes, data = golden_task()
    shown = task.demonstrate(episodes)
    assert torch.equal((shown.actions >= 0).sum(1), data["demo_length"])
    for ours, theirs, length in zip(shown.actions, data["demo_actions"], data["demo_length"].tolist(), strict=True):
        assert torch.equal(ours[:length], theirs[:length])
    # the public actions, padded with the interaction, reach the goal in our world, and no further reward follows
    played = task.replay(episodes, data["demo_actions"])
    assert played.last.ended.all()
    assert torch.equal(played.rewards.sum(1), torch.ones(48))
    assert torch.equal(played.last.steps, data["demo_length"])
    assert task.starts[episodes.maze, episodes.agent, episodes.objects[:, 0]].all()


def test_the_public_sets_have_our_sizes():
    _, _, data = golden_task()
    config = GoalConfig(num_interactions=3, num_mazes=2, num_objects=3, held_out_fraction=0.25)
    ours = {name: len(rows) for name, rows in split_tasks(config).items()}
    assert (
        ours
        == {"train": len(data["tasks_train"]), "held_out": len(data["tasks_held_out"])}
        == {"train": 54, "held_out": 18}
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 6), st.integers(2, 6), st.randoms(use_true_random=False))
def test_shortest_paths_equal_those_of_networkx(rows, columns, random):
    walls = [[random.random() < 0.35 for _ in range(columns)] for _ in range(rows)]
    moves = move_table(torch.tensor(walls))
    counts, first = step_counts(moves), None
    first = first_moves(moves, counts)
    graph = free_graph(walls)
    lengths = dict(networkx.all_pairs_shortest_path_length(graph))
    for start, goal in product(graph.nodes, repeat=2):
        at, to = start[0] * columns + start[1], goal[0] * columns + goal[1]
        steps = lengths[start].get(goal, UNREACHABLE)
        assert counts[at, to] == steps
        if 0 < steps < UNREACHABLE:
            options = [m for m in range(4) if lengths[goal].get(walk(walls, start, m)) == steps - 1]
            assert first[at, to] == min(options)


def test_walls_are_read_from_text():
    assert parse_walls("ww\n w").tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize("size", [5, 7, 11])
def test_mazes_are_different_and_all_their_cells_can_be_reached(size):
    mazes = random_mazes(size, 10, seed=3)
    assert torch.equal(mazes, random_mazes(size, 10, seed=3))
    assert len({tuple(maze.flatten().tolist()) for maze in mazes}) == 10
    assert not mazes[:, ::2, ::2].any()
    assert mazes[:, 1::2, 1::2].all()
    for maze in mazes.tolist():
        assert networkx.is_connected(free_graph(maze))
    # walls that are left of those of a grid of cells: more loops in some than in others
    assert len({int(maze.sum()) for maze in mazes}) > 1


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 6),
    st.floats(0.01, 0.99),
    st.floats(0, 0.5),
    st.integers(0, 99),
)
def test_random_tasks_are_split_so_that_every_value_is_trained_on(interactions, mazes, objects, held_out, share, seed):
    config = GoalConfig(
        num_interactions=interactions, num_mazes=mazes, num_objects=objects, held_out_fraction=held_out,
        validation_fraction=share, split_seed=seed,
    )  # fmt: skip
    total = 4 * interactions * mazes * objects
    trained = total - int(total * held_out)
    try:
        parts = split_tasks(config)
    except ConfigError as error:
        kept = int(trained * share)
        assert trained < max(config.factors) or trained == total or (share and kept in (0, trained)), error
        return
    sets = {name: {tuple(row) for row in rows.tolist()} for name, rows in parts.items()}
    assert not any(a & b for a, b in combinations(sets.values(), 2))
    assert set().union(*sets.values()) == set(product(*map(range, config.factors)))
    assert len(sets["held_out"]) == total - trained
    for factor, size in enumerate(config.factors):
        values = {row[factor] for name in ("train", "validation") for row in sets.get(name, ())}
        assert len(values) == size


@pytest.mark.parametrize(
    ("support", "sizes"),
    [
        ("non_compositional", (375, 125)),
        ("without_two_pairs", (460, 40)),
        ("within_1_change", (16, 484)),
        ("within_2_changes", (100, 400)),
        ("within_3_changes", (308, 192)),
    ],
)
def test_supports_that_fix_their_tasks(support, sizes):
    config = GoalConfig(support=support)
    parts = split_tasks(config)
    assert tuple(len(parts[split]) for split in ("train", "held_out")) == sizes
    train = parts["train"]
    if support == "non_compositional":
        assert set(train[:, 0].tolist()) == {0, 1, 2}
    elif support == "without_two_pairs":
        held_out = {tuple(row) for row in parts["held_out"][:, [1, 3]].tolist()}
        assert held_out == {(0, 0), (4, 4)}
    else:
        assert max(sum(value > 0 for value in row) for row in train.tolist()) == int(support[7])
    other = split_tasks(replace(config, split_seed=1))["train"]
    assert sorted(other.tolist()) == sorted(train.tolist())
    reserved = split_tasks(replace(config, validation_fraction=0.25, validation_from="held_out"))
    assert torch.equal(reserved["train"], train)
    assert torch.equal(torch.cat([reserved["validation"], reserved["held_out"]]), parts["held_out"])


@pytest.mark.parametrize("support", ["random", "within_2_changes"])
def test_episodes_are_of_their_split_and_demonstrations_are_shortest_paths(support):
    task = GoalGrid(replace(SMALL, support=support, validation_fraction=0.2), seed=4)
    assert task.splits == ("train", "validation", "held_out")
    for split in task.splits:
        batch = task.batch(split, 0, 40)
        allowed = {tuple(row) for row in task.tasks[split].tolist()}
        latents = {name: value.tolist() for name, value in batch.latents.items()}
        for row, (quadrant, interaction, maze, kind) in enumerate(latents["code"]):
            assert (quadrant, interaction, maze, kind) in allowed
            objects, kinds = latents["objects"][row], latents["kinds"][row]
            agent, goal = (divmod(cell, 7) for cell in (latents["agent"][row], objects[0]))
            assert (goal[0] >= 4) * 2 + (goal[1] >= 4) == quadrant
            assert kinds[0] == kind
            assert kind not in kinds[1:]
            assert len({*objects, latents["agent"][row]}) == 4
            walls = task.walls[maze].tolist()
            assert not any(walls[r][c] for r, c in map(lambda cell: divmod(cell, 7), objects))
            steps = networkx.shortest_path_length(free_graph(walls), agent, goal)
            actions = [action for action in batch.targets[row].tolist() if action >= 0]
            assert len(actions) == steps + 1 >= 8
            for action in actions[:-1]:
                agent = walk(walls, agent, action)
            assert agent == goal
            assert actions[-1] == 4 + interaction


def test_only_the_right_interaction_at_the_goal_ends_an_episode():
    task = GoalGrid(SMALL)
    episodes = task.episodes("train", 0, 32)
    length = (task.demonstrate(episodes).actions >= 0).sum(1)
    right = task_codes(episodes.task, SMALL.factors)[:, 1] + 4
    wrong = 4 + (right - 4 + 1) % 2
    state = task.start(episodes)._replace(agent=episodes.objects[:, 0])
    after, reward = task.step(episodes, state, wrong)
    assert not after.done.any()
    assert torch.equal(after.agent, state.agent)
    assert reward.sum() == 0
    after, reward = task.step(episodes, after, right)
    assert after.ended.all()
    assert torch.equal(reward, torch.ones(32))
    again, reward = task.step(episodes, after, torch.zeros_like(right))
    assert all(torch.equal(a, b) for a, b in zip(again, after, strict=True))
    assert reward.sum() == 0
    elsewhere, reward = task.step(episodes, task.start(episodes), right)
    assert not elsewhere.done.any()
    assert reward.sum() == 0
    # the time limit, by default, is that of the longest demonstration
    assert length.max() <= task.num_steps == int(torch.where(task.starts, task.distances, 0).max()) + 1
    idle = task.replay(episodes, wrong[:, None].expand(-1, task.num_steps))
    assert idle.last.out_of_time.all()


def test_splits_share_no_sample_and_batches_are_functions_of_their_arguments():
    task, again = GoalGrid(SMALL, seed=1), GoalGrid(SMALL, seed=1)
    one, two = task.batch("train", 5, 32), again.batch("train", 5, 32)
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)
    for other in (task.batch("train", 6, 32), task.batch("train", 5, 32, stream="evaluation")):
        assert not torch.equal(other.inputs, one.inputs)
    assert overlap_rate(task, "held_out", 4, 64).rate == 0.0
    assert torch.equal(GoalGrid(SMALL, seed=2).walls, task.walls)
    assert not torch.equal(GoalGrid(replace(SMALL, split_seed=1)).walls, task.walls)


@pytest.mark.parametrize("encoding", ["code", "orthogonal", "sentence", "fewshot"])
def test_every_encoding_fills_its_place_and_float64_is_the_same(encoding):
    task = GoalGrid(replace(SMALL, encoding=encoding, num_examples=20))
    batch, double = (task.batch("train", 0, 16, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert batch.inputs.shape == (16, task.input_dim)
    assert (task.layout.num_tokens, task.output_dim) == (task.sequence_length, 6)
    assert torch.equal(batch.targets, double.targets)
    torch.testing.assert_close(batch.inputs, double.inputs.float(), atol=1e-5, rtol=1e-5)
    found, points = task.layout.unpack(batch.inputs)
    torch.testing.assert_close(points.square().mean(-1), torch.ones(16, task.num_steps), atol=1e-4, rtol=0)
    if encoding != "fewshot":
        torch.testing.assert_close(task.encoding.decode(found), batch.latents["task"], atol=1e-5, rtol=0)
    else:  # each example is different, and is the demonstrator's action in the task's maze
        agent, objects = read_observations(task, found[..., : task.point_dim])
        answers = found[..., task.point_dim :].argmax(-1)
        assert all(len({tuple(row) for row in rows.tolist()}) == 20 for rows in found)
        for row, (_, interaction, maze, kind) in enumerate(batch.latents["code"].tolist()):
            for n in range(20):
                goal = next(cell for cell, shown in objects[row * 20 + n] if shown == kind)
                cell = int(agent[row, n])
                assert answers[row, n] == (4 + interaction if cell == goal else task.paths[maze, cell, goal])


def test_sentences_tell_every_task_apart():
    sentence = Sentence((4, 5, 5, 5))
    codes = torch.tensor(list(product(range(4), range(5), range(5), range(5))))
    ids = sentence.encode(one_hot_tasks(codes, sentence.factors))
    assert len({tuple(row) for row in ids.tolist()}) == 500
    assert ids.max() == sentence.vocab_size - 1 == 25
    assert sentence.words(ids[-1]) == "go to the bell in the southeast of the harbour and wash it"
    # words of values are no words of the pattern
    assert sentence.words(sentence.encode(one_hot_tasks(codes[:1], sentence.factors))[0]).split()[3] == "ball"


def test_play_counts_the_episodes_that_reach_the_goal():
    task = GoalGrid(SMALL)
    episodes = task.episodes("held_out", 0, 32, stream="evaluation")
    actions = task.demonstrate(episodes).actions.clamp(min=0)
    lost = torch.arange(32) % 4 == 0  # these go up for ever
    actions[lost] = 0

    def policy(rows):
        return F.one_hot(actions, task.output_dim).float()

    found = play(policy, task, "held_out", 32, batch_size=32)
    assert found["success"] == found["return"] == 0.75
    assert found["demonstrator_return"] == 1.0
    played = roll_policy(policy, task, episodes, Draws(0))
    assert torch.equal(played.last.out_of_time, lost)
    assert found["actions"] == pytest.approx(played.last.steps.double().mean().item())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 8}, r"task.size = 8 .* odd"),
        ({"num_objects": 1}, r"task.num_objects = 1 .* from 2"),
        ({"num_mazes": 11}, r"task.num_mazes = 11 .* from 1 to 10"),
        ({"min_distance": 13}, r"task.min_distance = 13 .* at most 12"),
        ({"time_limit": 5}, r"task.time_limit = 5 .* the longest demonstration has \d+ actions"),
        ({"num_distractors": 16, "size": 5, "min_distance": 4}, r"task.num_distractors = 16 .* at most 1\d"),
        ({"held_out_fraction": 0.95}, r"task.held_out_fraction = 0.95 .* 4 tasks or more, .* at most 0.916"),
        ({"held_out_fraction": 0.001}, r"task.held_out_fraction = 0.001 .* none would be held out"),
        ({"validation_fraction": 0.01}, r"task.validation_fraction = 0.01 .* of 36 combinations 0 would be reserved"),
        ({"support": "within_3_changes", "num_mazes": 1}, r"task.support = 'within_3_changes' .* hold out 0"),
        ({"encoding": "tokens"}, r"task.encoding = 'tokens' .* code, orthogonal, sentence, fewshot"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=message):
        GoalGrid(replace(SMALL, **fields))
