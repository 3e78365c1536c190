"""Which values a prefix store has had lately, as far as this replica has seen: for those who choose among replicas."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["Known"]

_BELIEVED_S = 60.0  # the store may lose any of them, and only who fetches it sees that
_REMEMBERED = 65_536  # keys: 8 MiB or so


class Known:
    """By their keys; those seen first are forgotten first. Pure: `clock` in seconds."""

    def __init__(self, clock: Callable[[], float], capacity: int = _REMEMBERED) -> None:
        self._clock, self._capacity = clock, capacity
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def there(self, keys: Sequence[bytes]) -> None:
        """They were read or written just now."""
        now = self._clock()
        for key in reversed(keys):  # a prefix is forgotten from its end
            self._seen[key] = now
            self._seen.move_to_end(key)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def gone(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._seen.pop(key, None)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first ones are there."""
        since = self._clock() - _BELIEVED_S
        for count, key in enumerate(keys):
            if self._seen.get(key, -math.inf) < since:
                return count
        return len(keys)

    def forget(self) -> None:
        self._seen.clear()
