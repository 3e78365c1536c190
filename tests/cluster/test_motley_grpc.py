"""motley.v1 on the whole ingress, behind a real gRPC server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from bad_requests import BAD_SAMPLING, NO_ROOM, label
from google.protobuf.descriptor import FieldDescriptor

from motley.cluster.protos import inference_pb2 as pb


async def refused(call: Any, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (finished(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    assert caught.value.code() == code, caught.value.details()
    return str(caught.value.details())


async def finished(call: Any) -> list[Any]:
    return [message async for message in call]


def ask(**fields: Any) -> pb.CompleteRequest:
    return pb.CompleteRequest(**{"text": "abc", **fields})


async def test_complete(stub: Any) -> None:
    answer = await stub.Complete(ask(request_id="mine", sampling=pb.SamplingParams(max_tokens=5, seed=7)))
    assert (answer.started.model, answer.started.client_request_id, answer.started.seed) == ("echo", "mine", 7)
    assert answer.started.request_id not in ("", "mine")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("abcab", pb.FINISH_REASON_LENGTH)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)


@pytest.mark.parametrize("method", ["Complete", "CompleteStream"])
async def test_a_bug_is_an_internal_error(
    stub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Which says no more; its trace is in the log."""
    monkeypatch.setattr("motley.cluster.transport.grpc_server.rpc_methods.read_request", lambda *_: 1 / 0)
    said = await refused(getattr(stub, method)(ask()), grpc.StatusCode.INTERNAL)
    assert said == "the request failed inside the service"
    assert "ZeroDivisionError" in caplog.text


async def test_stream_has_the_beginning_first_and_usage_last(stub: Any) -> None:
    chunks = await finished(stub.CompleteStream(ask(sampling=pb.SamplingParams(max_tokens=4, n=2))))
    first, last = chunks[0], chunks[-1]
    assert first.HasField("started")
    assert not any(chunk.HasField("started") for chunk in chunks[1:])
    assert last.usage.completion_tokens == 8
    assert not any(chunk.HasField("usage") for chunk in chunks[:-1])
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "abca", 1: "abca"}


@pytest.mark.parametrize("given", [{}, {"seed": -1}])
async def test_a_seed_is_drawn_when_none_is_given(stub: Any, given: dict[str, int]) -> None:
    answers = [await stub.Complete(ask(sampling=pb.SamplingParams(max_tokens=1, **given))) for _ in range(2)]
    assert answers[0].started.seed != answers[1].started.seed


async def test_chat_counts_as_tokenize_does(stub: Any) -> None:
    messages = [pb.ChatMessage(role="user", content="Hello")]
    answer = await stub.Chat(pb.ChatRequest(messages=messages, sampling=pb.SamplingParams(max_tokens=1)))
    tokens = await stub.Tokenize(pb.TokenizeRequest(chat=pb.ChatMessages(messages=messages)))
    assert answer.usage.prompt_tokens == len(tokens.token_ids)
    chunks = [
        c async for c in stub.ChatStream(pb.ChatRequest(messages=messages, sampling=pb.SamplingParams(max_tokens=1)))
    ]
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


async def test_tokenize_and_detokenize_are_inverse(stub: Any) -> None:
    tokens = await stub.Tokenize(pb.TokenizeRequest(text="Grüße, 世界"))
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "Grüße, 世界"
    assert tokens.max_model_len == 512


async def test_models(stub: Any) -> None:
    models = (await stub.ListModels(pb.ListModelsRequest())).models
    assert [model.name for model in models] == ["echo"]
    assert await stub.GetModel(pb.GetModelRequest(model="echo")) == models[0]
    assert "'other'" in await refused(stub.GetModel(pb.GetModelRequest(model="other")), grpc.StatusCode.NOT_FOUND)
    assert "model" in await refused(stub.Complete(ask(model="other")), grpc.StatusCode.NOT_FOUND)


def in_range(fields: dict[str, Any]) -> bool:
    return all(abs(value) < 2**31 for value in fields.values() if isinstance(value, int))


@pytest.mark.parametrize(("fields", "param"), [row for row in BAD_SAMPLING + NO_ROOM if in_range(row[0])], ids=label)
async def test_bad_fields_are_named(stub: Any, fields: dict[str, Any], param: str) -> None:
    request = ask(sampling=pb.SamplingParams(**fields))
    assert (await refused(stub.Complete(request))).startswith(f"{param}: ")
    assert (await refused(stub.CompleteStream(request))).startswith(f"{param}: ")


@pytest.mark.parametrize(
    "request_",
    [
        pb.CompleteRequest(),
        pb.CompleteRequest(text=""),
        pb.CompleteRequest(token_ids=pb.TokenIds()),
        pb.CompleteRequest(token_ids=pb.TokenIds(ids=[259])),
        pb.CompleteRequest(token_ids=pb.TokenIds(ids=[-1])),
        pb.CompleteRequest(text="x" * 512),
    ],
    ids=label,
)
async def test_bad_prompts(stub: Any, request_: pb.CompleteRequest) -> None:
    assert (await refused(stub.Complete(request_))).startswith("prompt")


async def test_chat_without_messages(stub: Any) -> None:
    assert (await refused(stub.Chat(pb.ChatRequest()))).startswith("messages")


async def test_arguments_of_the_template_go_by_their_name_here(stub: Any) -> None:
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_arguments["foo"].flag = True
    details = await refused(stub.Chat(chat))
    assert details.startswith("template_arguments: ")
    assert "chat_template_kwargs" not in details


async def test_prompt_logprobs_are_checked(stub: Any) -> None:
    request = ask(sampling=pb.SamplingParams(prompt_logprobs=-1))
    assert (await refused(stub.Complete(request))).startswith("prompt_logprobs")


@pytest.mark.parametrize("special", [True, False])
async def test_special_tokens_of_a_chat_are_the_templates(stub: Any, special: bool) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    request = pb.TokenizeRequest(chat=chat, add_special_tokens=special)
    assert (await refused(stub.Tokenize(request))).startswith("add_special_tokens")


async def test_output_ids_fit_the_choices(stub: Any) -> None:
    request = ask(output_ids=[pb.TokenIds(ids=[1])] * 2)
    assert (await refused(stub.Complete(request))).startswith("output_ids")
    request = ask(output_ids=[pb.TokenIds(ids=[-1])])
    assert (await refused(stub.Complete(request))).startswith("output_ids")


async def test_unknown_fields_are_refused_at_any_depth(stub: Any) -> None:
    unknown = b"\xf8\x3f\x01"  # field 1023, varint 1
    for request, where in (
        (pb.CompleteRequest.FromString(ask().SerializeToString() + unknown), "field 1023"),
        (ask(sampling=pb.SamplingParams.FromString(unknown)), "sampling.field 1023"),
    ):
        assert where in await refused(stub.Complete(request))


async def test_bytes_that_do_not_parse(grpc_target: str) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        for method in ("Complete", "Tokenize", "ListModels"):
            call = channel.unary_unary(f"/motley.v1.Inference/{method}")(b"\xff\xff\xff")
            assert "do not parse" in await refused(call)
        stream = channel.unary_stream("/motley.v1.Inference/CompleteStream")(b"\xff\xff\xff")
        assert "do not parse" in await refused(stream)


async def test_forwarded_calls_are_refused(stub: Any) -> None:
    call = stub.ListModels(pb.ListModelsRequest(), metadata=(("x-forwarded-for", "1.2.3.4"),))
    assert "x-forwarded-for" in await refused(call, grpc.StatusCode.PERMISSION_DENIED)


async def test_deadline_of_zero_never_runs(stub: Any) -> None:
    assert "timeout_s" in await refused(stub.Complete(ask(timeout_s=0)), grpc.StatusCode.DEADLINE_EXCEEDED)


def test_every_sampling_parameter_is_on_the_wire() -> None:
    from dataclasses import fields

    from motley.replicas.sampling_params import SamplingParams

    assert {field.name for field in fields(SamplingParams)} == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_sampling_scalars_tell_absence_from_zero() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name
        assert field.type != FieldDescriptor.TYPE_FLOAT, "32 bits would turn 0.1 into 0.10000000149"
