"""The rule for a field that is given twice, under two names or in two places: the same value counts once, two values
are refused.

What asks for nothing contradicts nothing: a `max_tokens` of -1 under any name sets no bound, so that another one
counts; `logprobs: true`, which some servers have for it, takes the number beside it.
"""

from __future__ import annotations

from typing import Any

from .....replicas.strict_json import parse_strict_json
from .foreign_fields import is_unbounded


def agreed_value(name: str, one: Any, other: Any) -> Any:
    """Return the value that two mentions of the field `name` agree on; None if they contradict each other."""
    if name == "max_tokens" and is_unbounded(other):
        return one
    if name == "max_tokens" and is_unbounded(one):
        return other
    if name == "logprobs" and True in (one is True, other is True):
        number = other if one is True else one
        return number if type(number) is int or number is True else None
    return one if is_same_value(name, one, other) else None


def is_same_value(name: str, one: Any, other: Any) -> bool:
    """Return whether two values say the same: 1 and 1.0 do, 1 and true do not; nor need JSON and its text differ, or
    a stop string and the list of it.
    """
    if name == "stop":
        one, other = ([each] if isinstance(each, str) else each for each in (one, other))
    elif {type(one), type(other)} in ({str, dict}, {str, list}):
        one, other = (_parsed(each) if isinstance(each, str) else each for each in (one, other))
    try:
        return _are_equal(one, other)
    except RecursionError:  # schemas that are nested so deeply are refused by their reader
        return False


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(value, other[name]) for name, value in one.items())
    return bool(one == other) and isinstance(one, bool) is isinstance(other, bool)


def _parsed(text: str) -> Any:
    try:
        return parse_strict_json(text)
    except (ValueError, RecursionError):
        return text
