"""int4 GEMV against fp64, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from motley.kernels.variant import Config
from motley.kernels.w4a16 import MAX_ROWS, gemv, pack
from motley.kernels.weights import GroupedWeight

CONFIG = Config.of(4, 1, ROWS=4, SPAN=32)
# Half a unit in the last place; a whole one of bf16, which the interpreter cuts off where the compiler rounds.
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-24}


def weight(num_rows: int, num_columns: int, group: int, *, dtype: torch.dtype = torch.float16) -> GroupedWeight:
    torch.manual_seed(num_rows + num_columns + group)
    codes = torch.randint(0, 16, (num_rows, num_columns), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (num_rows, num_columns // group), dtype=torch.uint8)
    scales = (torch.rand(num_rows, num_columns // group) * 0.02 + 0.001).to(dtype)
    return GroupedWeight(codes, scales, zeros, 4, group)


def check(x: torch.Tensor, given: GroupedWeight, config: Config = CONFIG) -> None:
    """Within the rounding of the result, and of fp32 sums whose terms are codes and zeros times activations."""
    found = gemv(x, pack(given), config).double()
    wide, group = x.double(), given.group_size
    scales, zeros = given.scales.double(), given.zeros.double()
    scales, zeros = scales.repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
    codes = given.codes.double()
    expected = wide @ (scales * (codes - zeros)).T
    terms = wide.abs() @ (scales * (codes + zeros)).T
    if given.bias is not None:
        expected += given.bias.double()
        terms += given.bias.double().abs()
    depth = 8 + x.shape[1] // 8  # additions that one term goes through at most
    bound = EPSILON[x.dtype] * expected.abs() + depth * 2.0**-24 * terms
    assert ((found - expected).abs() <= bound).all(), ((found - expected).abs() / bound).max()


@pytest.mark.parametrize("tokens", range(1, MAX_ROWS + 1))
def test_every_number_of_tokens(tokens: int) -> None:
    check(torch.randn(tokens, 384).half(), weight(10, 384, 128))


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 896])
def test_every_group_size(group: int) -> None:
    columns = 1792 if group == 896 else 512
    check(torch.randn(2, columns).half(), weight(7, columns, group))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype(dtype: torch.dtype, scales: torch.dtype) -> None:
    given = replace(weight(6, 256, 64, dtype=scales), bias=torch.randn(6))
    check(torch.randn(3, 256).to(dtype), given)


@pytest.mark.parametrize(("rows", "span"), [(1, 16), (2, 64), (8, 16), (16, 128)])
def test_every_cut(rows: int, span: int) -> None:
    """Rows and columns that do not fill the last program or the last step."""
    check(torch.randn(2, 640).half(), weight(rows + 3, 640, 32), Config.of(4, 1, ROWS=rows, SPAN=span))


def test_an_outlier_stays_in_its_row() -> None:
    given, x = weight(8, 256, 128), torch.randn(4, 256).half()
    loud = x.clone()
    loud[1] *= 1000
    quiet, beside = (gemv(rows, pack(given), CONFIG) for rows in (x, loud))
    assert torch.equal(quiet[[0, 2, 3]], beside[[0, 2, 3]])


@pytest.mark.parametrize(("columns", "group", "bits"), [(192, 64, 4), (256, 48, 4), (256, 128, 8), (768, 192, 4)])
def test_shapes_that_do_not_fit_are_refused(columns: int, group: int, bits: int) -> None:
    codes = torch.zeros((4, columns), dtype=torch.uint8)
    other = torch.zeros((4, -(-columns // group)))
    with pytest.raises(ValueError, match=r"group_size|K in 128s"):
        pack(GroupedWeight(codes, other, other.to(torch.uint8), bits, group))
