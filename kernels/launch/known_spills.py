"""Configs that were found to spill registers, by a version of Triton that the container images have.

They are not offered there. The list has only configs that the compile matrix found: a config that is fine with one
version of Triton may need more registers with another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..device.precision import GEMV_ROWS, PrecisionPolicy
from .kernel_operation import KernelOperation, ProblemShape
from .variant import Config


@dataclass(frozen=True, slots=True)
class KnownSpill:
    """Set of shapes and configs of an operator that spill on some capabilities.

    A shape or config belongs to it if it has these field values, or one of a range.
    """

    op: str
    capabilities: tuple[tuple[int, int], ...]
    shape: Mapping[str, int | str | range]
    config: Mapping[str, int]

    def has(self, operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> bool:
        if operation.name != self.op or policy.capability.version not in self.capabilities:
            return False
        return self.of_shape(shape) and self.config.items() <= config.to_json().items()

    def of_shape(self, shape: ProblemShape) -> bool:
        sizes = dict(shape.fields)
        return all(
            sizes.get(name) in value if isinstance(value, range) else sizes.get(name) == value
            for name, value in self.shape.items()
        )


_IN_LOTS = range(GEMV_ROWS, 2**31)  # numbers of rows that are processed in groups of GEMV_ROWS


# Found with Triton 3.7.1: each spills 8 to 24 bytes per thread.
KNOWN_SPILLS = (
    KnownSpill("w4a16_gemv", ((12, 0),), {"m": 2, "group": 128}, {"REPEAT": 1}),
    KnownSpill("w4a16_gemv", ((12, 0),), {"m": 8, "group": 128}, {"REPEAT": 1, "ROWS": 4, "num_warps": 2}),
    KnownSpill("w4a16_gemv", ((12, 0),), {"m": 8, "group": 128}, {"REPEAT": 1, "ROWS": 8, "num_warps": 4}),
    KnownSpill("w4a16_gemv", ((12, 0),), {"m": 8, "group": 128}, {"REPEAT": 1, "ROWS": 16, "num_warps": 4}),
    KnownSpill("w4a16_gemv", ((7, 0), (7, 5)), {"m": _IN_LOTS, "group": 32}, {"REPEAT": 1, "ROWS": 8, "num_warps": 4}),
    KnownSpill("w8a8", ((7, 0), (7, 5)), {"m": 8, "group": 0}, {"BLOCK_N": 32, "num_warps": 16}),
    KnownSpill("w8a8", ((6, 1),), {"m": 8, "group": 128}, {"BLOCK_N": 32, "num_warps": 4}),
    KnownSpill("w8a8", ((12, 0),), {"group": 128, "zeros": "yes"}, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}),
    KnownSpill("attention_decode", ((6, 0),), {"dim": 80, "kv": "fp16"}, {"HEADS": 1, "UNROLL": 2, "SPLITS": 1}),
    KnownSpill("attention_decode", ((7, 0),), {"dim": 128, "kv": "fp16"}, {"HEADS": 2, "UNROLL": 2, "SPLITS": 1}),
    KnownSpill("attention_prefill", ((7, 5),), {"dim": 80, "kv": "int8"}, {"ROWS": 32, "BLOCK": 32}),
    KnownSpill("attention_prefill", ((7, 5),), {"dim": 96, "kv": "int8", "window": 0}, {"ROWS": 32, "BLOCK": 32}),
    KnownSpill("attention_prefill", ((9, 0),), {"dim": 256, "kv": "int8", "window": 0}, {"ROWS": 128, "BLOCK": 32}),
    KnownSpill("attention_prefill", ((8, 0), (12, 0)), {"dim": 128, "kv": "int8"}, {"ROWS": 64, "BLOCK": 64}),
)


def offered_configs(operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
    """Return the operation's configs but those known to spill registers; the first is the default without a table."""
    configs = operation.configs(policy, shape)
    return tuple(
        config for config in configs if not any(spill.has(operation, policy, shape, config) for spill in KNOWN_SPILLS)
    )
