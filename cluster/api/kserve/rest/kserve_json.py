"""Conversion of KServe's JSON bodies to requests, and of responses and model metadata to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from .....replicas.errors import InvalidRequest
from .....replicas.short_repr import short_repr
from .....replicas.types import ModelInfo
from ....request_errors import unsupported_field
from ....transport.http_server.response_content import JsonObject
from ...common.fields.json_body import invalid_value, missing_field, parse_body, refuse_other_fields, take_field
from ...common.parsed_request import BodyLimits
from .. import kserve_messages
from ..kserve_request import VERSION, InferRequest
from ..kserve_response import InferResponse
from ..kserve_statistics import InferStatistics
from ..kserve_tensors import (
    BINARY,
    BINARY_OUTPUT,
    BINARY_SIZE,
    BOOL,
    BYTES,
    FP32,
    INT32,
    INT64,
    Elements,
    Tensor,
    bad_tensor,
    checked_tensor,
    from_raw,
)

_KINDS = {BYTES: (str, "strings"), BOOL: (bool, "true or false"), INT32: (int, "integers"), INT64: (int, "integers")}
_RANGES = {INT32: 2**31, INT64: 2**63}
_CLASSES = "classification"  # Triton's parameter for the most likely classes of an output


@dataclass(slots=True)
class BinaryTail:
    """Binary data that follow a body's JSON. Tensors take their bytes from them one after the other."""

    data: bytes
    at: int = 0

    def take(self, name: str, size: int) -> bytes:
        left = len(self.data) - self.at
        if size > left:
            raise bad_tensor(name, f"{BINARY_SIZE} {size} is more than the {left} bytes left behind the JSON")
        self.at += size
        return self.data[self.at - size : self.at]

    def check_empty(self) -> None:
        if left := len(self.data) - self.at:
            raise InvalidRequest(
                f"inputs: {left} bytes behind the JSON belong to none of them; each says its own as {BINARY_SIZE}",
                param="inputs",
                code="invalid_value",
            )


def infer_request(
    body: bytes, model: str, version: str, limits: BodyLimits | None = None, behind: bytes = b""
) -> InferRequest:
    """Parse a body. Raises InvalidRequest naming the tensor, parameter or field; BodyTooLarge above `limits`.

    behind  binary data of the tensors that have them
    """
    fields = parse_body(body, limits)
    refuse_other_fields(fields, ("id", "model_name", "model_version", "parameters", "inputs", "outputs"))
    _check_named(fields, model, version)
    if fields.get("inputs") is None:
        raise missing_field("inputs")
    given = take_field(fields, "parameters", dict, {})
    parameters = {name: value for name, value in given.items() if value is not None and name != BINARY_OUTPUT}
    data = BinaryTail(behind)
    inputs = [_input(tensor, data) for tensor in _objects(fields, "inputs")]
    data.check_empty()
    outputs = [_requested_output(output) for output in _objects(fields, "outputs")]
    return InferRequest(
        model=model,
        version=version,
        id=take_field(fields, "id", str, ""),
        parameters=parameters,
        inputs=inputs,
        outputs=[name for name, _ in outputs],
        binary_output=take_field(given, BINARY_OUTPUT, bool, False, path="parameters."),
        binary={name: binary for name, binary in outputs if binary is not None},
    )


def infer_response(response: InferResponse, sizes: Mapping[str, int] | None = None) -> JsonObject:
    """Return a response as a JSON object. sizes: bytes of each output that follows the JSON, by name."""
    sizes = sizes or {}
    return {
        "model_name": response.model,
        "model_version": VERSION,
        "id": response.id,
        "parameters": dict(response.parameters),
        "outputs": [_output(tensor, sizes.get(tensor.name)) for tensor in response.outputs],
    }


def _check_named(fields: JsonObject, model: str, version: str) -> None:
    """Raise InvalidRequest if the body names another model or version than the path: some clients send both."""
    for name, expected in (("model_name", model), ("model_version", version or VERSION)):
        given = take_field(fields, name, str, "")
        if given and given != expected:
            raise InvalidRequest(
                f"{name}: {short_repr(given)} is not what the path names; expected {short_repr(expected)}, or none",
                param=name,
                code="invalid_value",
            )


def metadata(info: ModelInfo) -> JsonObject:
    return _plain(kserve_messages.metadata(info))


def config(info: ModelInfo) -> JsonObject:
    """Return the model's configuration in Triton's words, as ModelConfig has it over gRPC."""
    return _plain(kserve_messages.config(info))


def statistics(info: ModelInfo, counted: InferStatistics) -> JsonObject:
    """Return the model's statistics in Triton's words. A request's time in the queue counts as computing."""
    none = {"count": 0, "ns": 0}
    succeeded = asdict(counted.succeeded)
    model = {
        "name": info.name,
        "version": VERSION,
        "last_inference": counted.last_ms,
        "inference_count": counted.succeeded.count,
        "execution_count": counted.succeeded.count,
        "inference_stats": {
            "success": succeeded,
            "fail": asdict(counted.failed),
            "queue": none,
            "compute_input": none,
            "compute_infer": succeeded,
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [],
    }
    return {"model_stats": [model]}


def _plain(message: Message) -> JsonObject:
    """Convert a protobuf message to JSON with 64-bit integers as numbers, which protobuf's JSON writes as strings."""
    described: JsonObject = MessageToDict(message, preserving_proto_field_name=True)
    for tensor in (*described.get("inputs", ()), *described.get("outputs", ())):
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    for tensor in (*described.get("input", ()), *described.get("output", ())):
        tensor["dims"] = [int(size) for size in tensor["dims"]]
    for name, level in (batching := described.get("dynamic_batching", {})).items():
        batching[name] = int(level)
    return described


def _objects(fields: JsonObject, name: str) -> Sequence[JsonObject]:
    values = take_field(fields, name, list, [])
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid_value(f"{name}[{i}]", value, "an object")
    return values


def _input(tensor: JsonObject, behind: BinaryTail) -> Tensor:
    name = take_field(tensor, "name", str, "", path="inputs.")
    path = f"inputs.{name[:80]}."
    refuse_other_fields(tensor, ("name", "shape", "datatype", "data", "parameters"), path=path)
    datatype = take_field(tensor, "datatype", str, "", path=path)
    shape = take_field(tensor, "shape", list, [], path=path)
    if not shape or not all(type(size) is int for size in shape):
        raise invalid_value(f"{path}shape", shape, "a list of integers")
    return checked_tensor(name, datatype, shape, _given(tensor, name, datatype, path, behind))


def _given(tensor: JsonObject, name: str, datatype: str, path: str, behind: BinaryTail) -> Elements:
    """Return a tensor's elements, from the JSON or from the binary data after it."""
    parameters = take_field(tensor, "parameters", dict, {}, path=path)
    _refuse_parameters(parameters, (BINARY_SIZE,), f"{path}parameters.")
    size = parameters.get(BINARY_SIZE)
    if size is None:
        if tensor.get("data") is None:
            raise missing_field(f"{path}data")
        return _elements(name, datatype, _flat(take_field(tensor, "data", list, [], path=path)))
    if type(size) is not int or size < 0:
        raise invalid_value(f"{path}parameters.{BINARY_SIZE}", size, "a number of bytes")
    if tensor.get("data") is not None:
        raise unsupported_field(f"{path}data", f"{BINARY_SIZE} says that this tensor is behind the JSON")
    return from_raw(name, datatype, behind.take(name, size))


def _refuse_parameters(parameters: JsonObject, supported: Sequence[str], path: str) -> None:
    for name in parameters:
        if name not in supported:
            instead = "send the tensor in the body" if name.startswith("shared_memory") else "leave it out"
            raise unsupported_field(f"{path}{name[:80]}", instead)


def _flat(data: Sequence[Any]) -> Sequence[Any]:
    """Return elements without nesting: rows may come as lists of their own."""
    if data and set(map(type, data)) == {list}:
        return [element for row in data for element in row]
    return data


def _elements(name: str, datatype: str, data: Sequence[Any]) -> Sequence[Any]:
    if datatype not in _KINDS:
        raise bad_tensor(name, f"datatype {datatype[:40]!r} is not accepted; expected one of {', '.join(_KINDS)}")
    kind, expected = _KINDS[datatype]
    if set(map(type, data)) - {kind} or not _in_range(datatype, data):
        wrong = next(one for one in data if type(one) is not kind or not _in_range(datatype, [one]))
        raise bad_tensor(name, f"{short_repr(wrong)} is not accepted in {datatype}; expected {expected}")
    return [_utf8(name, element) for element in data] if datatype == BYTES else data


def _in_range(datatype: str, data: Sequence[Any]) -> bool:
    limit = _RANGES.get(datatype)
    return limit is None or not data or (-limit <= min(data) and max(data) < limit)


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise bad_tensor(name, "it holds a lone surrogate") from None


def _requested_output(output: JsonObject) -> tuple[str, bool | None]:
    """Return an output's name, and whether it is to be binary; None if the whole request decides."""
    name = take_field(output, "name", str, "", path="outputs.")
    path = f"outputs.{name[:80]}."
    refuse_other_fields(output, ("name", "parameters"), path=path)
    parameters = take_field(output, "parameters", dict, {}, path=path)
    path += "parameters."
    _refuse_parameters(parameters, (BINARY, _CLASSES), path)
    if take_field(parameters, _CLASSES, int, 0, path=path):
        raise unsupported_field(f"{path}{_CLASSES}", "no output is a distribution; logprobs are outputs of their own")
    if parameters.get(BINARY) is None:
        return name, None
    return name, take_field(parameters, BINARY, bool, False, path=path)


def _output(tensor: Tensor, size: int | None) -> JsonObject:
    """Return an output as a JSON object. size: its bytes if it is binary data after the JSON."""
    about: JsonObject = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if size is not None:
        return about | {"parameters": {BINARY_SIZE: size}}
    return about | {"data": output_data(tensor)}


def output_data(tensor: Tensor) -> list[Any]:
    if tensor.datatype == BYTES:
        return [element.decode() for element in tensor.elements]
    if tensor.datatype == FP32:
        return [element if math.isfinite(element) else None for element in tensor.elements]  # JSON has no NaN
    return list(tensor.elements)
