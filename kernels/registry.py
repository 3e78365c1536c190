"""Every operator that has kernels of its own: one line each."""

from __future__ import annotations

from . import activation, attention_operations, norm_operation, rotary_operation, sampling_operation, w4a16
from .fp8 import Fp8
from .operation import Operation
from .quantize_panels import QuantizePanels
from .quantize_rows import QuantizeRows
from .w8a8 import W8A8

__all__ = ["OPERATIONS", "operation"]

OPERATIONS: tuple[Operation, ...] = (
    *w4a16.OPERATIONS,
    W8A8(),
    Fp8(),
    QuantizeRows("int8"),
    QuantizeRows("fp8"),
    QuantizePanels(),
    *attention_operations.OPERATIONS,
    *norm_operation.OPERATIONS,
    *rotary_operation.OPERATIONS,
    *activation.OPERATIONS,
    *sampling_operation.OPERATIONS,
)


def operation(name: str) -> Operation:
    """Raises KeyError, with the names there are."""
    for known in OPERATIONS:
        if known.name == name:
            return known
    raise KeyError(f"{name!r} is no operator; there are {', '.join(known.name for known in OPERATIONS)}")
