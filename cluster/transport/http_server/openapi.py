"""OpenAPI 3.1 document of the HTTP interface: every route, field, default and error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ....replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    MotleyError,
    NotFound,
    Overloaded,
    Unavailable,
)
from ....replicas.host.distribution import motley_version
from ...request_errors import BodyTooLarge, MethodNotAllowed, NotImplementedHere, SlowBody, UnsupportedMedia
from ...service_errors import Forbidden, Unauthenticated
from .response_content import JsonObject

Schema = Mapping[str, Any]
_IN_PATHS = {"name": "of the model", "number": "of its version: 1, the only one", "rest": "whatever follows"}
CODES = Path(__file__).with_name("codes.json")  # codes that the sources raise, written by `make reference`
# InvalidRequest may be for a query, NotImplementedHere for a WebSocket's handshake.
_ALWAYS = (InvalidRequest, Unauthenticated, Forbidden, MethodNotAllowed, EngineFault, Unavailable, NotImplementedHere)
_WITH_BODY = (SlowBody, BodyTooLarge, UnsupportedMedia, Overloaded)
_WITH_ENGINE = (DeadlineExceeded,)
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "description": "why there is no answer, or no more of it",
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "what is wrong, and what is accepted"},
                "type": {"type": "string", "description": "which kind of error: one for each status"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"], "description": "a stable word for programs"},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class HttpOperation:
    """Description of one route.

    body      schema of the JSON body; None: it has none
    response  schema of the JSON response; None: it is always refused
    chunk     schema of one server-sent event, if the answer may be a stream of them
    engine    whether the engine runs: the request can then be refused as overload, or miss its deadline
    error     schema of an error; None: OpenAI's
    more      error classes beside those that follow from the other fields
    bodiless  whether the body may be empty
    binary    whether the answer may be JSON followed by binary data
    media     media type of the answer, where it is no JSON
    """

    summary: str
    response: Schema | None
    body: Schema | None = None
    chunk: Schema | None = None
    engine: bool = False
    error: Schema | None = None
    more: tuple[type[MotleyError], ...] = ()
    bodiless: bool = False
    binary: bool = False
    media: str = "application/json"

    @property
    def errors(self) -> tuple[type[MotleyError], ...]:
        """Error classes of this route, by ascending status; one for each status."""
        found: set[type[MotleyError]] = {*_ALWAYS, *self.more}
        found |= {*_WITH_BODY} if self.body is not None else set()
        found |= {*_WITH_ENGINE} if self.engine else set()
        return tuple(sorted(found, key=lambda kind: kind.status))


REFUSED = HttpOperation("Refused: there is no such API here", None, more=(NotFound, BodyTooLarge))
Operations = Mapping[tuple[str, str], HttpOperation]  # by method and path


def openapi_document(operations: Operations) -> JsonObject:
    """Return the whole document. `{name:path}` of a route is `{name}` here."""
    paths: dict[str, JsonObject] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(re.sub(r":path}", "}", path), {})[method.lower()] = _described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motley", "version": motley_version(), "description": "One language model, served."},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {f"Refused{status}": described for status, described in _responses(REFUSED)},
        },
        "security": [{"key": []}, {}],  # a service without API keys is for its own machine
    }


def _described(path: str, operation: HttpOperation) -> JsonObject:
    responses: JsonObject = dict(_responses(operation))
    if operation is REFUSED:  # there are many refused routes: each response is described once
        responses = {status: {"$ref": f"#/components/responses/Refused{status}"} for status in responses}
    described: JsonObject = {"summary": operation.summary, "responses": responses}
    if names := re.findall(r"{(\w+)", path):
        described["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": _IN_PATHS[name],
                "schema": {"type": "string", "minLength": 1},
            }
            for name in names
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": not operation.bodiless,
            "content": {"application/json": {"schema": operation.body}},
        }
    return described


def _responses(operation: HttpOperation) -> Iterator[tuple[str, JsonObject]]:
    if operation.response is not None:
        content: JsonObject = {operation.media: {"schema": operation.response}}
        if operation.chunk is not None:
            content["text/event-stream"] = {
                "schema": {"type": "string"},
                "x-event": {
                    "anyOf": [operation.chunk, operation.error or ERROR]
                },  # an error after the beginning is the last event
            }
        if operation.binary:  # JSON as above, followed by the tensors' binary data
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        yield "200", {"description": "the answer", "content": content}
    kinds = {kind.status: kind for kind in operation.errors}
    for status in sorted({*kinds, *map(int, _codes()["edge"])}):
        yield str(status), _refusal(operation, status, kinds.get(status))


def _refusal(operation: HttpOperation, status: int, kind: type[MotleyError] | None) -> JsonObject:
    """Return the description of one error status. `kind`: the service's own error class for it; None: only HAProxy
    answers so.
    """
    said = ((kind and kind.__doc__) or HTTPStatus(status).phrase).partition("\n")[0]
    schema = _error(operation, status, kind)
    described: JsonObject = {"description": said, "content": {"application/json": {"schema": schema}}}
    if status in (429, 503):
        described["headers"] = {
            "Retry-After": {"description": "seconds after which trying again may help", "schema": {"type": "integer"}}
        }
    return described


def _error(operation: HttpOperation, status: int, kind: type[MotleyError] | None) -> Schema:
    """Return the schema of an error with the codes that it may have. HAProxy's own errors have OpenAI's form on every
    path.
    """
    codes = _codes()
    edge, own = codes["edge"].get(str(status), []), []
    if kind is not None:
        behind = "refused" if operation.response is None else "routes"
        reached = operation.body is not None or kind in operation.more
        own = codes["door"].get(str(status), []) + (codes[behind].get(str(status), []) if reached else [])
    if operation.error is None:
        return _with_codes([*edge, *own])
    forms = ([operation.error] if kind is not None else []) + ([_with_codes(edge)] if edge else [])
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _with_codes(codes: Iterable[str | None]) -> Schema:
    ordered = sorted(set(codes), key=lambda code: (code is None, code))
    error = ERROR["properties"]["error"]
    code = {"enum": ordered, "description": error["properties"]["code"]["description"]}
    return {**ERROR, "properties": {"error": {**error, "properties": {**error["properties"], "code": code}}}}


@cache
def _codes() -> Mapping[str, Mapping[str, list[str | None]]]:
    """Return the codes by origin and status. Origins: HAProxy, the checks before every route, and the routes."""
    found: Mapping[str, Mapping[str, list[str | None]]] = json.loads(CODES.read_text(encoding="utf-8"))
    return found


def request_object(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Return the schema of a JSON object in a request: these fields and no other; a field that is not required may be
    null.
    """
    needed = list(required)
    described = {name: schema if name in needed else or_null(schema) for name, schema in properties.items()}
    found: JsonObject = {"type": "object", "properties": described, "additionalProperties": False}
    return found | ({"required": needed} if needed else {})


def response_object(maybe: Mapping[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """Return the schema of a JSON object in an answer: these fields, and those of `maybe` if they have a value.

    Later versions may have further fields, so others are not ruled out.
    """
    return {"type": "object", "properties": {**properties, **(maybe or {})}, "required": list(properties)}


def or_null(schema: Schema) -> Schema:
    """Return the schema extended by null, which is the same as leaving the field out."""
    kind = schema.get("type")
    if kind == "null":
        return schema
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    return about | {"anyOf": [rest, {"type": "null"}]}
