"""Limits of what a template may make. Memory and time are bounded by its process; these keep values sensible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import jinja2
import jinja2.utils

MAX_VALUE = 16_000_000  # most characters of any one text
MAX_ITEMS = 250_000  # most items of any one list
MAX_DEPTH = 500  # deepest lists within lists
MAX_ARGUMENT = 10_000_000  # a width or a count is how one call makes a huge value
MAX_INT_BITS = 1024
DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS = (list, tuple, set, *DICT_VIEWS)


class TemplateLimit(jinja2.TemplateRuntimeError):
    """Error for a template that took too long or would make too much."""


class TemplateTimeout(TemplateLimit):
    """Error for a template that took too long."""


def check_made(value: Any) -> Any:
    """Return a value that a template made, if it is within the limits; a text as plain text, since Markup has methods
    of its own.
    """
    if isinstance(value, str):
        _check_size(len(value))
        return str(value)
    if isinstance(value, list | dict):
        _check_items(len(value))
    elif isinstance(value, tuple):  # it may become a key, which is hashed
        text_size(value)
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TemplateLimit(f"a number of {value.bit_length()} bits is too large")
    return value


def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
            raise TemplateLimit(f"argument {value if abs(value) < 2**64 else '…'} is above {MAX_ARGUMENT}")


def text_size(value: Any) -> int:
    """Return about how long the value is as text. Raises TemplateLimit above MAX_VALUE, having looked at no more than
    that.

    A list may hold the same list many times, and be short only until it is written out or compared.
    """
    if isinstance(value, str):
        return _check_size(len(value))
    size, nodes, depth, level = 0, 0, 0, [value]
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise TemplateLimit(f"values within values would be deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for item in level:
            nodes += 1
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, _LISTS):
                below.extend(cast(Iterable[Any], item))
            elif isinstance(item, int):
                size += item.bit_length() // 3 + 8
            elif isinstance(item, dict | Mapping):  # the second takes long to tell
                below += (*item.keys(), *item.values())
            elif isinstance(item, jinja2.utils.Namespace):
                below.append(item._Namespace__attrs)  # its repr shows them
            else:
                size += 32
            if size > MAX_VALUE or nodes > MAX_ITEMS or len(below) > MAX_ITEMS:
                _check_size(size)
                _check_items(max(nodes, len(below)))
        level = below
    return size


def _check_size(chars: int) -> int:
    if chars > MAX_VALUE:
        raise TemplateLimit(f"a text would be longer than {MAX_VALUE} characters")
    return chars


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimit(f"a list would be longer than {MAX_ITEMS} items")
