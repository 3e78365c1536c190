"""Configs are found by trying them: shapes that fit the device alone, and each failure costs itself alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_operation import FakeOperation, config, fake_clock

from motley.kernels import registry
from motley.kernels.device.device_context import DeviceContext, interpreter_context
from motley.kernels.device.device_table import DEVICES
from motley.kernels.launch import config_tables
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.registry import OPERATIONS, find_operation
from motley.kernels.tuning import config_search as searching
from motley.kernels.tuning import table_writer
from motley.kernels.tuning.config_search import search_configs
from motley.kernels.tuning.memory_bandwidth import MemoryBandwidth
from motley.kernels.tuning.memory_limits import ShapeTooLarge
from motley_bench.gpu.gpu_tasks import GpuTasks
from motley_bench.kernels import operation_measurement

GIB = 2**30
DECODE = find_operation("attention_decode")
LARGEST = ProblemShape.of(batch=64, context=32_768, heads=32, kv_heads=8, dim=128, window=0, kv="fp16")


def small(gib: float = 16) -> DeviceContext:
    """A stand-in for a T4, or one with other memory."""
    rig = interpreter_context((7, 5))
    return replace(rig, about=replace(rig.about, memory=int(gib * GIB)))


def test_a_card_of_16_gib_leaves_out_what_it_has_no_room_for() -> None:
    """Copies of the inputs, and one that nothing had before: of 8 GiB of KV three."""
    rig = small()
    assert LARGEST in DECODE.shapes(rig.policy)
    assert searching.search_memory_shortage(DECODE, rig, LARGEST) == "needs 26 GiB"
    assert operation_measurement.measurement_memory_shortage(DECODE, rig, LARGEST) == "needs 18 GiB"
    with pytest.raises(ShapeTooLarge, match="needs 26 GiB"):
        search_configs(DECODE, rig, LARGEST)
    with pytest.raises(ShapeTooLarge, match="needs 18 GiB"):
        operation_measurement.measure_operation(DECODE, rig, LARGEST)
    without = left_out(rig)
    assert {name for name, _ in without} == {"attention_decode", "attention_prefill"}
    assert {(shape["batch"], shape["context"]) for _, shape in without} <= {(64, 8192), (64, 32_768)}


def test_cards_with_room_leave_nothing_out() -> None:
    for device in DEVICES:
        rig = replace(interpreter_context(device.capability.version), about=device)
        assert bool(left_out(rig)) is (device.memory < 32 * 10**9), device.name


def left_out(rig: DeviceContext) -> list[tuple[str, ProblemShape]]:
    tuned = ((each, shape) for each in OPERATIONS if not each.refusal(rig.policy) for shape in each.shapes(rig.policy))
    return [(each.name, shape) for each, shape in tuned if searching.search_memory_shortage(each, rig, shape)]


def test_inputs_are_let_go_of_before_the_next_are_made() -> None:
    fake = FakeOperation(*(config("right", 1e-3) for _ in range(3)), config("raises", 1e-3), config("wrong", 1e-3))
    with fake_clock():
        assert search_configs(fake, small(), ProblemShape.of(n=4)) is not None
    assert fake.held == 3, "two in turn, and a fresh one"


@pytest.mark.parametrize("how", ["wrong", "nan", "stale", "raises"])
def test_the_fastest_config_loses_if_it_is_not_right(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it won that gives what a right one left in memory; `motley bench gpu` tells why each is excluded."""
    right, slow, bad = config("right", 2e-3), config("right", 3e-3), config(how, 1e-3)
    fake = FakeOperation(slow, right, bad)
    monkeypatch.setattr(registry, "find_operation", lambda name: fake)
    with fake_clock():
        told = GpuTasks(small()).tune("fake", "n=4", None)
    assert told["found"]["config"] == right.to_json()
    assert told["found"]["microseconds"] == 2000
    assert told["tried"] == [
        {"config": slow.to_json(), "microseconds": 3000},
        {"config": right.to_json(), "microseconds": 2000},
    ]
    [excluded] = told["excluded"]
    assert excluded["config"] == bad.to_json()
    assert ("an illegal instruction" if how == "raises" else "wrong: off by") in excluded["why"]
    with fake_clock():
        assert search_configs(FakeOperation(bad), small(), ProblemShape.of(n=4)) is None


def test_an_operator_is_tuned_where_nothing_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ours, in the interpreter: what wins is of those offered, and is in the table as measured."""
    monkeypatch.setattr(table_writer, "measure_memory_bandwidth", lambda device: MemoryBandwidth({"torch copy": 1e12}))
    each, rig = find_operation("silu_mul"), small()
    shape = each.small(rig.policy)[0]
    monkeypatch.setattr(table_writer, "order_shapes", lambda *_: [shape])
    ahead: list[int] = []
    with fake_clock():
        [path] = table_writer.write_measured_tables([each], rig, tmp_path, ahead=lambda jobs: ahead.append(len(jobs)))
    table = config_tables.read_table_file(path)
    assert table is not None
    assert path.parent.name == config_tables.table_folder(rig.policy.capability, rig.about)
    assert (table.source, table.about["gpu"], table.about["memory_gb_per_s"]) == (
        "measured",
        rig.about.name,
        {"torch copy": 1000.0},
    )
    assert table.entries[shape].config in each.configs(rig.policy, shape)
    assert ahead == [len(each.configs(rig.policy, shape))]


def test_a_shape_that_fails_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does one that there is no room for; the others are written, and other operators are tuned."""
    monkeypatch.setattr(table_writer, "measure_memory_bandwidth", lambda device: MemoryBandwidth({"torch copy": 1e12}))
    good, failing, large = ProblemShape.of(n=4), ProblemShape.of(n=8), ProblemShape.of(n=2 * GIB)
    one, two = (FakeOperation(config("right", 1e-3), shapes=(large, failing, good), failing=(failing,)) for _ in "ab")
    two.name = "other"
    told: list[str] = []
    with fake_clock():
        paths = list(table_writer.write_measured_tables([one, two], small(), tmp_path, told.append))
    assert [path.stem for path in paths] == ["fake", "other"]
    for path in paths:
        table = config_tables.read_table_file(path)
        assert table is not None
        assert list(table.entries) == [good]
        assert table.entries[good].facts["microseconds"] == 1000
    assert "fake n=2147483648: skipped: needs 38 GiB" in told
    assert "other n=8: OutOfMemoryError: CUDA out of memory" in told
