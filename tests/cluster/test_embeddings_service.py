"""Embeddings on a real engine, over OpenAI's HTTP and motley.v1: the offline engine's own vectors."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
import service_checkpoint
from bad_requests import refused
from local_ingress import make_ingress

from motley.client import AsyncClient, Client
from motley.cluster.api.common import embedding
from motley.cluster.api.openai import openai_embeddings
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport.grpc_server.servicers import add_inference
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.sampling_params import SamplingParams

PATH = "/v1/embeddings"
MAX_LEN = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_checkpoint.build(tmp_path_factory.mktemp("embeddings"), max_len=MAX_LEN)


@pytest.fixture(scope="module")
async def worker(model: Path) -> AsyncIterator[Worker]:
    worker = Worker(str(model), EngineConfig(dtype="float32", threads=1), name="tiny")
    yield worker
    await worker.close()


@pytest.fixture(scope="module")
async def tiny_ingress(model: Path, worker: Worker) -> Any:
    return await make_ingress(model, worker)


@pytest.fixture(scope="module")
def post(tiny_ingress: Any) -> Callable[..., Any]:
    return partial(asgi.request, tiny_ingress.__serve_build_asgi_app__(), "POST")


@pytest.fixture(scope="module")
async def target(tiny_ingress: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_inference(tiny_ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture(scope="module")
async def stub(target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, dtype="float32", threads=1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_the_engines_own_vectors(post: Any, engine: Engine, pooling: str) -> None:
    texts = ["with open(path) as file:", "ä"]
    reply = (await post(PATH, {"input": texts, "pooling": pooling, "model": "tiny", "user": "me"})).json()
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert [item["index"] for item in reply["data"]] == [0, 1]
    for item, expected in zip(reply["data"], engine.embed(texts, pooling=pooling), strict=True):
        assert item["object"] == "embedding"
        assert item["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert sum(value**2 for value in item["embedding"]) == pytest.approx(1)
    tokens = sum(len(text.encode()) for text in texts)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_holds_the_same_as_little_endian_fp32(post: Any) -> None:
    plain = (await post(PATH, {"input": "abc"})).json()["data"][0]["embedding"]
    packed = (await post(PATH, {"input": "abc", "encoding_format": "base64"})).json()["data"][0]["embedding"]
    data = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(plain, abs=1e-7)


async def test_text_and_its_ids_are_the_same_input(post: Any, engine: Engine) -> None:
    ids = engine.generate("abc", SamplingParams(max_tokens=1))[0].prompt_ids
    inputs = ["abc", ids, [ids], ["abc"]]
    vectors = [(await post(PATH, {"input": given})).json()["data"][0]["embedding"] for given in inputs]
    assert all(vector == pytest.approx(vectors[0], abs=1e-6) for vector in vectors)


async def test_an_input_may_fill_the_context_but_not_more(post: Any) -> None:
    assert (await post(PATH, {"input": "a" * MAX_LEN})).status == 200
    error = refused(await post(PATH, {"input": "a" * (MAX_LEN + 1)}), 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": "a\ud800"}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "user": 7}, "user"),
        ({"input": "a", "priority": "high"}, "priority"),
    ],
)
async def test_refusals_name_the_field(post: Any, worker: Worker, body: dict[str, Any], param: str) -> None:
    assert refused(await post(PATH, body), 400)["param"] == param
    assert worker.num_streams == 0


async def test_an_unknown_model_is_not_found(post: Any) -> None:
    assert refused(await post(PATH, {"input": "a", "model": "gpt-9"}), 404)["param"] == "model"


@pytest.mark.parametrize("normalize", [None, True, False])
async def test_the_same_over_grpc(stub: Any, engine: Engine, normalize: bool | None) -> None:
    ids = engine.generate("abc", SamplingParams(max_tokens=1))[0].prompt_ids
    inputs = [pb.EmbeddingInput(text="with open"), pb.EmbeddingInput(token_ids=pb.TokenIds(ids=ids))]
    request = pb.EmbeddingsRequest(inputs=inputs, pooling=pb.POOLING_MEAN, normalize=normalize)
    reply = await stub.Embeddings(request)
    expected = engine.embed(["with open", "abc"], pooling="mean", normalize=normalize is not False)
    for got, vector in zip(reply.embeddings, expected, strict=True):
        assert list(got.values) == pytest.approx(vector.tolist(), abs=1e-5)
    assert (reply.model, reply.usage.prompt_tokens) == ("tiny", len("with open") + len(ids))


async def test_by_our_own_client(target: str, engine: Engine) -> None:
    expected = engine.embed(["with open"]).tolist()
    async with AsyncClient(target) as client:
        assert (await client.embed(["with open"]))[0] == pytest.approx(expected[0], abs=1e-5)

    def blocking() -> list[list[float]]:
        with Client(target) as client:
            return client.embed(["with open"])

    assert (await asyncio.to_thread(blocking))[0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (pb.EmbeddingsRequest(), "inputs"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput()] * 2049), "inputs"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput()]), "inputs[0]"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput(text="")]), "inputs[0]"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput(text="a" * 65)]), "inputs[0]"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput(text="a")], pooling=7), "pooling"),
        (pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput(text="a")], priority=-(2**31)), "priority"),
    ],
)
async def test_refusals_over_grpc_name_the_field(stub: Any, request_: pb.EmbeddingsRequest, names: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Embeddings(request_)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details().startswith(f"{names}: ")


@pytest.mark.parametrize(("inputs", "beside"), [(2, False), (128, True)])
async def test_large_answers_are_written_in_a_thread(
    post: Any, monkeypatch: pytest.MonkeyPatch, inputs: int, beside: bool
) -> None:
    """Streams would wait for them."""
    wrote: list[bool] = []

    def whole(*arguments: Any) -> Any:
        wrote.append(threading.current_thread() is not threading.main_thread())
        return written(*arguments)

    written = openai_embeddings.embeddings_body
    monkeypatch.setattr(openai_embeddings, "embeddings_body", whole)
    reply = await post(PATH, {"input": ["abc"] * inputs})
    assert reply.status == 200
    found = reply.json()["data"]
    assert [one["index"] for one in found] == list(range(inputs))
    assert (len({tuple(one["embedding"]) for one in found}), wrote) == (1, [beside])


async def test_a_thousand_inputs_in_one_call(post: Any, stub: Any) -> None:
    """Clients that cut long lists into calls send as many."""
    reply = await post(PATH, {"input": [f"ab {number}" for number in range(1000)], "encoding_format": "base64"})
    assert reply.status == 200
    assert len(reply.json()["data"]) == 1000
    refused = await post(PATH, {"input": ["a"] * 2049})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "input")
    inputs = [pb.EmbeddingInput(text="ab")] * 1000
    assert len((await stub.Embeddings(pb.EmbeddingsRequest(inputs=inputs))).embeddings) == 1000


async def test_more_numbers_than_an_answer_may_have(post: Any, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the first vector tells."""
    width = len((await post(PATH, {"input": "a"})).json()["data"][0]["embedding"])
    monkeypatch.setattr(embedding, "MAX_EMBEDDING_VALUES", 3 * width)
    assert (await post(PATH, {"input": ["a"] * 3})).status == 200
    refused = (await post(PATH, {"input": ["a"] * 4})).json()["error"]
    assert (refused["param"], refused["code"]) == ("input", "answer_too_large")
    assert refused["message"].endswith("give 3 inputs at most")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Embeddings(pb.EmbeddingsRequest(inputs=[pb.EmbeddingInput(text="a")] * 4))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details().startswith("inputs: ")
