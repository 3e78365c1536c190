"""Whether what went over HTTP is what the OpenAPI document says, to the last field."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any

import asgi
from jsonschema import Draft202012Validator

from motley.cluster.api.openapi_routes import OPERATIONS, REFUSALS
from motley.cluster.transport.http_server.openapi import openapi_document

DOCUMENT = openapi_document({**OPERATIONS, **REFUSALS})
PATHS = DOCUMENT["paths"]
_PATTERNS = {path: re.compile(re.sub(r"{\w+}", "(.+)", path)) for path in sorted(PATHS, key=len, reverse=True)}


def operation_of(method: str, path: str) -> Any:
    """None: the document does not know it. The longer path first: a model's name would swallow its end."""
    matching = (known for known, pattern in _PATTERNS.items() if pattern.fullmatch(path))
    known = path if path in PATHS else next(matching, None)
    return None if known is None else PATHS[known].get(method.lower())


def caller(app: Any) -> Callable[..., Awaitable[asgi.Reply]]:
    """`asgi.request`, which also checks what was accepted, and each answer, against the document."""
    return partial(_request, app)


async def _request(app: Any, method: str, path: str, body: Any = b"", **more: Any) -> asgi.Reply:
    reply = await asgi.request(app, method, path, body, **more)
    operation = operation_of(method, path)
    if operation is not None and reply.status:  # 0: somebody else took the answer
        check_answer(operation, reply)
        binary = "inference-header-content-length" in (more.get("headers") or {})  # the document is of JSON alone
        if reply.status == 200 and body and isinstance(body, bytes | dict) and not binary:
            check_accepted(operation, body)
    return reply


def check_accepted(operation: Any, body: bytes | dict[str, Any]) -> None:
    if "requestBody" in operation:
        value = body if isinstance(body, dict) else json.loads(body)
        _check(operation["requestBody"]["content"]["application/json"]["schema"], value)


def check_answer(operation: Any, reply: asgi.Reply) -> None:
    schema = schema_of(operation, reply)
    for part in parts_of(reply):
        check_part(schema, part)


def check_refusal(method: str, path: str, status: int, body: Any) -> None:
    """Its status, form and code; of a method that the path does not have, as another one of it tells."""
    operation = operation_of(method, path) or operation_of("POST", path)
    assert str(status) in operation["responses"], f"{status} of {path} is not in the document: {body}"
    check_part(_response(operation, status)["content"]["application/json"]["schema"], body)


def check_part(schema: Any, value: Any) -> None:
    """An answer, or an event of one."""
    _check(strict(schema), value)


def parts_of(reply: asgi.Reply) -> list[Any]:
    """The answer, or the events of a stream."""
    if reply.headers["content-type"] == "application/json":
        return [reply.json()]
    if reply.headers["content-type"].startswith("text/plain"):
        return [reply.body.decode()]
    if reply.headers["content-type"] == "application/octet-stream":
        return [json.loads(reply.body[: int(reply.headers["inference-header-content-length"])])]
    return [event for event in reply.events() if event != "[DONE]"]


def schema_of(operation: Any, reply: asgi.Reply) -> Any:
    content = _response(operation, reply.status)["content"]
    kind = reply.headers["content-type"].partition(";")[0]
    kind = "application/json" if kind == "application/octet-stream" else kind  # of the part that is JSON
    return content[kind]["x-event" if kind == "text/event-stream" else "schema"]


def _response(operation: Any, status: int) -> Any:
    response = operation["responses"][str(status)]
    shared = response.get("$ref", "").rpartition("/")[2]
    return DOCUMENT["components"]["responses"][shared] if shared else response


def strict(schema: Any) -> Any:
    """The same, with no room for fields that it does not name."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    tight = {key: strict(value) for key, value in schema.items()}
    return {"additionalProperties": False, **tight} if isinstance(schema.get("properties"), dict) else tight


def _check(schema: Any, value: Any) -> None:
    problems = [f"{one.json_path}: {one.message[:300]}" for one in _validator(json.dumps(schema)).iter_errors(value)]
    assert not problems, problems


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema))
