"""Copies of KV blocks between a device and the host, made while steps run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from .block_copies import DirectBlockCopy, StagedBlockCopy
from .copier import Copier, DeviceEvent
from .step_plan import StepPlan

STAGING_BLOCKS = 8  # blocks of the device's memory in which copies are assembled, since long copies are faster
SLAB_BYTES = 2**26  # a power of two, since pinned memory is allocated in powers of two
_MEASURED_BLOCKS = 32

BlockPair = tuple[int, int]  # a block of the device and one of the host


class Swapper:
    """Copier of KV blocks. All copies run one after the other, so that the next may take or overwrite what one has left
    on the host.

    They are ordered against steps where blocks require it:

        out   reads what finished steps wrote, and waits for none. A step that overwrites such a block comes after.
        in    may write where a running step still writes for the previous owner: it comes after that step.
              A step that reads such a block comes after it.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        copier: Copier,
        num_blocks: int,
        staging: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Allocate the host's blocks.

        parts       views [blocks of the device, ...] that are together all of the KV
        num_blocks  number of blocks of the host
        staging     returns memory of the host, as `Copier.staging` does; None for the copier's own
        """
        staging = staging or copier.staging
        # Parts are sorted by the size of their numbers, so that each is aligned.
        self._order = sorted(range(len(parts)), key=lambda i: -parts[i].itemsize)
        self._shapes = [part.shape[1:] for part in parts]
        self._parts = [parts[i].view(len(parts[i]), -1) for i in self._order]
        ends = list(itertools.accumulate(part[0].nbytes for part in self._parts))
        self.num_blocks, self.block_bytes, self.device_blocks = num_blocks, ends[-1], len(self._parts[0])
        self._copier = copier
        self._per_slab = max(1, SLAB_BYTES // self.block_bytes)
        self._slabs = [
            staging(min(self._per_slab, num_blocks - start) * self.block_bytes).view(-1, self.block_bytes)
            for start in range(0, num_blocks, self._per_slab)
        ]
        moves = partial(StagedBlockCopy, copier, STAGING_BLOCKS) if copier.apart else DirectBlockCopy
        self._moves: StagedBlockCopy | DirectBlockCopy = moves(self._parts, self._slabs)
        self._pending: list[tuple[frozenset[int], DeviceEvent]] = []  # blocks of the device, in the order of the copies

    def swap(self, plan: StepPlan) -> None:
        """Submit a plan's copies of KV blocks and return before they are made (`SwappingRunner`); `order` makes steps
        wait for them.
        """
        for chunk in _chunks(plan.swap_out):
            self._submit(partial(self._moves.out, chunk), chunk, None)
        if plan.swap_in:
            before = self._copier.mark()
            for chunk in _chunks(plan.swap_in):
                self._submit(partial(self._moves.back, chunk), chunk, before)

    def order(self, plan: StepPlan) -> None:
        """Let what is submitted from now on run after the copies of blocks that the plan reads or writes."""
        if not self._pending:
            return
        touched = {block for item in plan.items for block in item.blocks}
        last = max((i for i, (blocks, _) in enumerate(self._pending) if not blocks.isdisjoint(touched)), default=None)
        if last is not None:
            self._copier.follow(self._pending[last][1])
            del self._pending[: last + 1]

    def mark(self) -> DeviceEvent:
        """Return a mark of the end of all copies of KV blocks so far."""
        return self._pending[-1][1] if self._pending else self._copier.copy(_nothing)

    def forget(self) -> None:
        """Forget the copies of KV blocks so far, which must all have ended."""
        self._pending = []

    def slabs(self) -> Iterator[list[torch.Tensor]]:
        """Yield the slabs of the host's blocks in order, each as views [blocks, ...] in the order and types of
        `parts`.
        """
        ends = list(itertools.accumulate(part[0].nbytes for part in self._parts))
        for slab in self._slabs:
            views: list[torch.Tensor] = [slab] * len(ends)
            for i, part, start, end in zip(self._order, self._parts, [0, *ends], ends, strict=False):
                views[i] = slab[:, start:end].view(part.dtype).view(-1, *self._shapes[i])
            yield views

    def measure(self) -> tuple[float, float]:
        """Return the seconds to copy one block out and in, from the second of two rounds. The device must be idle; its
        KV stays as it is.
        """
        count = min(_MEASURED_BLOCKS, self.num_blocks, len(self._parts[0]))
        pairs = tuple((block, block) for block in range(count))
        for _ in range(2):
            out_s = self._seconds(StepPlan((), swap_out=pairs))
            in_s = self._seconds(StepPlan((), swap_in=pairs))
        return out_s / count, in_s / count

    def _seconds(self, plan: StepPlan) -> float:
        self._copier.mark().wait()
        began = time.perf_counter()
        self.swap(plan)
        self.mark().wait()
        self.forget()
        return time.perf_counter() - began

    def _submit(self, work: partial[None], chunk: Sequence[BlockPair], after: DeviceEvent | None) -> None:
        try:
            mark = self._copier.copy(work, after)
        except BaseException:
            self._copier.copy(_nothing).wait()  # whatever it had begun must end before its blocks are used again
            raise
        self._pending.append((frozenset(block for block, _ in chunk), mark))


def pinned_bytes(num_blocks: int, block_bytes: int) -> int:
    """Bytes of pinned memory that so many blocks of the host take."""
    per_slab = max(1, SLAB_BYTES // block_bytes)
    slabs, rest = divmod(num_blocks, per_slab)
    return slabs * round_up_to_power_of_two(per_slab * block_bytes) + round_up_to_power_of_two(rest * block_bytes)


def round_up_to_power_of_two(nbytes: int) -> int:
    """Round up to a power of two, which is what pinning so many bytes at once takes; 0 stays 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _chunks(pairs: Sequence[BlockPair]) -> Iterator[tuple[BlockPair, ...]]:
    """Yield the pairs in chunks, the last first, since blocks of a sequence that is preempted are taken from its
    end.
    """
    for end in range(len(pairs), 0, -STAGING_BLOCKS):
        yield tuple(pairs[max(0, end - STAGING_BLOCKS) : end])


def _nothing() -> None:
    return None
