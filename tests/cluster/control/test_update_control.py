"""New weights over the control plane: who may take them from where, which replicas have them, and those to come."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_fleet import Bench

from motley.cluster.fleet.control.backend.weight_sources import resolve_below_roots
from motley.cluster.fleet.control.reconciler import weight_updater
from motley.cluster.fleet.control.state.control_state import decode_state, encode_state
from motley.cluster.service_errors import Conflict, Forbidden
from motley.replicas.errors import InvalidRequest, NotFound, Unavailable
from motley.replicas.updates.weight_file import WeightFile

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
    with pytest.raises(Unavailable, match="none can receive"):
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
    kept = json.loads(encode_state(bench.plane.state))
    del kept["pools"]["cpu"]["weights"]
    assert decode_state(json.dumps(kept).encode()) == bench.plane.state


def test_paths_that_may_be_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").touch()
    (inside / "link").symlink_to(outside / "file")
    assert resolve_below_roots(str(inside / "file"), [inside]) == inside / "file"
    assert resolve_below_roots(str(inside / ".." / "in" / "file"), [inside]) == inside / "file"
    for path in (outside / "file", inside / "link", inside / ".." / "out" / "file", Path(f"{inside}side/file")):
        with pytest.raises(Forbidden):
            resolve_below_roots(str(path), [inside])
    with pytest.raises(Forbidden, match="names none"):
        resolve_below_roots(str(inside / "file"), [])
    for wrong in ("", "file", "/in\n/file", "/\0"):
        with pytest.raises(InvalidRequest, match="absolute"):
            resolve_below_roots(wrong, [inside])


async def begun(bench: Bench, path: str) -> asyncio.Task[None]:
    """An update that replicas have been asked for, and have not taken up yet."""
    bench.fleet.go_on.clear()
    bench.fleet.asked.clear()
    asking = asyncio.create_task(update(bench, path))
    await asyncio.wait_for(bench.fleet.asked.wait(), 20)
    return asking


async def carried(bench: Bench) -> None:
    """To its end, whatever that is."""
    bench.fleet.go_on.set()
    assert bench.plane.updating.task is not None
    await asyncio.wait([bench.plane.updating.task])


async def test_it_is_kept_before_a_replica_is_asked_and_goes_on_without_the_caller() -> None:
    bench = Bench(2)
    await bench.steps()
    asking = await begun(bench, "/w/one")
    assert bench.store.load().updates["cpu"].file == replace(ONE, contents="")
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    with pytest.raises(Conflict, match="another update of weights is in progress") as refused:
        await update(bench, "/w/two", expected=0)
    assert refused.value.code == "weights_in_use"
    with pytest.raises(Conflict, match="update of weights in progress"):
        await bench.plane.roll("cpu", "", "v1", by="test", reason="another")
    await carried(bench)
    assert versions(bench) == [1, 1]
    assert (bench.store.load().files("cpu"), bench.store.load().updates) == ((ONE,), {})
    await update(bench, "/w/two", delta=True, expected=1)
    assert bench.plane.state.files("cpu") == (ONE, TWO)


@pytest.mark.parametrize("when", ["before the replicas have it", "when they have it"])
async def test_a_plane_that_is_ended_in_the_middle_goes_on_with_it_once(when: str) -> None:
    bench = Bench(2)
    await bench.steps()
    asking = await begun(bench, "/w/one")
    if when == "when they have it":
        bench.store.full = True  # so that what became of it is not kept
        bench.fleet.go_on.set()
        async with asyncio.timeout(20):
            while versions(bench) != [1, 1]:
                await asyncio.sleep(0)
    asking.cancel()
    assert bench.plane.updating.task is not None
    bench.plane.updating.task.cancel()
    await asyncio.wait([asking, bench.plane.updating.task])
    bench.store.full = False
    bench.fleet.go_on.set()
    bench.again()
    assert bench.plane.state.files("cpu") == ()
    await bench.steps(1)
    await carried(bench)
    await bench.steps()
    assert (versions(bench), bench.fleet.taken) == ([1, 1], 2)
    assert bench.kinds.count("updated") == 1
    bench.again()
    assert (bench.plane.state.files("cpu"), bench.plane.state.updates) == ((ONE,), {})


async def test_what_failed_everywhere_is_given_back() -> None:
    bench = Bench(2)
    await bench.steps()
    with pytest.raises(InvalidRequest, match="bad"):
        await update(bench, "/w/bad", expected=0)
    assert (bench.store.load().updates, bench.store.load().files("cpu")) == ({}, ())
    await update(bench, "/w/one", expected=0)
    assert bench.plane.state.files("cpu") == (ONE,)


async def test_replicas_are_asked_until_it_is_known_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer was lost on its way, and the fleet does not answer for a while."""
    monkeypatch.setattr(weight_updater, "RETRY_S", 0.001)
    bench = Bench(1)
    await bench.steps()
    bench.fleet.silent = set(bench.fleet.replicas("cpu"))
    asking = asyncio.create_task(update(bench, "/w/one"))
    async with asyncio.timeout(20):
        while len(bench.fleet.calls) < 3:
            await asyncio.sleep(0.001)
    assert not asking.done()
    bench.fleet.silent = set()
    await asking
    assert (versions(bench), bench.fleet.taken, bench.plane.state.files("cpu")) == ([1], 1, (ONE,))


async def test_a_number_with_other_contents_is_no_success() -> None:
    bench = Bench(1)
    await bench.steps()
    await update(bench, "/w/one")
    bench.fleet.contents = dict.fromkeys(bench.fleet.contents, "digest of another")
    [name] = bench.fleet.replicas("cpu")
    bench.fleet.weights[name] = 2
    with pytest.raises(InvalidRequest, match="has others"):
        await update(bench, "/w/two", expected=1)
    assert bench.plane.state.files("cpu") == (ONE,)


async def test_what_was_kept_before_there_were_such_is_read() -> None:
    kept = json.loads(encode_state(Bench(1).plane.state))
    del kept["updates"]
    assert decode_state(json.dumps(kept).encode()).updates == {}
