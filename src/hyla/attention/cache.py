"""The keys and values that a layer has seen, for decoding step by step."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, cat


class KeyValueCache:
    """Keys and values of one attention layer, `[..., Hkv, K, D]`, as they were when computed (rotary positions applied).

    Give an empty one to every layer and call `layer(x, causal=True, cache=cache)` with the next token or tokens: the
    outputs are those of the whole sequence in one call. Each layer has its own, so that none can shift another's
    positions.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        """How many keys it holds: the position of the next token."""
        return 0 if self.key is None else self.key.shape[-2]

    def append(
        self,
        key: Float[Tensor, "*batch heads keys qk_depth"] | None,
        value: Float[Tensor, "*batch heads keys depth"] | None,
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of further tokens (None adds nothing); answers with all of them."""
        if key is not None and value is not None:
            self.key = key if self.key is None else cat([self.key, key], -2)
            self.value = value if self.value is None else cat([self.value, value], -2)
        assert self.key is not None
        assert self.value is not None
        return self.key, self.value

    def reorder(self, rows: Int[Tensor, " batch"]) -> None:
        """Keep these sequences of the batch, in this order, as beam search does."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[rows], self.value[rows]
