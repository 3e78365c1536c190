"""What replicas must have in common for their results to be the same to the bit."""

from __future__ import annotations

from ..kernels.ops import Ops
from .engine_config import EngineConfig

__all__ = ["numerics_of"]


def numerics_of(config: EngineConfig, ops: Ops) -> str:
    """The class of an engine of that config, whose operators are these.

    Ranks count, in every dtype: what they add up is summed in another order than in one process, and in bf16 and int4
    rounded where one process rounds nothing. Pipeline stages do not: they compute what one process computes.
    """
    ranks = config.tensor_parallel
    return ops.arithmetic if ranks == 1 else f"{ops.arithmetic}-{ranks}ranks"
