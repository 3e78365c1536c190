"""Activations to 8 bits, in rows and in panels, against fp64."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.w8a8.quantize_panels import QuantizePanelsOperation, quantize_panels, unpack_panels
from motley.kernels.w8a8.quantize_rows import Codes, QuantizeRowsOperation, quantize_rows, rounding_error

KINDS: tuple[Codes, ...] = ("int8", "fp8")
SMALL = Config.of(4, 1, BLOCK=128)


def rows(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    torch.manual_seed(num_rows + num_columns)
    return (torch.randn(num_rows, num_columns) * torch.logspace(-2, 2, num_rows)[:, None]).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 16), (3, 100), (5, 640)])
def test_codes_are_within_half_a_step(kind: Codes, dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
    x = rows(num_rows, num_columns, dtype)
    for config in (None, SMALL):  # in one pass, and in two where there are more than 128 columns
        found = quantize_rows(x, kind, config)
        assert rounding_error(x, found, kind) <= 1
        largest = x.float().abs().amax(1) / (127 if kind == "int8" else 448)
        assert torch.equal(found.scales, largest)


def test_the_largest_of_a_row_is_the_last_code() -> None:
    x = rows(4, 64, torch.float32)
    assert (quantize_rows(x, "int8").codes.int().abs().amax(1) == 127).all()
    assert (quantize_rows(x, "fp8").codes.float().abs().amax(1) == 448).all()


def test_both_ways_of_going_over_a_row_give_the_same_codes() -> None:
    x = rows(4, 640)
    for kind in KINDS:
        one, two = quantize_rows(x, kind), quantize_rows(x, kind, SMALL)
        assert torch.equal(one.codes.view(torch.int8), two.codes.view(torch.int8))
        assert torch.equal(one.scales, two.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_stays_in_its_row(kind: Codes) -> None:
    x = rows(4, 192)
    loud = x.clone()
    loud[1, 7] = 60_000
    quiet, beside = quantize_rows(x, kind), quantize_rows(loud, kind)
    others = [0, 2, 3]
    assert torch.equal(quiet.codes.view(torch.int8)[others], beside.codes.view(torch.int8)[others])
    assert torch.equal(quiet.scales[others], beside.scales[others])
    assert beside.scales[1] > quiet.scales[1]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_what_is_no_number(kind: Codes) -> None:
    x = torch.ones(4, 160)
    x[0] = 0
    x[1] *= 2.0**-120
    x[2, 150] = torch.inf
    x[3, 3] = torch.nan
    for config in (None, SMALL):
        found = quantize_rows(x, kind, config)
        assert (found.scales[:2] == 0).all()
        assert (found.codes[:2].float() == 0).all()
        assert not found.scales[2:].isfinite().any(), "seen in the result"
    if kind == "int8":
        panels = quantize_panels(x)
        assert (panels.scales[:2] == 0).all()
        assert not panels.scales[2:].isfinite().any()


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "group"), [(1, 96, 32), (130, 128, 64), (33, 256, 128), (5, 208, 0)]
)
def test_panels_hold_what_rows_do(num_rows: int, num_columns: int, group: int) -> None:
    x = rows(num_rows, num_columns)
    by_row = quantize_rows(x, "int8", group=group, with_sums=True)
    panels = quantize_panels(x, group=group, with_sums=True)
    assert torch.equal(unpack_panels(panels).codes, by_row.codes)
    assert torch.equal(panels.scales, by_row.scales)
    assert not panels.words[-1, :, (num_rows - 1) % 128 + 1 :].any(), "rows beyond the last are zeros"
    parts = by_row.codes.int().view(num_rows, -1, group or num_columns).sum(2, dtype=torch.int32).T
    assert by_row.sums is not None
    assert panels.sums is not None
    assert torch.equal(by_row.sums, parts)
    in_two_passes = quantize_rows(x, "int8", SMALL, group=group, with_sums=True).sums
    assert in_two_passes is not None
    assert torch.equal(in_two_passes, parts)
    assert torch.equal(panels.sums[:, :num_rows], parts)


def test_groups_that_do_not_fit_are_refused() -> None:
    for call in (quantize_panels, lambda x, **more: quantize_rows(x, "int8", **more)):
        with pytest.raises(ValueError, match=r"group|is not a multiple of 64"):
            call(torch.zeros(1, 96), group=64, with_sums=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_says_where_it_is_used_and_finds_its_own_errors(kind: Codes) -> None:
    operation = QuantizeRowsOperation(kind)
    used = {
        device.capability.version for device in DEVICES if not operation.refusal(policy_of(*device.capability.version))
    }
    assert ((6, 0) in used, (6, 1) in used, (8, 9) in used) == (False, kind == "int8", True)
    policy = policy_of(8, 9)
    shape = operation.samples(policy)[0]
    problem = operation.problem(policy, shape, torch.device("cpu"))
    found = problem.run(operation.configs(policy, shape)[0])
    assert problem.error(found) <= 1
    found.codes.view(torch.int8)[0, 0] ^= 64
    assert problem.error(found) > 1
    assert operation.launches(policy, shape, operation.configs(policy, shape)[0])[0].grid == (8,)


def test_the_operation_of_panels_is_for_dp4a_and_finds_its_own_errors() -> None:
    operation = QuantizePanelsOperation()
    assert operation.refusal(policy_of(6, 0)) == policy_of(6, 0).reasons["int8"]
    assert "rows" in operation.refusal(policy_of(8, 0))
    policy = policy_of(6, 1)
    assert not operation.refusal(policy)
    shape = ProblemShape.of(m=9, k=160)
    problem = operation.problem(policy, shape, torch.device("cpu"))
    for config in operation.configs(policy, shape):
        found = problem.run(config)
        assert problem.error(found) <= 1
        assert operation.launches(policy, shape, config)[0].grid == (128 // config["ROWS"],)
    found.words[0, 3, 1] ^= 64
    assert problem.error(found) > 1
