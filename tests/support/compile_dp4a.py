"""Compiles the dp4a products for 6.1, whose PTX is 7.0's, and one for 7.5; prints their inner loops' make-up as JSON.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import json

from motley.kernels.compiler.aot import compile_variant
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.w8a8.int8_product import Int8ProductOperation


def told(version: tuple[int, int], m: int, group: int) -> dict[str, object]:
    operation, policy = Int8ProductOperation(), policy_of(*version)
    shape = ProblemShape.of(m=m, n=4096, k=4096, group=group, zeros="yes")
    [launch] = operation.launches(policy, shape, operation.configs(policy, shape)[0])
    found = compile_variant(launch.variant, version)
    return {"m": m, "group": group, "spilled": found.spilled, "loop": dict(found.inner_loop()), "version": version}


if __name__ == "__main__":
    for m in (16, 32, 256):
        for group in (0, 32):
            print(json.dumps(told((6, 1), m, group)))
    print(json.dumps(told((7, 5), 256, 32)))
    for m in (1, 2, 8):
        for group in (0, 32, 128):
            print(json.dumps(told((6, 1), m, group)))
