"""Triton's generate extension: a prompt and parameters in plain JSON; the answer's outputs are fields of an object.

Names are those of `infer`'s parameters, within `parameters` or beside the prompt, and the names that Triton's backends
for vLLM and TensorRT-LLM have for the same parameters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .....replicas.errors import InvalidRequest
from ....request_errors import unsupported_field
from ....transport.http_server.response_content import JsonObject
from ...common.admission import check_text
from ...common.fields.json_body import invalid_value, missing_field, parse_body, take_field
from ...common.fields.same_values import agreed_value
from ...common.fields.unknown_fields import UnknownFieldPolicy
from ...common.fields.wire_names import in_wire_names
from ...common.parsed_request import BodyLimits
from .. import kserve_numbers, kserve_parameters
from ..kserve_numbers import number_of
from ..kserve_parameters import NO_WORDS
from ..kserve_protocol import FINAL
from ..kserve_request import EMPTY_FINAL, VERSION, InferRequest
from ..kserve_response import InferResponse
from ..kserve_sampling import SAMPLING, SUPPORTED, json_of, read_object
from ..kserve_sampling import SAMPLING_PARAMETERS as _TOGETHER
from ..kserve_tensors import BOOL, BYTES, INT64, Tensor, bad_tensor, checked_tensor
from . import kserve_json

STOP_WORDS = "stop_words"
# Names of Triton's backends -> Motley's name.
END_ID = "end_id"  # a token that ends the answer
RENAMED: Mapping[str, str] = {
    STOP_WORDS: "stop",
    "random_seed": "seed",
    "min_length": "min_tokens",
    END_ID: "stop_token_ids",
}
# Parameters that are supported with neutral values only: name -> these values, and what to do instead.
_NOT_HERE = "the answer has none"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "beam_width": ((0, 1), "leave it out, or give 1"),
    "exclude_input_in_output": ((True,), "text_output is the answer alone; leave it out, or give true"),
    "return_context_logits": ((False,), _NOT_HERE),
    "return_generation_logits": ((False,), _NOT_HERE),
}
PADDING = "pad_id"  # the padding token of a batch, which changes no answer
_OF_REQUEST = frozenset({"id", "text_input", "parameters"})
_TRITONS = frozenset({"priority", "timeout", EMPTY_FINAL})
PARAMETERS = frozenset({*SUPPORTED, *RENAMED, *NEUTRAL, *_TRITONS, PADDING, "stream"})
_LISTS = frozenset({"logit_bias", "choice", "allowed_token_ids", "bad_words", "stop_token_ids"})
_JSON_TEXT = _LISTS | {"json_schema", "structural_tag"}  # `infer` takes these as JSON text


def infer_request(
    body: bytes,
    model: str,
    version: str,
    limits: BodyLimits | None = None,
    *,
    events: bool,
    unknown: UnknownFieldPolicy | None = None,
) -> tuple[InferRequest, Mapping[str, str]]:
    """Parse a body; return the request, and a mapping from names in errors to the client's names.

    events  whether the answer is a stream of events

    Raises InvalidRequest naming the field; BodyTooLarge above `limits`.
    """
    fields = parse_body(body, limits)
    inner = take_field(fields, "parameters", dict, {})
    if fields.get("text_input") is None:
        raise missing_field("text_input")
    inputs = [_texts("text_input", [take_field(fields, "text_input", str, "")])]
    client_id = take_field(fields, "id", str, "")
    given, names = _named(fields, inner, unknown or UnknownFieldPolicy())
    with in_wire_names(names):
        if _streaming(given.pop("stream", None), events=events):
            inputs.append(Tensor("streaming", BOOL, (1,), [True]))
        inputs += _stops(given)
        parameters = {name: _parameter(name, value) for name, value in given.items()}
    return InferRequest(model, version, client_id, parameters, inputs), names


def generate_event(response: InferResponse) -> JsonObject:
    """Return an answer or a part of one as a JSON object: the text of a single choice is a string, other outputs are
    lists.
    """
    parameters = {name: value for name, value in response.parameters.items() if name != FINAL}
    outputs = {tensor.name: _plain(kserve_json.output_data(tensor), tensor.datatype) for tensor in response.outputs}
    named = {"id": response.id} if response.id else {}
    return {**named, "model_name": response.model, "model_version": VERSION, **outputs, "parameters": parameters}


def _plain(data: list[Any], datatype: str) -> Any:
    return data[0] if datatype == BYTES and len(data) == 1 else data


def _named(fields: JsonObject, inner: JsonObject, unknown: UnknownFieldPolicy) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters by Motley's names, without those that change nothing; and the client's name for each."""
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for path, group, supported in _groups(fields, inner):
        for name in sorted(group, key=lambda name: name not in SAMPLING):  # of two names errors name the other server's
            value = group[name]
            own_name = kserve_parameters.own_parameter_name(name, value, f"{path}{name[:80]}", supported, unknown)
            if own_name is None or _changes_nothing(f"{path}{name}", own_name, value):
                continue
            ours, value = RENAMED.get(own_name, own_name), _canonical(f"{path}{name}", own_name, value)
            kserve_parameters.check_logprobs(name, value, f"{path}{name}")
            current = given.get(ours)
            agreed = value if current is None else agreed_value(ours, current, value)
            if agreed is None:
                raise InvalidRequest(f"{path}{name}: given twice", param=f"{path}{name}", code="invalid_value")
            given[ours] = agreed
            if current is None or agreed is not current:
                names |= dict.fromkeys((ours, f"parameters.{ours}"), f"{path}{name}")
    return given, names


def _groups(fields: JsonObject, inner: JsonObject) -> Iterator[tuple[str, Mapping[str, Any], Collection[str]]]:
    """Yield each place that has parameters: the beginning of their names in errors, the parameters, known names."""
    for path, group in (("", fields), ("parameters.", inner)):
        beside = _OF_REQUEST if group is fields else ()
        yield path, {name: value for name, value in group.items() if name not in (*beside, _TOGETHER)}, PARAMETERS
        if _TOGETHER in group:
            together = f"{path}{_TOGETHER}"
            yield f"{together}.", read_object(group[_TOGETHER], together), PARAMETERS - _TRITONS - {"stream"}


def _canonical(path: str, name: str, value: Any) -> Any:
    """Return the value of a parameter in the one form in which two of them can be compared."""
    if name == END_ID and not isinstance(value, list):
        return [number_of(name, value)]
    if name in _LISTS and isinstance(value, str):
        return json_of(name, value, path, as_json=True)
    return number_of(RENAMED.get(name, name), value)


def _changes_nothing(path: str, name: str, value: Any) -> bool:
    """Return whether the value asks for nothing. Raises InvalidRequest for one that would change the answer but is not
    supported.
    """
    if name == PADDING and value is not None and type(value) not in (int, str):
        raise invalid_value(path, value, "a token id")
    if value is None or name == PADDING or (name == STOP_WORDS and value in NO_WORDS):
        return True
    if name not in NEUTRAL:
        return False
    values, instead = NEUTRAL[name]
    number = kserve_numbers.number_in_text(value)
    if not any(type(number) in (type(one), float) and number == one for one in values):
        raise unsupported_field(path, instead, value)
    return True


def _streaming(stream: Any, *, events: bool) -> bool:
    if stream is None:
        return events
    if not isinstance(stream, bool):
        raise invalid_value("stream", stream, "true or false")
    if stream and not events:
        raise unsupported_field("stream", "use generate_stream", True)
    return stream


def _stops(given: dict[str, Any]) -> Iterator[Tensor]:
    """Take the strings and token ids that end the answer out of `given`, and yield them as inputs, which can hold
    several.
    """
    words = given.pop("stop", None)
    words = [words] if isinstance(words, str) else words
    if words is not None:
        yield _texts("stop", words)
    ids = given.pop("stop_token_ids", None)
    if ids is not None:
        yield _ids("stop_token_ids", ids)


def _texts(name: str, words: Any) -> Tensor:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise invalid_value(name, words, "a string, or a list of strings")
    for word in words:
        check_text(name, word)
    return checked_tensor(name, BYTES, (len(words),), [word.encode() for word in words])


def _ids(name: str, ids: Any) -> Tensor:
    if not isinstance(ids, list) or not all(type(one) is int and -(2**63) <= one < 2**63 for one in ids):
        raise bad_tensor(name, "expected a list of token ids")
    return checked_tensor("stop_token_ids", INT64, (len(ids),), ids)


def _parameter(name: str, value: Any) -> Any:
    if name in _JSON_TEXT and isinstance(value, dict | list):
        return json.dumps(value)
    if not isinstance(value, bool | int | float | str):
        raise invalid_value(name, value, "a number, a string, true or false")
    return value
