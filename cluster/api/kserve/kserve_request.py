"""Conversion of KServe's inference request, from gRPC or HTTP, to a `ParsedRequest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....replicas.errors import InvalidRequest, NotFound
from ....replicas.short_repr import short_repr
from ...request_errors import unknown_field, unsupported_field
from ..common.admission import MAX_TIMEOUT_S
from ..common.fields.unknown_fields import UnknownFieldPolicy
from ..common.parsed_request import ParsedRequest
from .kserve_numbers import number_of
from .kserve_sampling import SAMPLING_PARAMETERS, SamplingReader, constraint_bytes, read_object
from .kserve_tensors import BOOL, BYTES, INT32, INT64, Tensor, bad_tensor, format_shape

VERSION = "1"  # the version of every model
PRIORITY_LEVELS = 100  # levels are Triton's: 1 runs first
DEFAULT_PRIORITY = 50
EMPTY_FINAL = "triton_enable_empty_final_response"

INPUTS: Mapping[str, tuple[str, ...]] = {
    "text_input": (BYTES,),
    "input_ids": (INT32, INT64),
    "streaming": (BOOL,),
    "stop": (BYTES,),
    "stop_token_ids": (INT32, INT64),
    SAMPLING_PARAMETERS: (BYTES,),
    "stream": (BOOL,),
    "exclude_input_in_output": (BOOL,),
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request as read from the wire. `parameters`: bool, int, float or str by name.

    raw            whether the response has raw contents
    binary_output  over HTTP: whether outputs are binary data, except those for which `binary` says otherwise
    """

    model: str = ""
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[str] = ()
    raw: bool = False
    binary_output: bool = False
    binary: Mapping[str, bool] = field(default_factory=dict)

    def wants_binary(self, output: str) -> bool:
        return self.binary.get(output, self.binary_output)


@dataclass(frozen=True, slots=True)
class ParsedInferRequest:
    """A parsed request. `names`: Motley's field -> the client's, for errors. `empty_final`: the stream ends with an
    empty response.
    """

    parsed: ParsedRequest
    names: Mapping[str, str]
    streaming: bool
    empty_final: bool


def parse_infer_request(request: InferRequest, unknown: UnknownFieldPolicy | None = None) -> ParsedInferRequest:
    """Parse an inference request. Raises InvalidRequest naming the input or parameter, NotFound for a version that is
    not served.
    """
    check_version(request.version)
    inputs = _inputs(request.inputs)
    parameters = dict(request.parameters)
    empty_final = _flag(parameters, EMPTY_FINAL)
    priority = _priority(number_of("priority", parameters.pop("priority", 0)))
    timeout_s = _timeout_s(number_of("timeout", parameters.pop("timeout", 0)))
    sampling, names = _sampling(parameters, inputs, unknown or UnknownFieldPolicy())
    prompt_name, prompt = _prompt(inputs)
    _check_echo(inputs)
    names |= {"prompt": prompt_name, "model": "model_name", "timeout_s": "parameters.timeout"}
    parsed = ParsedRequest(
        model=request.model,
        prompt=prompt,
        prompt_name=prompt_name,
        sampling=sampling,
        client_id=request.id,
        timeout_s=timeout_s,
        priority=priority,
    )
    return ParsedInferRequest(parsed, names, _streaming(inputs), empty_final)


def grammar_bytes(request: InferRequest) -> int:
    """Return about how many bytes the request's grammar has."""
    values = dict(request.parameters)
    for tensor in request.inputs:
        if tensor.name == SAMPLING_PARAMETERS and tensor.datatype == BYTES:
            values[SAMPLING_PARAMETERS] = b"".join(tensor.elements).decode(errors="replace")
    return constraint_bytes(values)


def check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(
            f"model_version: there is no version {version[:40]!r}; expected {VERSION!r} or none",
            param="model_version",
            code="model_not_found",
        )


def _inputs(given: Sequence[Tensor]) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for tensor in given:
        if tensor.name not in INPUTS:
            raise unknown_field(f"inputs.{tensor.name[:80]}")
        if tensor.name in inputs:
            raise bad_tensor(tensor.name, "given twice")
        if tensor.datatype not in INPUTS[tensor.name]:
            accepted = " or ".join(INPUTS[tensor.name])
            raise bad_tensor(tensor.name, f"datatype {tensor.datatype[:40]!r} is not accepted; expected {accepted}")
        if len(tensor.shape) != 1 and not (len(tensor.shape) == 2 and tensor.shape[0] == 1):
            raise bad_tensor(tensor.name, f"shape {format_shape(tensor.shape)} is not accepted; expected [n] or [1, n]")
        inputs[tensor.name] = tensor
    return inputs


def _prompt(inputs: Mapping[str, Tensor]) -> tuple[str, str | Sequence[int]]:
    """Return the client's name of the prompt's input, and the prompt."""
    if ("text_input" in inputs) == ("input_ids" in inputs):
        raise InvalidRequest(
            "text_input: give either text_input or input_ids", param="text_input", code="missing_field"
        )
    if "input_ids" in inputs:
        return "input_ids", tuple(inputs["input_ids"].elements)
    return "text_input", _text("text_input", _single(inputs["text_input"]))


def _streaming(inputs: Mapping[str, Tensor]) -> bool:
    """Return whether the answer comes in parts: `streaming`, or `stream` as Triton's vLLM backend has it."""
    given = [bool(_single(inputs[name])) for name in ("streaming", "stream") if name in inputs]
    if len(set(given)) > 1:
        raise bad_tensor("stream", f"{given[1]} is not accepted; expected no value beside streaming")
    return any(given)


def _check_echo(inputs: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest if the prompt is to be part of the answer's text, as Triton's vLLM backend can do."""
    name = "exclude_input_in_output"
    if name in inputs and not _single(inputs[name]):
        raise unsupported_field(name, "text_output is the answer alone; leave it out, or give true", False)


def _single(tensor: Tensor) -> Any:
    if len(tensor.elements) != 1:
        raise bad_tensor(tensor.name, f"shape {format_shape(tensor.shape)} is not accepted; expected [1]")
    return tensor.elements[0]


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise bad_tensor(name, "it is not UTF-8") from None


def _sampling(
    parameters: Mapping[str, Any], inputs: Mapping[str, Tensor], unknown: UnknownFieldPolicy
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling parameters by SamplingParams' names, and the client's name for each."""
    reader = SamplingReader(unknown)
    reader.take({name: value for name, value in parameters.items() if name != SAMPLING_PARAMETERS}, "parameters.")
    for path, value in _together(parameters, inputs):
        reader.take(read_object(value, path), f"{path}.", as_json=True)
    for name in ("stop", "stop_token_ids"):
        if name in inputs and inputs[name].elements:
            elements = list(inputs[name].elements)
            value = [_text(name, element) for element in elements] if name == "stop" else elements
            reader.keep(name, value, name, value)
    return reader.result(), reader.names


def _together(parameters: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Yield each `sampling_parameters` of a request, with the client's name for it."""
    if SAMPLING_PARAMETERS in parameters:
        yield f"parameters.{SAMPLING_PARAMETERS}", parameters[SAMPLING_PARAMETERS]
    if SAMPLING_PARAMETERS in inputs:
        yield SAMPLING_PARAMETERS, _text(SAMPLING_PARAMETERS, _single(inputs[SAMPLING_PARAMETERS]))


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.pop(name, False)
    if not isinstance(value, bool):
        raise _bad_parameter(name, value, "true or false")
    return value


def _priority(level: Any) -> int:
    """Convert Triton's priority level to Motley's priority, of which the higher runs first."""
    if type(level) is not int or not 0 <= level <= PRIORITY_LEVELS:
        raise _bad_parameter("priority", level, f"an integer from 0 to {PRIORITY_LEVELS}")
    return DEFAULT_PRIORITY - (level or DEFAULT_PRIORITY)


def _timeout_s(microseconds: Any) -> float | None:
    if type(microseconds) is not int or not 0 <= microseconds <= MAX_TIMEOUT_S * 1e6:
        raise _bad_parameter("timeout", microseconds, f"a number of microseconds, at most {MAX_TIMEOUT_S:.0f} seconds")
    return microseconds / 1e6 if microseconds else None


def _bad_parameter(name: str, value: Any, accepted: str) -> InvalidRequest:
    param = f"parameters.{name}"
    return InvalidRequest(
        f"{param}: {short_repr(value)} is not accepted; expected {accepted}", param=param, code="invalid_value"
    )
