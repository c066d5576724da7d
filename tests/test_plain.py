"""The yardstick of the training step computes what our model computes, so that their times compare."""

import pytest
import torch
from benchmarks import plain

from hyla.models.transformer import Transformer, TransformerConfig


@pytest.mark.parametrize("task", plain.SIZES)
@pytest.mark.parametrize("mechanism", ["softmax", "hyla"])
def test_same_loss_and_gradients_as_our_model(task, mechanism):
    size = plain.SIZES[task]
    theirs = plain.PlainTransformer(size, mechanism).double()
    inner = size.heads * size.depth
    config = TransformerConfig(
        mechanism=mechanism, num_layers=size.layers, num_heads=size.heads, qk_dim=inner, v_dim=inner
    )
    ours = Transformer(config, sequence_length=size.length, input_dim=size.inputs, output_dim=size.outputs).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, size.length, size.inputs, dtype=torch.float64)
    y = torch.rand(3, 1).double() if task == "logic" else torch.randint(size.outputs, (3, size.answers))
    plain_loss = plain.loss(task, theirs(x), y)
    loss = plain.loss(task, ours(x, predict_at=slice(-size.answers, None)).predictions, y)
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-12)
    plain_loss.backward()
    loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-12)


def test_times_a_step():
    assert plain.median_ms(plain.plain_step("logic", "hyla"), steps=1, warmup=1) > 0
