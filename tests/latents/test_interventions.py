"""Replaced codes act exactly where they should, and nowhere else."""

import numpy as np
import pytest
import torch
from planted import NUM_RULES, PlantedModel, PlantedReading

from hyla.attention import MECHANISMS, MultiHeadAttention, pair_contributions, value_parameters
from hyla.latents.collect import collect
from hyla.latents.interventions import causal_check, replaced_codes


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_replaced_code_gives_what_the_equations_say(mechanism):
    torch.manual_seed(0)
    layer = MultiHeadAttention(6, 4, mechanism=mechanism, qk_dim=8, v_dim=8, positions="t5", dtype=torch.float64).eval()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    plain, codes_BHQK = layer(x, causal=True, return_codes=True)
    new_QKH = torch.randn(2, 2, 4, dtype=torch.float64)
    expected_codes = codes_BHQK.clone()
    for i, q in enumerate((4, 2)):
        for j, k in enumerate((0, 3)):
            expected_codes[:, :, q, k] = new_QKH[i, j]
    expected = pair_contributions(layer, expected_codes, x).sum(-2) + value_parameters(layer).output_bias
    with replaced_codes(layer, [-1, 2], [0, 3], new_QKH):
        changed = layer(x, causal=True)
        selected, _ = layer(x, causal=True, select=slice(3, None), return_codes=True)
    torch.testing.assert_close(changed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(selected, expected[:, 3:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(changed[:, [0, 1, 3]], plain[:, [0, 1, 3]], rtol=0, atol=1e-14)
    torch.testing.assert_close(layer(x, causal=True), plain, rtol=0, atol=0)


def test_replacing_codes_by_themselves_changes_nothing():
    torch.manual_seed(0)
    layer = MultiHeadAttention(6, 4, qk_dim=8, v_dim=8, dtype=torch.float64).eval()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    own = layer.codes(x, queries=[1], keys=[2, 4]).permute(0, 2, 3, 1)
    with replaced_codes(layer, [1], [2, 4], own):
        torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=1e-14)


@pytest.fixture(scope="module")
def planted():
    model, reading = PlantedModel(), PlantedReading()
    collected = collect(model, reading.task, queries=reading.queries, keys=reading.keys, num_samples=600)
    return model, reading, collected


def means(reading, collected, layer):
    labels = reading.labels(collected, "train")
    codes = collected.codes(layer, "train")
    return np.stack([codes[labels == rule].mean(0) for rule in range(NUM_RULES)])


def test_the_causal_check_moves_the_answer_only_where_the_rule_is(planted):
    """Codes of the planted layer decide the answer: another rule's mean code gives that rule's answer, the own rule's
    mean code changes nothing; in the layer of noise nothing happens whatever is put there."""
    model, reading, collected = planted
    labels = reading.labels(collected, "held_out")
    check = causal_check(model, reading, collected, "rule", "held_out", means(reading, collected, "rule"), 600)
    np.testing.assert_array_equal(check.before, labels)
    np.testing.assert_array_equal(check.answers, np.tile(np.arange(NUM_RULES), (600, 1)))
    np.testing.assert_array_equal(check.effect, labels[:, None] != np.arange(NUM_RULES))
    noise = causal_check(model, reading, collected, "noise", "held_out", means(reading, collected, "noise"), 600)
    assert (noise.effect == 0).all()
    np.testing.assert_array_equal(noise.answers, np.tile(labels[:, None], NUM_RULES))


def test_classes_without_a_mean_are_undefined(planted):
    model, reading, collected = planted
    absent = means(reading, collected, "rule")
    absent[2] = np.nan
    check = causal_check(model, reading, collected, "rule", "held_out", absent, 40)
    assert np.isnan(check.effect[:, 2]).all()
    assert (check.answers[:, 2] == -1).all()
    assert not np.isnan(check.effect[:, [0, 1, 3]]).any()
