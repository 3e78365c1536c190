"""Layers that writers leave unquantized by rules of their own: GPTQModel's `dynamic`, auto-round's `extra_config`.

Both may also give single layers other bits or groups, which these formats cannot have: such a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from ..json_file import Fields
from .base import left_plain

__all__ = ["RULES", "left_out"]

RULES: Final = frozenset({"dynamic", "extra_config"})
PLAIN_BITS = 16  # a layer with as many bits or more is not quantized
_ALIKE = ("bits", "group_size", "sym")  # keys that a layer's rule may repeat


def left_out(config: Fields, names: Collection[str]) -> tuple[str, ...]:
    """Return the layers that rules leave out and that the file holds unquantized.

    The file decides which layers a rule means, since a rule may be a regular expression.

    names  names of the checkpoint's tensors

    Raises CheckpointError naming a rule that gives a layer bits or groups of its own.
    """
    for key, is_plain, wanted in (
        ("dynamic", _leaves_out, "rules that begin with '-:', which leave layers as they are"),
        ("extra_config", _is_as_all_or_plain, "layers of 16 bits, or as all others are"),
    ):
        rules = config.raw.get(key) if config.says(key) else {}
        if not isinstance(rules, dict) or not all(is_plain(config, name, said) for name, said in rules.items()):
            raise config.error(key, f"{wanted}: no layer has bits or groups of its own here")
    ruled = any(config.says(key) for key in RULES)
    return left_plain(names, ("",), "qweight") if ruled else ()


def _leaves_out(_config: Fields, rule: str, _said: Any) -> bool:
    return rule.startswith("-:")


def _is_as_all_or_plain(config: Fields, _layer: str, said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    bits = said.get("bits", config.raw.get("bits"))
    plain = isinstance(bits, int) and not isinstance(bits, bool) and bits >= PLAIN_BITS
    return plain or all(said.get(key) in (None, config.raw.get(key)) for key in _ALIKE)
