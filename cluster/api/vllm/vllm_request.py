"""Conversion of vllm.grpc.engine's requests to a `ParsedRequest`. Every field works or is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.grammar.grammar_spec import GrammarSpec
from ....replicas.sampling_params import SamplingParams
from ....replicas.types import Pooling
from ...protos import vllm_engine_pb2 as pb
from ...request_errors import unsupported_field
from ..common.fields.constraints import read_constraint
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.parsed_request import ParsedRequest

WIRE_NAMES: Mapping[str, str] = {
    **{field.name: f"sampling_params.{field.name}" for field in fields(SamplingParams)},
    "truncate_prompt_tokens": "sampling_params.truncate_prompt_tokens",
}
_REFUSED = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs", "extra_mm_inputs")
# The protocol has no value 0 for these, so 0 stands for 1, which has no effect.
_ZERO_IS_ONE = ("top_p", "repetition_penalty", "n")
_PLAIN = ("top_k", "min_tokens", "ignore_eos", "skip_special_tokens")
_FLOATS = ("min_p", "frequency_penalty", "presence_penalty")
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "seed")


def parse_generate_request(request: pb.GenerateRequest) -> ParsedRequest:
    """Convert a request. Raises InvalidRequest naming the field."""
    refuse_unknown_fields(request)
    for field, _ in request.ListFields():
        if field.name in _REFUSED:
            raise unsupported_field(field.name)
    if request.data_parallel_rank:
        instead = "leave it out: replicas are not for clients to choose"
        raise unsupported_field("data_parallel_rank", instead, request.data_parallel_rank)
    name, prompt = _prompt(request)
    params = request.sampling_params
    return ParsedRequest(
        model="",
        prompt=prompt,
        prompt_name=name,
        sampling=_sampling(params),
        truncate=params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None,
        wire_names=WIRE_NAMES,
        client_id=request.request_id,
        prompt_shown=None,
    )


def constraint_bytes(params: pb.SamplingParams) -> int:
    """Return about how many bytes the constraint on the text has."""
    if params.WhichOneof("constraint") == "choice":
        return sum(len(text) for text in params.choice.choices)
    texts = (params.json_schema, params.regex, params.grammar, params.structural_tag)
    return sum(len(text) for text in texts)


def parse_embed_request(request: pb.EmbedRequest) -> ParsedRequest:
    refuse_unknown_fields(request)
    return ParsedRequest(
        model="",
        prompt=tuple(request.tokenized.input_ids),
        prompt_name="tokenized.input_ids",
        client_id=request.request_id,
        pooling=Pooling.LAST,
    )


def check_rank(name: str, rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise InvalidRequest(f"{name}: there is no {rank}; expected 0 to {count - 1}", param=name, code="invalid_value")


def _prompt(request: pb.GenerateRequest) -> tuple[str, Any]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input: give tokenized or text", param="input", code="missing_field")
    if kind == "text":
        return "text", request.text
    return "tokenized.input_ids", tuple(request.tokenized.input_ids)


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """Return all sampling parameters, since the model's own defaults are not this protocol's."""
    given: dict[str, Any] = {name: getattr(params, name) for name in _PLAIN}
    given |= {name: shortest_decimal(getattr(params, name)) for name in _FLOATS}
    given |= {name: shortest_decimal(getattr(params, name)) or 1 for name in _ZERO_IS_ONE}
    given |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}  # type: ignore[arg-type]
    given["temperature"] = shortest_decimal(params.temperature) if params.HasField("temperature") else 1.0
    given["stop"] = tuple(params.stop)
    given["stop_token_ids"] = tuple(params.stop_token_ids)
    given["grammar"] = _grammar(params)
    given["logit_bias"] = {token_id: shortest_decimal(bias) for token_id, bias in params.logit_bias.items()}
    return given


def _grammar(params: pb.SamplingParams) -> GrammarSpec | None:
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    value = list(params.choice.choices) if name == "choice" else getattr(params, name)
    return read_constraint(name, value, f"sampling_params.{name}")


def shortest_decimal(value: float) -> float:
    """Return the number that was meant by a 32-bit float: 0.7 rather than 0.699999988, as over other protocols."""
    if isinstance(value, int) or value != value or value in (float("inf"), -float("inf")):
        return value
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value
