"""State that stays on the device between steps: each sequence's last token, its block table, and its history of tokens
where penalties need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..execution.step_plan import PlanItem, SampleSpec
from ..types import BLOCK_TOKENS
from .accelerator import Accelerator
from .sequence_rows import SequenceRows


def history_dtype(max_model_len: int) -> torch.dtype:
    """Return the dtype of token histories (how often a token is in an output, and whether it is in the prompt), which
    must hold counts up to the context length.
    """
    return torch.int16 if max_model_len <= 2**15 else torch.int32


class DeviceState:
    """Tensors on the device with a row for each sequence.

    last     int64 [rows + 1], the token sampled last
    tables   int32 [rows + 1, blocks of the longest context]
    history  int16 or int32 [rows + 1, vocabulary], counts of tokens for penalties, as `DeviceOps.penalised` reads them;
             allocated by the work that `keep_history` submits

    The last row, and KV block `padding_block`, which no sequence has, are for the padding of graphs.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        max_running: int,
        longest_blocks: int,
        padding_block: int,
        vocab_size: int,
        history: torch.dtype,
    ) -> None:
        self.rows = SequenceRows(max_running)
        self.padding_row = self.rows.count
        self.padding_block = padding_block
        self.vocab_size = vocab_size
        device = accelerator.device
        self.last = torch.zeros(self.rows.count + 1, dtype=torch.int64, device=device)
        self.tables = torch.full((self.rows.count + 1, longest_blocks), padding_block, dtype=torch.int32, device=device)
        self._shape = (self.rows.count + 1, vocab_size), history
        self._history: torch.Tensor | None = None
        self._keeping = False
        self._accelerator = accelerator

    def take(self, items: Sequence[PlanItem]) -> list[int]:
        """Return the rows of the device's state that these items' sequences have."""
        return self.rows.take(item.sequence_id for item in items)

    def bring_tables(self, items: Sequence[PlanItem], rows: Sequence[int]) -> None:
        """Submit updates so that the device has each item's block table, except blocks of new tokens, which the step
        itself writes.
        """
        for item, row in zip(items, rows, strict=True):
            written = self.rows.written[row]
            if item.blocks is written:
                continue
            num_written = item.start // BLOCK_TOKENS
            if item.blocks[:num_written] != written[:num_written]:
                values = torch.tensor(item.blocks, dtype=torch.int32)
                self._accelerator.submit(partial(self._write_table, row, values))

    def have_tables(self, items: Sequence[PlanItem], rows: Sequence[int]) -> None:
        """Record that the step which writes these items' last blocks to their tables was submitted."""
        for item, row in zip(items, rows, strict=True):
            self.rows.written[row] = item.blocks

    @property
    def history(self) -> torch.Tensor:
        assert self._history is not None, "work runs in order"
        return self._history

    def keep_history(self) -> None:
        """Submit the allocation of the history, once: its memory is taken when penalties are first asked for."""
        if not self._keeping:
            self._accelerator.submit(self._allocate)
            self._keeping = True

    def bring_history(self, pairs: Sequence[tuple[int, SampleSpec]]) -> None:
        """Submit updates so that the device has the history of each sequence, up to the token that the step will
        sample.

        The host knows all tokens that the device's history may lack: a token that only the device knows was counted by
        the step that sampled it.
        """
        self.keep_history()
        counted = self.rows.counted
        for row, spec in pairs:
            if counted[row] != spec.position:
                output = torch.tensor(spec.output_ids[: spec.position], dtype=torch.int64)
                assert len(output) == spec.position, "what the device counts it has counted"
                prompt = torch.tensor(spec.prompt_ids, dtype=torch.int64)
                self._accelerator.submit(partial(self._write_history, row, prompt, output))
            counted[row] = None  # until the step that counts the next token is launched, since that may fail

    def have_history(self, pairs: Sequence[tuple[int, SampleSpec]]) -> None:
        """Record that the step which counts the next token of each sequence was submitted."""
        for row, spec in pairs:
            self.rows.counted[row] = spec.position + 1

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count sampled tokens, int64 [R], in the rows `places`, int64 [R], of the history, as work of the device."""
        history = self.history
        at = places * history.shape[1] + tokens
        numbers = history.view(-1)
        numbers[at] = numbers[at] + 1

    def _allocate(self) -> None:
        shape, dtype = self._shape
        self._history = torch.zeros(shape, dtype=dtype, device=self._accelerator.device)

    def _write_history(self, row: int, prompt: torch.Tensor, output: torch.Tensor) -> None:
        numbers = self.history[row]
        numbers.zero_()
        numbers.index_fill_(0, self._accelerator.moved(prompt), torch.iinfo(numbers.dtype).min)
        if len(output):
            output = self._accelerator.moved(output)
            numbers.index_add_(0, output, torch.ones_like(output, dtype=numbers.dtype))

    def _write_table(self, row: int, values: torch.Tensor) -> None:
        self.tables[row, : len(values)] = self._accelerator.moved(values)
