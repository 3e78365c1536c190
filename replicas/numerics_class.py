"""What replicas must have in common for their results to be the same to the bit."""

from __future__ import annotations

from .engine_config import EngineConfig

__all__ = ["numerics_of"]


def numerics_of(config: EngineConfig, arithmetic: str) -> str:
    """The class of an engine of that config, whose operators have that arithmetic.

    Ranks count, in every dtype: what they add up is summed in another order than in one process, and in bf16 and int4
    rounded where one process rounds nothing. Pipeline stages do not, where they are of one arithmetic: they compute
    what one process computes.
    """
    ranks = config.tensor_parallel
    return arithmetic if ranks == 1 else f"{arithmetic}-{ranks}ranks"
