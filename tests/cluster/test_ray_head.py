"""The end of a service goes on without those that do not answer, and without a word of what that raises then."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from motley.cluster.service.deployment import ray_head


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(str(args.exc_value)))
    return found


def failing(after: Callable[[], object]) -> Callable[[], None]:
    def action() -> None:
        after()
        raise RuntimeError("Ray has not been initialized")

    return action


def test_what_fails_since_ray_is_dead_says_nothing(raised: list[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        ray_head._within(_address(nobody), 5, failing(lambda: time.sleep(0.3)))
        _end_of_threads()
    assert raised == []


def test_what_fails_once_nobody_waits_says_nothing(raised: list[str]) -> None:
    go = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        ray_head._within(_address(gcs), 0.2, failing(go.wait))
        go.set()
        _end_of_threads()
    assert raised == []


def test_any_other_fault_is_told(raised: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        ray_head._within(_address(gcs), 5, failing(lambda: None))
        _end_of_threads()
    assert raised == ["Ray has not been initialized"]


def _end_of_threads() -> None:
    for thread in threading.enumerate():
        if "(run)" in thread.name:
            thread.join(5)


def _address(of: socket.socket) -> str:
    host, port = of.getsockname()
    return f"{host}:{port}"
