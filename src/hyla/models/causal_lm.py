"""A causal language model for Hugging Face `transformers` (extra `hf`), with any mechanism as its attention.

    from hyla.models.causal_lm import HylaConfig, HylaForCausalLM
    model = HylaForCausalLM(HylaConfig(mechanism="hyla", vocab_size=32_000))

It generates, trains, saves and loads as any model there does. Importing this module registers it, so that `AutoConfig`,
`AutoModel` and `AutoModelForCausalLM` know the folders that it saved. The defaults are the sizes of P1's public language
model (E=128, 8 layers, 16 heads, SwiGLU 256, T5 bias, a table tied to the output, logits divided by sqrt(E)).
"""

from __future__ import annotations

import warnings
from dataclasses import fields
from functools import cache as remember
from inspect import get_annotations
from typing import Any, ClassVar, Literal, get_origin, no_type_check

import torch
from torch import Tensor, nn

from hyla.attention import KeyValueCache, MultiHeadAttention, RelativeBias, ValueNetwork, resolve_mechanism, sinusoidal
from hyla.attention.layer import NORM_EPSILON, Positions, init_fan_in_
from hyla.attention.mechanisms import Activation, ScoreNorm
from hyla.configs import describe, fits
from hyla.errors import ConfigError, MissingExtraError, check
from hyla.models.base import MAX_SIZE
from hyla.models.feedforward import SwiGLU
from hyla.models.transformer import Transformer, same_document

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        DynamicCache,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple
except ImportError:
    raise MissingExtraError("transformers >= 5.20", "hf", "hyla.models.causal_lm") from None

# What transformers calls its cache of keys and values: `cache` from 5.24 on, `past_key_values` before.
CACHE_NAMES = ("cache", "past_key_values")
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})
# What else a config of transformers holds, or is given for a moment, that is not a field of its class.
COMMON_KEYS = {"model_type", "torch_dtype", "num_labels", "name_or_path", "_name_or_path", "attn_implementation"}
COMMON_KEYS |= {"_attn_implementation", "output_attentions", "auto_map", "quantization_config", "_commit_hash"}
COMMON_KEYS |= {"experts_implementation", "_experts_implementation", "per_layer_config", "transformers_weights"}
NOT_NEEDED = {"use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}  # a stored config computes the same without


@no_type_check  # it checks its own fields; transformers makes it an __init__ that takes any keyword
class HylaConfig(PreTrainedConfig):
    """Sizes and choices of a HYLA language model, with the names that `transformers` uses for what every model has.

    All of them are stored in config.json. Reading one that lacks a field, or has an unknown one, raises ConfigError with
    its name, so that a model is never loaded as another than was trained.
    """

    model_type = "hyla"
    keys_to_ignore_at_inference: ClassVar[list[str]] = list(CACHE_NAMES)

    mechanism: str = "hyla"
    """Attention mechanism, a name of `hyla.attention.MECHANISMS`."""
    score_norm: ScoreNorm | None = None
    """Replaces the mechanism's score normalisation."""
    depth: int | None = None
    """Replaces the depth of the mechanism's value network (1 = ordinary attention)."""
    activation: Activation | None = None
    """Replaces the activation of the mechanism's value network."""
    vocab_size: int = 2048
    """Number of tokens."""
    hidden_size: int = 128
    """Width E of the residual stream."""
    num_hidden_layers: int = 8
    """Number of blocks."""
    num_attention_heads: int = 16
    """Attention heads; also the size of a latent code."""
    num_key_value_heads: int | None = None
    """Heads of keys and values; as many as attention heads by default."""
    head_dim: int | None = None
    """Width of queries, keys and values per head; hidden_size / num_attention_heads by default."""
    intermediate_size: int = 256
    """Hidden width of the SwiGLU."""
    positions: Literal[Positions, "sinusoidal"] = "t5"
    """Position scheme; t5 is a relative bias per block, whose distances count tokens whatever `position_ids` say."""
    max_position_embeddings: int = 128
    """Length that the model is meant for; longer sequences still run."""
    num_buckets: int | None = None
    """Buckets of the t5 bias; max_position_embeddings by default (P1)."""
    max_distance: int | None = None
    """Distance from which t5 buckets no longer differ; max_position_embeddings by default (P1)."""
    rotary_base: float = 10_000.0
    """Base of rotary's frequencies."""
    norm: Literal["rms", "layer"] = "rms"
    """Norm of the blocks."""
    final_norm: Literal["rms", "layer"] = "layer"
    """Norm after the last block (P1: always LayerNorm)."""
    norm_eps: float = NORM_EPSILON
    """Epsilon of these norms."""
    bias: bool = True
    """Biases in the projections of attention and in LayerNorms (P1: yes; Llama: no). The SwiGLU never has any."""
    qk_norm: bool = False
    """LayerNorm without bias on every head's queries and keys."""
    attention_dropout: float = 0.0
    """Share of the latent codes dropped in training."""
    dropout_shared: bool = False
    """One dropout mask for the whole batch and all heads, as in P1's public code."""
    tie_word_embeddings: bool = True
    """Whether the table of token vectors is also the output layer."""
    logit_scale: float | None = None
    """Multiplies the logits; by default 1/sqrt(hidden_size) with a tied table (P1), 1 without."""
    use_cache: bool = True
    """Whether forward passes outside training answer with a cache."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in COMMON_KEYS:
                allowed = ", ".join(own_fields())
                raise ConfigError(f"a HYLA model's config has no field {key!r}; its fields: {allowed}")
        for name, hint in own_fields().items():
            value = getattr(self, name)
            check(fits(value, hint), name, value, f"must be {describe(hint)}")
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name in (*sizes, "max_position_embeddings"):
            check(1 <= getattr(self, name) <= MAX_SIZE, name, getattr(self, name), f"from 1 to {MAX_SIZE:,}")
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        shares = self.num_key_value_heads >= 1 and heads % self.num_key_value_heads == 0
        check(shares, "num_key_value_heads", self.num_key_value_heads, f"must divide num_attention_heads = {heads}")
        if self.head_dim is None:
            divides = self.hidden_size % heads == 0
            check(
                divides, "hidden_size", self.hidden_size, f"a multiple of num_attention_heads = {heads}, or a head_dim"
            )
            self.head_dim = self.hidden_size // heads
        even = self.positions != "rotary" or self.head_dim % 2 == 0
        check(even, "head_dim", self.head_dim, "rotary positions need an even width per head")
        check(0 <= self.attention_dropout < 1, "attention_dropout", self.attention_dropout, "0 up to 1, without 1")
        if self.num_buckets is None:
            self.num_buckets = max(self.max_position_embeddings, 2)
        if self.max_distance is None:
            self.max_distance = max(self.max_position_embeddings, 2)
        if self.logit_scale is None:
            self.logit_scale = self.hidden_size**-0.5 if self.tie_word_embeddings else 1.0
        self.resolved()  # an unknown mechanism is refused here
        super().__post_init__(**kwargs)

    def resolved(self) -> tuple[ScoreNorm, ValueNetwork]:
        """The score normalisation and value network that the mechanism and its replacements come to."""
        named = resolve_mechanism(self.mechanism, self.score_norm)
        network = named.value_network
        depth = network.depth if self.depth is None else self.depth
        return named.score_norm, ValueNetwork(depth, self.activation or network.activation)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; ConfigError where the dict is of another type of model, or lacks a field."""
        kind = config_dict.get("model_type", cls.model_type)
        check(kind == cls.model_type, "model_type", kind, f"{cls.model_type!r}; see from_softmax for other models")
        missing = [name for name in own_fields() if name not in config_dict and name not in NOT_NEEDED]
        if missing:
            reason = "without it another model than was trained could be loaded"
            raise ConfigError(f"the config of a HYLA model lacks {', '.join(map(repr, missing))}: {reason}")
        return super().from_dict(config_dict, **kwargs)


@remember
def own_fields() -> dict[str, Any]:
    """The fields that HylaConfig adds, and their types."""
    hints = get_annotations(HylaConfig, eval_str=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


class LayerCache(KeyValueCache):
    """One layer's part of a cache of `transformers`, dynamic or static."""

    def __init__(self, cache: Any, layer: int):
        self.cache, self.layer = cache, layer

    @property
    def length(self) -> int | Tensor:
        return self.cache.get_seq_length(self.layer)

    def append(self, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.cache.update(key, value, self.layer)


def make_norm(kind: str, config: HylaConfig) -> nn.Module:
    if kind == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class HylaLayer(GradientCheckpointingLayer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: HylaConfig):
        super().__init__()
        score_norm, value_network = config.resolved()
        assert config.head_dim is not None
        width = config.num_attention_heads * config.head_dim
        self.norm1, self.norm2 = make_norm(config.norm, config), make_norm(config.norm, config)
        self.attention = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            mechanism=config.mechanism,
            score_norm=score_norm,
            value_network=value_network,
            num_kv_heads=config.num_key_value_heads,
            qk_dim=width,
            v_dim=width,
            bias=config.bias,
            qk_norm=config.qk_norm,
            dropout=config.attention_dropout,
            dropout_shared=config.dropout_shared,
            positions="none" if config.positions == "sinusoidal" else config.positions,
            num_buckets=config.num_buckets or 2,
            max_distance=config.max_distance or 2,
            rotary_base=config.rotary_base,
        )
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        return_codes: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, codes `[B, H, Q, K]` where asked for). Without a mask the layer is causal."""
        options: dict[str, Any] = {"mask": mask, "causal": mask is None, "cache": cache, "return_codes": return_codes}
        attended = self.attention(self.norm1(x), **options, query_positions=positions)
        attended, codes = attended if return_codes else (attended, None)
        x = x + attended
        return x + self.mlp(self.norm2(x)), codes


class HylaPreTrainedModel(PreTrainedModel):
    """Initialisation (P1's) and what `transformers` needs to know."""

    config_class = HylaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HylaLayer"]  # noqa: RUF012
    _skip_keys_device_placement = list(CACHE_NAMES)  # noqa: RUF012
    _supports_sdpa = True  # the form of its masks; attention itself is always hyla's

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MultiHeadAttention | RelativeBias | nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            init_fan_in_(module.weight, module.in_features)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


class HylaModel(HylaPreTrainedModel):
    """Table of token vectors, blocks, norm."""

    def __init__(self, config: HylaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HylaLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = make_norm(config.final_norm, config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, E]` of `input_ids [B, T]`.

        attention_mask: `[B, keys]`, 1 = a real token, for the cached tokens too; or a mask `[B, 1, T, keys]` already made.
        position_ids: `[B, T]`, counted from the attention mask where it has rows; with neither mask nor cache, a position
        that does not follow its neighbour's starts a new sequence, and attention does not cross it. cache: of
        transformers, dynamic or static; `past_key_values` is its name before 5.24. output_attentions: also the latent
        codes `[B, H, T, keys]` of every layer, before dropout.
        """
        check((input_ids is None) != (inputs_embeds is None), "input_ids, inputs_embeds", "both or none", "give one")
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # the backward pass computes the layers again: their keys would enter the cache twice
            cache, use_cache = None, False
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask, positions = self._mask_and_positions(x, attention_mask, position_ids, cache)
        if self.config.positions == "sinusoidal":
            x = x + sinusoidal(positions, x.shape[-1], x.dtype)
        rotary = positions if self.config.positions == "rotary" else None
        wants_codes = self.config.output_attentions if output_attentions is None else output_attentions
        wants_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden, codes = [x], []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else LayerCache(cache, index)
            x, code = layer(x, mask, rotary, layer_cache, bool(wants_codes))
            hidden.append(x)
            codes.append(code)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden[:-1], x) if wants_hidden else None,
            attentions=tuple(codes) if wants_codes else None,
            **{CACHE: cache},
        )

    def _mask_and_positions(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Any
    ) -> tuple[Any, Tensor]:
        """(mask, or None where it is the plain causal one of a call without a cache; positions `[B or 1, T]`)."""
        kind = self.config._attn_implementation
        # for any other name, transformers makes no mask, and padding would be attended to
        check(kind in ("sdpa", "eager"), "attn_implementation", kind, "attention is hyla's own: leave it at 'sdpa'")
        mask: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            # a static cache is longer than what it holds: without a mask its empty end would be attended to
            allow_is_causal_skip=cache is None,
            **{CACHE: cache},
        )
        if position_ids is not None:
            return mask, position_ids
        slots = torch.arange(x.shape[1], device=x.device) + (0 if cache is None else cache.get_seq_length())
        if attention_mask is None or attention_mask.dim() != 2:
            return mask, slots[None]
        return mask, (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, slots]  # padding counts nothing


class HylaForCausalLM(HylaPreTrainedModel, GenerationMixin):
    """HylaModel and the output layer: next-token logits, the loss of labels, `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HylaConfig):
        super().__init__(config)
        self.model = HylaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab]`; of the last `logits_to_keep` positions (0: all), or of those it lists, alone.

        labels: `[B, T]`, the input ids themselves (shifted here), -100 where there is nothing to predict. The loss is the
        mean over these tokens; with `num_items_in_batch`, as the Trainer gives it, their sum divided by that number, so
        that accumulated micro-batches and ranks weigh every token equally. Other arguments as in HylaModel.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept]) * self.config.logit_scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )


# Names of Llama's parameters, and ours for the same.
LLAMA_NAMES = {
    "self_attn.o_proj": "attention.out_proj",
    "self_attn": "attention",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
}


def from_softmax(model: PreTrainedModel | str, mechanism: str = "hyla", **replaced: Any) -> HylaForCausalLM:
    """A model with `mechanism` that starts from the weights of a softmax model, for fine-tuning.

    model: a HylaForCausalLM or a Llama (or Mistral without a sliding window), or the folder or name of one. replaced: other
    fields of HylaConfig. The parameters are the same, except for a value network deeper than 2, whose further weights are
    drawn; what they compute is not, so this warns. With mechanism="softmax" a Llama's logits are the same.

    Raises ConfigError for models of other types (`hyla.models.swap` changes their attention in place) and for variants of
    Llama that HylaForCausalLM does not have.
    """
    if not isinstance(model, PreTrainedModel):
        model = AutoModelForCausalLM.from_pretrained(model)
    kind = model.config.model_type
    weights = model.state_dict()
    if kind == "hyla":
        data = {name: getattr(model.config, name) for name in own_fields()}
        known = resolve_mechanism(data["mechanism"], data["score_norm"]).score_norm
        check(known == "softmax", "mechanism", data["mechanism"], "from_softmax starts from softmax attention")
        data |= {"score_norm": None, "depth": None, "activation": None}
    else:
        allowed = "hyla, llama, mistral; for others see hyla.models.swap.swap_attention"
        check(kind in ("llama", "mistral"), "model_type", kind, allowed)
        data = _from_llama(model.config)
        for theirs, ours in LLAMA_NAMES.items():
            weights = {name.replace(f".{theirs}.", f".{ours}."): tensor for name, tensor in weights.items()}
    fields_given: dict[str, Any] = {**data, "mechanism": mechanism, **replaced}
    made = HylaForCausalLM(HylaConfig(**fields_given))
    nn.Module.to(made, model.dtype)
    missing, unexpected = made.load_state_dict(weights, strict=False)
    drawn = [name for name in missing if ".value_weights." in name]
    check(not unexpected, "model", unexpected, "HylaForCausalLM has no such parameters")
    check(len(missing) == len(drawn), "model", missing, "it must have these parameters")
    score_norm, network = made.config.resolved()
    if (score_norm, network.depth) != ("softmax", 1):
        further = f", and drew {len(drawn)} further weights of its value networks" if drawn else ""
        warnings.warn(
            f"this {mechanism} model starts from the weights of a softmax model{further}: its outputs differ from that "
            "model's, and it must be trained before it is used",
            stacklevel=2,
        )
    return made.train(model.training)


def _from_llama(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a HylaConfig that describe a Llama."""
    found = config.to_dict()
    rope = found.get("rope_parameters") or {}
    for field, value, possible in (
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("hidden_act", found.get("hidden_act"), "silu"),
        ("mlp_bias", found.get("mlp_bias", False), False),
        ("sliding_window", found.get("sliding_window"), None),
    ):
        check(value == possible, field, value, f"HylaForCausalLM has only {possible!r}")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "max_position_embeddings", "attention_dropout", "tie_word_embeddings", "use_cache")
    names += ("pad_token_id", "bos_token_id", "eos_token_id")
    data = {name: found[name] for name in names if name in found}
    data |= {"positions": "rotary", "rotary_base": float(rope.get("rope_theta", 10_000.0)), "logit_scale": 1.0}
    data |= {"norm": "rms", "final_norm": "rms", "norm_eps": found["rms_norm_eps"]}
    return data | {"bias": bool(found.get("attention_bias", False))}


# Beginnings of our Transformer's parameter names, and ours for the same.
TRANSFORMER_NAMES = {"embedding.": "model.embed_tokens.", "blocks.": "model.layers.", "norm.": "model.norm."}


def from_transformer(
    model: Transformer, *, end_of_text: int | None = None, sequence_length: int | None = None
) -> HylaForCausalLM:
    """A Transformer with a vocabulary as a language model with the same weights (copied) and logits.

    end_of_text: the token that begins, ends and pads a text; the model's `boundary_token` by default, which must agree.
    sequence_length: the length that the model is meant for; by default that of its t5 buckets, or else HylaConfig's.

    One text per sequence needs no mask. This model knows no boundary token: to keep texts that are packed into one sequence
    apart, give :func:`document_positions` as `position_ids`, with `use_cache=False`. With sinusoidal positions, which go on
    counting from text to text in the Transformer, give it :func:`document_mask` as `attention_mask` instead.

    Raises ConfigError, naming the field, for what HylaForCausalLM does not have.
    """
    config = model.config
    boundary = model.boundary_token
    if model.head is not None:
        raise ConfigError(
            "vocab_size = None is not possible: only a Transformer that reads token ids is a language model"
        )
    allowed = f"the model's texts begin with its boundary token, {boundary}"
    check(end_of_text is None or boundary in (None, end_of_text), "end_of_text", end_of_text, allowed)
    check(config.mlp == "swiglu", "model.mlp", config.mlp, "HylaForCausalLM has only 'swiglu'")
    check(config.causal, "model.causal", config.causal, "HylaForCausalLM has only True")
    allowed = f"HylaForCausalLM has one width for queries, keys and values, here model.v_dim = {config.v_dim}"
    check(config.qk_dim == config.v_dim, "model.qk_dim", config.qk_dim, allowed)
    one_sided = config.positions != "t5" or not config.bidirectional
    check(one_sided, "model.bidirectional", config.bidirectional, "the t5 bias of HylaForCausalLM has only False")
    names = ("mechanism", "score_norm", "depth", "activation", "positions", "norm", "bias", "qk_norm")
    fields_given: dict[str, Any] = {name: getattr(config, name) for name in names}
    fields_given |= {"attention_dropout": config.attention_dropout, "dropout_shared": config.dropout_shared}
    fields_given |= {"vocab_size": model.embedding.weight.shape[0], "hidden_size": config.embed_dim}
    fields_given |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
    fields_given |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.qk_dim // config.num_heads}
    fields_given |= {"intermediate_size": config.mlp_dim, "tie_word_embeddings": True}
    buckets = next((part for part in model.modules() if isinstance(part, RelativeBias)), None)
    if buckets is not None:
        fields_given |= {"num_buckets": buckets.num_buckets, "max_distance": buckets.max_distance}
        sequence_length = buckets.max_distance if sequence_length is None else sequence_length
    if sequence_length is not None:
        fields_given["max_position_embeddings"] = sequence_length
    end = boundary if end_of_text is None else end_of_text
    fields_given |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    made = HylaForCausalLM(HylaConfig(**fields_given))
    weights = {}
    for name, tensor in model.state_dict().items():
        first = next(first for first in TRANSFORMER_NAMES if name.startswith(first))
        weights[TRANSFORMER_NAMES[first] + name.removeprefix(first)] = tensor
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    nn.Module.to(made, weights["lm_head.weight"])
    made.load_state_dict(weights)
    return made.train(model.training)


def document_positions(input_ids: Tensor, end_of_text: int) -> Tensor:
    """Position `[B, T]` of every token in its own text, for packed texts `[B, T]` that begin with `end_of_text`. As
    `position_ids` (without a cache) they keep each text from seeing those before it."""
    slots = torch.arange(input_ids.shape[-1], device=input_ids.device).expand_as(input_ids)
    starts = slots.masked_fill(input_ids != end_of_text, 0).cummax(-1).values
    return slots - starts


def document_mask(input_ids: Tensor, end_of_text: int) -> Tensor:
    """`[B, 1, T, T]`: True where a query may see a key, in packed texts as above: one of its own text, and no later one."""
    pairs = same_document(input_ids == end_of_text)
    return pairs & torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).tril()


AutoConfig.register(HylaConfig.model_type, HylaConfig, exist_ok=True)
AutoModel.register(HylaConfig, HylaModel, exist_ok=True)
AutoModelForCausalLM.register(HylaConfig, HylaForCausalLM, exist_ok=True)
