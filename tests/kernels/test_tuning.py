"""Configs are found by device and shape, and the answer says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.device_context import DeviceContext, interpreter_context
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import policy_of
from motley.kernels.gpu.config_cache import ConfigCache
from motley.kernels.launch import config_tables
from motley.kernels.launch.config_tables import (
    ConfigEntry,
    ConfigTable,
    TabledDevice,
    choose_config,
    exact_entry,
    fastest_operation,
    table_folder,
    tabled_devices,
    write_table,
)
from motley.kernels.launch.kernel_operation import KernelOperation, ProblemShape, round_up_power_of_two
from motley.kernels.launch.known_spills import offered_configs
from motley.kernels.launch.variant import Config
from motley.kernels.registry import OPERATIONS, find_operation
from motley.kernels.tuning.compile_matrix import select_jobs
from motley.kernels.tuning.memory_bandwidth import MemoryBandwidth
from motley.kernels.tuning.table_writer import merge_into_table

GEMV = find_operation("w4a16_gemv")
P40 = policy_of(6, 1)
SHAPE = ProblemShape.of(m=1, n=4096, k=4096, group=128)
SPEED = MemoryBandwidth({"torch copy": 1e12})


def entry(rows: int, **facts: object) -> ConfigEntry:
    return ConfigEntry(Config.of(4, 1, ROWS=rows, REPEAT=1), facts)


def test_a_shape_reads_as_it_was_written() -> None:
    shape = ProblemShape.of(m=1, dtype="fp16", k=4096)
    assert shape.key == "dtype=fp16 k=4096 m=1"
    assert ProblemShape.parse(shape.key) == shape


def test_distance_counts_doublings_and_what_must_be_equal_is() -> None:
    assert SHAPE.distance(SHAPE) == 0
    assert SHAPE.distance(ProblemShape.of(m=2, n=2048, k=4096, group=128)) == 2
    assert SHAPE.distance(ProblemShape.of(m=1, n=4096, k=4096, group=64), frozenset({"group"})) == float("inf")
    assert SHAPE.distance(ProblemShape.of(m=1, n=4096, k=4096)) == float("inf"), "another operator's"
    assert ProblemShape.of(kv="fp16", m=0).distance(ProblemShape.of(kv="int8", m=0)) == float("inf")
    assert ProblemShape.of(window=0).distance(ProblemShape.of(window=4096)) == float("inf"), "none is not a small one"


def test_this_shape_then_the_nearest_then_the_default(folder: Path) -> None:
    default = choose_config(GEMV, P40, SHAPE)
    assert (default.config, default.source) == (GEMV.configs(P40, SHAPE)[0], "default")
    near, nearer = (ProblemShape.of(m=1, n=n, k=4096, group=128) for n in (16_384, 8192))
    other_group = ProblemShape.of(m=1, n=4096, k=4096, group=32)
    entries = {near: entry(4), nearer: entry(8), other_group: entry(16)}
    write_table(ConfigTable(GEMV.name, "static", {}, entries), folder / "sm61")
    found = choose_config(GEMV, P40, SHAPE)
    assert (found.config["ROWS"], found.source) == (8, "static")
    assert "nearest shape in sm61, group=128 k=4096 m=1 n=8192" in found.how
    write_table(ConfigTable(GEMV.name, "static", {}, {**entries, SHAPE: entry(2)}), folder / "sm61")
    found = choose_config(GEMV, P40, SHAPE)
    assert (found.config["ROWS"], found.how) == (2, "static: this shape in sm61")


def test_a_shape_that_the_capability_knows_is_not_left_for_a_far_one_of_the_device(folder: Path) -> None:
    far = ProblemShape.of(m=8, n=16_384, k=4096, group=128)
    write_table(ConfigTable(GEMV.name, "static", {}, {SHAPE: entry(2)}), folder / "sm61")
    write_table(ConfigTable(GEMV.name, "measured", {"gpu": "Tesla P40"}, {far: entry(4)}), folder / "sm61-30sm")
    assert choose_config(GEMV, P40, SHAPE, TabledDevice(30, "")).how == "static: this shape in sm61"
    assert choose_config(GEMV, P40, far, TabledDevice(30, "")).how == "measured: this shape in sm61-30sm"
    near = ProblemShape.of(m=8, n=8192, k=4096, group=128)
    assert choose_config(GEMV, P40, near, TabledDevice(30, "")).source == "measured"


def test_sizes_between_two_classes_are_looked_up_as_launches_look_them_up(folder: Path) -> None:
    """A table's own entry for such a size is of no use to anyone: launches would never ask for it."""
    between, above = (ProblemShape.of(m=m, n=4096, k=4096, group=128) for m in (3, 4))
    write_table(ConfigTable(GEMV.name, "static", {}, {between: entry(8), above: entry(4)}), folder / "sm61")
    found = choose_config(GEMV, P40, between)
    assert (found.config["ROWS"], found.how) == (4, f"static: this class of shapes in sm61, {above.key}")
    assert found.config == ConfigCache(interpreter_context((6, 1))).of(
        GEMV.name, m=round_up_power_of_two(3), n=4096, k=4096, group=128
    )
    attention = ProblemShape.of(batch=3, context=40, new=33, heads=28, kv_heads=4, dim=80, window=1024, kv="fp16")
    changed = {"batch": 4, "context": 256, "new": 64}
    assert attention.rounded == ProblemShape.of(**{**dict(attention.fields), **changed}), "and sizes of a model are not"
    for each in OPERATIONS:
        for version in CAPABILITIES:
            policy = policy_of(*version)
            shapes = () if each.refusal(policy) else each.shapes(policy)
            assert all(shape.rounded == shape for shape in shapes), (each.name, version, "tuned in vain")


def test_of_other_shapes_only_what_is_offered_for_this_one_is_taken(folder: Path) -> None:
    """Rows of 16,384 columns in 4 warps would spill, however near a table's shape is that they serve."""
    norm, near, long = find_operation("rms_norm"), ProblemShape.of(n=8192, t=1), ProblemShape.of(n=16_384, t=1)
    narrow = Config.of(4, 1, BLOCK=1024)
    write_table(ConfigTable(norm.name, "static", {}, {near: ConfigEntry(narrow, {})}), folder / "sm61")
    assert choose_config(norm, P40, near).config == narrow
    assert choose_config(norm, P40, ProblemShape.of(n=5120, t=1)).config == narrow
    how = "default: no config that sm61 has of such shapes is offered for this one"
    assert choose_config(norm, P40, long) == config_tables.ConfigChoice(norm.configs(P40, long)[0], how, "default")
    assert choose_config(norm, policy_of(7, 0), long).how == "default: no table has such a shape"


def test_the_matrix_compiles_what_every_table_picks(folder: Path) -> None:
    def rows(text: str) -> set[int]:
        return {
            job.config["ROWS"] for job, how in select_jobs(GEMV, (6, 1)).items() if job.shape == SHAPE and text in how
        }

    write_table(ConfigTable(GEMV.name, "static", {}, {SHAPE: entry(2)}), folder / "sm61")
    assert tabled_devices(P40.capability) == ()
    assert rows("static: this shape in sm61") == {2}
    write_table(ConfigTable(GEMV.name, "measured", {"gpu": "Tesla P40"}, {SHAPE: entry(4)}), folder / "sm61-30sm")
    assert tabled_devices(P40.capability) == (TabledDevice(30, ""),)
    assert rows("static: this shape in sm61") == {2}
    assert rows("measured: this shape in sm61-30sm") == {4}


def test_the_devices_own_table_comes_first(folder: Path) -> None:
    write_table(ConfigTable(GEMV.name, "static", {}, {SHAPE: entry(2)}), folder / "sm61")
    write_table(
        ConfigTable(GEMV.name, "measured", {"gpu": "Tesla P40"}, {SHAPE: entry(4, microseconds=30.5)}),
        folder / "sm61-30sm",
    )
    assert choose_config(GEMV, P40, SHAPE, TabledDevice(30, "")).how == "measured: this shape in sm61-30sm"
    assert choose_config(GEMV, P40, SHAPE, TabledDevice(28, "")).how == "static: this shape in sm61"
    assert choose_config(GEMV, policy_of(7, 0), SHAPE).source == "default"


def test_a_devices_own_table_is_told_from_that_of_another_with_as_many_sms(folder: Path) -> None:
    """An H200 has an H100's SMs, and memory that is half as fast again."""
    h100, h200 = (
        next(each for each in DEVICES if each.name.startswith(name)) for name in ("NVIDIA H100 80", "NVIDIA H200")
    )
    assert h100.sms == h200.sms
    hopper, (gemm, gemv) = policy_of(9, 0), (find_operation("w4a16_gemm"), GEMV)
    first, second = gemm.configs(hopper, SHAPE)[:2]
    write_table(
        ConfigTable(gemm.name, "static", {}, {SHAPE: ConfigEntry(gemm.configs(hopper, SHAPE)[2], {})}), folder / "sm90"
    )
    rigs = [DeviceContext(torch.device("cpu"), hopper, each) for each in (h100, h200)]
    for rig, config, taken in zip(rigs, (first, second), (30.0, 20.0), strict=True):
        if rig.about is h200:
            other = choose_config(gemm, hopper, SHAPE, h200)
            assert (other.config, other.source) == (first, "measured"), "nearer than what nothing was run for"
            assert f"; of {h100.name}, which has as many SMs" in other.how
        merge_into_table(gemm, rig, {SHAPE: ConfigEntry(config, {"microseconds": taken})}, SPEED, folder)
    found = [choose_config(gemm, hopper, SHAPE, each) for each in (h100, h200)]
    assert [choice.config for choice in found] == [first, second], "neither has overwritten the other's"
    assert [choice.how for choice in found] == [
        f"measured: this shape in {name}" for name in ("sm90-132sm-nvidia-h100-80gb-hbm3", "sm90-132sm-nvidia-h200")
    ]
    assert choose_config(gemm, hopper, SHAPE).how == "static: this shape in sm90"
    assert {job.config for job in select_jobs(gemm, (9, 0)) if job.shape == SHAPE} >= {first, second}
    merge_into_table(gemv, rigs[0], {SHAPE: entry(8, microseconds=25.0)}, SPEED, folder)
    assert fastest_operation((gemm, gemv), hopper, SHAPE, h100) == (gemv, 25.0)
    assert fastest_operation((gemm, gemv), hopper, SHAPE, h200) == (gemv, 25.0), (
        "of one GPU: 20 us of another are no comparison"
    )


def test_a_further_folder_is_looked_in_first(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer says that it is from there; what it has not comes from the others."""
    further = tmp_path_factory.mktemp("tables")
    other = ProblemShape.of(m=8, n=4096, k=4096, group=128)
    write_table(ConfigTable(GEMV.name, "static", {}, {SHAPE: entry(2), other: entry(2)}), folder / "sm61")
    write_table(ConfigTable(GEMV.name, "measured", {}, {SHAPE: entry(4, microseconds=1.0)}), further / "sm61-30sm")
    p40 = TabledDevice(30, "")
    assert choose_config(GEMV, P40, SHAPE, p40).how == "static: this shape in sm61"
    monkeypatch.setenv("MOTLEY_TUNED", str(further))
    assert choose_config(GEMV, P40, SHAPE, p40).how == f"measured: this shape in {further}/sm61-30sm"
    assert choose_config(GEMV, P40, other, p40).how == "static: this shape in sm61"
    assert p40 in tabled_devices(P40.capability), "and the matrix compiles what it picks"


def test_a_table_reads_as_it_was_written_and_is_in_order(folder: Path) -> None:
    shapes = [ProblemShape.of(m=m, n=4096, k=4096, group=128) for m in (16, 1, 2)]
    table = ConfigTable(GEMV.name, "measured", {"gpu": "A"}, {shape: entry(4, microseconds=1.5) for shape in shapes})
    path = write_table(table, folder / "sm61")
    assert ConfigTable.from_json(json.loads(path.read_text())) == table
    assert [json.loads(path.read_text())["shapes"][shape.key]["microseconds"] for shape in shapes] == [1.5] * 3
    assert list(json.loads(path.read_text())["shapes"]) == [shapes[index].key for index in (1, 2, 0)]


def test_an_operator_that_there_is_not() -> None:
    with pytest.raises(KeyError, match=r"there is no operator .*; there are w4a16_gemv"):
        find_operation("nothing")


@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: each.name)
def test_what_is_shipped_can_be_read_and_fits_its_operator(each: KernelOperation) -> None:
    """Every entry is one that the operator still has, and that no Triton of the images is known to spill there."""
    for path in sorted(config_tables.TUNED_FOLDER.glob(f"*/{each.name}.json")):
        table = ConfigTable.from_json(json.loads(path.read_text()))
        assert table.source in ("measured", "static")
        digits = path.parent.name.removeprefix("sm").partition("-")[0]
        policy = policy_of(int(digits[:-1]), int(digits[-1]))
        assert not each.refusal(policy), path
        for shape, found in table.entries.items():
            assert found.config in offered_configs(each, policy, shape), (path, shape.key)
            assert ("microseconds" in found.facts) == (table.source == "measured")


@pytest.mark.slow("Chooses configs for many shapes and numbers of rows on every capability")
@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: each.name)
def test_whatever_the_rows_the_config_is_of_the_kernel_that_they_get(each: KernelOperation) -> None:
    """Between two shapes of a table the kernel may change, and with it the constants that a config must have."""
    for version in CAPABILITIES:
        policy = policy_of(*version)
        samples = () if each.refusal(policy) else each.samples(policy)
        with_rows = [dict(sample.plain.fields) for sample in samples if "m" in dict(sample.fields)]
        shapes = {
            ProblemShape.of(**{**fields, "m": m}) for fields in with_rows for m in (*range(1, 18), 31, 33, 63, 65)
        }
        for shape in shapes:
            found = choose_config(each, policy, shape)
            assert found.config in each.configs(policy, shape.rounded), (version, shape.key)
            own = [launch.variant.name for launch in each.launches(policy, shape, found.config)]
            class_ = [launch.variant.name for launch in each.launches(policy, shape.rounded, found.config)]
            assert own == class_, (version, shape.key)


@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: each.name)
def test_every_capability_has_a_choice_for_every_shape(each: KernelOperation) -> None:
    for version in CAPABILITIES:
        policy = policy_of(*version)
        if not each.refusal(policy):
            missing = [
                shape.key
                for shape in each.shapes(policy)
                if exact_entry(each, table_folder(policy.capability), shape) is None
            ]
            assert not missing, (version, missing[:3])


@pytest.mark.parametrize("each", OPERATIONS, ids=lambda each: each.name)
def test_what_is_launched_is_what_was_compiled(each: KernelOperation) -> None:
    """A launch would make a constant of an integer that is 1, and another kernel of one that 16 divides.

    Those that always are multiples of 16 are compiled as such; no other may be looked at.
    """
    for version in CAPABILITIES:
        policy = policy_of(*version)
        for shape in () if each.refusal(policy) else each.samples(policy):
            for config in each.configs(policy, shape)[:2]:
                for launch in each.launches(policy, shape, config):
                    variant = launch.variant
                    free = set(variant.function.kwargs["do_not_specialize"] or ())  # as the interpreter keeps it
                    numbers = {name for name, kind in variant.types if kind in ("i32", "i64")}
                    assert not numbers - free - set(variant.aligned), (variant.name, numbers - free)
