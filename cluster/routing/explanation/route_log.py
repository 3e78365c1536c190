"""Log of the latest requests of one ingress: the records of where they went, newest last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ....replicas.types import Request
from .route_record import RouteRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["MAX_ROUTES", "RouteLog", "RouteObserver"]

MAX_ROUTES = 10_000


class RouteObserver(Protocol):
    """Observer that is told of each request when it has ended."""

    def record(self, route: RouteRecord, now: float, parent: Span | None) -> None:
        """Take note of a request.

        now     current time of the record's clock, in seconds
        parent  span of its call; None if it has none
        """
        ...


class RouteLog:
    """Log of the last `MAX_ROUTES` requests, those that run included. `clock`: returns the current time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: deque[RouteRecord] = deque(maxlen=MAX_ROUTES)

    def begin(self, request: Request, call_id: str, call_name: str, num_replicas: int) -> RouteRecord:
        """Return the record of a request that has come, to be entered as a context while it runs."""
        record = RouteRecord(request, call_id, call_name, num_replicas, self._clock)
        self._records.append(record)
        return record

    def find(self, name: str) -> list[RouteRecord]:
        """Return the requests of that id, newest first: the server's id, as in a response too, or a client's."""
        if not name:
            return []
        request_id = name.rpartition("-")[2]  # responses of OpenAI's protocol have a kind before it: chatcmpl-
        return [one for one in reversed(self._records) if name in one.names or request_id == one.request_id]
