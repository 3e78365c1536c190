"""Test problems for int8 layers: random inputs, and the ratio of a result's error to the error that rounding
explains.
"""

from __future__ import annotations

import torch

from ..canonical_weights import SCALES, GroupedWeight
from ..device.dtypes import ROUNDING_UNIT, TORCH_DTYPES, rounding_unit_of, smallest_spacing
from ..device.precision import PrecisionPolicy
from ..launch.kernel_operation import ProblemShape
from .quantize_rows import QuantizedRows

CHECKED = 64  # rows of a result to check: checking all 2048 in fp64 would take a T4 too long
PART = 16  # columns that every kernel sums together


def random_inputs(
    policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int
) -> tuple[torch.Tensor, GroupedWeight]:
    """Return random x [M, K], and a random weight such that y has about the magnitude of x."""
    dtype = TORCH_DTYPES[policy.storage]
    m, n, k = shape["m"], shape["n"], shape["k"]
    group = shape["group"] or k
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), generator=generator, device=device, dtype=torch.uint8)
    zeros = torch.full((n, k // group), 128, device=device, dtype=torch.uint8)
    if shape["zeros"] == "yes":
        zeros = zeros + torch.randint(-8, 8, zeros.shape, generator=generator, device=device).to(torch.uint8)
    scales = (torch.rand(zeros.shape, generator=generator, device=device) + 0.5) / (74 * k**0.5)
    scales = scales.to(TORCH_DTYPES[shape.get("scales", SCALES)])
    bias = torch.randn(n, generator=generator, device=device).to(dtype) if shape.get("bias", "") else None
    x = torch.randn((m, k), generator=generator, device=device).to(dtype)
    return x, GroupedWeight(codes, scales, zeros, 8, group, bias=bias)


def checked_rows(num_rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return the rows to check: one at random of each of 64 equal parts, so that no tile of many rows is missed.

    Other seeds give other rows. The last row, which ends within a tile, is always included; up to 64 rows are all
    checked.
    """
    if num_rows <= CHECKED:
        return torch.arange(num_rows, device=device)
    bounds = torch.arange(CHECKED + 1) * num_rows // CHECKED  # part i is [bounds[i], bounds[i + 1])
    chance = torch.rand(CHECKED, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = bounds[:-1] + (chance * bounds.diff()).long()
    rows[-1] = num_rows - 1
    return rows.to(device)


def product_error(
    x: QuantizedRows, weight: GroupedWeight, found: torch.Tensor, rows: torch.Tensor | None = None
) -> float:
    """Return the largest ratio of the error of `found` to its bound, compared with fp64.

    The bound covers the rounding of the result and of fp32 sums of parts that are known exactly: every number that is
    converted to fp32 is a sum over a multiple of 16 columns, and at most the sum of their absolute values.

    rows  rows to check, with all columns; None: all
    """
    if rows is not None:
        x, found = QuantizedRows(x.codes.double()[rows], x.scales[rows]), found[rows]
    codes, scales = torch.split(x.codes.double(), PART, 1), weight.scales.double()
    difference = weight.codes.double() - weight.zeros.double().repeat_interleave(weight.group_size, 1)
    expected = torch.zeros(found.shape, dtype=torch.float64, device=found.device)
    terms = expected.clone()
    for part, (a, b) in enumerate(zip(codes, torch.split(difference, PART, 1), strict=True)):
        of_part = (a @ b.T) * x.scales.double()[:, None] * scales[:, part * PART // weight.group_size]
        expected += of_part
        terms += of_part.abs()
    if weight.bias is not None:
        expected += weight.bias.double()
        terms += weight.bias.double().abs()
    depth = 4 + len(codes)  # additions at most, conversion to fp32, two scales, and the bias
    bound = rounding_unit_of(found) * expected.abs() + depth * 2.0**-24 * terms + smallest_spacing(found.dtype)
    return float(((found.double() - expected).abs() / bound).max())


def matmul_error(
    x: torch.Tensor, weight: GroupedWeight, found: torch.Tensor, rows: torch.Tensor | None = None
) -> float:
    """Return the largest ratio of the error of `found` to its bound, compared with fp64.

    Each weight is rounded once, to the dtype of x; so may be sums over parts of K, which cuBLAS may split. All other
    roundings are in fp32: tensor cores of capability 7.0 add four products at a time, and truncate.

    rows  rows to check, with all columns; None: all
    """
    if rows is not None:
        x, found = x[rows], found[rows]
    dense = weight.dequantize(torch.float64)
    expected = x.double() @ dense.T
    terms = x.double().abs() @ dense.abs().T
    if weight.bias is not None:
        expected, terms = expected + weight.bias.double(), terms + weight.bias.double().abs()
    depth = 16 + x.shape[1] // 4
    bound = rounding_unit_of(found) * expected.abs() + (2 * ROUNDING_UNIT[x.dtype] + depth * 2.0**-23) * terms
    bound += smallest_spacing(x.dtype) * (
        1 + 0.5 * x.double().abs().sum(1, keepdim=True)
    )  # rounding of subnormal weights
    return float(((found.double() - expected).abs() / bound).max())
