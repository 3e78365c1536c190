"""fp8 linear layers against fp64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.w8a8.fp8_product import BLOCK, Fp8ProductOperation, Fp8Weight, linear_fp8, pack_fp8, product_error
from motley.kernels.w8a8.quantize_rows import quantize_rows

SCALES = ("tensor", "rows", "blocks")


def weight(num_rows: int, num_columns: int, scales: str, *, bias: bool = True) -> Fp8Weight:
    torch.manual_seed(num_rows + num_columns)
    codes = (torch.randn(num_rows, num_columns) * 100).to(torch.float8_e4m3fn)
    blocks = -(-num_rows // BLOCK), -(-num_columns // BLOCK)
    size = {"tensor": (1, 1), "rows": (num_rows, 1), "blocks": blocks}[scales]
    return Fp8Weight(codes, torch.rand(size) * 0.001 + 0.0001, torch.randn(num_rows).half() if bias else None)


def config(*, swap: bool = False, split: int = 1, rows: int = 16, columns: int = 32) -> Config:
    return Config.of(4, 1, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=BLOCK, SWAP=swap, SPLIT=split)


def check(x: torch.Tensor, given: Fp8Weight, chosen: Config) -> None:
    found = linear_fp8(x, pack_fp8(given), chosen)
    assert found.dtype == x.dtype
    assert product_error(quantize_rows(x, "fp8"), given, found) <= 1, chosen


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_kind_of_scale(scales: str, swap: bool, split: int) -> None:
    """Rows, columns and blocks that are not full, and more parts of K than steps."""
    check(torch.randn(5, 336).half(), weight(141, 336, scales), config(swap=swap, split=split))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", SCALES)
def test_every_dtype(dtype: torch.dtype, scales: str) -> None:
    check(torch.randn(3, 256).to(dtype), weight(40, 256, scales, bias=False), config())


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_every_number_of_tokens(tokens: int) -> None:
    given = weight(100, 128, "rows")
    for chosen in (config(swap=True, columns=64), config(rows=64)):
        check(torch.randn(tokens, 128).half(), given, chosen)


def test_sums_that_fp32_holds_are_exact() -> None:
    """Small whole numbers: in fp8 as they are."""
    torch.manual_seed(0)
    codes, x = torch.randint(-8, 9, (40, 256)).float(), torch.randint(-14, 15, (5, 256)).float()
    x = (x / 2).round() * 2
    x[:, 0] = 448  # the scale is one
    given = Fp8Weight(codes.to(torch.float8_e4m3fn), torch.ones(1, 1))
    expected = x.long() @ codes.long().T
    for chosen in (config(), config(swap=True), config(split=2)):
        assert torch.equal(linear_fp8(x, pack_fp8(given), chosen).long(), expected)


def test_an_outlier_stays_in_its_row() -> None:
    given, x = weight(40, 256, "blocks"), torch.randn(4, 256).half()
    loud = x.clone()
    loud[1] *= 1000
    quiet, beside = (linear_fp8(rows, pack_fp8(given), config(split=2)) for rows in (x, loud))
    assert torch.equal(quiet[[0, 2, 3]], beside[[0, 2, 3]])


def test_what_is_no_number_shows() -> None:
    given, x = weight(40, 256, "rows"), torch.randn(4, 256).half()
    x[1, 9], x[2, 200] = torch.nan, torch.inf
    found = linear_fp8(x, pack_fp8(given), config())
    assert not found[1:3].isfinite().any()
    assert found[[0, 3]].isfinite().all()


def test_weights_that_do_not_fit_are_refused() -> None:
    given = weight(40, 256, "rows")
    with pytest.raises(ValueError, match="scales"):
        pack_fp8(Fp8Weight(given.codes, torch.ones(1, 40)))
    with pytest.raises(ValueError, match="multiple of 16"):
        pack_fp8(Fp8Weight(given.codes[:, :200], given.scales))
    with pytest.raises(ValueError, match="e4m3"):
        pack_fp8(Fp8Weight(given.codes.to(torch.float8_e5m2), given.scales))


def test_the_operation_names_what_each_capability_runs() -> None:
    operation = Fp8ProductOperation()
    for version in ((6, 1), (8, 0), (8, 6)):
        assert operation.refusal(policy_of(*version)) == policy_of(*version).reasons["fp8"]
    named = {}
    for version in ((8, 9), (9, 0), (10, 0), (12, 0)):
        policy = policy_of(*version)
        assert not operation.refusal(policy)
        named[version] = {
            operation.launches(policy, shape, one)[0].instruction
            for shape in operation.samples(policy)
            for one in operation.configs(policy, shape)
        }
    mma_sync = {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"}
    assert named == {
        (8, 9): mma_sync, (9, 0): {"wgmma.mma_async.sync.aligned.m64n*k32.f32.e4m3.e4m3"},
        (10, 0): {"tcgen05.mma.cta_group::1.kind::f8f6f4"}, (12, 0): mma_sync,
    }  # fmt: skip


@pytest.mark.parametrize("group", [0, BLOCK])
def test_the_operation_runs_and_finds_its_own_errors(group: int) -> None:
    operation, policy = Fp8ProductOperation(), policy_of(9, 0)
    shape = ProblemShape.of(m=4, n=160, k=256, group=group)
    problem = operation.problem(policy, shape, torch.device("cpu"))
    found = problem.run(operation.configs(policy, shape)[0])
    assert problem.error(found) <= 1
    found[1, 3] += found.abs().max() / 16
    assert problem.error(found) > 1
