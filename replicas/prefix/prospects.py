"""Whether it pays to fetch a prefix, and to store one. Pure: told what took how long, and what was asked for."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["READ_S", "Prospects", "Sightings", "leading_seen", "leading_worth", "linger_s", "patience_s"]

READ_S = 0.05  # the longest that nothing may come from the store
_FIRST_S_PER_BYTE = 2e-9  # 0.5 GB/s, until something was fetched
_LINGER_S, _LINGER_SHARE = 0.002, 0.01
_NEWEST = 0.25  # its weight in the average
_TRY_AGAIN = 32  # one in so many is fetched although it seems slower: else nobody would see that it no longer is
_REMEMBERED = 65_536  # chunks: 4 MiB or so of hashes


def patience_s(values_s: float) -> float:
    """How long to wait for values that take so long to compute.

    Half of that at most, so that what comes has been worth waiting for; and READ_S at most, so that a request loses no
    more by waiting in vain. A long prefix comes in several reads, and each has this time for itself: slow processors
    and slow stores get what they can, and whoever waits in vain still loses one read's time alone.
    """
    return min(READ_S, values_s / 2)


def linger_s(computed_s: float) -> float:
    """How long a plan waits for what was just asked of the store, and would take so long to compute.

    What is not there is told in less, and then has its place in this plan: else it waits for a whole step of others.
    """
    return min(_LINGER_S, _LINGER_SHARE * computed_s)


class Prospects:
    """token_s: to compute one token of a prompt; block_s: to bring one block from the host to the device."""

    def __init__(self, token_s: float, block_s: float) -> None:
        self.token_s, self._block_s = token_s, block_s
        self._s_per_byte = _FIRST_S_PER_BYTE
        self._refused = 0

    @property
    def bytes_per_s(self) -> float:
        """Of what was fetched lately, opened and brought to the host's blocks."""
        return 1 / self._s_per_byte

    def fetch_s(self, nbytes: int, blocks: int) -> float:
        """What it takes to fetch so much, in seconds."""
        return nbytes * self._s_per_byte + blocks * self._block_s

    def favour_fetch(self, tokens: int, nbytes: int, blocks: int) -> bool:
        if self.fetch_s(nbytes, blocks) < tokens * self.token_s:
            return True
        self._refused += 1
        return self._refused % _TRY_AGAIN == 0

    def learn(self, nbytes: int, seconds: float) -> None:
        """A fetch of so many bytes took so long."""
        self._s_per_byte += _NEWEST * (seconds / nbytes - self._s_per_byte)


class Sightings:
    """How often each chunk of a prompt was asked for; of the chunks seen last."""

    def __init__(self, capacity: int = _REMEMBERED) -> None:
        self._capacity = capacity
        self._times: OrderedDict[bytes, int] = OrderedDict()

    def saw(self, chunks: Sequence[bytes]) -> list[int]:
        """How often each, this time included."""
        times = []
        for chunk in chunks:
            times.append(self._times.pop(chunk, 0) + 1)
            self._times[chunk] = times[-1]
        while len(self._times) > self._capacity:
            self._times.popitem(last=False)
        return times


def leading_seen(times: Sequence[int], after: int) -> int:
    """How many leading chunks were asked for `after` times: what comes once is not worth anybody's memory."""
    return sum(1 for _ in itertools.takewhile(lambda seen: seen >= after, times))


def leading_worth(times: Sequence[int], after: int) -> int:
    """How many leading chunks the store shall have now; 0: nothing is due.

    It is due when the number of times has doubled, too: the store may have lost them since, and whoever has them in its
    own KV does not see that.
    """
    seen = times[: leading_seen(times, after)]
    return len(seen) if any(count % after == 0 and (count // after).bit_count() == 1 for count in seen) else 0
