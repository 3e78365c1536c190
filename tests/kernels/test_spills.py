"""Configs that a Triton of the images spills are offered nowhere that they were seen to."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.config_tables import ConfigEntry, ConfigTable, choose_config, write_table
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.known_spills import KNOWN_SPILLS, KnownSpill, offered_configs
from motley.kernels.registry import OPERATIONS, find_operation

GEMV = find_operation("w4a16_gemv")
SHAPE = ProblemShape.of(m=2, n=896, k=896, group=128)


@pytest.mark.parametrize("spill", KNOWN_SPILLS, ids=lambda spill: spill.op)
def test_each_is_of_configs_that_there_are_and_leaves_others(spill: KnownSpill) -> None:
    each = find_operation(spill.op)
    for version in spill.capabilities:
        policy = policy_of(*version)
        shapes = [s.plain for s in (*each.samples(policy), *each.shapes(policy)) if spill.of_shape(s)]
        withheld = [set(each.configs(policy, shape)) - set(offered_configs(each, policy, shape)) for shape in shapes]
        assert any(withheld), "or it can go"
        assert all(offered_configs(each, policy, shape) for shape in shapes)
        for shape, not_here in zip(shapes, withheld, strict=True):
            assert choose_config(each, policy, shape).config not in not_here


def test_elsewhere_all_are_offered() -> None:
    capabilities = {version for spill in KNOWN_SPILLS for version in spill.capabilities}
    policy = policy_of(8, 9)
    assert (8, 9) not in capabilities
    for each in OPERATIONS:
        for shape in () if each.refusal(policy) else each.samples(policy):
            assert offered_configs(each, policy, shape) == each.configs(policy, shape)


def test_a_table_that_has_one_is_passed_over(folder: Path) -> None:
    policy, near = policy_of(12, 0), ProblemShape.of(m=2, n=1792, k=896, group=128)
    spilling, other = (next(c for c in GEMV.configs(policy, SHAPE) if c["REPEAT"] == repeat) for repeat in (1, 4))
    write_table(
        ConfigTable(GEMV.name, "static", {}, {SHAPE: ConfigEntry(spilling, {}), near: ConfigEntry(other, {})}),
        folder / "sm120",
    )
    assert choose_config(GEMV, policy, SHAPE).config == other
    assert choose_config(GEMV, policy_of(8, 9), SHAPE).source == "default"
