"""Rows of the device's state that sequences have: for the token sampled last, the block table and the history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SequenceRows:
    """Row number of each sequence that took part in one of the latest steps. Pure.

    A sequence of this step or the one before keeps its row, since its last token may be known to the device only. There
    are twice as many rows as sequences in a step, so that one is always available.

    written  for each row the blocks that its table on the device has once the steps launched so far are done
    counted  for each row the number of output tokens that its history on the device has then; None if it is another
             sequence's
    """

    def __init__(self, max_running: int) -> None:
        self.count = 2 * max_running
        self.written: list[tuple[int, ...]] = [()] * self.count
        self.counted: list[int | None] = [None] * self.count
        self._of: OrderedDict[int, int] = OrderedDict()  # row of each sequence, the most recently used last
        self._free = list(range(self.count))
        self._latest: tuple[list[int], list[int]] = [], []  # sequences of the latest step, and their rows

    def take(self, sequences: Iterable[int]) -> list[int]:
        """Return the rows of a step's sequences; rows of other sequences are reused as needed, the least recently used
        first.
        """
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
