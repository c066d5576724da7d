"""Outputs, latent codes and every gradient of the public code's eight mechanisms, in float64."""

import pytest
import torch
from tests.attention.test_properties import needs_compiler

from golden_values import Case, names, out_projection, projection, relative_error
from hyla.attention import MECHANISMS, MultiHeadAttention

# Both sides round at 1e-16; a sum of some hundred products of numbers near 1 stays far below this.
TOLERANCE = 1e-10


def flatten(bias):
    return bias.reshape(-1)


def golden_layer(case, backend):
    """The layer with the case's weights, and {golden name: (our parameter, function from its array to ours)}."""
    size = case.size
    layer = MultiHeadAttention(
        size["E"],
        size["H"],
        mechanism=size["mechanism"],
        qk_dim=size["H"] * size["dk"],
        v_dim=size["H"] * size["dv"],
        backend=backend,
        dtype=torch.float64,
    )
    parameters = {}
    for letter, module in (("q", layer.q_proj), ("k", layer.k_proj), ("v", layer.v_proj), ("o", layer.out_proj)):
        parameters[f"w{letter}"] = (module.weight, projection if letter != "o" else out_projection)
        parameters[f"b{letter}"] = (module.bias, flatten)
    with torch.no_grad():
        for name, (parameter, convert) in parameters.items():
            parameter.copy_(convert(case[name]))
    assert len(parameters) == len(list(layer.parameters()))
    return layer, parameters


@pytest.mark.parametrize("name", names("attention"))
@pytest.mark.parametrize("backend", ["eager", pytest.param("native", marks=needs_compiler)])
def test_equals_the_public_layer(name, backend):
    case = Case("attention", name)
    assert MECHANISMS[case.size["mechanism"]].score_norm == case.size["score_norm"]
    layer, parameters = golden_layer(case, backend)
    given = {key: case[key].requires_grad_() for key in ("x", "context", "bias") if key in case}
    masks = {"mask": case["mask"]} if "mask" in case else {}
    out, codes = layer(**given, **masks, return_codes=True)
    (out * case["cotangent"]).sum().backward()
    assert relative_error(out, case["out"]) < TOLERANCE
    assert relative_error(codes, case["codes"]) < TOLERANCE
    for key, tensor in given.items():
        assert relative_error(tensor.grad, case[f"grad_{key}"]) < TOLERANCE, key
    for key, (parameter, convert) in parameters.items():
        assert relative_error(parameter.grad, convert(case[f"grad_{key}"])) < TOLERANCE, key
    if case.size["mask"] == "causal":
        assert torch.equal(layer(**given, causal=True), out)
