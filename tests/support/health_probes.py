"""A balancer that asks a service for its health all the time."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neighbour import OWN
from serve_process import Served, wait_for


class Health:
    """Asks for health ten times a second, over both protocols, without a key. `bad`: what was not a good answer."""

    def __init__(self, service: Served) -> None:
        self._service = service
        self._end = threading.Event()
        self.bad: list[str] = []
        self.took: dict[str, list[float]] = {"HTTP": [], "gRPC": []}

    @contextmanager
    def asked(self) -> Iterator[Health]:
        with grpc.insecure_channel(self._service.grpc, OWN) as channel, ThreadPoolExecutor(2) as threads:
            stub = health_pb2_grpc.HealthStub(channel)
            over: dict[str, Callable[[], bool]] = {"HTTP": self._http, "gRPC": partial(self._grpc, stub)}
            asking = [threads.submit(self._ask, port, ask) for port, ask in over.items()]
            try:
                yield self
            finally:
                self._end.set()
            for future in asking:
                future.result(120)

    def go_on(self) -> None:
        """Wait for 20 more answers over each protocol."""
        asked = {port: len(took) for port, took in self.took.items()}
        wait_for(lambda: all(len(took) >= asked[port] + 20 for port, took in self.took.items()), "health", 120)

    def told(self) -> str:
        return ", ".join(f"{len(took)} over {port}, the longest {max(took):.2f} s" for port, took in self.took.items())

    def _ask(self, port: str, ask: Callable[[], bool]) -> None:
        for number in itertools.count():
            began = time.monotonic()
            if not ask():
                self.bad.append(f"{port} {number}")
            self.took[port].append(time.monotonic() - began)
            if self._end.wait(0.1):
                return

    def _http(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.http_port, timeout=60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    def _grpc(self, stub: Any) -> bool:
        serving = health_pb2.HealthCheckResponse.SERVING
        return bool(stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == serving)
