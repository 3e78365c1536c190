"""View of which replica has which prompt prefixes cached, from what this ingress has sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

MAX_REPLICA_PIECES = 4096  # maximum pieces remembered of each replica


class PrefixIndex:
    """Hash chains of prompt prefixes that each replica holds; the least recently used are forgotten first.

    It is only a view: a replica may hold more, or may have evicted some. A chain consists of the hashes of a prompt's
    pieces, whose length the caller chooses and which is the same for all.

    For each hash, the replicas that hold it are the bits of one integer, so that a chain is followed for all at once.
    """

    def __init__(self, pieces: Sequence[int] = (), max_pieces: int = MAX_REPLICA_PIECES) -> None:
        """Create a view.

        pieces      how many pieces each replica can hold
        max_pieces  maximum number of pieces that are remembered of each replica
        """
        self._max_pieces = max_pieces
        self._capacities: list[int] = []
        self._cached: list[OrderedDict[Hashable, None]] = []
        self._holders: dict[Hashable, int] = {}
        for replica, count in enumerate(pieces):
            self.add_replica(replica, count)

    def add_replica(self, replica: int, pieces: int) -> None:
        """Add a replica that holds nothing yet, under its number.

        What another replica held under that number is forgotten.
        """
        while len(self._cached) <= replica:
            self._cached.append(OrderedDict())
            self._capacities.append(0)
        self.clear(replica)
        self._capacities[replica] = min(self._max_pieces, pieces)

    def depths(self, hashes: Iterable[Hashable]) -> dict[int, int]:
        """Return, for each replica that holds at least one, the number of the chain's leading pieces that it holds."""
        found: dict[int, int] = {}
        get, chain = self._holders.get, iter(hashes)
        depth, holders = 1, get(next(chain, None), 0)
        if not holders:
            return found
        for each in chain:
            if (going_on := get(each, 0) & holders) != holders:
                for replica in _bits(holders & ~going_on):
                    found[replica] = depth
                holders = going_on
                if not holders:
                    return found
            depth += 1
        for replica in _bits(holders):
            found[replica] = depth
        return found

    def add(self, replica: int, hashes: Sequence[Hashable]) -> None:
        """Record that a replica computes a prompt, and so holds its pieces from now on."""
        cached, bit = self._cached[replica], 1 << replica
        for each in reversed(hashes):  # so that the end of the prompt is forgotten first
            if each in cached:
                cached.move_to_end(each)
            else:
                cached[each] = None
                self._holders[each] = self._holders.get(each, 0) | bit
        while len(cached) > self._capacities[replica]:
            self._forget(replica, cached.popitem(last=False)[0])

    def correct(self, replica: int, hashes: Sequence[Hashable], num_cached: int) -> None:
        """Record that a replica held at most `num_cached` leading pieces of the chain; the others are forgotten."""
        for each in hashes[num_cached:]:
            if each in self._cached[replica]:
                del self._cached[replica][each]
                self._forget(replica, each)

    def clear(self, replica: int) -> None:
        """Forget everything about a replica that was replaced, or was made to drop its cache."""
        for each in self._cached[replica]:
            self._forget(replica, each)
        self._cached[replica].clear()

    def _forget(self, replica: int, each: Hashable) -> None:
        left = self._holders[each] & ~(1 << replica)
        if left:
            self._holders[each] = left
        else:
            del self._holders[each]


def _bits(number: int) -> list[int]:
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found
