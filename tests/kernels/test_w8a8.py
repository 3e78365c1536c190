"""int8 linear layers: sums of products equal to int64's, the rest within the rounding of fp32 and of the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from thorough import halves

from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.compiler.aot import CompiledKernel
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.gpu.config_cache import ConfigCache
from motley.kernels.gpu.gpu_linear import Int8Linear
from motley.kernels.launch.config_tables import ConfigEntry, ConfigTable, table_folder, write_table
from motley.kernels.launch.kernel_operation import ProblemShape, round_up_power_of_two
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.registry import find_operation as named
from motley.kernels.w8a8 import dp4a_gemm, dp4a_gemv
from motley.kernels.w8a8.dequantize_int8 import DEQUANTIZE, dequantize, matmul
from motley.kernels.w8a8.dp4a_gemv import MAX_ROWS
from motley.kernels.w8a8.int8_problem import checked_rows, matmul_error, product_error
from motley.kernels.w8a8.int8_product import (
    Int8ProductOperation,
    PackedInt8,
    kernel_for,
    linear_int8,
    multiply_int8,
    pack_int8,
    quantize_activations,
)
from motley.kernels.w8a8.packed_int8 import PanelsInt8, pack_panels, pack_rows
from motley.kernels.w8a8.quantize_panels import QuantizedPanels
from motley.kernels.w8a8.quantize_rows import QuantizedRows, quantize_rows
from motley.replicas.gpu.graph_buckets import batch_sizes, smallest_bucket

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "compile_dp4a.py"
GEMV = Config.of(2, 1, BLOCK_N=32)
DP4A = Config.of(1, 1, WARPS_N=1, TILE_M=4, TILE_N=4, UNROLL=4)


def tensor(group: int, *, swap: bool = False, split: int = 1, rows: int = 16) -> Config:
    sizes = {"BLOCK_M": rows, "BLOCK_N": 32, "BLOCK_K": group or 64}
    return Config.of(4, 1, **sizes, SWAP=swap, SPLIT=split)


def weight(num_rows: int, num_columns: int, group: int, *, zeros: bool = True) -> GroupedWeight:
    torch.manual_seed(num_rows + num_columns + group)
    groups = (num_rows, num_columns // group)
    codes = torch.randint(0, 256, (num_rows, num_columns), dtype=torch.uint8)
    offsets = torch.randint(0, 256, groups, dtype=torch.uint8) if zeros else torch.full(groups, 128, dtype=torch.uint8)
    return GroupedWeight(codes, (torch.rand(groups) * 0.02 + 0.001).half(), offsets, 8, group)


def codes_of_x(num_tokens: int, num_columns: int) -> torch.Tensor:
    torch.manual_seed(num_tokens)
    codes = torch.randint(-127, 128, (num_tokens, num_columns), dtype=torch.int8)
    codes[:, 0] = 127  # so that quantising gives the same codes back
    return codes


def kernels(given: GroupedWeight, num_tokens: int) -> list[tuple[PackedInt8, Config]]:
    """All that can take it."""
    rows, panels = pack_rows(given), pack_panels(given)
    group = rows.group
    found: list[tuple[PackedInt8, Config]] = [
        (rows, tensor(group)), (rows, tensor(group, swap=True)), (rows, tensor(group, split=2)), (panels, GEMV)
    ]  # fmt: skip
    return found if num_tokens <= MAX_ROWS else [*found[:-1], (panels, DP4A)]


@pytest.mark.parametrize(
    ("columns", "group", "zeros"),
    [(96, 32, True), (96, 32, False), (128, 64, True), (256, 128, True), (112, 112, True), (112, 112, False)],
)
@pytest.mark.parametrize("tokens", [3, 9])
def test_integer_sums_are_exact(tokens: int, columns: int, group: int, zeros: bool) -> None:
    """The scales are one, so that fp32 holds every sum, the largest of them 127 * 255 * 256."""
    given = weight(30, columns, group, zeros=zeros)
    given = replace(given, scales=torch.ones_like(given.scales, dtype=torch.float32))
    codes = codes_of_x(tokens, columns)
    difference = given.codes.long() - given.zeros.long().repeat_interleave(group, 1)
    expected = codes.long() @ difference.T
    for packed, config in kernels(given, tokens):
        found = linear_int8(codes.float(), packed, config)
        assert torch.equal(found.long(), expected), (type(packed).__name__, config)


@pytest.mark.parametrize(
    ("dtype", "group", "zeros"), [(torch.float16, 32, True), (torch.bfloat16, 96, True), (torch.float32, 96, False)]
)
def test_every_kernel_within_rounding(dtype: torch.dtype, group: int, zeros: bool) -> None:
    given = replace(weight(45, 96, group, zeros=zeros), bias=torch.randn(45).half())
    for tokens in (2, 9):
        x = torch.randn(tokens, 96).to(dtype)
        for packed, config in kernels(given, tokens):
            found = linear_int8(x, packed, config)
            assert found.dtype == dtype
            assert product_error(quantize_rows(x, "int8"), given, found) <= 1, (type(packed).__name__, config)


@pytest.mark.parametrize("tokens", range(1, MAX_ROWS + 1))
def test_the_gemv_with_every_number_of_tokens(tokens: int) -> None:
    given, x = weight(37, 64, 32), torch.randn(tokens, 64).half()
    for warps, rows in ((1, 32), (4, 128)):
        found = linear_int8(x, pack_panels(given), Config.of(warps, 1, BLOCK_N=rows))
        assert product_error(quantize_rows(x, "int8"), given, found) <= 1


@pytest.mark.covering
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("group", "columns"), [(0, 528), (32, 608), (128, 640)])
def test_the_gemv_with_whole_steps_of_all_threads_and_columns_beyond_them(
    group: int, columns: int, tokens: int
) -> None:
    """The loop, and what comes after it: in the midst of a span, where groups or sixteens allow it."""
    given, x = weight(37, columns, group or columns), torch.randn(tokens, columns).half()
    config = Config.of(1, 1, BLOCK_N=32)
    step = 4 * dp4a_gemv.span(tokens, group)  # four threads side by side
    assert columns > step
    assert columns % step or step == group
    assert product_error(quantize_rows(x, "int8"), given, linear_int8(x, pack_panels(given), config)) <= 1


@pytest.mark.parametrize(
    ("warps", "beside", "tile_m", "tile_n", "tokens", "rows", "columns"),
    [(4, 4, 4, 4, 130, 37, 32), (4, 4, 4, 4, 9, 130, 64), (2, 2, 8, 4, 33, 37, 32), (4, 2, 8, 8, 17, 37, 32)],
)
def test_every_cut_of_the_dp4a_product(
    warps: int, beside: int, tile_m: int, tile_n: int, tokens: int, rows: int, columns: int
) -> None:
    """Rows of both that do not fill the last block or the last panel."""
    given, x = weight(rows, columns, 32), torch.randn(tokens, columns).half()
    config = Config.of(warps, 1, WARPS_N=beside, TILE_M=tile_m, TILE_N=tile_n, UNROLL=4)
    assert product_error(quantize_rows(x, "int8"), given, linear_int8(x, pack_panels(given), config)) <= 1


@pytest.mark.parametrize(("rows", "split"), [(16, 4), (32, 1), (64, 3)])
def test_every_cut_of_the_tensor_core_product(rows: int, split: int) -> None:
    """More parts than steps of K: the last have none."""
    given, x = weight(37, 160, 160), torch.randn(rows + 3, 160).half()
    for swap in (False, True):
        found = linear_int8(x, pack_rows(given), tensor(0, swap=swap, split=split, rows=rows))
        assert product_error(quantize_rows(x, "int8"), given, found) <= 1


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros"),
    [(30, 96, 32, True), (130, 128, 64, True), (16, 256, 128, False), (48, 112, 112, True), (48, 112, 112, False)],
)
def test_written_out_every_weight_is_rounded_once(rows: int, columns: int, group: int, zeros: bool) -> None:
    given = weight(rows, columns, group, zeros=zeros)
    packed, shape = pack_panels(given), ProblemShape.of(m=256, n=rows, k=columns, group=group if group < columns else 0)
    for config in DEQUANTIZE.configs(policy_of(7, 0), shape):
        for dtype in (torch.float16, torch.float32):
            assert torch.equal(dequantize(packed, dtype, config), given.dequantize(dtype).T), config


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
def test_written_out_and_multiplied_within_rounding(scales: torch.dtype) -> None:
    given = weight(45, 96, 32)
    given, x = replace(given, scales=given.scales.to(scales), bias=torch.randn(45).half()), torch.randn(20, 96).half()
    found = matmul(x, pack_panels(given), Config.of(2, 1, WORDS=4))
    assert found.dtype == torch.float16
    assert matmul_error(x, given, found) <= 1
    found[1, 3] += 0.1 * found.abs().max()
    assert matmul_error(x, given, found) > 1


def test_a_problem_of_what_is_written_out_knows_right_from_wrong() -> None:
    policy = policy_of(7, 5)
    for shape in DEQUANTIZE.small(policy):
        problem = DEQUANTIZE.problem(policy, shape, torch.device("cpu"))
        found = problem.run(DEQUANTIZE.configs(policy, shape)[0])
        assert problem.error(found) <= 1
        found[0, 3] += 0.1 * found.abs().max()
        assert problem.error(found) > 1
        assert problem.peers["torch.matmul fp16"]() is not None


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("Tesla V100-SXM2-16GB", 64, "w8a8"),
        ("Tesla V100-SXM2-16GB", 512, "w8a8_dequantize"),  # 93 us to write, then 125 TFLOP/s against dp4a's 63 TOP/s
        ("Tesla T4", 256, "w8a8"),
        ("Tesla T4", 512, "w8a8_dequantize"),
        ("NVIDIA GeForce RTX 2080 Ti", 2048, "w8a8"),  # sums in fp32 at half the rate: no faster than dp4a
        ("Tesla P40", 2048, "w8a8"),
        ("NVIDIA L4", 2048, "w8a8"),
    ],
)
def test_many_rows_are_for_the_tensor_cores_of_cublas(name: str, tokens: int, expected: str, folder: Path) -> None:
    device = next(each for each in DEVICES if each.name == name)
    policy, shape = (
        policy_of(*device.capability.version),
        ProblemShape.of(m=tokens, n=4096, k=4096, group=0, zeros="no"),
    )
    chosen, why = kernel_for(policy, shape, device)
    assert (chosen.name, "measured" in why) == (expected, False)
    if DEQUANTIZE.refusal(policy):
        return
    path = folder / table_folder(policy.capability, device)
    for operation, taken in (
        (chosen, 30.0),
        (next(each for each in (Int8ProductOperation(), DEQUANTIZE) if each != chosen), 20.0),
    ):
        entry = ConfigEntry(operation.configs(policy, shape)[0], {"microseconds": taken})
        write_table(ConfigTable(operation.name, "measured", {}, {shape: entry}), path)
    other, why = kernel_for(policy, shape, device)
    assert (other.name != expected, why) == (True, "measured: 20.0 us")
    for m in (tokens - 1, tokens - 24, tokens // 2 + 1):  # of the same class of shapes
        assert kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=0, zeros="no"), device) == (other, why)


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "Tesla T4"])
def test_a_graph_has_the_kernel_of_the_steps_that_it_pads(name: str, folder: Path) -> None:
    """Where the roofline decides, one gets faster at some number that is no graph's: 200 rows, 182 and 285."""
    device = next(each for each in DEVICES if each.name == name)
    policy = policy_of(*device.capability.version)

    def chosen(m: int) -> str:
        return kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=0, zeros="no"), device)[0].name

    assert {chosen(m) for m in (1, 320)} == {"w8a8", "w8a8_dequantize"}
    sizes = batch_sizes(320)
    assert {m for m in range(1, 321) if chosen(m) != chosen(smallest_bucket(sizes, m))} == set()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_layer_of_many_rows_on_7_x(ordered: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x itself is multiplied, not its codes: nearer to the checkpoint's own result than with few rows."""
    rig = interpreter_context((7, 0))
    order = None if ordered else torch.randperm(128)
    given = replace(weight(32, 128, 64), permutation=order, bias=torch.randn(32).half())
    layer = Int8Linear(given, rig, ConfigCache(rig))
    many = next(m for m in range(1, 4096) if layer.operator(m) == DEQUANTIZE.name)
    launched: list[str] = []
    launch = Variant.launch
    monkeypatch.setattr(Variant, "launch", lambda self, *rest: (launched.append(self.name), launch(self, *rest))[1])
    errors = []
    for rows in (many - 1, many):
        x = torch.randn(rows, 128).half()
        errors.append(matmul_error(x, given, layer(x)))
    assert launched == ["quantize_panels", "w8a8_dp4a", "w8a8_dequantize"]
    assert errors[1] <= 1 < errors[0]


def test_an_outlier_stays_in_its_row() -> None:
    given, x = weight(32, 64, 32), torch.randn(9, 64).half()
    loud = x.clone()
    loud[1] *= 1000
    for packed, config in kernels(given, 9):
        quiet, beside = linear_int8(x, packed, config), linear_int8(loud, packed, config)
        others = [0, *range(2, 9)]
        assert torch.equal(quiet[others], beside[others])


def test_what_is_no_number_shows() -> None:
    given, x = weight(32, 64, 32), torch.randn(9, 64).half()
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    for packed, config in kernels(given, 9):
        found = linear_int8(x, packed, config)
        assert not found[3:5].isfinite().any()
        assert found[[0, 1, 2, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize(("group", "held"), [(256, 128), (64, 32), (96, 32)])
def test_groups_of_other_sizes_repeat_their_scale(group: int, held: int) -> None:
    given, x = weight(33, 2 * group, group), torch.randn(2, 2 * group).half()
    for packed, config in kernels(given, 2):
        assert packed.group == held
        assert product_error(quantize_rows(x, "int8"), given, linear_int8(x, packed, config)) <= 1


def test_a_weight_without_zero_points_has_none() -> None:
    given = weight(16, 256, 256, zeros=False)
    assert pack_rows(given).zeros is None
    assert pack_panels(given).zeros is None
    for group in (32, 64, 128):
        assert not pack_rows(weight(16, 256, group, zeros=False)).zeros.any(), "no kernel of groups is without"


@pytest.mark.parametrize(("columns", "group", "bits"), [(96, 48, 8), (200, 200, 8), (128, 64, 4), (65_552, 65_552, 8)])
def test_shapes_that_do_not_fit_are_refused(columns: int, group: int, bits: int) -> None:
    codes = torch.zeros((4, columns), dtype=torch.uint8)
    other = torch.zeros((4, columns // group))
    for packing in (pack_rows, pack_panels):
        with pytest.raises(ValueError, match=r"group_size|multiple of 16"):
            packing(GroupedWeight(codes, other, other.to(torch.uint8), bits, group))


def test_operands_that_do_not_belong_together_are_refused() -> None:
    given, x = weight(16, 64, 64), torch.randn(9, 64).half()
    with pytest.raises(TypeError, match="panels"):
        multiply_int8(quantize_activations(x, pack_panels(given)), pack_rows(given), x.dtype, tensor(0))
    with pytest.raises(ValueError, match="BLOCK_K"):
        linear_int8(x, pack_rows(weight(16, 64, 32)), tensor(64))


def test_the_ptx_is_what_the_interpreter_computes() -> None:
    """c + the sum of products of signed bytes (PTX ISA, dp4a), in the order of operands that the constraint names."""
    found = re.fullmatch(r"dp4a\.s32\.s32 \$0, \$1, \$2, \$3;", dp4a_gemm.PTX)
    assert found
    torch.manual_seed(0)
    a, b = (torch.randint(-128, 128, (64, 4), dtype=torch.int8) for _ in range(2))
    c = torch.randint(-(2**20), 2**20, (64,), dtype=torch.int32)
    expected = c.long() + (a.long() * b.long()).sum(1)
    plain = torch.empty_like(c)
    _one_product[(1,)](a.view(torch.int32), b.view(torch.int32), c, plain)
    assert torch.equal(plain.long(), expected)


@triton.jit
def _one_product(a, b, c, out):
    """Compute a product as the kernels do where there is no PTX."""
    at = tl.arange(0, 64)
    sums = dp4a_gemm.products((tl.load(a + at),), (tl.load(b + at),), (tl.load(c + at),), None, 1, 1)
    tl.store(out + at, sums[0])


def test_every_dp4a_kernel_is_held_to_half_of_its_loop() -> None:
    operation, policy = Int8ProductOperation(), policy_of(6, 1)
    for m, group in ((m, group) for m in (1, 2, 3, 4, 8, 16, 2048) for group in (0, 32, 128)):
        shape = ProblemShape.of(m=m, n=4096, k=4096, group=group, zeros="yes")
        for config in operation.configs(policy, shape):
            [launch] = operation.launches(policy, shape, config)
            assert (launch.instruction, launch.share) == ("dp4a.s32.s32", 0.5), (m, group)


Compiled = tuple[tuple[int, int], int, int]  # capability, rows, group
DP4A_KERNELS: list[Compiled] = [
    *(((6, 1), m, group) for m in (16, 32, 256) for group in (0, 32)),
    ((7, 5), 256, 32),
    *(((6, 1), m, group) for m in (1, 2, 8) for group in (0, 32, 128)),
]
EACH_TIME = {"16-32", "256-0", "256-32 on 7.5", "1-0", "2-32", "8-128"}  # every number of rows and every group


def _name(case: Compiled) -> str:
    capability, m, group = case
    return f"{m}-{group}" + (" on 7.5" if capability == (7, 5) else "")


@halves(DP4A_KERNELS, _name, EACH_TIME)
def test_half_of_the_inner_loop_is_dp4a(cases: list[Compiled]) -> None:
    """And all of its loads are of four words: two for the 16 dp4a of 4 x 4 results, four for the 64 of 8 x 8."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(cases)],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = [json.loads(line) for line in said.stdout.splitlines()]
    assert [(tuple(kernel["version"]), kernel["m"], kernel["group"]) for kernel in found] == cases
    few = [kernel for kernel in found if kernel["m"] <= MAX_ROWS]
    for kernel in few:
        loop = Counter(kernel["loop"])
        assert loop["dp4a.s32.s32"] >= loop.total() / 2, kernel
        sixteens = loop["dp4a.s32.s32"] // (16 * kernel["m"] + (4 * kernel["m"] if kernel["group"] else 0))
        assert loop["ld.global.nc.v4.b32"] == (4 + kernel["m"]) * sixteens, "none of them masked"
        assert not kernel["spilled"], kernel
    many = [kernel for kernel in found if kernel not in few]
    assert few
    assert many
    for kernel in many:
        loop = Counter(kernel["loop"])
        loads = {name: count for name, count in loop.items() if name.startswith("ld.")}
        assert loop["dp4a.s32.s32"] >= loop.total() / 2, kernel
        assert list(loads) == ["ld.global.ca.v4.b32"], kernel
        assert loop["dp4a.s32.s32"] / loads["ld.global.ca.v4.b32"] >= (8 if kernel["m"] == 16 else 10), kernel
        if kernel["m"] == 256:
            assert loop["dp4a.s32.s32"] == 16 * loads["ld.global.ca.v4.b32"]
        assert not any("shared" in name or name.startswith("bar") for name in loop), kernel
        assert not kernel["spilled"], kernel


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        ("$L__BB0_1:\n add.s32 %r1, %r2, %r3;\n @%p1 bra $L__BB0_1;\n mov.u32 %r1, %r2;\n", {"add.s32": 1, "bra": 1}),
        (
            "$A:\n mov.u32 %r1, %r2;\n mov.u32 %r1, %r2;\n mov.u32 %r1, %r2;\n"
            "$B:\n add.s32 %r1, %r2, %r3;\n @%p1 bra $C;\n mul.lo.s32 %r1, %r2, %r3;\n$C:\n"
            " @!%p2 bra $B;\n bra.uni $A;\n",
            {"add.s32": 1, "mul.lo.s32": 1, "bra": 2},
        ),
        (" mov.u32 %r1, %r2;\n @%p1 bra $END;\n$END:\n ret;\n", {}),
    ],
)
def test_the_inner_loop_is_found_in_ptx(ptx: str, expected: dict[str, int]) -> None:
    assert CompiledKernel("made up", (6, 1), 1, 0, 0, 32, 0.0, ptx).inner_loop() == expected


def test_the_operation_names_what_each_capability_runs() -> None:
    operation = Int8ProductOperation()
    assert operation.refusal(policy_of(6, 0)) == policy_of(6, 0).reasons["int8"]
    assert operation.refusal(policy_of(10, 3)) == policy_of(10, 3).reasons["int8"]
    named = {}
    for version in ((6, 1), (7, 5), (8, 0), (9, 0)):
        policy = policy_of(*version)
        assert not operation.refusal(policy)
        shape = next(shape for shape in operation.samples(policy) if shape["m"] == 2048)
        named[version] = operation.launches(policy, shape, operation.configs(policy, shape)[0])[0].instruction
    assert named == {
        (6, 1): "dp4a.s32.s32", (7, 5): "dp4a.s32.s32",
        (8, 0): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
        (9, 0): "wgmma.mma_async.sync.aligned.m64n*k32.s32.s8.s8",
    }  # fmt: skip


@pytest.mark.parametrize("version", [(6, 1), (8, 0), (9, 0)])
@pytest.mark.parametrize("tokens", [2, 16])
def test_the_operation_runs_and_finds_its_own_errors(version: tuple[int, int], tokens: int) -> None:
    operation, policy = Int8ProductOperation(), policy_of(*version)
    shape = operation.shapes(policy)[0].of(m=tokens, n=48, k=64, group=32, zeros="yes")
    problem = operation.problem(policy, shape, torch.device("cpu"))
    config = operation.configs(policy, shape)[0]
    found = problem.run(config)
    assert problem.error(found) <= 1
    found[1, 3] *= 1.02
    assert problem.error(found) > 1
    assert problem.peers["torch._int_mm"] is not None
    assert isinstance(pack_int8(weight(16, 64, 64), policy), PanelsInt8) is (version == (6, 1))


@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("version", [(6, 1), (8, 9)])
def test_a_problem_has_the_bias_and_the_scales_of_its_shape(version: tuple[int, int], tokens: int) -> None:
    operation, policy = Int8ProductOperation(), policy_of(*version)
    plain = {"m": tokens, "n": 48, "k": 64, "group": 32, "zeros": "yes"}
    without = operation.problem(policy, ProblemShape.of(**plain), torch.device("cpu"))
    shape = ProblemShape.of(**plain, bias="yes", scales="fp32")
    problem, config = operation.problem(policy, shape, torch.device("cpu")), operation.configs(policy, shape)[0]
    assert problem.error(problem.run(config)) <= 1
    assert problem.error(without.run(config)) > 1


def test_x_is_quantised_as_the_kernel_reads_it() -> None:
    given, x = weight(16, 64, 64), torch.randn(9, 64).half()
    assert isinstance(quantize_activations(x, pack_panels(given)), QuantizedPanels)
    assert isinstance(quantize_activations(x[:8], pack_panels(given)), QuantizedRows)
    assert isinstance(quantize_activations(x, pack_rows(given)), QuantizedRows)


@pytest.mark.parametrize(
    ("version", "tokens", "table", "config"),
    [
        ((6, 1), 3, "quantize_rows_int8", Config.of(8, 1, BLOCK=128)),
        ((6, 1), 9, "quantize_panels", Config.of(2, 1, ROWS=16, BLOCK=128)),
        ((8, 0), 9, "quantize_rows_int8", Config.of(8, 1, BLOCK=128)),
    ],
)
def test_a_layer_quantises_x_as_the_tables_have_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], tokens: int, table: str, config: Config
) -> None:
    rig = interpreter_context(version)
    path = folder / table_folder(rig.policy.capability)
    write_table(
        ConfigTable(
            table, "static", {}, {ProblemShape.of(m=round_up_power_of_two(tokens), k=128): ConfigEntry(config, {})}
        ),
        path,
    )
    launched: list[Config] = []
    launch = Variant.launch
    monkeypatch.setattr(Variant, "launch", lambda self, *given: (launched.append(self.config), launch(self, *given))[1])
    given, x = weight(16, 128, 128), torch.randn(tokens, 128).half()
    found = Int8Linear(given, rig, ConfigCache(rig))(x)
    assert launched[0] == config
    assert product_error(quantize_rows(x, "int8"), given, found) <= 1


def test_rows_that_no_kernel_was_compiled_for_are_refused() -> None:
    rig = interpreter_context((6, 1))
    with pytest.raises(ValueError, match="24 output features are not a multiple of 16"):
        Int8Linear(weight(24, 128, 128), rig, ConfigCache(rig))


def test_where_there_is_no_int8_nothing_is_packed() -> None:
    with pytest.raises(ValueError, match=r"int8: compute capability 6\.0 does not use it"):
        pack_int8(weight(16, 64, 64), policy_of(6, 0))


def test_of_many_rows_one_in_each_part_is_checked() -> None:
    """So that no tile is missed, and with each seed others are."""
    device = torch.device("cpu")
    assert checked_rows(64, 3, device).tolist() == list(range(64))
    for num_rows in (65, 100, 2048):
        found = [checked_rows(num_rows, seed, device).tolist() for seed in range(3)]
        for rows in found:
            assert rows == sorted(set(rows))
            assert (len(rows), rows[-1]) == (64, num_rows - 1)
            assert max(later - earlier for earlier, later in pairwise([-1, *rows])) <= 2 * num_rows / 64 + 1
        assert num_rows == 65 or found[0] != found[1]
        assert checked_rows(num_rows, 1, device).tolist() == found[1]


@pytest.mark.parametrize(
    ("name", "version"), [("w8a8", (9, 0)), ("fp8", (9, 0)), ("w8a8_dequantize", (7, 5))], ids=lambda each: str(each)
)
def test_a_problem_of_many_rows_is_checked_in_few_and_all_columns(name: str, version: tuple[int, int]) -> None:
    each, rig = named(name), interpreter_context(version)
    shape = ProblemShape.of(**{**dict(each.small(rig.policy)[0].fields), "m": 130})
    problem = each.problem(rig.policy, shape, rig.device, seed=5)
    found = problem.run(each.configs(rig.policy, shape)[0])
    assert problem.error(found) <= 1
    checked = checked_rows(130, 5, rig.device).tolist()
    unchecked = next(row for row in range(130) if row not in checked)
    for row, wrong in ((unchecked, False), (checked[7], True), (129, True)):
        for column in (0, found.shape[1] - 1):
            changed = found.clone()
            changed[row, column] += 3.0
            assert (problem.error(changed) > 1) is wrong, (row, column)
