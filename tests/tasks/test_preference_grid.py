from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from grid_worlds import collect, read_observations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from golden_values import arrays
from hyla.errors import ConfigError
from hyla.tasks.base import Draws, overlap_rate
from hyla.tasks.grid import Episodes
from hyla.tasks.preference_grid import PreferenceConfig, PreferenceGrid
from hyla.tasks.rollouts import play, roll_policy

SMALL = PreferenceConfig(num_preferences=5, num_hot=2, num_features=6, num_objects=3, time_limit=4)


def golden_task(**fields):
    """The measured world: its preferences' values in place of ours, and its 48 episodes."""
    data = {name.removeprefix("preference/"): torch.from_numpy(value) for name, value in arrays("grids").items()}
    config = PreferenceConfig(num_preferences=6, num_hot=2, num_features=5, num_objects=3, time_limit=6, **fields)
    task = PreferenceGrid(config)
    task.basis = data["basis"]
    cells = (data["positions"] @ torch.tensor([7, 1], dtype=torch.int32)).long()
    maze = torch.zeros(48, dtype=torch.long)
    return task, Episodes(data["preferences"], cells[:, :-1], data["features"].long(), cells[:, -1], maze), data


def test_equals_the_public_demonstrations():
    task, episodes, data = golden_task()
    assert torch.equal(task.walls[0], data["walls"].bool())
    shown = task.demonstrate(episodes)
    assert torch.equal(shown.actions.clamp(min=0), data["actions"].long())
    assert torch.equal(shown.actions == -1, data["done"])
    torch.testing.assert_close(shown.rewards[:, :-1], data["rewards_of_previous_action"][:, 1:], rtol=1e-6, atol=0)
    first8 = [part[:8] for part in (shown.agent, shown.taken)]
    assert torch.equal(task.raw_observations(episodes.rows(torch.arange(8)), *first8), data["observations_first8"])


def test_the_public_demonstrator_misses_the_optimum_in_two_of_its_episodes():
    (task, episodes, _), (best, _, _) = golden_task(), golden_task(demonstrator="optimal")
    ours, optimum = (t.returns(t.demonstrate(episodes)) for t in (task, best))
    assert ((optimum > ours + 1e-6).sum(), (optimum < ours - 1e-6).sum()) == (2, 0)


def plain(task, episodes, row):
    """An episode as plain values: walls, start, {cell: worth}."""
    size = task.walls.shape[-1]
    cells = [divmod(cell, size) for cell in episodes.objects[row].tolist()]
    worth = (episodes.task[row] @ task.basis)[episodes.kinds[row]].tolist()
    return task.walls[0].tolist(), divmod(int(episodes.agent[row]), size), dict(zip(cells, worth, strict=True))


def discounted(rewards, discount):
    return sum(reward * discount**t for t, reward in enumerate(rewards))


def test_the_optimal_demonstrator_reaches_the_best_of_all_sequences_of_actions():
    task = PreferenceGrid(replace(SMALL, demonstrator="optimal"), seed=2)
    episodes = task.episodes("train", 0, 12)
    found = task.returns(task.demonstrate(episodes)).tolist()
    for row in range(12):
        walls, start, worth = plain(task, episodes, row)
        best = max(
            discounted(collect(walls, start, worth, actions, 4)[0], 0.9) for actions in product(range(5), repeat=4)
        )
        assert found[row] == pytest.approx(best, abs=1e-5)
    assert max(found) > 0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.integers(0, 15))
def test_steps_equal_the_world_in_plain_python(actions, row):
    task = PreferenceGrid(SMALL)
    episodes = task.episodes("train", 3, 16)
    played = task.replay(episodes, torch.tensor(actions).expand(16, -1))
    rewards, cells = collect(*plain(task, episodes, row), actions, 4)
    count = len(rewards)
    assert played.actions[row].tolist() == actions[:count] + [-1] * (4 - count)
    assert played.rewards[row].tolist() == pytest.approx(rewards + [0.0] * (4 - count))
    assert [divmod(cell, 7) for cell in played.agent[row, :count].tolist()] == cells
    assert (bool(played.last.ended[row]), bool(played.last.out_of_time[row])) == (0 in actions, 0 not in actions)
    assert played.last.steps[row] == count


def test_splits_partition_the_combinations_and_share_no_sample():
    config = replace(SMALL, validation_fraction=0.3, validation_from="held_out", latents="khot", held_out_fraction=0.5)
    task = PreferenceGrid(config)
    assert task.splits == ("train", "validation", "held_out")
    drawn = {}
    for split in task.splits:
        rows = task.batch(split, 0, 256).latents["task"]
        drawn[split] = {tuple(row.nonzero()[:, 0].tolist()) for row in rows}
        assert drawn[split] <= {tuple(m for m in row if m >= 0) for row in task.combinations[split].tolist()}
    assert not any(a & b for a, b in combinations(drawn.values(), 2))
    assert sum(map(len, drawn.values())) == 15
    whole = PreferenceGrid(replace(config, validation_fraction=0.0)).combinations
    assert torch.equal(whole["train"], task.combinations["train"])
    for split in task.splits:
        assert overlap_rate(task, split, 8, 64).rate == 0.0


def test_batches_are_functions_of_their_arguments():
    task, again, other = (PreferenceGrid(SMALL, seed=seed) for seed in (1, 1, 2))
    one, two = task.batch("train", 5, 32), again.batch("train", 5, 32)
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)
    for different in (other.batch("train", 5, 32), task.batch("train", 6, 32), task.batch("held_out", 5, 32)):
        assert not torch.equal(different.inputs, one.inputs)
    assert not torch.equal(task.batch("train", 5, 32, stream="evaluation").inputs, one.inputs)
    # the world is that of split_seed
    assert torch.equal(task.basis, other.basis)
    assert not torch.equal(task.basis, PreferenceGrid(replace(SMALL, split_seed=1)).basis)


@pytest.mark.parametrize(
    "encoding", ["identity", "orthogonal", "tokens", "invertible_nn", "interval_shuffle", "fewshot"]
)
def test_every_encoding_fills_its_place_and_float64_is_the_same(encoding):
    task = PreferenceGrid(replace(SMALL, encoding=encoding, num_examples=7))
    batch, double = (task.batch("train", 0, 16, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert batch.inputs.shape == (16, task.input_dim)
    assert (task.layout.num_tokens, task.predict_at.start) == (task.sequence_length, task.sequence_length - 4)
    assert torch.equal(batch.targets, double.targets)
    assert double.inputs.dtype == torch.float64
    torch.testing.assert_close(batch.inputs, double.inputs.float(), atol=1e-5, rtol=1e-5)
    found, points = task.layout.unpack(double.inputs)
    torch.testing.assert_close(points.square().mean(-1), torch.ones(16, 4, dtype=torch.float64), atol=1e-4, rtol=0)
    if encoding != "fewshot":
        torch.testing.assert_close(task.encoding.decode(found).float(), batch.latents["task"], atol=1e-5, rtol=0)


def test_targets_are_the_demonstrations_of_the_observations():
    """The demonstrator is stationary: from what an observation shows, a new episode begins with the action demonstrated;
    so it is for the points of a batch and for the few-shot examples."""
    task = PreferenceGrid(replace(SMALL, encoding="fewshot", num_examples=9))
    batch = task.batch("held_out", 0, 24)
    examples, points = task.layout.unpack(batch.inputs)
    shown = [(points, batch.targets), (examples[..., : task.point_dim], examples[..., task.point_dim :].argmax(-1))]
    for observed, answers in shown:
        agent, objects = read_observations(task, observed)
        task_of = batch.latents["task"].repeat_interleave(observed.shape[1], 0)
        zipped = zip(task_of, agent.flatten(), objects, answers.flatten().tolist(), strict=True)
        kept = [(z, cell, left, answer) for z, cell, left, answer in zipped if answer >= 0 and left]
        assert len(kept) > 20
        for count in {len(left) for _, _, left, _ in kept}:
            of, cells, left, wanted = zip(*(row for row in kept if len(row[2]) == count), strict=True)
            places, kinds = torch.tensor(left).unbind(-1)
            alone = Episodes(torch.stack(of), places, kinds, torch.stack(cells), torch.zeros(len(of), dtype=torch.long))
            assert task.demonstrate(alone).actions[:, 0].tolist() == list(wanted)


def test_loss_and_scores_are_those_of_real_steps():
    task = PreferenceGrid(SMALL)
    batch = task.batch("train", 0, 10, dtype=torch.float64)
    predictions = torch.randn(10, 4, 5, dtype=torch.float64)
    scores, losses = task.scores(predictions, batch), []
    for row, answers in enumerate(batch.targets.tolist()):
        real = [t for t, answer in enumerate(answers) if answer >= 0]
        own = [-F.log_softmax(predictions[row, t], -1)[answers[t]].item() for t in real]
        right = [int(predictions[row, t].argmax()) == answers[t] for t in real]
        assert scores["accuracy"][row] == pytest.approx(sum(right) / len(real))
        assert scores["episode_accuracy"][row] == all(right)
        assert scores["loss"][row] == pytest.approx(sum(own) / len(own))
        losses += own
    assert task.loss(predictions, batch) == pytest.approx(sum(losses) / len(losses))
    exact = task.scores(F.one_hot(batch.targets.clamp(min=0), 5).double(), batch)
    assert (exact["accuracy"] == 1).all()
    assert (exact["episode_accuracy"] == 1).all()


def follow(task, episodes):
    """A policy that knows the demonstrations of some episodes, and the rows it was shown."""
    actions, rows = task.demonstrate(episodes).actions.clamp(min=0), []

    def policy(inputs):
        rows.append(inputs)
        return F.one_hot(actions, task.output_dim).float()

    return policy, rows


def test_a_policy_sees_the_history_as_in_training():
    task = PreferenceGrid(SMALL)
    episodes, batch = task.episodes("held_out", 0, 16), task.batch("held_out", 0, 16)
    policy, rows = follow(task, episodes)
    played = roll_policy(policy, task, episodes, Draws(0))
    assert torch.equal(played.actions, batch.targets)
    for t, row in enumerate(rows):
        (encoding, points), (wanted_encoding, wanted) = task.layout.unpack(row), task.layout.unpack(batch.inputs)
        assert torch.equal(encoding, wanted_encoding)
        assert torch.equal(points[:, : t + 1], wanted[:, : t + 1])
        assert (points[:, t + 1 :] == 0).all()


def test_play_compares_with_the_demonstrator():
    task = PreferenceGrid(SMALL)
    policy, _ = follow(task, task.episodes("held_out", 0, 64, stream="evaluation"))
    found = play(policy, task, "held_out", 50, batch_size=64)
    assert found["relative_return"] == pytest.approx(1.0)
    assert (found["matched"], found["num_episodes"]) == (1.0, 50)
    # doing nothing brings nothing, which the demonstrator also does where nothing is worth a walk
    nothing = play(lambda rows: torch.eye(5)[0].expand(len(rows), 5, 5), task, "held_out", 50, batch_size=64)
    none_better = task.returns(task.demonstrate(task.episodes("held_out", 0, 64, stream="evaluation")))[:50] <= 1e-5
    assert (nothing["return"], nothing["relative_return"], nothing["actions"]) == (0.0, 0.0, 1.0)
    assert nothing["matched"] == pytest.approx(none_better.double().mean().item())
    with pytest.raises(ConfigError, match=r"the policy answers with shape \(64, 3, 5\), and should with \(64, 4, 5\)"):
        play(lambda rows: torch.zeros(len(rows), 3, 5), task, "train", 4, batch_size=64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_objects": 9}, r"task.num_objects = 9 .* from 1 to 8"),
        ({"num_hot": 6}, r"task.num_hot = 6 .* from 1 to 5"),
        ({"time_limit": 0}, r"task.time_limit = 0 .* from 1"),
        ({"discount": 0.0}, r"task.discount = 0.0 .* above 0"),
        ({"held_out_fraction": 1.0}, r"task.held_out_fraction = 1.0"),
        ({"validation_fraction": 0.01}, r"task.validation_fraction = 0.01 .* of 12 combinations 0 would be reserved"),
        ({"encoding": "words"}, r"task.encoding = 'words' .* identity, orthogonal"),
        ({"demonstrator": "random"}, r"task.demonstrator = 'random' .* reference, optimal"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(fields, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceGrid(replace(SMALL, **fields))


def test_a_split_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"split = 'test' is not possible: task 'preference' has train, held_out"):
        PreferenceGrid(SMALL).batch("test", 0, 4)
