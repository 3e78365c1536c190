"""Compiles the int4 kernels, and on 6.1 a twin that multiplies in halves, for capabilities given as CC; prints JSON.

A process of its own: Triton compiles nothing where its interpreter has been.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from motley.kernels.aot import Compiled, compile_variant
from motley.kernels.operation import Launch
from motley.kernels.precision import policy_of
from motley.kernels.static import fault
from motley.kernels.variant import Config
from motley.kernels.w4a16.gemv import gemv_variant
from motley.kernels.w4a16.operations import OPERATIONS


def launches(capability: tuple[int, int]) -> Iterator[tuple[str, Launch]]:
    policy = policy_of(*capability)
    for operation in OPERATIONS:
        if not operation.refusal(policy):
            for shape in operation.samples(policy):
                config = operation.configs(policy, shape)[0]
                yield from ((operation.name, launch) for launch in operation.launches(policy, shape, config))
    if capability == (6, 1):
        config = Config.of(4, 1, ROWS=8, REPEAT=1)
        twin = gemv_variant("fp16", 8, 128, config, scales="fp16", bias=None, half=True)
        yield "half twin", Launch(twin, (1,))


def told(op: str, launch: Launch, found: Compiled) -> dict[str, object]:
    mix, loop = found.mix(), found.inner_loop()
    return {
        "op": op, "fault": fault(policy_of(*found.capability), launch, found), "half": dict(found.half_arithmetic()),
        "registers": found.registers, "products": sum(mix[name] for name in mix if name.startswith("fma.rn")),
        "loop": dict(loop), "mix": dict(mix),
    }  # fmt: skip


if __name__ == "__main__":
    for given in map(int, sys.argv[1:]):
        version: tuple[int, int] = divmod(given, 10)
        results = [told(op, launch, compile_variant(launch.variant, version)) for op, launch in launches(version)]
        print(json.dumps({"capability": given, "results": results}))
