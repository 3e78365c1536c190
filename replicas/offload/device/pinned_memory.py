"""Pinned memory of the host, which a device can read by itself, and copies that go through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ...execution.copier import Copier, DeviceEvent
from ...execution.swapper import SLAB_BYTES, pinned_bytes, round_up_to_power_of_two
from ..planning.disk_plan import PAGE_BYTES


class PinningError(Exception):
    """Error that the host cannot pin as much memory as was asked for."""


def allocate_page_aligned(copier: Copier, size: int) -> torch.Tensor:
    """Return pinned memory, uint8 [size], that begins at a page. Raises RuntimeError where the host does not pin that
    much.
    """
    memory = copier.staging(size + PAGE_BYTES)
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + size]


class PinnedSlabs:
    """Pinned memory for pieces of bytes, one after the other, in slabs, since pinned memory is allocated in powers of
    two.
    """

    def __init__(self, copier: Copier, nbytes: int) -> None:
        """Allocate `nbytes` bytes. Raises RuntimeError where the host does not pin that much."""
        self._slabs = [copier.staging(min(SLAB_BYTES, nbytes - begin)) for begin in range(0, nbytes, SLAB_BYTES)]
        self._end = 0

    def put(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Copy a tensor uint8 [N] to the end of what is stored, and return the copy in pieces, one for each slab that
        it reaches.
        """
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


def pinned_slab_bytes(pinned: Iterable[Sequence[torch.Tensor]], more: int) -> int:
    """Bytes of pinned memory that all slabs with any of these pieces take, and those for `more` bytes besides."""
    slabs = [piece.untyped_storage() for pieces in pinned for piece in pieces]
    found = {slab.data_ptr(): slab.nbytes() for slab in slabs}
    return sum(map(round_up_to_power_of_two, found.values())) + pinned_bytes(more, 1)


class DeviceUploader:
    """Copies from any memory of the host to the device through two pinned buffers: one is filled while the other is
    copied.
    """

    def __init__(self, copier: Copier, size: int = SLAB_BYTES) -> None:
        """Allocate two buffers of `size` bytes. Raises RuntimeError where the host does not pin that much."""
        self._copier, self._size = copier, size
        self._buffers: list[tuple[torch.Tensor, DeviceEvent | None]] = [(copier.staging(size), None) for _ in range(2)]
        self._last: DeviceEvent | None = None

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor and return it on the device, where its values are valid once `land` has returned."""
        there = torch.empty(values.shape, dtype=values.dtype, device=self._copier.device)
        to, of = (each.view(-1).view(torch.uint8) for each in (there, values))
        fresh = self._copier.mark()  # work submitted before may still use the memory that was allocated here
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
        """Wait until all copies to the device have ended."""
        if self._last is not None:
            self._last.wait()


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    to.copy_(of, non_blocking=True)
