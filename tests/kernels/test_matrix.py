"""Kernels that the matrix compiles for each capability: every variant that a model can reach there, seldom ones too."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.kernels.attention.attention_tile import HEAD_DIMS
from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.compiler.compile_speed import REFERENCE_S
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.device_context import DeviceContext, interpreter_context
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.gpu.config_cache import ConfigCache
from motley.kernels.launch.kernel_operation import KernelLaunch, ProblemShape, round_up_power_of_two
from motley.kernels.launch.model_shapes import MODELS
from motley.kernels.registry import OPERATIONS, find_operation
from motley.kernels.sampling.sample import penalty_variant
from motley.kernels.tuning.compile_matrix import CompileTime, MatrixRow, select_jobs
from motley.kernels.w4a16.int4_operations import kernel_for as int4_kernel
from motley.kernels.w4a16.packed_int4 import GROUP_SIZES as INT4_GROUPS
from motley.kernels.w4a16.packed_int4 import pack_int4
from motley.kernels.w8a8.int8_product import kernel_for as int8_kernel
from motley.kernels.w8a8.packed_int8 import GROUP_SIZES as INT8_GROUPS
from motley.kernels.w8a8.packed_int8 import pack_rows
from motley.replicas.kv.memory_budget import history_dtype

POLICIES = [policy_of(*version) for version in CAPABILITIES]
LINEAR = ("w4a16_gemv", "w4a16_gemm", "w4a16_dequantize", "w8a8", "w8a8_dequantize")
HALVES_AND_FP32 = {"*fp16", "*bf16", "*fp32"}


@cache
def compiled(name: str, version: tuple[int, int]) -> tuple[tuple[ProblemShape, KernelLaunch], ...]:
    jobs = select_jobs(find_operation(name), version)
    return tuple((job.shape, launch) for job in jobs for launch in job.launches())


def values(name: str, policy: PrecisionPolicy, kernel: str) -> dict[str, set[Any]]:
    """Return the compiled values of each constant and type of that kernel."""
    found: dict[str, set[Any]] = {}
    for _, launch in compiled(name, policy.capability.version):
        if launch.variant.name == kernel:
            for field, value in (*launch.variant.types, *launch.variant.all_constants.items()):
                found.setdefault(field, set()).add(value)
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
def test_int4_has_every_group_scale_bias_and_number_of_tokens(policy: PrecisionPolicy) -> None:
    gemv = values("w4a16_gemv", policy, "w4a16_gemv")
    assert gemv["GROUP"] == set(INT4_GROUPS)
    assert gemv["scales"] == HALVES_AND_FP32
    assert gemv["M"] == ({1, 2, 4, 8} if policy.capability.bf16 else set(range(1, 9)))
    written = values("w4a16_dequantize", policy, "w4a16_dequantize")
    assert (written["GROUP"], written["scales"]) == (set(INT4_GROUPS), HALVES_AND_FP32)
    if policy.capability.bf16:
        gemm = values("w4a16_gemm", policy, "w4a16_gemm")
        assert (gemm["GROUP"], gemm["scales"]) == (set(INT4_GROUPS), HALVES_AND_FP32)
        assert gemm["PARTED"] == {True, False}


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy.int8], ids=lambda policy: str(policy.capability)
)
def test_int8_has_every_group_zero_scale_and_bias_and_the_sums_that_go_with_them(policy: PrecisionPolicy) -> None:
    lanes = policy.int8 is not None and policy.int8.arithmetic == "dp4a"
    for kernel in ("w8a8_gemv", "w8a8_dp4a") if lanes else ("w8a8_tensor",):
        found = values("w8a8", policy, kernel)
        assert found["GROUP"] == {0, *INT8_GROUPS}, kernel
        assert found["w_scales"] == HALVES_AND_FP32
        assert found["ZEROS"] == {True, False}
    if lanes:
        assert values("w8a8", policy, "w8a8_gemv")["M"] == set(range(1, 9))
        panels = values("quantize_panels", policy, "quantize_panels")
        assert (panels["SUMS"], panels["GROUP"]) == ({True, False}, {0, *INT8_GROUPS})
    else:
        assert values("w8a8", policy, "w8a8_tensor")["EVEN"] == {True, False}
    written = values("w8a8_dequantize", policy, "w8a8_dequantize")
    if len(policy.int8_units) > 1:
        assert (written["GROUP"], written["scales"]) == ({0, *INT8_GROUPS}, HALVES_AND_FP32)
        assert written["ZEROS"] == {True, False}
    else:
        assert not written
    rows = values("quantize_rows_int8", policy, "quantize_rows_int8")
    assert rows["SUMS"] == {True, False}
    assert rows["GROUP"] == ({0} if lanes else {0, *INT8_GROUPS})
    assert rows["WHOLE"] == {True, False}


def made(launch: KernelLaunch) -> tuple[object, ...]:
    """Return what sets a kernel apart, but for the types of its arguments."""
    variant, config = launch.variant, launch.variant.config
    return variant.name, tuple(sorted(variant.all_constants.items())), config.num_warps, config.num_stages


# From the narrowest layer of the models to the widest and the deepest, and rows for every kernel and config.
LAYERS = ((896, 896), (1152, 896), (896, 4864), (4096, 4096), (3584, 18_944), (37_888, 3584), (5120, 25_600))
NUMBERS = (*range(1, 17), 17, 19, 25, 31, 33, 64, 256, 2048)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
def test_whatever_the_group_the_zeros_and_the_rows_the_kernel_was_compiled(policy: PrecisionPolicy) -> None:
    """Not each group once and each number of rows once: a launch has both."""
    version = policy.capability.version
    configs = ConfigCache(DeviceContext(torch.device("cpu"), policy, interpreter_context(version).about))
    kinds: list[tuple[Any, dict[str, int | str]]] = [(int4_kernel, {"group": group}) for group in INT4_GROUPS]
    if policy.int8:
        zeros = [(0, "no"), (0, "yes"), (32, "yes"), (128, "yes")]
        assert {group for group, _ in zeros} == {0, *INT8_GROUPS}
        kinds += [(int8_kernel, {"group": group, "zeros": each}) for group, each in zeros]
    known = {made(launch) for name in LINEAR for _, launch in compiled(name, version)}
    missing = set()
    for kernel_for, kind in kinds:
        for (n, k), m in product(LAYERS, NUMBERS):
            each = configs.kernel(kernel_for, m=m, n=n, k=k, **kind)
            config = configs.of(each.name, m=round_up_power_of_two(m), n=n, k=k, **kind)
            launched = each.launches(policy, ProblemShape.of(m=m, n=n, k=k, **kind), config)
            missing |= {(each.name, m, n, k, str(kind)) for launch in launched if made(launch) not in known}
    assert not missing, sorted(missing)[:5]


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 96), (8, 16), (8, 48)])
def test_a_group_that_no_kernel_was_compiled_for_is_refused(bits: int, group: int) -> None:
    codes = torch.zeros((16, 384), dtype=torch.uint8)
    scales = torch.ones((16, 384 // group))
    with pytest.raises(ValueError, match=f"group_size: {group} is n"):
        (pack_int4 if bits == 4 else pack_rows)(GroupedWeight(codes, scales, scales.to(torch.uint8), bits, group))


@pytest.mark.parametrize("name", ["w4a16_gemv", "w8a8"])
@pytest.mark.parametrize("version", [(6, 1), (7, 0), (7, 5)])
def test_rows_between_two_classes_are_compiled_with_whatever_they_are_launched_with(
    name: str, version: tuple[int, int]
) -> None:
    """By its own number of rows a kernel is made, by the class's a config is found: for any of the models' layers."""
    each, policy = find_operation(name), policy_of(*version)
    configs = ConfigCache(interpreter_context(version))
    for m, class_ in ((3, 4), (5, 8), (6, 8), (7, 8)):
        launched = {launch.variant.config for shape, launch in compiled(name, version) if shape["m"] == m}
        shapes = [dict(shape.fields) for shape in each.shapes(policy) if shape["m"] == class_]
        wanted = {configs.of(name, **fields) for fields in shapes}
        assert wanted
        assert wanted <= launched, (m, wanted - launched)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_attention_has_every_head_dim_with_windows_and_without(name: str, policy: PrecisionPolicy) -> None:
    found = {
        (shape["dim"], shape["window"] > 0, shape["kv"])
        for shape, launch in compiled(name, policy.capability.version)
        if launch.variant.name != "attention_decode_reduce"
    }
    assert found >= {(dim, windowed, policy.storage) for dim in HEAD_DIMS for windowed in (True, False)}
    assert found >= {(dim, dim in (96, 256), "int8") for dim in HEAD_DIMS} | {(128, True, "int8")}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_attention_of_heads_that_no_table_has_is_compiled_with_the_default(name: str, policy: PrecisionPolicy) -> None:
    """For numbers that are no powers of two as well: where they are, fewer registers were seen to do."""
    found = select_jobs(find_operation(name), policy.capability.version)
    untabled = [job.shape for job, how in found.items() if how == "default: no table has such a shape"]
    uneven = {shape["dim"] for shape in untabled if shape["kv_heads"] != round_up_power_of_two(shape["kv_heads"])}
    assert uneven == set(HEAD_DIMS)
    assert any(shape["heads"] == round_up_power_of_two(shape["heads"]) for shape in untabled)


@pytest.mark.parametrize("version", CAPABILITIES, ids="{0[0]}.{0[1]}".format)
def test_penalties_are_compiled_for_the_history_of_any_length_of_context(version: tuple[int, int]) -> None:
    """Covers launches of the models' vocabularies and of any number of rows: with int32 as with int16."""
    penalties = [
        launch.variant for _, launch in compiled("sample", version) if launch.variant.name == "sample_penalise"
    ]
    dtypes = {history_dtype(length) for length in (32_768, 32_769, 40_960)}
    assert dtypes == {torch.int16, torch.int32}
    configs = ConfigCache(interpreter_context(version))
    for size, rows, dtype in product({model.vocabulary for model in MODELS}, (1, 2, 4, 8, 16, 32, 64, 128), dtypes):
        config = configs.of("sample", filters="all", r=rows, v=size)
        assert penalty_variant(size, config, dtype) in penalties, (size, rows, dtype)


@pytest.mark.slow("Works out all launches of every operator, and those of the part")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
def test_the_part_for_another_triton_has_every_kernel_as_it_is_tuned(policy: PrecisionPolicy) -> None:
    version = policy.capability.version
    for each in OPERATIONS:
        part = select_jobs(each, version, quick=True)
        kernels = {launch.variant.name for job in part for launch in job.launches()}
        assert kernels == {launch.variant.name for _, launch in compiled(each.name, version)}, each.name
        assert each.refusal(policy) or any("this shape in" in how for how in part.values()), each.name


def test_a_cold_time_is_told_from_a_warm_one() -> None:
    """And compilers that waited for others' cores are not over a budget."""
    row = MatrixRow("op", "kernel", (6, 1), "m=1", {}, "", "")
    rows = [row, replace(row, cached=True), replace(row, cached=True)]
    spent = CompileTime(900.0, 824.8)
    assert spent.describe(rows, 520) == (
        "1 compiled anew and 2 from the cache in 900 s, 412 s of two cores; 412 s at the pace of its budget, 520 s"
    )
    assert spent.over(400)
    assert not spent.over(520)
    assert not spent.over(None)
    assert CompileTime(3.2, 1).describe(rows, None).endswith("in 3 s, 0 s of two cores")


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_twice_the_time_is_over_the_budget_on_any_machine(slower: float) -> None:
    """And the most that it takes today, and a sixth more, is not: neither on a slow machine nor on a fast one."""
    said = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    budgets = {name: float(value) for name, value in re.findall(r"^(MATRIX_S|NEWEST_S) := (\d+)$", said, re.MULTILINE)}
    assert sum(budgets.values()) < 600
    for name, measured in (("MATRIX_S", 441), ("NEWEST_S", 35)):
        for times, over in ((1.0, False), (7 / 6, False), (2.0, True)):
            spent = CompileTime(0.0, 2 * measured * times * slower, pace=REFERENCE_S * slower)
            assert spent.over(budgets[name]) is over, (name, times)
