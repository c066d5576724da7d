"""HYLA as the attention of one's own module: a causal block, trained a few steps, then decoding token by token."""

import torch
from torch import nn

from hyla import MultiHeadAttention
from hyla.attention import KeyValueCache


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = MultiHeadAttention(width, num_heads, mechanism="hyla", positions="rotary")
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, cache=None):
        x = x + self.attention(self.norm1(x), causal=True, cache=cache)
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
block, head = Block(width=32, num_heads=4), nn.Linear(32, 1)
optimizer = torch.optim.AdamW([*block.parameters(), *head.parameters()], lr=3e-3)
x = torch.randn(8, 10, 32)  # [B, T, E]
target = x[..., :1].cumsum(1)  # of every token: the sum of what the tokens so far hold
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = (head(block(x)) - target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# One token at a time, each layer with a cache of its own: what the whole sequence gives at once.
cache = KeyValueCache()
with torch.no_grad():
    steps = torch.cat([block(x[:, t : t + 1], cache) for t in range(10)], 1)
    whole = block(x)
print(f"largest difference between decoding and one call: {(steps - whole).abs().max():.1e}")
