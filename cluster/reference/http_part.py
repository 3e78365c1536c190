"""Routes with their fields, and the endpoints that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..protocols.openai_refused import METHODS, REFUSED, STORED, WHY_NOT_STORED
from ..protocols.openapi_routes import OPERATIONS
from ..web.openapi import Schema, document
from .markdown import table


def http() -> Iterator[str]:
    for path, methods in document(OPERATIONS)["paths"].items():
        for method, described in methods.items():
            yield f"### {method.upper()} {path}"
            yield f"{described['summary']}."
            if "requestBody" in described:
                yield from _body(described["requestBody"]["content"]["application/json"]["schema"])
            yield f"Refusals: {', '.join(status for status in described['responses'] if status != '200')}."
    yield from _refused()


def _refused() -> Iterator[str]:
    yield "### Endpoints that are refused by name"
    yield "Each answers 404 with the code `unsupported_endpoint` and these words."
    every = ", ".join(METHODS)
    rows = [
        (f"`{path}`", "it and all below it", every, f"{path} is not supported; {why}") for path, why in REFUSED.items()
    ]
    rows += [(f"`{STORED}`", "it", "GET", WHY_NOT_STORED), (f"`{STORED}`", "all below it", every, WHY_NOT_STORED)]
    yield table(("path", "which", "methods", "why, and what to use instead"), rows)


def _body(schema: Schema) -> Iterator[str]:
    needed = schema.get("required", ())
    rows = [
        (f"`{name}`", _kind(field), "required" if name in needed else _default(field), field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    yield table(("field", "type", "default", ""), rows)
    if "description" in schema:
        yield str(schema["description"])


def _default(field: Schema) -> str:
    return f"`{json.dumps(field['default'])}`" if "default" in field else ""


def _kind(schema: Schema) -> str:
    """A JSON schema in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(one) for one in schema[several] if one != {"type": "null"})
    kinds = schema.get("type", "any")
    kind = " or ".join(one for one in ([kinds] if isinstance(kinds, str) else kinds) if one != "null")
    return kind + _range(schema)


def _range(schema: Schema) -> str:
    if "items" in schema and schema["items"].get("type"):
        return f" of {_kind(schema['items'])}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None or high is None:
        return ""
    return f", {'above ' if 'exclusiveMinimum' in schema else ''}{_bound(low)} to {_bound(high)}"


def _bound(value: Any) -> str:
    big = {2**31 - 1: "2³¹ - 1", -(2**31 - 1): "1 - 2³¹", 2**63 - 1: "2⁶³ - 1", -(2**63): "-2⁶³"}
    return big.get(value, f"{value:g}" if isinstance(value, float) else str(value))
