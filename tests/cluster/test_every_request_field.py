"""Nothing is accepted and ignored: every field of every request over gRPC changes something, or is refused.

Each field that can be reached from a request, at any depth, is set to several values on top of requests that are
answered. What reaches the engine, and what is answered, must differ for one of them; or none may be accepted.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pytest
from any_messages import TEXT, AtOnce
from echo_worker import EchoWorker
from google.protobuf import message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_servers import serving
from local_ingress import make_ingress
from tool_templates import write_tool_tokenizer

from motley.cluster.transport.grpc_server.servicers import SERVICES
from motley.replicas.types import KvEvent, KvEvents, ReplicaLoad, ReplicaProfile, Request, StreamMessage

OURS = ("motley.v1", "inference", "vllm.grpc.engine")
RPCS = [rpc for service in SERVICES if service.file.package in OURS for rpc in service.methods]
_ONE_MODEL = "there is one model, and one version of it: others are refused"
_DONE_ANYWAY = "either value asks for what is done anyway"
# Accepted, and without effect on the answer: field -> why.
CHANGE_NOTHING = {
    "motley.v1.CompleteRequest.model": _ONE_MODEL,
    "motley.v1.ChatRequest.model": _ONE_MODEL,
    "motley.v1.EmbeddingsRequest.model": _ONE_MODEL,
    "motley.v1.TokenizeRequest.model": _ONE_MODEL,
    "motley.v1.DetokenizeRequest.model": _ONE_MODEL,
    "motley.v1.GetModelRequest.model": _ONE_MODEL,
    "inference.ModelMetadataRequest.name": _ONE_MODEL,
    "inference.ModelMetadataRequest.version": _ONE_MODEL,
    "inference.ModelConfigRequest.name": _ONE_MODEL,
    "inference.ModelConfigRequest.version": _ONE_MODEL,
    "inference.ModelInferRequest.model_name": _ONE_MODEL,
    "inference.ModelInferRequest.model_version": _ONE_MODEL,
    "inference.RepositoryIndexRequest.ready": "the model is ready",
    "vllm.grpc.engine.AbortRequest.request_ids": "none of these requests runs",
    "vllm.grpc.engine.TokenizedInput.original_text": "what clients made the ids of, which are the prompt",
    "vllm.grpc.engine.SamplingParams.spaces_between_special_tokens": _DONE_ANYWAY,
    "vllm.grpc.engine.SamplingParams.include_stop_str_in_output": _DONE_ANYWAY,
    "vllm.grpc.engine.SamplingParams.grammar_from_first_token": _DONE_ANYWAY,
    "vllm.grpc.engine.GenerateRequest.data_parallel_rank": "0, the only one: others are refused",
    "vllm.grpc.engine.GetLoadsRequest.include": "core is what is told: others are refused",
    "motley.v1.ToolCall.index": "of pieces of a stream, which clients send back",
    "motley.v1.TokenizeRequest.add_special_tokens": "this tokenizer has none to add",
    "motley.v1.TemplateArgument.text": "this template takes any text for true",
    "Tokenize: motley.v1.Function.strict": "of the answer, and there is none",
}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}}'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
WORDS = ("x", "a", "1", "ab", "echo", "none", "core", SCHEMA, TAG, 'root ::= "a"')
BYTES = (b"x", b"ab", b"\x02\0\0\0ab", b"\x41\0\0\0\0\0\0\0")
KEYS = {"parameters": "temperature", "template_arguments": "enable_thinking"}  # of maps of messages
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"function": {"name": "f"}}, {"function": {"name": "g"}}]
HELLO = {"role": "user", "content": "a"}
CHAT: dict[str, Any] = {"messages": [HELLO], "sampling": {"seed": 7, "max_tokens": 4}}
CALLED = [HELLO, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "b", "tool_call_id": "a"}]
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1], "contents": {"int64_contents": [65]}}
SEED = {"parameters": {"seed": {"int64_param": 7}}}
GOOD: dict[str, list[dict[str, Any]]] = {  # what is answered
    "CompleteRequest": [{"text": "ab", "sampling": {"seed": 7, "max_tokens": 4}}],
    "ChatRequest": [
        CHAT,
        {**CHAT, "messages": CALLED, "tools": TOOLS, "tool_choice": {"mode": 3}},
        {**CHAT, "tools": [{"function": {"name": "f", "parameters": SCHEMA}}]},
        {**CHAT, "tools": TOOLS, "tool_choice": {"function": {"name": "g"}}},
        {**CHAT, "tools": TOOLS, "tool_choice": {"allowed_tools": {"mode": 2, "tools": [TOOLS[1]]}}},
    ],
    "EmbeddingsRequest": [{"inputs": [{"text": "ab"}]}],
    "TokenizeRequest": [{"text": "ab"}, {"chat": {"messages": CALLED, "tools": TOOLS}}],
    "DetokenizeRequest": [{"token_ids": [65, 258]}],
    "ModelInferRequest": [
        {"inputs": [TEXT], **SEED},
        {"inputs": [IDS], **SEED, "outputs": [{"name": "text_output"}]},
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}], **SEED,
         "raw_input_contents": [b"\x01\0\0\0a"]},
    ],
    "GenerateRequest": [
        {"text": "ab", "sampling_params": {"seed": 7, "max_tokens": 4}},
        {"tokenized": {"input_ids": [65]}, "sampling_params": {"seed": 7, "max_tokens": 4}},
    ],
    "EmbedRequest": [{"tokenized": {"input_ids": [65, 66]}}],
}  # fmt: skip
FRESH = r'"[0-9a-f]{32}"|(?:timestamp|uptime_seconds|last_receive_timestamp): \S+|call_\w+'
Path = tuple[FieldDescriptor, ...]


class Recorder(EchoWorker):
    """Keeps what reached it, and has something to say of everything."""

    def __init__(self, folder: str, reached: list[Any]) -> None:
        super().__init__(folder)
        self._reached = reached

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        timed = request.deadline_s is not None
        sampling = request.sampling if request.pooling is None else replace(request.sampling, seed=0)  # it was drawn
        told = {"sampling": sampling, "request_id": "", "cache_salt": b"", "deadline_s": 1.0 if timed else None}
        self._reached.append(replace(request, **told))
        async for message in super().generate(request):
            yield message

    async def flush(self, tenant: str | None) -> None:
        await asyncio.sleep(0.05)

    async def kv_events(self, tenant: str) -> AsyncGenerator[KvEvents, None]:
        yield KvEvents((), ReplicaLoad())
        yield KvEvents((KvEvent(b"\x01" * 32, (1,) * 16),), ReplicaLoad())

    def profile(self) -> ReplicaProfile:
        profile = super().profile()
        return replace(profile, model=replace(profile.model, max_model_len=8192))


class Calls:
    """Results of a call: its status, and what reached a replica together with the answers."""

    def __init__(self, channel: grpc.aio.Channel, reached: list[Any]) -> None:
        self._channel, self._reached = channel, reached
        self._known: dict[tuple[str, bytes], tuple[grpc.StatusCode, str]] = {}

    async def __call__(self, rpc: MethodDescriptor, request: Message) -> tuple[grpc.StatusCode, str]:
        key = rpc.full_name, request.SerializeToString(deterministic=True)
        if key not in self._known:
            self._known[key] = await self._came_of(rpc, request)
        return self._known[key]

    async def _came_of(self, rpc: MethodDescriptor, request: Message) -> tuple[grpc.StatusCode, str]:
        self._reached.clear()
        try:
            answers = [one async for one in self._answers(rpc, request)]
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        if errors := [one.error_message for one in answers if getattr(one, "error_message", "")]:
            return grpc.StatusCode.UNKNOWN, errors[0]
        told = "".join(map(text_format.MessageToString, answers))
        return grpc.StatusCode.OK, re.sub(FRESH, "", f"{self._reached} {told}")

    async def _answers(self, rpc: MethodDescriptor, request: Message) -> AsyncIterator[Message]:
        path = f"/{rpc.containing_service.full_name}/{rpc.name}"
        coding = {
            "request_serializer": lambda message: message.SerializeToString(),
            "response_deserializer": message_factory.GetMessageClass(rpc.output_type).FromString,
        }
        if rpc.client_streaming:
            stream = self._channel.stream_stream(path, **coding)(iter([request]))
        elif rpc.server_streaming:
            stream = self._channel.unary_stream(path, **coding)(request)
        else:
            yield await self._channel.unary_unary(path, **coding)(request)
            return
        async for answer in stream:
            yield answer


@pytest.fixture(scope="module")
async def calls(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")
    reached: list[Any] = []
    ingress = await make_ingress(folder, *(Recorder(str(folder), reached) for _ in range(2)))
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        yield Calls(channel, reached)


def paths(message: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Every field at any depth that holds a value, and not only others."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None:
            yield (*above, field)
        elif inner not in {one.message_type for one in above}:
            yield from paths(inner, (*above, field))


def at(message: Any, path: Path) -> Any:
    """The message in which the last field of the path is; what is on the way there is made."""
    for field, below in pairwise(path):
        value = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            message = value[KEYS.get(field.name, "x")]
        elif field.is_repeated:
            having = (one for one in value if below.name in {known.name for known, _ in one.ListFields()})
            message = next(having, None) or (value[0] if value else value.add())
        else:
            value.SetInParent()
            message = value
    return message


def variants(start: Message, path: Path) -> Iterator[tuple[Message, Message]]:
    """Without the field, and with one of its values."""
    *_, field = path
    for value in values(field):
        without = type(start)()
        without.CopyFrom(start)
        at(without, path).ClearField(field.name)
        given = type(start)()
        given.CopyFrom(start)
        holder = at(given, path)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key = field.message_type.fields_by_name["key"]
            of = "x" if key.cpp_type == FieldDescriptor.CPPTYPE_STRING else 65
            holder.MergeFrom(type(holder)(**{field.name: {of: value}}))
        elif field.is_repeated:
            holder.ClearField(field.name)
            holder.MergeFrom(type(holder)(**{field.name: [value]}))
        else:
            setattr(holder, field.name, value)
        if given != start:
            yield without, given
            if not field.is_repeated:
                yield start, given  # where it is needed, against the value that is answered


def values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        field = field.message_type.fields_by_name["value"]
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return (True, False) if field.has_presence else (True,)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return tuple(value.number for value in field.enum_type.values if value.number)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return (0.5, 1e-3, 2.0)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return WORDS if field.type == FieldDescriptor.TYPE_STRING else BYTES
    return (0, 1, 2, 65) if field.has_presence else (1, 2, 65)


async def is_ignored(calls: Calls, rpc: MethodDescriptor, path: Path) -> bool:
    """Accepted with a value, and with none of them anything is different."""
    kind = message_factory.GetMessageClass(rpc.input_type)
    accepted = False
    for start in GOOD.get(rpc.input_type.name, [{}]):
        for without, given in variants(kind(**start), path):
            status, told = await calls(rpc, given)
            if status is not grpc.StatusCode.OK:
                continue
            accepted = True
            before = await calls(rpc, without)
            if before[0] is grpc.StatusCode.OK and before[1] != told:
                return False
            if before[0] is not grpc.StatusCode.OK:
                return False  # it makes a request of what is none
    return accepted


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.name)
@pytest.mark.slow("Every field of a call is set to several values, and answers are compared")
async def test_every_field_changes_something_or_is_refused(rpc: MethodDescriptor, calls: Calls) -> None:
    ignored = {path[-1].full_name for path in paths(rpc.input_type) if await is_ignored(calls, rpc, path)}
    listed = {name for name in CHANGE_NOTHING if name.startswith(f"{rpc.name}: ")}
    names = {path[-1].full_name for path in paths(rpc.input_type)}
    assert ignored == {name for name in names if name in CHANGE_NOTHING or f"{rpc.name}: {name}" in listed}


# Numbers as no client should send them.
RANGES = {FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1)}
RANGES |= {FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1)}
REAL = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
REALS = (math.nan, math.inf, -math.inf, 1e300, -1e300, -0.0, -1.0, 5e-324, 2.0**63, 2.0**64, 0.0)
WHOLE = (-1, 0, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
OURS_TO_BLAME = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"}


class Brief(Recorder):
    """Every choice is one token, however many were asked for."""

    generate = AtOnce.generate


@pytest.fixture(scope="module")
async def at_once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("at-once"), "qwen3")
    ingress = await make_ingress(folder, Brief(str(folder), []))
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        yield Calls(channel, [])


def filled(rpc: MethodDescriptor, path: Path, value: float, start: dict[str, Any]) -> Message:
    """Return what would be answered, with that value in that field."""
    request = message_factory.GetMessageClass(rpc.input_type)(**start)
    holder, field = at(request, path), path[-1]
    if field.message_type is not None:  # a map of numbers
        key = field.message_type.fields_by_name["key"]
        getattr(holder, field.name)["x" if key.cpp_type == FieldDescriptor.CPPTYPE_STRING else 65] = value
    elif field.is_repeated:
        getattr(holder, field.name).append(value)
    else:
        setattr(holder, field.name, value)
    return request


def number_of(field: FieldDescriptor) -> FieldDescriptor:
    return field if field.message_type is None else field.message_type.fields_by_name["value"]


def tried(rpc: MethodDescriptor) -> list[tuple[Path, tuple[float, ...]]]:
    found = []
    for path in paths(rpc.input_type):
        kind = number_of(path[-1]).cpp_type
        if kind in REAL:
            found.append((path, REALS))
        elif kind in RANGES:
            least, most = RANGES[kind]
            found.append((path, tuple(value for value in WHOLE if least <= value <= most)))
    return found


NUMBERED = [rpc for rpc in RPCS if tried(rpc)]


def test_the_walk_has_all_numbers() -> None:
    found = {".".join(field.name for field in path) for rpc in NUMBERED for path, _ in tried(rpc)}
    assert {
        "sampling.temperature", "sampling.logit_bias", "timeout_s", "priority", "sampling_params.seed",
        "parameters.double_param", "inputs.shape", "inputs.contents.int64_contents", "tokenized.input_ids",
    } <= found  # fmt: skip
    assert {rpc.name for rpc in NUMBERED} >= {"CompleteStream", "ChatStream", "ModelStreamInfer", "Generate", "Embed"}


@pytest.mark.parametrize("rpc", NUMBERED, ids=lambda rpc: rpc.name)
async def test_a_number_is_taken_or_refused(rpc: MethodDescriptor, at_once: Calls) -> None:
    for path, values in tried(rpc):
        for value in values:
            request = filled(rpc, path, value, GOOD.get(rpc.input_type.name, [{}])[0])
            status, told = await at_once(rpc, request)
            name = ".".join(field.name for field in path)
            if status is grpc.StatusCode.UNKNOWN:  # a stream of KServe's says it in a message
                assert "internal" not in told, (name, value, told)
            else:
                assert status.name not in OURS_TO_BLAME, (name, value, status, told)
