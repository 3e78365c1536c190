"""Conversion of motley.v1's protobuf messages to a `ParsedRequest`, and of the model's description to a message."""

from __future__ import annotations

from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.grammar.grammar_spec import GrammarSpec
from ....replicas.types import ModelInfo
from ...protos import inference_pb2 as pb
from ..common.fields.constraints import read_constraint
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.parsed_request import ParsedRequest

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_NOT_SCALAR = ("logit_bias", "grammar", *_LISTS)


def parse_complete_request(request: pb.CompleteRequest) -> ParsedRequest:
    refuse_unknown_fields(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt: give text or token_ids", param="prompt", code="missing_field")
    return parse_common_fields(request, request.text if kind == "text" else tuple(request.token_ids.ids))


def parse_common_fields(request: Any, prompt: Any, **more: Any) -> ParsedRequest:
    """Convert the fields that completions and chats share to a `ParsedRequest`."""
    return ParsedRequest(
        model=request.model,
        prompt=prompt,
        sampling=parse_sampling(request.sampling),
        output_ids=[tuple(ids.ids) for ids in request.output_ids],
        client_id=request.request_id,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        priority=request.priority,
        **more,
    )


def parse_sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """Return only the sampling fields that the client set, by SamplingParams' names, which are the wire's as well."""
    scalars = [field.name for field, _ in params.ListFields() if field.name not in _NOT_SCALAR]
    given: dict[str, Any] = {name: getattr(params, name) for name in scalars}
    if params.logit_bias:
        given["logit_bias"] = dict(params.logit_bias)
    given |= {name: tuple(value) for name in _LISTS if (value := getattr(params, name))}
    if params.HasField("grammar"):
        given["grammar"] = _grammar(params.grammar)
    return given


def _grammar(grammar: pb.Grammar) -> GrammarSpec | None:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("sampling.grammar: it is empty", param="sampling.grammar", code="missing_field")
    value = list(grammar.choice.texts) if kind == "choice" else getattr(grammar, kind)
    return read_constraint("grammar" if kind == "ebnf" else kind, value, f"sampling.grammar.{kind}")


def model_message(info: ModelInfo) -> pb.Model:
    return pb.Model(
        name=info.name,
        family=info.family,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        quantization=info.quantization,
    )
