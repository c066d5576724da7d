"""Attention as a hypernetwork: the layer, its function, and the equations they implement (README.md beside this file)."""

from hyla.attention.cache import KeyValueCache
from hyla.attention.eager import generate_value_network, per_pair_attention
from hyla.attention.functional import choose_backend, hyper_attention, latent_codes
from hyla.attention.hypernetwork import PairNetwork, output_change, pair_contributions, pair_network, value_parameters
from hyla.attention.layer import MultiHeadAttention
from hyla.attention.mechanisms import MECHANISMS, Mechanism, ValueNetwork, resolve_mechanism
from hyla.attention.positions import RelativeBias, relative_position_bucket, rotate, sinusoidal

__all__ = [
    "MECHANISMS",
    "KeyValueCache",
    "Mechanism",
    "MultiHeadAttention",
    "PairNetwork",
    "RelativeBias",
    "ValueNetwork",
    "choose_backend",
    "generate_value_network",
    "hyper_attention",
    "latent_codes",
    "output_change",
    "pair_contributions",
    "pair_network",
    "per_pair_attention",
    "relative_position_bucket",
    "resolve_mechanism",
    "rotate",
    "sinusoidal",
    "value_parameters",
]
