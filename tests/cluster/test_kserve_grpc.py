"""KServe's inference protocol on the whole ingress, behind a real gRPC server."""

from __future__ import annotations

import asyncio
import math
import re
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from bad_requests import BAD_SAMPLING, label
from echo_worker import EchoWorker
from local_ingress import make_ingress
from scripted_worker import ScriptedWorker

from motley.cluster.api.kserve import kserve_messages as wire
from motley.cluster.api.kserve import kserve_stream
from motley.cluster.api.kserve.kserve_protocol import KServeProtocol, failed_response
from motley.cluster.api.kserve.kserve_request import INPUTS
from motley.cluster.protos import kserve_pb2 as pb
from motley.cluster.protos import kserve_pb2_grpc
from motley.cluster.transport.caller import Caller
from motley.cluster.transport.grpc_server import unparsed_request
from motley.replicas.errors import EngineFault, InvalidRequest, MotleyError, Overloaded, Unavailable
from motley.replicas.sampling_params import MAX_STOP_STRINGS
from motley.replicas.types import Delta, FinishReason, StreamMessage, TokenLogprob

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"


@pytest.fixture(scope="module")
async def kserve(grpc_target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        yield kserve_pb2_grpc.GRPCInferenceServiceStub(channel)


def raw_text(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def parameter(value: Any) -> pb.InferParameter:
    kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
    return pb.InferParameter(**{kind: value})


def tensor(name: str, datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    given = pb.InferTensorContents(**contents) if contents else None
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=given)


def text_input(text: str = "abc", shape: tuple[int, ...] = (1,)) -> pb.ModelInferRequest.InferInputTensor:
    return tensor("text_input", "BYTES", list(shape), bytes_contents=[text.encode()])


def streaming(value: bool = True) -> pb.ModelInferRequest.InferInputTensor:
    return tensor("streaming", "BOOL", [1], bool_contents=[value])


def infer(*inputs: Any, outputs: tuple[str, ...] = (), **fields: Any) -> pb.ModelInferRequest:
    parameters = fields.pop("parameters", {"max_tokens": 5})
    return pb.ModelInferRequest(
        inputs=inputs or [text_input()],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        parameters={name: parameter(value) for name, value in parameters.items()},
        **fields,
    )


def typed(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    fields = {"BYTES": "bytes_contents", "INT32": "int_contents", "FP32": "fp32_contents"}
    return {out.name: list(getattr(out.contents, fields[out.datatype])) for out in response.outputs}


async def refused(call: Any, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == code, caught.value.details()
    return str(caught.value.details())


async def streamed(kserve: Any, *requests: pb.ModelInferRequest) -> list[pb.ModelStreamInferResponse]:
    return [response async for response in kserve.ModelStreamInfer(iter(requests))]


async def test_text_in_text_out(kserve: Any) -> None:
    answer = await kserve.ModelInfer(infer(id="mine", model_name="echo", model_version="1"))
    assert (answer.id, answer.model_name, answer.model_version) == ("mine", "echo", "1")
    assert typed(answer) == {"text_output": [b"abcab"], "finish_reason": [b"length"]}
    counts = {name: value.int64_param for name, value in answer.parameters.items() if name != "seed"}
    assert counts == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}


async def test_raw_in_raw_out(kserve: Any) -> None:
    request = infer(
        tensor("text_input", "BYTES", [1]),
        raw_input_contents=[raw_text("Hello")],
        outputs=("text_output",),
        parameters={"max_tokens": 7, "n": 2},
    )
    answer = await kserve.ModelInfer(request)
    assert not answer.outputs[0].HasField("contents")
    assert answer.raw_output_contents[0] == raw_text("HelloHe", "HelloHe")
    assert list(answer.outputs[0].shape) == [2]


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("shape", [[3], [1, 3]])
@pytest.mark.parametrize("raw", [True, False])
async def test_token_ids_in_and_out(kserve: Any, datatype: str, shape: list[int], raw: bool) -> None:
    ids = [64, 65, 66]
    contents = {} if raw else {"int_contents" if datatype == "INT32" else "int64_contents": ids}
    packed = [struct.pack(f"<3{'i' if datatype == 'INT32' else 'q'}", *ids)] if raw else []
    request = infer(
        tensor("input_ids", datatype, shape, **contents),
        raw_input_contents=packed,
        outputs=("output_ids", "output_lengths", "index"),
        parameters={"max_tokens": 4, "n": 2},
    )
    answer = await kserve.ModelInfer(request)
    want = {"output_ids": [64, 65, 66, 64] * 2, "output_lengths": [4, 4], "index": [0, 1]}
    if raw:
        got = [list(struct.unpack(f"<{len(data) // 4}i", data)) for data in answer.raw_output_contents]
        assert got == list(want.values())
    else:
        assert typed(answer) == want
    assert [list(output.shape) for output in answer.outputs] == [[8], [2], [2]]


async def test_every_kind_of_parameter(kserve: Any) -> None:
    parameters = {
        "max_tokens": 6,
        "temperature": 0.5,
        "ignore_eos": True,
        "stop": "zzz",
        "stop_token_ids": "[1, 2]",
        "logit_bias": '{"5": -1.5}',
        "seed": -7,
        "top_k": 0,
        "priority": 1,
        "timeout": 60_000_000,
    }
    request = infer(parameters=parameters)
    request.parameters["min_tokens"].uint64_param = 2
    answer = await kserve.ModelInfer(request)
    assert typed(answer)["text_output"] == [b"abcabc"]
    assert answer.parameters["seed"].int64_param == -7


async def test_streamed_parts_make_the_whole(kserve: Any) -> None:
    answers = await streamed(kserve, infer(text_input(), streaming(), id="7"))
    parts = [answer.infer_response for answer in answers]
    assert not any(answer.error_message for answer in answers)
    assert b"".join(typed(part)["text_output"][0] for part in parts) == b"abcab"
    assert [typed(part)["finish_reason"][0] for part in parts] == [b""] * (len(parts) - 1) + [b"length"]
    assert [part.parameters[FINAL].bool_param for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.id for part in parts} == {"7"}
    assert parts[-1].parameters["completion_tokens"].int64_param == 5
    assert len(parts) > 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_final_response_is_empty_when_that_is_asked_for(kserve: Any, stream: bool) -> None:
    request = infer(text_input(), streaming(stream), parameters={"max_tokens": 3, EMPTY_FINAL: True})
    *parts, final = [answer.infer_response for answer in await streamed(kserve, request)]
    assert [part.parameters[FINAL].bool_param for part in parts] == [False] * len(parts)
    assert b"".join(typed(part)["text_output"][0] for part in parts) == b"abc"
    assert final.parameters[FINAL].bool_param
    assert not final.outputs
    assert final.parameters["completion_tokens"].int64_param == 3


async def test_without_streaming_a_stream_gives_one_response(kserve: Any) -> None:
    [answer] = await streamed(kserve, infer())
    assert typed(answer.infer_response)["text_output"] == [b"abcab"]
    assert answer.infer_response.parameters[FINAL].bool_param


async def test_choices_of_a_stream_are_told_apart(kserve: Any) -> None:
    answers = await streamed(kserve, infer(text_input(), streaming(), parameters={"max_tokens": 4, "n": 3}))
    texts = dict.fromkeys(range(3), b"")
    for answer in answers:
        part = typed(answer.infer_response)
        for index, text in zip(part["index"], part["text_output"], strict=True):
            texts[index] += text
    assert texts == dict.fromkeys(range(3), b"abca")
    assert [answer.infer_response.parameters[FINAL].bool_param for answer in answers].count(True) == 1


async def test_an_error_is_a_response_and_the_stream_goes_on(kserve: Any) -> None:
    bad = infer(parameters={"temperature": -1.0}, id="bad")
    worse = infer(tensor("text_input", "FP32", [1], fp32_contents=[1.0]), id="worse")
    answers = {a.infer_response.id: a for a in await streamed(kserve, bad, worse, infer(id="good"))}
    assert answers["bad"].error_message.startswith("[request id: bad] parameters.temperature: -1.0")
    assert answers["bad"].infer_response.parameters[FINAL].bool_param
    assert "worse] text_input: " in answers["worse"].error_message
    assert answers["good"].error_message == ""
    assert typed(answers["good"].infer_response)["text_output"] == [b"abcab"]


async def test_a_bug_ends_the_request_that_meets_it_alone(
    kserve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = kserve_stream.wire.infer_request

    def broken(request: pb.ModelInferRequest) -> Any:
        return real(request) if request.id != "bad" else 1 / 0

    monkeypatch.setattr(kserve_stream.wire, "infer_request", broken)
    call = kserve.ModelStreamInfer()
    await call.write(infer(text_input(), streaming(), parameters={"max_tokens": 100}, id="long"))
    assert (await call.read()).infer_response.id == "long"
    for name in ("bad", "short"):
        await call.write(infer(id=name))
    await call.done_writing()
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    errors = {answer.infer_response.id: answer.error_message for answer in answers if answer.error_message}
    assert errors == {"bad": "[request id: bad] the request failed inside the service"}
    [bad] = [answer.infer_response for answer in answers if answer.infer_response.id == "bad"]
    assert bad.parameters["code"].string_param == "internal_error"
    finished = {answer.infer_response.id for answer in answers if answer.infer_response.parameters[FINAL].bool_param}
    assert finished == {"long", "bad", "short"}
    assert "ZeroDivisionError" in caplog.text


async def test_requests_of_a_stream_are_answered_side_by_side(kserve: Any, worker: EchoWorker) -> None:
    """The second is answered while the first one, which is long, goes on."""
    call = kserve.ModelStreamInfer()
    await call.write(infer(text_input(), streaming(), parameters={"max_tokens": 400}, id="long"))
    assert (await call.read()).infer_response.id == "long"
    await call.write(infer(id="short"))
    ids = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        ids.append(answer.infer_response.id)
        if answer.infer_response.id == "short":
            await call.done_writing()
    assert "long" in ids[ids.index("short") + 1 :]
    assert ids[-1] == "long"


async def test_cancelling_a_stream_stops_all_its_requests(kserve: Any, worker: EchoWorker) -> None:
    call = kserve.ModelStreamInfer()
    for i in range(3):
        await call.write(infer(text_input(), streaming(), parameters={"max_tokens": 500}, id=str(i)))
    await call.read()
    call.cancel()
    for _ in range(500):
        if not worker.load().running:
            break
        await asyncio.sleep(0.01)
    assert worker.load().running == 0


async def test_a_call_without_requests_ends_when_the_service_stops(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kserve_stream, "IDLE_CHECK_S", 0.01)
    ingress = await make_ingress(folder, EchoWorker(str(folder), step_s=0.001))
    waiting: asyncio.Queue[pb.ModelInferRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        while True:
            yield await waiting.get()

    responses = kserve_stream.StreamInfer(ingress.kserve, Caller()).responses(requests())
    await waiting.put(infer(text_input(), streaming(), parameters={"max_tokens": 50}))
    await anext(responses)
    ingress.router.drain()
    texts = b"A"
    with pytest.raises(Unavailable):  # noqa: PT012  once the request that runs is answered
        async for response in responses:
            texts += typed(response.infer_response)["text_output"][0]
    assert len(texts) == 50


async def test_a_stream_reads_no_more_than_it_can_answer(ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve_stream, "MAX_AT_ONCE", 3)
    read = 0

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        nonlocal read
        while True:
            read += 1
            yield infer(text_input(), streaming(), parameters={"max_tokens": 400}, id=str(read))

    responses = kserve_stream.StreamInfer(ingress.kserve, Caller()).responses(requests())
    for _ in range(50):
        await anext(responses)
    assert 3 <= read <= 5
    await responses.aclose()


async def test_the_calls_deadline_is_that_of_its_requests(ingress: Any) -> None:
    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield infer()
        await asyncio.sleep(0.02)
        yield infer(id="late")

    responses = kserve_stream.StreamInfer(ingress.kserve, Caller(timeout_s=0.01)).responses(requests())
    [*_, last] = [response async for response in responses]
    assert last.infer_response.id == "late"
    assert "late" in last.error_message


async def test_a_streams_first_message_must_come(kserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unparsed_request, "FIRST_S", 0.5)
    call = kserve.ModelStreamInfer()
    assert "first message" in await refused(call.read(), grpc.StatusCode.DEADLINE_EXCEEDED)
    call = kserve.ModelStreamInfer()
    for name in ("one", "after a while"):
        await call.write(infer(id=name))
        assert (await call.read()).infer_response.id == name
        await asyncio.sleep(0.8)
    call.cancel()


async def test_bytes_that_do_not_parse(grpc_target: str) -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        for rpc in service.methods:
            path = f"/{service.full_name}/{rpc.name}"
            if rpc.client_streaming:
                stream = channel.stream_stream(path)(iter([b"\xff\xff\xff"]))
                assert "do not parse" in await refused(stream.read())
            else:
                assert "do not parse" in await refused(channel.unary_unary(path)(b"\xff\xff\xff"))


def can_be_said(fields: dict[str, Any]) -> bool:
    """Return whether the fields can be parameters of this protocol, which knows no lists."""
    return all(isinstance(value, float) or (type(value) is int and abs(value) < 2**63) for value in fields.values())


@pytest.mark.parametrize(("fields", "param"), [row for row in BAD_SAMPLING if can_be_said(row[0])], ids=label)
async def test_bad_parameters_are_named(kserve: Any, fields: dict[str, Any], param: str) -> None:
    assert (await refused(kserve.ModelInfer(infer(parameters=fields)))).startswith(f"parameters.{param}: ")
    [answer] = await streamed(kserve, infer(parameters=fields))
    assert answer.error_message.startswith(f"parameters.{param}: ")


def test_the_proto_names_each_input_and_how_many_stop_strings_there_may_be() -> None:
    text = (Path(pb.__file__).parent / "kserve.proto").read_text()
    assert [name for name in INPUTS if not re.search(rf"//   input   {name} ", text)] == []
    assert f"stop            BYTES [1 to {MAX_STOP_STRINGS}]" in text


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": "half"}, "temperature"),
        ({"temperature": "1e400"}, "temperature"),
        ({"max_tokens": "1.5"}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"n": 1.0}, "n"),
        ({"stop_token_ids": "[259]"}, "stop_token_ids"),
        ({"stop_token_ids": "[1"}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": "5"}, "logit_bias"),
        ({"logit_bias": '{"300": 1}'}, "logit_bias"),
        ({"logit_bias": "[" * 100_000}, "logit_bias"),
        ({"priority": 101}, "priority"),
        ({"priority": -1}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 10**15}, "timeout"),
        ({EMPTY_FINAL: 1}, EMPTY_FINAL),
        ({"sequence_id": 5}, "sequence_id"),
        ({"cache_salt": "mine"}, "cache_salt: there is no such field"),
        ({"mirostat": 2}, "mirostat: 2 is not supported; give top_p or min_p"),
    ],
    ids=label,
)
async def test_parameters_of_this_protocol(kserve: Any, parameters: dict[str, Any], param: str) -> None:
    assert (await refused(kserve.ModelInfer(infer(parameters=parameters)))).startswith(f"parameters.{param}")


async def test_parameters_that_nobody_knows_are_ignored(kserve: Any) -> None:
    plain = {"max_tokens": 2, "seed": 1}
    expected = await kserve.ModelInfer(infer(parameters=plain))
    for more in ({"temprature": 1.0}, {"mirostat": 0}, {"sequence_id": 0}):
        assert await kserve.ModelInfer(infer(parameters={**plain, **more})) == expected
    assert await kserve.ModelInfer(infer(parameters={"n_predict": 2, "sampling_seed": 1})) == expected


async def test_a_parameter_without_a_value(kserve: Any) -> None:
    request = infer()
    request.parameters["top_k"].SetInParent()
    assert (await refused(kserve.ModelInfer(request))).startswith("parameters.top_k: ")


BAD_INPUTS: list[tuple[pb.ModelInferRequest, str]] = [
    (pb.ModelInferRequest(), "text_input: "),
    (infer(text_input(), tensor("input_ids", "INT32", [1], int_contents=[1])), "text_input: "),
    (infer(text_input("")), "text_input: "),
    (infer(text_input("x" * 600)), "text_input: "),
    (infer(text_input(), text_input()), "text_input: "),
    (infer(tensor("text_input", "BYTES", [1], bytes_contents=[b"\xff"])), "text_input: "),
    (infer(tensor("text_input", "BYTES", [2], bytes_contents=[b"a", b"b"])), "text_input: "),
    (infer(tensor("text_input", "BYTES", [2], bytes_contents=[b"a"])), "text_input: "),
    (infer(tensor("text_input", "BYTES", [-1], bytes_contents=[b"a"])), "text_input: "),
    (infer(text_input(shape=(1, 1, 1))), "text_input: "),
    (infer(tensor("text_input", "BYTES", [1], int_contents=[1])), "text_input: "),
    (infer(tensor("input_ids", "INT32", [1], int_contents=[259])), "input_ids: "),
    (infer(tensor("input_ids", "INT32", [1], int_contents=[-1])), "input_ids: "),
    (infer(tensor("input_ids", "INT64", [1], int64_contents=[2**62])), "input_ids: "),
    (infer(tensor("input_ids", "INT32", [0])), "input_ids: "),
    (infer(tensor("input_ids", "INT32", [2**40, 2**40])), "input_ids: "),
    (infer(tensor("input_ids", "FP32", [1], fp32_contents=[1])), "input_ids: "),
    (infer(text_input(), tensor("prompt", "BYTES", [1], bytes_contents=[b""])), "inputs.prompt: "),
    (infer(text_input(), tensor("streaming", "BOOL", [2], bool_contents=[True, False])), "streaming: "),
    (infer(text_input(), streaming()), "streaming: "),
    (infer(text_input(), tensor("stop", "BYTES", [65], bytes_contents=[b"a"] * 65)), "stop: "),
    (infer(text_input(), tensor("stop_token_ids", "INT32", [1], int_contents=[259])), "stop_token_ids: "),
    (infer(outputs=("text",)), "outputs.text: "),
    (infer(outputs=("text_output", "text_output")), "outputs.text_output: "),
    (infer(outputs=("logprobs",)), "outputs.logprobs: "),
    (infer(outputs=("top_ids",), parameters={"logprobs": 0}), "outputs.top_ids: "),
    (infer(tensor("text_input", "BYTES", [1]), raw_input_contents=[b"\x05\x00\x00\x00ab"]), "text_input: "),
    (infer(tensor("text_input", "BYTES", [1]), raw_input_contents=[b"\x05\x00"]), "text_input: "),
    (infer(tensor("input_ids", "INT32", [1]), raw_input_contents=[b"\x05\x00"]), "input_ids: "),
    (infer(tensor("input_ids", "FP64", [1]), raw_input_contents=[bytes(8)]), "input_ids: "),
    (infer(tensor("text_input", "BYTES", [1]), raw_input_contents=[raw_text("a"), b""]), "raw_input_contents: "),
    (infer(text_input(), raw_input_contents=[raw_text("a")]), "inputs.text_input.contents "),
]


@pytest.mark.parametrize(("request_", "begins"), BAD_INPUTS, ids=label)
async def test_bad_inputs_are_named(kserve: Any, request_: pb.ModelInferRequest, begins: str) -> None:
    assert (await refused(kserve.ModelInfer(request_))).startswith(begins)


async def test_parameters_of_tensors_are_refused(kserve: Any) -> None:
    request = infer()
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"
    assert (await refused(kserve.ModelInfer(request))).startswith("inputs.text_input.parameters.shared_memory_region")
    request = infer(outputs=("text_output",))
    request.outputs[0].parameters["classification"].int64_param = 1
    assert (await refused(kserve.ModelInfer(request))).startswith("outputs.text_output.parameters.classification")


async def test_unknown_fields_are_refused(kserve: Any) -> None:
    request = pb.ModelInferRequest.FromString(infer().SerializeToString() + b"\xf8\x3f\x01")
    assert "field 1023" in await refused(kserve.ModelInfer(request))


async def test_unknown_model_and_version(kserve: Any) -> None:
    not_found = grpc.StatusCode.NOT_FOUND
    assert (await refused(kserve.ModelInfer(infer(model_name="other")), not_found)).startswith("model_name: ")
    assert (await refused(kserve.ModelInfer(infer(model_version="2")), not_found)).startswith("model_version: ")
    for method, request in (
        (kserve.ModelMetadata, pb.ModelMetadataRequest),
        (kserve.ModelConfig, pb.ModelConfigRequest),
    ):
        assert (await refused(method(request(name="other")), not_found)).startswith("name: ")
        assert (await refused(method(request(name="echo", version="2")), not_found)).startswith("version: ")


async def test_health_and_metadata(kserve: Any) -> None:
    assert (await kserve.ServerLive(pb.ServerLiveRequest())).live
    assert (await kserve.ServerReady(pb.ServerReadyRequest())).ready
    assert (await kserve.ModelReady(pb.ModelReadyRequest(name="echo", version="1"))).ready
    assert not (await kserve.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    assert not (await kserve.ModelReady(pb.ModelReadyRequest(name="echo", version="3"))).ready
    server = await kserve.ServerMetadata(pb.ServerMetadataRequest())
    assert server.name == "motley"
    assert "parameters" in server.extensions
    model = await kserve.ModelMetadata(pb.ModelMetadataRequest(name="echo"))
    assert {"text_input", "input_ids", "streaming"} <= {tensor.name for tensor in model.inputs}
    config = (await kserve.ModelConfig(pb.ModelConfigRequest(name="echo"))).config
    assert [i.name for i in config.input] == [i.name for i in model.inputs]
    assert [o.name for o in config.output] == [o.name for o in model.outputs]
    assert config.model_transaction_policy.decoupled
    assert config.parameters["max_model_len"].string_value == "512"
    index = await kserve.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
    assert [(m.name, m.version, m.state) for m in index.models] == [("echo", "1", "READY")]


TOP = ((66, -0.5), (67, -1.5))
LOGPROBS = (TokenLogprob(65, -1.0, TOP), TokenLogprob(66, -0.5, TOP))
SCRIPT = (
    StreamMessage(cached_tokens=2, prompt_logprobs=(None, TokenLogprob(66, -0.25, TOP[:1]))),
    StreamMessage((Delta(0, (65,), "A", LOGPROBS[:1]),)),
    StreamMessage((Delta(0, (66,), "B", LOGPROBS[1:], FinishReason.STOP),)),
)
WITH_LOGPROBS = {"logprobs": 2, "prompt_logprobs": 1}


@pytest.fixture
def scripted(folder: Path) -> Callable[..., Any]:
    async def protocol(*messages: StreamMessage, error: Exception | None = None) -> KServeProtocol:
        ingress = await make_ingress(folder, ScriptedWorker(str(folder), messages, error))
        return ingress.kserve

    return protocol


async def test_every_output_that_is_told_of(kserve: Any, scripted: Callable[..., Any]) -> None:
    """Logprobs without being named in outputs: what was asked for by parameter is not left out."""
    protocol = await scripted(*SCRIPT)
    request = wire.infer_request(infer(text_input("ab"), parameters=WITH_LOGPROBS))
    answer = await protocol.infer(request, Caller())
    elements = {tensor.name: (tensor.shape, list(tensor.elements)) for tensor in answer.outputs}
    assert elements.pop("prompt_logprobs") == ((2,), [pytest.approx(math.nan, nan_ok=True), -0.25])
    assert elements.pop("prompt_top_logprobs") == ((2, 1), [pytest.approx(math.nan, nan_ok=True), -0.5])
    assert elements == {
        "text_output": ((1,), [b"AB"]),
        "finish_reason": ((1,), [b"stop"]),
        "output_ids": ((2,), [65, 66]),
        "output_lengths": ((1,), [2]),
        "logprobs": ((2,), [-1.0, -0.5]),
        "top_ids": ((2, 2), [66, 67, 66, 67]),
        "top_logprobs": ((2, 2), [-0.5, -1.5] * 2),
        "prompt_top_ids": ((2, 1), [-1, 66]),
    }
    assert answer.parameters["cached_tokens"] == 2
    told = (await kserve.ModelMetadata(pb.ModelMetadataRequest())).outputs
    assert {tensor.name: tensor.datatype for tensor in answer.outputs} | {"index": "INT32"} == {
        output.name: output.datatype for output in told
    }


async def test_logprobs_of_a_prompt_come_once(scripted: Callable[..., Any]) -> None:
    protocol = await scripted(*SCRIPT)
    request = wire.infer_request(infer(text_input("ab"), streaming(), parameters=WITH_LOGPROBS))
    parts = [part async for part in protocol.infer_stream(request, Caller())]
    assert ["prompt_logprobs" in {tensor.name for tensor in part.outputs} for part in parts] == [True, False]


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        (SCRIPT[:2], EngineFault("it broke"), "it broke"),
        (SCRIPT[:2], None, ""),
        ((StreamMessage((Delta(0, finish_reason=FinishReason.DEADLINE),)),), None, "the deadline passed"),
    ],
    ids=["fault", "breaks off", "deadline"],
)
async def test_a_stream_that_fails_ends_with_an_error(
    scripted: Callable[..., Any], messages: Any, error: Exception | None, said: str
) -> None:
    protocol = await scripted(*messages, error=error)
    parts = [p async for p in protocol.infer_stream(wire.infer_request(infer(text_input(), streaming())), Caller())]
    assert [bool(part.error) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert said in parts[-1].error
    assert parts[-1].parameters[FINAL] is True


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Overloaded("full", code="queue_full", retry_after_s=7), {"code": "queue_full", "retry_after": 7}),
        (Unavailable("gone", code="draining"), {"code": "draining", "retry_after": 1}),
        (InvalidRequest("top_k: no"), {"code": "invalid_value"}),
        (EngineFault("it broke"), {"code": "engine_fault"}),
    ],
    ids=["overloaded", "unavailable", "invalid", "fault"],
)
def test_an_error_within_a_stream_says_its_code_and_when_to_try_again(error: MotleyError, told: Any) -> None:
    message = wire.stream_response(failed_response("r1", error), raw=True)
    given = message.infer_response.parameters
    assert {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in given.items()} == {
        FINAL: True,
        **told,
    }
    assert (message.error_message, message.infer_response.id) == (f"[request id: r1] {error.message}", "r1")
