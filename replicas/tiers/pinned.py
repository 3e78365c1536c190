"""Memory of the host that a device reads by itself, and bytes on their way through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ..gpu.accelerator import Copier, Mark
from ..gpu.swapper import SLAB_BYTES, pinned_bytes, power_of_two
from .plan import PAGE

__all__ = ["Landing", "NotPinned", "Shelves", "aligned", "shelves_bytes"]


class NotPinned(Exception):
    """The host does not pin so much."""


def aligned(copier: Copier, size: int) -> torch.Tensor:
    """uint8 [size] that begins with a page. Raises RuntimeError where the host does not pin so much."""
    memory = copier.staging(size + PAGE)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + size]


class Shelves:
    """Some bytes after the others, in slabs: pinned memory comes in powers of two, whatever is asked for."""

    def __init__(self, copier: Copier, nbytes: int) -> None:
        """Raises RuntimeError where the host does not pin so much."""
        self._slabs = [copier.staging(min(SLAB_BYTES, nbytes - begin)) for begin in range(0, nbytes, SLAB_BYTES)]
        self._end = 0

    def put(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """A copy of uint8 [N], in pieces."""
        pieces, at = [], 0
        while at < len(values):
            slab, begin = divmod(self._end, SLAB_BYTES)
            count = min(SLAB_BYTES - begin, len(values) - at)
            piece = self._slabs[slab][begin : begin + count]
            piece.copy_(values[at : at + count])
            pieces.append(piece)
            self._end += count
            at += count
        return pieces


def shelves_bytes(pinned: Iterable[Sequence[torch.Tensor]], more: int) -> int:
    """What slabs take that have any of these pieces, and those of `more` bytes beside them."""
    slabs = [piece.untyped_storage() for pieces in pinned for piece in pieces]
    found = {slab.data_ptr(): slab.nbytes() for slab in slabs}
    return sum(map(power_of_two, found.values())) + pinned_bytes(more, 1)


class Landing:
    """From any memory of the host to the device, through two buffers: one is filled while the other is copied."""

    def __init__(self, copier: Copier, size: int = SLAB_BYTES) -> None:
        """Raises RuntimeError where the host does not pin so much."""
        self._copier, self._size = copier, size
        self._buffers: list[tuple[torch.Tensor, Mark | None]] = [(copier.staging(size), None) for _ in range(2)]
        self._last: Mark | None = None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """There once `land` was called."""
        there = torch.empty(values.shape, dtype=values.dtype, device=self._copier.device)
        to, of = (each.view(-1).view(torch.uint8) for each in (there, values))
        fresh = self._copier.mark()  # of memory that work before it may have had
        for begin in range(0, len(of), self._size):
            part = of[begin : begin + self._size]
            buffer, copied = self._buffers.pop(0)
            if copied is not None:
                copied.wait()
            buffer[: len(part)].copy_(part)
            work = partial(_copy, to[begin : begin + len(part)], buffer[: len(part)])
            self._last = self._copier.copy(work, fresh)
            self._buffers.append((buffer, self._last))
        return there

    def land(self) -> None:
        """All that was moved is there."""
        if self._last is not None:
            self._last.wait()


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    to.copy_(of, non_blocking=True)
