"""Measurement of a machine's compile speed, by one kernel that never changes.

With it a budget in seconds means the same on any machine.
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,misc"

from __future__ import annotations

import resource

import triton
import triton.language as tl

from ..launch.variant import Config, Variant
from .aot import compile_variant

# Result of `measure_compile_seconds` on the machine for which the matrix budgets hold, with Triton 3.7.1.
REFERENCE_S = 1.24
_TURNS = 3
_CAPABILITIES = ((6, 1), (8, 0), (9, 0))


@triton.jit
def _fixed(x, y, out, N, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """Compute loads, products, exponentials, sums and stores, similar to the operators.

    It is none of our operators, so that no change of them changes it.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        known = start + at < N
        a = tl.load(x + start + at, known, 0.0).to(tl.float32)
        b = tl.load(y + start + at, known, 0.0).to(tl.float32)
        for i in tl.static_range(TIMES):
            total += tl.exp(a * b - i) * (a + i * b)
    tl.store(out + at, (total / tl.sum(total, 0)).to(out.dtype.element_ty))


def measure_compile_seconds() -> float:
    """CPU seconds, over all cores, to compile the fixed kernel several times, ignoring caches.

    It must not run under TRITON_INTERPRET.
    """
    types = (("x", "*fp16"), ("y", "*fp16"), ("out", "*fp16"), ("N", "i32"))
    variant = Variant("fixed", _fixed, types, (), Config.of(4, 1, BLOCK=1024, TIMES=12), ("x", "y", "out"))
    compile_variant(variant, _CAPABILITIES[0])  # imports and starts everything that is needed once
    began = cpu_seconds()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        for capability in _CAPABILITIES * _TURNS:
            compile_variant(variant, capability)
    return cpu_seconds() - began


def cpu_seconds() -> float:
    """CPU seconds of this process and of child processes that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
