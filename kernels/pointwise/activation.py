"""SwiGLU activation kernel: silu(gate) * up of a fused projection, computed in fp32 whatever the storage dtype.

A result beyond 65504 becomes infinite in fp16, as in the reference, and reaches the logits, where sampling/sample.py
detects it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import reference
from ..device.dtypes import rounding_unit_of, smallest_spacing, type_name
from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, OperationWork
from ..launch.compiled_launch import cached, cdiv
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config, Variant
from .pointwise_operation import TOKENS, PointwiseOperation, shape_sizes, storage_dtype, worst_ratio


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """Compute silu(gate) * up for BLOCK columns of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + 2 * row * width + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, inside, 0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), inside)


@cached
def silu_mul_variant(dtype: str, width: int, config: Config) -> Variant:
    """Return the compiled variant of the activation kernel.

    dtype   Triton type name of x and the result
    width   I, half the number of columns of x
    config  BLOCK columns per program, a power of two
    """
    types = {"gate_up": f"*{dtype}", "out": f"*{dtype}", "width": "i32"}
    aligned = ("gate_up", "out", "width") if width % 16 == 0 else ("gate_up", "out")
    return Variant("silu_mul", _silu_mul, tuple(types.items()), (), config, aligned)


def silu_mul(gate_up: torch.Tensor, config: Config) -> torch.Tensor:
    """Return silu(gate) * up [T, I] of gate_up [T, 2 * I] = [gate | up], in its dtype."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, cdiv(width, config["BLOCK"]))
        silu_mul_variant(type_name(gate_up), width, config).launch(grid, gate_up, out, width)
    return out


def silu_mul_error(gate_up: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest ratio of the error of `found` to its bound, compared with fp64; at most 1 if it only rounds.

    exp(-gate) is ex2.approx of a rounded product: 2 units in the last place, and those of the product, |gate| times. Of
    this error silu has the share that exp(-gate) has of the denominator. The sum, the division (2) and the product add
    4 more.
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    roundings = (3 + 2 * gate.abs()) * torch.sigmoid(-gate) + 4
    bound = expected.abs() * (rounding_unit_of(found) + 2.0**-23 * roundings) + smallest_spacing(found.dtype)
    # Below -87 the exponential overflows; the result is then 0, and the exact one is smaller than this.
    bound += torch.where(gate < -87, gate.abs() * up.abs() * 2.0**-125, 0.0)
    return worst_ratio(found, expected, bound)


@dataclass(frozen=True, slots=True)
class SiluMulOperation(PointwiseOperation):
    name: str = "silu_mul"

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(n=model.intermediate, t=tokens) for model in MODELS for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(n=MODELS[0].intermediate, t=1),)

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return (ProblemShape.of(n=200, t=5),)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        cuts = [(1024, 4), (512, 2), (256, 1), (512, 4), (2048, 4), (2048, 8)]
        return tuple(Config.of(warps, BLOCK=block) for block, warps in cuts)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        grid = (shape["t"], cdiv(shape["n"], config["BLOCK"]))
        return (KernelLaunch(silu_mul_variant(storage_dtype(policy)[1], shape["n"], config), grid),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        elements = int(shape["t"]) * int(shape["n"])
        return ElementwiseWork(3 * elements * storage_dtype(policy)[0].itemsize, 5 * elements)

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        width, tokens = shape_sizes(shape, "n", "t")
        source, dtype = torch.Generator(device).manual_seed(seed), storage_dtype(policy)[0]
        gate_up = torch.randn(tokens, 2 * width, generator=source, device=device).to(dtype)
        return KernelProblem(
            lambda config: silu_mul(gate_up, config),
            lambda found: silu_mul_error(gate_up, found),
            self.work(policy, shape),
            {"torch": lambda: reference.silu_mul(gate_up)},
        )


SILU_MUL = SiluMulOperation()
OPERATIONS = (SILU_MUL,)
