"""Rules for single layers as writers of checkpoints have them: GPTQModel's `dynamic`, auto-round's `extra_config`.

A rule may leave layers unquantized, or repeat what is said of all layers, which changes nothing. A rule that gives
layers other bits or groups, which these formats cannot have, is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Final

from ..checkpoint.files.json_fields import JsonFields
from .config_keys import is_ignored_key
from .int32_packing import ACTIVATION_KEYS
from .weight_format import find_unquantized

log = logging.getLogger(__name__)

RULE_KEYS: Final = frozenset({"dynamic", "extra_config"})
_AS_ALL = "layers of 16 bits, or as all others are"
PLAIN_BITS = 16  # a layer with as many bits or more is not quantized
# What a layer's values depend on, and what holds where the config does not say it.
_VALUES = {"bits": None, "group_size": None, "sym": True, "data_type": "int", "act_bits": PLAIN_BITS}
# Keys without effect in these layouts: `g_idx` in the file decides about the order, and activations are not quantized.
_NO_MATTER = (ACTIVATION_KEYS | {"desc_act"}) - _VALUES.keys()


def layers_left_out(config: JsonFields, names: Collection[str]) -> tuple[str, ...]:
    """Return the layers that rules leave out and that the file holds unquantized.

    The file decides which layers a rule means, since a rule may be a regular expression.

    names  names of the checkpoint's tensors

    Raises CheckpointError naming a rule that gives a layer bits or groups of its own.
    """
    for key, wanted in (
        ("dynamic", f"rules that begin with '-:', which leave layers as they are, or {_AS_ALL}"),
        ("extra_config", _AS_ALL),
    ):
        rules = config.raw.get(key) if config.says(key) else {}
        if not isinstance(rules, dict) or not all(
            (key == "dynamic" and rule.startswith("-:")) or _is_as_all_or_plain(config, said)
            for rule, said in rules.items()
        ):
            raise config.error(key, f"{wanted}: no layer has bits or groups of its own here")
    return find_unquantized(names, ("",), "qweight") if _is_ruled(config) else ()


def head_is_quantized(config: JsonFields, names: Collection[str]) -> bool:
    """Return whether the head is quantized, as `lm_head` says; where there are rules for layers, the file decides."""
    said = config.boolean("lm_head", False)
    if not _is_ruled(config):
        return said
    if said and "lm_head.weight" in names and "lm_head.qweight" not in names:
        log.info("%s: %slm_head is true, but the file holds the head unquantized", config.file, config.prefix)
        return False
    return said or "lm_head.qweight" in names


def _is_ruled(config: JsonFields) -> bool:
    return any(config.says(key) for key in RULE_KEYS)


def _is_as_all_or_plain(config: JsonFields, said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    bits = said.get("bits", config.raw.get("bits"))
    plain = isinstance(bits, int) and not isinstance(bits, bool) and bits >= PLAIN_BITS
    return plain or all(_changes_nothing(config, key, value) for key, value in said.items())


def _changes_nothing(config: JsonFields, key: str, value: Any) -> bool:
    if key not in _VALUES:
        return not value or key in _NO_MATTER or is_ignored_key(key) or value == config.raw.get(key)
    of_all = config.raw.get(key)
    return value is None or value == (_VALUES[key] if of_all is None else of_all)
