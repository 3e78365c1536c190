"""silu(gate) * up against fp64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.pointwise.activation import SILU_MUL, silu_mul, silu_mul_error

# numpy, on which the interpreter runs, warns of what is tested here
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CONFIG = Config.of(1, BLOCK=64)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (9, 100), (2, 1000), (3, 6)], ids=str)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(shape) * 10).to(dtype)
    found = silu_mul(gate_up, CONFIG)
    assert found.dtype == dtype
    assert found.shape == (shape[0], shape[1] // 2)
    assert silu_mul_error(gate_up, found) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends(dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e4, -200.0, -90.0, -88.0, -87.0, -1e-4, 0.0, 90.0, 1e4])
    gate_up = torch.cat((gates, torch.ones(9)))[None].to(dtype)
    found = silu_mul(gate_up, CONFIG)
    assert found.isfinite().all()
    assert silu_mul_error(gate_up, found) <= 1


def test_what_is_not_a_number_stays_one_and_overflow_is_seen() -> None:
    gate_up = torch.ones(1, 8).half()
    gate_up[0, 1], gate_up[0, 6] = float("nan"), float("nan")
    gate_up[0, 3] = gate_up[0, 7] = 1000
    found = silu_mul(gate_up, CONFIG)[0]
    assert found.isnan().tolist() == [False, True, True, False]
    assert found[3] == float("inf")


def test_no_rows() -> None:
    assert silu_mul(torch.empty(0, 8), CONFIG).shape == (0, 4)


@pytest.mark.parametrize("version", [(6, 1), (8, 0)], ids=["6.1", "8.0"])
def test_every_config_solves_the_problem(version: tuple[int, int]) -> None:
    policy, shape = policy_of(*version), ProblemShape.of(n=600, t=2)
    problem = SILU_MUL.problem(policy, shape, torch.device("cpu"))
    for config in SILU_MUL.configs(policy, shape):
        assert problem.error(problem.run(config)) <= 1
        assert SILU_MUL.launches(policy, shape, config)
    assert problem.error(problem.peers["torch"]()) <= 1
