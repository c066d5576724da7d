"""AdamW and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from hyla.training.config import OptimizerConfig


def decayed(name: str, parameter: nn.Parameter, rule: str) -> bool:
    """Whether weight decay applies to a parameter. `reference`: whatever P1's public code stores in an array that is not
    one-dimensional, and that includes the per-head biases of queries, keys and values, kept as [H, d] there."""
    if parameter.dim() > 1:
        return True
    return rule == "reference" and name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with two groups, decayed and not."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = []
    for decay in (True, False):
        chosen = [parameter for name, parameter in named if decayed(name, parameter, config.decay) is decay]
        groups.append({"params": chosen, "weight_decay": config.weight_decay if decay else 0.0})
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of update number `step` (from 0) of `total_steps`.

    Warm-up is linear from 0, so that the first update has rate 0 when there is any. `cosine` reaches `final_lr_fraction`
    at the last update; `reference` one warm-up earlier, because the public code passes `total - warmup` as the length of a
    schedule whose length already includes the warm-up.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    length = total_steps - 2 * warmup if config.schedule == "reference" else total_steps - 1 - warmup
    progress = min((step - warmup) / length, 1.0) if length > 0 else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * ((1.0 - config.final_lr_fraction) * cosine + config.final_lr_fraction)
