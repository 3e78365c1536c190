"""Conversion of motley.v1's protobuf messages to an `Ask`, and of the model's description to a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ...replicas.errors import InvalidRequest
from ...replicas.grammar.grammar_spec import GrammarSpec
from ...replicas.types import ModelInfo
from ..ask import Ask
from ..errors import unknown_field
from ..protos import inference_pb2 as pb
from .constraints import constraint

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_NOT_SCALAR = ("logit_bias", "grammar", *_LISTS)


def complete_ask(request: pb.CompleteRequest) -> Ask:
    refuse_unknown(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt: give text or token_ids", param="prompt", code="missing_field")
    return ask_of(request, request.text if kind == "text" else tuple(request.token_ids.ids))


def ask_of(request: Any, prompt: Any, **more: Any) -> Ask:
    """Convert the fields that completions and chats share to an `Ask`."""
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=sampling(request.sampling),
        output_ids=[tuple(ids.ids) for ids in request.output_ids],
        client_id=request.request_id,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        priority=request.priority,
        **more,
    )


def sampling(params: pb.SamplingParams) -> dict[str, Any]:
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
    return constraint("grammar" if kind == "ebnf" else kind, value, f"sampling.grammar.{kind}")


def refuse_unknown(message: Message, path: str = "") -> None:
    """Raise InvalidRequest for a field that this service does not have, at any depth."""
    for unknown in cast(Iterable[Any], UnknownFieldSet(message)):
        raise unknown_field(f"{path}field {unknown.field_number}")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in _parts(field.message_type, value):
            refuse_unknown(part, f"{path}{field.name}.")


def _parts(kind: Descriptor, value: Any) -> Iterable[Message]:
    """Return the messages in a field; for a map, its values if they are messages."""
    if not kind.GetOptions().map_entry:
        return [value] if isinstance(value, Message) else cast(Iterable[Message], value)
    holds_messages = kind.fields_by_name["value"].message_type is not None
    return cast(Iterable[Message], value.values()) if holds_messages else ()


def model(info: ModelInfo) -> pb.Model:
    return pb.Model(
        name=info.name,
        family=info.family,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        quantization=info.quantization,
    )
