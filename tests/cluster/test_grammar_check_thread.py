"""A schema that takes long to check is checked beside the event loop, whichever protocol it comes by."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from motley.cluster.api.common.admission import SHORT_GRAMMAR
from motley.cluster.api.common.chat import chat_tools
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import vllm_engine_pb2 as vllm_pb
from motley.cluster.protos import vllm_engine_pb2_grpc
from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar import grammar_spec

HELLO = [{"role": "user", "content": "x"}]
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
FORMAT = "response_format"


def schema(size: int) -> dict[str, Any]:
    return {"type": "object", "description": "d" * size}


def described(size: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(size), "strict": True}}


def function(size: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema(size)}}


HTTP: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "completion": ("/v1/completions", lambda size: {"prompt": "x", FORMAT: described(size)}),
    "chat": ("/v1/chat/completions", lambda size: {"messages": HELLO, FORMAT: described(size)}),
    "structured outputs": (
        "/v1/completions",
        lambda size: {"prompt": "x", "structured_outputs": {"json": schema(size)}},
    ),
    "tools": ("/v1/chat/completions", lambda size: {"messages": HELLO, "tools": [function(size)]}),
    "KServe": (
        "/v2/models/tiny/infer",
        lambda size: {"inputs": [TEXT], "parameters": {"json_schema": json.dumps(schema(size))}},
    ),
}


@pytest.fixture
def checked_in(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each schema that is checked, whether that was in the thread of the event loop. None is accepted."""
    where: list[bool] = []
    ours = threading.current_thread()

    def refuse(given: Any, field: str) -> None:
        where.append(threading.current_thread() is ours)
        raise InvalidRequest(f"{field}: looked at", param=field)

    for module in (grammar_spec, chat_tools):
        monkeypatch.setattr(module, "check_schema", refuse)
    return where


@pytest.mark.parametrize("name", HTTP)
async def test_over_http(post: Callable[..., Any], checked_in: list[bool], name: str) -> None:
    path, body = HTTP[name]
    for size in (1, SHORT_GRAMMAR):
        reply = await post(path, body(size))
        assert b"looked at" in reply.body
    assert checked_in == [True, False]


@pytest.mark.parametrize("keyword", ["pattern", "patt\\u0065rn"])
@pytest.mark.parametrize("kind", ["a format", "a tool"])
async def test_what_may_need_automata_is_looked_at_aside(
    post: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, keyword: str
) -> None:
    """However short it is, where it is not strict."""
    where: list[bool] = []
    ours = threading.current_thread()

    def refuse(given: dict[str, Any]) -> None:
        assert "pattern" in given["propertyNames"]
        where.append(threading.current_thread() is ours)
        raise InvalidRequest("looked at", param="x")

    for module in (grammar_spec, chat_tools):
        monkeypatch.setattr(module, "relax_schema", refuse)
    body: dict[str, Any] = {"messages": HELLO}
    wanted = {"type": "object", "propertyNames": {"KEYWORD": "a"}}
    if kind == "a format":
        body[FORMAT] = {"type": "json_schema", "json_schema": {"schema": wanted}}
    else:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": wanted}}]
    reply = await post("/v1/chat/completions", json.dumps(body).replace("KEYWORD", keyword).encode())
    assert b"looked at" in reply.body
    assert where == [False]


async def test_over_grpc(stub: Any, checked_in: list[bool]) -> None:
    for size in (1, SHORT_GRAMMAR):
        sampling = pb.SamplingParams(grammar=pb.Grammar(json_schema=json.dumps(schema(size))))
        await refused(stub.Complete(pb.CompleteRequest(text="x", sampling=sampling)))
    for size in (1, SHORT_GRAMMAR):
        described = pb.Function(name="f", strict=True, parameters=json.dumps(schema(size)))
        message, tool = pb.ChatMessage(role="user", content="x"), pb.Tool(function=described)
        await refused(stub.Chat(pb.ChatRequest(messages=[message], tools=[tool])))
    assert checked_in == [True, False] * 2


async def test_over_vllms_grpc(grpc_target: str, checked_in: list[bool]) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        for size in (1, SHORT_GRAMMAR):
            sampling = vllm_pb.SamplingParams(json_schema=json.dumps(schema(size)))
            request = vllm_pb.GenerateRequest(text="x", sampling_params=sampling)
            await refused(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request).read())
    assert checked_in == [True, False]


async def refused(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert "looked at" in (caught.value.details() or "")
