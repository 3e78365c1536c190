"""Vectors of a step that are copied between host and device in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from ..execution.copier import DeviceEvent
from .accelerator import Accelerator

NUM_SLOTS = 2  # most steps in flight

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class PackedTransfer:
    """Vectors of `size` numbers each: one copy on the device, and on the host one for each step that may be in flight.

    there  vectors on the device by name: the same memory for every step, so that a graph may read and write it
    """

    def __init__(self, accelerator: Accelerator, size: int, fields: Mapping[str, torch.dtype]) -> None:
        ordered = sorted(fields.items(), key=lambda field: -field[1].itemsize)  # so that each vector is aligned
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        end = 0
        for name, dtype in ordered:
            self._places[name] = (end, end + size * dtype.itemsize, dtype)
            end += size * dtype.itemsize
        self._accelerator = accelerator
        self._device = torch.zeros(end, dtype=torch.uint8, device=accelerator.device)
        self.there = {name: self._device[a:b].view(dtype) for name, (a, b, dtype) in self._places.items()}
        self._turns = [TransferSlot(accelerator.staging(end), self._places) for _ in range(NUM_SLOTS)]
        self._next = 0

    def turn(self) -> TransferSlot:
        """Return the host's copy for the next step, once the device does not use it any more."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        if turn.used is not None:
            turn.used.wait()
        return turn

    def send(self, turn: TransferSlot) -> None:
        """Submit a copy to the device. `turn` must not be changed until `PackedTransfer.turn` returns it again, since
        it is read when the device reaches the copy.
        """
        self._accelerator.submit(partial(_copy, self._device, turn.raw))
        turn.used = self._accelerator.mark()

    def fetch(self, turn: TransferSlot) -> DeviceEvent:
        """Submit a copy from the device, and return the mark after which the host has it."""
        self._accelerator.submit(partial(_copy, turn.raw, self._device))
        turn.used = self._accelerator.mark()
        return turn.used


class TransferSlot:
    """Host's copy of the vectors for one step.

    here  numpy arrays by name
    used  mark after which the device does not use it any more
    said  values that parts of it were last written from, to skip equal ones
    """

    def __init__(self, raw: torch.Tensor, places: Mapping[str, tuple[int, int, torch.dtype]]) -> None:
        self.raw = raw
        self.used: DeviceEvent | None = None
        self.said: object = None
        array = raw.numpy()
        self.here = {name: array[a:b].view(_NUMPY[dtype]) for name, (a, b, dtype) in places.items()}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
