"""Configs chosen with no GPU: what a prediction counts."""

from __future__ import annotations

import pytest

from motley.kernels.aot import Compiled
from motley.kernels.device_table import DEVICES
from motley.kernels.roofline import Linear
from motley.kernels.static import issue_seconds

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


@pytest.mark.parametrize("instructions", [("ld.global.b32", "add.s32"), ("mma.sync.aligned.m16n8k16", "fma.rn.f32")])
def test_nothing_is_said_where_the_lanes_do_not_multiply(instructions: tuple[str, ...]):
    assert issue_seconds(P40, WORK, loop_of(*instructions)) == 0.0
