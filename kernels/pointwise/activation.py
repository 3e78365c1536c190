"""silu(gate) * up of a fused projection, in fp32 whatever the storage.

What is beyond 65504 in fp16 becomes infinite, as in the reference, and reaches the logits, where sampling/sample.py
sees it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import reference
from ..dtypes import rounding, smallest, type_name
from ..launching import cached, cdiv
from ..model_shapes import MODELS
from ..operation import Launch, Problem, Shape
from ..precision import PrecisionPolicy
from ..roofline import Elementwise, Op
from ..variant import Config, Variant
from .common import TOKENS, Pointwise, sizes, storage, worst

__all__ = ["OPERATIONS", "SILU_MUL", "silu_mul", "silu_mul_variant"]


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + 2 * row * width + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, inside, 0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), inside)


@cached
def silu_mul_variant(dtype: str, width: int, config: Config) -> Variant:
    """`dtype`: of x and the result, in Triton's words; `width`: I. config: BLOCK columns, a power of two."""
    types = {"gate_up": f"*{dtype}", "out": f"*{dtype}", "width": "i32"}
    aligned = ("gate_up", "out", "width") if width % 16 == 0 else ("gate_up", "out")
    return Variant("silu_mul", _silu_mul, tuple(types.items()), (), config, aligned)


def silu_mul(gate_up: torch.Tensor, config: Config) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] = [gate | up]; returns [T, I] in its dtype."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, cdiv(width, config["BLOCK"]))
        silu_mul_variant(type_name(gate_up), width, config).launch(grid, gate_up, out, width)
    return out


def silu_mul_error(gate_up: torch.Tensor, found: torch.Tensor) -> float:
    """Of `found` to fp64, over what rounding explains.

    exp(-gate) is ex2.approx of a rounded product: 2 units in the last place and those of the product, |gate| times;
    of it silu has as much as exp(-gate) has of the denominator. Sum, division (2) and product are 4 more.
    """
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    roundings = (3 + 2 * gate.abs()) * torch.sigmoid(-gate) + 4
    bound = expected.abs() * (rounding(found) + 2.0**-23 * roundings) + smallest(found.dtype)
    # Below -87 the exponential overflows, and what is then 0 was less than this.
    bound += torch.where(gate < -87, gate.abs() * up.abs() * 2.0**-125, 0.0)
    return worst(found, expected, bound)


@dataclass(frozen=True, slots=True)
class SiluMul(Pointwise):
    name: str = "silu_mul"

    def shapes(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return tuple(Shape.of(n=model.intermediate, t=tokens) for model in MODELS for tokens in TOKENS)

    def samples(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return (Shape.of(n=MODELS[0].intermediate, t=1),)

    def small(self, policy: PrecisionPolicy) -> tuple[Shape, ...]:
        return (Shape.of(n=200, t=5),)

    def configs(self, policy: PrecisionPolicy, shape: Shape) -> tuple[Config, ...]:
        cuts = [(1024, 4), (512, 2), (256, 1), (512, 4), (2048, 4), (2048, 8)]
        return tuple(Config.of(warps, BLOCK=block) for block, warps in cuts)

    def launches(self, policy: PrecisionPolicy, shape: Shape, config: Config) -> tuple[Launch, ...]:
        grid = (shape["t"], cdiv(shape["n"], config["BLOCK"]))
        return (Launch(silu_mul_variant(storage(policy)[1], shape["n"], config), grid),)

    def work(self, policy: PrecisionPolicy, shape: Shape) -> Op:
        elements = int(shape["t"]) * int(shape["n"])
        return Elementwise(3 * elements * storage(policy)[0].itemsize, 5 * elements)

    def problem(self, policy: PrecisionPolicy, shape: Shape, device: torch.device, seed: int = 0) -> Problem:
        width, tokens = sizes(shape, "n", "t")
        source, dtype = torch.Generator(device).manual_seed(seed), storage(policy)[0]
        gate_up = torch.randn(tokens, 2 * width, generator=source, device=device).to(dtype)
        return Problem(
            lambda config: silu_mul(gate_up, config),
            lambda found: silu_mul_error(gate_up, found),
            self.work(policy, shape),
            {"torch": lambda: reference.silu_mul(gate_up)},
        )


SILU_MUL = SiluMul()
OPERATIONS = (SILU_MUL,)
