"""Habits of clients, probes and operators that the service relies on or honours: paths, words of errors, statuses,
lines of the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
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
from starlette.requests import ClientDisconnect

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.cluster.routing.streaming.first_output import hold_until_output
from motley.replicas.types import Delta, FinishReason, Request, StreamMessage

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = "maximum context length is 512 tokens"  # by such words libraries tell it from other errors


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x" * 600}),
        (COMPLETIONS, {"prompt": "x" * 10**6}),
        (COMPLETIONS, {"prompt": [65] * 600}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}),
        (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>" * 600}]}),
        ("/v1/embeddings", {"input": "x" * 600}),
        ("/tokenize", {"prompt": "x" * 10**6}),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_context_that_is_too_long_is_told_in_openais_words(path: str, body: dict[str, Any], post: Any) -> None:
    error = refused(await post(path, body))
    assert error["code"] == "context_length_exceeded"
    assert LENGTH in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models"])
async def test_a_slash_at_the_end_changes_nothing(path: str, call: Any) -> None:
    """Nor is it a redirect: that would lose the body, or send key and prompt elsewhere."""
    bodies = {
        COMPLETIONS: {"prompt": "a", "max_tokens": 1, "seed": 1},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "seed": 1},
        "/v1/embeddings": {"input": "a"}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [65]},
    }  # fmt: skip
    method, body = ("POST", bodies[path]) if path in bodies else ("GET", b"")
    plain, slashed = await call(method, path, body), await call(method, f"{path}/", body)
    assert (plain.status, slashed.status) == (200, 200)
    assert plain.json().keys() == slashed.json().keys()


async def test_version_and_ping_are_answered(call: Any) -> None:
    from motley import __version__

    assert (await call("GET", "/version")).json() == {"version": __version__}
    assert (await call("GET", "/ping")).json() == (await call("GET", "/health")).json()
    for path in ("/docs", "/redoc"):
        assert "/openapi.json" in refused(await call("GET", path), 404)["message"]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, "motley.access")
    logger = logging.getLogger("motley.access")
    logger.addHandler(caplog.handler)

    def found() -> list[dict[str, Any]]:
        said = [record.getMessage() for record in caplog.records if record.name == "motley.access"]
        return [json.loads(line) for text in dict.fromkeys(said) for line in text.split("\n")]

    return found


async def test_the_access_log_says_why_and_nothing_of_what_was_sent(
    lines: Callable[[], list[dict[str, Any]]], call: Any, stub: Any
) -> None:
    secret = "do not write this down"
    await call("POST", COMPLETIONS, {"prompt": secret, "temperature": secret})
    await call("POST", COMPLETIONS, {"prompt": secret, "model": secret})
    await call("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    await call("GET", "/v1/nothing")
    await call("POST", COMPLETIONS, b"{")
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Complete(pb.CompleteRequest(text=secret, sampling=pb.SamplingParams(top_k=-7)))
    await call("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    found = [(line["status"], line["refusal"]) for line in lines()]
    assert found == [
        (400, {"code": "invalid_value", "param": "temperature"}),
        (404, {"code": "model_not_found", "param": "model"}),
        (400, {"code": "unsupported_parameter", "param": "messages[0].content[0]"}),
        (404, {"code": "not_found"}),
        (400, {"code": "invalid_json"}),
        ("INVALID_ARGUMENT", {"code": "invalid_value", "param": "top_k"}),
        (200, {}),
    ]
    assert secret not in json.dumps(lines())


async def test_the_access_log_has_what_the_client_was_told_of_a_bug(
    lines: Callable[[], list[dict[str, Any]]], ingress: Any, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer has begun that is a status, with the call's id; afterwards an event, and over gRPC a code."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    app = ingress.__serve_build_asgi_app__()
    post = partial(asgi.request, app, "POST", raises=RuntimeError)
    internal = {"code": "internal_error"}
    generate = "/v2/models/echo/generate_stream"
    with monkeypatch.context() as patch:
        patch.setattr("motley.cluster.api.openai.openai_request.parse_completion", broken)
        patch.setattr("motley.cluster.api.kserve.rest.kserve_generate.infer_request", broken)
        patch.setattr("motley.cluster.api.motley.motley_messages.parse_complete_request", broken)
        reply = await post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "mine"})
        assert refused(reply, 500)["code"] == "internal_error"
        assert reply.headers["x-request-id"] == "mine"
        assert (await post(generate, {"text_input": "a"})).status == 500
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Complete(pb.CompleteRequest(text="a"))
    with monkeypatch.context() as patch:
        patch.setattr("motley.cluster.api.openai.openai_chunks.OpenAIChunkWriter.closing", broken)
        reply = await post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True})
        assert (reply.status, reply.events()[-1]["error"]["code"]) == (200, "internal_error")
    assert (await post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})).status == 200

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    await asgi.request(partial(_received, app, leaves), "POST", COMPLETIONS, b"", raises=ClientDisconnect)
    found = [(line["status"], line["refusal"]) for line in lines()]
    assert found == [(500, internal), (500, internal), ("INTERNAL", internal), (200, internal), (200, {}), (499, {})]


async def _received(app: Any, receive: Any, scope: Any, _: Any, send: Any) -> None:
    """Calls the application with another `receive`."""
    await app(scope, receive, send)


class LateWorker(EchoWorker):
    """A worker where the deadline of a request with this many tokens passes: in the queue, or after some output."""

    def __init__(self, folder: str, said: int) -> None:
        super().__init__(folder)
        self.said = said

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        told: int | None = 0
        for _ in range(self.said):
            yield StreamMessage((Delta(0, (65,), "a"),), cached_tokens=told)
            told = None
        of_prompt = None if told is None or request.sampling.prompt_logprobs is None else (None,)
        late = Delta(0, finish_reason=FinishReason.DEADLINE)
        yield StreamMessage((late,), cached_tokens=told, prompt_logprobs=of_prompt)


async def test_a_deadline_that_passes_in_the_queue_is_a_status_of_its_own_streamed_or_not(folder: Path) -> None:
    """And no 200 whose stream then breaks off."""
    ingress = await make_ingress(folder, LateWorker(str(folder), said=0))
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    hello = [{"role": "user", "content": "a"}]
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": hello}),
        (COMPLETIONS, {"prompt": ["a"] * 3}),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ):
        for stream in (False, True):
            sent = {**body, "stream": stream, "timeout_s": 5, "max_tokens": 100}
            assert refused(await post(path, sent), 504)["code"] == "deadline_exceeded"
    for path in ("generate", "generate_stream"):
        asked = {"text_input": "a", "prompt_logprobs": 1, "timeout": 5_000_000}
        assert (await post(f"/v2/models/echo/{path}", asked)).status == 504
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        motley = inference_pb2_grpc.InferenceStub(channel)
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for calls in (
            motley.CompleteStream(pb.CompleteRequest(text="a", timeout_s=5)),
            motley.CompleteStream(
                pb.CompleteRequest(text="a", timeout_s=5, sampling=pb.SamplingParams(prompt_logprobs=1))
            ),
            motley.ChatStream(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")], timeout_s=5)),
            vllm.Generate(vllm_engine_pb2.GenerateRequest(text="a", stream=True), timeout=30),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                assert not [one async for one in calls]
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_after_the_first_token_ends_the_stream(folder: Path) -> None:
    ingress = await make_ingress(folder, LateWorker(str(folder), said=2))
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    reply = await post(COMPLETIONS, {"prompt": "a", "stream": True, "timeout_s": 5, "max_tokens": 100})
    assert reply.status == 200
    *chunks, ended, error = reply.events()
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "a"]
    assert ended["choices"][0]["finish_reason"] == "deadline"
    assert error["error"]["code"] == "deadline_exceeded"


async def test_a_stream_begins_with_what_it_says_and_loses_nothing_before() -> None:
    opening = StreamMessage(cached_tokens=3)
    said = StreamMessage((Delta(0, (1,), ""),))
    late = StreamMessage((Delta(0, finish_reason=FinishReason.DEADLINE),))
    ended = StreamMessage((Delta(0, finish_reason=FinishReason.STOP),))

    async def of(*messages: StreamMessage) -> AsyncGenerator[StreamMessage, None]:
        for message in messages:
            yield message

    for messages in ((opening, said, late), (opening, opening, ended), (said,), (), (late,), (opening,)):
        assert tuple([one async for one in hold_until_output(of(*messages))]) == messages
