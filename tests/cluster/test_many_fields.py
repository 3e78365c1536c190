"""A small message of very many parts: refused by name, over every RPC, after a bounded number of steps."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from any_messages import GARBAGE, whole
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cluster.api.common.fields.unknown_message_fields import refuse_unknown_fields
from motley.cluster.api.kserve import kserve_messages, kserve_request
from motley.cluster.api.motley import motley_chat, motley_embeddings
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import kserve_pb2, vllm_engine_pb2
from motley.cluster.transport.grpc_server import message_limits
from motley.cluster.transport.grpc_server.message_limits import MAX_FIELDS, MAX_NUMBERS, check_message_size
from motley.cluster.transport.grpc_server.servicers import SERVICES
from motley.cluster.transport.grpc_server.unparsed_request import UnparsedRequest
from motley.replicas.errors import InvalidRequest

MANY = 4_000_000
KINDS = {rpc.input_type.full_name: rpc.input_type for service in SERVICES for rpc in service.methods}


def nested(number: int, inner: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(inner)) + inner


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


TOO_MANY: list[tuple[type[Message], bytes, str]] = [
    (pb.ChatRequest, b"\x12\x00" * MANY, "messages"),
    (pb.ChatRequest, nested(2, b"\x22\x00" * MANY), "messages.tool_calls"),
    (pb.EmbeddingsRequest, b"\x12\x00" * MANY, "inputs"),
    (pb.CompleteRequest, b"\xf8\x07\x01" * MAX_FIELDS * 2, "field 127"),
    (pb.CompleteRequest, b"\x2a\x00" * MANY, "output_ids"),
    (pb.CompleteRequest, nested(4, nested(15, b"") * MANY), "sampling.stop"),
    (pb.DetokenizeRequest, nested(2, b"\x05" * (MAX_NUMBERS + 1)), "token_ids"),
    (kserve_pb2.ModelInferRequest, b"\x2a\x00" * MANY, "inputs"),
    (kserve_pb2.ModelInferRequest, b"\x22\x00" * MANY, "parameters"),
    (kserve_pb2.ModelInferRequest, nested(5, nested(3, b"\x01" * (MAX_NUMBERS + 1))), "inputs.shape"),
    (vllm_engine_pb2.AbortRequest, b"\x0a\x00" * MANY, "request_ids"),
]


@pytest.mark.parametrize(("kind", "data", "name"), TOO_MANY, ids=lambda value: str(value)[:40])
def test_too_many_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, kind: type[Message], data: bytes, name: str
) -> None:
    visited: list[int] = []
    real = message_limits._MessageWalk._varint

    def counted(walk: Any) -> int:
        visited.append(1)
        return real(walk)

    monkeypatch.setattr(message_limits._MessageWalk, "_varint", counted)
    with pytest.raises(InvalidRequest) as caught:
        UnparsedRequest(kind, data).parsed()
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name}: ")
    assert str(MAX_NUMBERS if "numbers" in caught.value.message else MAX_FIELDS) in caught.value.message
    assert len(visited) <= 3 * MAX_FIELDS + 3, "not one for each field that was sent"


@pytest.mark.parametrize("name", KINDS)
def test_of_every_request_there_is(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^field 127: .* more than {MAX_FIELDS} fields"):
        UnparsedRequest(message_factory.GetMessageClass(KINDS[name]), b"\xf8\x07\x01" * (MAX_FIELDS + 1)).parsed()


def test_what_the_limits_allow() -> None:
    one = pb.ChatMessage(role="user", content="x")  # a field, and two within it
    most = pb.ChatRequest(messages=[one] * (MAX_FIELDS // 3)).SerializeToString()
    assert check_message_size(most, pb.ChatRequest.DESCRIPTOR) == MAX_FIELDS // 3 * 3
    ids = pb.CompleteRequest(token_ids=pb.TokenIds(ids=[70_000] * MAX_NUMBERS)).SerializeToString()
    assert check_message_size(ids, pb.CompleteRequest.DESCRIPTOR) == 2
    text = pb.CompleteRequest(text="\x12\0" * MANY).SerializeToString()
    assert check_message_size(text, pb.CompleteRequest.DESCRIPTOR) == 1


def num_fields(message: Message) -> tuple[int, int]:
    """Fields and packed numbers of a message that is parsed, as it is written."""
    count = numbers = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_messages = field.message_type.fields_by_name["value"].message_type is not None
            found = [num_fields(part) for part in value.values()] if of_messages else []
            count += 3 * len(value) + sum(one for one, _ in found)
            numbers += sum(one for _, one in found)
        elif field.message_type is not None:
            found = [num_fields(part) for part in (value if field.is_repeated else [value])]
            count += len(found) + sum(one for one, _ in found)
            numbers += sum(one for _, one in found)
        elif field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            count, numbers = count + 1, numbers + len(value)
        else:
            count += len(value) if field.is_repeated else 1
    return count, numbers


def walked(data: bytes, kind: Descriptor) -> tuple[int, int]:
    walk = message_limits._MessageWalk(data, kind)
    walk.to_the_end()
    return walk.fields, walk.numbers


@pytest.mark.parametrize("name", ["motley.v1.ChatRequest", "inference.ModelInferRequest"])
@given(data=st.data())
@settings(max_examples=60, derandomize=True)
def test_the_walk_counts_what_the_parser_finds(name: str, data: Any) -> None:
    kind = message_factory.GetMessageClass(KINDS[name])
    message = kind.FromString(data.draw(whole(KINDS[name])))
    assert walked(message.SerializeToString(), KINDS[name]) == num_fields(message)


@pytest.mark.parametrize("name", ["motley.v1.ChatRequest", "vllm.grpc.engine.GenerateRequest"])
@given(data=GARBAGE)
def test_where_the_walk_gives_up_the_parser_does(name: str, data: bytes) -> None:
    try:
        walked(data, KINDS[name])
    except (message_limits._NotAMessage, IndexError):
        with pytest.raises(DecodeError):
            message_factory.GetMessageClass(KINDS[name]).FromString(data)


def test_what_a_limit_of_its_own_has_is_not_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Message] = []
    for module in (motley_embeddings, kserve_messages):
        monkeypatch.setattr(module, "refuse_unknown_fields", looked.append)
    inputs = [pb.EmbeddingInput(text="a")] * 2049
    with pytest.raises(InvalidRequest, match=r"^inputs: 2049 of them; expected 1 to 2048"):
        motley_embeddings.parse_embeddings_request(pb.EmbeddingsRequest(inputs=inputs))
    tensors = [kserve_pb2.ModelInferRequest.InferInputTensor()] * 9
    with pytest.raises(InvalidRequest, match=r"^inputs: 9 of them"):
        kserve_messages.infer_request(kserve_pb2.ModelInferRequest(inputs=tensors))
    assert not looked


def test_raw_texts_without_end() -> None:
    request = kserve_pb2.ModelInferRequest(raw_input_contents=[struct.pack("<I", 0) * (MAX_FIELDS + 1)])
    request.inputs.add(name="stop", datatype="BYTES", shape=[MAX_FIELDS + 1])
    with pytest.raises(InvalidRequest, match=f"^stop: it has more than {MAX_FIELDS} elements"):
        kserve_messages.infer_request(request)


def test_json_within_a_message_has_a_limit_too() -> None:
    many = "[" + "0," * 70_000 + "0]"
    tool = pb.Tool(function=pb.Function(name="f", parameters=f'{{"a": {many}}}'))
    with pytest.raises(InvalidRequest, match=r"^tools: its JSON holds more than 65536 values"):
        motley_chat.openai_tools([tool])
    request = kserve_pb2.ModelInferRequest()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    request.parameters["stop_token_ids"].string_param = many
    with pytest.raises(InvalidRequest, match=r"^parameters.stop_token_ids: its JSON holds more than 65536 values"):
        kserve_request.parse_infer_request(kserve_messages.infer_request(request))


@pytest.mark.parametrize(("kind", "data"), [
    (pb.ChatRequest, nested(9, nested(1, b"a") + nested(2, b"\xf8\x07\x01"))),
    (kserve_pb2.ModelInferRequest, nested(4, nested(1, b"a") + nested(2, b"\xf8\x07\x01"))),
])  # fmt: skip
def test_unknown_fields_in_the_values_of_a_map(kind: type[Message], data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"(template_arguments|parameters)\.field 127: "):
        refuse_unknown_fields(kind.FromString(data))
