"""Reading the golden files into our modules: the public code's arrays have other shapes and names."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden"


@cache
def index(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


@cache
def arrays(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def names(kind):
    return [case["name"] for case in index(kind)]


class Case:
    """One case of a golden file; `case["x"]` is a tensor, `case.size["E"]` a number of the index."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name
        self.size = next(case for case in index(kind) if case["name"] == name)

    def __getitem__(self, key):
        return torch.from_numpy(arrays(self.kind)[f"{self.name}/{key}"])

    def __contains__(self, key):
        return f"{self.name}/{key}" in arrays(self.kind)

    def keys(self, prefix):
        start = f"{self.name}/{prefix}/"
        return [key.removeprefix(start) for key in arrays(self.kind) if key.startswith(start)]


def projection(weight):
    """[E, H, d] to the weight of a torch Linear, [H d, E]."""
    return weight.reshape(weight.shape[0], -1).T


def out_projection(weight):
    """[H, d, E] to the weight of a torch Linear, [E, H d]."""
    return weight.reshape(-1, weight.shape[-1]).T


def flax_parameters(model):
    """{name in the public code: (our parameter, function from its array to ours)}."""
    same, kernel = (lambda x: x), (lambda x: x.T)
    found = {
        "embedding.kernel": (model.embedding.weight, kernel),
        "embedding.bias": (model.embedding.bias, same),
        "decoder_norm.scale": (model.norm.weight, same),
        "decoder_norm.bias": (model.norm.bias, same),
        "logitdense.kernel": (model.head.weight, kernel),
        "logitdense.bias": (model.head.bias, same),
    }
    for i, block in enumerate(model.blocks):
        at, attention = f"transformer_block_{i}", block.attention
        found[f"{at}.relative_embedding.rel_embedding"] = (attention.relative_bias.table, same)
        for name, layer in (("query", attention.q_proj), ("key", attention.k_proj), ("value", attention.v_proj)):
            found[f"{at}.sequence_mixer.{name}.kernel"] = (layer.weight, projection)
            found[f"{at}.sequence_mixer.{name}.bias"] = (layer.bias, lambda x: x.reshape(-1))
        found[f"{at}.sequence_mixer.out.kernel"] = (attention.out_proj.weight, out_projection)
        found[f"{at}.sequence_mixer.out.bias"] = (attention.out_proj.bias, same)
        for name, layer in (("norm1", block.norm1), ("norm2", block.norm2)):
            found[f"{at}.{name}.scale"] = (layer.weight, same)
            found[f"{at}.{name}.bias"] = (layer.bias, same)
        for name, layer in (("Dense_0", block.mlp.up), ("Dense_1", block.mlp.down)):
            found[f"{at}.state_mixer.{name}.kernel"] = (layer.weight, kernel)
            found[f"{at}.state_mixer.{name}.bias"] = (layer.bias, same)
    return found


def load_parameters(model, case, prefix):
    """Copy a golden set of weights into `model`, all of them and nothing besides."""
    parameters = flax_parameters(model)
    assert set(parameters) == set(case.keys(prefix))
    with torch.no_grad():
        for name, (parameter, convert) in parameters.items():
            parameter.copy_(convert(case[f"{prefix}/{name}"]))


def relative_error(ours, theirs):
    """Largest difference, relative to the largest magnitude (at least 1)."""
    return (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
