"""Processes of a model say that they live from their first moment on, and one that says nothing is lost by name."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from new_weights import of_another, written
from serve_process import alive, children, command_line, wait_for
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineLost
from motley.replicas.parallel.leader import follower_group
from motley.replicas.parallel.leader.follower_group import FollowerGroup
from motley.replicas.parallel.leader.launcher import ProcessHandle, SubprocessLauncher
from motley.replicas.parallel.transport.heartbeats import (
    STARTUP_TIMEOUT_S,
    HeartbeatChecker,
    HeartbeatMonitor,
    HeartbeatSender,
)
from motley.replicas.parallel.transport.pipe import MessagePipe
from motley.replicas.types import Request, SamplingParams
from motley.replicas.updates.weight_file import WeightFile

COMPILED = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
WAYS = [
    pytest.param({"tensor_parallel": 2}, "rank 1", marks=COMPILED),
    ({"pipeline_parallel": 2}, "stage 1"),
    pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, "stage ., rank 1|stage 1, rank .", marks=COMPILED),
]


def followers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "parallel.follower" in command_line(pid) and alive([pid])]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert followers() == []


class Hurts(SubprocessLauncher):
    """Sends that signal to the last process as soon as it has been started."""

    def __init__(self, fault: signal.Signals, last: int = 1) -> None:
        self._fault, self._last = fault, last

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        handle = super().launch(number, name, ends)
        if number == self._last:
            handle._process.send_signal(self._fault)  # type: ignore[attr-defined]
        return handle


def built(folder: Path, **given: Any) -> BuiltEngine:
    launcher, progress = given.pop("launcher", None), given.pop("progress", None)
    config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, threads=2, **given)
    return build_engine(folder, config, launcher=launcher, progress=progress)


def lose_patience(with_others: FollowerGroup) -> None:
    """Now that none of them imports anything any more, which takes a busy machine how long it may."""
    with_others._watch._checker._limit_s = lambda: 3.0


@pytest.mark.started
@pytest.mark.parametrize(("way", "name"), WAYS)
def test_one_that_hangs_before_it_has_loaded_is_lost(
    way: dict[str, int], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_group, "SILENCE_TIMEOUT_S", 3.0)
    last = way.get("tensor_parallel", 1) * way.get("pipeline_parallel", 1) - 1
    with pytest.raises(EngineLost, match=rf"({name}) has sent no heartbeat for 3 s; its last activity: "):
        built(build_checkpoint(tmp_path / "model"), launcher=Hurts(signal.SIGSTOP, last), **way)


@pytest.mark.parametrize(("way", "name"), WAYS[:2])
def test_one_that_hangs_when_it_has_loaded_is_lost(
    way: dict[str, int], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has room for KV; and it has said what it did."""
    allocate = FollowerGroup.allocate

    def stopped(self: FollowerGroup, *given: Any) -> None:
        wait_for(lambda: self._followers[0].doing == "waits for the others to load", "a sign of life")
        os.kill(followers()[0], signal.SIGSTOP)
        lose_patience(self)
        allocate(self, *given)

    monkeypatch.setattr(FollowerGroup, "allocate", stopped)
    with pytest.raises(
        EngineLost, match=f"{name} has sent no heartbeat for 3 s; its last activity: waits for the others"
    ):
        built(build_checkpoint(tmp_path / "model"), **way)


def to_its_end(engine: BuiltEngine) -> None:
    while engine.core.busy:
        engine.core.step()


class Apart(SubprocessLauncher):
    """A launcher whose ranks are on another node and exchange over TCP."""

    def host(self) -> str:
        return "127.0.0.1"


@COMPILED
def test_a_rank_of_another_node_that_hangs_in_a_step_is_lost_sooner_than_at_other_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_group, "REPLY_TIMEOUT_S", 2.0)
    engine = built(build_checkpoint(tmp_path / "model"), launcher=Apart(), tensor_parallel=2)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, seed=0)
    try:
        engine.core.add(1, Request("r", (7, 3, 200), params))
        engine.core.step()
        os.kill(followers()[0], signal.SIGSTOP)
        with pytest.raises(EngineLost, match="rank 1 has sent no heartbeat for 2 s"):
            to_its_end(engine)
    finally:
        engine.close()


@COMPILED
def test_one_that_hangs_while_new_weights_are_prepared_is_lost(tmp_path: Path) -> None:
    one, other = (build_checkpoint(tmp_path / str(seed), "qwen2", seed=seed) for seed in (0, 1))
    engine = built(one, tensor_parallel=2)
    try:
        assert engine.weights is not None
        assert engine.group is not None
        [member] = engine.group._followers
        wait_for(lambda: member.doing == "serves", "a sign of life")
        lose_patience(engine.group)
        os.kill(followers()[0], signal.SIGSTOP)
        file = WeightFile(written(tmp_path / "new.safetensors", of_another(one, other, lambda name: "mlp" in name)))
        with pytest.raises(EngineLost, match="rank 1 has sent no heartbeat for 3 s; its last activity: serves"):
            engine.weights.prepare(file)
    finally:
        engine.close()


@COMPILED
def test_the_first_does_not_load_to_its_end_when_another_has_ended(tmp_path: Path) -> None:
    """It is told how that ended."""
    loaded: list[tuple[int, int]] = []

    def loads(done: int, total: int) -> None:
        loaded.append((done, total))
        # The thread that waits for its end has told of it when it ends itself.
        wait_for(lambda: all(each.name != "rank 1: end" for each in threading.enumerate()), "the end of rank 1")

    with pytest.raises(EngineLost, match="rank 1 ended with status -9"):
        built(build_checkpoint(tmp_path / "m"), launcher=Hurts(signal.SIGKILL), progress=loads, tensor_parallel=2)
    assert len(loaded) <= 1
    assert all(done < total for done, total in loaded)


class Other:
    def __init__(self, name: str) -> None:
        self.name, self.doing, self.heard, self.starting = name, "loads weights, 3 of 9 MB", 0.0, False
        self.still_s = 0.0


def test_only_silence_counts_however_long_it_takes() -> None:
    """In looks of whoever waits: one that was held up for an hour itself has looked once."""
    one, other = Other("rank 1"), Other("rank 2")
    checker = HeartbeatChecker([one, other], lambda: 3.0)
    for moment in range(100):
        one.heard = float(moment + 1)
        other.heard = float(moment // 2 + 1)
        checker.poll()
    for moment in (100, 101):
        other.heard = float(moment)
        checker.poll()
    other.heard = 102.0
    with pytest.raises(
        EngineLost, match="rank 1 has sent no heartbeat for 3 s; its last activity: loads weights, 3 of 9 MB"
    ):
        checker.poll()


def test_what_has_yet_to_begin_is_silent_for_longer() -> None:
    """And has all of the time that others have, when it has begun."""
    actor = Other("rank 1")
    actor.starting = True
    checker = HeartbeatChecker([actor], lambda: 3.0)
    for _ in range(int(STARTUP_TIMEOUT_S) - 1):
        checker.poll()
    actor.starting = False
    for _ in range(3):
        checker.poll()
    with pytest.raises(EngineLost, match="for 3 s"):
        checker.poll()
    actor.starting = True
    checker = HeartbeatChecker([actor], lambda: 3.0)
    for _ in range(int(STARTUP_TIMEOUT_S) - 1):
        checker.poll()
    with pytest.raises(EngineLost, match="for 300 s"):
        checker.poll()


def test_who_watches_tells_it_once() -> None:
    told: list[EngineLost] = []
    heard = threading.Event()

    def lost(error: EngineLost) -> None:
        told.append(error)
        heard.set()

    watch = HeartbeatMonitor([Other("rank 1")], lambda: 1.0, lost)
    assert heard.wait(60)
    watch.close()
    assert len(told) == 1


def test_beats_say_what_is_done_until_nobody_reads() -> None:
    reads, writes = os.pipe()
    beats, pipe = HeartbeatSender(MessagePipe(writes=writes)), MessagePipe(reads=reads)

    def says(doing: str) -> None:
        while pipe.receive()[0] != {"doing": doing}:
            pass

    says("starts")
    with beats.during("imports its libraries"):
        says("imports its libraries")
    says("starts")
    beats.report_bytes(3_000_000, 9_000_000)
    says("loads weights, 3 of 9 MB")
    os.close(reads)
    wait_for(lambda: all(each.name != "heartbeats" for each in threading.enumerate()), "the end of the heartbeats")
    os.close(writes)
