"""RMSNorm operators for the compiler, the tuner, the benchmark and the tests; the kernels are in norm.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from ..device.dtypes import rounding_unit_of, smallest_spacing
from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, OperationWork
from ..launch.compiled_launch import cdiv
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from .norm import MAX_COLUMNS, add_rms_norm, norm_variant, rms_norm, short_norm_variant
from .pointwise_operation import TOKENS, PointwiseOperation, shape_sizes, storage_dtype, worst_ratio


def _bound(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the error that rounding explains.

    It covers the last rounding; half the error of the sum of squares, since a root is taken; rsqrt.approx, a division
    and two products. A square goes through at most as many additions as a lane of a warp has columns, plus those
    between lanes and pieces.
    """
    depth = found.shape[-1] / 32 + 16
    return expected.abs() * (rounding_unit_of(found) + (depth / 2 + 8) * 2.0**-24) + smallest_spacing(found.dtype)


def norm_error(x: torch.Tensor, weight: torch.Tensor, eps: float, found: torch.Tensor) -> float:
    """Return the largest ratio of the error of `found` to its bound, compared with fp64.

    x must be exactly the values that were normalised.
    """
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    return worst_ratio(found, expected, _bound(expected, found))


def add_norm_error(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    found: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Return the larger of the error ratios of the sum and of the norm of that very sum, compared with fp64."""
    normed, total = found
    expected = x.double() + residual.double()
    of_sum = worst_ratio(total, expected, expected.abs() * rounding_unit_of(total) + smallest_spacing(total.dtype))
    return max(of_sum, norm_error(total, weight, eps, normed))


@dataclass(frozen=True, slots=True)
class NormOperation(PointwiseOperation):
    """RMSNorm operator over rows of a hidden state; with `add` it first adds the residual."""

    name: str
    add: bool

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(n=model.hidden, t=tokens) for model in MODELS for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes: the hidden sizes of the models, and the longest row that is supported."""
        return tuple(ProblemShape.of(n=n, t=1) for n in (*(model.hidden for model in MODELS), MAX_COLUMNS))

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(n=200, t=5),)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs to try.

        A thread has up to 80 columns, which stay in its registers; up to 64 where a block has twice as many warps.
        """
        cuts = [(1024, 4), (512, 2), (2048, 8), (2048, 4), (4096, 8), (4096, 16)]
        fitting = [(block, warps) for block, warps in cuts if shape["n"] <= 32 * warps * (80 if warps < 16 else 64)]
        first, *others = fitting
        cuts = [first, *((block, warps) for block, warps in others if block <= shape["n"])]
        return tuple(Config.of(warps, BLOCK=block) for block, warps in cuts)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        word = storage_dtype(policy)[1]
        return (KernelLaunch(norm_variant(word, word, shape["n"], config, add=self.add), (shape["t"],)),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        columns, tokens = shape_sizes(shape, "n", "t")
        moved = columns * (tokens * (4 if self.add else 2) + 1)
        return ElementwiseWork(moved * storage_dtype(policy)[0].itemsize, tokens * columns * (5 if self.add else 4))

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        columns, tokens = shape_sizes(shape, "n", "t")
        x, residual, weight = _inputs(policy, (tokens, columns), device, seed)
        if self.add:
            return KernelProblem(
                lambda config: add_rms_norm(x, residual, weight, 1e-6, config),
                lambda found: add_norm_error(x, residual, weight, 1e-6, found),
                self.work(policy, shape),
                {"torch": lambda: reference.add_rms_norm(x, residual, weight, 1e-6)},
            )
        return KernelProblem(
            lambda config: rms_norm(x, weight, 1e-6, config),
            lambda found: norm_error(x, weight, 1e-6, found),
            self.work(policy, shape),
            {"torch": lambda: torch.nn.functional.rms_norm(x, (columns,), weight, 1e-6)},
        )


@dataclass(frozen=True, slots=True)
class HeadNormOperation(PointwiseOperation):
    """RMSNorm operator over every query head, read in place from the fused projection (Qwen3)."""

    name: str = "head_rms_norm"
    exact: frozenset[str] = frozenset({"d"})

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(d=128, h=64, t=tokens) for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(d=128, h=64, t=1),)

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(d=128, h=3, t=5),)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        return tuple(Config.of(warps, ROWS=rows) for rows, warps in [(8, 4), (16, 4), (32, 4), (4, 1), (16, 8)])

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        word = storage_dtype(policy)[1]
        grid = (cdiv(shape["t"] * shape["h"], config["ROWS"]),)
        return (KernelLaunch(short_norm_variant(word, word, shape["d"], config), grid),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        dim, heads, tokens = shape_sizes(shape, "d", "h", "t")
        return ElementwiseWork(
            dim * (2 * tokens * heads + 1) * storage_dtype(policy)[0].itemsize, 4 * tokens * heads * dim
        )

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        dim, heads, tokens = shape_sizes(shape, "d", "h", "t")
        x, _, weight = _inputs(policy, (tokens, heads + 16, dim), device, seed)
        x = x[:, :heads]
        return KernelProblem(
            lambda config: rms_norm(x, weight, 1e-6, config),
            lambda found: norm_error(x, weight, 1e-6, found),
            self.work(policy, shape),
            {"torch": lambda: torch.nn.functional.rms_norm(x, (dim,), weight, 1e-6)},
        )


def _inputs(
    policy: PrecisionPolicy, shape: tuple[int, ...], device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random x and residual of a shape, and a random weight [N], as inputs to test a norm."""
    source, dtype = torch.Generator(device).manual_seed(seed), storage_dtype(policy)[0]
    x, residual = (torch.randn(shape, generator=source, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=source, device=device) + 0.5
    return x, residual, weight.to(dtype)


RMS_NORM = NormOperation("rms_norm", add=False)
ADD_RMS_NORM = NormOperation("add_rms_norm", add=True)
HEAD_NORM = HeadNormOperation()
OPERATIONS = (RMS_NORM, ADD_RMS_NORM, HEAD_NORM)
