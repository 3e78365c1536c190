"""Configs chosen with no GPU: what a prediction counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import triton

from motley.kernels import tune
from motley.kernels.aot import Compiled
from motley.kernels.compiling import Job
from motley.kernels.device_table import DEVICES
from motley.kernels.operation import Launch, Shape
from motley.kernels.precision import policy_of
from motley.kernels.registry import operation
from motley.kernels.roofline import Linear
from motley.kernels.static import Candidate, fault, issue_seconds
from motley.kernels.tune import _few
from motley.kernels.tuning import Entry, Table, read_file, write
from motley.kernels.variant import Config, Variant

P40 = next(device for device in DEVICES if device.name == "Tesla P40")
WORK = Linear(1, 4096, 4096)


def loop_of(*instructions: str) -> Compiled:
    body = "\n".join(f"\t{instruction} %r1, %r2;" for instruction in instructions)
    return Compiled("k", (6, 1), 32, 0, 0, 128, 0.0, f"$L1:\n{body}\n\t@%p1 bra $L1;\n")


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


def tried(times: dict[int, float], instruction: str = "fma.rn.f32") -> list[tuple[float, Candidate]]:
    """Candidates by their number of warps, with the seconds that are predicted for them."""
    found = []
    for warps, seconds in times.items():
        config = Config.of(warps)
        launch = Launch(Variant("k", None, (), (), config), (1,))
        found.append((seconds, Candidate(config, ((launch, loop_of(instruction)),))))
    return found


def test_few_kernels_serve_many_shapes_where_predictions_are_near():
    a, b, c = (Shape.of(m=m) for m in (1, 2, 3))
    entries = _few({
        a: tried({4: 1.00, 8: 1.20}),
        b: tried({8: 2.00, 16: 1.99}),
        c: tried({16: 3.0, 8: 4.0}),
    })  # fmt: skip
    assert {shape: entry.config.num_warps for shape, entry in entries.items()} == {a: 8, b: 8, c: 16}
    assert entries[a].facts["predicted_us"] == pytest.approx(1.2e6)


@pytest.mark.parametrize(("products", "others", "said"), [(6, 4, ""), (4, 6, "dp4a.s32.s32 is 36% of the inner loop")])
def test_the_inner_loop_must_be_products(products: int, others: int, said: str) -> None:
    compiled = loop_of(*["dp4a.s32.s32"] * products, *["ld.global.b32"] * others)
    launch = Launch(Variant("k", None, (), (), Config.of()), (1,), "dp4a.s32.s32", share=0.5)
    assert fault(policy_of(6, 1), launch, compiled).startswith(said)
    assert bool(fault(policy_of(6, 1), launch, compiled)) == bool(said)


def test_only_what_tables_have_not_is_compiled_and_of_their_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a model more does not cost what all of them did, nor change what the others have."""
    asked: list[Job] = []

    def all_compiled(jobs: Sequence[Job], *_: object) -> dict[Job, tuple[tuple[Launch, Compiled], ...]]:
        asked[:] = jobs
        return {job: tuple((launch, loop_of("fma.rn.f32")) for launch in job.launches()) for job in jobs}

    monkeypatch.setattr(tune, "compile_all", all_compiled)
    gemv, policy = operation("w4a16_gemv"), policy_of(6, 1)
    [path] = tune.static([gemv], [(6, 1)], 1, tmp_path)
    whole = read_file(path)
    assert whole is not None
    assert len({job.config for job in asked}) > 3
    shape, *others = gemv.shapes(policy)
    kept = {other: Entry(whole.entries[other].config, {"predicted_us": 1.0}) for other in others}
    used = {entry.config for entry in kept.values()}

    def told(about: dict[str, str]) -> Table:
        write(Table(gemv.name, "static", about, kept), path.parent)
        [again] = tune.static([gemv], [(6, 1)], 1, tmp_path, missing=True)
        found = read_file(again)
        assert found is not None
        return found

    found = told({"triton": triton.__version__})
    assert {job.shape for job in asked} == {shape} | {s.plain.rounded for s in gemv.samples(policy)} - kept.keys()
    assert all(job.config in used for job in asked if set(gemv.configs(policy, job.shape)) & used)
    assert {key: found.entries[key] for key in kept} == kept, "what it had"
    assert found.entries.keys() == whole.entries.keys()
    assert told({"triton": "3.0"}).entries == whole.entries, "of another Triton: nothing stays"


def test_what_is_at_fault_is_not_chosen():
    assert _few({Shape.of(m=1): tried({4: float("inf")})}) == {}
