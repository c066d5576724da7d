import numpy as np
import pytest
import torch

from hyla.tasks.base import Batch, Draws, Task, check_split, entropy
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.sraven import Sraven, SravenConfig


def test_draws_depend_on_every_part_of_their_path():
    paths = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", "1"), (0, "a"), ("0", "a", 1)]
    drawn = [tuple(Draws(*path).uniform(4).tolist()) for path in paths]
    assert len(set(drawn)) == len(paths)
    assert drawn == [tuple(Draws(*path).uniform(4).tolist()) for path in paths]


def test_streams_do_not_repeat():
    """Of 32 bits, which is all that torch's CPU generator keeps of a seed, one pair in so many would be expected to."""
    assert len({tuple(entropy(0, "logic", "train", "training", index)) for index in range(100_000)}) == 100_000


def test_integers_and_permutations_are_uniform():
    draws = Draws(0, "uniform")
    counts = torch.bincount(draws.integers(7, 70_000), minlength=7).double()
    assert ((counts - 10_000).abs() < 5 * 10_000**0.5).all()
    orders = draws.permutations(3, 60_000)
    codes = torch.bincount((orders * torch.tensor([9, 3, 1])).sum(-1))
    assert ((codes[codes > 0].double() - 10_000).abs() < 5 * 10_000**0.5).all()
    assert (orders.sort(-1).values == torch.arange(3)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_in_their_range(dtype):
    numbers = Draws(0).uniform(1000, 10, dtype=dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 5 * (1 / 12 / 10_000) ** 0.5


def test_a_batch_can_be_cut():
    batch = Batch(torch.arange(6.0).reshape(3, 2), torch.arange(3), {"z": torch.arange(3)})
    assert len(batch) == 3
    assert len(batch.head(2)) == 2
    assert batch.head(2).latents["z"].tolist() == [0, 1]


@pytest.mark.parametrize("task", [FuzzyLogic(LogicConfig()), Sraven(SravenConfig())])
def test_tasks_keep_the_protocol(task):
    assert isinstance(task, Task)
    batch = task.batch("train", 0, 5)
    assert batch.inputs.shape == (5, task.sequence_length, task.input_dim)
    answers = len(range(task.sequence_length)[task.predict_at])
    predictions = torch.randn(5, answers, task.output_dim)
    scores = task.scores(predictions, batch)
    assert {task.headline, "loss"} <= set(scores)
    assert all(score.shape == (5,) for score in scores.values())
    torch.testing.assert_close(task.loss(predictions, batch), scores["loss"].mean())
    with pytest.raises(ValueError, match=r"split = 'test' is not possible: task .* has train, .*held_out"):
        check_split(task, "test")
    # a sample does not depend on the batch it is drawn beside, only on its path
    again = task.batch("train", 0, 5)
    task.batch("train", 1, 5)
    assert np.array_equal(batch.inputs.numpy(), again.inputs.numpy())
