"""Pairs of config.json keys that say the same thing: which key counts, as in transformers, and what happens to the
other.

A pair whose two values agree is accepted. Where they differ, both are refused by name (EQUAL_KEYS, ALTERNATIVE_KEYS),
or the first counts and the log says so, where transformers takes it and no computed value depends on it (LOGGED_PAIRS).
The next pair is one line. `rope_scaling` beside `rope_parameters` is in rotary_embedding.py, since the one takes the
place of the other, and the keys of sliding windows are in model/families/sliding_windows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from ..checkpoint.files.json_fields import JsonFields
from ..errors import CheckpointError
from ..short_repr import short_repr
from .model_config import ModelConfig

__all__ = [
    "ALTERNATIVE_KEYS",
    "EQUAL_KEYS",
    "LOGGED_PAIRS",
    "ROPE_SECTIONS",
    "check_alternative_keys",
    "check_key_pairs",
    "value_at",
]

log = logging.getLogger(__name__)

ROPE_SECTIONS: Final = ("rope_parameters", "rope_scaling")
KeyPair = tuple[str, str]  # dotted paths; the first is what transformers 5 reads where both are there

EQUAL_KEYS: Final[tuple[KeyPair, ...]] = (
    # transformers 4 reads `type`, and 5 reads `rope_type`
    *((f"{section}.rope_type", f"{section}.type") for section in ROPE_SECTIONS),
    *((f"{section}.rope_theta", "rope_theta") for section in ROPE_SECTIONS),
    *((f"{section}.partial_rotary_factor", "partial_rotary_factor") for section in ROPE_SECTIONS),
    # transformers takes the outer one, other engines the inner
    *(("original_max_position_embeddings", f"{section}.original_max_position_embeddings") for section in ROPE_SECTIONS),
)

# Other decoders' names for keys of these families. transformers does not read them: where a file has only
# such a name it takes the family's default, whatever the value says. So the value must equal the default.
ALTERNATIVE_KEYS: Final[tuple[KeyPair, ...]] = (
    ("hidden_size", "d_model"),
    ("hidden_size", "n_embd"),
    ("intermediate_size", "n_inner"),
    ("intermediate_size", "ffn_hidden_size"),
    ("intermediate_size", "ffn_dim"),
    ("num_hidden_layers", "n_layer"),
    ("num_hidden_layers", "n_layers"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "n_head"),
    ("num_attention_heads", "n_heads"),
    ("num_attention_heads", "num_heads"),
    ("num_key_value_heads", "multi_query_group_num"),
    ("num_key_value_heads", "num_kv_heads"),
    ("num_key_value_heads", "n_kv_heads"),
    ("num_key_value_heads", "n_head_kv"),
    ("num_key_value_heads", "num_query_groups"),
    ("head_dim", "attention_head_dim"),
    ("head_dim", "kv_channels"),
    ("rms_norm_eps", "layer_norm_eps"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("rms_norm_eps", "norm_eps"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("attention_bias", "qkv_bias"),
    ("rope_theta", "rotary_emb_base"),
    ("rope_theta", "rope_base"),
    ("hidden_act", "activation_function"),
)

# Defaults of the family for keys that a file may leave out. All other keys must be there.
_DEFAULTS: Final[Mapping[str, Callable[[ModelConfig], Any]]] = MappingProxyType(
    {
        "num_key_value_heads": lambda model: model.layers[0].attention.kv_heads.total,
        "head_dim": lambda model: model.layers[0].attention.head_dim,
        "rms_norm_eps": lambda model: model.rms_norm_eps,
        "tie_word_embeddings": lambda model: model.tie_word_embeddings,
        "attention_bias": lambda model: model.layers[0].attention.qkv_bias,
        "rope_theta": lambda model: model.rope.theta,
        "hidden_act": lambda model: "silu",
    }
)

LOGGED_PAIRS: Final[tuple[KeyPair, ...]] = (
    ("dtype", "torch_dtype"),
    ("max_position_embeddings", "max_sequence_length"),
    ("max_position_embeddings", "n_positions"),
    ("max_position_embeddings", "n_ctx"),
    ("max_position_embeddings", "seq_length"),
    ("max_position_embeddings", "max_seq_len"),
    ("max_position_embeddings", "max_seq_length"),
)

_SYNONYMS: Final[Mapping[str, str]] = MappingProxyType({"float": "float32", "half": "float16", "swish": "silu"})


def check_key_pairs(config: JsonFields) -> None:
    """Raise CheckpointError naming both keys of a pair whose values differ; a pair in LOGGED_PAIRS is only logged."""
    for pair in (*EQUAL_KEYS, *ALTERNATIVE_KEYS):
        one, other = (value_at(config.raw, path) for path in pair)
        if _differ(one, other) or (
            one is None and other is not None and pair in ALTERNATIVE_KEYS and _is_needed(pair[0])
        ):
            raise _disagreement(config, pair, one, other)
    for first, second in LOGGED_PAIRS:
        one, other = (value_at(config.raw, path) for path in (first, second))
        if _differ(one, other):
            log.warning(
                "%s: %s, %s, is used; %s, %s, is ignored",
                config.file,
                first,
                short_repr(one),
                second,
                short_repr(other),
            )


def check_alternative_keys(config: JsonFields, model: ModelConfig) -> None:
    """Raise CheckpointError if only another decoder's name for a key is there, and differs from the default that is
    computed.
    """
    for pair in ALTERNATIVE_KEYS:
        one, other = (value_at(config.raw, path) for path in pair)
        if one is None and other is not None and not _is_needed(pair[0]) and _differ(_DEFAULTS[pair[0]](model), other):
            raise _disagreement(config, pair, one, other)


def _is_needed(key: str) -> bool:
    return key not in _DEFAULTS


def _disagreement(config: JsonFields, pair: KeyPair, one: Any, other: Any) -> CheckpointError:
    wanted = f"{short_repr(other)}, as {pair[1]} says" if one is None else f"the same as {pair[1]}, {short_repr(other)}"
    return config.error_at(pair[0], one, f"{wanted}: one of the two is wrong")


def value_at(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if it is absent or null, or if a part of the path is no object."""
    found: Any = raw
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _differ(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(_comparable_value(one) != _comparable_value(other))


def _comparable_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.lower().removeprefix("torch.")
    return _SYNONYMS.get(word, word)
