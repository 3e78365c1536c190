"""Answers that are not streamed: bounded in log-probabilities, and large ones written beside the event loop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from grpc_servers import serving
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster import gather
from motley.cluster.protocols import openai
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.replicas.protocol import Delta, FinishReason, StreamMessage, TokenLogprob

TOP = 20
ENTRY = TokenLogprob(65, -0.5, tuple((65 + i, -0.5 - i) for i in range(TOP)))
CHUNK = 64  # tokens of a message


def script(tokens: int) -> tuple[StreamMessage, ...]:
    """So many tokens with TOP alternatives each."""
    part = Delta(0, (65,) * CHUNK, "A" * CHUNK, (ENTRY,) * CHUNK)
    last = Delta(0, (65,), "A", (ENTRY,), FinishReason.STOP)
    count = (tokens - 1) // CHUNK
    return (StreamMessage(cached_tokens=0), *(StreamMessage((part,)) for _ in range(count)), StreamMessage((last,)))


LARGE = gather.MOST_LOGPROBS // (1 + TOP)


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
    """Those of all prompts of a call together."""
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    ingress = await ingress_of(folder, LARGE // prompts + CHUNK)
    reply = await asgi.request(ingress.__serve_build_asgi_app__(), "POST", f"/v1/{path}", body)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "answer_too_large", field)
    assert error["message"].startswith(f"{field}: the answer has come to more than {gather.MOST_LOGPROBS}")


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

    written = openai.whole
    monkeypatch.setattr(openai, "whole", whole)
    ingress = await ingress_of(folder, tokens)
    body = {"prompt": "ab", "logprobs": TOP}
    reply = await asgi.request(ingress.__serve_build_asgi_app__(), "POST", "/v1/completions", body)
    assert (reply.status, wrote) == (200, [tokens < LARGE])
    choice = reply.json()["choices"][0]
    count = (tokens - 1) // CHUNK * CHUNK + 1
    assert (len(choice["text"]), len(choice["logprobs"]["top_logprobs"])) == (count, count)


async def test_of_a_prompt_they_are_known_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from motley.cluster import door

    monkeypatch.setattr(door, "MOST_LOGPROBS", 12)
    worker = ScriptedWorker(str(folder), script(1))
    app = (await make_ingress(folder, worker)).__serve_build_asgi_app__()
    body = {"prompt": [65] * 3, "echo": True, "max_tokens": 0}
    assert (await asgi.request(app, "POST", "/v1/completions", {**body, "logprobs": 4})).json()["error"] == {
        "message": "logprobs: of this prompt they are 15, alternatives included; at most 12",
        "type": "invalid_request_error", "param": "logprobs", "code": "answer_too_large",
    }  # fmt: skip
    assert worker.requests == [], "nothing is computed"
