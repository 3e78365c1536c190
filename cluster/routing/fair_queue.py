"""Whose turn it is among tenants: start-time fair queueing in tokens. Pure, no clock.

Every tenant that waits has a virtual time at which its next request starts; the earliest is next, and the tenant's
following one starts later by the tokens of that one over the tenant's weight. Within a tenant the highest priority
comes first, and then who came first. The rule: P. Goyal, H. Vin, H. Cheng, Start-time Fair Queuing, SIGCOMM 1996.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

__all__ = ["Entry", "FairQueue"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """One that waits. cost: what it takes of its tenant's share; 0: it has had its turn and comes back."""

    item: T
    tenant: str
    tokens: int
    cost: int
    rank: tuple[int, int]


class FairQueue(Generic[T]):
    """`weights`: of tenants that have another than 1; all are above 0."""

    def __init__(self, weights: Mapping[str, float], max_requests: int, max_tokens: int) -> None:
        assert all(weight > 0 for weight in weights.values()), "weights are above 0"
        self.tokens = 0
        self.weights = weights
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._waiting: dict[str, list[Entry[T]]] = {}  # by tenant, next first; none without any
        self._starts: dict[str, float] = {}  # of the next of each tenant that waits
        self._ends: dict[str, float] = {}  # of the last that each tenant had, while that lies ahead
        self._now = 0.0  # virtual: where the last one started
        self._order = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Entry[T]]:
        """In no order."""
        return itertools.chain.from_iterable(self._waiting.values())

    def push(
        self, item: T, tenant: str, tokens: int, *, priority: int = 0, again: bool = False
    ) -> tuple[Entry[T] | None, list[Entry[T]]]:
        """Its entry, and those that leave for it; no entry: there is no room, and nobody has more than this tenant.

        A request with more tokens than may wait waits alone.
        """
        entry = Entry(item, tenant, tokens, 0 if again else tokens, (-priority, -1 if again else next(self._order)))
        left: list[Entry[T]] = []
        while len(self) >= self.max_requests or (self.tokens and self.tokens + tokens > self.max_tokens):
            greedy = max(self._waiting, key=self._held, default=tenant)
            if greedy == tenant or self._held(greedy) <= self._held(tenant) + tokens / self._weight(tenant):
                for each in left:  # they need not have left
                    self._insert(each)
                return None, []
            left.append(last := self._waiting[greedy][-1])
            self.remove(last)
        self._insert(entry)
        return entry, left

    def head(self) -> Entry[T] | None:
        """Whose turn it is."""
        if not self._waiting:
            return None
        return self._waiting[min(self._starts, key=self._starts.__getitem__)][0]

    def in_turn(self) -> Iterator[Entry[T]]:
        """All, in the order of their turns if nobody else came. Nobody may come or leave meanwhile."""
        starts = [(start, at, tenant, 0) for at, (tenant, start) in enumerate(self._starts.items())]
        heapify(starts)
        while starts:
            start, at, tenant, number = heappop(starts)
            waiting = self._waiting[tenant]
            yield waiting[number]
            if number + 1 < len(waiting):
                heappush(starts, (start + waiting[number].cost / self._weight(tenant), at, tenant, number + 1))

    def pop(self) -> Entry[T]:
        """The head, which has its turn now."""
        entry = self.head()
        assert entry is not None, "somebody waits"
        self.take(entry)
        return entry

    def take(self, entry: Entry[T]) -> None:
        """It has its turn now, before others: of its tenant's share, whose next one starts later."""
        start = self._starts[entry.tenant]
        self._now = max(self._now, start)
        self._ends[entry.tenant] = start + entry.cost / self._weight(entry.tenant)
        self.remove(entry)
        if entry.tenant in self._starts:
            self._starts[entry.tenant] = self._ends[entry.tenant]
        if not self._waiting:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def remove(self, entry: Entry[T]) -> None:
        """It waits no longer, and has had nothing. Nothing is done for one that waits no longer already."""
        waiting = self._waiting.get(entry.tenant, [])
        if entry not in waiting:
            return
        waiting.remove(entry)
        self.tokens -= entry.tokens
        if not waiting:
            del self._waiting[entry.tenant], self._starts[entry.tenant]

    def _insert(self, entry: Entry[T]) -> None:
        tenant = entry.tenant
        if tenant not in self._waiting:
            self._waiting[tenant] = []
            self._starts[tenant] = max(self._now, self._ends.get(tenant, 0.0))
        insort(self._waiting[tenant], entry, key=lambda each: each.rank)
        self.tokens += entry.tokens

    def _held(self, tenant: str) -> float:
        """What a tenant has waiting, by its weight."""
        return sum(entry.tokens for entry in self._waiting.get(tenant, ())) / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)
