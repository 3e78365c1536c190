"""Messages of any protocol with any values in any of their fields, and their bytes spoilt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from echo_worker import EchoWorker
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from motley.cluster.api.kserve.kserve_request import INPUTS
from motley.cluster.api.kserve.kserve_response import OUTPUTS
from motley.replicas.types import Delta, FinishReason, Request, StreamMessage

NAMES = [*INPUTS, *OUTPUTS, "temperature", "n", "stop", "logprobs", "max_tokens", "seed", "json_schema", "regex", "x"]
WORDS = st.sampled_from([*NAMES, "BYTES", "INT32", "INT64", "BOOL", "FP32", "echo", "1", "[1]", "{}", "", "é", "\0"])
INTEGERS = st.sampled_from([0, 1, 2, -1, 5, 64, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1])
FLOATS = st.sampled_from([0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), 1e-30, 3e38])
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in RANGES:
        low, high = RANGES[field.cpp_type]
        return INTEGERS.filter(lambda value: low <= value <= high)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99, -1])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return FLOATS
    return WORDS if field.type == FieldDescriptor.TYPE_STRING else st.binary(max_size=12)


@st.composite
def fields_of(draw: st.DrawFn, descriptor: Descriptor) -> dict[str, Any]:
    """Constructor arguments of a message with any of its fields, of each oneof at most one."""
    chosen = (
        draw(st.lists(st.sampled_from(list(descriptor.fields)), unique_by=group, max_size=8))
        if descriptor.fields
        else []
    )
    return {field.name: draw(values(field)) for field in chosen}


def group(field: FieldDescriptor) -> str:
    oneof = field.containing_oneof
    return field.name if oneof is None else oneof.full_name


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        return st.dictionaries(scalars(key), single(value), max_size=3)
    return st.lists(single(field), max_size=3) if field.is_repeated else single(field)


def single(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    return scalars(field) if field.message_type is None else fields_of(field.message_type)


class AtOnce(EchoWorker):
    """Every choice is one token."""

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        yield StreamMessage(
            tuple(Delta(i, (65,), "A", None, FinishReason.LENGTH) for i in range(request.sampling.n)),
            cached_tokens=0,
            embedding=(1.0, 0.0) if request.pooling else None,
        )


CHANGES = st.lists(st.tuples(st.sampled_from(range(8)), st.integers(0, 2**16), st.integers(0, 255)), max_size=3)
GARBAGE = st.binary(max_size=20) | st.binary(min_size=100, max_size=300)


TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"ab"]}}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1]}
GOOD: dict[str, list[dict[str, Any]]] = {  # what is answered, so that not everything is refused for what it lacks
    "CompleteRequest": [{"text": "ab"}, {"token_ids": {"ids": [65]}, "sampling": {"n": 2}}],
    "ChatRequest": [{"messages": [{"role": "user", "content": "a"}]}],
    "EmbeddingsRequest": [{"inputs": [{"text": "ab"}]}],
    "TokenizeRequest": [{"text": "ab"}],
    "DetokenizeRequest": [{"token_ids": [65]}],
    "ModelInferRequest": [{"inputs": [TEXT]}, {"inputs": [IDS], "raw_input_contents": [b"A" + bytes(7)]}],
    "GenerateRequest": [{"text": "ab"}, {"tokenized": {"input_ids": [65]}, "stream": True}],
    "EmbedRequest": [{"tokenized": {"input_ids": [65]}}],
}


@st.composite
def whole(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Any fields, or one beside what would be answered."""
    kind = message_factory.GetMessageClass(descriptor)
    message = kind(**draw(st.sampled_from([{}, *GOOD.get(descriptor.name, []) * 2])))
    fields = draw(fields_of(descriptor))
    for name in list(fields)[: 1 if message.ListFields() else None]:
        message.MergeFrom(kind(**{name: fields[name]}))
    return message.SerializeToString()


@st.composite
def spoilt(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """A message that is whole, or was: flipped, cut, doubled, within itself, of wrong types and lengths."""
    data = draw(whole(descriptor))
    for change, place, value in draw(CHANGES):
        data = _spoil(data, change, place, value)
    return data


def _spoil(data: bytes, change: int, place: int, value: int) -> bytes:
    at = place % (len(data) + 1)
    before, after = data[:at], data[at:]
    end = at + value % (len(after) + 1)
    return (
        before + bytes([after[0] ^ (1 << value % 8)]) + after[1:] if after else data,  # a bit flipped
        before,  # cut off
        before + data[end:],  # a part left out
        before + data[at:end] + after,  # a part twice
        before + data[:end] + after,  # its own beginning within it
        before + bytes([after[0] & 0xF8 | value % 8]) + after[1:] if after else data,  # another wire type
        before + b"\xff" * (value % 10) + b"\x7f" + after,  # a length, or an integer, beyond all there is
        before + bytes([value]) + after,
    )[change]
