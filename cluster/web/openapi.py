"""The HTTP interface as an OpenAPI 3.1 document: every route, field, default and error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    MotleyError,
    NotFound,
    Overloaded,
    Unavailable,
)
from ..errors import MethodNotAllowed, NotImplementedHere, SlowBody, TooLarge, UnsupportedMedia
from ..failures import Forbidden, Unauthenticated
from .answers import Object

Schema = Mapping[str, Any]
_IN_PATHS = {"name": "of the model", "number": "of its version: 1, the only one", "rest": "whatever follows"}
CODES = Path(__file__).with_name("codes.json")  # written by `make reference`, from where the sources raise them
# The first for a query, the last for a WebSocket's handshake.
_ALWAYS = (InvalidRequest, Unauthenticated, Forbidden, MethodNotAllowed, EngineFault, Unavailable, NotImplementedHere)
_WITH_BODY = (SlowBody, TooLarge, UnsupportedMedia, Overloaded)
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
class Operation:
    """What one route does.

    body    schema of the JSON body; None: it has none
    answer  schema of the JSON answer; None: it is always refused
    chunk   schema of one server-sent event, where the answer may be a stream of them
    engine  the model is at work: the request can be refused for lack of room, or miss its deadline
    error   schema of a refusal; None: OpenAI's
    more    error classes beside those that follow from the rest
    bodiless  the body may be empty
    binary  the answer may be JSON with binary data behind it
    """

    summary: str
    answer: Schema | None
    body: Schema | None = None
    chunk: Schema | None = None
    engine: bool = False
    error: Schema | None = None
    more: tuple[type[MotleyError], ...] = ()
    bodiless: bool = False
    binary: bool = False

    @property
    def errors(self) -> tuple[type[MotleyError], ...]:
        """By ascending status; one for each."""
        found: set[type[MotleyError]] = {*_ALWAYS, *self.more}
        found |= {*_WITH_BODY} if self.body is not None else set()
        found |= {*_WITH_ENGINE} if self.engine else set()
        return tuple(sorted(found, key=lambda kind: kind.status))


REFUSED = Operation("Refused: there is no such API here", None, more=(NotFound, TooLarge))
Operations = Mapping[tuple[str, str], Operation]  # by method and path


def document(operations: Operations) -> Object:
    """The whole document. `{name:path}` of a route is `{name}` here."""
    paths: dict[str, Object] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(re.sub(r":path}", "}", path), {})[method.lower()] = _described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motley", "version": version("motley"), "description": "One language model, served."},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {f"Refused{status}": described for status, described in _responses(REFUSED)},
        },
        "security": [{"key": []}, {}],  # without keys the service is for its own machine
    }


def _described(path: str, operation: Operation) -> Object:
    responses: Object = dict(_responses(operation))
    if operation is REFUSED:  # of which there are many: each is described once
        responses = {status: {"$ref": f"#/components/responses/Refused{status}"} for status in responses}
    described: Object = {"summary": operation.summary, "responses": responses}
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


def _responses(operation: Operation) -> Iterator[tuple[str, Object]]:
    if operation.answer is not None:
        content: Object = {"application/json": {"schema": operation.answer}}
        if operation.chunk is not None:
            content["text/event-stream"] = {
                "schema": {"type": "string"},
                "x-event": {
                    "anyOf": [operation.chunk, operation.error or ERROR]
                },  # what goes wrong after the beginning is the last event
            }
        if operation.binary:  # JSON as above, and behind it what its tensors say is there
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        yield "200", {"description": "the answer", "content": content}
    kinds = {kind.status: kind for kind in operation.errors}
    for status in sorted({*kinds, *map(int, _codes()["edge"])}):
        yield str(status), _refusal(operation, status, kinds.get(status))


def _refusal(operation: Operation, status: int, kind: type[MotleyError] | None) -> Object:
    """`kind`: what the service itself refuses so; None: only HAProxy, which stands before it, does."""
    said = ((kind and kind.__doc__) or HTTPStatus(status).phrase).partition("\n")[0]
    schema = _error(operation, status, kind)
    described: Object = {"description": said, "content": {"application/json": {"schema": schema}}}
    if status in (429, 503):
        described["headers"] = {
            "Retry-After": {"description": "seconds after which trying again may help", "schema": {"type": "integer"}}
        }
    return described


def _error(operation: Operation, status: int, kind: type[MotleyError] | None) -> Schema:
    """With the codes that may be in it. What HAProxy says by itself has OpenAI's form on every path."""
    codes = _codes()
    edge, own = codes["edge"].get(str(status), []), []
    if kind is not None:
        behind = "refused" if operation.answer is None else "routes"
        reached = operation.body is not None or kind in operation.more
        own = codes["door"].get(str(status), []) + (codes[behind].get(str(status), []) if reached else [])
    if operation.error is None:
        return _with_codes([*edge, *own])
    forms = ([operation.error] if kind is not None else []) + ([_with_codes(edge)] if edge else [])
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _with_codes(codes: Iterable[str | None]) -> Schema:
    known = sorted(set(codes), key=lambda code: (code is None, code))
    error = ERROR["properties"]["error"]
    code = {"enum": known, "description": error["properties"]["code"]["description"]}
    return {**ERROR, "properties": {"error": {**error, "properties": {**error["properties"], "code": code}}}}


@cache
def _codes() -> Mapping[str, Mapping[str, list[str | None]]]:
    """Who answers -> status -> codes: HAProxy, what stands before every route, and what lies behind that."""
    found: Mapping[str, Mapping[str, list[str | None]]] = json.loads(CODES.read_text(encoding="utf-8"))
    return found


def object_of(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """A JSON object of a request: these fields and no other; a field that is not required may be null."""
    needed = list(required)
    described = {name: schema if name in needed else or_null(schema) for name, schema in properties.items()}
    found: Object = {"type": "object", "properties": described, "additionalProperties": False}
    return found | ({"required": needed} if needed else {})


def answer(maybe: Mapping[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """A JSON object of an answer: these fields, and those of `maybe` where there is something to say.

    Later versions may say more, so others are not ruled out.
    """
    return {"type": "object", "properties": {**properties, **(maybe or {})}, "required": list(properties)}


def or_null(schema: Schema) -> Schema:
    """`null` is as good as leaving it out."""
    kind = schema.get("type")
    if kind == "null":
        return schema
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    about = {key: schema[key] for key in ("description", "default") if key in schema}
    rest = {key: value for key, value in schema.items() if key not in about}
    return about | {"anyOf": [rest, {"type": "null"}]}
