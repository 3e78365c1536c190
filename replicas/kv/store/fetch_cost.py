"""Decision whether fetching or storing a prefix saves time. Pure: it is given measured seconds and counts of
requests.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

MAX_READ_S = 0.05  # most seconds without an answer from the store
_FIRST_S_PER_BYTE = 2e-9  # 0.5 GB/s, until something was fetched
_LINGER_S, _LINGER_SHARE = 0.002, 0.01
_NEWEST_WEIGHT = 0.25  # weight of the newest measurement in the average
_RETRY_EVERY = 32  # one in so many is fetched although that seems slower: else the estimate could never improve
_MAX_CHUNKS = 65_536  # most chunks counted, with about 4 MiB of hashes


def fetch_timeout_s(values_s: float) -> float:
    """Longest wait in seconds for values that would take `values_s` seconds to compute.

    It is at most half of that, so that waiting for values that come has saved time; and at most MAX_READ_S, so that a
    request loses no more than that by waiting in vain. A long prefix comes in several reads, and each has this time:
    slow processors and slow stores get what they can, and a request that waits in vain still loses one read's time
    only.
    """
    return min(MAX_READ_S, values_s / 2)


def lookup_wait_s(computed_s: float) -> float:
    """Seconds that a plan waits for values just asked of the store, which would take `computed_s` seconds to compute.

    A store reports a miss in less time. The sequence is then computed in this plan, instead of waiting for a whole step
    of others.
    """
    return min(_LINGER_S, _LINGER_SHARE * computed_s)


class FetchCostModel:
    """Estimates of what fetching and computing KV take.

    token_s  seconds to compute one token of a prompt
    block_s  seconds to copy one block from the host to the device
    """

    def __init__(self, token_s: float, block_s: float) -> None:
        self.token_s, self._block_s = token_s, block_s
        self._s_per_byte = _FIRST_S_PER_BYTE
        self._refused = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of recent fetches, including opening records and copying them to the host's blocks."""
        return 1 / self._s_per_byte

    def fetch_s(self, nbytes: int, blocks: int) -> float:
        """Estimated seconds to fetch so many bytes and copy so many blocks to the device."""
        return nbytes * self._s_per_byte + blocks * self._block_s

    def prefers_fetch(self, tokens: int, nbytes: int, blocks: int) -> bool:
        if self.fetch_s(nbytes, blocks) < tokens * self.token_s:
            return True
        self._refused += 1
        return self._refused % _RETRY_EVERY == 0

    def learn(self, nbytes: int, seconds: float) -> None:
        """Update the estimated speed of fetches by one of `nbytes` bytes that took `seconds`."""
        self._s_per_byte += _NEWEST_WEIGHT * (seconds / nbytes - self._s_per_byte)


class ChunkCounter:
    """Counts of how often each chunk of a prompt was asked for, for the most recently seen chunks."""

    def __init__(self, capacity: int = _MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._times: OrderedDict[bytes, int] = OrderedDict()

    def saw(self, chunks: Sequence[bytes]) -> list[int]:
        """Count a request for these chunks, and return how often each was asked for, this time included."""
        times = []
        for chunk in chunks:
            times.append(self._times.pop(chunk, 0) + 1)
            self._times[chunk] = times[-1]
        while len(self._times) > self._capacity:
            self._times.popitem(last=False)
        return times


def leading_repeated(times: Sequence[int], after: int) -> int:
    """Return how many leading chunks were asked for at least `after` times: prompts that come once are not worth
    storing.
    """
    return sum(1 for _ in itertools.takewhile(lambda seen: seen >= after, times))


def leading_worth_storing(times: Sequence[int], after: int) -> int:
    """Return how many leading chunks the store should have now; 0 if nothing is to be done.

    They are offered at `after` requests, and whenever that number has doubled: the store may have lost them meanwhile,
    which a replica that has them in its own KV would not notice.
    """
    seen = times[: leading_repeated(times, after)]
    return len(seen) if any(count % after == 0 and (count // after).bit_count() == 1 for count in seen) else 0
