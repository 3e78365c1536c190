"""Linear layers with int8 weights and activations: y = x @ w.T + bias, x quantized per row.

Sums of products are exact in int32; scales are applied in fp32, once for each group. Zero points (GPTQ's 8 bits) are
corrected exactly: the sum of x's codes in a group, times the zero point, is subtracted in int32. The kernels are in:

    unit of the policy         few rows (up to 8)       more                          many
    tensor-int8, from 8.0      tensor_core_gemm.py      tensor_core_gemm.py           tensor_core_gemm.py
    dp4a, 6.1 to 7.5           dp4a_gemv.py             dp4a_gemm.py, x in panels     6.1: the same
                                                                                      7.0, 7.5: dequantize_int8.py,
                                                                                      x itself

A weight is held once: in rows for tensor cores, in panels for dp4a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..canonical_weights import SCALES, GroupedWeight
from ..device.device_spec import DeviceSpec
from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, LinearWork, OperationWork, roofline
from ..launch.config_tables import fastest_operation
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from . import dp4a_gemm, dp4a_gemv, tensor_core_gemm
from .dequantize_int8 import DEQUANTIZE, Int8DequantizeOperation
from .int8_problem import checked_rows, product_error, random_inputs
from .packed_int8 import PanelsInt8, pack_panels, pack_rows
from .quantize_panels import PANELS_CONFIG as PANELS
from .quantize_panels import QuantizedPanels, QuantizePanelsOperation, quantize_panels
from .quantize_rows import QuantizedRows, quantize_rows
from .tensor_core_gemm import PackedRows8

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
# (group, zero points): the kinds that are tuned, and the other kinds that checkpoints have.
_TUNED = ((0, "no"), (128, "yes"))
_UNTUNED = ((0, "yes"), (32, "yes"))
_MIN_DP4A_SHARE = 0.5  # smallest share of dp4a among the instructions of the inner loop
QuantizedActivations = QuantizedRows | QuantizedPanels
PackedInt8 = PackedRows8 | PanelsInt8


def pack_int8(weight: GroupedWeight, policy: PrecisionPolicy) -> PackedInt8:
    """Pack an int8 weight for the unit that the policy names: rows for tensor cores, panels for dp4a.

    Raises ValueError if the policy names none, and for shapes that do not fit.
    """
    if policy.int8 is None:
        raise ValueError(f"int8: compute capability {policy.capability} does not use it: {policy.reasons['int8']}")
    return pack_panels(weight) if policy.int8.arithmetic == "dp4a" else pack_rows(weight)


def quantizer_name(weight: PackedInt8, num_rows: int) -> str:
    """Name of the operator that `quantize_activations` launches, which is also the name of its tables."""
    panels = isinstance(weight, PanelsInt8) and num_rows > dp4a_gemv.MAX_ROWS
    return "quantize_panels" if panels else "quantize_rows_int8"


def quantize_activations(x: torch.Tensor, weight: PackedInt8, config: Config | None = None) -> QuantizedActivations:
    """Quantize contiguous x [M, K] into the form that the product with this weight reads.

    config  config of the operator `quantizer_name`; None: its default
    """
    with_sums = weight.zeros is not None
    if quantizer_name(weight, x.shape[0]) == "quantize_panels":
        return quantize_panels(x, config or PANELS, group=weight.group, with_sums=with_sums)
    if isinstance(weight, PackedRows8):
        return quantize_rows(x, "int8", config, group=weight.group, with_sums=with_sums)
    return quantize_rows(x, "int8", config, with_sums=with_sums and weight.group == 0)


def multiply_int8(x: QuantizedActivations, weight: PackedInt8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return y [M, N] in `dtype`, for x from `quantize_activations`.

    Raises TypeError for operands that do not fit.
    """
    if isinstance(weight, PackedRows8):
        if isinstance(x, QuantizedPanels):
            raise TypeError("x: panels are for kernels of dp4a; this weight needs rows")
        return tensor_core_gemm.multiply(x, weight, dtype, config)
    if isinstance(x, QuantizedPanels):
        return dp4a_gemm.gemm(x, weight, dtype, config)
    return dp4a_gemv.gemv(x, weight, dtype, config)


def linear_int8(x: torch.Tensor, weight: PackedInt8, config: Config, quantizing: Config | None = None) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias in the dtype of x.

    x must be contiguous, with columns in the order of the packed weight's.

    quantizing  config of the operator `quantizer_name`; None: its default
    """
    return multiply_int8(quantize_activations(x, weight, quantizing), weight, x.dtype, config)


@dataclass(frozen=True, slots=True)
class Int8ProductOperation:
    """Operator of the int8 product, with x already quantized, which is an operator of its own (quantize_rows.py).

    Fields of a shape: m rows of x, n rows of the weight, k columns, group (0: all columns), zeros "yes" or "no".
    """

    name: str = "w8a8"
    exact: frozenset[str] = frozenset({"group"})

    def refusal(self, policy: PrecisionPolicy) -> str:
        return policy.reasons["int8"] if policy.int8 is None else ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        sizes = sorted({size for model in MODELS for size in model.linears.values()})
        return tuple(
            ProblemShape.of(m=m, n=n, k=k, group=g, zeros=z) for g, z in _TUNED for n, k in sizes for m in ROWS
        )

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes: scales of rows and of groups, and the variants that checkpoints have.

        These are a bias, other groups and zero points with every number of rows that has a kernel of its own, and
        scales of other dtypes with many rows.
        """
        often = tuple(_sample(m, group, zeros) for group, zeros in _TUNED for m in (1, 8, 16, 64, 2048))
        kernels = (*range(1, 9), 16, 32, 2048) if _by_dp4a(policy) else (16, 32, 64, 2048)
        seldom = tuple(_sample(m, group, zeros, bias="yes") for group, zeros in _UNTUNED for m in kernels)
        row_counts = (dp4a_gemv.MAX_ROWS, kernels[-1]) if _by_dp4a(policy) else kernels[-1:]
        types = zip(_UNTUNED, ("bf16", "fp32"), strict=True)
        seldom += tuple(_sample(m, *kind, bias="yes", scales=scales) for kind, scales in types for m in row_counts)
        if _by_dp4a(policy):  # numbers of rows that use a neighbour's tuned config
            own = tuple(_sample(m, 128, "yes", bias="yes") for m in (3, 5, 6, 7))
        else:  # for K that ends within a step
            ending = (_sample(m, 0, zeros, k=4112, bias="yes") for zeros in ("no", "yes") for m in (16, 2048))
            wide = (  # so many rows of the weight that K is not split
                ProblemShape.of(m=m, n=37_888, k=4096, group=group, zeros=zeros, bias="yes")
                for group, zeros in _UNTUNED
                for m in (16, 32, 64)
            )
            own = (*ending, *wide)
        return (often[0], *seldom, *own, *often[1:])

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(
            ProblemShape.of(m=m, n=64, k=256, group=group, zeros=zeros) for group, zeros in _TUNED for m in (3, 20)
        )

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        if _by_dp4a(policy):
            return _gemv_configs() if shape["m"] <= dp4a_gemv.MAX_ROWS else _gemm_configs(shape)
        return tensor_core_gemm.tensor_configs(policy, shape["m"], shape["n"], shape["k"], shape["group"], fp8=False)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        half, zeros, m, n = policy.storage, shape["zeros"] == "yes", shape["m"], shape["n"]
        scales, bias = shape.get("scales", SCALES), half if shape.get("bias", "") else None
        if not _by_dp4a(policy):
            made = tensor_core_gemm.multiply_variants(
                half, shape["k"], config, fp8=False, scales=scales, group=shape["group"], zeros=zeros, bias=bias
            )
            return tensor_core_gemm.multiply_launches(policy, m, n, config, made, fp8=False)
        if m <= dp4a_gemv.MAX_ROWS:
            variant = dp4a_gemv.gemv_variant(
                half, m, config, scales=scales, group=shape["group"], zeros=zeros, bias=bias, ptx=True
            )
            return (KernelLaunch(variant, dp4a_gemv.gemv_grid(n, config), "dp4a.s32.s32", share=_MIN_DP4A_SHARE),)
        variant = dp4a_gemm.gemm_variant(
            half, config, scales=scales, group=shape["group"], zeros=zeros, bias=bias, ptx=True
        )  # fmt: skip
        return (KernelLaunch(variant, dp4a_gemm.gemm_grid(m, n, config), "dp4a.s32.s32", share=_MIN_DP4A_SHARE),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        return LinearWork(shape["m"], shape["n"], shape["k"], 8, shape["group"] or shape["k"], "int8")

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        x, given = random_inputs(policy, shape, device, seed)
        weight, dtype = pack_int8(given, policy), x.dtype
        quantized, rows = quantize_activations(x, weight), quantize_rows(x, "int8")
        dense = given.dequantize(dtype)
        signed = (given.codes.to(torch.int16) - 128).to(torch.int8)
        return KernelProblem(
            run=lambda config: multiply_int8(quantized, weight, dtype, config),
            error=lambda found: product_error(rows, given, found, checked_rows(shape["m"], seed, device)),
            work=self.work(policy, shape),
            peers={
                f"torch.matmul {policy.storage}": lambda: torch.matmul(x, dense.T),
                "torch._int_mm": lambda: torch._int_mm(rows.codes, signed.T),
            },
        )


PRODUCT = Int8ProductOperation()


def kernel_for(
    policy: PrecisionPolicy, shape: ProblemShape, device: DeviceSpec
) -> tuple[Int8ProductOperation | Int8DequantizeOperation, str]:
    """Return the operator that serves a shape on a device, and the reason.

    It is the faster one as measured on that device, if both were measured; otherwise by the roofline. It is the same
    for all batch sizes that a CUDA graph pads to one size, see `w4a16.int4_operations.kernel_for`.
    """
    if len(policy.int8_units) == 1:
        return PRODUCT, policy.reasons["int8"]
    operations: tuple[Int8ProductOperation | Int8DequantizeOperation, ...] = (PRODUCT, DEQUANTIZE)
    if measured := fastest_operation(operations, policy, shape.rounded, device):
        return measured[0], f"measured: {measured[1]:.1f} us"
    shape = shape.padded
    lanes_s, full_s = _quantized_s(device, policy, shape), _written_out_s(device, shape)
    predicted = sorted(((lanes_s, "by dp4a"), (full_s, "written out")))
    why = "by the roofline " + ", ".join(f"{seconds * 1e6:.0f} us {how}" for seconds, how in predicted)
    return (PRODUCT if lanes_s <= full_s else DEQUANTIZE), why


def _quantized_s(device: DeviceSpec, policy: PrecisionPolicy, shape: ProblemShape) -> float:
    """Predicted seconds to quantize x to 8 bits and to multiply by dp4a."""
    quantizing = roofline(device, QuantizePanelsOperation().work(policy, shape))
    return quantizing.seconds + roofline(device, PRODUCT.work(policy, shape), "dp4a").seconds


def _written_out_s(device: DeviceSpec, shape: ProblemShape) -> float:
    """Predicted seconds to write the weights dequantized in full, and to multiply with torch.matmul."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    return roofline(device, ElementwiseWork(3 * n * k)).seconds + roofline(device, LinearWork(m, n, k, 16)).seconds


def _sample(m: int, group: int, zeros: str, k: int = 4096, **words: str) -> ProblemShape:
    return ProblemShape.of(m=m, n=4096, k=k, group=group, zeros=zeros, **words)


def _by_dp4a(policy: PrecisionPolicy) -> bool:
    return policy.int8 is not None and policy.int8.arithmetic == "dp4a"


def _gemv_configs() -> tuple[Config, ...]:
    return tuple(Config.of(warps, 1, BLOCK_N=rows) for rows in (32, 64, 128) for warps in (8, 4, 16))


def _gemm_configs(shape: ProblemShape) -> tuple[Config, ...]:
    """Return the configs to try: warps, warps side by side, and results per thread.

    With groups, fp32 sums take registers of their own, so that a thread has fewer results.
    """
    few = ((4, 4, 4, 4), (2, 2, 4, 4)) if shape["m"] <= 16 else ((4, 4, 8, 4), (2, 2, 8, 4))
    many = ((4, 2, 8, 8), (8, 2, 8, 4), (8, 2, 4, 8)) if shape["group"] else ((8, 2, 8, 8), (4, 2, 8, 8), (8, 2, 8, 4))
    cuts = few if shape["m"] <= 32 else many
    return tuple(
        Config.of(warps, 1, WARPS_N=beside, TILE_M=tile_m, TILE_N=tile_n, UNROLL=unroll)
        for warps, beside, tile_m, tile_n in cuts
        for unroll in ((4, 2) if shape["m"] <= 32 else (2, 1))
    )
