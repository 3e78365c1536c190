"""Whether a device's memory has room for what a measurement holds at once: shapes that it has none for are left out."""

from __future__ import annotations

from .operation import Operation, Shape
from .rig import Rig
from .roofline import DecodeAttention, Linear, Op, PrefillAttention

__all__ = ["TooLarge", "too_large"]

GIB = 2**30
ROOM = 0.9  # of the memory; the rest is the driver's, the compiler's and what an allocator cannot give out
_HELD = 5  # bytes of a weight: its code, packed, in 8 bits for torch, and written out in halves
_CHECKED = 24  # bytes of a weight while it is checked: in fp64, and what that is made of
_WIDENED = 16  # so many times a sequence is held in fp64 while it is checked, from 8 or 16 bits: values, terms, sums


class TooLarge(ValueError):
    """For the device's memory."""


def too_large(operation: Operation, rig: Rig, shape: Shape, copies: int) -> str:
    """How much so many inputs of that shape need, where the device has no room for them; else empty."""
    work = operation.work(rig.policy, shape)
    needed = copies * _inputs(work) + _reference(work)
    return "" if needed <= ROOM * rig.about.memory else f"needs {needed / GIB:.0f} GiB"


def _inputs(work: Op) -> float:
    return work.bytes + (_HELD * work.n * work.k if isinstance(work, Linear) else 0)


def _reference(work: Op) -> float:
    if isinstance(work, Linear):
        return _CHECKED * work.n * work.k
    if isinstance(work, DecodeAttention | PrefillAttention):
        return _WIDENED * work.bytes / work.batch
    return _WIDENED * work.bytes
