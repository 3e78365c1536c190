"""Configs chosen with no GPU: what a prediction counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from motley.kernels.compiler.aot import CompiledKernel
from motley.kernels.compiler.compile_pool import CompileJob
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.device.roofline import LinearWork
from motley.kernels.launch.config_tables import (
    TUNED_FOLDER,
    ConfigEntry,
    ConfigTable,
    read_table_file,
    table_folder,
    write_table,
)
from motley.kernels.launch.kernel_operation import KernelLaunch, ProblemShape
from motley.kernels.launch.known_spills import offered_configs
from motley.kernels.launch.variant import Config, Variant
from motley.kernels.registry import find_operation
from motley.kernels.tuning import table_writer
from motley.kernels.tuning.static_prediction import (
    ConfigCandidate,
    find_fault,
    issue_seconds,
    predict_seconds,
    static_facts,
)
from motley.kernels.tuning.table_writer import _fewest_kernels

P40 = next(device for device in DEVICES if device.name == "Tesla P40")
WORK = LinearWork(1, 4096, 4096)


def loop_of(*instructions: str) -> CompiledKernel:
    body = "\n".join(f"\t{instruction} %r1, %r2;" for instruction in instructions)
    return CompiledKernel("k", (6, 1), 32, 0, 0, 128, 0.0, f"$L1:\n{body}\n\t@%p1 bra $L1;\n")


def test_schedulers_issue_every_instruction_of_the_loop():
    sms_by_clock = P40.rates["fp32"] / 2 / 128
    once = 4096 * 4096 / (sms_by_clock * 4 * 32)
    bare = issue_seconds(P40, WORK, loop_of("fma.rn.f32"))
    assert bare == pytest.approx(2 * once)  # with the branch
    padded = issue_seconds(P40, WORK, loop_of("fma.rn.f32", "and.b32", "shr.u32", "add.s32"))
    assert padded == pytest.approx(5 * once)
    assert issue_seconds(P40, WORK, loop_of("dp4a.s32.s32", "ld.global.b32")) == pytest.approx(3 * once / 4)
    assert issue_seconds(P40, WORK, loop_of("fma.rn.f32x2")) == pytest.approx(2 * once / 2), "from 10.0 two at a time"


@pytest.mark.parametrize("instructions", [("ld.global.b32", "add.s32"), ("mma.sync.aligned.m16n8k16", "fma.rn.f32")])
def test_nothing_is_said_where_the_lanes_do_not_multiply(instructions: tuple[str, ...]):
    assert issue_seconds(P40, WORK, loop_of(*instructions)) == 0.0


def tried(times: dict[int, float], instruction: str = "fma.rn.f32") -> list[tuple[float, ConfigCandidate]]:
    """Candidates by their number of warps, with the seconds that are predicted for them."""
    found = []
    for warps, seconds in times.items():
        config = Config.of(warps)
        launch = KernelLaunch(Variant("k", None, (), (), config), (1,))
        found.append((seconds, ConfigCandidate(config, ((launch, loop_of(instruction)),))))
    return found


def test_few_kernels_serve_many_shapes_where_predictions_are_near():
    a, b, c = (ProblemShape.of(m=m) for m in (1, 2, 3))
    entries = _fewest_kernels({
        a: tried({4: 1.00, 8: 1.20}),
        b: tried({8: 2.00, 16: 1.99}),
        c: tried({16: 3.0, 8: 4.0}),
    })  # fmt: skip
    assert {shape: entry.config.num_warps for shape, entry in entries.items()} == {a: 8, b: 8, c: 16}
    assert entries[a].facts["predicted_us"] == pytest.approx(1.2e6)


@pytest.mark.parametrize(("products", "others", "said"), [(6, 4, ""), (4, 6, "dp4a.s32.s32 is 36% of the inner loop")])
def test_the_inner_loop_must_be_products(products: int, others: int, said: str) -> None:
    compiled = loop_of(*["dp4a.s32.s32"] * products, *["ld.global.b32"] * others)
    launch = KernelLaunch(Variant("k", None, (), (), Config.of()), (1,), "dp4a.s32.s32", share=0.5)
    assert find_fault(policy_of(6, 1), launch, compiled).startswith(said)
    assert bool(find_fault(policy_of(6, 1), launch, compiled)) == bool(said)


def test_one_of_two_products_is_not_enough() -> None:
    """Attention whose weights and values are multiplied on the lanes."""
    each, policy = find_operation("attention_prefill"), policy_of(9, 0)
    shape = next(shape for shape in each.samples(policy) if shape["dim"] == 128 and shape["window"])
    config = Config.of(8, 3, ROWS=128, BLOCK=64, WIDE=False)
    [launch] = each.launches(policy, shape, config)
    scores, values = (f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16" for n in (64, 128))
    assert not find_fault(policy, launch, loop_of(*[scores] * (128 // 16), *[values] * (64 // 16)))
    assert "of 12 at least" in find_fault(policy, launch, loop_of(*[scores] * (128 // 16), *["fma.rn.f32"] * 99))


def test_only_what_tables_have_not_is_compiled_and_of_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a model more does not cost what all of them did, nor change what the others have."""
    asked: list[CompileJob] = []

    def all_compiled(
        jobs: Sequence[CompileJob], *_: object
    ) -> dict[CompileJob, tuple[tuple[KernelLaunch, CompiledKernel], ...]]:
        asked[:] = jobs
        return {job: tuple((launch, loop_of("fma.rn.f32")) for launch in job.launches()) for job in jobs}

    monkeypatch.setattr(table_writer, "compile_all", all_compiled)
    gemv, policy = find_operation("w4a16_gemv"), policy_of(6, 1)
    [path] = table_writer.write_static_tables([gemv], [(6, 1)], 1, tmp_path)
    whole = read_table_file(path)
    assert whole is not None
    assert len({job.config for job in asked}) > 3
    shape, *others = gemv.shapes(policy)
    kept = {other: ConfigEntry(whole.entries[other].config, {"predicted_us": 1.0}) for other in others}
    used = {entry.config for entry in kept.values()}

    def told(about: dict[str, str]) -> ConfigTable:
        write_table(ConfigTable(gemv.name, "static", about, kept), path.parent)
        [again] = table_writer.write_static_tables([gemv], [(6, 1)], 1, tmp_path, missing=True)
        found = read_table_file(again)
        assert found is not None
        return found

    found = told({"triton": triton.__version__})
    assert {job.shape for job in asked} == {shape}
    assert all(job.config in used for job in asked if set(gemv.configs(policy, job.shape)) & used)
    assert {key: found.entries[key] for key in kept} == kept, "what it had"
    assert found.entries.keys() == whole.entries.keys()
    assert told({"triton": "3.0"}).entries == whole.entries, "of another Triton: nothing stays"


def test_a_sampler_is_chosen_by_itself_and_not_by_the_penalties_before_it() -> None:
    """The first launch, with all filters, applies penalties: what its kernel needs says nothing of the sampler's."""
    each, policy = find_operation("sample"), policy_of(6, 1)
    shape = ProblemShape.of(filters="all", r=8, v=152_064)
    config = each.configs(policy, shape)[0]

    def of(penalties: int, survey: int) -> ConfigCandidate:
        registers = {"sample_penalise": penalties, "sample_survey": survey}
        made = replace(loop_of("add.s32"), threads=32 * config.num_warps)
        launches = each.launches(policy, shape, config)
        assert {launch.variant.name for launch in launches} > set(registers)
        return ConfigCandidate(
            config,
            tuple((launch, replace(made, registers=registers.get(launch.variant.name, 32))) for launch in launches),
        )

    light, heavy = of(128, 32), of(32, 64)
    assert predict_seconds(P40, policy, each, shape, light) == predict_seconds(P40, policy, each, shape, of(32, 32))
    assert predict_seconds(P40, policy, each, shape, heavy) != predict_seconds(P40, policy, each, shape, light)
    assert (static_facts(light, 1e-6)["registers"], static_facts(heavy, 1e-6)["registers"]) == (32, 64)
    kernels = {entry.config for entry in _fewest_kernels({shape: [(1.0, light)]}).values()}
    assert kernels == {config}
    surveys = {job.launches()[1].variant for job in table_writer._static_jobs(each, (6, 1), {}) if job.shape == shape}
    assert {variant.name for variant in surveys} == {"sample_survey"}
    assert len(surveys) == table_writer.MOVING_KERNELS


def test_what_is_at_fault_is_not_chosen():
    assert _fewest_kernels({ProblemShape.of(m=1): tried({4: float("inf")})}) == {}


@pytest.mark.parametrize("name", ["w4a16_gemm", "w8a8", "fp8", "attention_decode"])
def test_what_decides_the_grid_alone_is_tried_in_full(name: str) -> None:
    """A kernel serves all numbers of parts: of those that are compiled, none is left out."""
    each, policy = find_operation(name), policy_of(9, 0)
    shape = max(each.shapes(policy), key=lambda shape: len(each.configs(policy, shape)))
    kernels: dict[Variant, set[Config]] = {}
    for config in offered_configs(each, policy, shape):
        kernels.setdefault(each.launches(policy, shape, config)[0].variant, set()).add(config)
    jobs = table_writer._static_jobs(
        each, (9, 0), {other: ConfigEntry(Config.of(), {}) for other in each.shapes(policy) if other != shape}
    )
    tried = {job.config for job in jobs if job.shape == shape}
    compiled = [variant for variant, configs in kernels.items() if configs & tried]
    assert len(compiled) == min(table_writer.STATIC_KERNELS, len(kernels)), "compilations are what costs"
    assert tried == set().union(*(kernels[variant] for variant in compiled))
    assert len(tried) > len(compiled), "or this shape has nothing to try"


@pytest.mark.parametrize("version", [version for version in CAPABILITIES if version >= (8, 0)], ids=str)
def test_tables_have_the_parts_of_k_that_are_predicted_best(version: tuple[int, int]) -> None:
    """Such as 8 of Qwen2.5-7B's down projection with one token on 9.0: 2 are predicted to take 3 times as long."""
    gemm, policy = find_operation("w4a16_gemm"), policy_of(*version)
    device = next(device for device in DEVICES if device.capability is policy.capability)
    table = read_table_file(TUNED_FOLDER / table_folder(policy.capability) / "w4a16_gemm.json")
    assert table is not None
    for shape, entry in table.entries.items():
        times: dict[int, float] = {}
        for splits in (2, 4, 8) if entry.config["SPLITS"] > 1 else ():
            config = Config.of(
                entry.config.num_warps,
                entry.config.num_stages,
                **{**dict(entry.config.constants), "SPLITS": splits},
            )
            launches = gemm.launches(policy, shape, config)
            loop = f"$L1:\n\t{launches[0].instruction.replace('*', '16')} %r1, %r2;\n\t@%p1 bra $L1;\n"
            made = CompiledKernel("k", version, entry.facts["registers"], 0, entry.facts["shared"], 128, 0.0, loop)
            candidate = ConfigCandidate(config, tuple((launch, made) for launch in launches))
            times[splits] = predict_seconds(device, policy, gemm, shape, candidate)
        assert not times or min(times, key=lambda each: times[each]) == entry.config["SPLITS"], (shape.key, times)
    down = table.entries[ProblemShape.of(m=1, n=3584, k=18_944, group=128)]
    assert down.config["SPLITS"] > 2
