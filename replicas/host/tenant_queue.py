"""Queue in which tenants take turns, so that no tenant's requests delay the others' for long."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Queue that is first come, first served within a tenant, and takes one item of each tenant in turn. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # by tenant, in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> int:
        """Return how many items of this tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def put(self, tenant: str, item: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> T | None:
        """Return the next item, whose tenant then has its turn last; None if the queue is empty."""
        if not self._waiting:
            return None
        tenant, own = self._waiting.popitem(last=False)
        first = own.popleft()
        if own:
            self._waiting[tenant] = own
        return first
