"""Position schemes: T5 buckets (POS-01), the relative bias, rotary and sinusoidal positions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_values import index
from hyla.attention import MultiHeadAttention, RelativeBias, relative_position_bucket, rotate, sinusoidal
from hyla.errors import ConfigError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; runs where there is one")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]

RELATIVE = [-1000, -128, -127, -64, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 64, 127, 128, 1000]
BIDIRECTIONAL = [15, 15, 15, 14, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 26, 30, 31, 31, 31]
CAUSAL = [31, 31, 31, 26, 16, 15, 8, 7, 1] + [0] * 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("bidirectional", "expected"), [(True, BIDIRECTIONAL), (False, CAUSAL)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pos_01_buckets(device, bidirectional, expected, dtype):
    relative = torch.tensor(RELATIVE, device=device, dtype=dtype)
    assert relative_position_bucket(relative, 32, 128, bidirectional).tolist() == expected


def test_pos_01_no_room_for_the_logarithmic_half():
    """32 causal buckets hold the distances 0 to 15 singly, and bucket 16 + j would start where
    `log(d/16) / log(max/16) * 16 >= j`: with max = 16 a division by 0. Bidirectional, 16 buckets serve each direction,
    8 of them singly, so that the same max distance is well defined there."""
    relative = torch.tensor(RELATIVE)
    with pytest.raises(ConfigError, match=r"max_distance = 16 .* exceed 16, .* 32 buckets"):
        relative_position_bucket(relative, 32, 16, bidirectional=False)
    with pytest.raises(ConfigError, match=r"max_distance = 16 .* exceed 16, .* 32 buckets"):
        RelativeBias(4, 32, 16)
    with pytest.raises(ConfigError, match=r"max_distance = 16 .* exceed 16, .* 32 buckets"):
        MultiHeadAttention(8, 4, positions="t5", num_buckets=32, max_distance=16)
    buckets = relative_position_bucket(relative, 32, 16, bidirectional=True).tolist()
    assert buckets == [15] * 6 + [8, 7, 1, 0, 17, 23, 24] + [31] * 6
    assert RelativeBias(4, 32, 16, bidirectional=True).table.shape == (4, 32)


@pytest.mark.parametrize(("num_buckets", "bidirectional"), [(1, False), (0, False), (2, True), (7, True)])
def test_too_few_or_odd_buckets(num_buckets, bidirectional):
    with pytest.raises(ConfigError, match="num_buckets = "):
        RelativeBias(4, num_buckets, 100, bidirectional)


@pytest.mark.parametrize("name", index("relative_position"))
def test_buckets_equal_the_public_code(name):
    setting = dict(part.split("=") for part in name.split(","))
    expected = index("relative_position")[name]
    relative = torch.tensor(expected["relative"])
    sizes = int(setting["buckets"]), int(setting["max_distance"])
    assert relative_position_bucket(relative, *sizes, setting["bidirectional"] == "True").tolist() == expected["bucket"]


def exact_bucket(distance, num_buckets, max_distance):
    """The formula in rational arithmetic: the largest j with `(distance/half)**rest >= (max/half)**j`."""
    half = num_buckets // 2
    rest = num_buckets - half
    if distance < half:
        return distance
    reached = Fraction(distance, half) ** rest
    return half + max(j for j in range(rest) if reached >= Fraction(max_distance, half) ** j)


@given(
    num_buckets=st.integers(2, 40),
    extra=st.integers(1, 150),
    distances=st.lists(st.integers(-400, 400), min_size=1, max_size=20),
)
@settings(deadline=None)
def test_buckets_equal_exact_arithmetic(num_buckets, extra, distances):
    max_distance = num_buckets // 2 + extra
    one_way = [exact_bucket(max(-d, 0), num_buckets, max_distance) for d in distances]
    both_ways = [exact_bucket(abs(d), num_buckets, max_distance) + (d > 0) * num_buckets for d in distances]
    relative = torch.tensor(distances)
    assert relative_position_bucket(relative, num_buckets, max_distance, False).tolist() == one_way
    assert relative_position_bucket(relative, 2 * num_buckets, max_distance, True).tolist() == both_ways


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base", [2, 3, 10])
def test_distances_that_are_exact_powers_fall_in_their_own_bucket(device, base):
    """half = base, max = base**9, 8 buckets between: each power of the base starts a bucket, whatever log rounds to."""
    num_buckets = 2 * base
    max_distance = base ** (base + 1)
    distances = torch.tensor([base**power for power in range(1, base + 1)], device=device)
    buckets = relative_position_bucket(-distances, num_buckets, max_distance, False).tolist()
    assert buckets == [base + power - 1 for power in range(1, base + 1)]
    before = relative_position_bucket(1 - distances, num_buckets, max_distance, False).tolist()
    assert before == [bucket - 1 for bucket in buckets]


def test_relative_bias_reads_its_table():
    bias = RelativeBias(3, 8, 20)
    queries, keys = torch.arange(2, 6), torch.arange(6)
    out_HQK = bias(queries, keys)
    for q, k in [(0, 0), (0, 5), (3, 0), (3, 5)]:
        distance = max(queries[q].item() - keys[k].item(), 0)
        assert torch.equal(out_HQK[:, q, k], bias.table[:, exact_bucket(distance, 8, 20)])


def test_relative_bias_gradient_counts_the_pairs_of_a_bucket():
    bias = RelativeBias(2, 8, 8).double()
    positions = torch.arange(12)
    weight_H11 = torch.tensor([1.0, -2.0], dtype=torch.float64)[:, None, None]
    (bias(positions, positions) * weight_H11).sum().backward()
    buckets = relative_position_bucket(positions[None] - positions[:, None], 8, 8, False)
    counts = buckets.flatten().bincount(minlength=8).double()
    assert torch.equal(bias.table.grad, torch.stack([counts, -2 * counts]))


def test_relative_bias_starts_with_deviation_of_the_bucket_count():
    table = RelativeBias(400, 64, 128).table
    assert table.std().item() * 8 == pytest.approx(1.0, abs=0.03)  # 25600 draws: 5 standard errors are 0.022
    assert abs(table.mean().item()) * 8 < 0.04


@given(seed=st.integers(0, 2**31), shift=st.integers(-1000, 1000), half=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_rotary_scores_depend_on_relative_positions_only(seed, shift, half):
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 3, 6, 2 * half, generator=generator, dtype=torch.float64)
    positions = torch.arange(6)

    def scores(offset):
        return rotate(query, positions + offset) @ rotate(key, positions + offset).transpose(-1, -2)

    # angles up to 1000 carry an error of 1e-13
    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-10)


def test_rotary_keeps_norms_and_position_zero():
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    turned = rotate(x, torch.arange(7) * 31)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(rotate(x, torch.zeros(7, dtype=torch.int64)), x)
    pairs = turned.unflatten(-1, (2, 3)).norm(dim=-2)
    torch.testing.assert_close(pairs, x.unflatten(-1, (2, 3)).norm(dim=-2), rtol=1e-14, atol=0)


def test_rotary_by_hand():
    """D = 4, position 2: the pair (0, 2) turns by 2, the pair (1, 3) by 2 * 10000**-0.5 = 0.02."""
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    expected = [math.cos(2), -math.sin(0.02), math.sin(2), math.cos(0.02)]
    torch.testing.assert_close(rotate(x, torch.tensor([2])), torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rotary_angles_are_not_rounded_to_half_precision(dtype):
    x = torch.randn(3, 4).to(dtype)
    positions = torch.tensor([0, 2049, 30001])  # float16 holds neither of the last two
    turned = rotate(x, positions)
    assert turned.dtype == dtype
    # float32 angles near 30001 are rounded by 0.001
    tolerance = 2e-3 + torch.finfo(dtype).eps
    torch.testing.assert_close(turned.double(), rotate(x.double(), positions), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("width", [2, 6, 16])
def test_sinusoidal_closed_form(width):
    out = sinusoidal(torch.tensor([0, 1, 50]), width, torch.float64)
    for row, position in enumerate([0, 1, 50]):
        angles = [position / 10_000 ** (2 * i / width) for i in range(width // 2)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        assert out[row].tolist() == pytest.approx(expected, abs=1e-13)


@pytest.mark.usefixtures("unchecked")
def test_odd_widths_are_refused():
    with pytest.raises(ConfigError, match=r"width per head = 3 .* even"):
        rotate(torch.ones(1, 3), torch.arange(1))
    with pytest.raises(ConfigError, match=r"width = 5 .* even"):
        sinusoidal(torch.arange(2), 5, torch.float32)
    with pytest.raises(ConfigError, match=r"qk_dim = 12 .* even"):
        MultiHeadAttention(8, 4, qk_dim=12, positions="rotary")


@pytest.mark.parametrize("positions", ["t5", "rotary"])
def test_queries_of_cross_attention_are_the_last_positions(positions):
    """A layer that reads its own tokens as context gives, for the last queries alone, the rows of all of them."""
    layer = MultiHeadAttention(8, 2, positions=positions, dtype=torch.float64)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    for causal in (False, True):
        torch.testing.assert_close(layer(x[:, 4:], x, causal=causal), layer(x, causal=causal)[:, 4:])
