"""Replace latent codes inside a running model, to see what depends on them: a causal check beside correlations.

A layer's output at a query is a sum over keys of what each pair's network gives, so a pair's code is replaced exactly by
adding the difference of its contributions; nothing else of the layer is computed differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from hyla.attention import MultiHeadAttention, output_change
from hyla.attention.layer import positions_of
from hyla.errors import check
from hyla.latents.collect import BATCH, Collection, choose_layers, layer_call
from hyla.latents.readings import Reading


@contextlib.contextmanager
def replaced_codes(
    layer: MultiHeadAttention,
    queries: Sequence[int],
    keys: Sequence[int],
    codes: Float[Tensor, "*batch chosen_queries chosen_keys heads"],
) -> Iterator[None]:
    """While open, the pairs of `queries` and `keys` in `layer` have these codes, for every sequence or one set each."""

    def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x, context, masks = layer_call(args, kwargs)
        old_BHQK = layer.codes(x, context, queries=queries, keys=keys, **masks)
        new_BHQK = codes.to(old_BHQK).movedim(-1, -3).expand_as(old_BHQK)
        source = x if context is None else context
        change_BQE = output_change(layer, source, keys, old_BHQK, new_BHQK)
        computed = list(range(x.shape[-2])[kwargs.get("select") or slice(None)])
        out = (output[0] if isinstance(output, tuple) else output).clone()
        for number, query in enumerate(positions_of(queries, x.shape[-2], "queries")):
            if query in computed:  # what is not computed influences nothing
                out[..., computed.index(query), :] += change_BQE[..., number, :].to(out.dtype)
        return (out, *output[1:]) if isinstance(output, tuple) else out

    handle = layer.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class CausalCheck:
    """What replacing codes does to the answers, sample by sample.

    effect: `[N, C]`, how much the answer of sample n changes when its codes become the mean code of class c (nan where c
    has none): for answers that are one of several values, 1 if it is another one and 0 if not; for numbers, the absolute
    change. At the sample's own class this is the control: a mean code in place of the sample's own.
    answers: `[N, C]` the answer then given (discrete tasks; -1 where c has no mean), before: `[N]` as the model gives it.
    """

    effect: np.ndarray
    answers: np.ndarray | None
    before: np.ndarray | None


@torch.no_grad()
def causal_check(
    model: nn.Module,
    reading: Reading,
    collection: Collection,
    layer: str,
    split: str,
    means: Float[np.ndarray, "classes chosen_queries chosen_keys heads"],
    num_samples: int,
) -> CausalCheck:
    """Answer the first `num_samples` of a split again with the codes of `layer` replaced by each class's mean code.

    The samples are those of `collection`, which must have been made by this model with `reading`.
    """
    check(num_samples >= 1, "num_samples", num_samples, "at least 1")
    module = choose_layers(model, [layer])[layer]
    parameter = next(model.parameters())
    discrete = collection.predictions(split).shape[-1] > 1
    training = model.training
    model.eval()
    effects, answers, before = [], [], []
    try:
        for start in range(0, num_samples, BATCH):
            rows = slice(start, min(start + BATCH, num_samples))
            inputs = torch.from_numpy(np.array(collection.inputs(split)[rows])).to(parameter.device)
            plain_B = _answer(model, reading, inputs, discrete)
            changed = []
            for mean_QKH in means:
                if np.isnan(mean_QKH).any():
                    changed.append(np.full(len(plain_B), np.nan))
                    continue
                with replaced_codes(module, reading.queries, reading.keys, torch.from_numpy(mean_QKH)):
                    changed.append(_answer(model, reading, inputs, discrete))
            changed_BC = np.stack(changed, 1)
            difference_BC = np.abs(changed_BC - plain_B[:, None])
            effects.append(np.where(np.isnan(difference_BC), np.nan, difference_BC > 0) if discrete else difference_BC)
            answers.append(np.nan_to_num(changed_BC, nan=-1).astype(int))
            before.append(plain_B.astype(int))
    finally:
        model.train(training)
    effect_NC = np.concatenate(effects)
    return (
        CausalCheck(effect_NC, np.concatenate(answers), np.concatenate(before))
        if discrete
        else CausalCheck(effect_NC, None, None)
    )


def _answer(model: nn.Module, reading: Reading, inputs: Tensor, discrete: bool) -> np.ndarray:
    """The answer that the pairs are about, `[B]`: the number itself, or which value is the most probable."""
    predictions_BO = model(inputs, predict_at=reading.task.predict_at).predictions[:, reading.answer]
    answer_B = predictions_BO.argmax(-1) if discrete else predictions_BO[:, 0]
    return answer_B.double().cpu().numpy()
