"""Pairs of config.json keys that say the same thing: which key counts, as in transformers, and what happens to the
other.

A pair whose two values agree is accepted. Where they differ, both are refused by name (SAME, OTHER_NAMES), or the
first counts and the log says so, where transformers takes it and no computed value depends on it (SAID). The next
pair is one line. `rope_scaling` beside `rope_parameters` is in rope.py, since the one takes the place of the other, and
the keys of sliding windows are in families/windows.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from .config import ModelConfig
from .errors import CheckpointError
from .json_file import Fields
from .shown import shown

__all__ = ["OTHER_NAMES", "ROPE_SECTIONS", "SAID", "SAME", "check_defaults", "check_pairs", "value_at"]

log = logging.getLogger(__name__)

ROPE_SECTIONS: Final = ("rope_parameters", "rope_scaling")
Pair = tuple[str, str]  # dotted paths; the first is what transformers 5 reads where both are there

SAME: Final[tuple[Pair, ...]] = (
    # transformers 4 reads `type`, and 5 reads `rope_type`
    *((f"{section}.rope_type", f"{section}.type") for section in ROPE_SECTIONS),
    *((f"{section}.rope_theta", "rope_theta") for section in ROPE_SECTIONS),
    *((f"{section}.partial_rotary_factor", "partial_rotary_factor") for section in ROPE_SECTIONS),
    # transformers takes the outer one, other engines the inner
    *(("original_max_position_embeddings", f"{section}.original_max_position_embeddings") for section in ROPE_SECTIONS),
)

# Other decoders' names for keys of these families. transformers does not read them: where a file has only
# such a name it takes the family's default, whatever the value says. So the value must equal the default.
OTHER_NAMES: Final[tuple[Pair, ...]] = (
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
        "num_key_value_heads": lambda model: model.num_kv_heads,
        "head_dim": lambda model: model.head_dim,
        "rms_norm_eps": lambda model: model.rms_norm_eps,
        "tie_word_embeddings": lambda model: model.tie_word_embeddings,
        "attention_bias": lambda model: model.qkv_bias,
        "rope_theta": lambda model: model.rope.theta,
        "hidden_act": lambda model: "silu",
    }
)

SAID: Final[tuple[Pair, ...]] = (
    ("dtype", "torch_dtype"),
    ("max_position_embeddings", "max_sequence_length"),
    ("max_position_embeddings", "n_positions"),
    ("max_position_embeddings", "n_ctx"),
    ("max_position_embeddings", "seq_length"),
    ("max_position_embeddings", "max_seq_len"),
    ("max_position_embeddings", "max_seq_length"),
)

_SYNONYMS: Final[Mapping[str, str]] = MappingProxyType({"float": "float32", "half": "float16", "swish": "silu"})


def check_pairs(config: Fields) -> None:
    """Raise CheckpointError naming both keys of a pair whose values differ; a pair in SAID is only logged."""
    for pair in (*SAME, *OTHER_NAMES):
        one, other = (value_at(config.raw, path) for path in pair)
        if _differ(one, other) or (one is None and other is not None and pair in OTHER_NAMES and _is_needed(pair[0])):
            raise _refused(config, pair, one, other)
    for first, second in SAID:
        one, other = (value_at(config.raw, path) for path in (first, second))
        if _differ(one, other):
            log.warning("%s: %s, %s, is used; %s, %s, is ignored", config.file, first, shown(one), second, shown(other))


def check_defaults(config: Fields, model: ModelConfig) -> None:
    """Raise CheckpointError if only another decoder's name for a key is there, and differs from the default that is
    computed.
    """
    for pair in OTHER_NAMES:
        one, other = (value_at(config.raw, path) for path in pair)
        if one is None and other is not None and not _is_needed(pair[0]) and _differ(_DEFAULTS[pair[0]](model), other):
            raise _refused(config, pair, one, other)


def _is_needed(key: str) -> bool:
    return key not in _DEFAULTS


def _refused(config: Fields, pair: Pair, one: Any, other: Any) -> CheckpointError:
    wanted = f"{shown(other)}, as {pair[1]} says" if one is None else f"the same as {pair[1]}, {shown(other)}"
    return config.error_at(pair[0], one, f"{wanted}: one of the two is wrong")


def value_at(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if it is absent or null, or if a part of the path is no object."""
    found: Any = raw
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _differ(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(_plain(one) != _plain(other))


def _plain(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.lower().removeprefix("torch.")
    return _SYNONYMS.get(word, word)
