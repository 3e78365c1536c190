"""Compiles dp4a products for 6.1, whose PTX is 7.0's, or 7.5; prints their inner loops' make-up as JSON, a line each.

Which ones is a list of [capability, rows, group] as JSON.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import json
import sys

from motley.kernels.compiler.aot import compile_variant
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.w8a8.int8_product import Int8ProductOperation


def reported(version: tuple[int, int], m: int, group: int) -> dict[str, object]:
    operation, policy = Int8ProductOperation(), policy_of(*version)
    shape = ProblemShape.of(m=m, n=4096, k=4096, group=group, zeros="yes")
    [launch] = operation.launches(policy, shape, operation.configs(policy, shape)[0])
    found = compile_variant(launch.variant, version)
    return {"m": m, "group": group, "spilled": found.spilled, "loop": dict(found.inner_loop()), "version": version}


if __name__ == "__main__":
    for capability, m, group in json.loads(sys.argv[1]):
        print(json.dumps(reported(tuple(capability), m, group)))
