"""Configs chosen with no GPU: what a prediction counts."""

from __future__ import annotations

import pytest

from motley.kernels.aot import Compiled
from motley.kernels.device_table import DEVICES
from motley.kernels.operation import Launch, Shape
from motley.kernels.precision import policy_of
from motley.kernels.roofline import Linear
from motley.kernels.static import Candidate, fault, issue_seconds
from motley.kernels.tune import _few
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


def test_what_is_at_fault_is_not_chosen():
    assert _few({Shape.of(m=1): tried({4: float("inf")})}) == {}
