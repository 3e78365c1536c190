"""Operators of linear layers with int4 weights and half-precision activations: y [M, N] = x [M, K] @ w.T + bias.

Three kernels with one contract serve different numbers of tokens:

w4a16_gemv        on CUDA cores in fp32, eight tokens at a time: all compute capabilities; the only kernel below 8.0
w4a16_gemm        on tensor cores, up to 64 tokens: from 8.0
w4a16_dequantize  weights dequantized in full, then torch.matmul: for more tokens than the crossover
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch

from ..canonical_weights import SCALES, GroupedWeight
from ..device.device_spec import DeviceSpec
from ..device.dtypes import ROUNDING_UNIT, TORCH_DTYPES, rounding_unit_of
from ..device.precision import PrecisionPolicy
from ..device.roofline import LinearWork, predict_on_unit, roofline
from ..launch.config_tables import fastest_operation
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from . import dequantize_int4, int4_gemm, int4_gemv
from .packed_int4 import GROUP_SIZES, PackedInt4, pack_int4, unpack_int4

GROUP = GROUP_SIZES[-1]


def linear_reference(x: torch.Tensor, weight: PackedInt4) -> torch.Tensor:
    """Return y in fp64; the columns of x are in the order of the columns of `words`."""
    y = x.double() @ unpack_int4(weight).T
    return y if weight.bias is None else y + weight.bias.double()


def rounding_allowance(x: torch.Tensor, weight: PackedInt4, unit: float = 0.0) -> torch.Tensor:
    """Return the error [M, N] that a result may have: its own rounding, and the rounding of sums in fp32.

    unit  relative rounding of terms before they are summed; 0 where they are not rounded
    """
    bias = None if weight.bias is None else weight.bias.abs()
    terms = x.double().abs() @ unpack_int4(weight).abs().T + (0.0 if bias is None else bias.double())
    depth = 16 + x.shape[1] // 8  # largest number of additions that one term goes through
    return (
        rounding_unit_of(x) * linear_reference(x, weight).abs() + (depth * ROUNDING_UNIT[torch.float32] + unit) * terms
    )


class Int4Operation:
    """Base class of the int4 operators; `run` computes a product, and `launches` lists the kernels that it launches."""

    exact = frozenset({"group"})

    def __init__(
        self,
        name: str,
        tokens: tuple[int, ...],
        run: Callable[[torch.Tensor, PackedInt4, PrecisionPolicy, Config], torch.Tensor],
        unit: Callable[[PrecisionPolicy], float],
    ) -> None:
        self.name = name
        self._tokens = tokens
        self._run = run
        self.unit = unit  # relative rounding of terms before they are summed

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Shapes of every linear layer of the models, with groups of 128, for every number of tokens."""
        sizes = {size for model in MODELS for size in model.linears.values()}
        return tuple(
            ProblemShape.of(m=m, n=n, k=k, group=GROUP) for n, k in sorted(sizes) for m in self._numbers(policy)
        )

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Shapes that represent all others in tests: the fewest tokens and the most, and variants in real checkpoints.

        These are a bias, smaller groups with every number of tokens that has a kernel of its own, and scales of other
        dtypes, each with the most tokens.
        """
        few, *_, many = self._numbers(policy)
        first, last = (ProblemShape.of(m=m, n=4096, k=4096, group=GROUP) for m in (few, many))
        kernels = self._kernels(policy)
        smaller = (_checkpoint(m, group) for group in GROUP_SIZES[:-1] for m in kernels)
        max_rows = (kernels or (many,))[-1]
        rare = ((GROUP_SIZES[0], "fp32"), (GROUP_SIZES[1], "bf16"))
        others = (_checkpoint(max_rows, group, scales) for group, scales in rare)
        return (first, *smaller, *others, *self._seldom(policy), last)

    def _kernels(self, policy: PrecisionPolicy) -> tuple[int, ...]:
        """Numbers of tokens, one for each kernel that may be launched with smaller groups, which are not tuned."""
        return self._numbers(policy)[-1:]

    def _seldom(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Return further sample shapes of an int4 operator, for kernels that are rarely launched."""
        return ()

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        few, *_, many = self._numbers(policy)
        return tuple(ProblemShape.of(m=min(m, 20), n=64, k=384, group=group) for m, group in ((few, 128), (many, 32)))

    def _numbers(self, policy: PrecisionPolicy) -> tuple[int, ...]:
        return self._tokens

    def launch(self, x: torch.Tensor, weight: PackedInt4, policy: PrecisionPolicy, config: Config) -> torch.Tensor:
        """Return y for x [M, K], which must be contiguous, with columns in the order of the columns of `words`."""
        return self._run(x, weight, policy, config)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> LinearWork:
        return LinearWork(shape["m"], shape["n"], shape["k"], 4, shape["group"])

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        """Return a problem with weights as in a checkpoint and activations of unit variance.

        The reference is computed in fp64 on the device.
        """
        generator = torch.Generator(device).manual_seed(seed)
        m, n, k, group = (shape[name] for name in ("m", "n", "k", "group"))
        dtype = TORCH_DTYPES[policy.storage]
        codes = torch.randint(0, 16, (n, k), generator=generator, device=device, dtype=torch.uint8)
        zeros = torch.randint(6, 10, (n, k // group), generator=generator, device=device, dtype=torch.uint8)
        scales = torch.rand((n, k // group), generator=generator, device=device).add_(0.5).mul_(0.01)
        scales = scales.to(TORCH_DTYPES[_scales(shape)])
        bias = torch.randn(n, generator=generator, device=device).to(dtype) if shape.get("bias", "") else None
        weight = pack_int4(GroupedWeight(codes, scales, zeros, 4, group, bias=bias))
        x = torch.randn((m, k), generator=generator, device=device, dtype=torch.float32).to(dtype)

        def error(found: torch.Tensor) -> float:
            allowed = rounding_allowance(x, weight, self.unit(policy))
            return float(((found.double() - linear_reference(x, weight)).abs() / allowed).max())

        dense: list[torch.Tensor] = []  # filled when a peer is first measured

        def torch_matmul() -> torch.Tensor:
            if not dense:
                dense.append(unpack_int4(weight).to(dtype))
            return x @ dense[0].T

        torchs: list[torch.Tensor] = []

        def int4pack() -> torch.Tensor:
            """Return the product by torch's own int4 kernel, from capability 8.0.

            There w = (code - 8) * scale + offset; of two columns the first is the high nibble.
            """
            if not torchs:
                pairs = torch.stack((scales.float(), (8.0 - zeros) * scales), -1).to(dtype).transpose(0, 1).contiguous()
                torchs[:] = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8), pairs
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x, torchs[0], group, torchs[1])
            return y

        peers: dict[str, Callable[[], object]] = {f"torch.matmul {policy.storage}": torch_matmul}
        if policy.storage == "bf16":
            peers["int4pack_mm"] = int4pack
        return KernelProblem(
            lambda config: self.launch(x, weight, policy, config), error, self.work(policy, shape), peers
        )  # fmt: skip


class _Int4Gemv(Int4Operation):
    def _numbers(self, policy: PrecisionPolicy) -> tuple[int, ...]:
        """Numbers of tokens to tune for.

        Beyond eight tokens weights are read again, which pays only on GPUs without suitable tensor cores.
        """
        return tuple(m for m in self._tokens if m <= int4_gemv.MAX_TOKENS or not policy.capability.bf16)

    def _seldom(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes for numbers of tokens that use a neighbour's tuned config, where this kernel serves them."""
        numbers = () if policy.capability.bf16 else (3, 5, 6, 7, 9, 11, 13)
        return tuple(_checkpoint(m, GROUP) for m in numbers)

    def _kernels(self, policy: PrecisionPolicy) -> tuple[int, ...]:
        """Numbers of tokens with smaller groups; none from capability 8.0, where it is chosen only as measured, for
        groups of 128.
        """
        return () if policy.capability.bf16 else tuple(range(1, int4_gemv.MAX_TOKENS + 1))

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs to try: 4 warps hold 512 words at a time, and REPEAT groups of rows share the
        loads of x.
        """
        repeats = (2, 1, 4) if shape["m"] <= 2 else (1, 2)
        return tuple(
            Config.of(warps, 1, ROWS=rows, REPEAT=repeat)
            for rows in (8, 4, 16)
            for warps in (4, 2)
            for repeat in repeats
        )

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        half, tokens = policy.storage, int4_gemv.tokens_at_once(shape["m"])
        variant = int4_gemv.gemv_variant(
            half, tokens, shape["group"], config, **_types(policy, shape), half=_in_half(policy)
        )  # fmt: skip
        product = "fma.rn.f16x2" if _in_half(policy) else "fma.rn.f32*"  # from capability 10.0 two at a time: .f32x2
        return (KernelLaunch(variant, int4_gemv.gemv_grid(shape["m"], shape["n"], config), product),)


class _Int4Gemm(Int4Operation):
    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Shapes to tune, including smaller groups: the default config does not split K, which would leave SMs idle."""
        smaller = (ProblemShape.of(m=m, n=4096, k=4096, group=g) for g in GROUP_SIZES[:-1] for m in (16, 32, 64))
        return (*super().shapes(policy), *smaller)  # one for each BLOCK_M

    def refusal(self, policy: PrecisionPolicy) -> str:
        return "" if policy.capability.bf16 else f"tl.dot is {policy.capability.instruction} here: w4a16_gemv instead"

    def _seldom(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shape for which every capability's table leaves K whole, so that the kernel itself adds the bias."""
        return (_checkpoint(32, GROUP, "bf16", n=37_888, k=3584),)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs to try: deep pipelines and several parts of K, since the kernel waits for memory."""
        block_m = max(16, min(64, 1 << (shape["m"] - 1).bit_length()))
        return tuple(
            Config.of(4, stages, BLOCK_N=block_n, BLOCK_M=block_m, SPLITS=splits)
            for block_n in (64, 128, 32)
            for splits in (1, 2, 4, 8)
            for stages in (4, 3, 5)
        )

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        variants = int4_gemm.gemm_variants(policy.storage, shape["group"], config, **_types(policy, shape), ptx=True)
        grids = int4_gemm.gemm_grids(shape["m"], shape["n"], config)
        instruction = policy.decode.of_rows(config["BLOCK_N"], policy.capability).ptx
        moved = 4 * config["SPLITS"] * shape["m"] * shape["n"] if len(variants) > 1 else 0
        return tuple(map(KernelLaunch, variants, grids, (instruction, ""), (moved, moved)))


class _Int4Dequantize(Int4Operation):
    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        return tuple(Config.of(4, 1, ROWS=rows) for rows in (32, 64, 16))

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        variant = dequantize_int4.dequantize_variant(policy.compute, shape["group"], config, scales=_scales(shape))
        return (KernelLaunch(variant, dequantize_int4.dequantize_grid(shape["n"], shape["k"], config)),)


def _checkpoint(m: int, group: int, scales: str = SCALES, n: int = 4096, k: int = 4096) -> ProblemShape:
    """Return a shape with a bias, and with scales of the dtype `scales`, as checkpoints have them."""
    return ProblemShape.of(m=m, n=n, k=k, group=group, bias="yes", scales=scales)


def _scales(shape: ProblemShape) -> str:
    """Triton type name of the scales of a shape; by default the dtype that nearly all checkpoints have."""
    return str(shape.get("scales", SCALES))


class _ArgumentTypes(TypedDict):
    scales: str
    bias: str | None


def _types(policy: PrecisionPolicy, shape: ProblemShape) -> _ArgumentTypes:
    """Return the Triton type names of the scales and of the bias of a shape."""
    return {"scales": _scales(shape), "bias": policy.storage if shape.get("bias", "") else None}


def _in_half(policy: PrecisionPolicy) -> bool:
    return policy.decode.arithmetic == "fp16"


def _gemv(x: torch.Tensor, weight: PackedInt4, policy: PrecisionPolicy, config: Config) -> torch.Tensor:
    return int4_gemv.gemv(x, weight, config, half=_in_half(policy))


def _gemm(x: torch.Tensor, weight: PackedInt4, policy: PrecisionPolicy, config: Config) -> torch.Tensor:
    return int4_gemm.gemm(x, weight, config)


def _matmul(x: torch.Tensor, weight: PackedInt4, policy: PrecisionPolicy, config: Config) -> torch.Tensor:
    return dequantize_int4.matmul(x, weight, TORCH_DTYPES[policy.compute], config)


GEMV = _Int4Gemv("w4a16_gemv", (1, 2, 4, 8, 16, 32, 64), _gemv, lambda policy: int4_gemv.HALF_UNIT * _in_half(policy))
GEMM = _Int4Gemm("w4a16_gemm", (1, 2, 4, 8, 16, 32, 64), _gemm, lambda policy: 0.0)
DEQUANTIZE = _Int4Dequantize(
    "w4a16_dequantize", (256, 2048), _matmul, lambda policy: ROUNDING_UNIT[TORCH_DTYPES[policy.compute]]
)
Int4Kernel = _Int4Gemv | _Int4Gemm | _Int4Dequantize
OPERATIONS: tuple[Int4Kernel, ...] = (GEMV, GEMM, DEQUANTIZE)


def kernel_for(policy: PrecisionPolicy, shape: ProblemShape, device: DeviceSpec) -> tuple[Int4Kernel, str]:
    """Return the int4 kernel that serves a shape on a device, and the reason.

    It is the fastest one as measured on that device, if more than one was measured for this class of shapes; otherwise
    the one that the roofline of their arithmetic predicts. It is the same for all batch sizes that a CUDA graph pads to
    one size, so that a graph rounds in the same way as a step without one.
    """
    if measured := fastest_operation(OPERATIONS, policy, shape.rounded, device):
        return measured[0], f"measured: {measured[1]:.1f} us"
    shape = shape.padded
    lanes_s = _lanes_seconds(device, policy, shape)
    if policy.capability.bf16 and shape["m"] <= int4_gemm.MAX_TOKENS:
        return GEMM, "tensor cores, and weights are read once, as they are held"
    full_s = _dequantize_seconds(device, policy, shape)
    if shape["m"] <= int4_gemv.MAX_TOKENS or lanes_s < full_s:
        return GEMV, f"by the roofline {lanes_s * 1e6:.0f} us on the lanes, {full_s * 1e6:.0f} us written out"
    return DEQUANTIZE, f"by the roofline {full_s * 1e6:.0f} us written out, {lanes_s * 1e6:.0f} us on the lanes"


def _lanes_seconds(device: DeviceSpec, policy: PrecisionPolicy, shape: ProblemShape) -> float:
    """Predicted seconds of the product on CUDA cores, dequantizing weights as they are read."""
    return roofline(device, GEMV.work(policy, shape), "fp16" if _in_half(policy) else "fp32").seconds


def _dequantize_seconds(device: DeviceSpec, policy: PrecisionPolicy, shape: ProblemShape) -> float:
    """Predicted seconds to write the dequantized weights, read them again and multiply.

    The product runs at the rate of the unit that the policy uses for prefill.
    """
    return predict_on_unit(device, DEQUANTIZE.work(policy, shape), policy.prefill).seconds
