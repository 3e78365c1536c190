"""Pipes to processes of other nodes: over connections, to those who have the secret."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from motley.cluster.service.deployment import shard_tunnel
from motley.cluster.service.deployment.shard_tunnel import TunnelListener, connect_tunnel, start_pump
from motley.replicas.parallel.transport.pipe import MessagePipe

LARGE = 1 << 22


@pytest.fixture
def door() -> Iterator[TunnelListener]:
    door = TunnelListener("127.0.0.1", ["reads", "writes"])
    yield door
    door.close()


def answered(door: TunnelListener) -> tuple[str, socket.socket]:
    while (found := door.accept()) is None:
        pass
    return found


def called(door: TunnelListener, name: str, secret: bytes, into: list[int | Exception]) -> threading.Thread:
    def calls() -> None:
        try:
            into.append(connect_tunnel(door.address, name, secret))
        except OSError as error:
            into.append(error)

    thread = threading.Thread(target=calls)
    thread.start()
    return thread


def test_messages_come_by_a_pipe_and_a_connection_as_by_a_pipe(door: TunnelListener) -> None:
    """Both ways, whole, whatever their size; and an end that is closed is closed at the other end."""
    ends: list[int | Exception] = []
    callers = [called(door, "reads", door.secret, ends)]
    _, first = answered(door)
    callers[0].join(60)
    callers.append(called(door, "writes", door.secret, ends))
    name, second = answered(door)
    callers[1].join(60)
    assert name == "writes"
    orders, answers = os.pipe(), os.pipe()
    start_pump("orders", orders[0], first.detach())
    start_pump("answers", second.detach(), answers[1])
    near, far = MessagePipe(answers[0], orders[1]), MessagePipe(*ends)  # type: ignore[arg-type]

    def echoes() -> None:
        with suppress(EOFError):
            while True:
                far.send(far.receive()[0])
        far.close_writing()
        far.close_reading()

    echo = threading.Thread(target=echoes)
    echo.start()
    for text in ("", "a", "b" * LARGE):
        near.send({"text": text})
        assert near.receive()[0] == {"text": text}
    near.close_writing()
    with pytest.raises(EOFError):
        near.receive()
    near.close_reading()
    echo.join(60)
    assert not echo.is_alive()


@pytest.mark.parametrize(("name", "secret"), [("reads", bytes(32)), ("memory", None)])
def test_who_has_not_the_secret_or_calls_for_something_else_is_refused(
    door: TunnelListener, name: str, secret: bytes | None
) -> None:
    """And whoever has it is answered after that."""
    ends: list[int | Exception] = []
    caller = called(door, name, secret or door.secret, ends)
    while caller.is_alive():
        assert door.accept() is None
    if secret is not None:
        assert isinstance(ends[0], OSError)
    else:
        assert os.read(ends[0], 1) == b""  # type: ignore[arg-type]
        os.close(ends[0])  # type: ignore[arg-type]
    caller = called(door, "reads", door.secret, ends)
    answered(door)[1].close()
    caller.join(60)
    os.close(ends[1])  # type: ignore[arg-type]


def test_a_port_without_the_secret_is_refused_by_whoever_calls(
    door: TunnelListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else listens there: it is sent nothing but a proof that is of no use elsewhere."""
    monkeypatch.setattr(shard_tunnel, "_answered", lambda caller, secret: _pretends(caller))
    ends: list[int | Exception] = []
    caller = called(door, "reads", door.secret, ends)
    _, pretended = answered(door)
    caller.join(60)
    assert isinstance(ends[0], PermissionError)
    pretended.close()


def _pretends(caller: socket.socket) -> str:
    caller.recv(64)
    caller.sendall(bytes(32))
    caller.recv(32)
    caller.sendall(bytes(32))
    return "reads"


def test_a_name_is_called_for_once(door: TunnelListener) -> None:
    ends: list[int | Exception] = []
    for expected in (True, False):
        caller = called(door, "reads", door.secret, ends)
        found = answered(door) if expected else door.accept()
        assert (found is not None) is expected
        if found is not None:
            found[1].close()
        caller.join(60)
    for end in ends:
        if isinstance(end, int):
            os.close(end)
