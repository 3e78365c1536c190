"""Answers that are not streamed: bounded in log-probabilities, and large ones written beside the event loop."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from grpc_servers import serving
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.common import admission, collected_response
from motley.cluster.api.kserve import kserve_protocol
from motley.cluster.api.motley import motley_response
from motley.cluster.api.openai import openai_logprobs, openai_protocol
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.cluster.transport.caller import Caller
from motley.cluster.transport.http_server.response_content import StreamingContent
from motley.replicas.types import Delta, FinishReason, StreamMessage, TokenLogprob

TOP = 20
ENTRY = TokenLogprob(65, -0.5, tuple((65 + i, -0.5 - i) for i in range(TOP)))
CHUNK = 64  # tokens of a message


def script(tokens: int) -> tuple[StreamMessage, ...]:
    """So many tokens with TOP alternatives each."""
    part = Delta(0, (65,) * CHUNK, "A" * CHUNK, (ENTRY,) * CHUNK)
    last = Delta(0, (65,), "A", (ENTRY,), FinishReason.STOP)
    count = (tokens - 1) // CHUNK
    return (StreamMessage(cached_tokens=0), *(StreamMessage((part,)) for _ in range(count)), StreamMessage((last,)))


LARGE = collected_response.MAX_RESPONSE_LOGPROBS // (1 + TOP)
LARGE_PROMPT = collected_response.LARGE_RESPONSE_VALUES // (1 + TOP) + 2


async def ingress_of(folder: Path, tokens: int) -> Any:
    return await make_ingress(folder, ScriptedWorker(str(folder), script(tokens)))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "ab", "logprobs": TOP}, "logprobs"),
        ("completions", {"prompt": ["ab", "ba"], "logprobs": TOP}, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": TOP},
         "top_logprobs"),
    ],
)  # fmt: skip
async def test_too_many_are_refused_by_name(folder: Path, path: str, body: dict[str, Any], field: str) -> None:
    """Counts those of all prompts of a call together."""
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    ingress = await ingress_of(folder, LARGE // prompts + CHUNK)
    reply = await asgi.request(ingress.__serve_build_asgi_app__(), "POST", f"/v1/{path}", body)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "answer_too_large", field)
    assert error["message"].startswith(
        f"{field}: the answer has come to more than {collected_response.MAX_RESPONSE_LOGPROBS}"
    )


async def test_what_nobody_asked_for_takes_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which choice is the best is told by log-probabilities that are no part of the answer."""
    monkeypatch.setattr(openai_protocol, "LogprobBudget", partial(collected_response.LogprobBudget, max_logprobs=CHUNK))
    likely, unlikely = TokenLogprob(65, -0.5), TokenLogprob(66, -1.0)
    deltas = [Delta(i, (e.token_id,) * CHUNK, "AB"[i] * CHUNK, (e,) * CHUNK) for i, e in enumerate((unlikely, likely))]
    last = tuple(Delta(i, (65,), ".", (likely,), FinishReason.STOP) for i in range(2))
    messages = (StreamMessage(tuple(deltas), cached_tokens=0), StreamMessage(last))
    app = (await make_ingress(folder, ScriptedWorker(str(folder), messages))).__serve_build_asgi_app__()
    reply = await asgi.request(app, "POST", "/v1/completions", {"prompt": "ab", "best_of": 2})
    [choice] = reply.json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("B" * CHUNK + ".", None)
    reply = await asgi.request(app, "POST", "/v1/completions", {"prompt": "ab", "best_of": 2, "logprobs": 0})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "logprobs")


async def test_over_grpc_too(folder: Path) -> None:
    sampling = pb.SamplingParams(logprobs=TOP)
    infer = kserve_pb2.ModelInferRequest(inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1],
                                                  "contents": {"bytes_contents": [b"ab"]}}])  # fmt: skip
    infer.parameters["logprobs"].int64_param = TOP
    generate = vllm_engine_pb2.GenerateRequest(
        request_id="a", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[65]),
        sampling_params=vllm_engine_pb2.SamplingParams(logprobs=TOP),
    )  # fmt: skip
    async with serving(await ingress_of(folder, LARGE + CHUNK)) as target, grpc.aio.insecure_channel(target) as channel:
        motley: Any = inference_pb2_grpc.InferenceStub(channel)
        kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answers = [
            motley.Complete(pb.CompleteRequest(text="ab", sampling=sampling)),
            kserve.ModelInfer(infer),
            vllm.Generate(generate).read(),
        ]
        for answer in answers:
            with pytest.raises(grpc.aio.AioRpcError, match="the answer has come to more") as caught:
                await answer
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        whole = 0
        async for chunk in motley.CompleteStream(pb.CompleteRequest(text="ab", sampling=sampling)):
            whole += sum(len(choice.token_ids) for choice in chunk.choices)
        assert whole > LARGE, "a stream has no such bound"
        generate.stream = True
        answers = [answer async for answer in vllm.Generate(generate)]
        chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
        assert sum(len(chunk.output_logprobs.token_logprobs) for chunk in chunks) == whole
        assert len(answers[-1].complete.output_ids) == whole


@pytest.mark.parametrize("tokens", [CHUNK + 1, LARGE])
async def test_large_ones_are_written_in_a_thread(folder: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: list[bool] = []

    def whole(*arguments: Any, **options: Any) -> Any:
        wrote.append(threading.current_thread() is threading.main_thread())
        return written(*arguments, **options)

    written = openai_protocol.whole_response
    monkeypatch.setattr(openai_protocol, "whole_response", whole)
    ingress = await ingress_of(folder, tokens)
    body = {"prompt": "ab", "logprobs": TOP}
    reply = await asgi.request(ingress.__serve_build_asgi_app__(), "POST", "/v1/completions", body)
    assert (reply.status, wrote) == (200, [tokens < LARGE])
    choice = reply.json()["choices"][0]
    count = (tokens - 1) // CHUNK * CHUNK + 1
    assert (len(choice["text"]), len(choice["logprobs"]["top_logprobs"])) == (count, count)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"logprobs": 4}, "15, alternatives included"),
        ({"logprobs": 1, "n": 3}, "6, alternatives included, in each of 3 choices"),
        ({"logprobs": 1, "n": 3, "stream": True}, "6, alternatives included, in each of 3 choices"),
        ({"logprobs": 1, "n": 3, "best_of": 4}, "6, alternatives included, in each of 3 choices"),
    ],
)
async def test_of_a_prompt_they_are_known_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(admission, "MAX_RESPONSE_LOGPROBS", 12)
    worker = ScriptedWorker(str(folder), script(1))
    app = (await make_ingress(folder, worker)).__serve_build_asgi_app__()
    body = {"prompt": [65] * 3, "echo": True, "max_tokens": 0}
    assert (await asgi.request(app, "POST", "/v1/completions", {**body, **more})).json()["error"] == {
        "message": f"logprobs: this prompt has {said}; at most 12",
        "type": "invalid_request_error", "param": "logprobs", "code": "answer_too_large",
    }  # fmt: skip
    assert worker.requests == [], "nothing is computed"


def prompt_script(n: int, tokens: int) -> tuple[StreamMessage, ...]:
    """A prompt's, and one token of each choice."""
    deltas = tuple(Delta(index, (65,), "A", (ENTRY,), FinishReason.LENGTH) for index in range(n))
    return (StreamMessage(deltas, cached_tokens=0, prompt_logprobs=(None, *(ENTRY,) * (tokens - 1))),)


async def test_a_prompt_counts_as_often_as_it_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number shown of several prompts is known only from their answers."""
    n, tokens = 4, 8
    app = (await make_ingress(folder, ScriptedWorker(str(folder), prompt_script(n, tokens)))).__serve_build_asgi_app__()
    body = {"prompt": [[65] * tokens] * 2, "echo": True, "logprobs": TOP, "n": n, "max_tokens": 1}
    reply = await asgi.request(app, "POST", "/v1/completions", body)
    shown = sum(len(top) for choice in reply.json()["choices"] for top in choice["logprobs"]["top_logprobs"] if top)
    assert shown == 2 * n * tokens * TOP, "of the token itself it is the first of them"
    room = 2 * n * tokens * (1 + TOP)  # the first token's place is taken by the one of output
    for most, status in ((room, 200), (room - 1, 400)):
        monkeypatch.setattr(
            openai_protocol, "LogprobBudget", partial(collected_response.LogprobBudget, max_logprobs=most)
        )
        assert (await asgi.request(app, "POST", "/v1/completions", body)).status == status


async def test_over_vllm_each_choice_has_the_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the two others a prompt's are told once, however many choices there are."""
    monkeypatch.setattr(admission, "MAX_RESPONSE_LOGPROBS", 12)
    sampling = pb.SamplingParams(prompt_logprobs=1, n=3, max_tokens=1)
    generate = vllm_engine_pb2.GenerateRequest(
        request_id="a", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[65] * 3),
        sampling_params=vllm_engine_pb2.SamplingParams(prompt_logprobs=1, n=3, max_tokens=1),
    )  # fmt: skip
    ingress = await make_ingress(folder, ScriptedWorker(str(folder), prompt_script(3, 3)))
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for generate.stream in (False, True):
            with pytest.raises(grpc.aio.AioRpcError, match="in each of 3 choices; at most 12"):
                await vllm.Generate(generate).read()
        motley: Any = inference_pb2_grpc.InferenceStub(channel)
        answer = await motley.Complete(pb.CompleteRequest(token_ids={"ids": [65] * 3}, sampling=sampling))
        assert (len(answer.choices), len(answer.prompt_logprobs)) == (3, 3)


@pytest.mark.parametrize("tokens", [8, LARGE_PROMPT])
async def test_a_large_prompt_is_streamed_choice_by_choice(
    folder: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a write of its own and made in a thread, so that other streams go on; a small one in one write."""
    wrote: list[bool] = []

    def legacy(*arguments: Any) -> Any:
        wrote.append(threading.current_thread() is threading.main_thread())
        return written(*arguments)

    n, large = 3, tokens > 8
    ingress = await make_ingress(folder, ScriptedWorker(str(folder), prompt_script(n, tokens)))
    written = openai_logprobs.LogprobWriter.legacy
    monkeypatch.setattr(openai_logprobs.LogprobWriter, "legacy", legacy)
    protocol = openai_protocol.OpenAIProtocol(ingress.admitter, ingress.router, None)  # type: ignore[arg-type]
    body = {"prompt": [65] * tokens, "echo": True, "logprobs": TOP, "n": n, "max_tokens": 1, "stream": True}
    answer = await protocol.completions(json.dumps(body).encode(), Caller())
    assert isinstance(answer, StreamingContent)
    writes = [answer.first, *[chunks async for chunks in answer.rest]]
    assert [len(chunks) for chunks in writes] == ([1] * n + [n, 0] if large else [2 * n, 0])
    assert wrote == [not large] * n + [True] * n
    app = ingress.__serve_build_asgi_app__()
    events = (await asgi.request(app, "POST", "/v1/completions", body)).events()
    told = [(event["choices"][0]["index"], len(event["choices"][0]["logprobs"]["tokens"])) for event in events[:-1]]
    assert told == [*((index, tokens) for index in range(n)), *((index, 1) for index in range(n))]


async def test_a_large_prompts_chunk_is_made_in_a_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[bool]] = {"motley": [], "kserve": []}

    def noted(whose: str, function: Any) -> Any:
        def make(*arguments: Any) -> Any:
            made[whose].append(threading.current_thread() is threading.main_thread())
            return function(*arguments)

        return make

    monkeypatch.setattr(
        motley_response.MotleyResponseBuilder, "_chunk", noted("motley", motley_response.MotleyResponseBuilder._chunk)
    )
    monkeypatch.setattr(kserve_protocol, "output_tensors", noted("kserve", kserve_protocol.output_tensors))
    for tokens in (8, LARGE_PROMPT):
        ingress = await make_ingress(folder, ScriptedWorker(str(folder), prompt_script(1, tokens)))
        async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
            sampling = pb.SamplingParams(prompt_logprobs=TOP, max_tokens=1)
            request = pb.CompleteRequest(token_ids={"ids": [65] * tokens}, sampling=sampling)
            chunks = [chunk async for chunk in inference_pb2_grpc.InferenceStub(channel).CompleteStream(request)]
            assert sum(len(chunk.prompt_logprobs) for chunk in chunks) == tokens
            ids = {"datatype": "INT32", "shape": [tokens], "contents": {"int_contents": [65] * tokens}}
            streaming = {"datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}}
            inputs = [{"name": "input_ids", **ids}, {"name": "streaming", **streaming}]
            infer = kserve_pb2.ModelInferRequest(inputs=inputs)
            infer.parameters["prompt_logprobs"].int64_param = TOP
            stream = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([infer]))
            [answer] = [answer async for answer in stream]
            assert not answer.error_message
    assert made == {"motley": [True, False], "kserve": [True, False]}
