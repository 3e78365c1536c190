"""Watchers of the prefixes that a replica's index gains and loses, each with the events that its client has not
read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice

from ..types import KvEvent
from .kv_event_log import OwnedKvEvent

MAX_UNREAD_EVENTS = 8192  # most events kept for a slow reader
MAX_BATCH = 512  # most events of one message; a block's tokens take about 100 bytes


class KvEventSubscription:
    """Events of one tenant that wait for their reader: at most MAX_UNREAD_EVENTS; beyond that all are dropped, and the
    reader learns that some were lost.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._unread: deque[KvEvent] = deque()
        self._lost = False
        self._wake = asyncio.Event()

    def put(self, events: Sequence[OwnedKvEvent]) -> None:
        self._unread.extend(event for owner, event in events if owner == self._tenant)
        if len(self._unread) > MAX_UNREAD_EVENTS:
            self._unread.clear()
            self._lost = True
        if self._unread or self._lost:
            self._wake.set()

    async def take(self, timeout_s: float) -> tuple[tuple[KvEvent, ...], bool]:
        """Return the oldest events, and whether some were lost before them; none after `timeout_s` seconds without
        any.
        """
        try:
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        except TimeoutError:
            return (), False
        events = tuple(islice(self._unread, MAX_BATCH))
        for _ in events:
            self._unread.popleft()
        lost, self._lost = self._lost, False
        if not self._unread:
            self._wake.clear()
        return events, lost
