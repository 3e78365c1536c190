"""How many sequences of each priority an ingress has sent: whether one more would find a lower one to give way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ...replicas.protocol import Request

__all__ = ["Priorities"]


class Priorities:
    """Counts choices of requests, from when they are sent until they end."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()

    @contextmanager
    def sent(self, request: Request) -> Iterator[None]:
        """While its caller is within."""
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
        """Of what is on its way; None: nothing is."""
        return min(self._sent, default=None)

    def not_below(self, priority: int) -> int:
        """How many are on their way that would not give way to it."""
        return sum(count for each, count in self._sent.items() if each >= priority)
