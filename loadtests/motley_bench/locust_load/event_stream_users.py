"""Users of protocols that stream server-sent events over HTTP: OpenAI's completions, and KServe's generate_stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed
from locust.env import Environment

from ..load.load_workload import LoadRequest
from .streaming_user import StreamingUser

CALL_S = 600.0


class BadAnswer(Exception):
    """Error of an answer with another status than 200, or that ends with an error."""


class EventStreamUser(StreamingUser):
    """Base of the users of such a protocol. Each has one connection, which it keeps."""

    abstract = True
    failures = (BadAnswer, HTTPConnectionClosed, OSError)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options: Any = environment.parsed_options
        base, key = urlsplit(self.source.service.target), options.api_key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._http = HTTPClient.from_url(
            base.geturl(), headers=headers, concurrency=1, network_timeout=CALL_S, connection_timeout=CALL_S
        )

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer. Raises BadAnswer for another status, and for an event that is an error."""
        response = self._http.post(path, json.dumps(body).encode())
        try:
            if response.status_code != 200:
                raise BadAnswer(f"{response.status_code}: {bytes(response.read())[:200].decode(errors='replace')}")
            while event := response.readline(b"\n\n"):
                if event.startswith(b"data: {"):
                    fields = json.loads(event[len(b"data: ") :])
                    if "error" in fields:
                        raise BadAnswer(str(fields["error"])[:200])
                    yield fields
        finally:
            response.release()

    def on_stop(self) -> None:
        self._http.close()


class OpenAIUser(EventStreamUser):
    """Streams OpenAI's completions."""

    protocol = "openai"

    def stream(self, request: LoadRequest) -> Iterator[int]:
        body = {
            "model": self.source.service.model, "prompt": request.prompt_ids, "max_tokens": request.output_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        for event in self.events("/v1/completions", body):
            for choice in event.get("choices", ()):
                yield len(choice.get("token_ids") or (1,))


class KServeUser(EventStreamUser):
    """Streams generate_stream of KServe's protocol for language models. Prompts are words, one for each token."""

    protocol = "kserve"

    def stream(self, request: LoadRequest) -> Iterator[int]:
        body = {
            "text_input": "word " * len(request.prompt_ids),
            "parameters": {"max_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": True},
        }
        for _ in self.events(f"/v2/models/{self.source.service.model}/generate_stream", body):
            yield 1
