"""Methods, operators and filters of texts as a chat template may call them: their result's size is checked
beforehand.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .template_meter import (
    MAX_ITEMS,
    TemplateLimit,
    bounded_list,
    check_compared,
    check_items,
    check_size,
    text_size,
)

__all__ = [
    "BOUNDED_METHODS",
    "bounded_join",
    "bounded_json",
    "bounded_percent",
    "bounded_replace",
    "check_add",
    "check_format_fields",
    "check_indent",
    "check_repeat",
]

MAX_FIELDS = 10_000  # most fields of one format
ESCAPED = 10  # most characters that one character becomes in a repr
BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
STARRED = re.compile(r"%[^a-zA-Z%]*\*")
MAX_DIGITS = 9  # most digits of a number in a format, more than any sensible width has


def bounded_replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if count < 0 else min(text.count(old), count)
    check_size(len(text) + times * max(0, len(new) - len(old)))
    return text.replace(old, new, count)


def bounded_join(separator: str, values: Iterable[Any]) -> str:
    """Join values of any kind as text, within the limits."""
    found, size = bounded_list(values), 0
    for value in found:
        size = check_size(size + len(separator) + text_size(value))
    return separator.join([str(value) for value in found])


def bounded_percent(text: str, values: Any) -> str:
    """Return text % values. Its size is checked first, with every number in the text taken for a width, and every field
    for the longest value.
    """
    if text.count("%") > MAX_FIELDS or STARRED.search(text):
        raise TemplateLimit("a format with so many fields, or with a width from outside, is not allowed")
    given = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    longest = max((text_size(value) for value in given), default=0)
    check_size(len(text) + _numbers(text) + text.count("%") * ESCAPED * (longest + 400))  # 400: a float by %f
    formatted: str = text % values
    return formatted


def check_format_fields(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimit if text.format(…) could become too long, with numbers taken for widths and every field for
    the longest value.
    """
    if text.count("{") > MAX_FIELDS:
        raise TemplateLimit("a format with so many fields is not allowed")
    longest = max((text_size(value) for value in (*args, *kwargs.values())), default=0)
    size = len(text)
    for _, name, spec, _ in string.Formatter().parse(text):
        if spec and "{" in spec:
            raise TemplateLimit("a format with a width from outside is not allowed")
        size += 0 if name is None else _numbers(spec or "") + ESCAPED * (longest + 400)
    check_size(size)


def check_indent(text: str, width: int | str) -> None:
    """Raise TemplateLimit if the filter `indent` would make a text that is too long."""
    lines = sum(text.count(mark) for mark in BREAKS) + 1
    check_size(len(text) + lines * (len(width) if isinstance(width, str) else width))


def check_add(left: Any, right: Any) -> None:
    """Raise TemplateLimit if left + right would be too long."""
    if isinstance(left, str) and isinstance(right, str):
        check_size(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        check_items(len(left) + len(right))


def check_repeat(left: Any, right: Any) -> None:
    """Raise TemplateLimit if left * right would be too long or too large a number; TypeError if they cannot be
    multiplied.
    """
    count, value = (left, right) if isinstance(left, int | float) else (right, left)
    if isinstance(value, int | float):
        if abs(value) >= 2**64 or abs(count) >= 2**64:
            raise TemplateLimit("numbers as large as these are not multiplied")
    elif isinstance(count, int) and isinstance(value, str):
        check_size(count * len(value))
    elif isinstance(count, int) and isinstance(value, list | tuple):
        check_items(count * len(value))
    else:
        raise TypeError(f"cannot multiply {type(left).__name__} by {type(right).__name__}")


def bounded_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON, as transformers writes it: Jinja's own filter escapes HTML, which a prompt is not."""
    check_size(ESCAPED * sum(map(len, separators or ())))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text_size(value)
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):  # the size is not known beforehand, but the text comes in pieces
        size = check_size(size + len(piece))
        check_items(len(pieces))
        pieces.append(piece)
    return "".join(pieces)


def _numbers(text: str) -> int:
    """Return the sum of the numbers in a text."""
    total = 0
    for count, run in enumerate(re.finditer(r"\d+", text)):
        check_items(count)
        if run.end() - run.start() > MAX_DIGITS:
            raise TemplateLimit("a width as large as this is not allowed")
        total += int(run[0])
    return total


def _padded(name: str) -> Callable[..., str]:
    def pad(text: str, width: int, *fill: str) -> str:
        check_size(width)
        result: str = getattr(text, name)(width, *fill)
        return result

    return pad


def _plain(name: str) -> Callable[..., Any]:
    """Wrap a method whose result grows by no more than a small factor, or is no text at all."""

    def plain(text: str, *args: Any) -> Any:
        for value in args:
            if isinstance(value, tuple):  # alternatives for startswith and endswith
                text_size(value)
        return getattr(text, name)(*args)

    return plain


def _each_with_each(name: str) -> Callable[..., Any]:
    """Wrap a method that searches from the end, or strips a set of characters: Python compares each character with
    each.
    """

    def compare(text: str, *args: Any) -> Any:
        if args and isinstance(args[0], str):
            check_compared(text, args[0])
        return getattr(text, name)(*args)

    return compare


def _split(name: str) -> Callable[..., list[str]]:
    def split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        if name == "rsplit" and isinstance(sep, str):
            check_compared(text, sep)
        most = MAX_ITEMS if maxsplit < 0 else min(maxsplit, MAX_ITEMS)
        found: list[str] = getattr(text, name)(sep, most)
        check_items(len(found) + (maxsplit < 0))
        return found

    return split


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    check_items(sum(text.count(mark) for mark in BREAKS))
    return text.splitlines(keepends)


def _expandtabs(text: str, tabsize: int = 8) -> str:
    check_size(len(text) + text.count("\t") * max(0, tabsize))
    return text.expandtabs(tabsize)


def _join(separator: str, values: Iterable[Any]) -> str:
    found = bounded_list(values)
    for value in found:
        if not isinstance(value, str):
            raise TypeError(f"join: expected texts, found {type(value).__name__}")
    return bounded_join(separator, found)


SAFE_METHODS = (
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
    "partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
)  # fmt: skip
EACH_WITH_EACH = ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")
BOUNDED_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _plain(name) for name in SAFE_METHODS},
    **{name: _each_with_each(name) for name in EACH_WITH_EACH},
    **{name: _padded(name) for name in ("center", "ljust", "rjust", "zfill")},
    **{name: _split(name) for name in ("split", "rsplit")},
    "splitlines": _splitlines,
    "expandtabs": _expandtabs,
    "replace": bounded_replace,
    "join": _join,
}
