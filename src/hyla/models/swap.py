"""HYLA in the attention of a Hugging Face model of another's making (extra `hf`): its projections, norms, rotary positions,
cache and masks stay as they are."""

from __future__ import annotations

import functools
import json
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from hyla.attention import ValueNetwork, hyper_attention, resolve_mechanism
from hyla.attention.layer import init_fan_in_, positions_of
from hyla.attention.mechanisms import Mechanism, ScoreNorm
from hyla.errors import ConfigError, MissingExtraError, check

try:
    import transformers
except ImportError:
    raise MissingExtraError("transformers >= 5.20", "hf", "hyla.models.swap") from None

# Types of models whose attention is Llama's: projections, norms per head, rotary positions of the whole width, a mask.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
SAVED_TYPE = "hyla_swapped"


class SwappedAttention(nn.Module):
    """What an attention module of `transformers` becomes: itself, with its submodules, hooks and names, but this forward.

    Its class also inherits from the one that it had, by which `transformers` finds the modules whose second answer
    `output_attentions` collects: here the latent codes `[B, H, T, keys]`, before dropout.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float

    def configure(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.rotate = sys.modules[type(self).__mro__[2].__module__].apply_rotary_pos_emb
        weight: Any = self.o_proj.weight
        shape = (weight.shape[1] // self.head_dim, self.head_dim, self.head_dim)
        number = mechanism.value_network.num_further_weights
        self.value_weights = nn.ParameterList(nn.Parameter(weight.new_empty(shape)) for _ in range(number))
        for further in self.value_weights:
            init_fan_in_(further, weight.shape[1])

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = past_key_values if cache is None else cache
        # transformers makes every mask for "eager", for other implementations it leaves some of them out
        kind = self.config._attn_implementation
        check(attention_mask is not None, "attn_implementation", kind, "a model with swapped attention needs 'eager'")
        query, key, value = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):  # Qwen3's
            query, key = self.get_submodule("q_norm")(query), self.get_submodule("k_norm")(key)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        query, key = self.rotate(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        wanted = kwargs.get("output_attentions")
        return_codes = bool(self.config.output_attentions if wanted is None else wanted)
        out = hyper_attention(
            query,
            key,
            value,
            mask=attention_mask,
            scale=self.scaling,
            score_norm=self.mechanism.score_norm,
            value_network=self.mechanism.value_network,
            value_weights=list(self.value_weights),
            dropout=self.attention_dropout if self.training else 0.0,
            return_codes=return_codes,
        )
        out_BHQD, codes = out if return_codes else (out, None)
        return self.o_proj(out_BHQD.transpose(1, 2).flatten(-2)), codes


@functools.cache
def _class_beside(host_class: type) -> type:
    return type(f"Hyla{host_class.__name__}", (SwappedAttention, host_class), {})


def swap_attention(
    model: Any,
    mechanism: str = "hyla",
    *,
    score_norm: ScoreNorm | None = None,
    value_network: ValueNetwork | None = None,
    layers: Sequence[int] | None = None,
) -> Any:
    """Change, in place, the attention of a Llama-like model of `transformers` (llama, mistral, qwen2, qwen3).

    mechanism, score_norm, value_network: as in :func:`hyla.attention.hyper_attention`. layers: only these, counted from 0
    or back from -1; all by default. Answers with the model; it warns where outputs will differ. With mechanism="softmax"
    it computes what it did before. `save_pretrained` then writes a folder that :func:`load_swapped` alone can load, since
    its own class would compute softmax attention with these weights.

    Raises ConfigError for models of other types, and for one whose attention is already swapped.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    check(kind in LLAMA_LIKE, "model_type", kind, f"its attention must be that of {', '.join(LLAMA_LIKE)}")
    check(not hasattr(model, "hyla_swapped"), "model", kind, "its attention is already swapped")
    blocks = [module for module in model.modules() if hasattr(module, "self_attn")]
    chosen = resolve_mechanism(mechanism, score_norm, value_network)
    places = range(len(blocks)) if layers is None else positions_of(layers, len(blocks), "layers")
    for place in places:
        attention: Any = blocks[place].self_attn
        attention.__class__ = _class_beside(type(attention))
        attention.configure(chosen)
    model.set_attn_implementation("eager")
    network = chosen.value_network
    model.hyla_swapped = {
        "score_norm": chosen.score_norm,
        "depth": network.depth,
        "activation": network.activation,
        "layers": list(places),
    }
    model.save_pretrained = types.MethodType(_save_swapped, model)
    if (chosen.score_norm, network.depth) != ("softmax", 1):
        drawn = f", and {network.num_further_weights} weights in each were drawn" if network.depth > 2 else ""
        warnings.warn(
            f"{len(places)} layers of this {kind} now compute {mechanism}{drawn}: outputs differ from before, and the "
            "model must be trained before it is used",
            stacklevel=2,
        )
    return model


def _save_swapped(model: Any, save_directory: str | Path, **options: Any) -> None:
    """What `save_pretrained` writes, with a config.json that only `load_swapped` understands."""
    check(not options.pop("push_to_hub", False), "push_to_hub", True, "a swapped model is saved to a folder")
    type(model).save_pretrained(model, save_directory, **options)
    path = Path(save_directory) / "config.json"
    if path.exists():  # only the first of several ranks writes it
        of = json.loads(path.read_text(encoding="utf-8"))
        # one level down: transformers looks for a config of its class among the values of this dict
        saved = {"model_type": SAVED_TYPE, "swapped": {**model.hyla_swapped, "config": of}}
        saved["num_hidden_layers"] = "load this folder with hyla.models.swap.load_swapped"  # no class takes this number
        saved["transformers_version"] = of.get("transformers_version")
        path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


def load_swapped(folder: str | Path) -> Any:
    """The model that a swapped one's `save_pretrained` wrote, in evaluation mode.

    Raises ConfigError, with the name of what is missing or unknown, for any other folder.
    """
    path = Path(folder) / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    check(saved.get("model_type") == SAVED_TYPE, "model_type", saved.get("model_type"), f"{path} must be {SAVED_TYPE}")
    fields = {"score_norm", "depth", "activation", "layers", "config"}
    differing = sorted(fields.symmetric_difference(saved.get("swapped", {})))
    if differing:
        raise ConfigError(f"{path}: 'swapped' must hold {', '.join(sorted(fields))}; missing or unknown: {differing}")
    swapped = saved["swapped"]
    of = swapped["config"]
    config = transformers.AutoConfig.for_model(**of)
    model = getattr(transformers, of["architectures"][0])(config)
    network = ValueNetwork(swapped["depth"], swapped["activation"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # these weights were trained with this attention, or may be
        swap_attention(model, score_norm=swapped["score_norm"], value_network=network, layers=swapped["layers"])
    weights: dict[str, Tensor] = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(shard)
    if weights:
        model.to(dtype=next(iter(weights.values())).dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    check(set(missing) <= tied, "weights", sorted(set(missing) - tied), f"{folder} lacks them")
    check(not unexpected, "weights", unexpected, "the model has no such parameters")
    return model.eval()
