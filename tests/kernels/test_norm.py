"""RMSNorm against fp64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.pointwise.norm import add_rms_norm, rms_norm
from motley.kernels.pointwise.norm_operation import ADD_RMS_NORM, HEAD_NORM, RMS_NORM, add_norm_error, norm_error

# numpy, on which the interpreter runs, warns of what is tested here
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LONG, SHORT = Config.of(2, BLOCK=256), Config.of(2, ROWS=8)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("config", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 896), (9, 100), (5, 4, 96), (2, 3, 2, 24), (257,)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, config: Config) -> None:
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(torch.float32)
    found = rms_norm(x, weight, 1e-6, config)
    assert found.dtype == dtype
    assert found.shape == shape
    assert norm_error(x, weight, 1e-6, found) <= 1


@pytest.mark.parametrize("config", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("turned", [(1, 0), (0, 2, 1), (2, 1, 0), (3, 0, 2, 1)], ids=str)
def test_rows_that_are_not_whole_keep_their_shape(turned: tuple[int, ...], config: Config) -> None:
    x = torch.randn((4, 6, 8, 10)[: len(turned)]).half().permute(turned)
    found = rms_norm(x, torch.ones(x.shape[-1]).half(), 1e-6, config)
    assert found.shape == x.shape
    assert norm_error(x, torch.ones(x.shape[-1]).half(), 1e-6, found) <= 1


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_the_weight_has_a_dtype_of_its_own(weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 300).half(), torch.randn(300).to(weight_dtype)
    for config in (LONG, SHORT):
        assert norm_error(x, weight, 1e-5, rms_norm(x, weight, 1e-5, config)) <= 1


@pytest.mark.parametrize("config", [LONG, SHORT, Config.of(1, ROWS=2)], ids=["long", "short", "two"])
def test_heads_are_normalised_where_they_lie_in_the_projection(config: Config) -> None:
    joined = torch.randn(5, 7, 80).half()
    weight = torch.rand(80).half()
    for heads in (joined[:, :3], joined[:, 3:5], joined[:, 6:], joined[:, ::2]):
        found = rms_norm(heads, weight, 1e-6, config)
        assert found.is_contiguous()
        assert norm_error(heads, weight, 1e-6, found) <= 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (4, 1000)], ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, in_place: bool) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, kept = torch.rand(shape[1]).to(dtype), residual.clone()
    found = add_rms_norm(x, residual, weight, 1e-5, LONG, in_place=in_place)
    assert add_norm_error(x, kept, weight, 1e-5, found) <= 1
    assert (found[1] is residual) == in_place
    assert torch.equal(residual, found[1] if in_place else kept)


def test_rows_of_zeros_and_tiny_ones_are_divided_by_eps() -> None:
    x = torch.zeros(2, 100)
    x[1] = 1e-12
    weight = torch.ones(100)
    for config in (LONG, SHORT):
        assert norm_error(x, weight, 1e-6, rms_norm(x, weight, 1e-6, config)) <= 1


def test_what_is_not_a_number_stays_in_its_row_and_overflow_is_seen() -> None:
    x, weight = torch.ones(3, 300).half(), torch.ones(300).half()
    x[1, 5] = float("nan")
    x[2, 7] = 60000
    normed, total = add_rms_norm(x, x.clone(), weight, 1e-6, LONG)
    assert not normed[0].isnan().any()
    assert normed[1].isnan().all()
    assert total[2, 7] == float("inf")
    assert normed[2, 7].isnan()


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6, LONG).shape == (0, 64)
    assert add_rms_norm(torch.empty(0, 64), torch.empty(0, 64), torch.ones(64), 1e-6, LONG)[0].shape == (0, 64)


@pytest.mark.parametrize("version", [(6, 1), (8, 0)], ids=["6.1", "8.0"])
@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (RMS_NORM, ProblemShape.of(n=896, t=2)),
        (ADD_RMS_NORM, ProblemShape.of(n=1100, t=2)),
        (HEAD_NORM, ProblemShape.of(d=128, h=3, t=3)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_every_config_solves_the_problem(operation, shape: ProblemShape, version: tuple[int, int]) -> None:
    policy = policy_of(*version)
    problem = operation.problem(policy, shape, torch.device("cpu"))
    for config in operation.configs(policy, shape):
        assert problem.error(problem.run(config)) <= 1
        assert operation.launches(policy, shape, config)
    assert problem.error(problem.peers["torch"]()) <= 1
