"""Decoding step by step with a cache gives what one call on the whole sequence gives (KV-01)."""

import pytest
import torch
from torch import nn

from hyla.attention import KeyValueCache, Mechanism, MultiHeadAttention, ValueNetwork, sinusoidal
from hyla.errors import ConfigError

WIDTH, HEADS, CONTEXT = 16, 4, 5
NETWORKS = {"linear": ValueNetwork(1), "relu": ValueNetwork(2), "deep": ValueNetwork(3)}
SETTINGS = {
    f"{norm} {network}": Mechanism(norm, NETWORKS[network])
    for norm in ("softmax", "none", "rms_head")
    for network in NETWORKS
}


class Recorder(KeyValueCache):
    """A cache that notes the position from which each of its layer's calls started."""

    def __init__(self):
        super().__init__()
        self.starts = []

    def append(self, key, value):
        self.starts.append(self.length)
        return super().append(key, value)


class Decoder(nn.Module):
    """Layers of self-attention and, where asked for, cross-attention; ids in, logits out."""

    def __init__(self, mechanism, positions, num_layers, crossing, dtype):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, dtype=dtype)
        self.absolute = positions == "absolute"
        options = {"score_norm": mechanism.score_norm, "value_network": mechanism.value_network, "dtype": dtype}
        options |= {"positions": "none" if self.absolute else positions, "num_kv_heads": 2}
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS, **options) for _ in range(num_layers))
        self.crossing = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS, **options) for _ in range(num_layers * crossing))

    def forward(self, ids, context, caches=None, start=0):
        positions = torch.arange(start, start + ids.shape[1])
        x = self.table(ids)
        if self.absolute:
            x = x + sinusoidal(positions, WIDTH, x.dtype)
        for index, layer in enumerate(self.layers):
            own, other = (None, None) if caches is None else caches[index]
            x = nn.functional.rms_norm(x, (WIDTH,))
            x = x + layer(x, causal=True, cache=own)
            if len(self.crossing):
                x = x + self.crossing[index](x, context, cache=other, query_positions=positions)
        return x @ self.table.weight.T


def assert_steps_equal_whole(mechanism, positions, num_layers, num_tokens, crossing, dtype, tolerance):
    """Logits relative to the largest (unnormalised codes grow with every layer), greedy ids, and every layer's offsets."""
    ids, context = torch.randint(11, (2, num_tokens)), torch.randn(2, CONTEXT, WIDTH, dtype=dtype)
    model = Decoder(mechanism, positions, num_layers, crossing, dtype)
    caches = [(Recorder(), Recorder()) for _ in range(num_layers)]
    with torch.no_grad():
        whole = model(ids, context)
        steps = torch.cat([model(ids[:, t : t + 1], context, caches, t) for t in range(num_tokens)], 1)
    assert (steps - whole).abs().max() < tolerance * whole.abs().max().clamp(min=1)
    assert torch.equal(steps.argmax(-1), whole.argmax(-1))
    assert all(own.starts == list(range(num_tokens)) for own, _ in caches)
    assert all(other.length == CONTEXT * crossing for _, other in caches)


@pytest.mark.parametrize("positions", ["none", "t5", "rotary", "absolute"])
@pytest.mark.parametrize("name", SETTINGS)
def test_kv_01_one_token_at_a_time(name, positions):
    assert_steps_equal_whole(SETTINGS[name], positions, 2, 5, True, torch.float64, 1e-12)


# The other mechanisms have codes that are not normalised over keys or a deeper network: they amplify float32's rounding.
@pytest.mark.parametrize("name", ["softmax linear", "rms_head relu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_kv_01_at_its_full_size(name, dtype, tolerance):
    assert_steps_equal_whole(SETTINGS[name], "t5", 4, 20, False, dtype, tolerance)


def layer_and_tokens(**options):
    layer = MultiHeadAttention(12, 3, dtype=torch.float64, **options)
    return layer, torch.randn(2, 9, 12, dtype=torch.float64)


@pytest.mark.parametrize("positions", ["t5", "rotary"])
def test_several_tokens_at_once_masks_codes_and_a_selection(positions):
    layer, x = layer_and_tokens(positions=positions, num_kv_heads=1)
    real = torch.rand(2, 9) > 0.3
    whole, codes = layer(x, causal=True, key_mask=real, return_codes=True)
    cache = KeyValueCache()
    layer(x[:, :4], causal=True, key_mask=real[:, :4], cache=cache)
    rest, rest_codes = layer(x[:, 4:], causal=True, key_mask=real, cache=cache, return_codes=True)
    torch.testing.assert_close(rest, whole[:, 4:], rtol=0, atol=1e-12)
    torch.testing.assert_close(rest_codes, codes[:, :, 4:], rtol=0, atol=1e-12)
    cache = KeyValueCache()
    layer(x[:, :4], cache=cache)
    chosen = layer(x[:, 4:], causal=True, key_mask=real, cache=cache, select=slice(2, 4))
    torch.testing.assert_close(chosen, whole[:, 6:8], rtol=0, atol=1e-12)


def test_reordered_sequences_go_on_as_themselves():
    layer, x = layer_and_tokens(positions="rotary")
    cache = KeyValueCache()
    layer(x[:, :5], causal=True, cache=cache)
    rows = torch.tensor([1, 1, 0])
    cache.reorder(rows)
    rest = layer(x[rows, 5:], causal=True, cache=cache)
    torch.testing.assert_close(rest, layer(x[rows], causal=True)[:, 5:], rtol=0, atol=1e-12)


def test_rotary_positions_of_each_sequence():
    """Only distances count: the same tokens, 3 places further on in the second sequence, give the same outputs."""
    layer, x = layer_and_tokens(positions="rotary")
    positions = torch.stack([torch.arange(9), torch.arange(3, 12)])
    torch.testing.assert_close(layer(x, query_positions=positions), layer(x), rtol=0, atol=1e-12)


def test_what_a_cache_cannot_do():
    layer, x = layer_and_tokens(positions="t5")
    with pytest.raises(ConfigError, match="query_positions = None is not possible: cross-attention with a cache"):
        layer(x, x, cache=KeyValueCache())
    with pytest.raises(ConfigError, match="only rotary takes positions that differ between sequences"):
        layer(x, query_positions=torch.arange(9).expand(2, 9))
