"""Formats of texts as xgrammar's structural tags, in which parsers describe what they can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TagFormat = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """Name of a tool, and the schema that its arguments must follow."""

    name: str
    schema: Mapping[str, Any]


def json_schema(schema: Mapping[str, Any]) -> TagFormat:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: TagFormat, end: str) -> TagFormat:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(tags: Sequence[TagFormat], *, separator: str, single: bool) -> TagFormat:
    """Return the format of one of these tags or, unless `single`, several."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def sequence(*elements: TagFormat) -> TagFormat:
    return {"type": "sequence", "elements": list(elements)}


def any_of(*elements: TagFormat) -> TagFormat:
    return {"type": "or", "elements": list(elements)}


def const(text: str) -> TagFormat:
    return {"type": "const_string", "value": text}


ANY_TEXT: TagFormat = {"type": "any_text"}
