"""Numerics classes: properties that replicas must share for their results to be the same to the bit."""

from __future__ import annotations

from ..engine_config import EngineConfig


def engine_numerics_class(config: EngineConfig, arithmetic: str) -> str:
    """Return the numerics class of an engine with that config, whose operators have that arithmetic.

    Tensor-parallel ranks count, in every dtype: their sums are added in another order than in one process, and in bf16
    and int4 rounded where one process rounds nothing. Pipeline stages of one arithmetic do not count, since they
    compute exactly what one process computes.
    """
    ranks = config.tensor_parallel
    return arithmetic if ranks == 1 else f"{arithmetic}-{ranks}ranks"
