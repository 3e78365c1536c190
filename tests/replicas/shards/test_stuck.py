"""A process of a model whose computing thread stands still, while another of its threads says that it lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from late_device import LateDevice, LateOps
from serve_process import alive, children, command_line, wait_for
from stuck_follower import COMPUTES_S, Stuck
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineLost
from motley.replicas.parallel.leader import follower_group
from motley.replicas.parallel.transport import heartbeats, pipe
from motley.replicas.parallel.transport.heartbeats import HeartbeatChecker, HeartbeatSender
from motley.replicas.parallel.transport.pipe import MessageInbox, MessagePipe
from motley.replicas.types import Request, SamplingParams

COMPILED = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
TOKENS = 8
STANDS_STILL = "sends heartbeats, but has not computed for"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert [pid for pid in children(os.getpid()) if "follower" in command_line(pid) and alive([pid])] == []


def built(folder: Path, launcher: Stuck, **way: Any) -> BuiltEngine:
    config = EngineConfig(dtype="float32", threads=2, kv_memory_bytes=1 << 20, **way)
    return build_engine(build_checkpoint(folder), config, launcher=launcher)


def run(engine: BuiltEngine, number: int = 1) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    engine.core.add(number, Request("r", (7, 3, 200), params))
    while engine.core.busy:
        engine.core.step()


@pytest.mark.slow("Divides a model among processes until the one that hangs is lost")
@pytest.mark.parametrize(
    ("what", "number", "name", "way"),
    [
        *thorough(
            ("in_a_call", 1, "stage 1", {"pipeline_parallel": 3}),
            ("in_a_call", 2, "stage 2", {"pipeline_parallel": 3}),
        ),
        ("between_calls", 1, "stage 1", {"pipeline_parallel": 3}),
        pytest.param("in_a_call", 3, "stage 1, rank 1", {"pipeline_parallel": 2, "tensor_parallel": 2}, marks=COMPILED),
        pytest.param("in_a_call", 1, "rank 1", {"tensor_parallel": 2}, marks=[COMPILED, pytest.mark.thorough]),
    ],
)
def test_one_that_hangs_in_a_step_is_lost_while_it_says_that_it_lives(
    what: str, number: int, name: str, way: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other, though these wait for it, or for what it has to hand on."""
    monkeypatch.setattr(follower_group, "REPLY_TIMEOUT_S", 3.0)
    when = tmp_path / "when"
    engine = built(tmp_path / "model", Stuck(what, when, number, far="pipeline_parallel" not in way), **way)
    try:
        run(engine)
        when.touch()
        with pytest.raises(EngineLost, match=rf": {name} {STANDS_STILL} [34] s; its last activity: serves"):
            run(engine, 2)
    finally:
        engine.close()


def waits_it_out(engine: BuiltEngine, when: Path) -> None:
    """A step that takes long from when that file is there."""
    try:
        run(engine)
        when.touch()
        began = time.monotonic()
        run(engine, 2)
        assert time.monotonic() - began >= COMPUTES_S
    finally:
        engine.close()


@pytest.mark.slow("A process computes for eight seconds, longer than one may stand still")
@pytest.mark.parametrize("number", [1, *thorough(2)])
def test_one_that_computes_for_long_is_not_lost(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that waits meanwhile for what it has to hand on."""
    monkeypatch.setattr(follower_group, "REPLY_TIMEOUT_S", 3.0)
    when = tmp_path / "when"
    waits_it_out(built(tmp_path / "model", Stuck("computes", when, number), pipeline_parallel=3), when)


def test_one_whose_kernels_are_compiled_for_a_gpu_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, for which it waits."""
    monkeypatch.setattr(follower_group, "REPLY_TIMEOUT_S", 3.0)
    when = tmp_path / "when"
    config = EngineConfig(dtype="float32", threads=1, kv_memory_bytes=1 << 20, pipeline_parallel=2)
    folder, launcher = build_checkpoint(tmp_path / "model"), Stuck("compiles", when)
    waits_it_out(build_engine(folder, config, ops=LateOps(), accelerator=LateDevice(), launcher=launcher), when)


def test_beats_say_for_how_long_a_thread_stands_still_and_not_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, of one to which a while is given, before that is over."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.25)
    monkeypatch.setattr(pipe, "POLL_S", 0.05)
    reads, writes = os.pipe()
    orders, orders_end = os.pipe()
    inbox, says, hangs = MessageInbox(MessagePipe(reads=orders), "orders"), MessagePipe(reads=reads), threading.Lock()

    def computes() -> None:
        HeartbeatSender(MessagePipe(writes=writes)).watch_current_thread(min_stall_s=0.5)
        for _ in range(2):
            inbox.receive()
            with hangs:
                pass

    def still(beats: int) -> list[float]:
        return [says.receive()[0].get("still_s", 0.0) for _ in range(beats)]

    thread = threading.Thread(target=computes)
    thread.start()
    assert still(8) == [0.0] * 8
    to_it = MessagePipe(writes=orders_end)
    with hangs:
        to_it.send({})
        found = still(8)
        assert found[-3:] == [found[-4] + 0.25 * more for more in (1, 2, 3)]
        assert 0.25 not in found
    wait_for(lambda: still(1) == [0.0], "that it goes on")
    os.close(reads)
    wait_for(lambda: all(each.name != "heartbeats" for each in threading.enumerate()), "the end of the heartbeats")
    to_it.send({})
    thread.join()
    to_it.close_writing()
    inbox.end()
    os.close(writes)


def test_nothing_is_said_where_the_clock_is_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wakes up and looks about itself would seem to stand still."""
    monkeypatch.setattr(heartbeats, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(time, "thread_time_ns", lambda: 10_000_000)
    reads, writes = os.pipe()
    says = MessagePipe(reads=reads)
    HeartbeatSender(MessagePipe(writes=writes)).watch_current_thread()
    time.sleep(0.1)  # this thread stands still
    assert all(says.receive()[0] == {"doing": "starts"} for _ in range(5))
    os.close(reads)
    wait_for(lambda: all(each.name != "heartbeats" for each in threading.enumerate()), "the end of the heartbeats")
    os.close(writes)


class Other:
    name, doing, heard, starting, still_s = "stage 1", "serves", 0.0, False, 0.0


def test_who_says_that_it_stands_still_is_lost_when_it_has_for_as_long_as_is_allowed() -> None:
    other, limit_s = Other(), 30.0
    checker = HeartbeatChecker([other], lambda: limit_s)
    for moment in range(29):
        other.heard, other.still_s = float(moment), float(moment)
        checker.poll()
    limit_s = 5.0
    with pytest.raises(EngineLost, match=f"stage 1 {STANDS_STILL} 28 s; its last activity: serves"):
        checker.poll()
