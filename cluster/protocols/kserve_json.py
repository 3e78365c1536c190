"""KServe's JSON bodies <-> our requests, responses and what is told of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from ...replicas.protocol import ModelInfo
from ...replicas.shown import shown
from ..ask import Most
from ..errors import unsupported_field
from ..web.answers import Object
from . import kserve_wire
from .kserve_ask import VERSION, InferRequest
from .kserve_reply import InferResponse
from .kserve_tensors import BOOL, BYTES, FP32, INT32, INT64, Tensor, bad_tensor, checked
from .openai_fields import missing, parse_object, refuse_others, take, wrong_type

_KINDS = {BYTES: (str, "strings"), BOOL: (bool, "true or false"), INT32: (int, "integers"), INT64: (int, "integers")}
_RANGES = {INT32: 2**31, INT64: 2**63}
_BINARY = ("binary_data_output", "binary_data", "binary_data_size")


def infer_request(body: bytes, model: str, version: str, most: Most | None = None) -> InferRequest:
    """Raises InvalidRequest naming the tensor, parameter or field; TooLarge above `most`."""
    fields = parse_object(body, most)
    refuse_others(fields, ("id", "parameters", "inputs", "outputs"))
    if fields.get("inputs") is None:
        raise missing("inputs")
    return InferRequest(
        model=model,
        version=version,
        id=take(fields, "id", str, ""),
        parameters=_parameters(take(fields, "parameters", dict, {})),
        inputs=[_input(tensor) for tensor in _objects(fields, "inputs")],
        outputs=[_output_name(output) for output in _objects(fields, "outputs")],
    )


def infer_response(response: InferResponse) -> Object:
    return {
        "model_name": response.model,
        "model_version": VERSION,
        "id": response.id,
        "parameters": dict(response.parameters),
        "outputs": [_output(tensor) for tensor in response.outputs],
    }


def metadata(info: ModelInfo) -> Object:
    return _plain(kserve_wire.metadata(info))


def config(info: ModelInfo) -> Object:
    """In Triton's words, as ModelConfig has it over gRPC."""
    return _plain(kserve_wire.config(info))


def _plain(message: Message) -> Object:
    """Integers of 64 bits as numbers, which are strings in protobuf's JSON."""
    described: Object = MessageToDict(message, preserving_proto_field_name=True)
    for tensor in (*described.get("inputs", ()), *described.get("outputs", ())):
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    for tensor in (*described.get("input", ()), *described.get("output", ())):
        tensor["dims"] = [int(size) for size in tensor["dims"]]
    for name, level in (batching := described.get("dynamic_batching", {})).items():
        batching[name] = int(level)
    return described


def _parameters(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in given.items():
        if name in _BINARY:
            raise unsupported_field(f"parameters.{name}", "bodies are JSON alone")
        if not isinstance(value, bool | int | float | str):
            raise wrong_type(f"parameters.{name[:80]}", value, "a number, a string, true or false")
    return given


def _objects(fields: Object, name: str) -> Sequence[Object]:
    values = take(fields, name, list, [])
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise wrong_type(f"{name}[{i}]", value, "an object")
    return values


def _input(tensor: Object) -> Tensor:
    name = take(tensor, "name", str, "", path="inputs.")
    path = f"inputs.{name[:80]}."
    refuse_others(tensor, ("name", "shape", "datatype", "data"), ("parameters",), path=path)
    datatype = take(tensor, "datatype", str, "", path=path)
    shape = take(tensor, "shape", list, [], path=path)
    if not shape or not all(type(size) is int for size in shape):
        raise wrong_type(f"{path}shape", shape, "a list of integers")
    if tensor.get("data") is None:
        raise missing(f"{path}data")
    elements = _elements(name, datatype, _flat(take(tensor, "data", list, [], path=path)))
    return checked(name, datatype, shape, elements)


def _flat(data: Sequence[Any]) -> Sequence[Any]:
    """Rows may come as lists of their own."""
    if data and set(map(type, data)) == {list}:
        return [element for row in data for element in row]
    return data


def _elements(name: str, datatype: str, data: Sequence[Any]) -> Sequence[Any]:
    if datatype not in _KINDS:
        raise bad_tensor(name, f"datatype {datatype[:40]!r} is not accepted; expected one of {', '.join(_KINDS)}")
    kind, words = _KINDS[datatype]
    if set(map(type, data)) - {kind} or not _in_range(datatype, data):
        wrong = next(one for one in data if type(one) is not kind or not _in_range(datatype, [one]))
        raise bad_tensor(name, f"{shown(wrong)} is not accepted in {datatype}; expected {words}")
    return [_utf8(name, element) for element in data] if datatype == BYTES else data


def _in_range(datatype: str, data: Sequence[Any]) -> bool:
    limit = _RANGES.get(datatype)
    return limit is None or not data or (-limit <= min(data) and max(data) < limit)


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise bad_tensor(name, "it holds a lone surrogate") from None


def _output_name(output: Object) -> str:
    name = take(output, "name", str, "", path="outputs.")
    refuse_others(output, ("name",), ("parameters",), path=f"outputs.{name[:80]}.")
    return name


def _output(tensor: Tensor) -> Object:
    if tensor.datatype == BYTES:
        data: list[Any] = [element.decode() for element in tensor.elements]
    elif tensor.datatype == FP32:
        data = [element if math.isfinite(element) else None for element in tensor.elements]  # JSON has no NaN
    else:
        data = list(tensor.elements)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}
