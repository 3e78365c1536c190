"""Queue that is fair among tenants: start-time fair queueing in tokens. Pure, without a clock.

Every waiting tenant has a virtual time at which its next request starts. The tenant with the earliest start is served,
and its following request starts later by the tokens of the served one divided by the tenant's weight. Within a tenant
the highest priority comes first, and then the earliest arrival. The rule is from P. Goyal, H. Vin, H. Cheng, Start-time
Fair Queuing, SIGCOMM 1996.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class FairQueueEntry(Generic[T]):
    """One waiting item of the queue.

    tokens  size of its prompt, which counts towards the limit on waiting tokens
    cost    tokens that it takes of its tenant's share; 0 for an item that was served before and came back
    rank    position within its tenant: by priority, then by arrival
    """

    item: T
    tenant: str
    tokens: int
    cost: int
    rank: tuple[int, int]


class FairQueue(Generic[T]):
    """Bounded queue that serves tenants by their weighted shares.

    weights       of the tenants whose weight is not 1; all are positive
    max_requests  maximum number of waiting items
    max_tokens    maximum number of waiting prompt tokens
    """

    def __init__(self, weights: Mapping[str, float], max_requests: int, max_tokens: int) -> None:
        assert all(weight > 0 for weight in weights.values()), "weights are above 0"
        self.tokens = 0
        self.weights = weights
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._waiting: dict[str, list[FairQueueEntry[T]]] = {}  # by tenant, next first; no tenant has an empty list
        self._starts: dict[str, float] = {}  # virtual start of each waiting tenant's next entry
        self._ends: dict[str, float] = {}  # virtual end of each tenant's last served entry, while in the future
        self._now = 0.0  # virtual time: the start of the entry that was served last
        self._order = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[FairQueueEntry[T]]:
        """Iterate over all waiting entries in no particular order."""
        return itertools.chain.from_iterable(self._waiting.values())

    def push(
        self, item: T, tenant: str, tokens: int, *, priority: int = 0, is_retry: bool = False
    ) -> tuple[FairQueueEntry[T] | None, list[FairQueueEntry[T]]]:
        """Add an item; return its entry and the entries of other tenants that were evicted for it.

        The entry is None if the queue is full and no tenant holds more of its share than this one would. An item with
        more tokens than may wait is queued alone.

        is_retry  the item was served before and returns to the front of its priority at no cost
        """
        entry = FairQueueEntry(
            item, tenant, tokens, 0 if is_retry else tokens, (-priority, -1 if is_retry else next(self._order))
        )
        evicted: list[FairQueueEntry[T]] = []
        while len(self) >= self.max_requests or (self.tokens and self.tokens + tokens > self.max_tokens):
            largest = max(self._waiting, key=self._weighted_tokens, default=tenant)
            if largest == tenant or self._weighted_tokens(largest) <= self._weighted_tokens(
                tenant
            ) + tokens / self._weight(tenant):
                for each in evicted:  # restore the entries that were evicted in vain
                    self._insert(each)
                return None, []
            evicted.append(last := self._waiting[largest][-1])
            self.remove(last)
        self._insert(entry)
        return entry, evicted

    def head(self) -> FairQueueEntry[T] | None:
        """Return the entry whose turn it is, or None if the queue is empty."""
        if not self._waiting:
            return None
        return self._waiting[min(self._starts, key=self._starts.__getitem__)][0]

    def in_turn(self) -> Iterator[FairQueueEntry[T]]:
        """Yield all entries in the order in which they would be served. The queue must not change meanwhile."""
        starts = [(start, at, tenant, 0) for at, (tenant, start) in enumerate(self._starts.items())]
        heapify(starts)
        while starts:
            start, at, tenant, number = heappop(starts)
            waiting = self._waiting[tenant]
            yield waiting[number]
            if number + 1 < len(waiting):
                heappush(starts, (start + waiting[number].cost / self._weight(tenant), at, tenant, number + 1))

    def pop(self) -> FairQueueEntry[T]:
        """Serve the head of the queue and return it."""
        entry = self.head()
        assert entry is not None, "somebody waits"
        self.take(entry)
        return entry

    def take(self, entry: FairQueueEntry[T]) -> None:
        """Serve this entry now, before others: charge its cost to its tenant, whose next entry starts later."""
        start = self._starts[entry.tenant]
        self._now = max(self._now, start)
        self._ends[entry.tenant] = start + entry.cost / self._weight(entry.tenant)
        self.remove(entry)
        if entry.tenant in self._starts:
            self._starts[entry.tenant] = self._ends[entry.tenant]
        if not self._waiting:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def remove(self, entry: FairQueueEntry[T]) -> None:
        """Remove an entry without charging its tenant; an entry that is not queued is ignored."""
        waiting = self._waiting.get(entry.tenant, [])
        if entry not in waiting:
            return
        waiting.remove(entry)
        self.tokens -= entry.tokens
        if not waiting:
            del self._waiting[entry.tenant], self._starts[entry.tenant]

    def _insert(self, entry: FairQueueEntry[T]) -> None:
        tenant = entry.tenant
        if tenant not in self._waiting:
            self._waiting[tenant] = []
            self._starts[tenant] = max(self._now, self._ends.get(tenant, 0.0))
        insort(self._waiting[tenant], entry, key=lambda each: each.rank)
        self.tokens += entry.tokens

    def _weighted_tokens(self, tenant: str) -> float:
        """Return the waiting tokens of a tenant divided by its weight."""
        return sum(entry.tokens for entry in self._waiting.get(tenant, ())) / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)
