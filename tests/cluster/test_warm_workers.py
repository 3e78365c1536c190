"""Processes that wait for a replica: which there are, when more are asked for, what they import, who takes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serve_process import wait_for
from tiny_checkpoints import build_checkpoint

from motley.cluster.process_tree import is_stopped
from motley.cluster.service.deployment import shard_actors
from motley.cluster.service.startup.ray_settings import ray_settings
from motley.cluster.service.warm_workers import warm_worker_keeper as module
from motley.cluster.service.warm_workers.warm_worker import PRELOADED
from motley.cluster.service.warm_workers.warm_worker_keeper import (
    FIRST_S,
    LONGEST_S,
    MIN_FREE_BYTES,
    POLL_INTERVAL_S,
    SETTLE_S,
    STEADY_S,
    WARN_AFTER_REQUESTS,
    WarmWorkerKeeper,
    keep_warm_workers,
)
from motley.cluster.service.warm_workers.warm_worker_slots import STALE_S, WarmWorkerSlots

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PRELOAD = "RAY_preload_python_modules"


def began(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class Titled:
    """Processes of this one, with titles as Ray gives them."""

    def __init__(self, places: Path) -> None:
        self._places = places
        self._running: list[subprocess.Popen[bytes]] = []

    def comes(self, title: str = "ray::IDLE") -> subprocess.Popen[bytes]:
        """One that has a place there already."""
        process = subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 60"])
        self._running.append(process)
        command = Path(f"/proc/{process.pid}/cmdline")
        while not command.read_text().startswith(title):
            time.sleep(0.01)
        (self._places / f"spare-{process.pid}-{began(process.pid)}").touch()
        return process

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def places(tmp_path: Path) -> WarmWorkerSlots:
    return WarmWorkerSlots(tmp_path)


@pytest.fixture
def titled(tmp_path: Path) -> Iterator[Titled]:
    processes = Titled(tmp_path)
    yield processes
    processes.end()


def test_a_place_is_taken_once_and_only_while_someone_is_expected(places: WarmWorkerSlots, tmp_path: Path) -> None:
    assert not places.take(), "nobody is wanted"
    places.add(2)
    assert places.count() == 2
    assert places.take()
    assert (tmp_path / f"spare-{os.getpid()}-{began(os.getpid())}").exists()
    for wanted in tmp_path.glob("wanted-*"):
        os.utime(wanted, times=(time.time() - STALE_S - 1,) * 2)
    assert not places.take(), "whoever comes now comes for something else"
    places.count()
    assert not list(tmp_path.glob("wanted-*"))


def test_of_a_node_without_any_there_are_none(tmp_path: Path) -> None:
    places = WarmWorkerSlots.of_node(tmp_path, "node")
    assert places.count() == 0
    assert not places.take()
    with places.alone():
        places.add(1)
    assert WarmWorkerSlots.of_node(tmp_path, "another").count() == 0
    assert places.take()


def test_who_waits_counts_and_who_is_taken_dead_or_another_s_does_not(
    places: WarmWorkerSlots, titled: Titled, tmp_path: Path
) -> None:
    waiting = titled.comes()
    titled.comes("ray::ServeReplica:motley:cpu")
    dead = titled.comes()
    dead.kill()
    dead.wait()
    again = titled.comes()
    (tmp_path / f"spare-{again.pid}-{began(again.pid)}").rename(
        tmp_path / f"spare-{again.pid}-1"
    )  # its number was another's
    assert places.count() == 1
    assert [path.name for path in tmp_path.glob("spare-*")] == [f"spare-{waiting.pid}-{began(waiting.pid)}"]


def test_one_that_is_stopped_is_ended(places: WarmWorkerSlots, titled: Titled) -> None:
    """The replica that got it would never begin. One that is taken is Serve's to end."""
    stopped, taken = titled.comes(), titled.comes("ray::ServeReplica:motley:cpu")
    for process in (stopped, taken):
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda process=process: is_stopped(process.pid), "the signal")
    assert places.count() == 0
    assert stopped.wait(60) == -signal.SIGKILL
    assert taken.poll() is None


class Raylet:
    """comes: whether whoever it is asked for comes."""

    def __init__(self, titled: Titled, tmp_path: Path) -> None:
        self.asked: list[int] = []
        self.comes = True
        self._titled, self._folder = titled, tmp_path

    def ask(self, count: int) -> None:
        self.asked.append(count)
        for wanted in list(self._folder.glob("wanted-*")) if self.comes else []:
            wanted.unlink()
            self._titled.comes()


@pytest.fixture
def raylet(titled: Titled, tmp_path: Path) -> Raylet:
    return Raylet(titled, tmp_path)


def kept(
    places: WarmWorkerSlots, raylet: Raylet, count: int = 1, free_memory: int = MIN_FREE_BYTES
) -> WarmWorkerKeeper:
    return WarmWorkerKeeper(places, count, raylet.ask, free_memory=lambda: free_memory)


def looks(keeper: WarmWorkerKeeper, seconds: float, step: float = POLL_INTERVAL_S, begin: float = 0.0) -> None:
    """For so long, by a clock of their own."""
    now = begin
    while now < begin + seconds:
        assert keeper.check(now)
        now += step


def test_as_many_as_are_missing_for_a_while_are_asked_for(
    places: WarmWorkerSlots, raylet: Raylet, titled: Titled
) -> None:
    titled.comes()
    keeper = kept(places, raylet, count=3)
    looks(keeper, SETTLE_S)
    assert raylet.asked == [], "who has just begun to load, has the cores"
    looks(keeper, 100.0, begin=SETTLE_S)
    assert raylet.asked == [2]


def test_who_is_on_the_way_is_not_asked_for_again(places: WarmWorkerSlots, raylet: Raylet) -> None:
    raylet.comes = False
    keeper, other = kept(places, raylet), kept(places, raylet)
    looks(keeper, 50.0)
    looks(other, 50.0)
    assert raylet.asked == [1]


def test_where_they_do_not_stay_they_are_asked_for_less_and_less_by_all(
    places: WarmWorkerSlots, raylet: Raylet, titled: Titled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of a node's replicas asks."""
    waits = []
    for often in range(WARN_AFTER_REQUESTS + 4):
        wait_s = min(FIRST_S * 2**often, LONGEST_S)
        waits.append(wait_s)
        for ago_s, asks in ((wait_s - 1, 0), (wait_s + 1, 1)):
            if often:
                os.utime(tmp_path / "asked", times=(time.time() - ago_s,) * 2)
            elif not asks:
                continue
            before = len(raylet.asked)
            looks(kept(places, raylet), SETTLE_S + POLL_INTERVAL_S + 1)
            assert len(raylet.asked) == before + asks, (often, ago_s)
        titled.end()
    assert waits[:3] == [5.0, 10.0, 20.0]
    assert waits[-1] == LONGEST_S
    assert "do not stay" in caplog.text
    titled.comes()
    looks(kept(places, raylet), STEADY_S + 2 * POLL_INTERVAL_S)
    assert places.requests == (0, float("inf")), "one that has stayed is another matter"
    places.note_request()
    titled.comes("ray::ServeReplica:motley:cpu")
    assert places.requests[0] == 1
    places.count()
    assert places.requests[0] == 0, "and so is one that is taken"


def test_a_host_with_little_memory_has_none(places: WarmWorkerSlots, raylet: Raylet) -> None:
    looks(kept(places, raylet, free_memory=MIN_FREE_BYTES - 1), 100.0)
    assert raylet.asked == []


class Refuses:
    """A raylet, or whatever is on the way to it."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked = 0

    def ask(self, _: int) -> None:
        self.asked += 1
        raise self._error


@pytest.mark.parametrize("error", [TimeoutError("10 s"), OSError("no space"), ValueError("no such node")])
def test_what_passes_is_tried_again_and_nobody_else_takes_the_place(
    places: WarmWorkerSlots, tmp_path: Path, error: Exception
) -> None:
    refuses = Refuses(error)
    keeper = WarmWorkerKeeper(places, 1, refuses.ask, free_memory=lambda: MIN_FREE_BYTES)
    looks(keeper, SETTLE_S + POLL_INTERVAL_S + 1)
    assert refuses.asked == 1
    assert not places.take()
    os.utime(tmp_path / "asked", times=(time.time() - 2 * FIRST_S - 1,) * 2)
    looks(keeper, POLL_INTERVAL_S, begin=100.0)
    assert refuses.asked == 2


@pytest.mark.parametrize("error", [NotImplementedError("no such method"), ImportError("no such module")])
def test_a_ray_that_cannot_is_left_alone_and_told_of(
    places: WarmWorkerSlots, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    keeper = WarmWorkerKeeper(places, 1, Refuses(error).ask, free_memory=lambda: MIN_FREE_BYTES)
    assert keeper.check(0.0)
    assert not keeper.check(SETTLE_S)
    assert f"this Ray has no way to: {error}" in caplog.text


def test_where_ray_imports_nothing_of_ours_nobody_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "node_slots", lambda: pytest.fail("there is no Ray here"))
    assert PRELOADED not in sys.modules
    keep_warm_workers(1)


def test_what_ray_is_to_import_besides_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said() -> str:
        return {setting.name: setting.value for setting in ray_settings(tmp_path, None)}[PRELOAD]

    monkeypatch.delenv(PRELOAD, raising=False)
    assert said() == PRELOADED
    monkeypatch.setenv(PRELOAD, "json,csv")
    assert said() == f"json,csv,{PRELOADED}"
    monkeypatch.setenv(PRELOAD, said())
    assert said() == f"json,csv,{PRELOADED}"


IMPORTS = """
from unittest.mock import patch

import torch
from motley.cluster.service.warm_workers.warm_worker import import_replica_modules

touched = AssertionError("a GPU was looked for before Ray has said which, or cores before the replica has")
names = ("cuda._lazy_init", "cuda.is_available", "cuda.device_count", "set_num_threads")
patches = [patch(f"torch.{name}", side_effect=touched) for name in names]
for each in patches:
    each.start()
import_replica_modules(gpus=GPUS)
for each in patches:
    each.stop()
"""
STARTS = f"""
import asyncio, os, sys
{IMPORTS.replace("GPUS", "False")}
before = set(sys.modules)
from motley.replicas.engine_config import EngineConfig
from motley.replicas.replica import engine_worker

config = EngineConfig(device="cpu", kv_memory_bytes=1 << 20, weights_cache=sys.argv[2])
asyncio.run(engine_worker(sys.argv[1], config).start())
print("imported:", *sorted(set(sys.modules) - before))
sys.stdout.flush()
os._exit(0)  # the engine's thread would run on
"""


def ran(code: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_it_has_all_that_a_replica_imports(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    for start in ("the first", "the second"):
        assert ran(STARTS, str(folder), str(tmp_path / "cache")).split() == ["imported:"], start


def test_where_there_are_gpus_it_has_what_runs_on_them_and_has_touched_none() -> None:
    code = IMPORTS.replace("GPUS", "True") + "\nimport sys\nprint('triton' in sys.modules)"
    assert ran(code).strip() == "True"


def test_a_stage_on_another_node_has_one_wait_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(shard_actors, "keep_warm_workers", lambda count, after_s: asked.append(count))
    monkeypatch.setattr(shard_actors.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "there"))
    monkeypatch.setattr("motley.replicas.parallel.follower.follower_process.run_follower", lambda ends: None)
    for spare in (False, True):
        shard_actors.Shard().compute(
            "", "here", "stage 1", shard_actors.RemoteNodeAddress(("127.0.0.1", 1), b"", (), spare)
        )
        assert asked == [1] * spare


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Results of a real Ray of two nodes, by the name of a case."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m", ignore_cleanup_errors=True) as temp:  # short, for sockets
        path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(
            [sys.executable, str(SUPPORT / "warm_workers_child.py")],
            capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": temp},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    cases: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return cases


def test_an_actor_that_wants_a_gpu_takes_one_and_sees_its_own(found: dict[str, dict[str, Any]]) -> None:
    assert found["of a GPU"]["took"]
    assert found["of a GPU"]["torch"]
    assert found["of a GPU"]["settled"]
    assert found["of a GPU"]["gpus"] == "0"


def test_so_does_one_in_a_bundle(found: dict[str, dict[str, Any]]) -> None:
    assert found["in a bundle"]["took"]
    assert found["in a bundle"]["torch"]
    assert found["in a bundle"]["settled"]


def test_workers_that_nobody_asked_to_wait_import_nothing(found: dict[str, dict[str, Any]]) -> None:
    assert not found["the first"]["torch"]
    assert not found["the first"]["settled"]
    assert not found["another node's"]["took"]
    assert not found["another node's"]["torch"]


def test_there_is_another_for_one_that_is_killed_and_as_many_as_the_largest_replica_wants(
    found: dict[str, dict[str, Any]],
) -> None:
    assert found["lost"]["another"]
    assert found["two at once"]["waiting"] == 2


def test_private_parts_of_a_running_ray(found: dict[str, dict[str, Any]]) -> None:
    """Else what the cluster keeps is lost, processes are not found by their titles, or no process waits."""
    assert [name for name, right in found["private parts"].items() if not right] == []


def test_they_end_with_their_node(found: dict[str, dict[str, Any]]) -> None:
    assert found["left"] == []
