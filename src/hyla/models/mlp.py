"""The plain network of P2: an MLP that reads an encoding of the task beside each point."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from hyla.configs import check_sizes, check_types
from hyla.layout import InputLayout
from hyla.models.base import MAX_SIZE, EncodingReader, Model, ModelOutput
from hyla.models.feedforward import linear


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP with ReLU."""

    num_layers: int = 4
    """Hidden layers."""
    width: int = 1024
    """Width of every hidden layer."""
    token_dim: int = 16
    """Width of a token, for encodings made of token ids."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        check_sizes(self, "model", dict.fromkeys(("num_layers", "width", "token_dim"), (1, MAX_SIZE)))


class FirstLayer(nn.Module):
    """`relu(W [encoding, point] + b)` for all points of a task, the encoding multiplied once instead of once a point."""

    def __init__(self, encoding_width: int, point_dim: int, width: int):
        super().__init__()
        self.encoding_width = encoding_width
        self.linear = linear(encoding_width + point_dim, width)

    def forward(
        self, encoding_BD: Float[Tensor, "batch encoding"], points_BNI: Float[Tensor, "batch points inputs"]
    ) -> Float[Tensor, "batch points width"]:
        of_encoding, of_points = self.linear.weight.tensor_split([self.encoding_width], 1)
        task_BW = F.linear(encoding_BD, of_encoding, self.linear.bias)
        return F.relu(F.linear(points_BNI, of_points) + task_BW[:, None])


class HiddenLayer(nn.Module):
    """`relu(W x + b)`."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.linear = linear(inputs, width)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch width"]:
        return F.relu(self.linear(x))


class MLP(Model):
    """Answers every point by itself. `hidden.0`, `hidden.1`, ... are the layers after their ReLU, `head` the readout.

    Weights are truncated normal with variance 1/fan_in, biases 0, as in P2's public code.
    """

    def __init__(self, config: MLPConfig, *, layout: InputLayout, output_dim: int):
        super().__init__()
        self.config, self.layout = config, layout
        self.reader = EncodingReader(layout, config.token_dim)
        first = FirstLayer(self.reader.width, layout.point_dim, config.width)
        rest = [HiddenLayer(config.width, config.width) for _ in range(config.num_layers - 1)]
        self.hidden = nn.ModuleList([first, *rest])
        self.head = linear(config.width, output_dim)

    @property
    def hidden_names(self) -> tuple[str, ...]:
        return tuple(f"hidden.{index}" for index in range(len(self.hidden)))

    def forward(
        self,
        inputs: Shaped[Tensor, "batch numbers"],
        *,
        predict_at: slice | None = None,
        keep: list[Bool[Tensor, "..."]] | None = None,
    ) -> ModelOutput:
        """Predictions `[B, N, output_dim]` for rows of the layout. Every point is answered: `predict_at`, which leaves out
        the encoding in a sequence model, and `keep` change nothing here."""
        encoding, points_BNI = self.layout.unpack(inputs)
        x = self.hidden[0](self.reader(encoding), points_BNI)
        for layer in self.hidden[1:]:
            x = layer(x)
        return ModelOutput(self.head(x))
