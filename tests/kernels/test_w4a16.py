"""int4 linear layers against fp64, in Triton's interpreter."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.device.device_spec import DeviceSpec
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.dtypes import ROUNDING_UNIT, rounding_unit_of
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.gpu import config_cache as gpu_configs
from motley.kernels.gpu.config_cache import ConfigCache
from motley.kernels.gpu.int4_layer import Int4Linear
from motley.kernels.launch import config_tables
from motley.kernels.launch.config_tables import (
    ConfigChoice,
    ConfigEntry,
    ConfigTable,
    DeviceIdentity,
    table_folder,
    write_table,
)
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.tuning.operation_listing import operations_by_rows
from motley.kernels.w4a16 import dequantize_int4
from motley.kernels.w4a16 import int4_gemm as w4a16_gemm
from motley.kernels.w4a16 import int4_gemv as w4a16_gemv
from motley.kernels.w4a16.int4_operations import OPERATIONS, kernel_for, linear_reference, rounding_allowance
from motley.kernels.w4a16.packed_int4 import PackedInt4, fuse_weights, pack_int4, unpack_int4
from motley.replicas.gpu.graph_buckets import batch_sizes, smallest_bucket

GEMV = Config.of(1, 1, ROWS=4, REPEAT=1)
GEMM = Config.of(4, 1, BLOCK_N=16, BLOCK_M=16, SPLITS=1)


def weight(num_rows: int, num_columns: int, group: int, *, dtype: torch.dtype = torch.float16) -> GroupedWeight:
    torch.manual_seed(num_rows + num_columns + group)
    codes = torch.randint(0, 16, (num_rows, num_columns), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (num_rows, num_columns // group), dtype=torch.uint8)
    scales = (torch.rand(num_rows, num_columns // group) * 0.02 + 0.001).to(dtype)
    return GroupedWeight(codes, scales, zeros, 4, group)


def check(x: torch.Tensor, packed: PackedInt4, found: torch.Tensor, unit: float = 0.0) -> None:
    allowed = rounding_allowance(x, packed, unit)
    difference = (found.double() - linear_reference(x, packed)).abs()
    assert (difference <= allowed).all(), (difference / allowed).max()


def test_unpacked_is_what_was_packed() -> None:
    given = weight(9, 512, 64)
    assert torch.equal(unpack_int4(pack_int4(given)), given.dequantize(torch.float64)), (
        "fp32 holds a half times a code exactly"
    )


def test_fused_weights_are_their_rows_in_order() -> None:
    parts = [replace(weight(rows, 256, 64), bias=torch.randn(rows)) for rows in (5, 8, 3)]
    whole = fuse_weights([pack_int4(part) for part in parts])
    assert torch.equal(unpack_int4(whole), torch.cat([unpack_int4(pack_int4(part)) for part in parts]))
    assert whole.bias is not None
    assert torch.equal(whole.bias, torch.cat([part.bias for part in parts if part.bias is not None]))
    for other in (weight(5, 256, 32), weight(5, 512, 64), replace(weight(5, 256, 64), permutation=torch.arange(256))):
        with pytest.raises(ValueError, match="weights that are fused"):
            fuse_weights([pack_int4(weight(5, 256, 64)), pack_int4(other)])
    with pytest.raises(ValueError, match="have a bias, or none"):
        fuse_weights([pack_int4(parts[0]), pack_int4(weight(5, 256, 64))])


@pytest.mark.parametrize(("columns", "group", "bits"), [(192, 64, 4), (256, 48, 4), (256, 128, 8), (768, 192, 4)])
def test_shapes_that_do_not_fit_are_refused(columns: int, group: int, bits: int) -> None:
    codes = torch.zeros((4, columns), dtype=torch.uint8)
    other = torch.zeros((4, -(-columns // group)))
    with pytest.raises(ValueError, match=r"group_size|multiple of 128"):
        pack_int4(GroupedWeight(codes, other, other.to(torch.uint8), bits, group))


class TestGemv:
    @pytest.mark.parametrize("tokens", range(1, w4a16_gemv.MAX_TOKENS + 1))
    def test_every_number_of_tokens(self, tokens: int) -> None:
        x, packed = torch.randn(tokens, 384).half(), pack_int4(weight(10, 384, 128))
        check(x, packed, w4a16_gemv.gemv(x, packed, GEMV))

    @pytest.mark.parametrize("tokens", [9, 16, 21])
    def test_more_tokens_go_in_eights(self, tokens: int) -> None:
        x, packed = torch.randn(tokens, 256).half(), pack_int4(weight(6, 256, 128))
        check(x, packed, w4a16_gemv.gemv(x, packed, GEMV))

    @pytest.mark.parametrize("group", [32, 64, 128, 256, 896])
    def test_every_group_size(self, group: int) -> None:
        columns = 1792 if group == 896 else 512
        x, packed = torch.randn(2, columns).half(), pack_int4(weight(7, columns, group))
        check(x, packed, w4a16_gemv.gemv(x, packed, GEMV))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
    def test_every_dtype(self, dtype: torch.dtype, scales: torch.dtype) -> None:
        packed = pack_int4(replace(weight(6, 256, 64, dtype=scales), bias=torch.randn(6)))
        x = torch.randn(3, 256).to(dtype)
        check(x, packed, w4a16_gemv.gemv(x, packed, GEMV))

    @pytest.mark.parametrize(("rows", "repeat", "warps"), [(1, 2, 1), (2, 1, 1), (8, 2, 2), (16, 4, 4)])
    def test_every_cut(self, rows: int, repeat: int, warps: int) -> None:
        """Rows and columns that do not fill the last program or the last step."""
        x, packed = torch.randn(2, 640).half(), pack_int4(weight(rows * repeat + 3, 640, 32))
        check(x, packed, w4a16_gemv.gemv(x, packed, Config.of(warps, 1, ROWS=rows, REPEAT=repeat)))

    @pytest.mark.parametrize("group", [32, 128])
    @pytest.mark.parametrize("loudness", [1.0, 60_000.0])
    def test_in_halves_nothing_overflows(self, group: int, loudness: float) -> None:
        packed = pack_int4(replace(weight(6, 384, group), scales=weight(6, 384, group).scales.float() / loudness))
        x = (torch.randn(3, 384).clamp(-1, 1) * loudness).half()
        check(x, packed, w4a16_gemv.gemv(x, packed, GEMV, half=True), unit=w4a16_gemv.HALF_UNIT)

    def test_an_outlier_stays_in_its_row(self) -> None:
        packed, x = pack_int4(weight(8, 256, 128)), torch.randn(4, 256).half()
        loud = x.clone()
        loud[1] *= 1000
        quiet, beside = (w4a16_gemv.gemv(rows, packed, GEMV) for rows in (x, loud))
        assert torch.equal(quiet[[0, 2, 3]], beside[[0, 2, 3]])


class TestGemm:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("tokens", [1, 7, 16, 33])
    def test_every_number_of_tokens(self, tokens: int, dtype: torch.dtype) -> None:
        x, packed = torch.randn(tokens, 384).to(dtype), pack_int4(weight(32, 384, 128))
        check(x, packed, w4a16_gemm.gemm(x, packed, GEMM))

    @pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("group", "splits"), [(128, 1), (32, 1), (64, 2)])
    def test_in_bf16(self, group: int, splits: int, scales: torch.dtype, bf16_widened: None) -> None:
        packed = pack_int4(replace(weight(32, 384, group, dtype=scales), bias=torch.randn(32).bfloat16()))
        x = torch.randn(7, 384).bfloat16()
        check(x, packed, w4a16_gemm.gemm(x, packed, Config.of(4, 1, BLOCK_N=16, BLOCK_M=16, SPLITS=splits)))

    @pytest.mark.parametrize("group", [32, 64, 128, 256])
    def test_every_group_size(self, group: int) -> None:
        x, packed = torch.randn(2, 512).half(), pack_int4(weight(16, 512, group))
        check(x, packed, w4a16_gemm.gemm(x, packed, GEMM))

    @pytest.mark.parametrize("splits", [1, 2, 3, 8])
    @pytest.mark.parametrize("biased", [False, True])
    def test_parts_of_k_some_of_them_empty(self, splits: int, biased: bool) -> None:
        given = weight(48, 640, 64)
        packed = pack_int4(replace(given, bias=torch.randn(48).half()) if biased else given)
        x = torch.randn(5, 640).half()
        config = Config.of(4, 1, BLOCK_N=32, BLOCK_M=16, SPLITS=splits)
        check(x, packed, w4a16_gemm.gemm(x, packed, config))

    def test_a_code_is_the_same_in_ptx(self) -> None:
        """The text that GPUs run, followed by hand for every nibble, code and zero point."""
        for name, dtype, power in (("fp16", torch.float16, 1024), ("bf16", torch.bfloat16, 128)):
            for nibble, text in enumerate(w4a16_gemm.PTX[name]):
                for zero in range(17):
                    for low in range(16):
                        high = 15 - low
                        words = [0xDEADBEEF & ~(15 << 4 * nibble) | code << 4 * nibble for code in (low, high)]
                        offset = halves(power + zero, power + zero, dtype)
                        assert numbers(execute(text, *words, offset, dtype), dtype) == (low - zero, high - zero)


class TestDequantize:
    @pytest.mark.parametrize("group", [32, 64, 128, 256])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_every_weight(self, group: int, dtype: torch.dtype) -> None:
        packed = pack_int4(weight(21, 512, group))
        found = dequantize_int4.dequantize(packed, dtype, Config.of(4, 1, ROWS=16))
        assert torch.equal(found, unpack_int4(packed).to(dtype))

    def test_every_weight_in_bf16(self) -> None:
        packed = pack_int4(weight(21, 512, 64))
        found = dequantize_int4.dequantize(packed, torch.bfloat16, Config.of(4, 1, ROWS=16))
        exact = unpack_int4(packed)
        assert ((found.double() - exact).abs() <= rounding_unit_of(found) * exact.abs()).all()

    def test_matmul(self) -> None:
        packed, x = pack_int4(replace(weight(21, 512, 128), bias=torch.randn(21))), torch.randn(70, 512).half()
        found = dequantize_int4.matmul(x, packed, torch.float32, Config.of(4, 1, ROWS=16))
        check(x, packed, found, unit=ROUNDING_UNIT[torch.float32])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("capability", [(6, 0), (6, 1), (7, 5)])
def test_a_problem_knows_right_from_wrong(operation: KernelOperation, capability: tuple[int, int]) -> None:
    policy = policy_of(*capability)
    small = operation.small(policy)[0]
    problem = operation.problem(policy, small, torch.device("cpu"))
    found = problem.run(operation.configs(policy, small)[0])
    assert problem.error(found) <= 1
    found[0, 3] += 0.1 * found.abs().max()
    assert problem.error(found) > 1
    for peer in problem.peers.values():
        peer()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_problem_has_the_bias_and_the_scales_of_its_shape(operation: KernelOperation) -> None:
    policy = replace(policy_of(8, 9), storage="fp16")
    shape = ProblemShape.of(m=3, n=64, k=384, group=128)
    runs = []
    for words in ({}, {"bias": "yes", "scales": "fp32"}):
        problem = operation.problem(policy, ProblemShape.of(**dict(shape.fields), **words), torch.device("cpu"))
        runs.append(problem.run(operation.configs(policy, shape)[0]))
        assert problem.error(runs[-1]) <= 1
        assert problem.error(runs[0]) <= 1 or words, "of the same numbers, but for the words"
    assert problem.error(runs[0]) > 1


def by_name(name: str) -> DeviceSpec:
    return next(device for device in DEVICES if device.name == name)


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("Tesla P40", 1, "w4a16_gemv"),
        ("Tesla P40", 64, "w4a16_gemv"),  # no tensor cores: written out, weights are moved eight times as bytes
        ("Tesla P40", 2048, "w4a16_dequantize"),  # else they would be read again for every eight tokens
        ("Tesla T4", 16, "w4a16_gemv"),
        ("Tesla T4", 256, "w4a16_dequantize"),
        ("NVIDIA L4", 1, "w4a16_gemm"),
        ("NVIDIA L4", 64, "w4a16_gemm"),
        ("NVIDIA L4", 2048, "w4a16_dequantize"),
    ],
)
def test_the_kernel_by_the_number_of_tokens(name: str, tokens: int, expected: str, folder: Path) -> None:
    device, shape = by_name(name), ProblemShape.of(m=tokens, n=4096, k=4096, group=128)
    chosen, why = kernel_for(policy_of(*device.capability.version), shape, device)
    assert (chosen.name, "measured" in why) == (expected, False)


def test_ranges_tell_the_kernel_of_every_number_of_tokens(folder: Path) -> None:
    for device in DEVICES:
        policy = policy_of(*device.capability.version)

        def chosen(
            m: int, policy: PrecisionPolicy = policy, device: DeviceSpec = device
        ) -> tuple[KernelOperation, str]:
            return kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=128), device)

        ranges = list(operations_by_rows(chosen, max_rows=300))
        assert ranges[0][0] == 1
        assert ranges[-1][1] == 300
        assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
        for first, last, name, _ in ranges:
            assert {chosen(m)[0].name for m in (first, last)} == {name}


@pytest.mark.covering
@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0)])
@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_layer_is_what_its_checkpoint_says(capability: tuple[int, int], group: int, ordered: bool) -> None:
    """Q, K and V as one, with biases, and with features in the order of their groups (GPTQ's desc_act) or not."""
    rig = interpreter_context(capability)
    order = None if ordered else torch.randperm(512)
    parts = [
        replace(weight(rows, 512, group), permutation=order, bias=torch.randn(rows).half()) for rows in (32, 16, 16)
    ]
    layer = Int4Linear(parts, rig, ConfigCache(rig))
    dense = torch.cat([part.dequantize(torch.float64) for part in parts])
    bias = torch.cat([part.bias for part in parts if part.bias is not None]).double()
    fused = fuse_weights([pack_int4(part) for part in parts])
    kernels = set()
    for tokens in (0, 1, 3, 5, 9, 70, 300):
        x = torch.randn(tokens, 512, dtype=torch.float16)
        found = layer(x)
        assert found.shape == (tokens, 64)
        if tokens:
            operation, config = layer.choice(tokens)
            kernels.add(operation.name)
            assert layer.choice(tokens)[1] is config
            allowed = rounding_allowance(x if order is None else x[:, order], fused, operation.unit(rig.policy))
            assert ((found.double() - (x.double() @ dense.T + bias)).abs() <= allowed).all()
    assert "w4a16_dequantize" in kernels
    assert len(kernels) > 1
    assert layer.held == fused.held


@pytest.mark.parametrize("capability", [(6, 1), (9, 0)])
def test_layers_that_are_alike_read_the_tables_once_for_about_as_many_tokens(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def choose(
        operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape, device: DeviceIdentity | None
    ) -> ConfigChoice:
        read.append(f"{operation.name} m={shape['m']}")
        return config_tables.choose_config(operation, policy, shape, device)

    monkeypatch.setattr(gpu_configs, "choose_config", choose)
    rig = interpreter_context(capability)
    configs = ConfigCache(rig)
    layers = [Int4Linear([weight(32, 256, 128)], rig, configs) for _ in range(3)]
    for tokens in (1, *range(5, 9), *range(129, 257)):
        [found] = {layer.looked_up(tokens) for layer in layers}
        shape = ProblemShape.of(m=tokens, n=32, k=256, group=128)
        assert found[0] is kernel_for(rig.policy, shape, rig.about)[0], "by its own number of tokens"
        assert found[1].config in found[0].configs(rig.policy, shape)
    few = "w4a16_gemm" if capability == (9, 0) else "w4a16_gemv"
    assert read == [f"{few} m=1", f"{few} m=8", "w4a16_dequantize m=256"]


def test_what_was_measured_decides(folder: Path) -> None:
    device, shape = by_name("NVIDIA L4"), ProblemShape.of(m=1, n=4096, k=4096, group=128)
    policy = policy_of(8, 9)
    for operation, microseconds in zip(OPERATIONS[:2], (30.0, 40.0), strict=True):
        entry = ConfigEntry(operation.configs(policy, shape)[0], {"microseconds": microseconds})
        write_table(ConfigTable(operation.name, "measured", {}, {shape: entry}), folder / "sm89-58sm")
        if operation is OPERATIONS[0]:
            assert kernel_for(policy, shape, device)[0].name == "w4a16_gemm", "one alone is compared with nothing"
    chosen, why = kernel_for(policy, shape, device)
    assert (chosen.name, why) == ("w4a16_gemv", "measured: 30.0 us")


@pytest.mark.parametrize("name", ["Tesla P40", "Tesla V100-PCIE-16GB", "NVIDIA H200"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_graph_has_the_kernel_of_the_steps_that_it_pads(name: str, measured: bool, folder: Path) -> None:
    """Whatever tables say of sizes between: a graph rounds no other way than a step alone."""
    device = by_name(name)
    policy = policy_of(*device.capability.version)
    if measured:
        for operation, faster in ((OPERATIONS[0], (1, 2, 4, 8, 32)), (OPERATIONS[1], (3, 5, 6, 7, 9, 16, 64))):
            times = {m: 10.0 if m in faster else 20.0 for m in (*range(1, 10), 16, 32, 64)}
            entries = {
                (shape := ProblemShape.of(m=m, n=4096, k=4096, group=128)): ConfigEntry(
                    operation.configs(policy, shape)[0], {"microseconds": taken}
                )
                for m, taken in times.items()
            }
            write_table(
                ConfigTable(operation.name, "measured", {}, entries), folder / table_folder(policy.capability, device)
            )

    def chosen(m: int) -> str:
        return kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=128), device)[0].name

    if measured:
        few, *_, more = [chosen(m) for m in range(1, 17)]
        assert {chosen(m) for m in range(1, 9)} == {few} == {"w4a16_gemv"}
        assert {chosen(m) for m in range(9, 17)} == {more} == {"w4a16_gemm"}
    for most in (1, 5, 7, 37, 100, 256):
        sizes = batch_sizes(most)
        assert {m for m in range(1, most + 1) if chosen(m) != chosen(smallest_bucket(sizes, m))} == set()


def halves(low: float, high: float, dtype: torch.dtype) -> int:
    """Two halves in one register."""
    bits = torch.tensor([low, high], dtype=dtype).view(torch.int16).numpy().tobytes()
    return int(struct.unpack("<I", bits)[0])


def numbers(register: int, dtype: torch.dtype) -> tuple[float, float]:
    low, high = torch.tensor(list(struct.unpack("<hh", struct.pack("<I", register))), dtype=torch.int16).view(dtype)
    return float(low), float(high)


def execute(text: str, first: int, second: int, offset: int, dtype: torch.dtype) -> int:
    """Compute what a GPU does with the instructions of `text`: $0 is the result, $1 to $3 are given."""
    registers = {"$1": first, "$2": second, "$3": offset}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def each(operation: Callable[..., float], *names: str) -> int:
        lanes = zip(*(numbers(value(name), dtype) for name in names), strict=True)
        return halves(*(operation(*lane) for lane in lanes), dtype)

    for instruction in text.strip("{ }").split(";"):
        name, _, rest = instruction.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *given = (operand.strip() for operand in rest.split(","))
        match name:
            case "prmt.b32":
                both = value(given[0]) | value(given[1]) << 32
                picks = [value(given[2]) >> 4 * byte & 7 for byte in range(4)]
                result = sum((both >> 8 * pick & 255) << 8 * byte for byte, pick in enumerate(picks))
            case "shr.u32":
                result = value(given[0]) >> value(given[1])
            case "lop3.b32":
                assert given[3] == "0xea", "(a & b) | c"
                result = value(given[0]) & value(given[1]) | value(given[2])
            case "xor.b32":
                result = value(given[0]) ^ value(given[1])
            case "mov.b32":
                result = value(given[0])
            case "sub.f16x2":
                result = each(lambda a, b: a - b, *given)
            case "fma.rn.bf16x2":
                result = each(lambda a, b, c: a * b + c, *given)
            case _:
                raise AssertionError(f"{name} is not known")
        registers[target] = result & 0xFFFFFFFF
    return registers["$0"]
