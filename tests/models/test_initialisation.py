import pytest
import torch

from golden_values import flax_parameters, index
from hyla.models.transformer import Transformer
from hyla.training.config import preset_paper

SIZES = {"logic": (32, 5, 1), "sraven": (36, 8, 8)}


@pytest.fixture(scope="module", params=["logic", "sraven"])
def paper_model(request):
    torch.manual_seed(0)
    length, inputs, outputs = SIZES[request.param]
    config = preset_paper(request.param).model
    model = Transformer(config, sequence_length=length, input_dim=inputs, output_dim=outputs)
    return model, index("init_statistics")[request.param]


def test_parameter_count_of_the_paper(paper_model):
    model, expected = paper_model
    assert model.num_parameters == expected["num_params"]


def test_initial_distribution_of_every_parameter(paper_model):
    """Mean, deviation and largest value agree with one draw of the public code within the noise of two draws."""
    model, expected = paper_model
    parameters = flax_parameters(model)
    assert set(parameters) == set(expected["params"])
    for name, (parameter, _) in parameters.items():
        theirs = expected["params"][name]
        count = parameter.numel()
        assert count == torch.Size(theirs["shape"]).numel(), name
        if theirs["std"] == 0:
            assert (parameter == theirs["mean"]).all(), name
            continue
        # standard error of a deviation is about std / sqrt(2 n); both draws have it, so 5 of their difference
        assert abs(parameter.std(correction=0).item() / theirs["std"] - 1) < 5 / count**0.5, name
        assert abs(parameter.mean().item() - theirs["mean"]) < 5 * theirs["std"] * (2 / count) ** 0.5, name
        if "kernel" in name:  # truncated at two deviations of the parent normal
            fan_in = theirs["shape"][0] if "out.kernel" not in name else theirs["shape"][0] * theirs["shape"][1]
            limit = 2 * fan_in**-0.5 / 0.87962566
            assert parameter.abs().max().item() <= limit * 1.0001, name
            assert theirs["max_abs"] <= limit * 1.0001, name
