"""Bodies of OpenAI's routes and the routes beside them, as JSON schemas and as shapes of their objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ....replicas.types import Pooling
from ...transport.http_server.openapi import Schema, request_object
from ..common.embedding import MAX_INPUTS
from ..common.fields.body_shapes import BodyShape, body_shape
from ..common.fields.field_schemas import NULL, SOME_TEXT, TOKEN_IDS, TRUTH, prompts_schema, with_description
from ..common.fields.field_table import CHAT, COMPLETION, BodyField, fields_by_name


def fields_body(fields: Iterable[BodyField], required: str) -> Schema:
    """Return the schema of the body that a table of fields describes. A refused field is null, with what to do
    instead.
    """
    return request_object({field.name: _property(field) for field in fields}, [required])


def _property(field: BodyField) -> Schema:
    if field.instead is not None:
        return {"enum": [None, *field.neutral], "description": f"refused with another value: {field.instead}"}
    if field.only:
        return {"enum": [*field.only], "description": f"{field.doc}; other values are refused"}
    return with_description(field.schema, field.doc)


_SHARED = fields_by_name(COMPLETION)
_CHAT = fields_by_name(CHAT)


def _shared(*names: str) -> dict[str, Schema]:
    return {name: _property(_SHARED[name]) for name in names}


EMBEDDINGS = request_object(
    {
        "input": with_description(
            prompts_schema(MAX_INPUTS), f"a text, token ids, or a list of at most {MAX_INPUTS} of either"
        ),
        "encoding_format": {
            "enum": ["float", "base64"],
            "default": "float",
            "description": "base64: of little-endian fp32",
        },
        "pooling": {
            "enum": [str(pooling) for pooling in Pooling],
            "default": str(Pooling.LAST),
            "description": "the last token's hidden state, or the mean of all tokens'",
        },
        "dimensions": with_description(NULL, "refused: shortened vectors need a model that was trained for it"),
        **_shared(
            "model", "user", "timeout_s", "priority", "request_id", "truncate_prompt_tokens", "truncation_side",
            "add_special_tokens",
        ),
    },
    ["input"],
)  # fmt: skip
TOKENIZE = request_object(
    {
        **_shared("model"),
        "prompt": with_description(SOME_TEXT, "the text; instead of messages"),
        "messages": _property(_CHAT["messages"]),
        "tools": with_description(_CHAT["tools"].schema, "functions that the model may call; with messages"),
        "chat_template_kwargs": with_description(
            _CHAT["chat_template_kwargs"].schema, "arguments of its template; with messages"
        ),
        "add_special_tokens": {**TRUTH, "default": True, "description": "as the tokenizer would; with prompt"},
        "add_generation_prompt": with_description(
            _CHAT["add_generation_prompt"].schema, "an answer is begun; with messages"
        ),
        "continue_final_message": with_description(
            _CHAT["continue_final_message"].schema, "the last goes on; with messages"
        ),
    }
)
DETOKENIZE = request_object(
    {
        **_shared("model"),
        "tokens": with_description(TOKEN_IDS, "the ids"),
        "skip_special_tokens": {**TRUTH, "default": False, "description": "leave special tokens out of the text"},
    },
    ["tokens"],
)

BODY_SCHEMAS: Mapping[str, Schema] = {
    "completion": fields_body(COMPLETION, "prompt"),
    "chat": fields_body(CHAT, "messages"),
    "embedding": EMBEDDINGS,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}


def _shape(route: str) -> BodyShape:
    shape = body_shape(BODY_SCHEMAS[route], route)
    assert shape is not None
    return shape


BODY_SHAPES: Mapping[str, BodyShape] = {route: _shape(route) for route in BODY_SCHEMAS}
