"""New weights over the control plane: who may take them from where, which replicas have them, and those to come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_fleet import Bench

from motley.cluster.control.state import dump, load
from motley.cluster.failures import Conflict, Forbidden
from motley.cluster.weights import within
from motley.replicas.errors import InvalidRequest, NotFound, Unavailable
from motley.replicas.updates.file import WeightFile

ONE, TWO = WeightFile(Path("/w/one"), False, "digest of one"), WeightFile(Path("/w/two"), True, "digest of two")


async def update(bench: Bench, path: str, *, delta: bool = False, expected: int | None = None, pool: str = "") -> None:
    await bench.plane.update_weights(path, delta=delta, pool=pool, expected=expected, by="test", reason="")


def versions(bench: Bench) -> list[int]:
    return [bench.fleet.weights.get(name, 0) for name in bench.fleet.replicas("cpu")]


async def test_all_replicas_and_those_to_come_have_the_same() -> None:
    bench = Bench(2)
    await bench.steps()
    await update(bench, "/w/one", expected=0)
    await update(bench, "/w/two", delta=True, expected=1, pool="cpu")
    assert versions(bench) == [2, 2]
    [first, second] = [event for event in bench.plane.state.events if event.kind == "updated"]
    assert (first.before, first.after, first.reason, second.before, second.after) == (0, 1, "/w/one", 1, 2)
    bench.again()
    assert bench.plane.state.files("cpu") == (ONE, TWO)
    await bench.scale(3)  # the third begins without them: as one that asked before the update was kept
    await bench.steps()
    await bench.caught_up()
    assert versions(bench) == [2, 2, 2]


async def test_one_that_stays_behind_is_told_and_asked_again() -> None:
    bench = Bench(2)
    await bench.steps()
    late = bench.fleet.replicas("cpu")[0]
    bench.fleet.stubborn = {late}
    _, told = await bench.plane.update_weights("/w/one", delta=False, pool="", expected=None, by="test", reason="")
    assert [(one.replica_id == late, one.error is not None) for one in told] == [(True, True), (False, False)]
    await bench.caught_up()
    assert versions(bench) == [0, 1]
    bench.fleet.stubborn = set()
    await bench.caught_up()
    assert versions(bench) == [1, 1]
    before = len(bench.fleet.calls)
    await bench.caught_up()
    assert not [call for call in bench.fleet.calls[before:] if call[0] == "update"], "all have them"


async def test_what_nobody_takes_is_not_kept() -> None:
    bench = Bench(1)
    await bench.steps()
    with pytest.raises(InvalidRequest, match="bad"):
        await update(bench, "/w/bad")
    with pytest.raises(Conflict, match="version 0 by now, not 1") as refused:
        await update(bench, "/w/one", expected=1)
    assert refused.value.code == "version_mismatch"
    with pytest.raises(Forbidden):
        await update(bench, "/secret/one")
    with pytest.raises(NotFound):
        await update(bench, "/w/one", pool="gpu")
    await bench.plane.roll("cpu", "", "v1", by="test", reason="why")
    with pytest.raises(Conflict, match="rolled"):
        await update(bench, "/w/one")
    assert bench.plane.state.files("cpu") == ()


async def test_without_replicas_there_is_nobody_to_take_them() -> None:
    bench = Bench(0)
    await bench.steps()
    with pytest.raises(Unavailable, match="nobody"):
        await update(bench, "/w/one")


async def test_a_roll_to_the_same_model_keeps_them_and_to_another_does_not() -> None:
    bench = Bench(1)
    await bench.steps()
    await update(bench, "/w/one")
    await bench.plane.roll("cpu", "", "v1", by="test", reason="why")
    assert bench.plane.state.files("cpu") == (ONE,)
    await bench.steps(12)
    assert bench.plane.state.files("cpu") == (ONE,)
    bench.fleet.bad_versions = {"v2"}
    await bench.plane.roll("cpu", "other", "v2", by="test", reason="why")
    assert bench.plane.state.files("cpu") == (), "replicas of the other model begin with its own"
    await bench.steps(12)
    assert bench.kinds.count("roll_failed") == 1
    assert bench.plane.state.files("cpu") == (ONE,), "it failed: those before serve on"
    await bench.plane.roll("cpu", "other", "v3", by="test", reason="why")
    await bench.steps(12)
    assert bench.kinds.count("rolled") == 2
    assert bench.plane.state.files("cpu") == ()


async def test_what_was_kept_without_weights_is_read() -> None:
    """By a service that began before there were any."""
    bench = Bench(1)
    kept = json.loads(dump(bench.plane.state))
    del kept["pools"]["cpu"]["weights"]
    assert load(json.dumps(kept).encode()) == bench.plane.state


def test_paths_that_may_be_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").touch()
    (inside / "link").symlink_to(outside / "file")
    assert within(str(inside / "file"), [inside]) == inside / "file"
    assert within(str(inside / ".." / "in" / "file"), [inside]) == inside / "file"
    for path in (outside / "file", inside / "link", inside / ".." / "out" / "file", Path(f"{inside}side/file")):
        with pytest.raises(Forbidden):
            within(str(path), [inside])
    with pytest.raises(Forbidden, match="names none"):
        within(str(inside / "file"), [])
    for wrong in ("", "file", "/in\n/file", "/\0"):
        with pytest.raises(InvalidRequest, match="absolute"):
            within(wrong, [inside])
