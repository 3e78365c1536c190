"""Choice of the KV dtype that all replicas of a fleet can share, from what its pools ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from .accepted_capabilities import accepted_capabilities

HalfDtype = Literal["float16", "bfloat16"]

CAPABILITY_OF: Mapping[str, str] = {  # by Ray's accelerator name. Source: NVIDIA, CUDA GPU Compute Capability
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

_BF16 = (8, 0)  # lowest capability that multiplies bfloat16


class PoolHardware(Protocol):
    """Hardware of a pool of the fleet file, as far as the choice of a dtype needs it (`PoolSpec` has it)."""

    @property
    def name(self) -> str: ...

    @property
    def gpus(self) -> list[bool]: ...

    @property
    def compute_capability(self) -> str | None: ...

    @property
    def accelerator(self) -> str | None: ...


def common_half_dtype(pools: Iterable[PoolHardware]) -> tuple[HalfDtype, str]:
    """Return the shared KV dtype and the reason for it.

    That is bfloat16 if each pool runs on a CPU or on GPUs of compute capability 8.0 or above, and float16 if one may be
    below.

    A pool that does not name its GPUs is taken to be below: float16 holds bfloat16 values except for their range, and
    records that exceed it are not stored, while the other way round mantissas would be cut.
    """
    for pool in pools:
        if not any(pool.gpus):
            continue
        lowest = _lowest_capability(pool)
        if lowest is None:
            return "float16", f"pool {pool.name} does not say which GPUs it has, so they may be below 8.0"
        if lowest < _BF16:
            return "float16", f"pool {pool.name} may be of {lowest[0]}.{lowest[1]}, and below 8.0 there is no bf16"
    return "bfloat16", "each pool is of a CPU, or of 8.0 or above"


def _lowest_capability(pool: PoolHardware) -> tuple[int, int] | None:
    """Return the lowest compute capability that a pool may be placed on; None if it is unknown."""
    if pool.compute_capability is not None:
        return _version(accepted_capabilities(pool.compute_capability)[0])
    if pool.accelerator is None or pool.accelerator.startswith("!"):
        return None
    names = pool.accelerator.removeprefix("in(").removesuffix(")").split(",")
    capabilities = [CAPABILITY_OF.get(name.strip()) for name in names]
    return None if None in capabilities else min(_version(each) for each in capabilities if each is not None)


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
