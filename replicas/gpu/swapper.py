"""Copies KV blocks between a device and the host, beside the steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..plan import StepPlan
from .accelerator import Copier, Mark
from .moves import Near, Staged

STAGED_BLOCKS = 8  # of the device's memory, where blocks are put together: copies across want long pieces
SLAB_BYTES = 2**26  # pinned memory comes in powers of two, whatever is asked for
_MEASURED_BLOCKS = 32

Pair = tuple[int, int]  # a block of the device and one of the host


class Swapper:
    """All copies are made one after the other: what one of them leaves on the host, the next may take or overwrite.

    Against steps they are ordered where blocks ask for it:

        out   reads what steps that have landed wrote, and waits for none. A step that writes such a block comes after.
        in    writes where a step on its way may still write for an owner before: it comes after that step.
              A step that reads such a block comes after it.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        copier: Copier,
        num_blocks: int,
        staging: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """
        parts       views [blocks of the device, ...] that are together all of the KV
        num_blocks  of the host
        staging     gives memory of the host, as `Copier.staging`; None: that of the copier
        """
        staging = staging or copier.staging
        # Numbers of the same size beside each other: each lies at a multiple of its own.
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
        moves = partial(Staged, copier, STAGED_BLOCKS) if copier.apart else Near
        self._moves: Staged | Near = moves(self._parts, self._slabs)
        self._pending: list[tuple[frozenset[int], Mark]] = []  # blocks of the device, in the order of the copies

    def swap(self, plan: StepPlan) -> None:
        """See `Swapping`. Returns before the copies are made; `order` says when they count."""
        for chunk in _chunks(plan.swap_out):
            self._submit(partial(self._moves.out, chunk), chunk, None)
        if plan.swap_in:
            before = self._copier.mark()
            for chunk in _chunks(plan.swap_in):
                self._submit(partial(self._moves.back, chunk), chunk, before)

    def order(self, plan: StepPlan) -> None:
        """What is submitted from now on comes after the copies of blocks that the plan reads or writes."""
        if not self._pending:
            return
        touched = {block for item in plan.items for block in item.blocks}
        last = max((i for i, (blocks, _) in enumerate(self._pending) if not blocks.isdisjoint(touched)), default=None)
        if last is not None:
            self._copier.follow(self._pending[last][1])
            del self._pending[: last + 1]

    def mark(self) -> Mark:
        """Of the end of all copies that were asked for until now."""
        return self._pending[-1][1] if self._pending else self._copier.copy(_nothing)

    def forget(self) -> None:
        """All copies that were asked for have been made."""
        self._pending = []

    def slabs(self) -> Iterator[list[torch.Tensor]]:
        """The host's blocks in their order, some after the other: views of them [blocks, ...], alike with `parts`."""
        ends = list(itertools.accumulate(part[0].nbytes for part in self._parts))
        for slab in self._slabs:
            views: list[torch.Tensor] = [slab] * len(ends)
            for i, part, start, end in zip(self._order, self._parts, [0, *ends], ends, strict=False):
                views[i] = slab[:, start:end].view(part.dtype).view(-1, *self._shapes[i])
            yield views

    def measure(self) -> tuple[float, float]:
        """Seconds of a block, out and in, of two rounds the second. On a device at rest, whose KV is left as it is."""
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

    def _submit(self, work: partial[None], chunk: Sequence[Pair], after: Mark | None) -> None:
        try:
            mark = self._copier.copy(work, after)
        except BaseException:
            self._copier.copy(_nothing).wait()  # what it had begun is over before its blocks are used again
            raise
        self._pending.append((frozenset(block for block, _ in chunk), mark))


def pinned_bytes(num_blocks: int, block_bytes: int) -> int:
    """What so many blocks of the host take of its memory, pinned."""
    per_slab = max(1, SLAB_BYTES // block_bytes)
    slabs, rest = divmod(num_blocks, per_slab)
    return slabs * power_of_two(per_slab * block_bytes) + power_of_two(rest * block_bytes)


def power_of_two(nbytes: int) -> int:
    """The next from that on: what so many bytes take, pinned at once. 0: none."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _chunks(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, ...]]:
    """The last first: blocks of a sequence that gives them up are taken from its end."""
    for end in range(len(pairs), 0, -STAGED_BLOCKS):
        yield tuple(pairs[max(0, end - STAGED_BLOCKS) : end])


def _nothing() -> None:
    return None
