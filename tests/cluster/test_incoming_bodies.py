"""How much requests that are not whole may hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.transport import incoming_bodies
from motley.cluster.transport.grpc_server import unparsed_request
from motley.cluster.transport.http_server import http_guard
from motley.cluster.transport.incoming_bodies import IncomingBodies
from motley.replicas.errors import Overloaded


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_bodies, "LATE_S", 0.0)


async def test_bytes_have_a_limit_and_a_tenant_has_a_share() -> None:
    room = IncomingBodies(max_bytes=100)
    mine, others = room.begin("alice"), room.begin("bob")
    mine.hold("bytes", 50)
    with pytest.raises(Overloaded, match="not whole") as caught:
        room.begin("alice").hold("bytes", 1)
    assert caught.value.code == "bodies_full"
    others.hold("bytes", 50)
    with pytest.raises(Overloaded):
        room.begin("carol").hold("bytes", 1)
    mine.end()
    mine.end()
    assert room.num_bytes == 50
    room.begin("alice").hold("bytes", 50)


async def test_a_part_in_time_holds_nothing() -> None:
    room = IncomingBodies(max_bodies=0)
    body = room.begin("alice")
    assert await body.next(asyncio.sleep(0, "part"), deadline=float("inf"), late_bytes=1) == "part"
    assert (room.num_bodies, room.num_bytes) == (0, 0)


@pytest.mark.usefixtures("soon")
async def test_one_that_is_late_counts() -> None:
    room = IncomingBodies(max_bytes=100, max_bodies=2)
    come = asyncio.Event()
    first = asyncio.create_task(room.begin("alice").next(come.wait(), float("inf"), late_bytes=40))
    while room.num_bodies == 0:
        await asyncio.sleep(0)
    assert room.num_bytes == 40
    with pytest.raises(Overloaded):
        await room.begin("alice").next(come.wait(), float("inf"))
    come.set()
    assert await first


@pytest.mark.usefixtures("soon")
async def test_the_deadline_is_told_as_such() -> None:
    room = IncomingBodies()
    body = room.begin("alice")
    with pytest.raises(TimeoutError):
        await body.next(asyncio.Event().wait(), asyncio.get_running_loop().time() + 0.05)
    body.end()
    assert (room.num_bodies, room.num_bytes) == (0, 0)


async def test_bodies_over_http(folder: Path) -> None:
    """Half of one that is too much is refused, what is whole is not, and nothing is held at the end."""
    room = IncomingBodies(max_bytes=20_000)
    ingress = await make_ingress(folder, EchoWorker(str(folder)))
    app = http_guard.HttpGuard(ingress.__serve_build_asgi_app__(), ingress.guard, 2**20, arriving=room)
    parts = [b'{"prompt": "abc"', b" " * 6000, b" " * 6000, b"}"]
    refused = await asgi.request(app, "POST", "/v1/completions", parts)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "bodies_full")
    assert int(refused.headers["retry-after"]) >= 1
    whole = await asgi.request(app, "POST", "/v1/completions", b"".join(parts))
    assert whole.status == 200
    assert room.num_bytes == 0


@pytest.mark.usefixtures("soon")
async def test_messages_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is late may be of any size, and is counted as the largest."""
    monkeypatch.setattr(
        unparsed_request, "INCOMING_BODIES", IncomingBodies(max_bytes=2 * unparsed_request.MAX_MESSAGE_BYTES)
    )

    class Slow:
        def __init__(self) -> None:
            self.come = asyncio.Event()

        def __aiter__(self) -> Slow:
            return self

        async def __anext__(self) -> Any:
            await self.come.wait()
            return pb.GetModelRequest()

    held, bidirectional = Slow(), Slow()
    first = asyncio.create_task(unparsed_request.read_request(held, "alice"))
    while unparsed_request.INCOMING_BODIES.num_bodies == 0:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await unparsed_request.read_request(Slow(), "alice")
    silent = asyncio.create_task(anext(unparsed_request.read_requests(bidirectional, "alice")))
    while unparsed_request.INCOMING_BODIES.num_bodies == 1:
        await asyncio.sleep(0)
    held.come.set()
    bidirectional.come.set()
    assert await first == await silent == pb.GetModelRequest()
    assert (unparsed_request.INCOMING_BODIES.num_bodies, unparsed_request.INCOMING_BODIES.num_bytes) == (0, 0)
