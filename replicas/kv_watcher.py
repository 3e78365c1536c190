"""Those who want to know what the index of prefixes gains and loses, each with what they have not read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice

from .kv_log import OwnedEvent
from .protocol import KvEvent

MAX_UNREAD = 8192  # events kept for a reader who is slow
MAX_BATCH = 512  # events of one message: a block's tokens are about 100 bytes of it


class KvWatcher:
    """One tenant's events, waiting for their reader: at most MAX_UNREAD, then all are dropped and that is told."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._unread: deque[KvEvent] = deque()
        self._lost = False
        self._wake = asyncio.Event()

    def put(self, events: Sequence[OwnedEvent]) -> None:
        self._unread.extend(event for owner, event in events if owner == self._tenant)
        if len(self._unread) > MAX_UNREAD:
            self._unread.clear()
            self._lost = True
        if self._unread or self._lost:
            self._wake.set()

    async def take(self, timeout_s: float) -> tuple[tuple[KvEvent, ...], bool]:
        """The oldest of them, and whether some were lost before; none after `timeout_s` without any."""
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
