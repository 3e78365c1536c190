"""At the end of a drain nothing is cut off in silence; what is refused says when to come again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from echo_worker import EchoWorker
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.web.servicers import add_inference
from motley.replicas.errors import Overloaded

LONG = {"prompt": "abc", "max_tokens": 400}


@pytest.fixture
async def ingress(folder: Path) -> Any:
    return await make_ingress(folder, EchoWorker(str(folder), step_s=0.05))


async def code_of(call: Any) -> grpc.StatusCode:
    """A stream's status comes after its messages have been read."""
    with suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def stop(ingress: Any, streams: int) -> None:
    """As `motley serve` does when the drain is over."""
    async with asyncio.timeout(20):
        while ingress.router.num_streams < streams:
            await asyncio.sleep(0.01)
    assert await ingress.drain() == streams
    await ingress.end_streams()


async def test_http_streams_end_with_an_event_and_the_rest_with_503(ingress: Any) -> None:
    app = ingress.__serve_build_asgi_app__()
    stream = asyncio.create_task(asgi.request(app, "POST", "/v1/completions", {**LONG, "stream": True}))
    whole = asyncio.create_task(asgi.request(app, "POST", "/v1/completions", LONG))
    await stop(ingress, 2)
    events = (await stream).events()
    assert events[-1]["error"]["code"] in ("draining", "replica_lost")
    assert "[DONE]" not in events
    reply = await whole
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    late = await asgi.request(app, "POST", "/v1/completions", LONG)
    assert (late.status, late.json()["error"]["code"], late.headers["retry-after"]) == (503, "draining", "1")
    assert ingress.router.num_streams == 0


async def test_grpc_calls_end_with_unavailable(ingress: Any) -> None:
    server = grpc.aio.server()
    add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(max_tokens=400))
        stream = stub.CompleteStream(request)
        whole = stub.Complete(request)
        assert (await stream.read()).HasField("started")
        await stop(ingress, 2)
        for call in (stream, whole, stub.Complete(request)):
            assert await code_of(call) == grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_a_refusal_says_when_to_come_again(folder: Path) -> None:
    worker = ScriptedWorker(str(folder), [], Overloaded("full", code="queue_full", retry_after_s=7))
    ingress = await make_ingress(folder, worker)
    app = ingress.__serve_build_asgi_app__()
    for stream in (False, True):
        reply = await asgi.request(app, "POST", "/v1/completions", {**LONG, "stream": stream})
        assert (reply.status, reply.headers["retry-after"], reply.json()["error"]["code"]) == (429, "7", "queue_full")
    server = grpc.aio.server()
    add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for call in (
            stub.Complete(pb.CompleteRequest(text="abc")),
            stub.CompleteStream(pb.CompleteRequest(text="abc")),
        ):
            assert await code_of(call) == grpc.StatusCode.RESOURCE_EXHAUSTED
            trailing = dict(await call.trailing_metadata())
            assert trailing["retry-after"] == "7"
            status = Status.FromString(trailing["grpc-status-details-bin"])
            info = RetryInfo()
            assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert status.details[0].Unpack(info)
            assert info.retry_delay.seconds == 7
    await server.stop(None)
