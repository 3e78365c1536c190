"""Formats of texts as xgrammar's structural tags, in which parsers describe what they can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """Name of a tool, and the schema that its arguments must follow."""

    name: str
    schema: Mapping[str, Any]


def json_schema(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(tags: Sequence[Format], *, separator: str, single: bool) -> Format:
    """Return the format of one of these tags or, unless `single`, several."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def any_of(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


ANY_TEXT: Format = {"type": "any_text"}
