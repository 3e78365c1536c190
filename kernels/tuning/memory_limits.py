"""Check whether a measurement fits into a device's memory; shapes that do not fit are skipped."""

from __future__ import annotations

from ..device.device_context import DeviceContext
from ..device.roofline import DecodeAttentionWork, LinearWork, OperationWork, PrefillAttentionWork
from ..launch.kernel_operation import KernelOperation, ProblemShape

GIB = 2**30
USABLE_MEMORY = 0.9  # usable fraction of the memory; the rest is for the driver, the compiler and an allocator's waste
_HELD = 5  # bytes per weight: its code, packed, in 8 bits for torch, and dequantized to half precision
_CHECKED = 24  # bytes per weight while it is checked: in fp64, and the inputs of that
_WIDENED = 16  # growth of a sequence in fp64 while it is checked, from 8 or 16 bits: values, terms, sums


class ShapeTooLarge(ValueError):
    """Shape that does not fit into the device's memory."""


def memory_shortage(operation: KernelOperation, device_context: DeviceContext, shape: ProblemShape, copies: int) -> str:
    """Text with the memory that `copies` inputs of a shape need, if they do not fit the device; else empty."""
    work = operation.work(device_context.policy, shape)
    needed = copies * _input_bytes(work) + _reference_bytes(work)
    return "" if needed <= USABLE_MEMORY * device_context.about.memory else f"needs {needed / GIB:.0f} GiB"


def _input_bytes(work: OperationWork) -> float:
    return work.bytes + (_HELD * work.n * work.k if isinstance(work, LinearWork) else 0)


def _reference_bytes(work: OperationWork) -> float:
    if isinstance(work, LinearWork):
        return _CHECKED * work.n * work.k
    if isinstance(work, DecodeAttentionWork | PrefillAttentionWork):
        return _WIDENED * work.bytes / work.batch
    return _WIDENED * work.bytes
