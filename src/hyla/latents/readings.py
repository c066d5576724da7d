"""What to read from a model of each task: which pairs' codes, on which sequences, what they should tell (P1, section 4).

Fuzzy logic: the pair (last query, last key) on sequences that share their last point, so that only the function differs;
the codes should tell the bits of its terms. SRAVEN: the last feature's query against the same feature in the panels of
the last row, on puzzles whose features are not permuted, so that positions correspond; the codes should tell the rule of
that feature. A puzzle's rules are stored sorted, which alone would tell much of the last one; their order is drawn anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from hyla.errors import ConfigError
from hyla.latents.collect import Collection
from hyla.report.drawings import formula, function_text, puzzle_text
from hyla.tasks.base import Task
from hyla.tasks.fuzzy_logic import FuzzyLogic, LogicConfig
from hyla.tasks.sraven import Sraven, SravenConfig
from hyla.tasks.sraven_solver import ADDITION, RULES, STEPS, SUBTRACTION
from hyla.training.config import TrainConfig

GOOD_R2 = 0.9  # a fuzzy-logic answer counts as correct from this R2 on, where answers are coloured by it


class Reading(ABC):
    """How one task's models are read. Methods take a collection made with `task`, `queries` and `keys`, and a split.

    pairs, key_names: which pairs these are, in words. label, classes: what points are classified by. metric: the score that
    the model's answers are judged by. answer: which of the task's answers the pairs are about.
    """

    task: Task
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    pairs: str
    key_names: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metric: str
    answer: int

    @abstractmethod
    def labels(self, collection: Collection, split: str) -> np.ndarray:
        """The class of every sample, `[N]`."""

    @abstractmethod
    def groups(self, collection: Collection, split: str) -> np.ndarray:
        """The task of every sample, `[N]`: the same number for the same combination, in every split."""

    @abstractmethod
    def correct(self, collection: Collection, split: str) -> np.ndarray:
        """Whether each sample was answered rightly, `[N]`."""

    @abstractmethod
    def text(self, collection: Collection, split: str, sample: int) -> str:
        """The sequence for a reader."""

    def bits(self, collection: Collection, split: str) -> tuple[tuple[str, ...], np.ndarray] | None:
        """(names, `[N, T]`) of numbers to decode linearly, where the task has some."""
        return None

    def answers_of_classes(self, collection: Collection, split: str) -> np.ndarray | None:
        """`[N, C]`: what the answer would be if the class were another; -1 where that is undefined, None where always."""
        return None


class LogicReading(Reading):
    """Fuzzy logic; see the module."""

    queries, keys = (-1,), (-1,)
    pairs = "query: the last point, the same in every sequence; key: that point itself"
    key_names = ("last point",)
    label = "first term"
    metric = "r2"
    answer = 0

    def __init__(self, config: LogicConfig, seed: int):
        self.task = FuzzyLogic(replace(config, probe="fixed_query"), seed)
        self.classes = tuple(formula(bits[None]) for bits in self.task.conjunctions.numpy())

    def labels(self, collection: Collection, split: str) -> np.ndarray:
        return np.asarray(collection.latent("terms", split)[:, 0])

    def groups(self, collection: Collection, split: str) -> np.ndarray:
        terms_NK = np.asarray(collection.latent("terms", split))
        return terms_NK @ len(self.classes) ** np.arange(terms_NK.shape[1])

    def bits(self, collection: Collection, split: str) -> tuple[tuple[str, ...], np.ndarray]:
        bits_NKL = np.asarray(collection.latent("term_bits", split))
        _, num_terms, num_variables = bits_NKL.shape
        names = tuple(f"term {k + 1}, x{i + 1}" for k in range(num_terms) for i in range(num_variables))
        return names, bits_NKL.reshape(len(bits_NKL), -1).astype(float)

    def correct(self, collection: Collection, split: str) -> np.ndarray:
        return np.asarray(collection.score("r2", split)) >= GOOD_R2

    def text(self, collection: Collection, split: str, sample: int) -> str:
        points_NL = collection.inputs(split)[sample]
        values_N = np.append(points_NL[:-1, -1], collection.targets(split)[sample])
        terms_KL = collection.latent("term_bits", split)[sample]
        return function_text(terms_KL, points_NL[:, :-1], values_N, max_points=0)


class SravenReading(Reading):
    """SRAVEN; see the module."""

    label = "rule"
    classes = RULES
    metric = "accuracy"
    answer = -1

    def __init__(self, config: SravenConfig, seed: int):
        config = replace(config, permute_features=False, shuffle_rules=True)
        self.task = Sraven(config, seed)
        last_row, width = (config.num_rows - 1) * config.num_columns, config.num_features
        self.queries = (-1,)
        self.keys = tuple((last_row + column) * width + width - 1 for column in range(config.num_columns))
        names = [f"panel {last_row + column + 1}" for column in range(config.num_columns)]
        self.key_names = (*names[:-1], f"{names[-1]} (the query)")
        self.pairs = "query: the last feature of the last panel; keys: the same feature in the panels of the last row"

    def labels(self, collection: Collection, split: str) -> np.ndarray:
        return np.asarray(collection.latent("rules", split)[:, -1])

    def groups(self, collection: Collection, split: str) -> np.ndarray:
        rules_NM = np.sort(np.asarray(collection.latent("rules", split)), 1)
        return rules_NM @ len(RULES) ** np.arange(rules_NM.shape[1])

    def correct(self, collection: Collection, split: str) -> np.ndarray:
        return np.asarray(collection.predictions(split)[:, -1].argmax(-1) == collection.targets(split)[:, -1])

    def text(self, collection: Collection, split: str, sample: int) -> str:
        rules = [RULES[rule] for rule in collection.latent("rules", split)[sample]]
        return puzzle_text(collection.latent("panels", split)[sample], rules, self.task.config.num_values)

    def answers_of_classes(self, collection: Collection, split: str) -> np.ndarray:
        row_NC = np.asarray(collection.latent("panels", split)[:, -1, :-1, -1])
        first_N, others_N = row_NC[:, 0], row_NC[:, 1:].sum(1)
        answers_NC = np.full((len(row_NC), len(RULES)), -1)
        for rule, step in enumerate(STEPS):
            answers_NC[:, rule] = first_N + step * row_NC.shape[1]
        answers_NC[:, ADDITION], answers_NC[:, SUBTRACTION] = first_N + others_N, first_N - others_N
        answers_NC[:, : SUBTRACTION + 1] %= self.task.config.num_values
        return answers_NC  # distribute: its values are those of other rows, which do not obey it here


def reading_of(config: TrainConfig) -> Reading:
    """How models of this run's task are read."""
    if isinstance(config.task, LogicConfig):
        return LogicReading(config.task, config.seed)
    if isinstance(config.task, SravenConfig):
        return SravenReading(config.task, config.seed)
    raise ConfigError(
        f"task.name = {config.task_name!r} is not possible: codes are labelled with what generated a sequence, which logic "
        "and sraven know; for the codes of any other task see hyla.latents.collect.collect"
    )
