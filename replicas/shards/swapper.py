"""The swapper of the first process of a divided model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.ops import Ops
from ..errors import EngineLost
from ..gpu.accelerator import AtOnce, Mark
from ..gpu.swapper import Swapper
from ..plan import StepPlan
from .copies import Copied
from .group import Group

__all__ = ["SharedSwapper", "shared_swapper"]


def shared_swapper(
    group: Group, ops: Ops, kv: Sequence[torch.Tensor], num_blocks: int
) -> tuple[SharedSwapper | None, str]:
    """For so many blocks of the host, all of them a prefix store's; and why preempted sequences have none."""
    why = "by computing again: that of several processes is not kept on the host so far"
    parts = [part for cache in kv for part in ops.kv_parts(cache)]
    return SharedSwapper(parts, num_blocks, group) if num_blocks else None, why


class SharedSwapper(Swapper):
    """Copies its own part of blocks; the other processes are told to copy theirs, in the order of what they compute.

    parts  of its own KV
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_blocks: int, group: Group) -> None:
        super().__init__(parts, AtOnce(), num_blocks)
        self._group = group

    def swap(self, plan: StepPlan) -> None:
        """Raises EngineLost: a copy that some have made and others have not is of no use to anybody."""
        try:
            self._group.copy(plan)
            super().swap(plan)
            self.forget()
        except Exception as error:
            self._group.lose()
            raise EngineLost(f"the model is not whole any more: {error}") from error

    def mark(self) -> Mark:
        return Copied(self._group.copies, self._group.copies.asked)
