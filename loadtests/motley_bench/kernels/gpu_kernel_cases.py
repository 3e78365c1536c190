"""Cases that `motley bench kernels` measures on a GPU: each operator at the sizes that it is launched and tuned for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape
from motley.kernels.launch.model_shapes import MODELS, ModelShape
from motley.kernels.registry import OPERATIONS
from motley.kernels.w4a16.int4_operations import OPERATIONS as INT4
from motley.kernels.w4a16.int4_operations import kernel_for

from .kernel_cases import CONTEXT, DECODED, TOKENS, Case
from .operation_measurement import (
    measure_operation,
)

_ROWS = ("m", "t", "r")  # names of the size that counts a step's tokens or rows of logits
# Numbers of rows for which an operator is launched, for those operators that are not launched for every number.
_RANGES = {"sample": range(1, 257), "quantize_panels": range(9, 1 << 20), "w8a8_dequantize": range(256, 1 << 20)}


def gpu_device_cases(
    device_context: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    ops: Collection[str],
    enough: Callable[[], bool] = lambda: False,
) -> list[Case]:
    """Return the cases for a GPU, with those of attention at all batches."""
    return [
        (name, partial(measure_operation, operation, device_context, shape, enough))
        for name, operation, shape in gpu_cases(device_context, models, tokens, ops, all_batches=True)
    ]


def gpu_cases(
    device_context: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    ops: Collection[str] = (),
    *,
    all_batches: bool = False,
) -> list[tuple[str, KernelOperation, ProblemShape]]:
    """Return name, operator and shape of each case for a GPU.

    int4 layers are measured with the kernel that would be launched, the other operators at the sizes they are tuned
    for.

    tokens       numbers of rows; None: those of `TOKENS` that an operator is launched for, and for attention its tuned
                 sizes
    all_batches  also measure attention with `TOKENS` as batch sizes and as new tokens

    Raises ValueError for an unknown operator, or one that has no shape with these models and tokens.
    """
    if unknown := [name for name in ops if name not in {each.name for each in OPERATIONS} | {"w4a16"}]:
        raise ValueError(f"op {unknown[0]}: expected w4a16 or some of {', '.join(each.name for each in OPERATIONS)}")
    cases: list[tuple[str, KernelOperation, ProblemShape]] = []
    for model in models if not ops or "w4a16" in ops else ():
        for layer, (n, k) in model.linears.items():
            for m in tokens or TOKENS:
                shape = ProblemShape.of(m=m, n=n, k=k, group=128)
                kernel, _ = kernel_for(device_context.policy, shape, device_context.about)
                cases.append((f"{model.name} {layer} m={m}", kernel, shape))
    for operation in OPERATIONS:
        if (operation.name in ops or (not ops and operation not in INT4)) and not operation.refusal(
            device_context.policy
        ):
            shapes = (
                _requested_cases(operation, device_context, models, tokens, all_batches)
                if device_context.real
                else operation.small(device_context.policy)[:1]
            )
            if not shapes and operation.name in ops:
                raise ValueError(f"tokens {tokens}: {operation.name} has no shape with as many of {_names(models)}")
            cases += [(f"{operation.name} {shape.key}", operation, shape) for shape in shapes]
    return cases


def _requested_cases(
    operation: KernelOperation,
    device_context: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    all_batches: bool,
) -> tuple[ProblemShape, ...]:
    """Return an operator's tuned shapes that belong to these models, with the requested numbers of rows if rows are its
    size.

    Shapes of no model, such as attention with heads of 80, are included if all models are.
    """
    everything = set(MODELS) <= set(models)
    of_models = [
        shape
        for shape in operation.shapes(device_context.policy)
        if everything or any(model.has(shape) for model in models)
    ]
    if rows := next((name for name in _ROWS if all(name in dict(shape.fields) for shape in of_models)), ""):
        launched = _RANGES.get(operation.name, range(1, 1 << 20))
        numbers = tokens or [m for m in TOKENS if m in launched]
        wanted = (ProblemShape.of(**{**dict(shape.fields), rows: m}) for shape in of_models for m in numbers)
        return tuple(dict.fromkeys(wanted))
    if tokens is None and not all_batches:
        return tuple(of_models)
    found = [shape for shape in of_models if tokens is None or shape.get("new", shape["batch"]) in tokens]
    return tuple(dict.fromkeys((*found, *_of_batches(operation, of_models, tokens or TOKENS, found))))


def _of_batches(
    operation: KernelOperation, of_models: Sequence[ProblemShape], tokens: Sequence[int], found: Sequence[ProblemShape]
) -> Iterator[ProblemShape]:
    """Yield attention shapes for batch sizes or new tokens that are not tuned for.

    They are like the tuned shapes of the same context.
    """
    prefill = operation.name == "attention_prefill"
    size, found_sizes = "new" if prefill else "batch", {shape.get("new", shape["batch"]) for shape in found}
    numbers = [m for m in tokens if m not in found_sizes and (m > DECODED) is prefill]
    for m in numbers:
        for shape in of_models:
            if shape["context"] == max(CONTEXT, m if prefill else 0) and shape["batch"] == (1 if prefill else 8):
                yield ProblemShape.of(**{**dict(shape.fields), size: m})


def _names(models: Sequence[ModelShape]) -> str:
    return ", ".join(model.name for model in models)
