"""OpenAI's /v1/embeddings: returns a vector for each input, of unit length as OpenAI's are."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...replicas.types import Pooling
from ..access_log import clean_id
from ..ask import Ask
from ..caller import MAX_CLIENT_ID, Caller
from ..door import Door
from ..embed import MAX_INPUTS, Embedded, embed_all
from ..errors import unsupported_field
from ..gather import written_of
from ..routing.router import Router
from ..unknown_fields import UnknownFields
from ..web.answers import Object, Written
from ..web.http import Route, answer, caller_of
from .body_shapes import settle
from .openai_ask import labels, prompts, truncation
from .openai_bodies import SHAPES
from .openai_fields import parse_object, take, wrong_type

_FORMATS = ("float", "base64")


class EmbeddingsProtocol:
    def __init__(self, door: Door, router: Router, unknown: UnknownFields | None = None) -> None:
        self._unknown = unknown or UnknownFields()
        self._door = door
        self._router = router

    def routes(self) -> tuple[Route, ...]:
        return (Route("POST", "/v1/embeddings", self._post),)

    async def embeddings(self, body: bytes, caller: Caller) -> Written:
        fields = settle(parse_object(body, self._door.most(MAX_INPUTS)), SHAPES["embedding"], self._unknown)
        form = one_of(fields, "encoding_format", _FORMATS)
        admitted = [await self._door.admit(ask, caller) for ask in asks(fields)]
        embedded = await embed_all(self._router, admitted, "input")
        values = sum(len(one.values) for one in embedded)
        return await written_of(values, lambda: whole(self._door.info.name, embedded, form))

    async def _post(self, request: Request) -> Response:
        return answer(await self.embeddings(await request.body(), caller_of(request)))


def whole(model: str, embedded: Sequence[Embedded], form: str) -> Written:
    tokens = sum(one.prompt_tokens for one in embedded)
    return Written(
        {
            "object": "list",
            "data": [entry(index, one.normalized(), form) for index, one in enumerate(embedded)],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def asks(fields: dict[str, Any]) -> list[Ask]:
    """Return an `Ask` for each input. The field `pooling` is Motley's own: "last" (default) or "mean"."""
    if fields.get("dimensions") is not None:
        raise unsupported_field("dimensions", "shortened vectors need a model that was trained for it")
    return [
        Ask(
            model=take(fields, "model", str, ""),
            prompt=prompt,
            timeout_s=fields.get("timeout_s"),
            priority=0 if fields.get("priority") is None else fields["priority"],
            pooling=Pooling(one_of(fields, "pooling", tuple(map(str, Pooling)))),
            prompt_name="input",
            client_id=clean_id(take(fields, "request_id", str, ""), MAX_CLIENT_ID),
            add_special_tokens=take(fields, "add_special_tokens", bool, True),
            labels=labels(fields),
            **truncation(fields),
        )
        for prompt in prompts(fields.get("input"), "input", MAX_INPUTS)
    ]


def one_of(fields: dict[str, Any], name: str, accepted: Sequence[str]) -> str:
    """Return the field's value, which must be one of these words; the first word if it is absent."""
    value = take(fields, name, str, accepted[0])
    if value not in accepted:
        raise wrong_type(name, value, " or ".join(map(repr, accepted)))
    return value


def entry(index: int, embedded: Embedded, form: str) -> Object:
    """Return one vector of the answer. In the form base64 its values are little-endian fp32."""
    values: Any = list(embedded.values)
    if form == "base64":
        values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return {"object": "embedding", "index": index, "embedding": values}
