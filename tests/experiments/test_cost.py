"""What runs are expected to cost, and how measured speeds take the place of the table."""

from dataclasses import replace

import pytest

from hyla.experiments.cost import (
    START_SECONDS,
    STEP_SECONDS,
    duration,
    peak_gib,
    seconds_each,
    seconds_left,
    step_seconds,
    work,
)
from hyla.experiments.experiment import with_settings
from hyla.training.config import preset_paper, preset_tiny

LOGIC, SRAVEN = preset_paper("logic"), preset_paper("sraven")


def test_the_table_holds_at_the_papers_sizes():
    assert step_seconds(LOGIC) == STEP_SECONDS["logic"]
    assert step_seconds(SRAVEN) == STEP_SECONDS["sraven"]
    assert step_seconds(with_settings(LOGIC, {"model.mechanism": "softmax"})) == STEP_SECONDS["logic"]


@pytest.mark.parametrize(
    ("change", "measured"),  # milliseconds of a step, of the same process beside 42 for logic and 200 for SRAVEN
    [
        ({"task.num_points": 16}, 32 / 42),
        ({"task.num_points": 64}, 73 / 42),
        ({"task.num_points": 96}, 103 / 42),
        ({"model.mechanism": "hyla_plus"}, 124 / 42),
        ({"model.mlp": "mixture"}, 299 / 42),
    ],
)
def test_other_sizes_are_scaled_as_they_were_measured(change, measured):
    ratio = step_seconds(with_settings(LOGIC, change)) / step_seconds(LOGIC)
    assert ratio == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize(("mechanism", "measured"), [("softmax", 0.705), ("linear", 0.704), ("hyla", 0.574)])
def test_a_language_models_step_counts_its_attention_scores(mechanism, measured):
    """Seconds of benchmarks/language_speed.py; without the scores the estimate was a third of them."""
    config = with_settings(preset_tiny("text"), {"model.mechanism": mechanism})
    assert step_seconds(config) == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize(
    ("config", "measured"),  # GiB, the peak of a process that trained some steps and evaluated
    [
        (with_settings(LOGIC, {"task.num_points": 16}), 0.35),
        (LOGIC, 0.39),
        (with_settings(LOGIC, {"task.num_points": 96}), 0.54),
        (with_settings(LOGIC, {"model.mlp": "mixture"}), 0.56),
        (SRAVEN, 0.46),
        (with_settings(SRAVEN, {"model.num_layers": 16}), 0.76),
    ],
)
def test_memory_is_estimated_rather_too_high(config, measured):
    assert 0.95 * measured < peak_gib(config) < 1.4 * measured


def test_evaluations_count_as_the_steps_they_take_as_long_as():
    loop = {"training.steps": 100, "training.eval_every": 40, "training.batch_size": 10}
    loop |= {"training.eval_samples": 30, "training.final_eval_samples": 50}
    config = with_settings(LOGIC, loop | {"optimizer.schedule": "cosine"})
    # three splits, of which a sequence costs a third of a trained one: 1/10 step for a sequence of each
    assert work(config) == pytest.approx(100 + 2 * 3 + 5)
    assert work(config, 40) == pytest.approx(60 + 3 + 5)
    assert work(config, 100) == pytest.approx(5)


def test_measured_speeds_count_more_than_the_table():
    other_seed = replace(LOGIC, seed=3)
    longer = with_settings(LOGIC, {"task.num_points": 64})
    assert seconds_each([(LOGIC, 0, None)]) == [pytest.approx(START_SECONDS + STEP_SECONDS["logic"] * work(LOGIC))]
    ended = (LOGIC, None, 100.0)  # ten milliseconds a step
    runs = [ended, (other_seed, 0, None), (longer, 0, None), (SRAVEN, 0, None)]
    scaled = step_seconds(longer) * 0.01 / STEP_SECONDS["logic"]
    expected = [0.01 * work(LOGIC), scaled * work(longer), STEP_SECONDS["sraven"] * work(SRAVEN)]
    assert seconds_each(runs) == pytest.approx([0.0, *(START_SECONDS + seconds for seconds in expected)])


def test_runs_share_the_time_but_all_wait_for_the_longest():
    assert seconds_left([], 2) == 0
    assert seconds_left([10.0] * 4, 2) == 20
    assert seconds_left([30.0, 10.0], 2) == 30
    assert seconds_left([30.0, 10.0], 1) == 40


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (89, "89 s"), (91, "2 min"), (3_540, "59 min"), (12_000, "3 h 20 min"), (270_000, "3 days 3 h")],
)
def test_lengths_of_time_in_words(seconds, words):
    assert duration(float(seconds)) == words
