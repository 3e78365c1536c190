"""A line in which tenants take turns, so that what one asks for holds up no other for long."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["TenantLine"]

T = TypeVar("T")


class TenantLine(Generic[T]):
    """First come, first served within a tenant; each tenant has one of its own taken in turn. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # by tenant; whose turn is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, tenant: str) -> int:
        """How many of this tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def put(self, tenant: str, item: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> T | None:
        """The next one, whose tenant then is the last; None if nobody waits."""
        if not self._waiting:
            return None
        tenant, own = self._waiting.popitem(last=False)
        first = own.popleft()
        if own:
            self._waiting[tenant] = own
        return first
