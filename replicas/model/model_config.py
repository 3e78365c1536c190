"""Model configuration, read from a checkpoint's config.json: frozen, checked, and the same for both dialects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

import torch

from ..checkpoint.files.json_fields import JsonFields
from .layers import LayerPlan
from .parts.dense_feed_forward import DenseFeedForward
from .parts.softmax_attention import SoftmaxAttention
from .rotary_embedding import RopeConfig, read_rope
from .sharding.rank_shares import undivided

# Limits far above any known model, and far below values that would do harm.
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 19
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCABULARY = 1 << 22
MAX_POSITIONS = 1 << 24
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHORT_DTYPES = {"float": "float32", "half": "float16"}

# Keys of other decoders that change what is computed -> the values, besides null, that change nothing here.
UNSUPPORTED_KEYS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        # attention
        "attention_chunk_size": (),
        "attention_multiplier": (),
        "attn_logit_softcapping": (),
        "clip_qkv": (),
        "is_causal": (True,),
        "query_pre_attn_scalar": (),
        "use_bidirectional_attention": (False,),
        "use_logn_attn": (False,),
        # positions
        "alibi": (False,),
        "no_rope_layer_interval": (0,),
        "no_rope_layers": ([],),
        "position_embedding_type": ("rope", "rotary"),
        "rope_local_base_freq": (),
        "rope_ratio": (1,),
        "rotary_pct": (1,),
        # the layer
        "activation_function": ("silu", "swish"),
        "hidden_activation": ("silu", "swish"),
        "layer_norm_type": ("rms", "rmsnorm", "rms_norm"),
        "num_experts": (0,),
        "num_kv_shared_layers": (0,),
        "num_local_experts": (0,),
        "per_layer_config": ({},),
        "parallel_attn": (False,),
        "residual_multiplier": (1,),
        "use_parallel_residual": (False,),
        # another model within
        "text_config": ({},),
        # embeddings and logits
        "embedding_multiplier": (1,),
        "final_logit_softcapping": (),
        "logit_scale": (1,),
        "logit_softcapping": (),
        "logits_scaling": (1,),
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of one decoder. All families are instances of the same decoder.

    layers      plan of each layer
    rotary_dim  features of a head that rope turns
    dtype       dtype of the tensors, as the checkpoint states it
    """

    family: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    rotary_dim: int
    layers: tuple[LayerPlan, ...]
    tie_word_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return the KV heads of a layer and the features of each, which are the same in every layer."""
        [shape] = {plan.attention.kv_shape for plan in self.layers}
        return shape

    @property
    def facts(self) -> dict[str, object]:
        """Return the config by the names of a version in which all layers had the same sizes.

        Digests in stores and caches are made of this, and processes that differ name one of these. A config that those
        names do not describe is there by its own fields.
        """
        first, windows = self.layers[0], [getattr(plan.attention, "window", None) for plan in self.layers]
        attention, mlp = first.attention, first.mlp
        if (
            not isinstance(attention, SoftmaxAttention)
            or not isinstance(mlp, DenseFeedForward)
            or any(
                plan != replace(first, attention=replace(attention, window=window))
                for plan, window in zip(self.layers, windows, strict=True)
            )
        ):
            return {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "family": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": mlp.inner.total,
            "num_layers": self.num_layers,
            "num_heads": attention.heads.total,
            "num_kv_heads": attention.kv_heads.total,
            "head_dim": attention.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope": self.rope,
            "windows": tuple(windows),
            "tie_word_embeddings": self.tie_word_embeddings,
            "qkv_bias": attention.qkv_bias,
            "output_bias": attention.output_bias,
            "mlp_bias": mlp.bias,
            "qk_norm": attention.qk_norm,
            "dtype": self.dtype,
            "eos_token_ids": self.eos_token_ids,
        }

    def __str__(self) -> str:
        return f"ModelConfig({', '.join(f'{name}={value!r}' for name, value in self.facts.items())})"

    @property
    def max_model_len(self) -> int:
        """Most tokens that prompt and output may have together.

        Configs with linear or yarn rope may keep the length before the extension in max_position_embeddings.
        """
        if self.rope.kind in ("linear", "yarn"):
            return max(self.max_position_embeddings, int(self.rope.original_length * self.rope.factor))
        return self.max_position_embeddings


def read_decoder_config(
    config: JsonFields,
    *,
    family: str,
    qkv_bias: bool,
    output_bias: bool,
    windows: tuple[int | None, ...],
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
) -> ModelConfig:
    """Read the fields that all families share; `head_dim` and `num_kv_heads` are a family's own defaults.

    Raises CheckpointError naming the key, for a key in UNSUPPORTED_KEYS too.
    """
    _refuse_unsupported_keys(config, qk_norm)
    hidden = config.integer("hidden_size", 1, MAX_HIDDEN)
    heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    if "head_dim" not in config and head_dim is None and hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size, {hidden}")
    usual = heads if "num_key_value_heads" in config.raw else num_kv_heads or heads  # null means as many as heads
    kv_heads = config.integer("num_key_value_heads", 1, heads, default=usual)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    dim = config.integer("head_dim", 2, MAX_HEAD_DIM, default=head_dim or hidden // heads)
    if dim % 2:
        raise config.error("head_dim", "an even number, since rope turns pairs")
    config.choice("hidden_act", ("silu", "swish"), default="silu")
    vocab_size = config.integer("vocab_size", 1, MAX_VOCABULARY)
    positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    inner = config.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    eps = config.number("rms_norm_eps", 0.0, 1.0, default=1e-6)

    def plan(index: int, window: int | None) -> LayerPlan:
        name = f"model.layers.{index}"
        attention = SoftmaxAttention(
            f"{name}.self_attn", hidden, undivided(heads), undivided(kv_heads), dim,
            window, qkv_bias, output_bias, qk_norm, eps,
        )  # fmt: skip
        return LayerPlan(
            index, hidden, attention, DenseFeedForward(f"{name}.mlp", hidden, undivided(inner), mlp_bias), eps
        )

    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        rms_norm_eps=eps,
        max_position_embeddings=positions,
        rope=read_rope(config, positions),
        rotary_dim=dim,
        layers=tuple(plan(index, window) for index, window in enumerate(windows)),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        dtype=_dtype(config),
        eos_token_ids=config.integers("eos_token_id", 0, vocab_size - 1),
    )


def read_num_layers(config: JsonFields) -> int:
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def _refuse_unsupported_keys(config: JsonFields, qk_norm: bool) -> None:
    """Raise CheckpointError for a key that asks for something this decoder does not compute; ignoring it would give
    wrong logits.
    """
    for key, neutral in UNSUPPORTED_KEYS.items():
        if key in config and config.raw[key] not in neutral:
            raise config.error(key, " or ".join(["no such key", *map(repr, neutral)]) + ": not computed here")
    if config.boolean("use_qk_norm", qk_norm) is not qk_norm:
        raise config.error("use_qk_norm", f"{qk_norm}, as this family has it")


def _dtype(config: JsonFields) -> torch.dtype:
    """Return the dtype that `dtype` (transformers 5) or `torch_dtype` (4) names, with or without the prefix "torch.";
    fp32 if neither is there, since that loses nothing.
    """
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.raw.get(key)
    if isinstance(name, str):
        name = name.removeprefix("torch.")
        name = _SHORT_DTYPES.get(name, name)
    return DTYPES[name] if name in tuple(DTYPES) else DTYPES[config.choice(key, tuple(DTYPES), default="float32")]
