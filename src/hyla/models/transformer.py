"""The transformer of P1 (section 2 of its facts): pre-norm blocks around any attention mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from hyla.attention import MultiHeadAttention, ValueNetwork, resolve_mechanism, sinusoidal
from hyla.attention.eager import draw_keep
from hyla.attention.functional import Backend
from hyla.attention.layer import NORM_EPSILON
from hyla.attention.mechanisms import Activation, MechanismName, ScoreNorm
from hyla.configs import ADDED, check_sizes, check_types
from hyla.errors import check
from hyla.layout import InputLayout
from hyla.models.base import MAX_SIZE, Model, ModelOutput
from hyla.models.feedforward import FeedForward, SwiGLU, linear
from hyla.models.mixture import Mixture


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a transformer. The defaults are P1's for fuzzy logic."""

    mechanism: MechanismName = "hyla"
    """Attention mechanism: a score normalisation and a value network."""
    score_norm: ScoreNorm | None = None
    """Replaces the mechanism's score normalisation."""
    depth: int | None = None
    """Replaces the depth of the mechanism's value network (1 = ordinary attention)."""
    activation: Activation | None = None
    """Replaces the activation of the mechanism's value network."""
    num_layers: int = 2
    """Number of blocks."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 8
    """Attention heads; also the size of a latent code."""
    num_kv_heads: int | None = None
    """Heads of keys and values; as many as num_heads by default."""
    qk_dim: int = 16
    """Width of queries and keys, over all heads."""
    v_dim: int = 16
    """Width of values, over all heads."""
    mlp: Literal["gelu", "swiglu", "mixture"] = "gelu"
    """Position-wise network: GELU with biases, SwiGLU without, or a mixture of GELU experts."""
    mlp_dim: int = 256
    """Hidden width of the position-wise network (of each expert)."""
    num_experts: int = 4
    """Experts of a mixture."""
    top_k: int = 2
    """Experts used for each token of a mixture."""
    balance_weight: float = 0.01
    """Weight of a mixture's load-balancing loss."""
    norm: Literal["layer", "rms"] = "layer"
    """Norm of the blocks; the final one is always LayerNorm."""
    positions: Literal["t5", "rotary", "sinusoidal", "none"] = "t5"
    """Position scheme; t5 is a relative bias per block."""
    num_buckets: int | None = None
    """Buckets of the t5 bias; the sequence length by default."""
    max_distance: int | None = None
    """Distance from which t5 buckets no longer differ; the sequence length by default."""
    bidirectional: bool = False
    """Whether t5 buckets tell apart the keys to the right of the query (P1: no, even without a causal mask)."""
    causal: bool = False
    """Whether queries see no later keys."""
    attention_dropout: float = 0.0
    """Share of the latent codes dropped in training."""
    dropout_shared: bool = True
    """One dropout mask for the whole batch and all heads, as in P1's public code."""
    backend: Backend = "auto"
    """How attention is computed; the run records what auto chose."""
    bias: bool = dataclasses.field(default=True, metadata=ADDED)
    """Biases in the projections, position-wise networks and norms of the blocks (P2: none)."""
    qk_norm: bool = dataclasses.field(default=False, metadata=ADDED)
    """LayerNorm without bias on every head's queries and keys (P2)."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        sizes = ("num_layers", "embed_dim", "num_heads", "qk_dim", "v_dim", "mlp_dim", "num_experts")
        check_sizes(self, "model", dict.fromkeys(sizes, (1, MAX_SIZE)))
        for field in ("qk_dim", "v_dim"):
            divides = getattr(self, field) % self.num_heads == 0
            allowed = f"must be a multiple of model.num_heads = {self.num_heads}"
            check(divides, f"model.{field}", getattr(self, field), allowed)
        kv_heads = self.num_kv_heads
        shares = kv_heads is None or (kv_heads >= 1 and self.num_heads % kv_heads == 0)
        check(shares, "model.num_kv_heads", kv_heads, f"must divide model.num_heads = {self.num_heads}")
        check(1 <= self.top_k <= self.num_experts, "model.top_k", self.top_k, f"1 to num_experts = {self.num_experts}")
        check(
            0 <= self.attention_dropout < 1, "model.attention_dropout", self.attention_dropout, "0 up to 1, without 1"
        )
        check(self.balance_weight >= 0, "model.balance_weight", self.balance_weight, "0 or more")
        check(self.depth is None or self.depth >= 1, "model.depth", self.depth, "at least 1")
        if self.positions == "rotary":
            even = self.qk_dim // self.num_heads % 2 == 0
            check(even, "model.qk_dim", self.qk_dim, "rotary positions need an even width per head")
        if self.positions == "sinusoidal":
            check(self.embed_dim % 2 == 0, "model.embed_dim", self.embed_dim, "sinusoidal positions need an even width")

    @property
    def value_network(self) -> ValueNetwork:
        network = resolve_mechanism(self.mechanism).value_network
        return ValueNetwork(network.depth if self.depth is None else self.depth, self.activation or network.activation)


def embedding_table(vocab_size: int, width: int) -> nn.Embedding:
    """A table of token vectors, normal with variance 1/width."""
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def make_norm(config: TransformerConfig) -> nn.Module:
    """A norm of the blocks."""
    if config.norm == "rms":
        return nn.RMSNorm(config.embed_dim, eps=NORM_EPSILON)
    return nn.LayerNorm(config.embed_dim, eps=NORM_EPSILON, bias=config.bias)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: TransformerConfig, sequence_length: int):
        super().__init__()
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attention = MultiHeadAttention(
            config.embed_dim,
            config.num_heads,
            mechanism=config.mechanism,
            score_norm=config.score_norm,
            value_network=config.value_network,
            num_kv_heads=config.num_kv_heads,
            qk_dim=config.qk_dim,
            v_dim=config.v_dim,
            dropout=config.attention_dropout,
            dropout_shared=config.dropout_shared,
            positions=config.positions if config.positions != "sinusoidal" else "none",
            num_buckets=config.num_buckets or max(sequence_length, 2),
            max_distance=config.max_distance or max(sequence_length, 2),
            bidirectional=config.bidirectional,
            bias=config.bias,
            qk_norm=config.qk_norm,
            backend=config.backend,
        )
        self.causal = config.causal
        if config.mlp == "mixture":
            self.mlp = Mixture(config.embed_dim, config.mlp_dim, config.num_experts, config.top_k)
        elif config.mlp == "gelu":
            self.mlp = FeedForward(config.embed_dim, config.mlp_dim, config.backend, config.bias)
        else:
            self.mlp = SwiGLU(config.embed_dim, config.mlp_dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        key_mask: Tensor | None,
        select: slice | None,
        keep: Tensor | None,
        return_codes: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(output, codes, load-balancing loss); of the queries in `select` only, where given."""
        options: dict[str, Any] = {"mask": mask, "key_mask": key_mask, "causal": self.causal}
        options |= {"select": select, "keep": keep}
        options["return_codes"] = return_codes
        if _watched(self.attention):
            attended = self.attention(self.norm1(x), **options)
            attended, codes = attended if return_codes else (attended, None)
            x = (x if select is None else x[..., select, :]) + attended
        else:
            x = self.attention(x, **options, norm=self.norm1, residual=True)
            x, codes = x if return_codes else (x, None)
        if isinstance(self.mlp, Mixture):
            real = key_mask if key_mask is None or select is None else key_mask[..., select]
            mixed, balance = self.mlp(self.norm2(x), real)
            return x + mixed, codes, balance
        if isinstance(self.mlp, FeedForward) and not _watched(self.mlp):
            return self.mlp(x, self.norm2), codes, None
        return x + self.mlp(self.norm2(x)), codes, None


def _watched(module: nn.Module) -> bool:
    """Whether a hook will see what the module answers: it must then be that alone, without the residual sum."""
    return bool(module._forward_hooks)


def same_document(begins: Bool[Tensor, "*batch tokens"]) -> Bool[Tensor, "*batch 1 tokens tokens"]:
    """Which pairs of tokens lie in one document, given where documents begin."""
    document = begins.cumsum(-1)
    return (document[..., :, None] == document[..., None, :])[..., None, :, :]


class Transformer(Model):
    """Embedding, blocks, LayerNorm, linear head.

    Args:
        config: sizes and choices.
        input_dim, output_dim: widths of real-valued tokens in and out; or
        vocab_size: reads token ids instead, through a table that is tied to the output (logits divided by sqrt(E));
            boundary_token: the token that begins a new document, beyond which attention does not look back; or
        layout, output_dim: reads an encoding of the task as the first token (or tokens), then the points, as P2's do.
        sequence_length: T, which sets the t5 buckets; other lengths still run.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sequence_length: int,
        input_dim: int | None = None,
        output_dim: int | None = None,
        vocab_size: int | None = None,
        layout: InputLayout | None = None,
        boundary_token: int | None = None,
    ):
        super().__init__()
        given = [vocab_size is not None, input_dim is not None, layout is not None]
        allowed = "give one of vocab_size, input_dim and layout; the last two with output_dim"
        one = sum(given) == 1 and (output_dim is None) == (vocab_size is not None)
        check(one, "vocab_size, input_dim, layout, output_dim", (vocab_size, input_dim, layout, output_dim), allowed)
        allowed = "only token ids have boundaries; give a vocab_size"
        check(boundary_token is None or vocab_size is not None, "boundary_token", boundary_token, allowed)
        self.config, self.layout, self.boundary_token = config, layout, boundary_token
        if vocab_size is not None:
            self.embedding = embedding_table(vocab_size, config.embed_dim)
            self.head = None
        elif output_dim is not None:
            width = layout.point_dim if layout is not None else input_dim or 0
            self.embedding = linear(width, config.embed_dim)
            self.head = linear(config.embed_dim, output_dim)
        if layout is not None and layout.vocab_size is not None:
            self.encoding = embedding_table(layout.vocab_size, config.embed_dim)
        elif layout is not None:
            self.encoding = linear(layout.encoding_shape[-1], config.embed_dim, bias=False)
        self.blocks = nn.ModuleList(Block(config, sequence_length) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim, eps=NORM_EPSILON, bias=config.bias)

    @property
    def hidden_names(self) -> tuple[str, ...]:
        return tuple(f"blocks.{index}" for index in range(len(self.blocks)))

    def forward(
        self,
        inputs: Shaped[Tensor, "..."],
        *,
        predict_at: slice | None = None,
        key_mask: Bool[Tensor, "*batch tokens"] | None = None,
        keep: Sequence[Bool[Tensor, "..."]] | None = None,
        return_codes: bool = False,
    ) -> ModelOutput:
        """Predictions for `inputs [B, T, input_dim]` (token ids `[B, T]` with a vocabulary, rows of a layout with one).

        predict_at: only these positions are answered, and the last block computes only them: the same numbers for less
        work (a mixture's balance then also counts only these tokens in the last block). key_mask: `[B, T]`, True = a real
        token. keep: a dropout mask per block, as `draw_keep` draws them, where they must be repeated. return_codes: also
        the latent codes of every block (the last block's for the answered positions only).
        """
        x = self.embed(inputs)
        if self.config.positions == "sinusoidal":
            x = x + sinusoidal(torch.arange(x.shape[-2], device=x.device), x.shape[-1], x.dtype)
        mask = None if self.boundary_token is None else same_document(inputs == self.boundary_token)
        predict_at = None if predict_at == slice(None) else predict_at
        codes, balances = [], []
        for depth, block in enumerate(self.blocks, 1):
            select = predict_at if depth == len(self.blocks) else None
            x, code, balance = block(x, mask, key_mask, select, keep[depth - 1] if keep else None, return_codes)
            codes.append(code)
            balances.append(balance)
        x = self.norm(x)
        if self.head is None:  # tied; scaling the tokens costs less than scaling the logits
            predictions = (x * self.config.embed_dim**-0.5) @ self.embedding.weight.T
        else:
            predictions = self.head(x)
        balance_loss = torch.stack(balances).mean() if self.config.mlp == "mixture" else None
        return ModelOutput(predictions, tuple(codes) if return_codes else None, balance_loss)

    def embed(self, inputs: Shaped[Tensor, "..."]) -> Tensor:
        """Tokens `[B, T, E]`, before any positions."""
        if isinstance(self.embedding, nn.Embedding):
            return self.embedding(inputs)
        encoding, points = (None, inputs) if self.layout is None else self.layout.unpack(inputs)
        # With the table turned in memory, the product for its gradient is several times faster where inputs are narrow.
        x = F.linear(points, self.embedding.weight.T.contiguous().T, self.embedding.bias)
        if encoding is None:
            return x
        first = self.encoding(encoding)
        return torch.cat([first if first.dim() == x.dim() else first[..., None, :], x], -2)

    def draw_keep(self, batch_size: int, num_tokens: int, predict_at: slice | None = None) -> list[Tensor]:
        """The attention dropout masks of one forward pass, block by block as the blocks themselves would draw them; none
        without dropout."""
        config, device = self.config, self.norm.weight.device
        if config.attention_dropout == 0.0:
            return []
        masks = []
        for depth in range(1, config.num_layers + 1):
            queries = range(num_tokens)[predict_at or slice(None)] if depth == config.num_layers else range(num_tokens)
            shape = (batch_size, config.num_heads, len(queries), num_tokens)
            masks.append(draw_keep(shape, config.attention_dropout, config.dropout_shared, device))
        return masks
