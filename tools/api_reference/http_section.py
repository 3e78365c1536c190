"""HTTP part of the page: routes with their fields, and the endpoints that are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from motley.cluster.api.kserve.rest.kserve_refused import REFUSED as REFUSED_OF_KSERVE
from motley.cluster.api.openai.openai_refused import METHODS, REFUSED, STORED, WHY_NOT_STORED
from motley.cluster.api.openapi_routes import OPERATIONS
from motley.cluster.transport.http_server.openapi import Schema, openapi_document

from .markdown_table import table

_VERSION = "/versions/{number}"  # with it every path does what it does without


def write_http() -> Iterator[str]:
    yield (
        "No path takes a query: one is refused with 400, but for Azure's `api-version`, and whatever a probe adds to "
        "the paths of health and of metrics. Bodies are JSON in UTF-8; another `charset` is refused with 415."
    )
    for path, methods in openapi_document(OPERATIONS)["paths"].items():
        for method, described in methods.items():
            yield f"### {method.upper()} {path}"
            if _VERSION in path:
                yield f"As {method.upper()} {path.replace(_VERSION, '')}: a model has one version."
                continue
            yield f"{described['summary']}."
            if "requestBody" in described:
                yield table(("field", "type", "default", ""), _requests(_schema(described["requestBody"])))
            yield from _response(described["responses"]["200"])
            yield f"Refusals: {'; '.join(_refusals(described['responses']))}."
    yield from _refused()


def _refusals(responses: Schema) -> Iterator[str]:
    """Yield each status with its codes; without codes if the protocol's errors have none."""
    for status, described in responses.items():
        if status != "200":
            errors = [one["properties"]["error"] for one in _alternatives(_schema(described))]
            codes = [code for error in errors for code in error.get("properties", {}).get("code", {}).get("enum", ())]
            yield " ".join([status, ", ".join(f"`{code or 'null'}`" for code in codes)]).strip()


def _response(described: Schema) -> Iterator[str]:
    if "application/json" not in described["content"]:
        yield f"The answer is {', '.join(f'`{media}`' for media in described['content'])}."
        return
    if rows := _answered(_schema(described)):
        yield "The answer:"
        yield table(("field", "type", ""), rows)
    if events := described["content"].get("text/event-stream"):
        yield "With `stream`, each event; what goes wrong after the first is the last, with `error` as above:"
        yield table(("field", "type", ""), _answered(events["x-event"]["anyOf"][0]))


def _schema(described: Schema) -> Schema:
    schema: Schema = described["content"]["application/json"]["schema"]
    return schema


def _refused() -> Iterator[str]:
    yield "### Endpoints that are refused by name"
    yield "Each answers 404 with the code `unsupported_endpoint` and these words."
    every = ", ".join(METHODS)
    rows = [
        (f"`{path}`", "it and all below it", every, f"{path} is not supported; {why}") for path, why in REFUSED.items()
    ]
    rows += [(f"`{STORED}`", "it", "GET", WHY_NOT_STORED), (f"`{STORED}`", "all below it", every, WHY_NOT_STORED)]
    rows += [
        (f"`{path.replace(':path', '')}`", "it", "GET, POST", f"{why}; the error has KServe's form, without a code")
        for path, why in REFUSED_OF_KSERVE.items()
    ]
    yield table(("path", "which", "methods", "why, and what to use instead"), rows)


def _requests(schema: Schema) -> list[tuple[str, ...]]:
    return [(f"`{one.path}`", one.kind, one.default, one.about) for one in _properties(schema)]


def _answered(schema: Schema) -> list[tuple[str, ...]]:
    """Return rows of an answer's fields; those that may be absent are marked."""
    return [(f"`{one.path}`", f"{one.kind}{one.or_nothing}", one.about) for one in _properties(schema)]


@dataclass(frozen=True, slots=True)
class _FieldRow:
    """A field at its place; `[]` in the path stands for any element of a list."""

    path: str
    kind: str
    or_nothing: str
    default: str
    about: str


def _properties(schema: Schema, at: str = "") -> Iterator[_FieldRow]:
    """Yield the fields of an object and, below each, those of the objects in it; of all alternatives together."""
    objects = [one for one in _alternatives(schema) if "properties" in one]
    for name in dict.fromkeys(name for one in objects for name in one["properties"]):
        having = [one for one in objects if name in one["properties"]]
        found = [one["properties"][name] for one in having]
        said = [one for one in found if one.get("type") != "null"] or found
        needed = len(having) == len(objects) and all(name in one.get("required", ()) for one in objects)
        inner = {"anyOf": said}
        kind = _kind(inner)
        about = next((str(one["description"]) for one in said if "description" in one), "")
        yield _FieldRow(
            at + name,
            kind,
            (" or null" if _nullable(inner) and kind != "null" else "") + ("" if needed else ", or absent"),
            "required" if needed else _default(said[0], about),
            about,
        )
        yield from _properties(inner, f"{at}{name}.")
        items = [one["items"] for one in _alternatives(inner) if "items" in one]
        yield from _properties({"anyOf": items}, f"{at}{name}[].")


_NULL = {"type": "null"}


def _alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas that a value may have, without null."""
    inner = [one for key in ("anyOf", "oneOf") for one in schema.get(key, ())]
    for one in inner:
        yield from _alternatives(one)
    if not inner and schema != _NULL:
        yield schema


def _nullable(schema: Schema) -> bool:
    inner = [one for key in ("anyOf", "oneOf") for one in schema.get(key, ())]
    kinds = schema.get("type", ())
    return any(map(_nullable, inner)) or "null" in ([kinds] if isinstance(kinds, str) else kinds)


def _default(field: Schema, about: str) -> str:
    """Return the schema's default, or the one that the description gives; "none" if an absent field stays absent."""
    if "default" in field:
        return f"`{json.dumps(field['default'])}`"
    said = re.search(r"default: ([^;]+)", about)
    return said[1] if said else "none"


def _kind(schema: Schema) -> str:
    """Return a JSON schema in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in _alternatives(schema)))
    kinds = schema.get("type", "any")
    named = [one for one in ([kinds] if isinstance(kinds, str) else kinds) if one != "null"]
    return (" or ".join(named) or "null") + _range(schema)


def _range(schema: Schema) -> str:
    if "items" in schema:
        return f" of {_kind(schema['items'])}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None or high is None:
        return ""
    return f", {'above ' if 'exclusiveMinimum' in schema else ''}{_bound(low)} to {_bound(high)}"


def _bound(value: Any) -> str:
    big = {2**31 - 1: "2³¹ - 1", -(2**31 - 1): "1 - 2³¹", 2**63 - 1: "2⁶³ - 1", -(2**63): "-2⁶³"}
    return big.get(value, f"{value:g}" if isinstance(value, float) else str(value))
