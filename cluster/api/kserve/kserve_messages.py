"""Conversion of KServe's protobuf messages to requests, and of responses and model metadata to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.types import ModelInfo
from ...protos import kserve_pb2 as pb
from ...request_errors import unsupported_field
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from .kserve_request import DEFAULT_PRIORITY, INPUTS, PRIORITY_LEVELS, VERSION, InferRequest
from .kserve_response import OUTPUTS, InferResponse
from .kserve_tensors import (
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
    to_raw,
)

PLATFORM = "motley"
_CONTENTS = {
    BOOL: "bool_contents",
    INT32: "int_contents",
    INT64: "int64_contents",
    FP32: "fp32_contents",
    BYTES: "bytes_contents",
}
_TYPES = {
    BOOL: pb.TYPE_BOOL,
    INT32: pb.TYPE_INT32,
    INT64: pb.TYPE_INT64,
    FP32: pb.TYPE_FP32,
    BYTES: pb.TYPE_STRING,
}
_INT64_MAX = 2**63 - 1


def infer_request(message: pb.ModelInferRequest) -> InferRequest:
    """Convert a message to a request. Raises InvalidRequest naming the tensor, parameter or field."""
    if len(message.inputs) > len(INPUTS):  # refuse too many before each is read
        raise InvalidRequest(
            f"inputs: {len(message.inputs)} of them; expected each of {', '.join(INPUTS)} at most once",
            param="inputs",
            code="invalid_value",
        )
    refuse_unknown_fields(message)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"raw_input_contents: {len(raw)} for {len(message.inputs)} inputs; expected one for each",
            param="raw_input_contents",
            code="invalid_value",
        )
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=_parameters(message),
        inputs=[_input(tensor, raw[i] if raw else None) for i, tensor in enumerate(message.inputs)],
        outputs=[_output_name(output) for output in message.outputs],
        raw=bool(raw),
    )


def _parameters(message: pb.ModelInferRequest) -> dict[str, Any]:
    values = {name: _value(name, parameter) for name, parameter in message.parameters.items()}
    if isinstance(values.get(BINARY_OUTPUT), bool):  # says nothing over gRPC: outputs are raw if inputs are
        del values[BINARY_OUTPUT]
    return values


def infer_response(response: InferResponse, *, raw: bool) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse()
    _fill(message, response, raw=raw)
    return message


def stream_response(response: InferResponse, *, raw: bool) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse(error_message=response.error)
    _fill(message.infer_response, response, raw=raw)
    return message


def _fill(message: pb.ModelInferResponse, response: InferResponse, *, raw: bool) -> None:
    """Fill `message` in place: this runs for every message of a stream, and a copy would cost as much again."""
    message.model_name, message.model_version, message.id = response.model, VERSION, response.id
    for name, value in response.parameters.items():
        _set(message.parameters[name], value)
    for tensor in response.outputs:
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            message.raw_output_contents.append(to_raw(tensor))
        else:
            getattr(output.contents, _CONTENTS[tensor.datatype]).extend(tensor.elements)


def metadata(info: ModelInfo) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=info.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_tensor_metadata(name, types[0], dims) for name, types, dims in _inputs()],
        outputs=[_tensor_metadata(name, datatype, dims) for name, (datatype, dims) in OUTPUTS.items()],
    )


def config(info: ModelInfo) -> pb.ModelConfig:
    config = pb.ModelConfig(
        name=info.name,
        platform=PLATFORM,
        backend=PLATFORM,
        input=[
            pb.ModelInput(name=name, data_type=_TYPES[types[0]], dims=dims, optional=True)
            for name, types, dims in _inputs()
        ],
        output=[
            pb.ModelOutput(name=name, data_type=_TYPES[datatype], dims=dims)
            for name, (datatype, dims) in OUTPUTS.items()
        ],
        dynamic_batching=pb.ModelDynamicBatching(
            priority_levels=PRIORITY_LEVELS, default_priority_level=DEFAULT_PRIORITY
        ),
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
    for name, value in _facts(info).items():
        config.parameters[name].string_value = value
    return config


def _facts(info: ModelInfo) -> Mapping[str, str]:
    return {
        "max_model_len": str(info.max_model_len),
        "vocab_size": str(info.vocab_size),
        "eos_token_ids": ",".join(map(str, info.eos_token_ids)),
        "dtype": info.dtype,
        "quantization": info.quantization,
    }


def _inputs() -> Iterable[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    scalars = ("text_input", "streaming")
    return [(name, types, (1,) if name in scalars else (-1,)) for name, types in INPUTS.items()]


def _tensor_metadata(name: str, datatype: str, dims: tuple[int, ...]) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=dims)


def _value(name: str, parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        param = f"parameters.{name[:80]}"
        raise InvalidRequest(f"{param}: it has no value", param=param, code="invalid_value")
    return getattr(parameter, kind)


def _set(parameter: pb.InferParameter, value: bool | int | str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif value <= _INT64_MAX:
        parameter.int64_param = value
    else:
        parameter.uint64_param = value


def _input(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    path = f"inputs.{tensor.name[:80]}.parameters"
    for name, parameter in tensor.parameters.items():
        if name != BINARY_SIZE or raw is None:
            raise unsupported_field(f"{path}.{name[:80]}")
        if _value(name, parameter) != len(raw):  # KServe's client sends HTTP's size over gRPC too
            raise bad_tensor(tensor.name, f"{BINARY_SIZE} is not the {len(raw)} bytes of its raw contents")
    if raw is not None and tensor.HasField("contents"):
        raise unsupported_field(f"inputs.{tensor.name[:80]}.contents", "raw_input_contents has this tensor already")
    elements = _typed(tensor) if raw is None else from_raw(tensor.name, tensor.datatype, raw)
    return checked_tensor(tensor.name, tensor.datatype, tensor.shape, elements)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> Elements:
    field_name = _CONTENTS.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != field_name:
            raise InvalidRequest(
                f"{tensor.name[:80]}: {field.name} are not of datatype {tensor.datatype[:40]!r}; expected {field_name}",
                param=tensor.name[:80],
                code="invalid_value",
            )
    return tuple(getattr(tensor.contents, field_name)) if field_name else ()


def _output_name(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> str:
    """Return an output's name. Its parameter for binary data is ignored: outputs are raw if inputs are."""
    for name, parameter in output.parameters.items():
        if name != BINARY or parameter.WhichOneof("parameter_choice") != "bool_param":
            raise unsupported_field(f"outputs.{output.name[:80]}.parameters.{name[:80]}")
    return output.name
