"""Writes docs/api.md: every RPC, endpoint, field, default and error, from the protos and the OpenAPI document.

`make reference` runs it; a test fails when the file is not what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..replicas import errors as engine_errors
from ..replicas.errors import MotleyError
from . import errors, failures
from .proto_text import Block, ProtoFile, read
from .protocols.openapi_routes import OPERATIONS
from .web.openapi import Schema, document

PROTOS = Path(__file__).resolve().parent / "protos"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
_FAMILY = (engine_errors, errors, failures)  # others are a part's own, and are sent as one of these
_NOT_SENT = {
    "MotleyError",
    "ConfigurationError",
    "CheckpointError",
}  # the last two stop a start
_BEGIN = """# API reference

Written by `make reference` from the protos and the OpenAPI document; edit those.

One model is served over every protocol here by one service, and a request means the same over each of them. Every
call needs an API key where the service has any: `Authorization: Bearer …` or `x-api-key: …`, as a header over HTTP
and as metadata over gRPC. Fields that are unknown or not supported are refused by name.
"""


def page() -> str:
    """The whole page, in Markdown."""
    protos = [read(path) for path in sorted(PROTOS.glob("*.proto"))]
    parts = [_BEGIN, *_errors(), "## HTTP", *_http(), "## gRPC", *(part for file in protos for part in _grpc(file))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield (
        'Over HTTP `{"error": {"message", "type", "param", "code"}}`, where `param` names the field at fault and '
        "`code` is a stable word; over gRPC a status whose message names the field. 429 and 503 come with "
        "`Retry-After`, their gRPC statuses with `retry-after` and `google.rpc.RetryInfo`."
    )
    rows = [
        (str(kind.status), f"`{kind.grpc_code}`", f"`{kind.kind}`", (kind.__doc__ or "").partition("\n")[0])
        for kind in sorted(_family(), key=lambda kind: (kind.status, kind.__name__))
        if kind.__name__ not in _NOT_SENT
    ]
    yield _table(("HTTP", "gRPC", "type", "when"), dict.fromkeys(rows))


def _family() -> Iterator[type[MotleyError]]:
    for module in _FAMILY:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, MotleyError) and value.__module__ == module.__name__:
                yield value


def _http() -> Iterator[str]:
    for path, methods in document(OPERATIONS)["paths"].items():
        for method, described in methods.items():
            yield f"### {method.upper()} {path}"
            yield f"{described['summary']}."
            if "requestBody" in described:
                yield from _body(described["requestBody"]["content"]["application/json"]["schema"])
            yield f"Refusals: {', '.join(status for status in described['responses'] if status != '200')}."


def _body(schema: Schema) -> Iterator[str]:
    needed = schema.get("required", ())
    rows = [
        (f"`{name}`", _kind(field), "required" if name in needed else _default(field), field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    yield _table(("field", "type", "default", ""), rows)
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


def _grpc(file: ProtoFile) -> Iterator[str]:
    yield f"### Package `{file.package}`"
    if file.doc:
        yield f"```text\n{file.doc}\n```"
    for service in file.of("service"):
        yield f"#### Service `{file.package}.{service.name}`"
        yield _table(("RPC", "request → reply", ""), ((f"`{x.name}`", f"`{x.kind}`", x.doc) for x in service.lines))
    for block in file.blocks:
        if block.kind != "service" and block.lines:
            yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    yield f"#### `{block.name}`" + (f"\n\n{block.doc}" if block.doc else "")
    head = ("value", "number", "") if block.kind == "enum" else ("field", "type", "")
    yield _table(head, ((f"`{line.name}`", f"`{line.kind}`", line.doc) for line in block.lines))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
