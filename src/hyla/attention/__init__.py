"""Attention as a hypernetwork: the layer, its function, and the equations they implement (README.md beside this file)."""

from hyla.attention.eager import generate_value_network, per_pair_attention
from hyla.attention.functional import choose_backend, hyper_attention
from hyla.attention.layer import MultiHeadAttention
from hyla.attention.mechanisms import MECHANISMS, Mechanism, ValueNetwork, resolve_mechanism
from hyla.attention.positions import RelativeBias, relative_position_bucket, rotate, sinusoidal

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "MultiHeadAttention",
    "RelativeBias",
    "ValueNetwork",
    "choose_backend",
    "generate_value_network",
    "hyper_attention",
    "per_pair_attention",
    "relative_position_bucket",
    "resolve_mechanism",
    "rotate",
    "sinusoidal",
]
