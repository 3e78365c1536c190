"""A small client of OpenAI's HTTP on the standard library: enough for `motley chat`, and quick to import."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..replicas.errors import InvalidRequest, MotleyError, NotFound, Unavailable

CONNECT_S = 10.0
STALL_S = 300.0  # longest silence within an answer


class ServiceError(MotleyError):
    """The service answered with an error; the message is its own."""


class Service:
    """A service at a base URL. Raises InvalidRequest for the URL, Unavailable, ServiceError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"--url {url}: expected one such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._https = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """The first model it serves."""
        with self._open("GET", "/v1/models") as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise NotFound(f"{self.url} serves no model")
        return str(models[0]["id"])

    def chat(self, body: Mapping[str, Any]) -> Generator[str]:
        """Pieces of the answer's text. Closing the iterator closes the connection, which cancels."""
        with self._open("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            for event in _events(response):
                if "error" in event:
                    raise ServiceError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        data = json.dumps(body) if body is not None else None
        headers = {**self._headers, "Content-Type": "application/json"} if data else self._headers
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(STALL_S)
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(
                f"no service answers at {self.url} ({error}); start one with `motley serve`, or give its --url"
            ) from error
        if response.status != http.client.OK:
            raise _error(response)
        return response

    def _connection(self) -> http.client.HTTPConnection:
        if self._https:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=CONNECT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events up to `[DONE]`."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ServiceError("the stream ended before its last message")


def _error(response: http.client.HTTPResponse) -> ServiceError:
    text = response.read(65536).decode("utf-8", errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text[:200] or response.reason
    return ServiceError(f"the service answered {response.status}: {message}")
