"""Capabilities for which Triton writes the same PTX: compiled once, and assembled for each.

The assembler takes a tenth of the time, and alone tells the members of a family apart, but for their target. What
is claimed here is proven wherever it is used: of every kernel the matrix compiles one variant in full for each member
that others are only assembled for, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..device.precision import installed_triton

__all__ = ["PTX_FAMILIES", "PtxFamily", "ptx_family"]


@dataclass(frozen=True, slots=True)
class PtxFamily:
    """members: the first gives it its name.

    apart   kernels that are others for a member, by name, "*" for any part
    triton  the release by which it is one; None: any
    """

    members: tuple[tuple[int, int], ...]
    apart: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    triton: tuple[int, int] | None = None

    def has(self, kernel: str, capability: tuple[int, int]) -> bool:
        if capability not in self.members or self.triton not in (None, installed_triton()):
            return False
        return not any(fnmatchcase(kernel, other) for other in self.apart.get(capability, ()))


# Of all variants that two members launch. By 3.7.1, the images', which the whole matrix is compiled by, 10.3 alone
# has an instruction for maxima of three, and 12.0 multiplies matrices as 8.0 does. By 3.9.0 there are more differences.
_MAXIMA = ("sample_survey", "sample_weigh", "sample_draw", "sample_tally_*", "attention_decode_reduce")
_PRODUCTS = ("w4a16_gemm", "w8a8_tensor", "fp8", "attention_prefill")
PTX_FAMILIES = (
    PtxFamily(((6, 0), (6, 1), (7, 0), (7, 5)), {(7, 5): ("attention_decode_heads",)}, (3, 7)),
    PtxFamily(((8, 0), (8, 6), (8, 9)), triton=(3, 7)),
    PtxFamily(((10, 0), (10, 3), (12, 0)), {(10, 3): _MAXIMA, (12, 0): (*_MAXIMA, *_PRODUCTS)}, (3, 7)),
    PtxFamily(((6, 0), (6, 1), (7, 0))),
    PtxFamily(((8, 6), (8, 9))),
)


def ptx_family(kernel: str, capability: tuple[int, int]) -> tuple[int, int]:
    """By the name of its first member: the one that this kernel is compiled in for that capability, perhaps its own."""
    return next((family.members[0] for family in PTX_FAMILIES if family.has(kernel, capability)), capability)
