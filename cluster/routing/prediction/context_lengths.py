"""Context lengths of replicas, and the context length that a request needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....replicas.types import Request


def min_context_tokens(request: Request) -> int:
    """Return the tokens that a context must hold for a request to begin, or to continue after its output so far."""
    prompt = len(request.prompt_ids)
    if request.pooling is not None:
        return prompt
    if not request.output_ids:
        return prompt + max(1, request.sampling.min_tokens)
    max_tokens = request.sampling.max_tokens or math.inf
    made = max(min(len(ids) + 1, max_tokens) for ids in request.output_ids)
    return prompt + int(max(made, request.sampling.min_tokens))


def max_context_tokens(request: Request) -> float:
    """Return the tokens that a request may come to; infinite if it may run until a context is full."""
    prompt = len(request.prompt_ids)
    return prompt if request.pooling is not None else prompt + (request.sampling.max_tokens or math.inf)


class ContextLengths:
    """Context lengths of the replicas that may be chosen, by their rows in the `LatencyModel`.

    version  counter that changes with every replica that is added or removed
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by row
        self._rows: dict[int, set[int]] = {}  # by length; no length has an empty set
        self.shortest = self.longest = self.version = 0

    def add(self, row: int, length: int) -> None:
        """Add a replica; a row that is already there is left as it is."""
        if row in self._lengths:
            return
        self._lengths[row] = length
        self._rows.setdefault(length, set()).add(row)
        self._measure()

    def remove(self, row: int) -> None:
        """Remove a replica; a row that is not there is ignored."""
        length = self._lengths.pop(row, None)
        if length is None:
            return
        self._rows[length].discard(row)
        if not self._rows[length]:
            del self._rows[length]
        self._measure()

    def shorter(self, than: float) -> Sequence[int]:
        """Return the rows of replicas whose contexts hold fewer tokens than `than`."""
        if than <= self.shortest:
            return ()
        return [row for length, rows in self._rows.items() if length < than for row in rows]

    def _measure(self) -> None:
        self.version += 1
        self.shortest, self.longest = min(self._rows, default=0), max(self._rows, default=0)
