"""Compiles the int4 GEMV, and a twin that accumulates in halves, for each capability given as CC; prints JSON.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl

from motley.kernels.aot import Compiled, compile_variant
from motley.kernels.variant import Config, Variant
from motley.kernels.w4a16 import gemv_variant

CONFIG = Config.of(4, 1, ROWS=4, SPAN=64)


@triton.jit
def _half_sum(x, out, K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, K)
    value = tl.load(x + at)
    tl.store(out + at, value * value + value)


def variants() -> list[Variant]:
    twin = Variant(
        "half twin", _half_sum, (("x", "*fp16"), ("out", "*fp16")), (("K", 256),), Config.of(4), ("x", "out")
    )
    sizes = [(1, 128), (4, 64), (8, 32)]
    return [
        *(gemv_variant("fp16", 4096, tokens, group, CONFIG, scales="fp16", bias="fp16") for tokens, group in sizes),
        twin,
    ]


def told(found: Compiled) -> dict[str, object]:
    return {
        "name": found.name, "registers": found.registers, "spilled": found.spilled, "shared": found.shared,
        "threads": found.threads, "half": dict(found.half_arithmetic()), "instructions": sum(found.mix().values()),
        "barriers": found.mix()["bar.sync"],
    }  # fmt: skip


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        results = [told(compile_variant(variant, divmod(capability, 10))) for variant in variants()]
        print(json.dumps({"capability": capability, "results": results}))
