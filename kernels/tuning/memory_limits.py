"""Whether a device's memory has room for what a measurement holds at once: shapes that it has none for are left out."""

from __future__ import annotations

from ..device.device_context import DeviceContext
from ..device.roofline import DecodeAttentionWork, LinearWork, OperationWork, PrefillAttentionWork
from ..launch.kernel_operation import KernelOperation, ProblemShape

__all__ = ["ShapeTooLarge", "memory_shortage"]

GIB = 2**30
ROOM = 0.9  # of the memory; the rest is the driver's, the compiler's and what an allocator cannot give out
_HELD = 5  # bytes of a weight: its code, packed, in 8 bits for torch, and written out in halves
_CHECKED = 24  # bytes of a weight while it is checked: in fp64, and what that is made of
_WIDENED = 16  # so many times a sequence is held in fp64 while it is checked, from 8 or 16 bits: values, terms, sums


class ShapeTooLarge(ValueError):
    """For the device's memory."""


def memory_shortage(operation: KernelOperation, rig: DeviceContext, shape: ProblemShape, copies: int) -> str:
    """How much so many inputs of that shape need, where the device has no room for them; else empty."""
    work = operation.work(rig.policy, shape)
    needed = copies * _input_bytes(work) + _reference_bytes(work)
    return "" if needed <= ROOM * rig.about.memory else f"needs {needed / GIB:.0f} GiB"


def _input_bytes(work: OperationWork) -> float:
    return work.bytes + (_HELD * work.n * work.k if isinstance(work, LinearWork) else 0)


def _reference_bytes(work: OperationWork) -> float:
    if isinstance(work, LinearWork):
        return _CHECKED * work.n * work.k
    if isinstance(work, DecodeAttentionWork | PrefillAttentionWork):
        return _WIDENED * work.bytes / work.batch
    return _WIDENED * work.bytes
