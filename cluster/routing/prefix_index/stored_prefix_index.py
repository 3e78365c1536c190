"""View of which prompt prefixes the shared prefix stores hold, from what replicas reported to this ingress. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ....replicas.types import PromptStoreStatus
from .prefix_hash_chain import PIECE_TOKENS
from .prefix_index import PrefixIndex

MAX_STORED_PIECES = 16_384  # maximum pieces remembered of each store: a million tokens
MAX_IDLE_STORES = 8  # stores that are remembered while no replica reads them, since one with an empty cache may join


class StoredPrefixIndex:
    """View of the prefixes in each prefix store, by the store's number.

    Replicas that read each other's prefixes have the same store, which the `shares` of their profiles names. It is only
    a view: a store may have lost what is recorded here. The replica that looks for it then computes it, and reports the
    loss.
    """

    def __init__(self) -> None:
        self._view = PrefixIndex(max_pieces=MAX_STORED_PIECES)
        self._numbers: dict[str, int] = {}
        self._readers: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._free: list[int] = []

    def add_reader(self, shares: str) -> int:
        """Add a reader of the store that `shares` names, and return the store's number."""
        if shares not in self._numbers:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[shares] = number
            self._view.add_replica(number, MAX_STORED_PIECES)
        self._readers[shares] += 1
        self._idle.pop(shares, None)
        return self._numbers[shares]

    def remove_reader(self, shares: str) -> None:
        """Remove a reader of the store that `shares` names; a store without readers is remembered for a time."""
        self._readers[shares] -= 1
        if self._readers[shares]:
            return
        del self._readers[shares]
        self._idle[shares] = None
        if len(self._idle) > MAX_IDLE_STORES:
            number = self._numbers.pop(self._idle.popitem(last=False)[0])
            self._view.clear(number)
            self._free.append(number)

    def learn(self, number: int, chain: Sequence[int], stored: PromptStoreStatus) -> None:
        """Record what a replica that reads the store has reported of a prompt."""
        if stored.tokens >= PIECE_TOKENS:
            self._view.add(number, chain[: stored.tokens // PIECE_TOKENS])
        if stored.absent is not None:
            self._view.correct(number, chain[:], stored.absent // PIECE_TOKENS)

    def tokens(self, chain: Iterable[int]) -> dict[int, int]:
        """Return, for each store that has a prefix of the prompt, how many of its leading tokens it has."""
        if not self._readers:
            return {}
        return {number: depth * PIECE_TOKENS for number, depth in self._view.depths(chain).items()}

    def clear(self) -> None:
        """Forget the contents of all stores, which were made to drop them."""
        for number in self._numbers.values():
            self._view.clear(number)
