"""Tokenizers and templates that run away: one typed error on every protocol, and neighbours who notice nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from bad_requests import refused
from echo_worker import EchoWorker
from grpc_servers import serving
from local_ingress import make_ingress
from service_checkpoint import write_tokenizer

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.cluster.transport import access_log

HOSTILE = "a" * 40 + "!"
ROUNDS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPING = (
    "{% for m in messages %}{% if 'loop' in m.content or m.role == 'developer' %}" + ROUNDS + "{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CALM = [{"role": "user", "content": "calm"}]


async def ingress_of(folder: Path) -> Any:
    return await make_ingress(folder, EchoWorker(str(folder)))


@pytest.fixture(scope="module")
async def backtracking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tokenizer(tmp_path_factory.mktemp("backtracking"), chat_template="{{ messages[0].content }}")
    state = json.loads((folder / "tokenizer.json").read_text())
    own = {"type": "Split", "pattern": {"Regex": "(a+)+$|[^a]+"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [own, state["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return await ingress_of(folder)


@pytest.fixture(scope="module")
async def looping(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return await ingress_of(write_tokenizer(tmp_path_factory.mktemp("looping"), chat_template=LOOPING))


@pytest.fixture(scope="module")
async def channels(backtracking: Any, looping: Any) -> AsyncIterator[dict[str, Any]]:
    async with (
        serving(backtracking) as one,
        serving(looping) as other,
        grpc.aio.insecure_channel(one) as first,
        grpc.aio.insecure_channel(other) as second,
    ):
        yield {"backtracking": first, "looping": second}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": HOSTILE}, "prompt"),
        ("/v1/completions", {"prompt": ["b", HOSTILE]}, "prompt"),
        ("/v1/completions", {"prompt": HOSTILE, "stream": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HOSTILE}]}, "messages"),
        ("/v1/embeddings", {"input": HOSTILE}, "input"),
        ("/tokenize", {"prompt": HOSTILE}, "prompt"),
    ],
)
async def test_a_text_that_backtracks_over_http(backtracking: Any, path: str, body: Any, param: str) -> None:
    post = partial(asgi.request, backtracking.__serve_build_asgi_app__(), "POST")
    hostile, neighbour = await asyncio.gather(
        post(path, body), post("/v1/completions", {"prompt": "b", "max_tokens": 2})
    )
    error = refused(hostile)
    assert error["code"] in ("tokenizer_refused", "tokenizer_limit")
    assert error["param"].startswith(param)
    assert neighbour.json()["choices"][0]["text"] == "bb"


async def test_a_text_that_backtracks_over_grpc(channels: dict[str, Any]) -> None:
    channel = channels["backtracking"]
    own, vllm = inference_pb2_grpc.InferenceStub(channel), vllm_engine_pb2_grpc.VllmEngineStub(channel)
    kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    contents = kserve_pb2.InferTensorContents(bytes_contents=[HOSTILE.encode()])
    tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
        name="text_input", datatype="BYTES", shape=[1], contents=contents
    )
    chat = [pb.ChatMessage(role="user", content=HOSTILE)]
    calls = [
        own.Complete(pb.CompleteRequest(text=HOSTILE)),
        own.Chat(pb.ChatRequest(messages=chat)),
        own.CompleteStream(pb.CompleteRequest(text=HOSTILE)).read(),
        own.Tokenize(pb.TokenizeRequest(text=HOSTILE)),
        kserve.ModelInfer(kserve_pb2.ModelInferRequest(model_name="echo", inputs=[tensor])),
        vllm.Generate(vllm_engine_pb2.GenerateRequest(request_id="x", text=HOSTILE)).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "the model's tokenizer" in str(caught.value.details())
    assert (await own.Complete(pb.CompleteRequest(text="b", sampling=pb.SamplingParams(max_tokens=2)))).choices


async def test_a_template_that_loops_is_named_on_each_protocol(looping: Any, channels: dict[str, Any]) -> None:
    """Also where it does so while it is tried whether it has a place for a role: that says nothing of the place."""
    post = partial(asgi.request, looping.__serve_build_asgi_app__(), "POST")
    own = inference_pb2_grpc.InferenceStub(channels["looping"])
    developer = [{"role": "developer", "content": "a"}, *CALM]
    over_http, over_grpc, calm = await asyncio.gather(
        post("/v1/chat/completions", {"messages": developer, "stream": True}),
        own.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="loop")])),
        post("/tokenize", {"messages": CALM}),
        return_exceptions=True,
    )
    error = refused(over_http)
    assert (error["code"], error["param"]) == ("chat_template_limit", "messages")
    assert over_grpc.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "messages: rendering them was stopped" in str(over_grpc.details())
    assert calm.json()["count"] == 4


@pytest.mark.parametrize("name", ["begin_encode", "begin_chat"])
async def test_texts_wait_in_the_line_of_their_tenant(
    backtracking: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, told = backtracking.admitter.tokenizer, []
    begin = getattr(tokenizer, name)
    monkeypatch.setattr(tokenizer, name, lambda *args, **given: told.append(given["tenant"]) or begin(*args, **given))
    prompt = CALM if name == "begin_chat" else "calm"

    async def ask() -> list[int]:
        record = access_log.begin_record(access_log.CallRecord("grpc", "Tokenize", tenant="a"))
        try:
            return await backtracking.admitter.prompt_ids(prompt, chat=name == "begin_chat")
        finally:
            record.ended("OK")

    assert await asyncio.create_task(ask()), "a call of its own, whose record is no other test's"
    assert told == ["a"]
