"""Every operator that has kernels of its own: one line each."""

from __future__ import annotations

from .attention import operations as attention_operations
from .operation import Operation
from .pointwise import activation, norm_operation, rotary_operation
from .sampling import operation as sampling_operation
from .w4a16 import operations as w4a16
from .w8a8.dequantize import DEQUANTIZE
from .w8a8.fp8 import Fp8
from .w8a8.int8 import PRODUCT
from .w8a8.quantize_panels import QuantizePanels
from .w8a8.quantize_rows import QuantizeRows

__all__ = ["OPERATIONS", "operation"]

OPERATIONS: tuple[Operation, ...] = (
    *w4a16.OPERATIONS,
    PRODUCT,
    DEQUANTIZE,
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
