"""Before a request begins: deadlines are kept and nothing queues without end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.common import admission as module
from motley.cluster.api.common.parsed_request import ParsedRequest
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import vllm_engine_pb2
from motley.cluster.routing import router
from motley.cluster.transport.caller import Caller
from motley.replicas.errors import DeadlineExceeded, Overloaded
from motley.replicas.types import Request, SamplingParams, StreamMessage


class Slow(EchoWorker):
    """Its embeddings take their time."""

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        if request.pooling is not None:
            request = replace(request, pooling=None, sampling=SamplingParams(max_tokens=400))
        async for message in super().generate(request):
            yield message


@pytest.fixture
async def scripted(folder: Path) -> ScriptedWorker:
    return ScriptedWorker(str(folder), [])


@pytest.fixture
async def own(folder: Path, scripted: ScriptedWorker) -> Any:
    return await make_ingress(folder, scripted)


async def test_a_deadline_of_a_millisecond_is_never_run(
    own: Any, scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the prompt alone takes longer."""
    encode = own.admitter.tokenizer.encode
    monkeypatch.setattr(own.admitter.tokenizer, "encode", lambda *a, **k: (time.sleep(0.01), encode(*a, **k))[1])
    app = own.__serve_build_asgi_app__()
    for stream in (False, True):
        body = {"prompt": "abc", "timeout_s": 0.001, "stream": stream}
        reply = await asgi.request(app, "POST", "/v1/completions", body)
        assert (reply.status, reply.json()["error"]["type"]) == (504, "timeout_error")
    with pytest.raises(DeadlineExceeded):
        await own.motley.complete(pb.CompleteRequest(text="abc", timeout_s=0.001), Caller())
    with pytest.raises(DeadlineExceeded):
        await own.motley.complete(pb.CompleteRequest(text="abc"), Caller(timeout_s=0.001))
    assert scripted.requests == []


async def test_what_reading_the_prompt_took_is_no_longer_left(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = own.admitter.tokenizer.encode
    monkeypatch.setattr(own.admitter.tokenizer, "encode", lambda *a, **k: (time.sleep(0.05), encode(*a, **k))[1])
    admitted = await own.admitter.admit(ParsedRequest(model="", prompt="abc", timeout_s=60.0), Caller(timeout_s=30.0))
    assert 0 < admitted.request.deadline_s <= 30.0 - 0.05


async def test_a_deadline_is_of_the_call_however_many_prompts_it_has(
    own: Any, scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = own.admitter.tokenizer.encode
    monkeypatch.setattr(own.admitter.tokenizer, "encode", lambda *a, **k: (time.sleep(0.1), encode(*a, **k))[1])
    app = own.__serve_build_asgi_app__()
    prompts = ["abc"] * 20
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        reply = await asgi.request(app, "POST", path, {field: prompts, "timeout_s": 0.5})
        assert (reply.status, reply.json()["error"]["type"]) == (504, "timeout_error"), path
    assert scripted.requests == []


async def test_prompts_that_wait_to_be_read_are_bounded(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_CHARS", 0)  # every text is handed to another thread
    monkeypatch.setattr(module, "MAX_TOKENIZING", 3)
    gate = threading.Event()
    encode = own.admitter.tokenizer.encode
    monkeypatch.setattr(own.admitter.tokenizer, "encode", lambda *a, **k: (gate.wait(20), encode(*a, **k))[1])
    ask = ParsedRequest(model="", prompt="abc")
    waiting = [asyncio.create_task(own.admitter.admit(ask, Caller())) for _ in range(3)]
    async with asyncio.timeout(10):
        while own.admitter._at_work < 3:
            await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await own.admitter.admit(ask, Caller())
    waiting.pop().cancel()
    gate.set()
    await asyncio.gather(*waiting)
    async with asyncio.timeout(10):
        while own.admitter._at_work:
            await asyncio.sleep(0)
    assert await own.admitter.admit(ask, Caller())


async def test_streams_of_one_ingress_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the number at which Serve would let them wait, unseen and without an end."""
    monkeypatch.setattr(router, "MAX_STREAMS", 2)
    own = await make_ingress(folder, EchoWorker(str(folder), step_s=0.01))
    app = own.__serve_build_asgi_app__()
    body = {"prompt": "abc", "max_tokens": 20}
    replies = await asyncio.gather(*(asgi.request(app, "POST", "/v1/completions", body) for _ in range(6)))
    assert sorted(reply.status for reply in replies) == [200, 200, 429, 429, 429, 429]
    assert {reply.headers.get("retry-after") for reply in replies if reply.status == 429} == {"1"}
    assert own.router.num_streams == 0


async def test_a_call_whose_client_goes_is_ended_in_every_form(folder: Path) -> None:
    worker = Slow(str(folder), step_s=0.1)  # by itself none ends within 40 s
    own = await make_ingress(folder, worker)
    messages = [{"role": "user", "content": "abc"}]
    sampling = pb.SamplingParams(max_tokens=400)
    ask = pb.CompleteRequest(text="abc", sampling=sampling)
    chat = pb.ChatRequest(messages=[{"role": "user", "content": "abc"}], sampling=sampling)

    async def read(stream: AsyncGenerator[Any, None]) -> None:
        async for _ in stream:
            pass

    app = own.__serve_build_asgi_app__()
    post = partial(asgi.request, app, "POST")
    two = {"prompt": ["abc", "xyz"], "max_tokens": 400}
    talk = {"messages": messages, "max_tokens": 400}
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
    calls = [
        (1, own.motley.complete(ask, Caller())),
        (1, read(own.motley.complete_stream(ask, Caller()))),
        (1, own.motley.chat(chat, Caller())),
        (1, read(own.motley.chat_stream(chat, Caller()))),
        (2, own.motley.embeddings(pb.EmbeddingsRequest(inputs=[{"text": "abc"}, {"text": "xyz"}]), Caller())),
        (1, own.vllm.embed(vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": [1]}), Caller())),
        (2, post("/v1/completions", two)),
        (2, post("/v1/completions", {**two, "stream": True})),
        (1, post("/v1/chat/completions", talk)),
        (1, post("/v1/chat/completions", {**talk, "stream": True})),
        (2, post("/v1/embeddings", {"input": ["abc", "xyz"]})),
        (1, post("/v2/models/echo/infer", {"inputs": [tensor], "parameters": {"max_tokens": 400}})),
    ]
    for count, call in calls:
        task = asyncio.create_task(call)
        async with asyncio.timeout(10):
            while worker.load().running < count:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while worker.load().running:
                await asyncio.sleep(0.001)
        assert own.router.num_streams == 0
