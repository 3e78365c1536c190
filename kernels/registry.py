"""Registry of every operator that has kernels of its own, one line each."""

from __future__ import annotations

from .attention import attention_operations
from .launch.kernel_operation import KernelOperation
from .pointwise import activation, norm_operation, rotary_operation
from .sampling import sample_operation as sampling_operation
from .w4a16 import int4_operations as w4a16
from .w8a8.dequantize_int8 import DEQUANTIZE
from .w8a8.fp8_product import Fp8ProductOperation
from .w8a8.int8_product import PRODUCT
from .w8a8.quantize_panels import QuantizePanelsOperation
from .w8a8.quantize_rows import QuantizeRowsOperation

OPERATIONS: tuple[KernelOperation, ...] = (
    *w4a16.OPERATIONS,
    PRODUCT,
    DEQUANTIZE,
    Fp8ProductOperation(),
    QuantizeRowsOperation("int8"),
    QuantizeRowsOperation("fp8"),
    QuantizePanelsOperation(),
    *attention_operations.OPERATIONS,
    *norm_operation.OPERATIONS,
    *rotary_operation.OPERATIONS,
    *activation.OPERATIONS,
    *sampling_operation.OPERATIONS,
)


def find_operation(name: str) -> KernelOperation:
    """Return the operator of a name. Raises KeyError listing the existing names if there is none."""
    for operation in OPERATIONS:
        if operation.name == name:
            return operation
    raise KeyError(f"there is no operator {name!r}; there are {', '.join(operation.name for operation in OPERATIONS)}")
