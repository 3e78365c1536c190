"""Changes to the logits of single tokens: a bias is added, or the logit becomes minus infinity."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..execution.step_plan import MAX_BIASED, SampleSpec
from .accelerator import Accelerator
from .packed_transfer import PackedTransfer

BiasTensors = tuple[torch.Tensor, torch.Tensor]  # ids int64 [R, MAX_BIASED], values fp32 to add; padded with 0 for id 0

_FIELDS = {"id": torch.int64, "value": torch.float32}


class LogitBiases:
    """Biases of at most `rows` rows, in memory of the device that all steps share.

    A token with both a bias and minus infinity has minus infinity, in whatever order they are added.
    """

    def __init__(self, accelerator: Accelerator, rows: int) -> None:
        self._packed = PackedTransfer(accelerator, rows * MAX_BIASED, _FIELDS)

    def there(self, rows: int) -> BiasTensors:
        """Return the biases of the first `rows` rows on the device."""
        ids, values = (self._packed.there[name][: rows * MAX_BIASED].view(rows, MAX_BIASED) for name in _FIELDS)
        return ids, values

    def send(self, specs: Sequence[SampleSpec], size: int) -> None:
        """Copy the biases of `specs` to the device, padded with none to `size` rows."""
        turn = self._packed.turn()
        ids, values = turn.here["id"], turn.here["value"]
        ids[: size * MAX_BIASED] = 0
        values[: size * MAX_BIASED] = 0
        for row, spec in enumerate(specs):
            if spec.biased:
                at, bias, last = row * MAX_BIASED, spec.params.biases, spec.suppressed
                middle, end = at + len(bias), at + len(bias) + len(last)
                ids[at:end] = [*bias, *last]
                values[at:middle], values[middle:end] = list(bias.values()), float("-inf")
        self._packed.send(turn)
