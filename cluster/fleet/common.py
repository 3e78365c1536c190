"""The dtype of KV that all replicas of a fleet can have in common, from what its pools ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from .capability import capabilities_of

__all__ = ["CAPABILITY_OF", "common_dtype"]

Half = Literal["float16", "bfloat16"]

CAPABILITY_OF: Mapping[str, str] = {  # by Ray's name of the accelerator. Source: NVIDIA, CUDA GPU Compute Capability
    **dict.fromkeys(("P100",), "6.0"),
    **dict.fromkeys(("P4", "P40"), "6.1"),
    **dict.fromkeys(("V100",), "7.0"),
    **dict.fromkeys(("T4",), "7.5"),
    **dict.fromkeys(("A30", "A100"), "8.0"),
    **dict.fromkeys(("A2", "A10", "A10G", "A16", "A40"), "8.6"),
    **dict.fromkeys(("L4", "L40", "L40S"), "8.9"),
    **dict.fromkeys(("H20", "H100", "H200", "GH200"), "9.0"),
    **dict.fromkeys(("B200", "GB200"), "10.0"),
    **dict.fromkeys(("B300", "GB300"), "10.3"),
}

_BF16 = (8, 0)  # multiplies it


class PoolHardware(Protocol):
    """What is asked here of a pool of the fleet's file (spec.PoolSpec)."""

    @property
    def name(self) -> str: ...

    @property
    def gpus(self) -> list[bool]: ...

    @property
    def compute_capability(self) -> str | None: ...

    @property
    def accelerator(self) -> str | None: ...


def common_dtype(pools: Iterable[PoolHardware]) -> tuple[Half, str]:
    """bfloat16 where each pool is of a CPU or of 8.0 or above; float16 where one is below, or may be. And why.

    A pool that does not say what it runs on is taken to be below: float16 holds what bfloat16 does, but for its range,
    and a number beyond that is not stored; the other way mantissas are cut.
    """
    for pool in pools:
        if not any(pool.gpus):
            continue
        least = _least(pool)
        if least is None:
            return "float16", f"pool {pool.name} does not say which GPUs it has, so they may be below 8.0"
        if least < _BF16:
            return "float16", f"pool {pool.name} may be of {least[0]}.{least[1]}, and below 8.0 there is no bf16"
    return "bfloat16", "each pool is of a CPU, or of 8.0 or above"


def _least(pool: PoolHardware) -> tuple[int, int] | None:
    """The lowest capability that it can be placed on; None: that cannot be known."""
    if pool.compute_capability is not None:
        return _version(capabilities_of(pool.compute_capability)[0])
    if pool.accelerator is None or pool.accelerator.startswith("!"):
        return None
    names = pool.accelerator.removeprefix("in(").removesuffix(")").split(",")
    known = [CAPABILITY_OF.get(name.strip()) for name in names]
    return None if None in known else min(_version(each) for each in known if each is not None)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
