"""PTX families: compute capabilities for which Triton generates the same PTX, so that a kernel is compiled only once.

It is then assembled for each member, which takes a tenth of the time; except for the target only the assembler
distinguishes the members of a family. The claims here are proven wherever they are used: for every kernel the matrix
compiles one variant in full for each member that other variants are only assembled for, and compares the PTX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..device.precision import installed_triton


@dataclass(frozen=True, slots=True)
class PtxFamily:
    """Family of capabilities with the same PTX, named by its first member.

    members  compute capabilities
    apart    capability -> kernels whose PTX differs there, by name, with "*" for any part
    triton   version of Triton for which the family holds; None: any
    """

    members: tuple[tuple[int, int], ...]
    apart: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    triton: tuple[int, int] | None = None

    def has(self, kernel: str, capability: tuple[int, int]) -> bool:
        if capability not in self.members or self.triton not in (None, installed_triton()):
            return False
        return not any(fnmatchcase(kernel, other) for other in self.apart.get(capability, ()))


# Families that hold for all variants that two members launch. With Triton 3.7.1, which is in the container images and
# compiles the whole matrix, only 10.3 has an instruction for maxima of three, and 12.0 multiplies matrices as 8.0 does.
# With 3.9.0 there are more differences.
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
    """First member of the family in which a kernel is compiled for a capability, or the capability itself."""
    return next((family.members[0] for family in PTX_FAMILIES if family.has(kernel, capability)), capability)
