"""What stays on the device between steps: the token each sequence has sampled last, and its block table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..plan import PlanItem
from ..protocol import BLOCK_TOKENS
from .accelerator import Accelerator
from .rows import Rows


class DeviceState:
    """last    int64 [rows + 1]
    tables     int32 [rows + 1, blocks of the longest context]

    The last row, and KV block `padding_block`, which is nobody's, are for the padding of graphs.
    """

    def __init__(self, accelerator: Accelerator, max_running: int, longest_blocks: int, padding_block: int) -> None:
        self.rows = Rows(max_running)
        self.padding_row = self.rows.count
        self.padding_block = padding_block
        device = accelerator.device
        self.last = torch.zeros(self.rows.count + 1, dtype=torch.int64, device=device)
        self.tables = torch.full((self.rows.count + 1, longest_blocks), padding_block, dtype=torch.int32, device=device)
        self._accelerator = accelerator

    def take(self, items: Sequence[PlanItem]) -> list[int]:
        """The rows of these items' sequences."""
        return self.rows.take(item.sequence_id for item in items)

    def bring_tables(self, items: Sequence[PlanItem], rows: Sequence[int]) -> None:
        """See that the device has all blocks of each item but those of its new tokens, which the step itself writes."""
        for item, row in zip(items, rows, strict=True):
            written = self.rows.written[row]
            if item.blocks is written:
                continue
            known = item.start // BLOCK_TOKENS
            if item.blocks[:known] != written[:known]:
                values = torch.tensor(item.blocks, dtype=torch.int32)
                self._accelerator.submit(partial(self._write_table, row, values))

    def have_tables(self, items: Sequence[PlanItem], rows: Sequence[int]) -> None:
        """The step that writes the last ones was submitted."""
        for item, row in zip(items, rows, strict=True):
            self.rows.written[row] = item.blocks

    def _write_table(self, row: int, values: torch.Tensor) -> None:
        self.tables[row, : len(values)] = self._accelerator.moved(values)
