"""Table of the empty values of OpenAI's and Motley's own fields that count as leaving the field out.

The rule: an empty value of the field's own kind counts as absent, unless the field is required. So "" where a text is
expected, [] for a list, {} for an object; and each of them for a field that is refused. The two tables below hold all
exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ....transport.http_server.openapi import Schema
from .field_schemas import CONSTRAINT_FIELDS

EMPTY: tuple[Any, ...] = ("", [], {})
# Values of another kind that clients send for nothing, and fields that must be there in one form of the object only.
ALSO_NONE: Mapping[str, tuple[Any, ...]] = {
    "messages[].tool_calls": ([],),
    "messages[].tool_calls[].function.arguments": ({},),
    "response_format.schema": EMPTY,
    "response_format.value": EMPTY,
    "structured_outputs.regex": ("",),
    "structured_outputs.choice": ([],),
    "structured_outputs.grammar": ("",),
    "structured_outputs.json": ("",),
    "structured_outputs.structural_tag": ("",),
    "bad_words": ("",),
    **dict.fromkeys(("reasoning", "think", "thinking", "separate_reasoning", "reasoning_format", "best_of"), EMPTY),
    **dict.fromkeys(("format", *CONSTRAINT_FIELDS), EMPTY),
}
# Values that ask for something although they are empty.
MEANS_SOMETHING: Mapping[str, tuple[Any, ...]] = {
    "stop": ("",),  # a stop string must have a character; [] says that there is none
    "web_search_options": ({},),  # OpenAI searches the web
    "tools[].function.parameters": ({},),  # a schema that lets anything be
}


def values_meaning_none(path: str, schemas: Iterable[Schema]) -> tuple[Any, ...]:
    """Return the empty values that count as absent for the field at `path`. schemas: alternatives for its value; none
    if it is required.
    """
    kinds = _kinds({"anyOf": list(schemas)})
    refused = kinds == {"null"}
    accepted = [value for value in EMPTY if refused or _KIND[type(value)] in kinds or value in ALSO_NONE.get(path, ())]
    return tuple(value for value in accepted if value not in MEANS_SOMETHING.get(path, ()))


_KIND: Mapping[type, str] = {str: "string", list: "array", dict: "object"}


def _kinds(schema: Schema) -> set[str]:
    if "anyOf" in schema:
        return {kind for one in schema["anyOf"] for kind in _kinds(one)}
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    return {_KIND.get(type(value), "null" if value is None else "") for value in values}


def accepts_value(schema: Schema, value: Any) -> bool:
    """Return whether the schema itself allows the empty value."""
    if "anyOf" in schema:
        return any(accepts_value(one, value) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if _KIND[type(value)] not in _kinds(schema) or "pattern" in schema or schema.get("required"):
        return False
    return not any(schema.get(key) for key in ("minLength", "minItems", "minProperties"))
