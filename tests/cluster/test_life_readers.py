"""A client that reads nothing is left after a while, and takes nothing along."""

from __future__ import annotations

import asyncio
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
from motley.cluster.web.readers import Readers
from motley.cluster.web.servicers import add_inference
from motley.replicas.protocol import Delta, FinishReason, Request, StreamMessage

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
    ingress.readers = Readers(timeout_s=0.2)
    return ingress


async def read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


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
