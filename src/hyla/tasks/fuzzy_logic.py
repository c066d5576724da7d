"""Fuzzy logic (P1, section 3): in-context regression of functions made of known terms in unseen combinations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hyla.configs import check_fractions, check_types
from hyla.errors import ConfigError, check
from hyla.tasks.base import Batch, Draws, GeneratedTask, Stream, check_split, entropy

MAX_COMBINATIONS = 20_000_000  # of known terms: above, the list of them would not fit in memory comfortably

MAX_POINTS = 65_536  # of a sequence


@dataclass(frozen=True)
class LogicConfig:
    """Functions f = OR over num_terms conjunctions of num_variables fuzzy variables; which combinations are held out."""

    num_variables: int = 4
    """Variables L; there are 2**L conjunctions, each over all variables with some negated."""
    num_terms: int = 2
    """Conjunctions K that make a function."""
    num_points: int = 32
    """Points N of a sequence; the last one's value is to be predicted."""
    known_fraction: float = 0.75
    """Share of the conjunctions that occur in training, the first in truth-table order; the rest are unseen terms."""
    held_out_fraction: float = 0.7
    """Share of the combinations of known terms that are held out of training."""
    validation_fraction: float = 0.0
    """Share of the combinations named by validation_from reserved as split `validation`, for choosing hyperparameters."""
    validation_from: Literal["train", "held_out"] = "train"
    """Which combinations validation takes its share of; from held_out, the trained ones stay as they are."""
    split_seed: int | str = 0
    """Which combinations are held out: a seed, or "official-0" (-1, -2, -2024) for the public code's own sets."""
    probe: Literal["none", "fixed_query", "fixed_context"] = "none"
    """fixed_query: the same last point in every sequence; fixed_context: the same points before it (for probing codes)."""

    def __post_init__(self) -> None:
        check_types(self, "task")
        check(1 <= self.num_variables <= 12, "task.num_variables", self.num_variables, "from 1 to 12")
        allowed = f"from 2, one example and the query, to {MAX_POINTS:,}"
        check(2 <= self.num_points <= MAX_POINTS, "task.num_points", self.num_points, allowed)
        check(0 < self.known_fraction <= 1, "task.known_fraction", self.known_fraction, "above 0, at most 1")
        check_fractions(self, "task", "held_out_fraction", "validation_fraction")
        known, total = self.num_known, 2**self.num_variables
        possible = f"{known} of the {total} conjunctions of {self.num_variables} variables are known terms"
        check(1 <= self.num_terms <= known, "task.num_terms", self.num_terms, f"1 to {known}, since {possible}")
        count = comb(known, self.num_terms)
        check(
            count <= MAX_COMBINATIONS, "task.num_terms", self.num_terms, f"{count:,} combinations are too many to list"
        )
        held_out = int(count * self.held_out_fraction)
        reason = f"of {count} combinations {held_out} would be held out, leaving an empty split"
        check(held_out >= 1 or self.held_out_fraction == 0, "task.held_out_fraction", self.held_out_fraction, reason)
        source = held_out if self.validation_from == "held_out" else count - held_out
        validation = int(source * self.validation_fraction)
        reason = f"of {source} combinations {validation} would be reserved, leaving an empty split"
        enough = validation >= 1 or self.validation_fraction == 0
        check(enough, "task.validation_fraction", self.validation_fraction, reason)
        if isinstance(self.split_seed, str):
            official_split(self)

    @property
    def num_known(self) -> int:
        return int(2**self.num_variables * self.known_fraction)


def official_split(config: LogicConfig) -> dict[str, list[list[int]]]:
    """The public code's own split, where it was measured: {"train", "held_out", "unseen_terms"} -> combinations."""
    prefix, _, number = str(config.split_seed).partition("-")
    seeds = ("0", "1", "2", "2024")
    names = ", ".join(f"official-{seed}" for seed in seeds)
    check(prefix == "official" and number in seeds, "task.split_seed", config.split_seed, f"a whole number, {names}")
    data = json.loads(files("hyla.tasks").joinpath("official/splits.json").read_text())["logic"]
    key = f"frac_held_out={config.held_out_fraction},seed={number}"
    usual = (config.num_variables, config.num_terms, config.known_fraction) == (4, 2, 0.75)
    if not usual or key not in data:
        raise ConfigError(
            f"task.split_seed = {config.split_seed!r} is not possible: no official set exists for "
            f"{config.num_variables} variables, {config.num_terms} terms and held_out_fraction "
            f"{config.held_out_fraction}; there are sets for 4 variables, 2 terms and fractions 0.3, 0.5 and 0.7"
        )
    return data[key]


def term_bits(num_variables: int) -> Int[Tensor, "conjunctions variables"]:
    """All conjunctions in lexicographic truth-table order; bit 1 = the variable as it is, 0 = its negation."""
    numbers = torch.arange(2**num_variables)
    return numbers[:, None] >> torch.arange(num_variables - 1, -1, -1) & 1


def evaluate_function(
    points_BNL: Float[Tensor, "*batch points variables"], terms_BKL: Int[Tensor, "*batch terms variables"]
) -> Float[Tensor, "*batch points"]:
    """Zadeh operators: NOT x = 1 - x, AND = min, OR = max; a function is the OR over its terms."""
    positive_B1KL = terms_BKL[..., None, :, :].bool()
    literal_BNKL = torch.where(positive_B1KL, points_BNL[..., None, :], 1 - points_BNL[..., None, :])
    return literal_BNKL.amin(-1).amax(-1)


def function_text(terms_KL: Int[Tensor, "terms variables"]) -> str:
    """A function as a formula, such as `(x1 ∧ ¬x2) ∨ (x1 ∧ x2)`."""
    conjunctions = []
    for bits in terms_KL.tolist():
        conjunctions.append("(" + " ∧ ".join(f"x{i}" if bit else f"¬x{i}" for i, bit in enumerate(bits, 1)) + ")")
    return " ∨ ".join(conjunctions)


class FuzzyLogic(GeneratedTask):
    """Batches of fuzzy-logic regression.

    Inputs `[B, N, L+1]`: the points x and f(x), 0 in place of the last f(x). Targets `[B, 1]`: the last f(x). Latents:
    `combination [B]` (row in `combinations[split]`), `terms [B, K]` (ids of conjunctions), `term_bits [B, K, L]`.
    Splits: `train`; `validation` if reserved; `held_out`: unseen combinations of known terms; `unseen_terms`: combinations
    of the terms that never occur in training (if there are enough of them).
    """

    name = "logic"
    headline = "r2"
    discrete = False
    output_dim = 1
    predict_at = slice(-1, None)
    layout = None

    def __init__(self, config: LogicConfig, seed: int = 0):
        self.config, self.seed = config, seed
        self.input_dim = config.num_variables + 1
        self.sequence_length = config.num_points
        self.conjunctions = term_bits(config.num_variables)
        self.combinations = {name: rows for name, rows in _split_combinations(config).items() if len(rows)}
        self.splits = tuple(self.combinations)
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

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
        check_split(self, split)
        device = torch.device(device)
        draws = Draws(self.seed, self.name, split, stream, index, device=device)
        combinations_CK = self._moved(split, device)
        combination_B = draws.integers(len(combinations_CK), batch_size)
        terms_BK = combinations_CK[combination_B]
        bits_BKL = self._moved("conjunctions", device)[terms_BK]
        points_BNL = draws.uniform(batch_size, self.config.num_points, self.config.num_variables, dtype=dtype)
        if self.config.probe != "none":
            # one point set for all sequences, streams and splits, from the seed alone
            fixed = Draws(self.seed, self.name, "probe", device=device)
            fixed_NL = fixed.uniform(self.config.num_points, self.config.num_variables, dtype=dtype)
            kept = slice(-1, None) if self.config.probe == "fixed_query" else slice(None, -1)
            points_BNL[:, kept] = fixed_NL[kept]
        value_BN = evaluate_function(points_BNL, bits_BKL)
        inputs = torch.cat([points_BNL, value_BN[..., None]], -1)
        inputs[:, -1, -1] = 0.0
        latents = {"combination": combination_B, "terms": terms_BK, "term_bits": bits_BKL}
        return Batch(inputs, value_BN[:, -1:], latents)

    def loss(self, predictions: Float[Tensor, "batch 1 1"], batch: Batch) -> Float[Tensor, ""]:
        """Squared error at the last position."""
        return (predictions[:, 0] - batch.targets).square().mean()

    def scores(self, predictions: Float[Tensor, "batch 1 1"], batch: Batch) -> dict[str, Tensor]:
        """`r2`: 1 - squared error / variance of f over the sequence's points; `loss`: squared error."""
        error_B = (predictions[:, 0] - batch.targets).square().squeeze(-1)
        values_BN = torch.cat([batch.inputs[:, :-1, -1], batch.targets], -1)
        return {"r2": 1 - error_B / values_BN.var(-1, correction=0), "loss": error_B}

    def _moved(self, name: str, device: torch.device) -> Tensor:
        """The combinations of a split, or all conjunctions, on a device."""
        key = (name, device)
        if key not in self._on_device:
            rows = self.conjunctions if name == "conjunctions" else self.combinations[name]
            self._on_device[key] = rows.to(device)
        return self._on_device[key]


def _split_combinations(config: LogicConfig) -> dict[str, Tensor]:
    """Combinations `[C, K]` of every split, decided on the CPU by `split_seed` alone."""
    known, total = config.num_known, 2**config.num_variables
    if isinstance(config.split_seed, str):
        official = {name: torch.tensor(rows) for name, rows in official_split(config).items()}
        train, held_out, unseen = official["train"], official["held_out"], official["unseen_terms"]
    else:
        count = comb(known, config.num_terms)
        flat = np.fromiter((i for row in combinations(range(known), config.num_terms) for i in row), dtype=np.int64)
        rows = flat.reshape(count, config.num_terms)
        order = np.random.default_rng(entropy(config.split_seed, "logic", "split")).permutation(count)
        cut = int(count * config.held_out_fraction)
        held_out, train = torch.from_numpy(rows[order[:cut]]), torch.from_numpy(rows[order[cut:]])
        unseen_rows = list(combinations(range(known, total), config.num_terms))
        unseen = torch.tensor(unseen_rows, dtype=torch.int64).reshape(-1, config.num_terms)
    # both lists are in random order, so that their first rows are a random part of them
    if config.validation_from == "held_out":
        reserved = int(len(held_out) * config.validation_fraction)
        validation, held_out = held_out[:reserved], held_out[reserved:]
    else:
        reserved = int(len(train) * config.validation_fraction)
        validation, train = train[:reserved], train[reserved:]
    return {"train": train, "validation": validation, "held_out": held_out, "unseen_terms": unseen}
