"""The modular baseline of P2: a linear hypernetwork that turns the encoding into all weights of a small MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from hyla.attention.layer import NORM_EPSILON
from hyla.configs import check_sizes, check_types
from hyla.layout import InputLayout
from hyla.models.base import MAX_SIZE, EncodingReader, Model, ModelOutput
from hyla.models.feedforward import linear


@dataclass(frozen=True)
class HypernetworkConfig:
    """Sizes of the generated network, which has one hidden layer with ReLU."""

    width: int = 1024
    """Hidden width of the generated network."""
    token_dim: int = 16
    """Width of a token, for encodings made of token ids."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        check_sizes(self, "model", dict.fromkeys(("width", "token_dim"), (1, MAX_SIZE)))


class GeneratedLayer(nn.Module):
    """`x W / sqrt(fan_in) + b` with weights of each task's own: scaled as they are used, so that what is generated has
    variance 1 and the layer that of an ordinary one."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs

    @property
    def num_generated(self) -> int:
        return (self.inputs + 1) * self.outputs

    def forward(
        self, x_BNI: Float[Tensor, "batch points inputs"], generated_BG: Float[Tensor, "batch generated"]
    ) -> Float[Tensor, "batch points outputs"]:
        weight, bias = generated_BG.split([self.inputs * self.outputs, self.outputs], -1)
        weight_BIO = weight.unflatten(-1, (self.inputs, self.outputs)) * self.inputs**-0.5
        return x_BNI @ weight_BIO + bias[:, None]


class Hypernetwork(Model):
    """LayerNorm and a linear layer from the encoding to the weights (`generator`), then the generated network: `hidden`
    before its ReLU, and `readout`. The generated biases start with variance 1 like the unscaled weights, as in P2's public
    code, which however makes the scaled weights larger by 1/0.88, the correction of a truncation that they have not had.
    """

    def __init__(self, config: HypernetworkConfig, *, layout: InputLayout, output_dim: int):
        super().__init__()
        self.config, self.layout = config, layout
        self.reader = EncodingReader(layout, config.token_dim)
        self.hidden = GeneratedLayer(layout.point_dim, config.width)
        self.readout = GeneratedLayer(config.width, output_dim)
        self.norm = nn.LayerNorm(self.reader.width, eps=NORM_EPSILON)
        self.generator = linear(self.reader.width, self.hidden.num_generated + self.readout.num_generated)

    @property
    def hidden_names(self) -> tuple[str, ...]:
        return ("hidden",)

    def forward(
        self,
        inputs: Shaped[Tensor, "batch numbers"],
        *,
        predict_at: slice | None = None,
        keep: list[Bool[Tensor, "..."]] | None = None,
    ) -> ModelOutput:
        """Predictions `[B, N, output_dim]` for rows of the layout; `predict_at` and `keep` as in
        :class:`hyla.models.mlp.MLP`."""
        encoding, points_BNI = self.layout.unpack(inputs)
        generated = self.generator(self.norm(self.reader(encoding)))
        first, second = generated.split([self.hidden.num_generated, self.readout.num_generated], -1)
        return ModelOutput(self.readout(F.relu(self.hidden(points_BNI, first)), second))
