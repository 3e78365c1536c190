"""Which beginnings of prompts the stores of prefixes hold, as far as replicas have told this ingress. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ...replicas.protocol import Stored
from .chain import PIECE_TOKENS
from .prefixes import PrefixView

__all__ = ["StoredView"]

MOST_PIECES = 16_384  # remembered of each store: a million tokens
MOST_IDLE = 8  # stores that are remembered while no replica reads them: one may come, with nothing of its own


class StoredView:
    """By number: all replicas that read each other's prefixes have the same one, which their profile's `shares` names.

    A view: the store may have lost what is here. Who is sent for it computes it then, and tells.
    """

    def __init__(self) -> None:
        self._view = PrefixView(most=MOST_PIECES)
        self._numbers: dict[str, int] = {}
        self._readers: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._free: list[int] = []

    def come(self, shares: str) -> int:
        """The number of what a replica reads that has come."""
        if shares not in self._numbers:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[shares] = number
            self._view.come(number, MOST_PIECES)
        self._readers[shares] += 1
        self._idle.pop(shares, None)
        return self._numbers[shares]

    def leave(self, shares: str) -> None:
        """A replica has gone that read it."""
        self._readers[shares] -= 1
        if self._readers[shares]:
            return
        del self._readers[shares]
        self._idle[shares] = None
        if len(self._idle) > MOST_IDLE:
            number = self._numbers.pop(self._idle.popitem(last=False)[0])
            self._view.clear(number)
            self._free.append(number)

    def learn(self, number: int, chain: Sequence[int], stored: Stored) -> None:
        """A replica that reads it has told so of a prompt."""
        if stored.tokens >= PIECE_TOKENS:
            self._view.add(number, chain[: stored.tokens // PIECE_TOKENS])
        if stored.absent is not None:
            self._view.correct(number, chain[:], stored.absent // PIECE_TOKENS)

    def tokens(self, chain: Iterable[int]) -> dict[int, int]:
        """Of those that have a beginning of that prompt: how many tokens."""
        if not self._readers:
            return {}
        return {number: depth * PIECE_TOKENS for number, depth in self._view.depths(chain).items()}

    def clear(self) -> None:
        """They were told to forget."""
        for number in self._numbers.values():
            self._view.clear(number)
