"""Encodings: the public code's values with its own draws, and inverses."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_values import arrays
from hyla.errors import ConfigError
from hyla.tasks.base import InputLayout
from hyla.tasks.encodings import (
    EncodingName,
    FewShot,
    Identity,
    IntervalShuffle,
    InvertibleNetwork,
    Orthogonal,
    Tokens,
    make_encoding,
)

INVERTIBLE = [name for name in get_args(EncodingName) if name not in ("fewshot", "tokens")]


def public(name):
    """The encoding with what the public code drew."""
    data = {key: torch.from_numpy(value) for key, value in arrays("encodings").items()}
    if name == "orthogonal":
        return Orthogonal(data["orthogonal_Q"])
    if name == "interval_shuffle":
        return IntervalShuffle(6, data["interval_map"].tolist())
    if name == "invertible_nn":
        parts = [
            [(data[f"invertible_nn_w_{i}_{j}"], data[f"invertible_nn_b_{i}_{j}"]) for j in range(3)] for i in range(3)
        ]
        return InvertibleNetwork(6, parts)
    return Tokens(6) if name == "tokens" else Identity(6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*INVERTIBLE, "tokens"])
def test_equals_the_public_encodings(name, dtype):
    latents, expected = torch.from_numpy(arrays("encodings")["latents"]), arrays("encodings")[name]
    encoding = public(name)
    assert encoding.name == name
    encoded = encoding.encode(latents.to(dtype))
    assert encoded.shape[1:] == encoding.shape
    if name == "tokens":
        assert encoded.tolist() == expected.tolist()
        assert encoded.max() < encoding.vocab_size
    else:
        assert encoded.dtype == dtype
        np.testing.assert_allclose(encoded.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(encoding.decode(encoded).numpy(), latents.numpy(), atol=1e-6)


@pytest.mark.parametrize("name", INVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=25)
@given(modules=st.integers(1, 9), seed=st.integers(0, 100), data=st.data())
def test_decoding_undoes_encoding(name, dtype, modules, seed, data):
    """Any values of [0, 1], ends of tenths and their neighbours among them."""
    ends = [round(0.1 * k, 1) for k in range(11)]
    near = [float(np.nextafter(np.float32(end), np.float32(to))) for end in ends for to in (0, 1)]
    value = st.one_of(st.floats(0, 1, width=32), st.sampled_from(ends + near))
    rows = data.draw(st.lists(st.lists(value, min_size=modules, max_size=modules), min_size=1, max_size=3))
    latents = torch.tensor(rows, dtype=dtype)
    encoding = make_encoding(name, modules, seed)
    encoded = encoding.encode(latents)
    assert encoded.dtype == dtype
    assert encoded.shape[1:] == encoding.shape
    tolerance = 1e-12 if dtype == torch.float64 and name != "interval_shuffle" else 2e-6
    assert (encoding.decode(encoded) - latents).abs().max() < tolerance
    assert torch.equal(make_encoding(name, modules, seed).encode(latents[0]), encoding.encode(latents[0]))


def test_tenths_are_whatever_way_they_were_computed():
    """0.7, 0.5 + 0.2, 7 / 10 and 1 - 0.3 are one value, in either precision, which float32 alone would not say."""
    for dtype in (torch.float32, torch.float64):
        for k in range(11):
            ways = [torch.tensor(0.1, dtype=dtype) * k, torch.tensor(float(k), dtype=dtype) / 10]
            ways += [1 - torch.tensor(0.1, dtype=dtype) * (10 - k), torch.tensor(k / 10).to(dtype)]
            latents = torch.stack(ways)[:, None]
            assert Tokens(1).encode(latents)[:, 1].tolist() == [k + 2] * 4
            shuffled = make_encoding("interval_shuffle", 1, seed=3).encode(latents)
            assert shuffled.max() - shuffled.min() < 1e-6


def test_interval_shuffle_by_its_definition():
    encoding = make_encoding("interval_shuffle", 1, seed=1)
    assert encoding.order != tuple(range(10))
    for value in (0.0, 0.05, 0.123, 0.55, 0.999):
        expected = value - int(10 * value) / 10 + encoding.order[int(10 * value)] / 10
        assert encoding.encode(torch.tensor([value], dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-12)
    assert encoding.encode(torch.tensor([1.0])).item() == 1.0


def test_orthogonal_matrices_are_orthogonal_and_unbiased():
    drawn = torch.stack([make_encoding("orthogonal", 4, seed).matrix for seed in range(500)])
    assert (drawn @ drawn.mT - torch.eye(4)).abs().max() < 1e-12
    # Haar: every entry has mean 0 and variance 1 / M; without the sign fix the diagonal's mean is about -0.4
    assert drawn.mean(0).abs().max() < 4 * (0.25 / 500) ** 0.5
    assert (drawn.square().mean(0) - 0.25).abs().max() < 0.05
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("modules", [2, 5, 16, 32])
def test_the_invertible_network_is_well_conditioned(modules):
    """Singular values of its Jacobian, by automatic differentiation; a change of seed changes it."""
    for seed in range(3):
        encoding = make_encoding("invertible_nn", modules, seed)
        at = torch.rand(modules, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(encoding.encode, at)
        values = torch.linalg.svdvals(jacobian)
        assert values.max() / values.min() < 10
        assert not torch.equal(encoding.encode(at), make_encoding("invertible_nn", modules, seed + 1).encode(at))


def test_each_half_of_a_coupling_depends_on_the_other():
    jacobian = torch.autograd.functional.jacobian(
        make_encoding("invertible_nn", 6).encode, torch.rand(6, dtype=torch.float64)
    )
    assert (jacobian[:3, 3:] != 0).all()
    assert (jacobian[3:, :3] != 0).all()


def test_encodings_fill_the_rows_of_a_layout():
    latents, points = torch.rand(3, 5), torch.rand(3, 4, 2)
    for name in get_args(EncodingName):
        encoding = make_encoding(name, 5, example_dim=3)
        encoded = encoding.encode(torch.rand(3, 50, 3) if name == "fewshot" else latents)
        layout = InputLayout(encoding.shape, 4, 2, encoding.vocab_size)
        unpacked, same_points = layout.unpack(layout.pack(encoded, points))
        assert torch.equal(unpacked, encoded)
        assert torch.equal(same_points, points)


@pytest.mark.usefixtures("unchecked")
def test_impossible_encodings_are_refused():
    for arguments, message in (
        (("onehot", 4), r"task.encoding = 'onehot' .* one of identity, orthogonal"),
        (("identity", 0), r"task.num_modules = 0"),
        (("fewshot", 4), r"example_dim = None .* numbers of one labelled point"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_encoding(*arguments)
    with pytest.raises(ConfigError, match=r"examples = \(2, 4, 3\) is not possible: must end in \(5, 3\)"):
        FewShot(5, 3).encode(torch.zeros(2, 4, 3))
    with pytest.raises(ConfigError, match=r"task.num_examples = 0"):
        make_encoding("fewshot", 4, num_examples=0, example_dim=2)
