"""Compiles the int4 kernels, twins that must not pass, and those that measure, for capabilities as CC; prints JSON.

On 6.1 a twin multiplies in halves. From 8.0 several have the capability's matrix instruction anywhere but where it
belongs, which is in the loop over K, and one of them has it there.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import triton
import triton.language as tl

from motley.kernels.compiler.aot import CompiledKernel, compile_variant
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.launch.kernel_operation import KernelLaunch
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.tuning.static_prediction import find_fault
from motley.kernels.tuning.streaming_kernels import STREAM_VARIANTS
from motley.kernels.w4a16.int4_gemv import gemv_variant
from motley.kernels.w4a16.int4_operations import OPERATIONS


@triton.jit
def _product(x, y, out, K, ROWS: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [ROWS, K] @ y [K, WIDTH], or, but for its last step, a sum of what was loaded."""
    row, inner, column = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    left = tl.zeros((ROWS, WIDTH), x.dtype.element_ty)
    right = tl.zeros((WIDTH, WIDTH), x.dtype.element_ty)
    for at in range(0, K, WIDTH):
        a = tl.load(x + row[:, None] * K + at + inner[None, :])
        b = tl.load(y + (at + inner)[:, None] + column[None, :] * K)
        if INSIDE:
            total = tl.dot(a, b, total, out_dtype=total.dtype)
        else:
            left = (left + a * 3.0).to(left.dtype)
            right = (right + b * 3.0).to(right.dtype)
    if not INSIDE:
        total = tl.dot(left, right, total, out_dtype=total.dtype)
    tl.store(out + row[:, None] * WIDTH + column[None, :], total)


def _twins(policy: PrecisionPolicy) -> Iterator[tuple[str, KernelLaunch]]:
    cases = {"in the loop": ("bf16", 64, True), "after the loop": ("bf16", 64, False), "of int8": ("i8", 64, True)}
    if policy.capability.instruction_rows > 16:
        cases["of few rows"] = ("bf16", 16, True)
    for name, (dtype, rows, inside) in cases.items():
        types = (("x", f"*{dtype}"), ("y", f"*{dtype}"), ("out", "*i32" if dtype == "i8" else "*fp32"), ("K", "i32"))
        constants = (("ROWS", rows), ("WIDTH", 64), ("INSIDE", inside))
        variant = Variant("product", _product, types, constants, Config.of(4, 2), ("x", "y", "out", "K"))
        yield f"product {name}", KernelLaunch(variant, (1,), policy.decode.ptx)


def launches(capability: tuple[int, int]) -> Iterator[tuple[str, KernelLaunch]]:
    policy = policy_of(*capability)
    for operation in OPERATIONS:
        if not operation.refusal(policy):
            samples = operation.samples(policy)
            often = [shape for shape in samples if shape == shape.plain]
            for shape in often if capability == (6, 1) else samples[:1]:
                config = operation.configs(policy, shape)[0]
                yield from ((operation.name, launch) for launch in operation.launches(policy, shape, config))
    if capability == (6, 1):
        config = Config.of(4, 1, ROWS=8, REPEAT=1)
        twin = gemv_variant("fp16", 8, 128, config, scales="fp16", bias=None, half=True)
        yield "half twin", KernelLaunch(twin, (1,))
    if capability >= (8, 0):
        yield from _twins(policy)
    yield from ((variant.name, KernelLaunch(variant, (1,))) for variant in STREAM_VARIANTS)


def reported(op: str, launch: KernelLaunch, found: CompiledKernel) -> dict[str, object]:
    mix, loop = found.mix(), found.inner_loop()
    return {
        "op": op, "fault": find_fault(policy_of(*found.capability), launch, found),
        "half": dict(found.half_arithmetic()), "registers": found.registers,
        "products": sum(mix[name] for name in mix if name.startswith("fma.rn")),
        "loop": dict(loop), "mix": dict(mix),
    }  # fmt: skip


if __name__ == "__main__":
    for given in map(int, sys.argv[1:]):
        version: tuple[int, int] = divmod(given, 10)
        results = [reported(op, launch, compile_variant(launch.variant, version)) for op, launch in launches(version)]
        print(json.dumps({"capability": given, "results": results}))
