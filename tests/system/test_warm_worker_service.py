"""A replica that is killed has a process in its place that has waited for that, and another waits then."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_process import Served, alive, command_line, served, wait_for

from motley.client import Client

pytestmark = pytest.mark.thorough  # each time: tests/cluster/test_warm_workers.py, on real actors


@pytest.fixture(scope="module")
def lone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB"]
    with served(arguments, tmp_path_factory.mktemp("lone")) as service:
        service.wait_ready()
        yield service
        left = service.descendants()
    wait_for(lambda: alive(left) == [], "the end of all processes")


def waiting(service: Served) -> list[int]:
    return [pid for pid in service.descendants() if command_line(pid).startswith("ray::IDLE")]


def replicas(service: Served) -> list[int]:
    return [pid for pid in service.replicas() if ":ingress" not in command_line(pid)]


def one_waits(service: Served) -> int:
    # One that was killed before it came to its place is expected for STALE_S more, and then missed for SETTLE_S.
    [pid] = wait_for(lambda: waiting(service), "a process that waits", 150)
    return int(pid)


def test_its_place_is_taken_by_the_one_that_waited(lone: Served) -> None:
    for _ in range(2):
        spare, [replica] = one_waits(lone), replicas(lone)
        with Client(lone.grpc) as client:
            before = client.complete("Once", max_tokens=16, temperature=0.0).choices[0].text
            os.kill(replica, signal.SIGKILL)
            assert client.complete("Once", max_tokens=16, temperature=0.0).choices[0].text == before
        assert replicas(lone) == [spare]


def test_one_that_is_lost_is_replaced(lone: Served) -> None:
    lost = one_waits(lone)
    os.kill(lost, signal.SIGKILL)
    wait_for(lambda: not alive([lost]), "its end")
    assert one_waits(lone) != lost
