"""`motley bench kernels` on a GPU: which cases models and tokens ask for. Nothing is launched here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.device.device_context import DeviceContext
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.device.roofline import DecodeAttentionWork
from motley.kernels.launch.kernel_operation import KernelProblem, ProblemShape
from motley.kernels.launch.model_shapes import MODELS, ModelShape
from motley.kernels.launch.variant import Config
from motley.kernels.ops import ops_for_device
from motley.kernels.registry import OPERATIONS
from motley.kernels.tuning.memory_bandwidth import MemoryBandwidth
from motley.kernels.tuning.memory_limits import ShapeTooLarge
from motley.kernels.tuning.timing import Timing
from motley_bench.kernels import cpu_operator_problems, gpu_kernel_cases, kernel_cases
from motley_bench.kernels import kernel_rates as bench
from motley_bench.kernels.gpu_kernel_cases import gpu_cases
from motley_bench.kernels.kernel_cases import TOKENS
from motley_bench.kernels.operation_measurement import OperationMeasurement, TimeBudgetExceeded, make_within_budget

HOPPER = next(device for device in DEVICES if device.capability.version == (9, 0))
DEVICE_CONTEXT = DeviceContext(torch.device("cuda:0"), policy_of(9, 0), HOPPER)
SMALL, LARGE = MODELS[0], MODELS[3]


def shapes(*args: object, **kwargs: object) -> dict[str, list[ProblemShape]]:
    found: dict[str, list[ProblemShape]] = {}
    for _, operation, shape in gpu_cases(DEVICE_CONTEXT, *args, **kwargs):  # type: ignore[arg-type]
        found.setdefault(operation.name, []).append(shape)
    return found


def test_every_operator_has_the_shapes_of_the_models_alone() -> None:
    found = shapes([LARGE], None)
    assert {(shape["n"], shape["k"]) for shape in found["w8a8"]} == set(LARGE.linears.values())
    assert {shape["k"] for shape in found["quantize_rows_int8"]} == {k for _, k in LARGE.linears.values()}
    assert {shape["heads"] for shape in found["attention_decode"]} == {LARGE.heads}
    assert {shape["n"] for shape in found["silu_mul"]} == {LARGE.intermediate}
    assert {shape["n"] for shape in found["rms_norm"]} == {LARGE.hidden}
    assert {shape["h"] for shape in found["rotary_write"]} == {LARGE.heads}
    assert {shape["v"] for shape in found["sample"]} == {LARGE.vocabulary}
    assert {shape["m"] for shape in found["w8a8"]} == set(TOKENS)
    assert "head_rms_norm" not in shapes([SMALL], None), "its heads are of 64"


def sizes(found: Iterable[ProblemShape]) -> set[ProblemShape]:
    """All but the numbers of rows."""
    return {ProblemShape(tuple(field for field in shape.fields if field[0] not in ("m", "t", "r"))) for shape in found}


def test_all_models_have_all_that_is_tuned() -> None:
    found = shapes(MODELS, None)
    for operation in OPERATIONS:
        if not operation.name.startswith("w4a16") and not operation.refusal(DEVICE_CONTEXT.policy):
            assert sizes(found[operation.name]) == sizes(operation.shapes(DEVICE_CONTEXT.policy))
            if operation.name.startswith("attention"):
                assert found[operation.name] == list(operation.shapes(DEVICE_CONTEXT.policy))


@pytest.mark.parametrize("policy", [policy_of(9, 0), policy_of(7, 0)], ids=["9.0", "7.0"])
def test_every_operator_is_measured_at_the_same_numbers_of_rows(policy: PrecisionPolicy) -> None:
    """But those that an operator is never launched with: logits of 2048 sequences, few rows of what is for many."""
    device = next(device for device in DEVICES if device.capability is policy.capability)
    found: dict[str, set[int]] = {}
    for _, operation, shape in gpu_cases(DeviceContext(torch.device("cuda:0"), policy, device), [SMALL, LARGE], None):
        if not operation.name.startswith("attention"):
            rows = next(shape[name] for name in ("m", "t", "r") if name in dict(shape.fields))
            found.setdefault("int4" if operation.name.startswith("w4a16") else operation.name, set()).add(rows)
    expected = {name: set(TOKENS) for name in found} | {"sample": set(TOKENS) - {2048}}
    if policy.capability.major == 7:
        expected |= {"quantize_panels": {16, 32, 64, 256, 2048}, "w8a8_dequantize": {256, 2048}}
    assert found == expected


def test_tokens_are_rows_of_every_operator_and_batches_of_attention() -> None:
    found = shapes([LARGE], [1, 3])
    for name in ("w8a8", "fp8", "quantize_rows_int8"):
        assert {shape["m"] for shape in found[name]} == {1, 3}, name
    assert {shape["t"] for shape in found["rms_norm"]} == {1, 3}
    assert {shape["r"] for shape in found["sample"]} == {1, 3}
    assert {shape["batch"] for shape in found["attention_decode"]} == {1, 3}
    assert "attention_prefill" not in found, "as few new tokens are a decode's"
    assert {shape["new"] for shape in shapes([LARGE], [2048])["attention_prefill"]} == {2048}


def test_attention_is_measured_at_the_same_numbers_of_rows() -> None:
    """Batches that it is not tuned for too, of every model; `bench gpu` keeps to what it tunes."""
    found = shapes(MODELS, None, all_batches=True)
    decode, prefill = found["attention_decode"], found["attention_prefill"]
    assert {m for m in TOKENS if m <= 64} == {shape["batch"] for shape in decode}
    assert {m for m in TOKENS if m > 64} <= {shape["new"] for shape in prefill}
    for m in TOKENS:
        of_rows = [s for s in decode if s["batch"] == m] if m <= 64 else [s for s in prefill if s["new"] == m]
        assert {s["heads"] for s in of_rows} >= {model.heads for model in MODELS}, m
        assert {s["kv"] for s in of_rows} == {"bf16", "int8"}
    [only] = {
        shape["batch"] for shape in shapes([LARGE], [16], ["attention_decode"], all_batches=True)["attention_decode"]
    }
    assert only == 16
    assert set(decode) > set(shapes(MODELS, None)["attention_decode"])


def test_what_was_named_and_has_no_such_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens \[256\]: attention_decode has no shape with as many of qwen3-32b"):
        gpu_cases(DEVICE_CONTEXT, [LARGE], [256], ["attention_decode"])
    with pytest.raises(ValueError, match=r"tokens \[256\]: attention has up to 64"):
        bench.cpu_cases([LARGE], [256], ["attention"])
    with pytest.raises(ValueError, match=r"tokens \[1, 64\]: attention_prefill has more than 64"):
        bench.cpu_cases([LARGE], [1, 64], ["attention_prefill"])


def test_a_cpus_attention_has_the_same_numbers_of_rows_as_a_gpus() -> None:
    names = [name for name, _ in bench.cpu_cases([SMALL], TOKENS, ["attention", "attention_prefill"])]
    for m in TOKENS:
        wanted = f"attention batch={m} context=" if m <= 64 else f"attention_prefill new={m}"
        assert any(f"{SMALL.name} {wanted}" in name for name in names), m
    [one] = bench.cpu_cases([SMALL], [16], ["attention"])
    assert one[0] == f"{SMALL.name} attention batch=16 context=512"
    kinds = {name.split()[2] for name, _ in bench.cpu_cases([SMALL], [1], list(kernel_cases._LINEAR))}
    assert kinds == {"int4", "int8", "dense"}


def test_preparing_a_case_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have 512 copies of their inputs: what it had no time for is left out, and no failure."""
    made: list[int] = []

    def problem(
        ops: object, name: str, tokens: int, model: ModelShape, seed: int
    ) -> tuple[ProblemShape, KernelProblem]:
        made.append(seed)
        return ProblemShape.of(), KernelProblem(object, object, DecodeAttentionWork(1, 1, 1, 1, 1))  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_operator_problems, "pointwise_problem", problem)
    monkeypatch.setattr(bench, "measure_memory_bandwidth", lambda *_: MemoryBandwidth({"torch copy": 1e9}))
    cut = bench.run(
        device="cpu", models=[SMALL.name], tokens=[1], ops=["silu_mul", "rms_norm"], enough=lambda: len(made) > 4
    )
    assert len(made) == 5
    assert (cut["complete"], cut["failed"], cut["rows"]) == (False, [], [])
    assert cut["left_out"] == [f"{SMALL.name} rms_norm t=1", f"{SMALL.name} silu_mul t=1"]


def test_on_a_gpu_too_making_inputs_ends_with_the_time() -> None:
    made: list[int] = []
    with pytest.raises(TimeBudgetExceeded):
        make_within_budget(made.append, 512, lambda: len(made) == 3)
    assert made == [0, 1, 2]
    assert len(make_within_budget(str, 4, lambda: False)) == 4
    [(_, case), *_] = gpu_kernel_cases.gpu_device_cases(
        DEVICE_CONTEXT, [SMALL], [1], ["rms_norm"], enough := lambda: True
    )
    assert isinstance(case, partial)
    assert case.args[-1] is enough


def test_a_run_that_was_cut_short_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_memory_bandwidth", lambda *_: MemoryBandwidth({"torch copy": 1e9}))
    monkeypatch.setattr(bench, "cpu_cases", lambda *_: [(name, object) for name in "abc"])
    monkeypatch.setattr(bench, "rows_of", lambda name, *_: [{"case": name}])
    responses = iter([False, False, True])
    cut = bench.run(device="cpu", models=["qwen2.5-0.5b"], enough=lambda: next(responses))
    assert (cut["complete"], cut["left_out"], [row["case"] for row in cut["rows"]]) == (False, ["c"], ["a", "b"])
    whole = bench.run(device="cpu", models=["qwen2.5-0.5b"])
    assert (whole["complete"], whole["left_out"]) == (True, [])


@pytest.mark.parametrize("error", [1.01, float("inf"), float("nan")])
def test_a_wrong_result_has_no_row(error: float) -> None:
    with pytest.raises(AssertionError, match="silu_mul m=1: off by"):
        list(bench.rows_of("case", found(error), 1e9))
    assert len(list(bench.rows_of("case", found(1.0), 1e9))) == 1


def test_what_fails_and_what_there_is_no_room_for_cost_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> OperationMeasurement:
        raise ShapeTooLarge("needs 26 GiB")

    def lost() -> OperationMeasurement:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "measure_memory_bandwidth", lambda *_: MemoryBandwidth({"torch copy": 1e9}))
    cases = {"right": partial(found, 0.5), "large": large, "lost": lost, "wrong": partial(found, 1.5)}
    monkeypatch.setattr(bench, "cpu_cases", lambda *_: [*cases.items(), ("again", partial(found, 1.0))])
    report = bench.run(device="cpu", models=["qwen2.5-0.5b"])
    assert [row["workload"]["case"] for row in report["rows"]] == ["right", "again"]
    assert report["skipped"] == [{"case": "large", "skipped": "needs 26 GiB"}]
    assert [(each["case"], each["error"].partition(":")[0]) for each in report["failed"]] == [
        ("lost", "OutOfMemoryError"), ("wrong", "AssertionError"),
    ]  # fmt: skip
    assert not report["complete"]
    monkeypatch.setattr(bench, "cpu_cases", lambda *_: [("large", large)])
    assert bench.run(device="cpu", models=["qwen2.5-0.5b"])["complete"], "what is skipped is no fault"


def found(error: float) -> OperationMeasurement:
    shape, took = ProblemShape.of(m=1), Timing(1e-6, 1e-6, 1e-6)
    return OperationMeasurement("silu_mul", shape, {}, "default", error, took, 1e3, 1, {})


def test_on_a_cpu_few_rows_of_all_models_come_first() -> None:
    """A run that is cut short has decode of every model, and every operator that a CPU has."""
    names = [name for name, _ in bench.cpu_cases(MODELS, TOKENS, ())]
    first = names[: next(index for index, name in enumerate(names) if name.endswith("=2"))]
    for model in MODELS:
        for what in ("qkv", "o", "gate_up", "down", *cpu_operator_problems.POINTWISE, "attention batch=1"):
            assert any(name.startswith(f"{model.name} {what} ") for name in first), (model.name, what)


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=lambda model: model.name)
@pytest.mark.parametrize(("batch", "context"), [(1, 2048), (8, 2048), (8, 512), (64, 512)])
def test_on_a_cpu_attention_is_rotated_past_the_cache(
    model: ModelShape, batch: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []

    def problem(ops: object, *sizes: int) -> tuple[ProblemShape, KernelProblem]:
        work = DecodeAttentionWork(*sizes[:-2])
        made.append(work.bytes)
        return ProblemShape.of(), KernelProblem(object, object, work)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_operator_problems, "attention_problem", problem)
    monkeypatch.setattr(kernel_cases, "measure_problems", lambda op, shape, problems, *_: len(problems))
    assert kernel_cases._cpu_attention(model, batch, context)() == len(made) > 1
    assert sum(made) >= 2 * kernel_cases._CPU_CACHE


def test_sdpa_gets_keys_and_values_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    sdpa = F.scaled_dot_product_attention

    def seen(*args: torch.Tensor, **more: Any) -> torch.Tensor:
        given.extend(args)
        return sdpa(*args, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    ops = ops_for_device("cpu", torch.bfloat16)
    _, problem = cpu_operator_problems.attention_problem(ops, 2, 40, 4, 2, 32, 0)
    theirs = problem.peers["torch.sdpa"]()
    assert [each.is_contiguous() for each in given[1:3]] == [True, True]
    assert [tuple(each.shape) for each in given[1:3]] == [(2, 2, 40, 32)] * 2
    found = problem.run(Config())
    assert problem.error(found) <= 1
    assert problem.error(theirs) <= 1, "both are of the same keys and values"
    assert problem.error(found.flip(0)) > 1


@pytest.mark.parametrize("native", [True, False], ids=["c", "torch"])
@pytest.mark.parametrize(("batch", "context", "new"), [(3, 40, 1), (1, 40, 40)])
def test_a_cpus_attention_is_checked_element_by_element(batch: int, context: int, new: int, native: bool) -> None:
    ops = (
        ops_for_device("cpu", torch.bfloat16) if native else CpuOps(torch.bfloat16, "exact", None, None, "none wanted")
    )
    _, problem = cpu_operator_problems.attention_problem(ops, batch, context, 4, 2, 32, 0, new)
    found = problem.run(Config())
    assert problem.error(found) <= 1
    assert problem.error(problem.peers["torch.sdpa"]()) <= 1
    for row in range(batch * new):
        changed = found.clone()
        changed[row, 1] = 0
        assert problem.error(changed) > 1, row


@pytest.mark.parametrize("native", [True, False], ids=["c", "torch"])
@pytest.mark.parametrize("name", cpu_operator_problems.POINTWISE)
def test_a_cpus_other_operators_are_right_in_all_that_they_write(name: str, native: bool) -> None:
    """Keys and values in the cache too, and the sum that a norm is of."""
    model = ModelShape("tiny", 64, 96, 4, 2, 16, 1, 10)
    ops = (
        ops_for_device("cpu", torch.bfloat16) if native else CpuOps(torch.bfloat16, "exact", None, None, "none wanted")
    )
    for tokens in (1, 19):
        shape, problem = cpu_operator_problems.pointwise_problem(ops, name, tokens, model, 0)
        assert shape["t"] == tokens
        found = problem.run(Config())
        assert problem.error(found) <= 1
        for whole in found if isinstance(found, tuple) else (found,):
            retained, numbers = whole.clone(), whole.view(-1)
            numbers[3] += 0.1
            assert problem.error(found) > 1
            numbers[3] = torch.nan
            assert problem.error(found) > 1
            whole.copy_(retained)
        problem.peers["torch"]()
        assert problem.error(found) <= 1


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_what_rotary_write_leaves_in_the_cache_is_checked(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ops_for_device("cpu", torch.bfloat16)
    caches: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "allocate_kv", lambda *sizes: caches.extend(type(ops).allocate_kv(ops, *sizes)) or caches)
    _, problem = cpu_operator_problems.pointwise_problem(
        ops, "rotary_write", 19, ModelShape("t", 64, 96, 4, 2, 16, 1, 10), 0
    )
    found = problem.run(Config())
    assert problem.error(found) <= 1
    retained = ops.kv_vectors(ops.kv_parts(caches[0]))[which]
    retained[1, 1, 2] = 0  # the last token's second head
    assert problem.error(found) > 1


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 128), ("int8", 128), ("dense", 128)])
@pytest.mark.parametrize("native", [True, False], ids=["c", "torch"])
@pytest.mark.parametrize("m", [2, 19])
def test_a_wrong_column_of_a_linear_layer_is_no_rounding(kind: str, group: int, native: bool, m: int) -> None:
    """One of many that is zero changes the root mean square of all by less than rounding does."""
    weight = cpu_operator_problems.linear_weight(512, 1024, group, 0, kind)
    ops = (
        ops_for_device("cpu", torch.bfloat16) if native else CpuOps(torch.bfloat16, "exact", None, None, "none wanted")
    )
    _, problem = cpu_operator_problems.linear_problem(weight, ops.linear(weight), m, 0)
    found = problem.run(Config())
    assert 0.01 < problem.error(found) <= 1
    for wrong in (0.0, torch.nan):
        changed = found.clone()
        changed[:, 77] = wrong
        assert problem.error(changed) > 1
    changed = found.clone()
    changed[-1] = found[0]
    assert problem.error(changed) > 1
