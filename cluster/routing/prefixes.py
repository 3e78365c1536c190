"""Which replica holds which beginnings of prompts, as far as this ingress knows: from what it has sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

__all__ = ["PrefixView"]

MOST_PIECES = 4096  # remembered of each replica


class PrefixView:
    """Hash chains by replica, least recently used forgotten first. A view: a replica may hold more, or no longer that.

    A chain is of pieces of a prompt, of whatever length its maker gives all of them.

    For each hash the replicas that hold it, as the bits of one number: a chain is followed for all of them at once.
    """

    def __init__(self, pieces: Sequence[int] = (), most: int = MOST_PIECES) -> None:
        """`pieces`: how many each replica has room for. `most`: remembered of each."""
        self._most = most
        self._room: list[int] = []
        self._held: list[OrderedDict[Hashable, None]] = []
        self._holders: dict[Hashable, int] = {}
        for replica, count in enumerate(pieces):
            self.come(replica, count)

    def come(self, replica: int, pieces: int) -> None:
        """A replica that holds nothing yet, under its number; what another held under that is forgotten."""
        while len(self._held) <= replica:
            self._held.append(OrderedDict())
            self._room.append(0)
        self.clear(replica)
        self._room[replica] = min(self._most, pieces)

    def depths(self, hashes: Iterable[Hashable]) -> dict[int, int]:
        """Replica -> how many leading pieces of the chain it holds; only those that hold one."""
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
        """It computes that prompt, and holds its pieces from then on."""
        held, bit = self._held[replica], 1 << replica
        for each in reversed(hashes):  # its end is forgotten first
            if each in held:
                held.move_to_end(each)
            else:
                held[each] = None
                self._holders[each] = self._holders.get(each, 0) | bit
        while len(held) > self._room[replica]:
            self._forget(replica, held.popitem(last=False)[0])

    def correct(self, replica: int, hashes: Sequence[Hashable], held: int) -> None:
        """It held no more than so many leading pieces of those: what was thought to be there is not."""
        for each in hashes[held:]:
            if each in self._held[replica]:
                del self._held[replica][each]
                self._forget(replica, each)

    def clear(self, replica: int) -> None:
        """It has been replaced, or told to forget."""
        for each in self._held[replica]:
            self._forget(replica, each)
        self._held[replica].clear()

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
