"""Every field of every answer over gRPC is set somewhere, or listed with the reason why it never is."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from grpc_servers import serving
from local_ingress import make_ingress
from scripted_model import Scripted
from scripted_worker import ScriptedWorker
from service_checkpoint import write_tokenizer

from motley.cluster.one_shot_event import create_event
from motley.cluster.protos import inference_pb2 as motley
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2_grpc, vllm_engine_pb2_grpc
from motley.cluster.protos import kserve_pb2 as kserve
from motley.cluster.protos import vllm_common_pb2 as common
from motley.cluster.protos import vllm_engine_pb2 as vllm
from motley.cluster.transport.grpc_server import servicers
from motley.replicas.errors import Unavailable
from motley.replicas.types import (
    Delta,
    FinishReason,
    KvEvent,
    KvEvents,
    ReplicaLoad,
    ReplicaProfile,
    StreamMessage,
    TokenLogprob,
)

_REQUESTS = "of requests: outputs are BYTES, INT32 and FP32"
NEVER_SET = {
    "inference.InferTensorContents.bool_contents": _REQUESTS,
    "inference.InferTensorContents.int64_contents": _REQUESTS,
    "inference.InferTensorContents.uint_contents": _REQUESTS,
    "inference.InferTensorContents.uint64_contents": _REQUESTS,
    "inference.InferTensorContents.fp64_contents": _REQUESTS,
    "inference.InferParameter.double_param": "of requests: answers have whole numbers",
    "inference.InferParameter.uint64_param": "of requests: no seed is so large",
    "inference.ModelInferResponse.InferOutputTensor.parameters": "for shared memory and compression: neither is here",
    "inference.ModelConfig.max_batch_size": "0: shapes have no batch dimension",
    "smg.grpc.common.EngineLoad.age_ms": "0: it is told as it is taken",
    "smg.grpc.common.ProfileResponse.success": "not implemented: the call ends with a status",
    "smg.grpc.common.ProfileResponse.message": "not implemented: the call ends with a status",
    "vllm.grpc.engine.GetModelInfoResponse.supports_vision": "false: models read text",
}
LOAD = ReplicaLoad(1, 1, 2, kv_blocks_free=3, kv_blocks_total=4, max_running=8, prompt_tokens=4, cached_tokens=2,
                   generated_tokens_per_s=1.5)  # fmt: skip
LOGPROB = TokenLogprob(66, -0.5, ((67, -0.25),))
SCRIPT = (
    StreamMessage(cached_tokens=1, prompt_logprobs=(None, LOGPROB), weights=3, contents="a digest"),
    StreamMessage(tuple(Delta(i, (65,), "A", (LOGPROB,)) for i in range(2))),
    StreamMessage(
        (
            Delta(0, (66,), "B", (LOGPROB,), FinishReason.STOP, "B"),
            Delta(1, (66,), "B", (LOGPROB,), FinishReason.STOP, 66),
        )
    ),
)
SAMPLING: dict[str, Any] = {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 7}


class Telling(ScriptedWorker):
    """Has something to say of everything."""

    well = True

    def load(self) -> ReplicaLoad:
        return LOAD

    def profile(self) -> ReplicaProfile:
        profile = super().profile()
        return replace(profile, model=replace(profile.model, architecture="EchoForCausalLM"))

    async def check_health(self) -> None:
        if not self.well:
            raise Unavailable("it is ill")

    async def flush(self, tenant: str | None) -> None:
        await self.check_health()

    async def kv_events(self, tenant: str) -> AsyncGenerator[KvEvents, None]:
        one, two = b"\x01" * 32, b"\x02" * 32
        yield KvEvents((KvEvent(two, (1,) * 16, one), KvEvent(one)), LOAD, lost=True)
        yield KvEvents((), LOAD)


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two replicas, and the address of their ingress."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    path = folder / "tokenizer_config.json"
    named = {"bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    workers = [Telling(str(folder), SCRIPT) for _ in range(2)]
    ingress = await make_ingress(folder, *workers)
    for number, worker in enumerate(workers):  # as Serve's routers tell of them
        ingress.router.live.joined(replace(worker.profile(), replica_id=f"r{number}", pool="cpu"))
    async with serving(ingress) as target:
        yield target, ingress, workers


class Seen(set[str]):
    """Names of fields that were set in some answer."""

    async def look(self, answers: Any) -> Any:
        """Note the fields of one call's responses; return the last of them."""
        if isinstance(answers, grpc.aio.UnaryUnaryCall):
            last = await answers
            self.update(set_fields(last))
            return last
        async for last in answers:
            self.update(set_fields(last))
        return last


def set_fields(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.full_name}.{field.name}"
        for inner in values(value):
            if isinstance(inner, Message):
                yield from set_fields(inner)


def values(value: Any) -> list[Any]:
    if hasattr(value, "values") and not isinstance(value, Message):  # a map
        return list(value.values())
    return [value] if isinstance(value, Message | str | bytes | int | float) else list(value)


def declared() -> set[str]:
    """Return the declared fields of every message that a response can hold."""
    packages = (motley.DESCRIPTOR.package, kserve.DESCRIPTOR.package, vllm.DESCRIPTOR.package)
    known: dict[str, Descriptor] = {}
    left = [rpc.output_type for service in servicers.SERVICES if service.file.package in packages
            for rpc in service.methods]  # fmt: skip
    while left:
        message = left.pop()
        if message.full_name not in known:
            known[message.full_name] = message
            left += [field.message_type for field in message.fields if field.message_type is not None]
    return {f"{name}.{field.name}" for name, message in known.items() if not message.GetOptions().map_entry
            for field in message.fields}  # fmt: skip


async def ask_motley(seen: Seen, channel: grpc.aio.Channel) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    sampling = motley.SamplingParams(**SAMPLING)
    for call in (stub.Complete, stub.CompleteStream):
        await seen.look(call(motley.CompleteRequest(text="ab", request_id="mine", sampling=sampling)))
    await seen.look(stub.Embeddings(motley.EmbeddingsRequest(inputs=[motley.EmbeddingInput(text="a")])))
    await seen.look(stub.Tokenize(motley.TokenizeRequest(text="a")))
    await seen.look(stub.Detokenize(motley.DetokenizeRequest(token_ids=[64])))
    await seen.look(stub.ListModels(motley.ListModelsRequest()))
    await seen.look(stub.GetModel(motley.GetModelRequest(model="echo")))


async def ask_the_thinker(seen: Seen, folder: Path) -> None:
    """Who thinks, and then calls tools."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    scripted = Scripted(folder, "qwen3")
    await scripted(f"<think>\nHm.\n</think>\n\n{call}{call}")
    messages = [motley.ChatMessage(role="user", content="a")]
    request = motley.ChatRequest(messages=messages, tools=[motley.Tool(function=motley.Function(name="f"))])
    async with serving(scripted.ingress) as target, grpc.aio.insecure_channel(target) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for answer in (stub.Chat(request), stub.ChatStream(request)):
            await seen.look(answer)


async def ask_kserve(seen: Seen, channel: grpc.aio.Channel) -> None:
    stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    contents = kserve.InferTensorContents(bytes_contents=[b"ab"])
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    request = kserve.ModelInferRequest(id="mine", inputs=[{**tensor, "contents": contents}])
    raw = kserve.ModelInferRequest(id="mine", inputs=[tensor], raw_input_contents=[b"\x02\0\0\0ab"])
    for one in (request, raw):
        for name, value in SAMPLING.items():
            one.parameters[name].int64_param = value
        await seen.look(stub.ModelInfer(one))
    await seen.look(stub.ModelStreamInfer(iter([request, kserve.ModelInferRequest(id="bad")])))
    for name, asked in (
        ("ServerLive", kserve.ServerLiveRequest()),
        ("ServerReady", kserve.ServerReadyRequest()),
        ("ModelReady", kserve.ModelReadyRequest(name="echo")),
        ("ServerMetadata", kserve.ServerMetadataRequest()),
        ("ModelMetadata", kserve.ModelMetadataRequest(name="echo")),
        ("ModelConfig", kserve.ModelConfigRequest(name="echo")),
        ("RepositoryIndex", kserve.RepositoryIndexRequest()),
    ):
        await seen.look(getattr(stub, name)(asked))


async def ask_vllm(seen: Seen, channel: grpc.aio.Channel, ingress: Any) -> None:
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    for stream in (False, True):
        sampling = vllm.SamplingParams(**SAMPLING)
        await seen.look(stub.Generate(vllm.GenerateRequest(text="ab", stream=stream, sampling_params=sampling)))
    await seen.look(stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[64]))))
    await seen.look(stub.GetModelInfo(vllm.GetModelInfoRequest()))
    loads = await seen.look(stub.GetLoads(vllm.GetLoadsRequest()))
    [_, load] = loads.loads
    assert (load.gen_throughput, load.cache_hit_rate, load.max_running_requests) == (1.5, 0.5, 8)
    assert (load.num_total_reqs, load.token_usage) == (2, 0.25)
    await seen.look(stub.GetTokenizer(common.GetTokenizerRequest()))
    await seen.look(stub.Abort(vllm.AbortRequest(request_ids=["mine"])))
    await seen.look(stub.FlushCache(common.FlushCacheRequest()))
    await seen.look(stub.HealthCheck(vllm.HealthCheckRequest()))
    await seen.look(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
    ingress.vllm._router.num_streams += 1
    stopping, ingress.vllm._router.stopping = ingress.vllm._router.stopping, create_event()
    ingress.vllm._router.drain()
    try:
        await seen.look(stub.GetServerInfo(vllm.GetServerInfoRequest()))
    finally:
        ingress.vllm._router.stopping = stopping
        ingress.vllm._router.num_streams -= 1


async def ask_the_ill(seen: Seen, channel: grpc.aio.Channel) -> None:
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    assert not (await seen.look(stub.HealthCheck(vllm.HealthCheckRequest()))).healthy
    assert not (await seen.look(stub.FlushCache(common.FlushCacheRequest()))).success
    other: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
    await seen.look(other.RepositoryIndex(kserve.RepositoryIndexRequest()))


async def test_every_field_is_set_somewhere_or_said_why_not(served: Any, tmp_path: Path) -> None:
    target, ingress, workers = served
    seen = Seen()
    async with grpc.aio.insecure_channel(target) as channel:
        await ask_motley(seen, channel)
        await ask_kserve(seen, channel)
        await ask_vllm(seen, channel, ingress)
        for worker in workers:
            worker.well = False
        await ask_the_ill(seen, channel)
    await ask_the_thinker(seen, tmp_path)
    assert len(declared()) > 150
    assert declared() - seen == set(NEVER_SET)
