import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state

from hyla.errors import ConfigError
from hyla.models.mixture import Mixture
from hyla.models.transformer import Transformer, TransformerConfig

# sums of float64 numbers near 1, in two orders
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random_mixture(num_experts=4, top_k=2, width=6, hidden=5, seed=0):
    torch.manual_seed(seed)
    mixture = Mixture(width, hidden, num_experts, top_k).double()
    torch.nn.init.normal_(mixture.up_bias)
    torch.nn.init.normal_(mixture.down_bias)
    return mixture


def identity_router(num_experts, top_k):
    """A mixture whose router's logits are its inputs."""
    mixture = Mixture(num_experts, 3, num_experts, top_k).double()
    with torch.no_grad():
        mixture.router.weight.copy_(torch.eye(num_experts))
    return mixture


def expert(mixture, index, token):
    hidden = F.gelu(mixture.up[index] @ token + mixture.up_bias[index], approximate="tanh")
    return mixture.down[index] @ hidden + mixture.down_bias[index]


def by_loop(mixture, x):
    """One token at a time, and only its chosen experts."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        probability = (mixture.router.weight @ token).softmax(0)
        chosen = sorted(range(mixture.num_experts), key=lambda i: -probability[i].item())[: mixture.top_k]
        total = sum(probability[i] for i in chosen)
        rows.append(sum(probability[i] / total * expert(mixture, i, token) for i in chosen))
    return torch.stack(rows).reshape(x.shape)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [(), (7,), (2, 3)])
def test_equals_a_loop_over_the_chosen_experts(top_k, batch):
    mixture, x = random_mixture(top_k=top_k), torch.randn(*batch, 6, dtype=torch.float64)
    out, _ = mixture(x)
    expected = by_loop(mixture, x)
    torch.testing.assert_close(out, expected, **EXACT)
    ours = torch.autograd.grad(
        out.square().sum(), list(mixture.parameters()), allow_unused=True, materialize_grads=True
    )
    loops = torch.autograd.grad(
        expected.square().sum(), list(mixture.parameters()), allow_unused=True, materialize_grads=True
    )
    for got, wanted in zip(ours, loops, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


def test_all_experts_are_a_softmax_mixture():
    mixture, x = random_mixture(top_k=4), torch.randn(5, 6, dtype=torch.float64)
    gates = mixture.router(x).softmax(-1)
    outs = torch.stack([torch.stack([expert(mixture, i, token) for i in range(4)]) for token in x])
    torch.testing.assert_close(mixture(x)[0], torch.einsum("tx,txe->te", gates, outs), **EXACT)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_gates_sum_to_one(top_k):
    """Experts that answer 1 whatever the token give the sum of the gates."""
    mixture = random_mixture(top_k=top_k)
    torch.nn.init.zeros_(mixture.down)
    torch.nn.init.ones_(mixture.down_bias)
    x = torch.randn(9, 6, dtype=torch.float64)
    torch.testing.assert_close(mixture(x)[0], torch.ones_like(x), **EXACT)


def test_loss_is_one_when_balanced():
    mixture = identity_router(4, top_k=1)
    tokens = 50 * torch.eye(4, dtype=torch.float64).repeat(3, 1)  # each expert is chosen by 3 of 12 tokens, for certain
    assert mixture(tokens)[1].item() == pytest.approx(1.0, abs=1e-12)
    assert mixture(torch.zeros(5, 4, dtype=torch.float64))[1].item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("num_experts", [2, 4, 7])
def test_loss_is_the_number_of_experts_when_collapsed(num_experts):
    tokens = torch.zeros(10, num_experts, dtype=torch.float64)
    tokens[:, 1] = 50.0
    assert identity_router(num_experts, top_k=1)(tokens)[1].item() == pytest.approx(num_experts, abs=1e-12)


def test_loss_by_hand_ignores_padding():
    """Logits (log 3, 0) are probabilities (3/4, 1/4). Two tokens choose the first expert, one the second:
    f = (2/3, 1/3), p = (7/12, 5/12), loss 2 (14/36 + 5/36) = 19/18."""
    first, second = [math.log(3.0), 0.0], [0.0, math.log(3.0)]
    real = torch.tensor([[True, False, True], [True, False, False]])
    for padding in (0.0, 100.0):
        pad = [-padding, padding]
        x = torch.tensor([[first, pad, second], [first, pad, pad]], dtype=torch.float64)
        assert identity_router(2, top_k=1)(x, real)[1].item() == pytest.approx(19 / 18, abs=1e-12)
    assert identity_router(2, top_k=1)(x)[1].item() != pytest.approx(19 / 18, abs=0.01)


def test_loss_of_nothing_but_padding_is_zero():
    mixture, x = random_mixture(), torch.randn(3, 6, dtype=torch.float64)
    loss = mixture(x, torch.zeros(3, dtype=torch.bool))[1]
    loss.backward()
    assert loss.item() == 0.0
    assert (mixture.router.weight.grad == 0).all()


def test_gradients_reach_router_and_experts():
    mixture, x = random_mixture(), torch.randn(40, 6, dtype=torch.float64)
    mixture(x)[0].square().sum().backward()
    for name, parameter in mixture.named_parameters():
        assert (parameter.grad != 0).all(), name
    mixture.zero_grad()
    mixture(x)[1].backward()
    assert (mixture.router.weight.grad != 0).all()
    assert mixture.up.grad is None


def test_with_one_expert_per_token_only_the_loss_trains_the_router():
    mixture, x = random_mixture(top_k=1), torch.randn(40, 6, dtype=torch.float64)
    mixture(x)[0].square().sum().backward()
    assert mixture.router.weight.grad.abs().max() < 1e-12  # the gate is p / p
    mixture(x)[1].backward()
    assert mixture.router.weight.grad.abs().max() > 1e-3


def test_gradcheck():
    mixture, x = random_mixture(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in mixture.named_parameters()]

    def run(x, *values):
        return functional_call(mixture, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *(value.detach().requires_grad_() for value in mixture.parameters())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_loss_is_counted_in_float32_or_better(dtype):
    """70000 tokens are more than float16 holds, and bfloat16 counts to 256."""
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=dtype).repeat(23_334, 1)
    out, loss = identity_router(2, top_k=1).to(dtype)(tokens)
    exact = identity_router(2, top_k=1)(tokens.double())[1]
    assert out.dtype == dtype
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5 if dtype != torch.float64 else 1e-12)


def test_autocast_counts_the_loss_in_float32():
    mixture, x = random_mixture().float(), torch.randn(500, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = mixture.router(x), mixture(x)[1]
    share = F.one_hot(logits.float().softmax(-1).topk(2).indices, 4).float().mean((0, 1))
    expected = 4 * (share * logits.float().softmax(-1).mean(0)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_two_calls_agree_bit_by_bit():
    mixture, x = random_mixture().float(), torch.randn(64, 6)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = mixture(x), mixture(x)
        (first[0].sum() + first[1]).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_vmap_over_stacked_parameters_equals_a_loop():
    mixtures = [random_mixture(seed=seed) for seed in range(3)]
    parameters, _ = stack_module_state(mixtures)
    x, real = torch.randn(3, 2, 5, 6, dtype=torch.float64), torch.rand(2, 5) > 0.3

    def run(state, x):
        return functional_call(mixtures[0], state, (x, real))

    out, loss = torch.vmap(run)(parameters, x)
    for p, mixture in enumerate(mixtures):
        expected, expected_loss = mixture(x[p], real)
        torch.testing.assert_close(out[p], expected, **EXACT)
        torch.testing.assert_close(loss[p], expected_loss, **EXACT)


@pytest.mark.parametrize("predict_at", [None, slice(-2, None)])
def test_in_a_transformer(predict_at):
    config = TransformerConfig(mlp="mixture", embed_dim=16, mlp_dim=8, num_experts=3, top_k=2)
    model = Transformer(config, sequence_length=7, input_dim=3, output_dim=2).double()
    x, key_mask = torch.randn(2, 7, 3, dtype=torch.float64), torch.arange(7) < torch.tensor([[7], [6]])
    losses = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, inputs, output: losses.append(output[1]))
    out = model(x, key_mask=key_mask, predict_at=predict_at)
    assert torch.equal(out.balance_loss, torch.stack(losses).mean())
    assert 0.5 < out.balance_loss.item() < 3.0
    changed = x.clone()
    changed[1, 6] += 10.0  # padding
    assert torch.equal(model(changed, key_mask=key_mask, predict_at=predict_at).balance_loss, out.balance_loss)
    (out.predictions.square().mean() + out.balance_loss).backward()
    assert all((parameter.grad != 0).any() for parameter in model.parameters())


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_no_loss_without_a_mixture(mlp):
    model = Transformer(TransformerConfig(mlp=mlp), sequence_length=4, input_dim=3, output_dim=2)
    assert model(torch.randn(1, 4, 3)).balance_loss is None


@pytest.mark.parametrize(("experts", "top_k"), [(0, 1), (4, 0), (4, 5)])
def test_impossible_numbers_of_experts(experts, top_k):
    with pytest.raises(ConfigError, match="num_experts"):
        Mixture(4, 4, experts, top_k)
