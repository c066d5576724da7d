"""The yardstick of the training step: P1's transformer in textbook PyTorch, trained one step at a time.

No trick: every position of every layer is computed, scores, codes and hidden vectors are whole tensors, AdamW has its
default settings. Paper sizes, batch 128, float32, no dropout, inputs drawn once. A test checks that it computes the loss
and gradients of `hyla.models.Transformer` with the same weights (its parameters have the same names). `hyla bench train`
times it in alternation with our own step; times of different runs of a shared machine do not compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyla.attention import relative_position_bucket


class Size(NamedTuple):
    length: int
    width: int
    heads: int
    depth: int  # per head
    mlp: int
    layers: int
    inputs: int
    outputs: int
    answers: int  # positions that are read, the last ones


SIZES = {
    "logic": Size(32, 128, 8, 2, 256, 2, 5, 1, 1),
    "sraven": Size(36, 128, 16, 4, 256, 4, 8, 8, 4),
}
BATCH = 128


class RelativeBias(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.table = nn.Parameter(torch.randn(size.heads, size.length) / size.length**0.5)
        place = torch.arange(size.length)
        bucket = relative_position_bucket(place - place[:, None], size.length, size.length, bidirectional=False)
        self.bucket = bucket

    def forward(self) -> Tensor:
        return self.table[:, self.bucket]


class Attention(nn.Module):
    def __init__(self, size: Size, mechanism: str):
        super().__init__()
        self.size, self.mechanism = size, mechanism
        inner = size.heads * size.depth
        self.q_proj = nn.Linear(size.width, inner)
        self.k_proj = nn.Linear(size.width, inner)
        self.v_proj = nn.Linear(size.width, inner)
        self.out_proj = nn.Linear(inner, size.width)
        self.relative_bias = RelativeBias(size)

    def heads(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.reshape(batch, length, self.size.heads, self.size.depth).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        score = torch.matmul(q, k.transpose(2, 3)) / self.size.depth**0.5 + self.relative_bias()
        if self.mechanism == "softmax":
            out = torch.matmul(torch.softmax(score, dim=-1), v)
        else:
            code = score / torch.sqrt(torch.mean(score**2, dim=1, keepdim=True) + 1e-6)
            hidden = F.relu(torch.einsum("bhqk,bhkd->bqkd", code, v))
            out = torch.einsum("bhqk,bqkd->bhqd", code, hidden)
        return self.out_proj(out.permute(0, 2, 1, 3).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.up, self.down = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size: Size, mechanism: str):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-6), nn.LayerNorm(size.width, eps=1e-6)
        self.attention, self.mlp = Attention(size, mechanism), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainTransformer(nn.Module):
    """`mechanism` is softmax or hyla."""

    def __init__(self, size: Size, mechanism: str):
        super().__init__()
        self.size = size
        self.embedding = nn.Linear(size.inputs, size.width)
        self.blocks = nn.ModuleList(Block(size, mechanism) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, size.outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Predictions `[B, answers, outputs]` at the last positions."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, -self.size.answers :]


def loss(task: str, predictions: Tensor, targets: Tensor) -> Tensor:
    if task == "logic":
        return F.mse_loss(predictions[:, 0], targets)
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())


def plain_step(task: str, mechanism: str) -> Callable[[], None]:
    """A function that makes one training step: forward, backward and AdamW."""
    size = SIZES[task]
    model = PlainTransformer(size, mechanism)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    inputs = torch.randn(BATCH, size.length, size.inputs)
    targets = torch.rand(BATCH, 1) if task == "logic" else torch.randint(size.outputs, (BATCH, size.answers))

    def step() -> None:
        optimizer.zero_grad()
        loss(task, model(inputs), targets).backward()
        optimizer.step()

    return step
