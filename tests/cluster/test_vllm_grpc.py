"""vllm.grpc.engine on the whole ingress, behind a real gRPC server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from bad_requests import label
from echo_worker import EchoWorker
from grpc_servers import serving
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.vllm import vllm_rpcs
from motley.cluster.api.vllm.tokenizer_archive import pack_tokenizer
from motley.cluster.api.vllm.vllm_protocol import VllmProtocol
from motley.cluster.api.vllm.vllm_request import parse_generate_request, shortest_decimal
from motley.cluster.protos import vllm_common_pb2 as common
from motley.cluster.protos import vllm_engine_pb2 as pb
from motley.cluster.protos import vllm_engine_pb2_grpc
from motley.cluster.transport.caller import Caller
from motley.replicas.errors import EngineFault, NotFound
from motley.replicas.types import Delta, FinishReason, StreamMessage, TokenLogprob

NAMED = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
async def vllm(grpc_target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(*ids: int, sampling: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**({"max_tokens": 5} | (sampling or {})))
    tokenized = pb.TokenizedInput(input_ids=ids or (64, 65, 66))
    given = {"tokenized": tokenized} if "text" not in fields else {}
    return pb.GenerateRequest(sampling_params=params, **given, **fields)


async def read(call: Any) -> list[Any]:
    return [response async for response in call]


async def rest(call: Any) -> list[Any]:
    """Read the rest of a call that was read from before."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def refused(call: Any, code: grpc.StatusCode = NAMED) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    assert caught.value.code() == code, caught.value.details()
    return str(caught.value.details())


async def test_without_stream_only_the_whole(vllm: Any) -> None:
    [answer] = await read(vllm.Generate(ask(request_id="1")))
    whole = answer.complete
    assert list(whole.output_ids) == [64, 65, 66, 64, 65]
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens, whole.index) == ("length", 3, 5, 0)
    assert whole.WhichOneof("matched_stop") is None


async def test_text_is_tokenized_here(vllm: Any) -> None:
    [answer] = await read(vllm.Generate(ask(text="abc")))
    assert list(answer.complete.output_ids) == [64, 65, 66, 64, 65]


async def test_chunks_and_then_the_whole(vllm: Any) -> None:
    answers = await read(vllm.Generate(ask(stream=True, sampling={"n": 2})))
    for index in range(2):
        chunks = [a.chunk for a in answers if a.HasField("chunk") and a.chunk.index == index]
        [whole] = [a.complete for a in answers if a.HasField("complete") and a.complete.index == index]
        assert [i for chunk in chunks for i in chunk.token_ids] == list(whole.output_ids) == [64, 65, 66, 64, 65]
        assert sum(chunk.completion_tokens for chunk in chunks) == whole.completion_tokens
        assert len(chunks) > 1
    last_chunk = max(i for i, answer in enumerate(answers) if answer.HasField("chunk"))
    assert last_chunk < max(i for i, answer in enumerate(answers) if answer.HasField("complete"))


TOP = ((66, -0.5), (67, -1.5))
SCRIPT = (
    StreamMessage(cached_tokens=2, prompt_logprobs=(None, TokenLogprob(66, -0.25, TOP[:1]))),
    StreamMessage((Delta(0, (65,), "A", (TokenLogprob(65, -1.0, TOP),)),)),
    StreamMessage((Delta(0, (66,), "B", (TokenLogprob(66, -0.5, TOP),), FinishReason.STOP, "B"),)),
)


@pytest.fixture
def scripted(folder: Path) -> Callable[..., Any]:
    async def protocol(*messages: StreamMessage, error: Exception | None = None) -> tuple[VllmProtocol, Any]:
        worker = ScriptedWorker(str(folder), messages, error)
        return (await make_ingress(folder, worker)).vllm, worker

    return protocol


async def test_logprobs(scripted: Callable[..., Any]) -> None:
    protocol, _ = await scripted(*SCRIPT)
    request = ask(65, 66, stream=True, sampling={"logprobs": 2, "prompt_logprobs": 1})
    *parts, last = [answer async for answer in protocol.generate(request, Caller())]
    chunks = [part.chunk for part in parts]
    assert [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs] == [-1.0, -0.5]
    assert [list(top.token_ids) for chunk in chunks for top in chunk.output_logprobs.top_logprobs] == [[66, 67]] * 2
    prompt = chunks[0].input_logprobs
    assert not prompt.token_logprobs[0].HasField("value")
    assert prompt.token_logprobs[1].value == -0.25
    assert list(prompt.token_ids) == [65, 66]
    assert [list(top.values) for top in prompt.top_logprobs] == [[], [-0.5]]
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    assert list(last.complete.output_ids) == [65, 66]
    assert not last.complete.HasField("output_logprobs"), "the chunks have them"
    assert not last.complete.HasField("input_logprobs")
    assert (last.complete.matched_stop_str, last.complete.finish_reason) == ("B", "stop")
    assert last.complete.cached_tokens == chunks[0].cached_tokens == 2


async def test_the_whole_has_all_logprobs(scripted: Callable[..., Any]) -> None:
    protocol, _ = await scripted(*SCRIPT)
    request = ask(65, 66, sampling={"logprobs": 2, "prompt_logprobs": 1})
    [whole] = [answer.complete async for answer in protocol.generate(request, Caller())]
    assert list(whole.output_logprobs.token_logprobs) == [-1.0, -0.5]
    assert [list(top.token_ids) for top in whole.output_logprobs.top_logprobs] == [[66, 67]] * 2
    assert [entry.value for entry in whole.input_logprobs.token_logprobs] == [0.0, -0.25]


async def test_a_choice_without_a_chunk_has_the_prompts_logprobs(scripted: Callable[..., Any]) -> None:
    ended = StreamMessage((Delta(0, (), "", None, FinishReason.STOP, 3),))
    protocol, _ = await scripted(SCRIPT[0], ended)
    request = ask(65, 66, stream=True, sampling={"prompt_logprobs": 1})
    [whole] = [answer.complete async for answer in protocol.generate(request, Caller())]
    assert [entry.value for entry in whole.input_logprobs.token_logprobs] == [0.0, -0.25]


async def test_every_sampling_parameter_arrives(scripted: Callable[..., Any]) -> None:
    protocol, worker = await scripted(*SCRIPT)
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.3, "presence_penalty": -0.2,
        "repetition_penalty": 1.1, "max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [7],
        "skip_special_tokens": True, "ignore_eos": True, "n": 1, "logprobs": 2, "prompt_logprobs": 0, "seed": -5,
        "logit_bias": {3: -1.5}, "regex": "[ab]+", "spaces_between_special_tokens": True,
        "include_stop_str_in_output": True, "grammar_from_first_token": True,
    }  # fmt: skip
    [_ async for _ in protocol.generate(pb.GenerateRequest(text="ab", sampling_params=given), Caller())]
    sampling = worker.requests[0].sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "n", "seed"):
        assert getattr(sampling, name) == given[name], name
    for name in ("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs"):
        assert getattr(sampling, name) == given[name], name
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("x",), (7,), {3: -1.5})
    assert sampling.skip_special_tokens
    assert sampling.grammar is not None
    assert sampling.grammar.source == "[ab]+"


def test_what_is_absent_is_neutral() -> None:
    """Whatever the checkpoint says: a client has no other way to say "none"."""
    sampling = parse_generate_request(pb.GenerateRequest(text="a")).sampling
    neutral = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "n": 1}
    assert neutral.items() <= sampling.items()
    assert "max_tokens" not in sampling


@pytest.mark.parametrize("value", [0.7, 0.1, 1e-30, 3.4e38, 1 / 3, 0.0, -0.25, 5])
def test_numbers_of_32_bits_mean_what_was_written(value: float) -> None:
    carried = pb.SamplingParams(min_p=value).min_p
    assert pb.SamplingParams(min_p=shortest_decimal(carried)).min_p == carried
    if value != 1 / 3:
        assert shortest_decimal(carried) == value


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"json_object": True}, "json_object"),
    ({"json_schema": '{"type": "object"}'}, "json_schema"),
    ({"regex": "a+"}, "regex"),
    ({"grammar": 'root ::= "a"'}, "ebnf"),
    ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, "ebnf"),
    ({"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "kind"), CONSTRAINTS, ids=label)
def test_constraints(fields: dict[str, Any], kind: str) -> None:
    grammar = parse_generate_request(ask(sampling=fields)).sampling["grammar"]
    assert grammar is not None
    assert grammar.kind == kind


BAD: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "input: "),
    (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids: "),
    (pb.GenerateRequest(text=""), "text: "),
    (ask(259), "tokenized.input_ids: "),
    (ask(2**32 - 1), "tokenized.input_ids: "),
    (ask(*[1] * 512), "tokenized.input_ids: "),
    (ask(text="x" * 600), "text: "),
    (ask(sampling={"temperature": -0.5}), "sampling_params.temperature: -0.5 "),
    (ask(sampling={"temperature": float("nan")}), "sampling_params.temperature: "),
    (ask(sampling={"top_p": 1.5}), "sampling_params.top_p: 1.5 "),
    (ask(sampling={"top_p": float("nan")}), "sampling_params.top_p: "),
    (ask(sampling={"top_k": 2**31}), "sampling_params.top_k: "),
    (ask(sampling={"min_p": 1.1}), "sampling_params.min_p: "),
    (ask(sampling={"frequency_penalty": 2.1}), "sampling_params.frequency_penalty: "),
    (ask(sampling={"presence_penalty": -2.1}), "sampling_params.presence_penalty: "),
    (ask(sampling={"repetition_penalty": float("inf")}), "sampling_params.repetition_penalty: "),
    (ask(sampling={"repetition_penalty": -1}), "sampling_params.repetition_penalty: "),
    (ask(sampling={"max_tokens": 0}), "sampling_params.max_tokens: "),
    (ask(sampling={"min_tokens": 6}), "sampling_params.min_tokens: "),
    (pb.GenerateRequest(text="a", sampling_params={"min_tokens": 600}), "sampling_params.min_tokens: "),
    (ask(sampling={"stop": [""]}), "sampling_params.stop: "),
    (ask(sampling={"stop": ["a"] * 65}), "sampling_params.stop: "),
    (ask(sampling={"stop_token_ids": [259]}), "sampling_params.stop_token_ids: "),
    (ask(sampling={"n": 129}), "sampling_params.n: "),
    (ask(sampling={"logprobs": -1}), "sampling_params.logprobs: "),
    (ask(sampling={"logprobs": 21}), "sampling_params.logprobs: "),
    (ask(sampling={"prompt_logprobs": -1}), "sampling_params.prompt_logprobs: "),
    (ask(sampling={"logit_bias": {-1: 1.0}}), "sampling_params.logit_bias: "),
    (ask(sampling={"logit_bias": {300: 1.0}}), "sampling_params.logit_bias: "),
    (ask(sampling={"truncate_prompt_tokens": 0}), "sampling_params.truncate_prompt_tokens: "),
    (ask(sampling={"truncate_prompt_tokens": 10**6}), "sampling_params.truncate_prompt_tokens: "),
    (ask(sampling={"json_schema": "{"}), "sampling_params.json_schema: "),
    (ask(sampling={"structural_tag": "[]"}), "sampling_params.structural_tag: "),
    (ask(sampling={"choice": pb.ChoiceConstraint()}), "sampling_params.choice: "),
    (ask(kv_transfer_params=pb.KvTransferParams(remote_host="x")), "kv_transfer_params "),
    (ask(kv_transfer_params_json="{}"), "kv_transfer_params_json "),
    (ask(mm_inputs=pb.MultimodalInputs()), "mm_inputs "),
    (ask(extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs "),
    (ask(media_refs=pb.MediaRefs()), "media_refs "),
    (ask(data_parallel_rank=1), "data_parallel_rank: "),
    (ask(data_parallel_rank=-1), "data_parallel_rank: "),
]


@pytest.mark.parametrize(("request_", "begins"), BAD, ids=label)
async def test_bad_fields_are_named(vllm: Any, request_: pb.GenerateRequest, begins: str) -> None:
    assert (await refused(vllm.Generate(request_))).startswith(begins)


def test_every_field_of_the_request_is_decided() -> None:
    """Refused by name above, or read."""
    source = Path(parse_generate_request.__code__.co_filename).read_text()
    names = {*pb.GenerateRequest.DESCRIPTOR.fields_by_name, *pb.SamplingParams.DESCRIPTOR.fields_by_name}
    told = {"stream", "spaces_between_special_tokens", "include_stop_str_in_output", "grammar_from_first_token"}
    constraints = {field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    assert {name for name in names - told - constraints if name not in source} == set()


async def test_unknown_fields_are_refused(vllm: Any) -> None:
    request = pb.GenerateRequest.FromString(ask().SerializeToString() + b"\xf8\x3f\x01")
    assert "field 1023" in await refused(vllm.Generate(request))


async def test_bytes_that_do_not_parse(grpc_target: str) -> None:
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        for rpc in service.methods:
            make = channel.unary_stream if rpc.server_streaming else channel.unary_unary
            call = make(f"/{service.full_name}/{rpc.name}")(b"\xff\xff\xff")
            assert "do not parse" in await refused(call), rpc.name


async def test_abort_ends_a_stream_with_what_there_is(vllm: Any, worker: EchoWorker) -> None:
    """Both of those that share the id, and no other."""
    calls = [vllm.Generate(ask(stream=True, request_id=i, sampling={"max_tokens": 500})) for i in ("a", "a", "b")]
    for call in calls:
        assert (await call.read()).HasField("chunk")
    await vllm.Abort(pb.AbortRequest(request_ids=["a", "not there"]))
    for call in calls[:2]:
        answers = await rest(call)
        whole = answers[-1].complete
        assert whole.finish_reason == "abort"
        assert 1 <= len(whole.output_ids) < 500
        assert 1 + sum(answer.chunk.completion_tokens for answer in answers) == whole.completion_tokens
    assert (await rest(calls[2]))[-1].complete.finish_reason == "length"
    assert worker.load().running == 0


async def test_an_empty_id_aborts_nothing(vllm: Any) -> None:
    assert (await refused(vllm.Abort(pb.AbortRequest(request_ids=["a", ""])))).startswith("request_ids: ")


async def test_abort_reaches_only_the_tenants_own(ingress: Any) -> None:
    protocol = ingress.vllm
    request = ask(request_id="same", stream=True, sampling={"max_tokens": 500})
    streams = {tenant: protocol.generate(request, Caller(tenant=tenant)) for tenant in ("one", "two")}
    for stream in streams.values():
        await anext(stream)
    protocol.abort(pb.AbortRequest(request_ids=["same"]), Caller(tenant="one"))
    reasons = {tenant: [a async for a in stream][-1].complete.finish_reason for tenant, stream in streams.items()}
    assert reasons == {"one": "abort", "two": "length"}


async def test_abort_reaches_every_ingress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy sends it to any one of them."""
    ingresses = [await make_ingress(folder, EchoWorker(str(folder), step_s=0.005)) for _ in range(2)]

    async def tell(method: str, *args: Any) -> None:
        for each in ingresses:
            await getattr(each, method)(*args)

    monkeypatch.setattr(vllm_rpcs, "broadcast_to_ingresses", tell)
    request = ask(request_id="one", stream=True, sampling={"max_tokens": 500})
    stream = ingresses[1].vllm.generate(request, Caller(tenant=""))
    await anext(stream)
    async with serving(ingresses[0]) as target, grpc.aio.insecure_channel(target) as channel:
        await vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(pb.AbortRequest(request_ids=["one"]))
    assert [answer async for answer in stream][-1].complete.finish_reason == "abort"


async def test_abort_of_a_prompt_that_is_still_read(ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read_on = asyncio.Event(), asyncio.Event()
    admit = ingress.admitter.admit

    async def slow(*args: Any) -> Any:
        reading.set()
        await read_on.wait()
        return await admit(*args)

    monkeypatch.setattr(ingress.admitter, "admit", slow)
    call = asyncio.create_task(read(ingress.vllm.generate(ask(request_id="one", stream=True), Caller())))
    await reading.wait()
    ingress.vllm.abort(pb.AbortRequest(request_ids=["one"]), Caller())
    read_on.set()
    [answer] = await call
    assert (answer.complete.finish_reason, answer.complete.completion_tokens) == ("abort", 0)


async def test_cancelling_stops_the_sequence(vllm: Any, worker: EchoWorker) -> None:
    call = vllm.Generate(ask(stream=True, request_id="x", sampling={"max_tokens": 500}))
    await call.read()
    call.cancel()
    for _ in range(500):
        if not worker.load().running:
            break
        await asyncio.sleep(0.01)
    assert worker.load().running == 0


async def test_a_stream_that_fails_has_a_status(scripted: Callable[..., Any]) -> None:
    protocol, _ = await scripted(*SCRIPT[:2], error=EngineFault("it broke"))
    with pytest.raises(EngineFault):
        [_ async for _ in protocol.generate(ask(), Caller())]


async def test_what_is_told_of_model_and_server(vllm: Any) -> None:
    model = await vllm.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("echo", 512, 259)
    assert (model.is_generation, model.supports_vision, list(model.eos_token_ids)) == (True, False, [258])
    assert json.loads(model.default_sampling_params_json) == {}
    await read(vllm.Generate(ask()))
    server = await vllm.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.active_requests, server.block_size) == ("vllm-grpc", 0, 16)
    assert server.last_receive_timestamp > 1.7e9
    assert (await vllm.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_loads(vllm: Any) -> None:
    call = vllm.Generate(ask(stream=True, sampling={"max_tokens": 500}))
    await call.read()
    loads = await vllm.GetLoads(pb.GetLoadsRequest(dp_rank=0, include=["core"]))
    call.cancel()
    assert loads.dp_rank_count == 1
    [load] = loads.loads
    assert load.num_running_reqs == 1
    assert load.max_total_num_tokens == 1600
    assert load.token_usage == pytest.approx(0.01)
    assert (await refused(vllm.GetLoads(pb.GetLoadsRequest(dp_rank=1)))).startswith("dp_rank: ")
    assert (await refused(vllm.GetLoads(pb.GetLoadsRequest(include=["memory"])))).startswith("include: 'memory'")


async def test_profiling_is_not_implemented(vllm: Any) -> None:
    unimplemented = grpc.StatusCode.UNIMPLEMENTED
    assert "profiler" in await refused(vllm.StartProfile(common.StartProfileRequest()), unimplemented)
    assert "profiler" in await refused(vllm.StopProfile(common.StopProfileRequest()), unimplemented)


async def test_tokenizer(vllm: Any, folder: Path) -> None:
    chunks = await read(vllm.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["tokenizer.json", "tokenizer_config.json"]
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_is_the_folders_own(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    with pytest.raises(NotFound):
        pack_tokenizer(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    for_tools = "additional_chat_templates/tool_use.jinja"
    (folder / for_tools).write_text("{{ tools }}")
    first = pack_tokenizer(folder)
    assert pack_tokenizer(folder) == first
    assert zipfile.ZipFile(io.BytesIO(first)).namelist() == [for_tools, "tokenizer.json"]
    outside.write_text("secret")
    (folder / "vocab.txt").symlink_to(outside)
    with pytest.raises(EngineFault) as caught:
        pack_tokenizer(folder)
    assert str(tmp_path) not in caught.value.message


async def test_embed_refuses_no_tokens(vllm: Any) -> None:
    assert (await refused(vllm.Embed(pb.EmbedRequest()))).startswith("tokenized.input_ids: ")
