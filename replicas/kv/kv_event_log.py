"""Log of the prefixes that a replica's index gains and loses, for clients that track where a prefix is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..types import BLOCK_TOKENS, KvEvent

OwnedKvEvent = tuple[str, KvEvent]  # an event, after the tenant who owns the prefix


class KvEventLog:
    """Log of changes of the prefix index. Events are collected as they happen, and `take` returns them. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._events: list[OwnedKvEvent] = []

    def stored(
        self,
        owner: str,
        hashes: Sequence[bytes],
        positions: Sequence[int],
        tokens: Callable[[int, int], tuple[int, ...]],
    ) -> None:
        """Record that the blocks at these positions of a sequence are in the index; `tokens(start, stop)` returns its
        token ids.
        """
        for i in positions:
            ids = tokens(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            self._events.append((owner, KvEvent(hashes[i], ids, hashes[i - 1] if i else None)))

    def removed(self, key: bytes, owner: str) -> None:
        self._events.append((owner, KvEvent(key)))

    def take(self) -> list[OwnedKvEvent]:
        taken, self._events = self._events, []
        return taken
