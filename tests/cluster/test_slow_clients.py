"""A client that reads nothing, or hardly, is left after a while, and takes nothing along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport import access_log, slow_clients
from motley.cluster.transport.grpc_server.servicers import add_inference
from motley.cluster.transport.http_server.http_responses import PART_BYTES
from motley.cluster.transport.slow_clients import MIN_BYTES_PER_S, ClientReader, SlowClientMonitor
from motley.replicas.types import Delta, FinishReason, Request, StreamMessage

TEXT = "x" * 2**20


class FloodingWorker(EchoWorker):
    """Says a megabyte at a time for as long as somebody reads; to a prompt of two tokens it echoes."""

    closed = 0

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        if len(request.prompt_ids) == 2:
            async for message in super().generate(request):
                yield message
            return
        self._running += 1
        try:
            yield StreamMessage(cached_tokens=0)
            for _ in range(1000):
                yield StreamMessage((Delta(0, (1,), TEXT),))
            yield StreamMessage((Delta(0, finish_reason=FinishReason.LENGTH),))
        finally:
            self._running -= 1
            self.closed += 1


@pytest.fixture
async def worker(folder: Path) -> FloodingWorker:
    return FloodingWorker(str(folder))


@pytest.fixture
async def ingress(folder: Path, worker: FloodingWorker) -> Any:
    ingress = await make_ingress(folder, worker)
    ingress.readers = SlowClientMonitor(timeout_s=0.2)
    return ingress


async def read_on(call: Any, pause_s: float = 0.0) -> None:
    while await call.read() is not grpc.aio.EOF:
        await asyncio.sleep(pause_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_over_http(ingress: Any, worker: FloodingWorker) -> None:
    """Its connection is closed by the server, which sees the application return."""
    app = ingress.__serve_build_asgi_app__()
    taken = 0

    async def send(message: Any) -> None:
        nonlocal taken
        taken += len(message.get("body", b""))
        if taken > 2**22:
            await asyncio.Event().wait()  # as a server waits that has no more room

    body = {"prompt": "abc", "stream": True}
    async with asyncio.timeout(20):
        await asgi.request(app, "POST", "/v1/completions", body, send=send)
    assert (ingress.router.num_streams, len(ingress.readers)) == (0, 0)
    await until(lambda: worker.closed == 1)
    assert taken < 2**23
    reply = await asgi.request(app, "POST", "/v1/completions", {"prompt": "ab", "stream": True})
    assert reply.events()[-1] == "[DONE]", "whoever reads is served"


async def test_whoever_cancels_meanwhile_is_obeyed(ingress: Any, worker: FloodingWorker) -> None:
    app = ingress.__serve_build_asgi_app__()
    blocked = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body"):
            blocked.set()
            await asyncio.Event().wait()

    body = {"prompt": "abc", "stream": True}
    task = asyncio.create_task(asgi.request(app, "POST", "/v1/completions", body, send=send))
    await blocked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ingress.readers) == 0
    await until(lambda: worker.closed == 1)


async def test_over_grpc(ingress: Any, worker: FloodingWorker) -> None:
    server = grpc.aio.server()
    add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (("grpc.max_receive_message_length", 2**24), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stalled = stub.CompleteStream(pb.CompleteRequest(text="abc"))
        assert (await stalled.read()).HasField("started")
        assert (await stalled.read()).choices
        quiet = stub.CompleteStream(pb.CompleteRequest(text="ab"))
        assert [chunk async for chunk in quiet][-1].HasField("usage")
        await until(lambda: worker.closed == 1)
        assert ingress.router.num_streams == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(stalled)
        assert caught.value.code() == grpc.StatusCode.CANCELLED, "it is told when it does read on"
        assert "nothing was read" in str(caught.value.details())
        await until(lambda: len(ingress.readers) == 0)
    await server.stop(None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reading(bytes_s: float, *, most_s: float, pause_s: float = 0.0) -> float | None:
    """When a reader that takes so many bytes a second is given up; each write holds 100 of them.

    pause_s  what the next write is waited for after each
    """
    clock = Clock()
    reader = ClientReader(lambda: None, 30.0, clock)
    while clock.now < most_s:
        reader.writing()
        clock.now += 100 / bytes_s
        if reader.too_slow:
            return clock.now
        reader.written(lambda: 100)
        clock.now += pause_s
        assert not reader.too_slow, "only a write that waits tells of its reader"
    return None


def test_who_drips_is_left_and_who_keeps_up_never() -> None:
    assert reading(1.0, most_s=1e4) == 100.0, "one write alone takes longer than anybody is waited for"
    dripping = reading(MIN_BYTES_PER_S / 10, most_s=1e4)
    assert dripping is not None
    assert 30 < dripping < 40
    nearly = reading(MIN_BYTES_PER_S / 2, most_s=1e4)
    assert nearly is not None
    assert 40 < nearly < 80
    assert reading(MIN_BYTES_PER_S * 1.1, most_s=1e4) is None
    assert reading(MIN_BYTES_PER_S / 2, most_s=1e4, pause_s=1.0) is None, "it has taken all there was, again and again"


def test_a_loop_that_is_late_is_not_the_readers_fault() -> None:
    """It sees no write done before it runs again; who reads nothing gains no more than that."""
    clock = Clock()
    reader = ClientReader(lambda: None, 30.0, clock)
    for _ in range(1000):
        reader.writing()
        clock.now += 3.1
        reader.excuse(3.0)  # once a write that goes on, once one that was seen done before
        assert not reader.too_slow
        reader.written(lambda: 100)
        reader.writing()
        clock.now += 3.1
        reader.written(lambda: 100)
        reader.excuse(3.0)
    reader.writing()
    began = clock.now
    while not reader.too_slow and clock.now < began + 1000:
        clock.now += 3.0
        reader.excuse(0.5)
    assert 30.0 <= clock.now - began <= 45.0


async def test_a_loop_that_stood_still_gives_nobody_up() -> None:
    left = asyncio.Event()
    with SlowClientMonitor(timeout_s=0.3).reader(left.set) as reader:
        for _ in range(5):
            reader.writing()
            time.sleep(0.5)  # the loop stands still, and the write is done meanwhile
            await asyncio.sleep(0)  # what is due is looked over first
            reader.written(lambda: 100)
        assert not left.is_set()


async def test_one_that_drips_over_http(ingress: Any, worker: FloodingWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is done long before a reader is given up, and yet it is."""
    app = ingress.__serve_build_asgi_app__()
    taken = 0

    async def send(message: Any) -> None:
        nonlocal taken
        taken += len(message.get("body", b""))
        await asyncio.sleep(0.02)

    async def ask() -> None:
        async with asyncio.timeout(60):
            await asgi.request(app, "POST", "/v1/completions", {"prompt": "abc", "stream": True}, send=send)

    monkeypatch.setattr(slow_clients, "MIN_BYTES_PER_S", 2**40)
    await ask()
    await until(lambda: worker.closed == 1)
    assert taken < 500 * len(TEXT), "not the whole answer"
    assert (ingress.router.num_streams, len(ingress.readers)) == (0, 0)


async def test_one_that_drips_over_grpc(ingress: Any, worker: FloodingWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "MIN_BYTES_PER_S", 2**40)
    server = grpc.aio.server()
    add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = (("grpc.max_receive_message_length", 2**24), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).CompleteStream(pb.CompleteRequest(text="abc"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on(call, pause_s=0.02)
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        await until(lambda: worker.closed == 1 and len(ingress.readers) == 0)
    await server.stop(None)


async def test_the_log_names_the_call_of_a_reader_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    record = access_log.begin_record(access_log.CallRecord("http", "POST /v1/completions"))
    left = asyncio.Event()
    with caplog.at_level("WARNING"), SlowClientMonitor(timeout_s=0.05).reader(left.set) as reader:
        reader.writing()
        async with asyncio.timeout(20):
            await left.wait()
    record.ended(499)
    told = [line for line in caplog.records if line.name == slow_clients.log.name and record.id in line.message]
    assert len(told) == 1, "an operator finds it"


async def test_an_event_of_a_megabyte_goes_in_parts(ingress: Any) -> None:
    """Taken as one it would look like a reader that reads nothing for as long as it takes."""
    clock = Clock()
    ingress.readers = SlowClientMonitor(timeout_s=0.2, clock=clock)
    app = ingress.__serve_build_asgi_app__()
    parts: list[int] = []

    async def send(message: Any) -> None:
        parts.append(len(message.get("body", b"")))
        clock.now += 0.1
        await asyncio.sleep(0.01)  # looked over every 0.02 s
        if sum(parts) > len(TEXT):
            raise OSError("the client has gone")

    with pytest.raises(OSError, match="gone"):
        await asgi.request(app, "POST", "/v1/completions", {"prompt": "abc", "stream": True}, send=send)
    assert len(parts) > 60, "for 6 s, of which a reader that reads nothing has 0.2"
    assert max(parts) <= PART_BYTES
