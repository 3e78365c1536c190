"""Record of which values a prefix store was recently seen to have, by which routing chooses among replicas."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

_TTL_S = 60.0  # seconds until a sighting is too old: the store may lose a value, which only a fetch shows
_MAX_VALUES = 65_536  # most keys, about 8 MiB


class KnownValues:
    """Store keys that were recently seen; the oldest are dropped first. Pure: `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float], capacity: int = _MAX_VALUES) -> None:
        self._clock, self._capacity = clock, capacity
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> None:
        """Record that the store's values at these keys were read or written just now."""
        now = self._clock()
        for key in reversed(keys):  # so that the end of a prefix is dropped first
            self._seen[key] = now
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._seen.pop(key, None)

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first keys the store was recently seen to have."""
        since = self._clock() - _TTL_S
        for count, key in enumerate(keys):
            if self._seen.get(key, -math.inf) < since:
                return count
        return len(keys)

    def forget(self) -> None:
        self._seen.clear()
