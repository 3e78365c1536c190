"""Ids that clients give their requests are in the access log, whatever the protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from echo_worker import EchoWorker
from grpc_servers import serving
from local_ingress import make_ingress

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport import access_log


@pytest.fixture
def log_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    access_log.write_to(None)


async def test_labels_are_in_the_line_of_their_call(folder: Path, log_folder: Path) -> None:
    """Labels are as the client wrote them, in ASCII and on one line; those that are too long by their beginning."""
    ingress = await make_ingress(folder, EchoWorker(str(folder)), ingress_config=IngressConfig(log_folder=log_folder))
    app = ingress.__serve_build_asgi_app__()
    odd = 'two\nlines, "é" and \x1b[31m'
    own = {"user": odd, "safety_identifier": "s" * 10_000, "prompt_cache_key": "k", "metadata": {odd: odd, "b": "c"}}
    chat = {"messages": [{"role": "user", "content": "nobody's business"}], "max_tokens": 1, **own}
    assert (await asgi.request(app, "POST", "/v1/chat/completions", chat)).status == 200
    for path, body in (
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "user": "me"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -2, "user": "refused"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "user": None}),
        ("/v1/embeddings", {"input": ["a", "b"], "user": "embeds"}),
        ("/v1/chat/completions", {**chat, "user": 7}),
        ("/v1/chat/completions", {**chat, "metadata": {"a": "x" * 513}}),
    ):
        await asgi.request(app, "POST", path, body)
    access_log._lines._write()
    written = (log_folder / "access.log").read_text()
    assert written.isascii()
    assert "\x1b" not in written
    assert "nobody's business" not in written
    lines = [json.loads(line) for line in written.splitlines()]
    cut = {**own, "safety_identifier": "s" * access_log.MAX_LABEL_CHARS}
    assert [line["labels"] for line in lines] == [
        cut, {"user": "me"}, {"user": "refused"}, {}, {"user": "embeds"}, {}, {},
    ]  # fmt: skip
    two, one = lines[1], lines[3]
    assert [(len(line["requests"]), line["prompt_tokens"]) for line in (two, one)] == [(2, 2), (1, 1)]


async def test_over_every_protocol(folder: Path, log_folder: Path) -> None:
    ingress = await make_ingress(folder, EchoWorker(str(folder)), ingress_config=IngressConfig(log_folder=log_folder))
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"ab"]}}
    ids = vllm_engine_pb2.TokenizedInput(input_ids=[65])
    few = pb.SamplingParams(max_tokens=2)
    chat = pb.ChatMessage(role="user", content="a")
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        motley: Any = inference_pb2_grpc.InferenceStub(channel)
        kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        await motley.Complete(pb.CompleteRequest(text="ab", request_id="one", sampling=few))
        await motley.Chat(pb.ChatRequest(messages=[chat], request_id="two", sampling=few))
        await motley.Embeddings(pb.EmbeddingsRequest(inputs=[{"text": "a"}, {"text": "b"}], request_id="three"))
        infers = [kserve_pb2.ModelInferRequest(id=f"{number}", inputs=[tensor]) for number in range(12)]
        await kserve.ModelInfer(infers[0])
        assert len([answer async for answer in kserve.ModelStreamInfer(iter(infers))]) >= len(infers)
        async for _ in vllm.Generate(vllm_engine_pb2.GenerateRequest(request_id="four", tokenized=ids)):
            pass
        await vllm.Embed(vllm_engine_pb2.EmbedRequest(request_id="five\n", tokenized=ids))
        with pytest.raises(grpc.aio.AioRpcError):
            await motley.Complete(pb.CompleteRequest(text="", request_id="refused"))
    app = ingress.__serve_build_asgi_app__()
    body = {"id": "six", "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["ab"]}]}
    assert (await asgi.request(app, "POST", "/v2/models/echo/infer", body)).status == 200
    assert (await asgi.request(app, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
    access_log._lines._write()
    lines = [json.loads(line) for line in (log_folder / "access.log").read_text().splitlines()]
    found = [(line["call"].split("/")[-1], line["request_ids"]) for line in lines]
    assert found == [
        ("Complete", ["one"]), ("Chat", ["two"]), ("Embeddings", ["three"]), ("ModelInfer", ["0"]),
        ("ModelStreamInfer", [f"{number}" for number in range(access_log.MAX_REQUESTS)]), ("Generate", ["four"]),
        ("Embed", ["five"]), ("Complete", ["refused"]), ("infer", ["six"]), ("completions", []),
    ]  # fmt: skip
