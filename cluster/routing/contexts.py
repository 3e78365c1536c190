"""How long the contexts of replicas are, and how long one a request needs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...replicas.protocol import Request

__all__ = ["Contexts", "least", "whole"]


def least(request: Request) -> int:
    """Tokens that a context must hold for the request to begin, or to go on with what has been made of it."""
    prompt = len(request.prompt_ids)
    if request.pooling is not None:
        return prompt
    if not request.output_ids:
        return prompt + max(1, request.sampling.min_tokens)
    most = request.sampling.max_tokens or math.inf
    made = max(min(len(ids) + 1, most) for ids in request.output_ids)
    return prompt + int(max(made, request.sampling.min_tokens))


def whole(request: Request) -> float:
    """Tokens that it may come to; infinite: until some context is full."""
    prompt = len(request.prompt_ids)
    return prompt if request.pooling is not None else prompt + (request.sampling.max_tokens or math.inf)


class Contexts:
    """Of replicas that may be chosen, by their rows of the directory.

    version  another as soon as there are others
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by row
        self._rows: dict[int, set[int]] = {}  # by length, none without any
        self.least = self.longest = self.version = 0

    def come(self, row: int, length: int) -> None:
        """Nothing is done for one that is there."""
        if row in self._lengths:
            return
        self._lengths[row] = length
        self._rows.setdefault(length, set()).add(row)
        self._measure()

    def leave(self, row: int) -> None:
        """Nothing is done for one that is not there."""
        length = self._lengths.pop(row, None)
        if length is None:
            return
        self._rows[length].discard(row)
        if not self._rows[length]:
            del self._rows[length]
        self._measure()

    def shorter(self, than: float) -> Sequence[int]:
        """Rows of those that hold fewer tokens."""
        if than <= self.least:
            return ()
        return [row for length, rows in self._rows.items() if length < than for row in rows]

    def _measure(self) -> None:
        self.version += 1
        self.least, self.longest = min(self._rows, default=0), max(self._rows, default=0)
