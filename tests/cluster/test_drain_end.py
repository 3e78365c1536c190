"""At the end of a drain nothing is cut off in silence; what is refused says when to come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from any_messages import TEXT
from echo_worker import EchoWorker
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_servers import serving
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2_grpc, vllm_engine_pb2_grpc
from motley.cluster.protos import kserve_pb2 as kserve_pb
from motley.cluster.protos import vllm_engine_pb2 as vllm_pb
from motley.cluster.transport.grpc_server.servicers import add_inference
from motley.replicas.errors import Overloaded
from motley.replicas.types import Request, StreamMessage

LONG = {"prompt": "abc", "max_tokens": 400}
STREAMING = {"name": "streaming", "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}}
STOPPING = "the service is stopping"


async def code_of(call: Any) -> grpc.StatusCode:
    """A stream's status comes after its messages have been read."""
    with suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


class Counting(EchoWorker):
    """begun: how many of its streams have handed out a token of each choice, and were asked for more."""

    begun = 0

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        choices: set[int] = set()
        async for message in super().generate(request):
            yield message
            before = len(choices)
            choices.update(delta.index for delta in message.deltas if delta.token_ids)
            self.begun += before < len(choices) == request.sampling.n


async def stop(ingress: Any, worker: Counting, streams: int) -> None:
    """Stop the ingress as `motley serve` does when the drain is over; all of these streams have begun by then."""
    async with asyncio.timeout(60):
        while ingress.router.num_streams < streams or worker.begun < streams:
            await asyncio.sleep(0.01)
    assert await ingress.drain() == streams
    await ingress.end_streams()


class Hanging(Counting):
    """A replica that was stopped: after two tokens nothing more comes."""

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        left = 3
        async for message in super().generate(request):
            if not left:
                await asyncio.Event().wait()
            left -= 1
            yield message


async def told_over_grpc(call: Any) -> tuple[str, list[Any]]:
    """Return what the error says, and the messages before it."""
    messages: list[Any] = []
    with suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    assert await call.code() == grpc.StatusCode.UNAVAILABLE
    assert dict(await call.trailing_metadata())["retry-after"] == "1"
    return await call.details(), messages


@pytest.mark.parametrize("kind", [Counting, Hanging], ids=["moves", "hangs"])
async def test_what_outlasts_the_drain_is_told_so_over_every_protocol(folder: Path, kind: type[Counting]) -> None:
    """Streamed or not, whether its replica moves or hangs: the service is stopping, and nothing else is the reason."""
    worker = kind(str(folder), step_s=0.05)
    ingress = await make_ingress(folder, worker)
    app = ingress.__serve_build_asgi_app__()
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 400, "stream": True}
    over_http = [
        asyncio.create_task(asgi.request(app, "POST", path, body))
        for path, body in (
            ("/v1/completions", {**LONG, "stream": True}),
            ("/v1/chat/completions", chat),
            ("/v1/completions", LONG),
        )
    ]
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        motley, kserve = inference_pb2_grpc.InferenceStub(channel), kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(max_tokens=400, n=2))
        generate = vllm_pb.GenerateRequest(text="abc", sampling_params=vllm_pb.SamplingParams(max_tokens=400))
        infer = kserve_pb.ModelInferRequest(inputs=[TEXT], parameters={"max_tokens": {"int64_param": 400}})
        streamed = kserve_pb.ModelInferRequest(id="mine", inputs=[TEXT, STREAMING], parameters=infer.parameters)
        over_kserve = kserve.ModelStreamInfer(iter([streamed]))
        calls = [
            motley.CompleteStream(request),
            motley.Complete(request),
            kserve.ModelInfer(infer),
            vllm.Generate(generate),
            vllm.Generate(vllm_pb.GenerateRequest(text="abc", sampling_params=generate.sampling_params, stream=True)),
        ]
        told = [asyncio.create_task(told_over_grpc(call)) for call in calls]
        parts = asyncio.create_task(read(over_kserve))
        await stop(ingress, worker, 9)
        said = [await one for one in told]
        assert {details for details, _ in said} == {STOPPING}
        ends = [choice.finish_reason for chunk in said[0][1] for choice in chunk.choices if choice.finish_reason]
        assert ends == [pb.FINISH_REASON_REPLICA_LOST] * 2, "of each choice that had begun; it may be resumed elsewhere"
        assert all(one.WhichOneof("response") == "chunk" for one in said[-1][1])
        last = (await parts)[-1]
        assert last.error_message == f"[request id: mine] {STOPPING}"
        assert last.infer_response.parameters["code"].string_param == "draining"
        assert await code_of(motley.Complete(request)) == grpc.StatusCode.UNAVAILABLE
    *streams, whole = [await task for task in over_http]
    for stream in streams:
        events = stream.events()
        assert events[-1]["error"] | {"message": STOPPING, "code": "draining"} == events[-1]["error"]
        assert events[-2]["choices"][0]["finish_reason"] == "replica_lost"
        assert "[DONE]" not in events
    late = await asgi.request(app, "POST", "/v1/completions", LONG)
    for reply in (whole, late):
        told_http = (reply.status, reply.json()["error"]["code"], reply.headers["retry-after"])
        assert told_http == (503, "draining", "1")
    assert ingress.router.num_streams == 0


async def read(call: Any) -> list[Any]:
    return [message async for message in call]


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
