"""How `motley serve` asks whom it watches, and how it ends one that hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from ray._private import worker
from serve_process import command_line, free_port, wait_for

from motley.cluster.process_tree import is_stopped
from motley.cluster.service.supervision import watched_processes


@contextmanager
def server(*, with_health: bool) -> Iterator[str]:
    made = grpc.server(ThreadPoolExecutor(1))
    if with_health:
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), made)
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}"
    made.stop(None).wait()


@pytest.mark.parametrize("with_health", [True, False])
def test_whoever_answers_lives(with_health: bool) -> None:
    """Whatever it thinks of the question."""
    with server(with_health=with_health) as address:
        watched_processes.grpc_health_probe(address)()


def test_who_is_not_there_does_not_answer() -> None:
    with pytest.raises(grpc.RpcError) as caught:
        watched_processes.grpc_health_probe(f"127.0.0.1:{free_port()}")()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_who_hangs_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are taken all the same, by the kernel."""
    monkeypatch.setattr(watched_processes, "PROBE_TIMEOUT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(grpc.RpcError):
            watched_processes.grpc_health_probe(f"127.0.0.1:{listener.getsockname()[1]}")()


def test_what_is_vital_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this table does not know are vital, as nobody knows what is lost with them."""
    kinds = ("gcs_server", "raylet", "dashboard", "monitor", "log_monitor", "new_one")
    processes = {kind: [SimpleNamespace(process=None)] for kind in kinds}
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes=processes))
    found = {daemon.name: daemon.vital for daemon in watched_processes.ray_children()}
    assert [name for name, vital in found.items() if vital] == ["Ray's GCS", "Ray's raylet", "Ray's new_one"]
    assert len(found) == len(kinds)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_part_of_ray_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        processes = {"raylet": [SimpleNamespace(process=process)]}
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes=processes))
        assert not watched_processes.any_stopped("raylet")
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: watched_processes.any_stopped("raylet"), "its stop")
        assert not watched_processes.any_stopped("gcs_server")
        process.kill()


def test_a_port_that_nobody_listens_on() -> None:
    with pytest.raises(ConnectionRefusedError):
        watched_processes.check_port_open("127.0.0.1", free_port())


def test_a_port_with_a_full_backlog_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fills it must not end the service by that."""
    monkeypatch.setattr(watched_processes, "PROBE_TIMEOUT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        full = [socket.socket() for _ in range(4)]
        for each in full:
            each.setblocking(False)
            each.connect_ex(address)
        watched_processes.check_port_open(*address)
        for each in full:
            each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_who_hangs_is_ended_by_its_title() -> None:
    titles = ("ray::ServeController.listen", "ray::ServeReplica:motley:main")
    hung, other = (subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 600"]) for title in titles)
    wait_for(lambda: all("ray::" in command_line(each.pid)[:5] for each in (hung, other)), "their titles")
    assert not any(map(is_stopped, watched_processes.processes_titled("ray::ServeController")))
    hung.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(hung.pid), "its stop")
    assert watched_processes.processes_titled("ray::ServeController") == [hung.pid]
    watched_processes.kill_titled("ray::ServeController")
    assert hung.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
