"""Counts of the sequences of each priority that an ingress has sent: could one more displace a lower one?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ....replicas.types import Request


class InflightPriorities:
    """Counter of the choices of requests by priority, from when a request is sent until it ends."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    @contextmanager
    def sent(self, request: Request) -> Iterator[None]:
        """Count a request's choices while the context is open."""
        priority, choices = request.priority, request.sampling.n
        self._sent[priority] += choices
        try:
            yield
        finally:
            self._sent[priority] -= choices
            if not self._sent[priority]:
                del self._sent[priority]

    @property
    def lowest(self) -> int | None:
        """Lowest priority of all requests under way; None if there are none."""
        return min(self._sent, default=None)

    def count_at_least(self, priority: int) -> int:
        """Return how many sequences under way have at least this priority, and so would not be displaced by it."""
        return sum(count for each, count in self._sent.items() if each >= priority)
