"""Kernel that writes int8 weights dequantized in full, for torch's matrix product: for many rows on 7.0 and 7.5.

On these compute capabilities Triton cannot use tensor cores, but cuBLAS uses those for fp16, which multiply up to twice
as fast as dp4a. x stays as it is, so it loses nothing by quantization.

    out [K, 128 * panels]:  neighbouring threads read neighbouring rows of a panel and write them side by side, four
                            columns for each word
"""

# Kernel bodies are written in Triton's language, which type checkers do not understand.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..canonical_weights import SCALES
from ..device.dtypes import TORCH_DTYPES, type_name
from ..device.precision import PrecisionPolicy
from ..device.roofline import LinearWork
from ..launch.compiled_launch import cached, cdiv
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config, Variant
from .dp4a_gemm import small_to_float
from .int8_problem import checked_rows, matmul_error, random_inputs
from .packed_int8 import PanelsInt8, pack_panels
from .quantize_panels import PANEL

ROWS = (256, 2048)


@triton.jit
def _dequantize(
    words, scales, zeros, out, PADDED_N, K,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, PANEL: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Dequantize WORDS words of every row of a panel per program; all words belong to one group.

    A weight is computed in fp32 and rounded once.
    """
    panel = tl.program_id(0)
    first = tl.program_id(1) * WORDS
    word = first + tl.arange(0, WORDS)[:, None]
    row = tl.arange(0, PANEL)[None, :]
    valid = (word < K // 4) & (row < PANEL)
    packed = tl.load(words + (panel.to(tl.int64) * (K // 4) + word) * PANEL + row, valid, 0)
    n = panel * PANEL + row
    # As many indices as words, so that a thread reads the scales of its own words and no data moves between threads.
    of_group = (4 * first // GROUP if GROUP > 0 else 0) * PADDED_N + n + 0 * word
    scale = tl.load(scales + of_group).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + of_group).to(tl.int32)
    for byte in tl.static_range(4):
        code = (packed << (24 - 8 * byte)) >> 24
        if ZEROS:
            code -= zero
        at = (4 * word + byte).to(tl.int64) * PADDED_N + n
        tl.store(out + at, (scale * small_to_float(code)).to(out.dtype.element_ty), valid)


@cached
def dequantize_variant(dtype: str, group: int, config: Config, *, scales: str, zeros: bool) -> Variant:
    """Return the compiled variant that dequantizes to `dtype`; config: WORDS per program, at most as many as a group
    has.
    """
    types = {
        "words": "*i32", "scales": f"*{scales}", "zeros": "*i8", "out": f"*{dtype}", "PADDED_N": "i32", "K": "i32"
    }  # fmt: skip
    constants = {"GROUP": group, "ZEROS": zeros, "PANEL": PANEL}
    return Variant(
        "w8a8_dequantize", _dequantize, tuple(types.items()), tuple(constants.items()), config, tuple(types)
    )  # fmt: skip


def dequantize_grid(num_rows: int, num_columns: int, config: Config) -> tuple[int, int]:
    return cdiv(num_rows, PANEL), cdiv(num_columns // 4, config["WORDS"])


def dequantize(weight: PanelsInt8, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """Return the dequantized weight [K, N], a view of a tensor with as many columns as the panels have rows."""
    panels, words, _ = weight.words.shape
    out = torch.empty((4 * words, panels * PANEL), dtype=dtype, device=weight.words.device)
    variant = dequantize_variant(
        type_name(out), weight.group, config, scales=type_name(weight.scales), zeros=weight.zeros is not None
    )
    grid = dequantize_grid(weight.num_rows, 4 * words, config)
    zeros = weight.words.view(torch.int8) if weight.zeros is None else weight.zeros
    variant.launch(grid, weight.words, weight.scales, zeros, out, panels * PANEL, 4 * words)
    return out[:, : weight.num_rows]


def matmul(x: torch.Tensor, weight: PanelsInt8, config: Config) -> torch.Tensor:
    """Return y [M, N] = x [M, K] @ w.T + bias, by torch, in the dtype of x; columns of x in the order of the packed
    weight's.
    """
    dense = dequantize(weight, x.dtype, config)
    return x @ dense if weight.bias is None else torch.addmm(weight.bias.to(x.dtype), x, dense)


@dataclass(frozen=True, slots=True)
class Int8DequantizeOperation:
    """Operator that dequantizes an int8 weight in full and multiplies unquantized x with it.

    Its shapes have the same fields as those of `Int8ProductOperation`.
    """

    name: str = "w8a8_dequantize"
    exact: frozenset[str] = frozenset({"group"})

    def refusal(self, policy: PrecisionPolicy) -> str:
        if len(policy.int8_units) > 1:
            return ""
        return f"nothing here is faster than {policy.int8.arithmetic}" if policy.int8 else policy.reasons["int8"]

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        sizes = sorted({size for model in MODELS for size in model.linears.values()})
        kinds = ((0, "no"), (128, "yes"))
        return tuple(ProblemShape.of(m=m, n=n, k=k, group=g, zeros=z) for g, z in kinds for n, k in sizes for m in ROWS)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        """Sample shapes: all groups and dtypes of scales, with and without zero points, and a K that ends within a
        step.
        """
        sizes = {"m": 2048, "n": 4096, "k": 4096}
        return (
            ProblemShape.of(**sizes, group=0, zeros="no"),
            ProblemShape.of(**sizes, group=128, zeros="yes"),
            ProblemShape.of(**sizes, group=128, zeros="yes", scales="bf16", bias="yes"),
            ProblemShape.of(**sizes, group=32, zeros="yes", bias="yes"),
            ProblemShape.of(**sizes, group=32, zeros="yes", scales="fp32", bias="yes"),
            ProblemShape.of(**{**sizes, "k": 4112}, group=0, zeros="yes"),
        )

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        kinds = ((0, "no"), (128, "yes"))
        return tuple(ProblemShape.of(m=20, n=64, k=256, group=group, zeros=zeros) for group, zeros in kinds)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs to try, all with eight words per thread.

        With 16 words Triton loads more zero points at a time, and exchanges them through shared memory.
        """
        max_words = (shape["group"] or 128) // 4
        return tuple(Config.of(words // 2, 1, WORDS=words) for words in (8, 16, 4, 32) if words <= max_words)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        scales = shape.get("scales", SCALES)
        variant = dequantize_variant(
            policy.storage, shape["group"], config, scales=scales, zeros=shape["zeros"] == "yes"
        )  # fmt: skip
        return (KernelLaunch(variant, dequantize_grid(shape["n"], shape["k"], config)),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> LinearWork:
        return LinearWork(shape["m"], shape["n"], shape["k"], 8, shape["group"] or shape["k"])

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        x, given = random_inputs(policy, shape, device, seed)
        weight, dense = pack_panels(given), given.dequantize(TORCH_DTYPES[policy.storage])
        return KernelProblem(
            run=lambda config: matmul(x, weight, config),
            error=lambda found: matmul_error(x, given, found, checked_rows(shape["m"], seed, device)),
            work=self.work(policy, shape),
            peers={f"torch.matmul {policy.storage}": lambda: torch.matmul(x, dense.T)},
        )


DEQUANTIZE = Int8DequantizeOperation()
