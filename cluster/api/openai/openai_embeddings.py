"""OpenAI's /v1/embeddings: returns a vector for each input, of unit length as OpenAI's are."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....replicas.types import Pooling, StreamMessage
from ...request_errors import unsupported_field
from ...routing.router import Router
from ...transport.access_log import clean_id
from ...transport.caller import MAX_CLIENT_ID, Caller
from ...transport.http_server.http_responses import Route, caller_of, json_response
from ...transport.http_server.response_content import EncodedObject, JsonObject
from ..common.admission import RequestAdmitter
from ..common.collected_response import encode_values
from ..common.embedding import MAX_INPUTS, embed_all, unit_length
from ..common.fields.body_shapes import normalize_body
from ..common.fields.json_body import invalid_value, parse_body, take_field
from ..common.fields.unknown_fields import UnknownFieldPolicy
from ..common.fields.wire_names import in_wire_names
from ..common.parsed_request import ParsedRequest
from .openai_request import parse_labels, parse_prompts, parse_truncation
from .openai_request_schemas import BODY_SHAPES

_FORMATS = ("float", "base64")


class EmbeddingsProtocol:
    def __init__(self, admitter: RequestAdmitter, router: Router, unknown: UnknownFieldPolicy | None = None) -> None:
        self._unknown = unknown or UnknownFieldPolicy()
        self._admitter = admitter
        self._router = router

    def routes(self) -> tuple[Route, ...]:
        return (Route("POST", "/v1/embeddings", self._post),)

    async def embeddings(self, body: bytes, caller: Caller) -> EncodedObject:
        names: dict[str, str] = {}
        fields = parse_body(body, self._admitter.body_limits(MAX_INPUTS))
        normalize_body(fields, BODY_SHAPES["embedding"], self._unknown, names)
        form = take_one_of(fields, "encoding_format", _FORMATS)
        with in_wire_names(names):
            admitted = [await self._admitter.admit(parsed, caller) for parsed in parse_inputs(fields)]
        embedded = await embed_all(self._router, admitted, "input")
        tokens = sum(len(one.request.prompt_ids) for one in admitted)
        values = sum(len(one.embedding or ()) for one in embedded)
        return await encode_values(values, lambda: embeddings_body(self._admitter.info.name, embedded, tokens, form))

    async def _post(self, request: Request) -> Response:
        return json_response(await self.embeddings(await request.body(), caller_of(request)))


def embeddings_body(model: str, embedded: Sequence[StreamMessage], tokens: int, form: str) -> EncodedObject:
    return EncodedObject(
        {
            "object": "list",
            "data": [embedding_entry(index, unit_length(one), form) for index, one in enumerate(embedded)],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def parse_inputs(fields: dict[str, Any]) -> list[ParsedRequest]:
    """Return a `ParsedRequest` for each input. The field `pooling` is Motley's own: "last" (default) or "mean"."""
    if fields.get("dimensions") is not None:
        raise unsupported_field("dimensions", "shortened vectors need a model that was trained for it")
    return [
        ParsedRequest(
            model=take_field(fields, "model", str, ""),
            prompt=prompt,
            timeout_s=fields.get("timeout_s"),
            priority=0 if fields.get("priority") is None else fields["priority"],
            pooling=Pooling(take_one_of(fields, "pooling", tuple(map(str, Pooling)))),
            prompt_name="input",
            client_id=clean_id(take_field(fields, "request_id", str, ""), MAX_CLIENT_ID),
            add_special_tokens=take_field(fields, "add_special_tokens", bool, True),
            labels=parse_labels(fields),
            **parse_truncation(fields),
        )
        for prompt in parse_prompts(fields.get("input"), "input", MAX_INPUTS)
    ]


def take_one_of(fields: dict[str, Any], name: str, accepted: Sequence[str]) -> str:
    """Return the field's value, which must be one of these words; the first word if it is absent."""
    value = take_field(fields, name, str, accepted[0])
    if value not in accepted:
        raise invalid_value(name, value, " or ".join(map(repr, accepted)))
    return value


def embedding_entry(index: int, vector: list[float], form: str) -> JsonObject:
    """Return one vector of the answer. In the form base64 its values are little-endian fp32."""
    values: Any = vector
    if form == "base64":
        values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return {"object": "embedding", "index": index, "embedding": values}
