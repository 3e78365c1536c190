"""Limits of what a template may make: sizes are computed before a value is built, since afterwards is too late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jinja2
import jinja2.utils

__all__ = [
    "MAX_ITEMS",
    "MAX_VALUE",
    "TemplateLimit",
    "TemplateMeter",
    "TemplateTimeout",
    "bounded_list",
    "check_compared",
    "check_items",
    "check_size",
    "text_size",
]

MAX_VALUE = 16_000_000  # most characters of any one text, and of a list that is written as text
MAX_ITEMS = 250_000  # most items of any one list
MAX_DEPTH = 500  # deepest lists within lists: deeper ones exceed Python's recursion limit, or its stack when hashed
MAX_COMPARED = 200_000_000  # most pairs of characters in one comparison: about a tenth of a second
MAX_MADE = 128_000_000  # most characters of all texts that one rendering makes, dropped ones included
ITEM_CHARS = 64  # characters that a new item of a list counts for
KEPT_ITEM_CHARS = 8  # characters that an item counts for if another list has it already
MAX_INT_BITS = 1024
DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS = (list, tuple, set, *DICT_VIEWS)


class TemplateLimit(jinja2.TemplateRuntimeError):
    """Error for a template that took too long or would make too much."""


class TemplateTimeout(TemplateLimit):
    """Error for a template that took too long."""


class TemplateMeter:
    """Meter of one template rendering: its time, and the characters that it makes.

    Time is CPU time of this thread, in seconds: a template never waits, and a busy machine is not its fault.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.thread_time() + seconds
        self._made = 0

    def tick(self) -> None:
        if time.thread_time() > self._ends:
            raise TemplateTimeout(f"rendering took longer than {self._seconds:g} s")

    def charge(self, value: Any, item_chars: int = ITEM_CHARS) -> Any:
        """Check that the value is within the limits, count it, and return it."""
        if isinstance(value, str):
            self.spend(check_size(len(value)))
        elif isinstance(value, list | tuple | dict):
            check_items(len(value))
            self.spend(item_chars * len(value))
        elif isinstance(value, jinja2.utils.Namespace):
            self.spend(item_chars * len(value._Namespace__attrs))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateLimit(f"a number of {value.bit_length()} bits is too large")
        return value

    def spend(self, chars: int) -> None:
        self._made += chars
        if self._made > MAX_MADE:
            raise TemplateLimit(f"all values together are longer than {MAX_MADE} characters")


def check_size(chars: int) -> int:
    """Return `chars`, the length of a text that is about to be made. Raises TemplateLimit if it is too long."""
    if chars > MAX_VALUE:
        raise TemplateLimit(f"a text would be longer than {MAX_VALUE} characters")
    return chars


def check_items(count: int) -> int:
    """Return `count`, the length of a list that is about to be made. Raises TemplateLimit if it is too long."""
    if count > MAX_ITEMS:
        raise TemplateLimit(f"a list would be longer than {MAX_ITEMS}")
    return count


def check_compared(text: str, other: str) -> None:
    """Raise TemplateLimit if comparing each character of one text with each of the other would take too long."""
    if len(text) * len(other) > MAX_COMPARED:
        raise TemplateLimit(f"comparing {len(text)} characters with {len(other)}, each with each, would take too long")


def bounded_list(values: Iterable[Any]) -> list[Any]:
    """Return all items of an iterable as a list. Raises TemplateLimit if there are more than MAX_ITEMS."""
    if isinstance(values, str | list | tuple | dict):
        check_items(len(values))
    found = list(itertools.islice(values, MAX_ITEMS + 1))
    check_items(len(found))
    return found


def text_size(value: Any) -> int:
    """Return about how long the value is as text. Raises TemplateLimit above MAX_VALUE, having looked at no more than
    that.

    A list may hold the same list many times, and be short only until it is written out or compared.
    """
    if isinstance(value, str):
        return check_size(len(value))
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
                check_size(size)
                check_items(max(nodes, len(below)))
        level = below
    return size
