"""A model whose codes are known: the rule in one layer, noise in the other; its answer depends on the first alone."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hyla.attention import MultiHeadAttention
from hyla.latents.readings import Reading
from hyla.tasks.base import Batch, Draws, GeneratedTask, check_split

NUM_RULES = 4
TASKS_OF = {"train": range(0, 9), "held_out": range(9, 14)}  # tasks of a split; a task's rule is its number modulo 4


class Output(NamedTuple):
    predictions: Tensor


@dataclass(frozen=True)
class PlantedConfig:
    scale: float = 1.0


class PlantedTask(GeneratedTask):
    """Sequences of three tokens [one-hot rule, one-hot noise class]; the answer is the rule."""

    name, headline, discrete = "planted", "accuracy", True
    splits = ("train", "held_out")
    input_dim, output_dim, sequence_length = 2 * NUM_RULES, NUM_RULES, 3
    predict_at = slice(-1, None)
    layout = None

    def __init__(self, seed: int = 0):
        self.config, self.seed = PlantedConfig(), seed

    def batch(self, split, index, batch_size, *, stream="training", device="cpu", dtype=torch.float32):
        check_split(self, split)
        draws = Draws(self.seed, self.name, split, stream, index)
        tasks = torch.tensor(list(TASKS_OF[split]))[draws.integers(len(TASKS_OF[split]), batch_size)]
        rules, noise = tasks % NUM_RULES, draws.integers(NUM_RULES, batch_size)
        eye = torch.eye(NUM_RULES, dtype=dtype)
        token = torch.cat([eye[rules], eye[noise]], -1)
        jitter = 0.1 * draws.uniform(batch_size, 3, 2 * NUM_RULES).to(dtype)
        return Batch(token[:, None] + jitter, rules[:, None], {"rules": rules, "noise": noise, "tasks": tasks})

    def loss(self, predictions, batch):
        return nn.functional.cross_entropy(predictions[:, 0], batch.targets[:, 0])

    def scores(self, predictions, batch):
        return {"accuracy": (predictions[:, 0].argmax(-1) == batch.targets[:, 0]).double()}


class PlantedModel(nn.Module):
    """Two layers of linear attention beside each other. The first's codes are the rule (score of head h = rule h), the
    second's are the noise class; the answer reads the first layer's output and not the second's."""

    def __init__(self):
        super().__init__()
        self.rule, self.noise, self.unused = self._layer(0), self._layer(NUM_RULES), nn.Identity()

    @staticmethod
    def _layer(first: int) -> MultiHeadAttention:
        layer = MultiHeadAttention(2 * NUM_RULES, NUM_RULES, mechanism="linear", qk_dim=NUM_RULES, v_dim=NUM_RULES)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.k_proj.bias.fill_(1.0)  # the score of head h is then the query's entry first + h
            for h in range(NUM_RULES):
                layer.q_proj.weight[h, first + h] = 1.0
                layer.v_proj.bias[h] = 1.0
                layer.out_proj.weight[h, h] = 1.0
        return layer

    def forward(self, inputs, *, predict_at=slice(None)):
        out = self.rule(inputs, select=predict_at) + 0.0 * self.noise(inputs, select=predict_at)[..., :1]
        return Output(self.unused(out)[..., :NUM_RULES])


class PlantedReading(Reading):
    """All three keys of the last query: the whole code that the answer reads."""

    queries, keys = (-1,), (0, 1, 2)
    pairs, key_names = "the last query and every key", ("first", "second", "last")
    label, classes = "rule", ("rule 0", "rule 1", "rule 2", "rule 3")
    metric, answer = "accuracy", 0

    def __init__(self, seed: int = 0):
        self.task = PlantedTask(seed)

    def labels(self, collection, split):
        return np.asarray(collection.latent("rules", split))

    def groups(self, collection, split):
        return np.asarray(collection.latent("tasks", split))

    def correct(self, collection, split):
        return np.asarray(collection.score("accuracy", split) > 0)

    def text(self, collection, split, sample):
        return f"task <{collection.latent('tasks', split)[sample]}>"

    def answers_of_classes(self, collection, split):
        return np.tile(np.arange(NUM_RULES), (collection.splits[split], 1))
