"""Linear layers with fp8 e4m3 weights and activations, from capability 8.9: y = x @ w.T + bias, x quantized per row.

Scales of the weight are per output channel, per tensor, or per block of 128 x 128 as in DeepSeek's checkpoints: the
columns of a block are then a product of their own, scaled and added in fp32. The product itself is in
tensor_core_gemm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..canonical_weights import FP8_BLOCK as BLOCK
from ..canonical_weights import Fp8Weight
from ..device.dtypes import TORCH_DTYPES, rounding_unit_of, smallest_spacing
from ..device.precision import PrecisionPolicy
from ..device.roofline import LinearWork, OperationWork
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from . import tensor_core_gemm
from .int8_problem import checked_rows
from .quantize_rows import QuantizedRows, quantize_rows
from .tensor_core_gemm import PackedRows8

__all__ = ["BLOCK", "Fp8ProductOperation", "Fp8Weight", "linear_fp8", "pack_fp8"]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
ODD = 4112  # columns: a multiple of 16, but not of a step


def pack_fp8(weight: Fp8Weight) -> PackedRows8:
    """Pack an fp8 weight, with scales in fp32, to which every format's scales convert exactly.

    The kernels are compiled for fp32 scales only. Raises ValueError for a K that is no multiple of 16, for codes other
    than e4m3, and for scales of another shape.
    """
    num_rows, num_columns = weight.shape
    if weight.codes.dtype != torch.float8_e4m3fn or num_columns % 16:
        raise ValueError(
            f"codes in {weight.codes.dtype} and {num_columns} input features are not accepted; "
            "expected e4m3 and a multiple of 16"
        )
    codes, scales, shape = weight.codes.contiguous(), weight.scales.float(), tuple(weight.scales.shape)
    if weight.in_blocks:
        return PackedRows8(codes, scales.T.contiguous(), None, BLOCK, BLOCK, weight.bias)
    if shape not in ((1, 1), (num_rows, 1)):
        raise ValueError(
            f"scales: {shape} is not accepted; expected (1, 1), (N, 1) or (ceil(N / {BLOCK}), ceil(K / {BLOCK}))"
        )
    return PackedRows8(codes, scales.expand(num_rows, 1).T.contiguous(), bias=weight.bias)


def linear_fp8(x: torch.Tensor, weight: PackedRows8, config: Config, quantizing: Config | None = None) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias in the dtype of x, which must be contiguous.

    quantizing  config of quantize_rows_fp8; None: its default
    """
    return tensor_core_gemm.multiply(quantize_rows(x, "fp8", quantizing), weight, x.dtype, config)


@dataclass(frozen=True, slots=True)
class Fp8ProductOperation:
    """Operator of the fp8 product, with x already quantized, which is an operator of its own (quantize_rows.py).

    Fields of a shape: m rows of x, n rows of the weight, k columns, group 0 (a scale per row) or 128 (a scale per
    block).
    """

    name: str = "fp8"
    exact: frozenset[str] = frozenset({"group"})

    def refusal(self, policy: PrecisionPolicy) -> str:
        return policy.reasons["fp8"] if policy.fp8 is None else ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        sizes = sorted({size for model in MODELS for size in model.linears.values()})
        return tuple(
            ProblemShape.of(m=m, n=n, k=k, group=group) for group in (0, BLOCK) for n, k in sizes for m in ROWS
        )

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes: with and without blocks; for both, a bias and a K that ends within a step."""
        often = tuple(ProblemShape.of(m=m, n=4096, k=4096, group=g) for g in (0, BLOCK) for m in (1, 16, 32, 64, 2048))
        seldom = (ProblemShape.of(m=m, n=4096, k=ODD, group=g, bias="yes") for g in (0, BLOCK) for m in (16, 2048))
        return (often[0], *seldom, *often[1:])

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(m=m, n=128, k=256, group=group) for group in (0, BLOCK) for m in (3, 20))

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        return tensor_core_gemm.tensor_configs(policy, shape["m"], shape["n"], shape["k"], shape["group"], fp8=True)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        share = BLOCK if shape["group"] else 1
        bias = policy.storage if shape.get("bias", "") else None
        made = tensor_core_gemm.multiply_variants(
            policy.storage, shape["k"], config, fp8=True, group=shape["group"], share=share, bias=bias
        )  # fmt: skip
        return tensor_core_gemm.multiply_launches(policy, shape["m"], shape["n"], config, made, fp8=True)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        return LinearWork(shape["m"], shape["n"], shape["k"], 8, shape["group"] or shape["k"], "fp8")

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        dtype = TORCH_DTYPES[policy.storage]
        m, n, k = shape["m"], shape["n"], shape["k"]
        generator = torch.Generator(device).manual_seed(seed)
        codes = (torch.randn((n, k), generator=generator, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        size = (-(-n // BLOCK), -(-k // BLOCK)) if shape["group"] else (n, 1)
        scales = (torch.rand(size, generator=generator, device=device) + 0.5) / (100 * k**0.5)
        bias = torch.randn(n, generator=generator, device=device).to(dtype) if shape.get("bias", "") else None
        given = Fp8Weight(codes, scales, bias)
        x = torch.randn((m, k), generator=generator, device=device).to(dtype)
        weight, rows = pack_fp8(given), quantize_rows(x, "fp8")
        dense = given.dequantize().to(dtype)

        def scaled_mm() -> torch.Tensor:
            """Return the product by torch._scaled_mm with scales per row, the only form that torch has for e4m3 on
            every GPU.
            """
            if shape["group"]:
                raise NotImplementedError(
                    "torch._scaled_mm has no form for scales of rows of x beside those of blocks of the weight"
                )
            return torch._scaled_mm(rows.codes, codes.T, rows.scales[:, None], scales.T, out_dtype=torch.bfloat16)

        return KernelProblem(
            run=lambda config: tensor_core_gemm.multiply(rows, weight, dtype, config),
            error=lambda found: product_error(rows, given, found, checked_rows(m, seed, device)),
            work=self.work(policy, shape),
            peers={f"torch.matmul {policy.storage}": lambda: torch.matmul(x, dense.T), "torch._scaled_mm": scaled_mm},
        )


def product_error(x: QuantizedRows, weight: Fp8Weight, found: torch.Tensor, rows: torch.Tensor | None = None) -> float:
    """Return the largest ratio of the error of `found` to its bound, compared with fp64.

    Tensor cores keep 14 bits or more of a sum of fp8 products, which are exact (DeepSeek-V3 technical report, 3.3.2:
    wgmma), for 128 columns, in steps of 32; the interpreter sums in fp32.

    rows  rows to check; None: all
    """
    if rows is not None:
        x, found = QuantizedRows(x.codes.double()[rows], x.scales[rows]), found[rows]
    a, b = x.codes.double() * x.scales.double()[:, None], weight.dequantize(torch.float64)
    expected, terms = a @ b.T, a.abs() @ b.abs().T
    if weight.bias is not None:
        expected += weight.bias.double()
        terms += weight.bias.double().abs()
    summing = 4 * 2.0**-13 + a.shape[1] / 128 * 2.0**-24 if found.is_cuda else (a.shape[1] + 8) * 2.0**-24
    bound = rounding_unit_of(found) * expected.abs() + summing * terms + smallest_spacing(found.dtype)
    return float(((found.double() - expected).abs() / bound).max())
