"""Clients over gRPC: plain stubs in a process of their own, our client, reflection, health."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serve_process import Served

from motley.client import AsyncClient, Client, complete_request
from motley.cluster.protos import inference_pb2 as pb

# Nothing of ours but the generated code: what any client in any language would hold.
FOREIGN = """
import sys, grpc
from motley.cluster.protos import inference_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[1]))
sampling = pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
whole = stub.Complete(pb.CompleteRequest(text="abc", sampling=sampling))
chunks = list(stub.CompleteStream(pb.CompleteRequest(text="abc", sampling=sampling)))
assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
assert [i for chunk in chunks for c in chunk.choices for i in c.token_ids] == list(whole.choices[0].token_ids)
assert len(whole.choices[0].logprobs) == 24 and whole.usage == chunks[-1].usage
messages = [pb.ChatMessage(role="user", content="Hello")]
chat = stub.Chat(pb.ChatRequest(messages=messages, sampling=sampling))
stream = list(stub.ChatStream(pb.ChatRequest(messages=messages, sampling=sampling)))
assert "".join(c.text for chunk in stream for c in chunk.choices) == chat.choices[0].text
ids = stub.Tokenize(pb.TokenizeRequest(text="abc")).token_ids
assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "abc"
assert [m.name for m in stub.ListModels(pb.ListModelsRequest()).models] == ["tiny"]
assert stub.GetModel(pb.GetModelRequest(model="tiny")).max_model_len == 65536
assert not any(name.startswith(("ray", "torch", "fastapi")) for name in sys.modules)
print("all of motley.v1 answers")
"""


def test_stubs_in_a_process_of_their_own(service: Served) -> None:
    result = subprocess.run([sys.executable, "-c", FOREIGN, service.grpc], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "all of motley.v1 answers", result.stderr


def test_our_client(service: Served) -> None:
    with Client(service.grpc) as client:
        whole = client.complete("abc", max_tokens=16, seed=3)
        chunks = list(client.stream("abc", max_tokens=16, seed=3))
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole.choices[0].text
        assert client.detokenize(client.tokenize("abc")) == "abc"
        assert [model.name for model in client.models()] == ["tiny"]
        assert client.chat([("user", "Hello")], max_tokens=4).usage.completion_tokens <= 4


async def test_our_asynchronous_client(service: Served) -> None:
    async with AsyncClient(service.grpc) as client:
        whole = await client.complete("abc", max_tokens=16, seed=3)
        texts = [c.text async for chunk in client.stream("abc", max_tokens=16, seed=3) for c in chunk.choices]
        assert "".join(texts) == whole.choices[0].text


@pytest.mark.parametrize("taken", [0, 1, 7, 23, 24])
def test_a_resumed_stream_goes_on_as_it_would_have(service: Served, taken: int) -> None:
    sampling = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "ignore_eos": True}
    with Client(service.grpc) as client:
        whole = client.complete("abc", seed=11, **sampling).choices[0]
        stub = client.stub
        request = complete_request("abc", {"seed": 11, **sampling})
        request.output_ids.append(pb.TokenIds(ids=whole.token_ids[:taken]))
        rest = stub.Complete(request).choices[0]
        assert list(rest.token_ids) == list(whole.token_ids[taken:])
        assert whole.text.endswith(rest.text)


def test_reflection_names_our_services(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"motley.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())
        methods = database.FindFileContainingSymbol("motley.v1.Inference").service[0].method
        assert "CompleteStream" in [method.name for method in methods]
        for reply in reflected(channel, [b"\x3a\x00", b"\x3a\x00"]):
            assert b"grpc.reflection.v1.ServerReflection" in reply
            assert b"motley.v1.Inference" in reply


def reflected(channel: grpc.Channel, requests: list[bytes]) -> list[bytes]:
    """Return what a client of grpc.reflection.v1 gets: bytes for bytes, as grpcio-reflection has no stub for it."""
    call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    return list(call(iter(requests), timeout=30))


def test_health(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="motley.v1.Inference"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
