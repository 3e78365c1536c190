"""Swapper of the first process of a divided model, which copies KV blocks between the device and the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import EngineLost
from ...execution.copier import Copier, DeviceEvent
from ...execution.step_plan import StepPlan
from ...execution.swapper import Swapper
from .copy_tracker import TrackedCopyEvent
from .follower_group import FollowerGroup


class ParallelSwapper(Swapper):
    """Swapper that copies its own part of blocks and lets the other processes copy theirs, in the order of their steps.

    parts  parts of this process's KV
    """

    def __init__(self, parts: Sequence[torch.Tensor], copier: Copier, num_blocks: int, group: FollowerGroup) -> None:
        super().__init__(parts, copier, num_blocks)
        self._group, self._at_once = group, not copier.apart

    def swap(self, plan: StepPlan) -> None:
        """Copy a plan's blocks in every process. Raises EngineLost, since a copy that only some processes have made is
        useless.
        """
        try:
            self._group.copy(plan)
            super().swap(plan)
            if self._at_once:
                self.forget()
        except Exception as error:
            fault = self._group.end(error)
            raise EngineLost(f"the processes of the model cannot go on: {fault}") from error

    def mark(self) -> DeviceEvent:
        """Return a mark of the end of all copies of KV blocks so far, in every process of the model."""
        return _CombinedEvent(super().mark(), TrackedCopyEvent(self._group.copies, self._group.copies.num_requested))


@dataclass(frozen=True, slots=True)
class _CombinedEvent:
    """Mark of the end of both the own copies and those of the other processes. Implements `DeviceEvent`."""

    own: DeviceEvent
    others: DeviceEvent

    def wait(self) -> None:
        self.own.wait()
        self.others.wait()
