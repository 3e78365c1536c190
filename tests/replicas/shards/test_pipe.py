"""Messages between the processes of a model: whole, in order, and never waited for without bound."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest
import torch

from motley.replicas.errors import EngineLost
from motley.replicas.parallel.transport import pipe as pipes
from motley.replicas.parallel.transport.pipe import MessageInbox, MessagePipe

Ends = tuple[int, int]
LARGE = {"x": torch.arange(1 << 18)}  # 2 MiB: many times what a pipe of the system takes


@pytest.fixture
def ends() -> Iterator[Ends]:
    before, opened = set(threading.enumerate()), os.pipe()
    yield opened
    for each in reversed(opened):
        with suppress(OSError):  # closed by the test
            os.close(each)
        # Who still reads hears of the end, before another test's pipe has the same number.
        for reader in set(threading.enumerate()) - before:
            reader.join(60)


@pytest.mark.parametrize("shape", [(3, 4), (0, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_sent_is_received(ends: Ends, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
    MessagePipe(writes=ends[1]).send({"a": [1, None, "b"]}, {"x": x})
    fields, tensors = MessagePipe(reads=ends[0]).receive()
    assert fields == {"a": [1, None, "b"]}
    assert torch.equal(tensors["x"], x)
    assert tensors["x"].dtype == dtype


def test_who_reads_nothing_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "SEND_TIMEOUT_S", 0.05)
    with pytest.raises(EngineLost, match="has read nothing"):
        MessagePipe(writes=ends[1]).send({}, LARGE)
    os.close(ends[0])
    with pytest.raises(EngineLost, match="has ended"):
        MessagePipe(writes=ends[1]).send({})


def test_who_reads_slowly_is_not(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second after the last: the message takes far longer than a reader is waited for."""
    inbox = MessageInbox(MessagePipe(reads=ends[0]), "reader")
    seconds = count()
    monkeypatch.setattr(pipes.time, "monotonic", lambda: float(next(seconds)))
    MessagePipe(writes=ends[1]).send({}, LARGE)
    monkeypatch.undo()
    assert next(seconds) > 2 * pipes.SEND_TIMEOUT_S
    assert torch.equal(inbox.receive(60)[1]["x"], LARGE["x"])


def test_an_inbox_takes_messages_that_nobody_has_asked_for_yet(ends: Ends) -> None:
    """In their order, but for what is dealt with at once; and it ends once."""
    heeded, ended = threading.Event(), threading.Event()

    def heed(fields: dict[str, object]) -> bool:
        if "ping" in fields:
            heeded.set()
        return "ping" in fields

    inbox, writer = MessageInbox(MessagePipe(reads=ends[0]), "inbox", heed, ended.set), MessagePipe(writes=ends[1])
    for number in range(3):
        writer.send({"number": number}, LARGE)
    writer.send({"ping": 0})
    assert heeded.wait(60)
    assert [inbox.receive(60)[0]["number"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        inbox.receive(0)
    assert not ended.is_set()
    os.close(ends[1])
    for _ in range(2):
        with pytest.raises(EOFError):
            inbox.receive(60)
    assert ended.wait(60)


def test_an_inbox_that_is_closed_waits_for_nobody(ends: Ends) -> None:
    inbox = MessageInbox(MessagePipe(reads=ends[0]), "inbox")
    inbox.close()
    with pytest.raises(EOFError):
        inbox.receive()
    os.close(ends[1])
