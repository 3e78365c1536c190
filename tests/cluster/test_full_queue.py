"""A replica whose queue is full by tokens refuses at once, over each protocol, and takes nothing in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from faulty_replica import start_worker, until
from grpc_servers import serving
from local_ingress import make_ingress
from running_worker import Running

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.replicas.execution.step_plan import StepPlan, StepResult

MOST = 200  # prompt tokens that may wait; of requests more than this test has
LONG = "x" * 120


@pytest.fixture
async def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A worker whose engine takes no step until it is let go, with one request in its queue; its HTTP and gRPC."""
    worker = await start_worker(folder, monkeypatch, max_waiting_tokens=MOST)
    go, step = threading.Event(), worker._core._runner.run

    def run(plan: StepPlan) -> StepResult:
        assert go.wait(60)
        return step(plan)

    monkeypatch.setattr(worker._core._runner, "run", run)
    ingress = await make_ingress(folder, Running(worker))
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    first = asyncio.create_task(post("/v1/completions", {"prompt": LONG, "max_tokens": 2}))
    await until(lambda: worker._admission.waiting_tokens == len(LONG))
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        yield worker, post, channel
        assert (worker._admission.waiting, worker.num_streams) == (1, 1), "the refused have left nothing"
        go.set()
        assert (await first).status == 200
        assert (await post("/v1/completions", {"prompt": LONG, "max_tokens": 2})).status == 200
    assert worker._admission.waiting == worker.num_streams == 0
    await worker.close()


MESSAGES = [{"role": "user", "content": LONG}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/embeddings", {"input": LONG}),
    ("/v2/models/fake/infer", {"inputs": [{**TENSOR, "data": [LONG]}], "parameters": {"max_tokens": 2}}),
]


async def test_over_http(full: Any) -> None:
    _, post, _ = full
    for path, body in BODIES:
        reply = await post(path, body)
        assert reply.status == 429, path
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert f"1 requests with {len(LONG)} prompt tokens are waiting" in reply.body.decode()
        error = reply.json()["error"]
        assert isinstance(error, str) or (error["code"], error["type"]) == ("queue_full", "overloaded_error")


async def test_over_grpc(full: Any) -> None:
    _, _, channel = full
    motley: Any = inference_pb2_grpc.InferenceStub(channel)
    asked = pb.CompleteRequest(text=LONG, sampling=pb.SamplingParams(max_tokens=2))
    chat = pb.ChatRequest(messages=MESSAGES, sampling=pb.SamplingParams(max_tokens=2))
    contents = kserve_pb2.InferTensorContents(bytes_contents=[LONG.encode()])
    infer = kserve_pb2.ModelInferRequest(inputs=[{**TENSOR, "contents": contents}])
    infer.parameters["max_tokens"].int64_param = 2
    generate = vllm_engine_pb2.GenerateRequest(text=LONG, sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=2))
    kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    for method, request in (
        (motley.Complete, asked),
        (motley.CompleteStream, asked),
        (motley.Chat, chat),
        (motley.ChatStream, chat),
        (motley.Embeddings, pb.EmbeddingsRequest(inputs=[{"text": LONG}])),
        (kserve.ModelInfer, infer),
        (vllm.Generate, generate),
        (vllm.Embed, vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": [1] * len(LONG)})),
    ):
        call = method(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call] if isinstance(call, grpc.aio.UnaryStreamCall) else await call
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{len(LONG)} prompt tokens are waiting" in str(caught.value.details())
        assert 1 <= int(dict(caught.value.trailing_metadata())["retry-after"]) <= 60


async def test_what_fits_is_let_in(full: Any) -> None:
    """The bound is on tokens: a short request goes in beside the long one."""
    worker, post, _ = full
    short = asyncio.create_task(post("/v1/completions", {"prompt": "x" * (MOST - len(LONG)), "max_tokens": 1}))
    await until(lambda: worker._admission.waiting == 2)
    assert (await post("/v1/completions", {"prompt": "x", "max_tokens": 1})).status == 429
    short.cancel()
    await asyncio.gather(short, return_exceptions=True)
    await until(lambda: worker._admission.waiting == 1 and worker.num_streams == 1)
