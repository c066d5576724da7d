"""SRAVEN: symbolic Raven matrices with a compositional split (arXiv 2406.05816).

A puzzle is a grid of R x C panels, each with M features in 0..V-1. Every feature obeys one of eight rules along each
row; each row draws its own values. With `x_0 .. x_{C-1}` the values of one feature in one row, modulo V::

    0 constant             x_c = x_0
    1..4 progression       x_c = x_0 + s c    with s = +1, +2, -1, -2
    5 addition             x_{C-1} = x_0 + x_1 + ... + x_{C-2}
    6 subtraction          x_{C-1} = x_0 - x_1 - ... - x_{C-2}
    7 distribute           the same C distinct values in each row, each row in an order of its own

At C = 3 these are the paper's rules; for wider grids this is how we extend them. In each column the order of the
features is permuted, the same way in all rows, so that which positions correspond must be found out as well. The latent
of a puzzle is its multiset of M rules; part of these combinations is held out from training.

Sequence: the panels row by row, M tokens each, one-hot in V; the last panel's M tokens are zeros and must be predicted.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from hyla.configs import check_types
from hyla.errors import ConfigError, check
from hyla.tasks.base import Batch, Draws, GeneratedTask, Stream, check_split
from hyla.tasks.sraven_solver import (
    ADDITION,
    DISTRIBUTE,
    MAX_BITS,
    RULES,
    STEPS,
    SUBTRACTION,
    IdealAnswer,
    ambiguous,
    ideal_answer,
    too_large,
)

MAX_OBSERVED = 10
"""Features up to which the ideal observer is asked: the alignments that it weighs grow fast beyond."""

MAX_REDRAWS = 1000
"""How often an ambiguous puzzle is drawn anew before its combination is given up as always ambiguous."""


@dataclass(frozen=True)
class SravenConfig:
    """Settings of SRAVEN; the defaults are the paper's."""

    num_features: int = 4
    """Features M of a panel, each with a rule of its own."""
    num_values: int = 8
    """Values V of a feature."""
    num_rows: int = 3
    """Rows R of panels."""
    num_columns: int = 3
    """Columns C of panels."""
    permute_features: bool = True
    """Whether each column shows the features in an order of its own."""
    held_out_fraction: float = 0.25
    """Share of the rule combinations that is never trained on (split `held_out`); 0 for no such split."""
    validation_fraction: float = 0.0
    """Share of the combinations named by validation_from that is kept for choosing hyperparameters (split `validation`);
    0 for no such split."""
    validation_from: Literal["train", "held_out"] = "train"
    """Which combinations validation takes its share of; from held_out, the trained ones stay as they are."""
    split_seed: int | str = 0
    """Decides which combinations are held out. "official-0", "official-1", "official-2" and "official-2024" are the
    public code's own sets."""
    shuffle_rules: bool = False
    """Whether the rules of a puzzle come in random order rather than sorted. It matters where features are not
    permuted: there, sorted rules tell much about which position carries which rule."""
    reject_ambiguous: bool = False
    """Whether puzzles whose given panels allow a second answer are drawn anew, with the same rules."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        check(self.num_features >= 1, "task.num_features", self.num_features, "at least 1")
        check(self.num_rows >= 2, "task.num_rows", self.num_rows, "at least 2; a single row does not tell its rule")
        columns = "at least 3; with 2, addition and subtraction are the same as constant"
        check(self.num_columns >= 3, "task.num_columns", self.num_columns, columns)
        values = f"at least num_columns = {self.num_columns}, so that `distribute` finds distinct values"
        check(self.num_values >= self.num_columns, "task.num_values", self.num_values, values)
        check(
            self.num_values <= MAX_BITS,
            "task.num_values",
            self.num_values,
            f"at most {MAX_BITS}; sets are kept as bits",
        )
        for field in ("held_out_fraction", "validation_fraction"):
            value = getattr(self, field)
            check(
                0 <= value < 1,
                f"task.{field}",
                value,
                "0 or more and less than 1, so that something is left to train on",
            )
        count = self.num_combinations
        few = f"there are {count:,} combinations of {self.num_features} rules, and more than 1,000,000 are too many to list"
        check(count <= 1_000_000, "task.num_features", self.num_features, few)
        for field in ("num_rows", "num_columns"):
            check(getattr(self, field) <= 1_024, f"task.{field}", getattr(self, field), "at most 1,024")
        if isinstance(self.split_seed, str):
            self._check_official()
        if self.reject_ambiguous:
            reason = too_large(self.num_values, self.num_columns, self.num_features)
            check(not reason, "task.reject_ambiguous", self.reject_ambiguous, reason)
        total = self.num_combinations
        num_held_out, num_validation = self._num_reserved()
        for field, split, count, share in (
            ("held_out_fraction", "held_out", num_held_out, total),
            ("validation_fraction", "validation", num_validation, self._num_validation_source(num_held_out)),
        ):
            value = getattr(self, field)
            reason = f"0 or at least 1/{share}; a smaller share of {share} combinations leaves split `{split}` empty"
            check(value == 0 or count > 0, f"task.{field}", value, reason)

    @property
    def num_combinations(self) -> int:
        """Number of multisets of `num_features` rules."""
        return math.comb(len(RULES) + self.num_features - 1, self.num_features)

    def combinations(self) -> dict[str, list[tuple[int, ...]]]:
        """The rule combinations of each split: sorted tuples of rule ids, in lexicographic order, no two splits alike.

        Depends on `num_features`, `split_seed` and the two fractions only; drawn on the CPU whatever the device.
        """
        every = list(itertools.combinations_with_replacement(range(len(RULES)), self.num_features))
        num_held_out, num_validation = self._num_reserved()
        if isinstance(self.split_seed, str):
            held_out = set(_official_sets()[self.split_seed])
        else:
            held_out = set(_choose(every, num_held_out, "held_out", self.split_seed))
        trained = [combination for combination in every if combination not in held_out]
        source = sorted(held_out) if self.validation_from == "held_out" else trained
        validation = set(_choose(source, num_validation, "validation", self.split_seed))
        splits = {"train": [combination for combination in trained if combination not in validation]}
        if num_validation:
            splits["validation"] = sorted(validation)
        if num_held_out:
            splits["held_out"] = sorted(held_out - validation)
        return splits

    def _num_reserved(self) -> tuple[int, int]:
        """How many combinations are not trained on, and how many are for validation (fractions rounded down)."""
        num_held_out = int(self.held_out_fraction * self.num_combinations)
        return num_held_out, int(self.validation_fraction * self._num_validation_source(num_held_out))

    def _num_validation_source(self, num_held_out: int) -> int:
        return num_held_out if self.validation_from == "held_out" else self.num_combinations - num_held_out

    def _check_official(self) -> None:
        names = sorted(_official_sets(), key=len)
        exists = self.split_seed in names and self.num_features == 4 and self.held_out_fraction == 0.25
        asked = f"num_features = {self.num_features}, held_out_fraction = {self.held_out_fraction}"
        allowed = f"a whole number; with num_features = 4 and held_out_fraction = 0.25 only, also {', '.join(names)}"
        check(
            exists,
            "task.split_seed",
            self.split_seed,
            f"no official set of that name exists for {asked}; use {allowed}",
        )


class Sraven(GeneratedTask):
    """The SRAVEN task.

    `predictions [B, M, V]` are the logits of the last panel's values; `targets [B, M]`, int64, its values. Latents:
    `rules [B, M]`, the rule of each feature; `permutations [B, C, M]`, where position p of column c shows the feature
    `permutations[b, c, p]`; `panels [B, R, C, M]`, the grid with its answer. Scores: `accuracy` (1 where the whole
    panel is right), `feature_accuracy` (share of right values) and `loss`.

    A batch is a pure function of (seed, split, stream, index) and its size. `combinations` has the rule combinations of
    each split; all combinations of a split are equally frequent.
    """

    name = "sraven"
    headline = "accuracy"
    discrete = True
    layout = None

    def __init__(self, config: SravenConfig | None = None, seed: int = 0):
        self.config = config if config is not None else SravenConfig()
        self.seed = seed
        self.combinations = self.config.combinations()
        self.splits = tuple(self.combinations)
        self.input_dim = self.config.num_values
        self.output_dim = self.config.num_values
        self.sequence_length = self.config.num_rows * self.config.num_columns * self.config.num_features
        self.predict_at = slice(self.sequence_length - self.config.num_features, self.sequence_length)
        self._rules = {split: torch.tensor(rules) for split, rules in self.combinations.items()}
        self._steps = torch.tensor([*STEPS, 0, 0, 0])

    def batch(
        self,
        split: str,
        index: int,
        batch_size: int,
        *,
        stream: Stream = "training",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """Batch number `index` of a split.

        Raises ValueError for an unknown split and, with `reject_ambiguous`, ConfigError where a combination of rules is
        still ambiguous after `MAX_REDRAWS` draws.
        """
        check_split(self, split)
        config = self.config
        path = (self.seed, self.name, split, stream, index)
        draws = Draws(*path, device=device)
        table = self._rules[split] = self._rules[split].to(device)  # copied once
        rules_BM = table[draws.integers(len(table), batch_size)]
        if config.shuffle_rules:
            rules_BM = rules_BM.gather(1, draws.permutations(config.num_features, batch_size))
        panels_BRCM, permutations_BCM = self._draw_puzzles(rules_BM, draws)
        if config.reject_ambiguous:
            self._redraw_ambiguous(rules_BM, panels_BRCM, permutations_BCM, path)
        tokens_BT = panels_BRCM.reshape(batch_size, -1)
        inputs = torch.zeros(batch_size, self.sequence_length, self.input_dim, dtype=dtype, device=device)
        inputs.scatter_(2, tokens_BT[:, :, None], 1.0)
        inputs[:, self.predict_at] = 0.0
        latents = {"rules": rules_BM, "permutations": permutations_BCM, "panels": panels_BRCM}
        return Batch(inputs, panels_BRCM[:, -1, -1].clone(), latents)

    def loss(self, predictions: Float[Tensor, "B M V"], batch: Batch) -> Float[Tensor, ""]:
        """Cross-entropy averaged over the answers."""
        return F.cross_entropy(predictions.flatten(0, 1), batch.targets.flatten())

    def scores(self, predictions: Float[Tensor, "B M V"], batch: Batch) -> dict[str, Tensor]:
        """`accuracy`, `feature_accuracy` and `loss` of each sequence, `[B]`."""
        right_BM = predictions.argmax(-1) == batch.targets
        loss_BM = F.cross_entropy(predictions.movedim(-1, 1), batch.targets, reduction="none")
        return {
            "accuracy": right_BM.all(-1).to(loss_BM.dtype),
            "feature_accuracy": right_BM.to(loss_BM.dtype).mean(-1),
            "loss": loss_BM.mean(-1),
        }

    def ambiguous(self, panels: Int[Tensor, "B R C M"]) -> Bool[Tensor, " B"]:
        """Whether the given panels of each puzzle allow a second answer; see :func:`hyla.tasks.sraven_solver.ambiguous`."""
        return ambiguous(panels, self.config.num_values, self.config.permute_features)

    def ideal_answer(
        self, panels: Int[Tensor, "B R C M"], split: str, knows: Literal["split", "all"] = "split"
    ) -> IdealAnswer:
        """What an ideal observer answers to puzzles of a split; see :func:`hyla.tasks.sraven_solver.ideal_answer`.

        knows: "split", it believes in the combinations of that very split, equally likely; "all", in all combinations.
        """
        check_split(self, split)
        known = (split,) if knows == "split" else self.splits
        combinations = [rules for name in known for rules in self.combinations[name]]
        return ideal_answer(
            panels,
            self.config.num_values,
            combinations,
            permuted=self.config.permute_features,
            shuffled=self.config.shuffle_rules,
        )

    def ceiling(
        self,
        split: str,
        num_samples: int = 2048,
        *,
        knows: Literal["split", "all"] = "split",
        batch_size: int = 512,
        device: torch.device | str = "cpu",
    ) -> dict[str, float]:
        """The accuracy of the ideal observer on the evaluation stream of a split: no model is expected to exceed it.

        The observer knows the generator, the rules and, with `knows="split"`, which combinations the split has; with
        `knows="all"` it believes in all combinations, as a model that was never told what is held out could at best.
        Returns `accuracy`, `standard_error`, `hit_rate` (how often its answer was right), `ambiguous` (the share of
        puzzles with a second possible answer) and `count`, the number of puzzles. With "split", `accuracy` is the mean
        posterior probability of its answers, whose expectation is that of the hit rate, with a smaller error; with
        "all", whose beliefs are wrong for the split, it is the hit rate.
        """
        most = f"the ideal observer is for at most {MAX_OBSERVED} features"
        check(self.config.num_features <= MAX_OBSERVED, "num_features", self.config.num_features, most)
        check(num_samples >= 2, "num_samples", num_samples, "at least 2, for a standard error")
        probabilities, hits, doubtful = [], [], []
        for index in range(math.ceil(num_samples / batch_size)):
            size = min(batch_size, num_samples - index * batch_size)
            batch = self.batch(split, index, batch_size, stream="evaluation", device=device)
            panels = batch.latents["panels"][:size]
            answer, probability = self.ideal_answer(panels, split, knows)
            probabilities.append(probability)
            hits.append((answer == batch.targets[:size]).all(-1).double())
            doubtful.append(self.ambiguous(panels).double())
        hit_N = torch.cat(hits)
        estimate_N = torch.cat(probabilities) if knows == "split" else hit_N
        return {
            "accuracy": float(estimate_N.mean()),
            "standard_error": float(estimate_N.std() / math.sqrt(num_samples)),
            "hit_rate": float(hit_N.mean()),
            "ambiguous": float(torch.cat(doubtful).mean()),
            "count": num_samples,
        }

    def _draw_puzzles(self, rules_BM: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Panels `[B, R, C, M]` that obey the rules, and the permutations `[B, C, M]` of their features."""
        config, device = self.config, rules_BM.device
        self._steps = self._steps.to(device)
        size, num_features = rules_BM.shape
        num_rows, num_columns, num_values = config.num_rows, config.num_columns, config.num_values

        free_BMRc = draws.integers(num_values, size, num_features, num_rows, num_columns - 1)
        start_BMR1 = free_BMRc[..., :1]
        step_BM = self._steps[rules_BM]
        values_BMRC = start_BMR1 + step_BM[:, :, None, None] * torch.arange(num_columns, device=device)

        total_BMR1 = free_BMRc.sum(-1, keepdim=True)
        rule_BM11 = rules_BM[:, :, None, None]
        outcome_BMR1 = torch.where(rule_BM11 == ADDITION, total_BMR1, 2 * start_BMR1 - total_BMR1)
        arithmetic = (rule_BM11 == ADDITION) | (rule_BM11 == SUBTRACTION)
        values_BMRC = torch.where(arithmetic, torch.cat([free_BMRc, outcome_BMR1], -1), values_BMRC) % num_values

        set_BMC = draws.permutations(num_values, size, num_features)[..., :num_columns]
        order_BMRC = draws.permutations(num_columns, size, num_features, num_rows)
        distributed_BMRC = set_BMC[:, :, None].expand_as(order_BMRC).gather(-1, order_BMRC)
        values_BMRC = torch.where(rule_BM11 == DISTRIBUTE, distributed_BMRC, values_BMRC)

        panels_BRCM = values_BMRC.permute(0, 2, 3, 1)
        if config.permute_features:
            permutations_BCM = draws.permutations(num_features, size, num_columns)
            return panels_BRCM.gather(-1, permutations_BCM[:, None].expand_as(panels_BRCM)), permutations_BCM
        identity = torch.arange(num_features, device=device).expand(size, num_columns, num_features)
        return panels_BRCM.contiguous(), identity.contiguous()

    def _redraw_ambiguous(
        self, rules_BM: Tensor, panels_BRCM: Tensor, permutations_BCM: Tensor, path: tuple[int | str, ...]
    ) -> None:
        """Draw the values and permutations of ambiguous puzzles anew, in place, until none is left."""
        left = self.ambiguous(panels_BRCM).nonzero()[:, 0]
        for redraw in range(1, MAX_REDRAWS + 1):
            if len(left) == 0:
                return
            draws = Draws(*path, "redraw", redraw, device=panels_BRCM.device)
            panels_BRCM[left], permutations_BCM[left] = self._draw_puzzles(rules_BM[left], draws)
            left = left[self.ambiguous(panels_BRCM[left])]
        if len(left) == 0:
            return
        names = ", ".join(RULES[rule] for rule in rules_BM[left[0]].tolist())
        raise ConfigError(
            f"reject_ambiguous = True is not possible: puzzles with the rules ({names}) were still ambiguous after "
            f"{MAX_REDRAWS} draws. Set more num_values or num_rows, or fewer num_features, or reject_ambiguous = False"
        )


def _choose(
    combinations: list[tuple[int, ...]], count: int, purpose: str, split_seed: int | str
) -> list[tuple[int, ...]]:
    """`count` of the combinations, at random, on the CPU."""
    order = Draws(split_seed, "sraven", "combinations", purpose).permutations(len(combinations))
    return [combinations[place] for place in order[:count].tolist()]


def _official_sets() -> dict[str, list[tuple[int, ...]]]:
    """The held-out combinations of the public code, by the name `split_seed` knows them by."""
    sets = json.loads(resources.files("hyla.tasks").joinpath("official", "splits.json").read_text("utf-8"))["sraven"]
    return {f"official-{seed}": [tuple(rules) for rules in held["held_out"]] for seed, held in sets.items()}
