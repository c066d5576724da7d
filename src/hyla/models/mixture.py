"""Mixture of experts: several MLPs of which a router picks `top_k` for each token (P1's baseline)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hyla.attention.layer import init_fan_in_
from hyla.errors import check
from hyla.models.feedforward import linear


class Mixture(nn.Module):
    """`sum_x g_x(t) expert_x(t)` over the `top_k` experts with the largest router probability, renormalised to sum 1.

    Every expert is computed for every token and weighted by 0 where it was not chosen: with the paper's four experts that
    is twice the arithmetic of a gather, and keeps shapes static, so that the layer compiles, batches over ensemble members
    and is deterministic.

    The load-balancing loss is that of Switch Transformers (Fedus et al. 2022, equation 4), `X sum_x f_x p_x`, f the share
    of assignments and p the mean router probability of an expert, over real tokens only; 1 when balanced. With `top_k` 1
    the renormalised gate is 1, so that only this loss trains the router.
    """

    def __init__(self, width: int, hidden: int, num_experts: int = 4, top_k: int = 2):
        super().__init__()
        check(num_experts >= 1, "num_experts", num_experts, "at least 1")
        check(1 <= top_k <= num_experts, "top_k", top_k, f"from 1 to num_experts = {num_experts}")
        self.num_experts, self.top_k = num_experts, top_k
        self.router = linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_bias = nn.Parameter(torch.zeros(num_experts, width))
        init_fan_in_(self.up, width)
        init_fan_in_(self.down, hidden)

    def forward(
        self, x: Float[Tensor, "*batch width"], real: Bool[Tensor, "*batch"] | None = None
    ) -> tuple[Float[Tensor, "*batch width"], Float[Tensor, ""]]:
        """(output, load-balancing loss). `real`: True = a token, False = padding, which the loss ignores."""
        compute = torch.promote_types(x.dtype, torch.float32)  # of probabilities and of their sums over tokens
        probability_TX = self.router(x).to(compute).softmax(-1)
        top_probability, top_expert = probability_TX.topk(self.top_k, -1)
        top_gate = top_probability / top_probability.sum(-1, keepdim=True)
        chosen_TX = F.one_hot(top_expert, self.num_experts).to(compute)  # [..., top_k, X]
        gate_TX = (top_gate[..., None] * chosen_TX).sum(-2).to(x.dtype)
        hidden_TXM = F.gelu(torch.einsum("...e,xme->...xm", x, self.up) + self.up_bias, approximate="tanh")
        out = torch.einsum("...x,...xm,xem->...e", gate_TX, hidden_TXM, self.down) + gate_TX @ self.down_bias

        weight_T1 = torch.ones_like(probability_TX[..., :1]) if real is None else real[..., None].to(compute)
        total = weight_T1.sum().clamp(min=1.0)
        share_X = (weight_T1 * chosen_TX.sum(-2)).reshape(-1, self.num_experts).sum(0) / (total * self.top_k)
        mean_X = (weight_T1 * probability_TX).reshape(-1, self.num_experts).sum(0) / total
        return out, self.num_experts * (share_X * mean_X).sum()
