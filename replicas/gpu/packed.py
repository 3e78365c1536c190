"""Numbers of a step that cross between host and device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from .accelerator import Accelerator, Mark

TURNS = 2  # steps on their way at a time

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class Packed:
    """Vectors of `size` numbers each: once on the device, and as often on the host as steps may be on their way.

    there  by name, on the device: the same memory for every step, so that a graph may read and write it
    """

    def __init__(self, accelerator: Accelerator, size: int, fields: Mapping[str, torch.dtype]) -> None:
        ordered = sorted(fields.items(), key=lambda field: -field[1].itemsize)  # each at a multiple of its own size
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        end = 0
        for name, dtype in ordered:
            self._places[name] = (end, end + size * dtype.itemsize, dtype)
            end += size * dtype.itemsize
        self._accelerator = accelerator
        self._device = torch.zeros(end, dtype=torch.uint8, device=accelerator.device)
        self.there = {name: self._device[a:b].view(dtype) for name, (a, b, dtype) in self._places.items()}
        self._turns = [Turn(accelerator.staging(end), self._places) for _ in range(TURNS)]
        self._next = 0

    def turn(self) -> Turn:
        """The host's copy for the next step, once the device is done with it."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % TURNS
        if turn.used is not None:
            turn.used.wait()
        return turn

    def send(self, turn: Turn) -> None:
        """To the device, as it will be when the device comes to it: leave it alone until `turn` gives it again."""
        self._accelerator.submit(partial(_copy, self._device, turn.raw))
        turn.used = self._accelerator.mark()

    def fetch(self, turn: Turn) -> Mark:
        """From the device; there after the mark."""
        self._accelerator.submit(partial(_copy, turn.raw, self._device))
        turn.used = self._accelerator.mark()
        return turn.used


class Turn:
    """here: by name, on the host. used: when the device is done with it. said: what some of it was written from."""

    def __init__(self, raw: torch.Tensor, places: Mapping[str, tuple[int, int, torch.dtype]]) -> None:
        self.raw = raw
        self.used: Mark | None = None
        self.said: object = None
        array = raw.numpy()
        self.here = {name: array[a:b].view(_NUMPY[dtype]) for name, (a, b, dtype) in places.items()}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
