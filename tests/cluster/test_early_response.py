"""Handling of a body that comes after its response, message by message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motley.cluster.security.edge.early_response import EarlyResponseMiddleware, has_body
from motley.cluster.security.edge.haproxy_config import LAST_HEADER

PART = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
END = {"type": "http.request", "body": b"x", "more_body": False}
LEFT = {"type": "http.disconnect"}
CHUNKED = [(b"transfer-encoding", b"chunked")]


class Client:
    """Sends `messages` and then, where `endless`, PART for ever, or nothing. `read`: how many were taken."""

    def __init__(self, *messages: dict[str, Any], endless: bool = False) -> None:
        self._messages = list(messages)
        self._endless = endless
        self.read = 0
        self.answer: list[dict[str, Any]] = []

    async def receive(self) -> Any:
        self.read += 1
        if self._messages:
            return self._messages.pop(0)
        if self._endless:
            return PART
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        self.answer.append(message)

    @property
    def last(self) -> bool:
        """The connection is closed after the answer, and its client and HAProxy are told."""
        headers = dict(self.answer[0]["headers"])
        assert (LAST_HEADER.encode() in headers) == (headers.get(b"connection") == b"close")
        return LAST_HEADER.encode() in headers


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2"), (b"connection", b"keep-alive")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body", False):
        pass
    await refuse(scope, receive, send)


async def ask(client: Client, app: Any = refuse, headers: Any = CHUNKED, **limits: Any) -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        scope = {"type": "http", "headers": headers}
        await EarlyResponseMiddleware(app, **limits)(scope, client.receive, client.send)
    assert client.answer[-1].get("more_body", False) is False, "the server learns of the end"
    assert b"".join(message.get("body", b"") for message in client.answer) == b"no"
    return client.answer


async def test_after_an_early_answer_a_little_is_read_and_no_more() -> None:
    client = Client(endless=True)
    start, body, end = await ask(client, linger_bytes=5000)
    assert client.last
    assert (body["body"], body["more_body"]) == (b"no", True), "the client has all of it before anything is read"
    assert end["body"] == b""
    assert [name for name, _ in start["headers"]].count(b"connection") == 1


async def test_what_is_there_already_may_be_the_end() -> None:
    client = Client(PART, END)
    assert len(await ask(client)) == 2
    assert (client.read, client.last) == (2, False)


async def test_a_client_that_sends_nothing_more_is_waited_for() -> None:
    client = Client(PART)
    await ask(client, linger_s=0.05)
    assert client.last


@pytest.mark.parametrize("end", [END, LEFT])
async def test_the_end_of_the_body_and_of_the_client_end_the_wait(end: dict[str, Any]) -> None:
    arrived = asyncio.Event()
    client = Client()
    waiting = client.receive

    async def receive() -> Any:
        if client.read == 0:
            return await waiting()
        await arrived.wait()
        return end

    client.receive = receive  # type: ignore[method-assign]
    task = asyncio.create_task(ask(client, linger_s=60))
    while len(client.answer) < 2:
        await asyncio.sleep(0)
    arrived.set()
    assert len(await task) == 3


async def test_a_body_that_was_read_changes_nothing() -> None:
    client = Client(PART, END)
    assert len(await ask(client, read_all)) == 2
    assert not client.last


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
async def test_a_request_without_a_body_is_not_looked_at(headers: Any) -> None:
    client = Client()
    assert len(await ask(client, headers=headers)) == 2
    assert (client.read, client.last) == (0, False)


async def test_who_waits_to_be_asked_for_the_body_is_not_asked_before_the_answer() -> None:
    client = Client(PART)
    seen = []

    async def send(message: Any) -> None:
        seen.append(client.read)
        client.answer.append(message)

    client.send = send  # type: ignore[method-assign]
    await ask(client, headers=[*CHUNKED, (b"expect", b"100-continue")], linger_s=0.01)
    assert seen[:2] == [0, 0], "uvicorn answers a read with 100"
    assert client.last


async def test_an_answer_without_a_length_is_not_held_back() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    client = Client(endless=True)
    assert len(await ask(client, stream)) == 2
    assert client.last


async def test_an_application_that_fails_is_not_waited_for() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        await refuse(scope, receive, send)
        raise OSError("its client has gone")

    client = Client(endless=True)
    with pytest.raises(OSError, match="gone"):
        await EarlyResponseMiddleware(fail)({"type": "http", "headers": CHUNKED}, client.receive, client.send)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        ([(b"content-length", b"000")], False),
        ([(b"content-length", b"10")], True),
        ([(b"content-length", b"nonsense")], True),
        ([(b"transfer-encoding", b"gzip, chunked")], True),
    ],
)
def test_which_heads_have_a_body(headers: list[tuple[bytes, bytes]], expected: bool) -> None:
    assert has_body(headers) == expected
