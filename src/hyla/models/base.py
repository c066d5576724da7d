"""What every architecture offers, so that training, evaluation and the reading of activations know only this."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Shaped
from torch import Tensor, nn

from hyla.layout import InputLayout

MAX_SIZE = 2**20  # of any width or number in a config: far above what trains, far below what breaks an allocator


class ModelOutput(NamedTuple):
    """predictions `[B, answers, output_dim]`; codes, one `[B, H, Q, K]` per attention layer when asked for; balance_loss,
    the mean load-balancing loss of a mixture of experts (None without one)."""

    predictions: Tensor
    codes: tuple[Tensor, ...] | None = None
    balance_loss: Tensor | None = None


class Model(nn.Module):
    """Base of all architectures: `forward(inputs, *, predict_at=None, keep=None)` answers with a :class:`ModelOutput`."""

    config: Any

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def hidden_names(self) -> tuple[str, ...]:
        """The submodules whose outputs are the hidden activations, first to last."""
        return ()

    def draw_keep(self, batch_size: int, num_tokens: int, predict_at: slice | None = None) -> list[Tensor]:
        """The dropout masks of one forward pass, for those who must repeat them; none by default."""
        return []


class EncodingReader(nn.Module):
    """An encoding of the task as one vector: as it is; or token ids through a table, their vectors joined."""

    def __init__(self, layout: InputLayout, token_dim: int):
        super().__init__()
        self.table = None if layout.vocab_size is None else nn.Embedding(layout.vocab_size, token_dim)
        self.width = layout.encoding_size * (1 if self.table is None else token_dim)

    def forward(self, encoding: Shaped[Tensor, "batch ..."]) -> Tensor:
        """`[B, width]`."""
        return (encoding if self.table is None else self.table(encoding)).flatten(1)
