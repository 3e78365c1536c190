"""Embeddings of motley.v1: converts a request to one `ParsedRequest` for each input, and vectors to the response."""

from __future__ import annotations

from collections.abc import Sequence

from ....replicas.errors import InvalidRequest
from ....replicas.types import Pooling, StreamMessage
from ...protos import inference_pb2 as pb
from ..common.embedding import MAX_INPUTS, unit_length
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.parsed_request import ParsedRequest
from .motley_response import weights_message

_POOLING = {pb.POOLING_UNSPECIFIED: Pooling.LAST, pb.POOLING_LAST: Pooling.LAST, pb.POOLING_MEAN: Pooling.MEAN}


def parse_embeddings_request(request: pb.EmbeddingsRequest) -> list[ParsedRequest]:
    """Return a `ParsedRequest` for each input. Raises InvalidRequest naming the field."""
    if len(request.inputs) > MAX_INPUTS:  # refuse too many before each is read
        raise _invalid("inputs", f"{len(request.inputs)} of them; expected 1 to {MAX_INPUTS}")
    refuse_unknown_fields(request)
    if not request.inputs:
        raise _invalid("inputs", f"0 of them; expected 1 to {MAX_INPUTS}")
    if request.pooling not in _POOLING:
        raise _invalid("pooling", f"{request.pooling} is not accepted; expected POOLING_LAST or POOLING_MEAN")
    return [_parse_item(request, item, f"inputs[{index}]") for index, item in enumerate(request.inputs)]


def embeddings_message(
    model: str, embedded: Sequence[StreamMessage], tokens: int, *, normalize: bool
) -> pb.EmbeddingsResponse:
    """Return the response for messages with embeddings of prompts that have so many `tokens` together."""
    vectors = [unit_length(one) if normalize else one.embedding for one in embedded]
    weights = dict.fromkeys(one.weights_status for one in embedded if one.weights_status is not None)
    return pb.EmbeddingsResponse(
        model=model,
        embeddings=[pb.Embedding(values=vector) for vector in vectors],
        usage=pb.Usage(prompt_tokens=tokens, cached_tokens=sum(one.cached_tokens or 0 for one in embedded)),
        weights=map(weights_message, weights),
    )


def _parse_item(request: pb.EmbeddingsRequest, item: pb.EmbeddingInput, name: str) -> ParsedRequest:
    kind = item.WhichOneof("input")
    if kind is None:
        raise InvalidRequest(f"{name}: give text or token_ids", param=name, code="missing_field")
    return ParsedRequest(
        model=request.model,
        prompt=item.text if kind == "text" else tuple(item.token_ids.ids),
        client_id=request.request_id,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        priority=request.priority,
        pooling=_POOLING[request.pooling],
        prompt_name=name,
    )


def _invalid(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {what}", param=name, code="invalid_value")
