"""Where on the device a sequence has its own: the token sampled last, its block table, its history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Rows:
    """A number for each sequence that took part in one of the latest steps. Pure.

    A sequence of this step or the one before keeps its row: its token may be there and nowhere else yet. With twice
    as many rows as sequences in a step there is always one to be had.

    written  by row: the blocks that the device's table has there, as far as the steps launched will have it
    counted  by row: tokens of the output that the device's history has there, likewise; None: it is another's
    """

    def __init__(self, max_running: int) -> None:
        self.count = 2 * max_running
        self.written: list[tuple[int, ...]] = [()] * self.count
        self.counted: list[int | None] = [None] * self.count
        self._of: OrderedDict[int, int] = OrderedDict()  # sequence -> row, those used last come last
        self._free = list(range(self.count))
        self._latest: tuple[list[int], list[int]] = [], []  # sequences of the latest step, and their rows

    def take(self, sequences: Iterable[int]) -> list[int]:
        """The rows of a step's sequences; those of others are given up as needed, the least recently used first."""
        wanted = list(sequences)
        if wanted == self._latest[0]:
            return list(self._latest[1])
        for sequence in wanted:
            if sequence in self._of:
                self._of.move_to_end(sequence)
        rows = []
        for sequence in wanted:
            row = self._of.get(sequence)
            if row is None:
                row = self._of[sequence] = self._free.pop() if self._free else self._of.popitem(last=False)[1]
                self.written[row], self.counted[row] = (), None
            rows.append(row)
        self._latest = wanted, list(rows)
        return rows
