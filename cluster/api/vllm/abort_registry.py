"""Requests that can be aborted from another call, by the id that their client gave them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from ...one_shot_event import OneShotEvent, create_event, set_event


class AbortRegistry:
    """Running requests by tenant and the client's id. If an id is used twice, an abort ends both requests."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], set[OneShotEvent]] = defaultdict(set)

    @contextmanager
    def running(self, tenant: str, client_id: str) -> Iterator[OneShotEvent]:
        """Yield an event that is set if the request is aborted while the `with` block runs."""
        key, aborted = (tenant, client_id), create_event()
        self._running[key].add(aborted)
        try:
            yield aborted
        finally:
            self._running[key].discard(aborted)
            if not self._running[key]:
                del self._running[key]

    def abort(self, tenant: str, client_id: str) -> None:
        """Abort the requests with this id of this tenant alone. An id that does not run is ignored: it may just
        have ended.
        """
        for aborted in self._running.get((tenant, client_id), ()):
            set_event(aborted)

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))
