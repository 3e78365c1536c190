"""Every protocol that has a place for it says which weights an answer was made with; and if they changed midway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asgi
import openapi_conformance
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.client import Resume, complete_request
from motley.cluster.api.kserve import kserve_messages
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import kserve_pb2 as kserve
from motley.cluster.transport.caller import Caller
from motley.replicas.types import Delta, FinishReason, StreamMessage

OLD, NEW = pb.Weights(version=0, contents="aa"), pb.Weights(version=1, contents="bb")
END = Delta(0, (67,), "d", finish_reason=FinishReason.STOP)
MIXED = [
    StreamMessage(cached_tokens=1, weights=0, contents="aa"),
    StreamMessage((Delta(0, (65,), "b"),)),
    StreamMessage((Delta(0, (66,), "c"),), weights=1, contents="bb"),
    StreamMessage((END,)),
]
ONE = [StreamMessage((END,), cached_tokens=1, weights=1, contents="bb")]
CALLER = Caller()


async def ingress(folder: Path, script: list[StreamMessage]) -> Any:
    return await make_ingress(folder, ScriptedWorker(str(folder), script))


async def test_motley_says_it_of_the_whole(folder: Path) -> None:
    for script, told in ((MIXED, [OLD, NEW]), (ONE, [NEW])):
        answer = await (await ingress(folder, script)).motley.complete(pb.CompleteRequest(text="abc"), CALLER)
        assert list(answer.weights) == told


async def test_motley_says_it_where_it_begins_in_a_stream(folder: Path) -> None:
    chunks = (await ingress(folder, MIXED)).motley.complete_stream(pb.CompleteRequest(text="abc"), CALLER)
    found = [(chunk.choices[0].text, chunk.weights) async for chunk in chunks if chunk.choices]
    assert [(text, weights.contents) for text, weights in found] == [("b", "aa"), ("c", "bb"), ("d", "")]


async def test_embeddings_say_it_once(folder: Path) -> None:
    served = await make_ingress(folder, EchoWorker(str(folder)))
    inputs = [pb.EmbeddingInput(text=text) for text in ("a", "b")]
    answer = await served.motley.embeddings(pb.EmbeddingsRequest(inputs=inputs), CALLER)
    assert list(answer.weights) == [pb.Weights(contents="echo")]


def infer(*, streaming: bool) -> Any:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    flag = {"name": "streaming", "datatype": "BOOL", "shape": [1]}
    inputs = [
        kserve.ModelInferRequest.InferInputTensor(contents={"bytes_contents": [b"abc"]}, **text),
        kserve.ModelInferRequest.InferInputTensor(contents={"bool_contents": [streaming]}, **flag),
    ]
    return kserve_messages.infer_request(kserve.ModelInferRequest(inputs=inputs))


async def test_kserve_says_it_in_parameters(folder: Path) -> None:
    for script, told in ((MIXED, "0:aa,1:bb"), (ONE, "1:bb")):
        answer = await (await ingress(folder, script)).kserve.infer(infer(streaming=False), CALLER)
        assert answer.parameters["weights"] == told


async def test_kserve_says_it_where_it_begins_in_a_stream_and_all_at_the_end(folder: Path) -> None:
    responses = (await ingress(folder, MIXED)).kserve.infer_stream(infer(streaming=True), CALLER)
    assert [one.parameters.get("weights") async for one in responses] == ["0:aa", "1:bb", "0:aa,1:bb"]


async def test_kserve_over_http_says_it_as_described(folder: Path) -> None:
    call = openapi_conformance.caller((await ingress(folder, MIXED)).__serve_build_asgi_app__())
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
    answer = (await call("POST", "/v2/models/echo/infer", {"inputs": [text]})).json()
    assert answer["parameters"]["weights"] == "0:aa,1:bb"


async def test_openai_says_it_in_the_fingerprint(folder: Path) -> None:
    app = (await ingress(folder, MIXED)).__serve_build_asgi_app__()
    body = {"prompt": "abc", "max_tokens": 100}
    whole = (await asgi.request(app, "POST", "/v1/completions", body)).json()["system_fingerprint"]
    events = (await asgi.request(app, "POST", "/v1/completions", {**body, "stream": True})).events()
    told = [event["system_fingerprint"] for event in events[:-1] if event["choices"] and event["choices"][0]["text"]]
    assert whole == "fp_echo-0-1"
    assert told == ["fp_echo", "fp_echo-0-1", "fp_echo-0-1"]


def chunk(token: int, weights: pb.Weights | None = None) -> pb.CompletionChunk:
    return pb.CompletionChunk(choices=[pb.Choice(token_ids=[token])], weights=weights)


@pytest.mark.parametrize("after", [OLD, NEW])
def test_a_client_that_asks_for_the_rest_says_it_if_it_is_of_others(after: pb.Weights) -> None:
    resume = Resume(complete_request("abc"))
    assert resume.take(chunk(1, OLD)) == [chunk(1, OLD)]
    assert resume.take(chunk(2)) == [chunk(2)]
    resume.take(pb.CompletionChunk(started=pb.Started(seed=1)))
    resume.take(pb.CompletionChunk(started=pb.Started(seed=1)))
    ended = pb.CompletionChunk(weights=after)
    assert resume.take(ended) == [], "nothing of it is made with them so far"
    assert resume.take(chunk(3)) == [chunk(3, None if after == OLD else after)]
    assert resume.take(chunk(4)) == [chunk(4)]
