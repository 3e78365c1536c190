"""A worker that says what it is told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from echo_worker import EchoWorker

from motley.replicas.types import Request, StreamMessage


class ScriptedWorker(EchoWorker):
    """Yields `messages`, then raises `error` if there is one; embeddings are the echo's. Keeps the requests it got."""

    def __init__(self, folder: str, messages: Sequence[StreamMessage], error: Exception | None = None) -> None:
        super().__init__(folder)
        self._messages, self._error = messages, error
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        self.requests.append(request)
        async for message in super().generate(request) if request.pooling else self._said():
            yield message
        if self._error is not None:
            raise self._error

    async def _said(self) -> AsyncGenerator[StreamMessage, None]:
        for message in self._messages:
            yield message
