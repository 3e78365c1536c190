"""Calls an ASGI application in this process, byte for byte as a server would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Data of server-sent events; `[DONE]` as it is."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


HEADERS = {"host": "127.0.0.1:8000", "content-type": "application/json"}


async def request(
    app: Any,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] | Any = b"",
    *,
    headers: Mapping[str, str | bytes | None] | None = None,
    client: str = "127.0.0.1",
    raises: type[Exception] | tuple[()] = (),
    send: Any = None,
    query: bytes = b"",
) -> Reply:
    """`body`: bytes, several chunks of them, or what is to be sent as JSON. A header of None is left out.

    `send` takes the answer in place of the reply.
    """
    chunks = (
        [body] if isinstance(body, bytes) else [json.dumps(body).encode()] if isinstance(body, dict) else list(body)
    )
    merged = {**HEADERS, **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [
            (k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in merged.items() if v is not None
        ],
        "client": (client, 4711),
        "server": ("127.0.0.1", 8000),
    }
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1} for i, chunk in enumerate(chunks)
    ]
    reply = Reply()

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    async def keep(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            reply.parts.append(message.get("body", b""))

    with suppress(*([raises] if raises else [])):
        await app(scope, receive, send or keep)
    return reply
