"""The named mechanisms: how scores become the latent code, and which value network the code configures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from hyla.errors import check

ScoreNorm = Literal["softmax", "none", "rms_head"]
Activation = Literal["relu", "silu", "gelu", "identity"]
MechanismName = Literal[
    "softmax",
    "linear",
    "linear_rms_head",
    "hyla",
    "hyla_no_rms_head",
    "hyla_linear",
    "hyla_linear_no_rms_head",
    "hyla_softmax",
    "hyla_plus",
]

# Every activation maps 0 to 0: a masked pair, whose code is 0, must contribute exactly nothing.
ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "identity": lambda x: x}

RMS_EPSILON = 1e-6  # inside the root of rms_head, whatever the dtype (P1)


@dataclass(frozen=True)
class ValueNetwork:
    """The network that the latent code of a pair configures.

    depth: number of layers, the output projection included. 1 is ordinary attention (a linear map per pair), 2 the value
    network of HYLA, 3 that of HYLA+; each layer beyond the second has weights `[H, Dv, Dv]` of its own.
    activation: applied after every layer but the last; `identity` gives the paper's "no nonlinearity" ablation.
    """

    depth: int = 2
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        check(self.depth >= 1, "depth", self.depth, "a value network has at least 1 layer")
        check(self.activation in ACTIVATIONS, "activation", self.activation, f"choose from {', '.join(ACTIVATIONS)}")

    @property
    def num_further_weights(self) -> int:
        """How many `[H, Dv, Dv]` weights it needs besides the value and output projections."""
        return max(self.depth - 2, 0)

    def activate(self, hidden: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](hidden)


@dataclass(frozen=True)
class Mechanism:
    """A score normalisation and a value network."""

    score_norm: ScoreNorm
    value_network: ValueNetwork

    def __post_init__(self) -> None:
        names = get_args(ScoreNorm)
        check(self.score_norm in names, "score_norm", self.score_norm, f"choose from {', '.join(names)}")


MECHANISMS: dict[str, Mechanism] = {
    "softmax": Mechanism("softmax", ValueNetwork(1)),
    "linear": Mechanism("none", ValueNetwork(1)),
    "linear_rms_head": Mechanism("rms_head", ValueNetwork(1)),
    "hyla": Mechanism("rms_head", ValueNetwork(2)),
    "hyla_no_rms_head": Mechanism("none", ValueNetwork(2)),
    "hyla_linear": Mechanism("rms_head", ValueNetwork(2, "identity")),
    "hyla_linear_no_rms_head": Mechanism("none", ValueNetwork(2, "identity")),
    "hyla_softmax": Mechanism("softmax", ValueNetwork(2)),
    "hyla_plus": Mechanism("rms_head", ValueNetwork(3)),
}


def resolve_mechanism(
    mechanism: str = "hyla", score_norm: ScoreNorm | None = None, value_network: ValueNetwork | None = None
) -> Mechanism:
    """The mechanism called `mechanism`, with its score normalisation or value network replaced where given."""
    check(mechanism in MECHANISMS, "mechanism", mechanism, f"choose from {', '.join(MECHANISMS)}")
    named = MECHANISMS[mechanism]
    return Mechanism(score_norm or named.score_norm, value_network or named.value_network)
