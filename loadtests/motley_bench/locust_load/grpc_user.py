"""User of motley.v1 over gRPC, by Motley's own client."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import grpc.experimental.gevent
from locust.env import Environment

from motley.client import Client

from ..load.load_senders import grpc_call_options
from ..load.load_workload import LoadRequest
from .streaming_user import StreamingUser


@functools.cache
def _cooperate() -> None:
    """Let one user's wait for a message be nobody else's: once in a process, after Locust has forked its workers."""
    grpc.experimental.gevent.init_gevent()


class GrpcUser(StreamingUser):
    """Streams completions of motley.v1, over a connection of its own, without retries."""

    protocol = "motley.v1"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        _cooperate()
        options: Any = environment.parsed_options
        self._client = Client(options.grpc_host, api_key=options.api_key or None, retries=0)

    def stream(self, request: LoadRequest) -> Iterator[int]:
        options = grpc_call_options(self.source.service.model, request)
        for chunk in self._client.stream(request.prompt_ids, **options):
            if chunk.choices:
                yield sum(len(choice.token_ids) for choice in chunk.choices)

    def on_stop(self) -> None:
        self._client.close()
