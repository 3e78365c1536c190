"""What the index of prefixes gains and loses, for those who want to know where a prefix is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .protocol import BLOCK_TOKENS, KvEvent

OwnedEvent = tuple[str, KvEvent]  # with the tenant whose prefix it is


class KvLog:
    """Collects events where they happen; `take` hands them over. Not thread-safe."""

    def __init__(self) -> None:
        self._events: list[OwnedEvent] = []

    def stored(
        self,
        owner: str,
        hashes: Sequence[bytes],
        positions: Sequence[int],
        tokens: Callable[[int, int], tuple[int, ...]],
    ) -> None:
        """The blocks at these positions of a sequence; `tokens(start, stop)` are its ids."""
        for i in positions:
            ids = tokens(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            self._events.append((owner, KvEvent(hashes[i], ids, hashes[i - 1] if i else None)))

    def removed(self, key: bytes, owner: str) -> None:
        self._events.append((owner, KvEvent(key)))

    def take(self) -> list[OwnedEvent]:
        taken, self._events = self._events, []
        return taken
