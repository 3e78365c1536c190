"""The swapper of the first process of a divided model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import EngineLost
from ..gpu.accelerator import Copier, Mark
from ..gpu.swapper import Swapper
from ..plan import StepPlan
from .copies import Copied
from .group import Group

__all__ = ["SharedSwapper"]


class SharedSwapper(Swapper):
    """Copies its own part of blocks; the other processes are told to copy theirs, in the order of what they compute.

    parts  of its own KV
    """

    def __init__(self, parts: Sequence[torch.Tensor], copier: Copier, num_blocks: int, group: Group) -> None:
        super().__init__(parts, copier, num_blocks)
        self._group, self._at_once = group, not copier.apart

    def swap(self, plan: StepPlan) -> None:
        """Raises EngineLost: a copy that some have made and others have not is of no use to anybody."""
        try:
            self._group.copy(plan)
            super().swap(plan)
            if self._at_once:
                self.forget()
        except Exception as error:
            fault = self._group.end(error)
            raise EngineLost(f"the model is not whole any more: {fault}") from error

    def mark(self) -> Mark:
        """Of the end of all of them, in every process."""
        return _Both(super().mark(), Copied(self._group.copies, self._group.copies.asked))


@dataclass(frozen=True, slots=True)
class _Both:
    """Implements `Mark`."""

    own: Mark
    others: Mark

    def wait(self) -> None:
        self.own.wait()
        self.others.wait()
