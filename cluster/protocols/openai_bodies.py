"""Bodies of OpenAI's routes and the routes beside them, as JSON schemas and as shapes of their objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...replicas.types import Pooling
from ..embed import MAX_INPUTS
from ..web.openapi import Schema, object_of
from .body_shapes import Shape, shape_of
from .openai_schemas import NULL, SOME_TEXT, TOKEN_IDS, TRUTH, prompts_of, told
from .openai_table import CHAT, COMPLETION, Field, by_name


def fields_body(fields: Iterable[Field], required: str) -> Schema:
    """Return the schema of the body that a table of fields describes. A refused field is null, with what to do
    instead.
    """
    return object_of({field.name: _property(field) for field in fields}, [required])


def _property(field: Field) -> Schema:
    if field.instead is not None:
        return {"enum": [None, *field.neutral], "description": f"refused with another value: {field.instead}"}
    if field.only:
        return {"enum": [*field.only], "description": f"{field.doc}; other values are refused"}
    return told(field.schema, field.doc)


_SHARED = by_name(COMPLETION)
_CHAT = by_name(CHAT)


def _shared(*names: str) -> dict[str, Schema]:
    return {name: _property(_SHARED[name]) for name in names}


EMBEDDINGS = object_of(
    {
        "input": told(prompts_of(MAX_INPUTS), f"a text, token ids, or a list of at most {MAX_INPUTS} of either"),
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
        "dimensions": told(NULL, "refused: shortened vectors need a model that was trained for it"),
        **_shared(
            "model", "user", "timeout_s", "priority", "request_id", "truncate_prompt_tokens", "truncation_side",
            "add_special_tokens",
        ),
    },
    ["input"],
)  # fmt: skip
TOKENIZE = object_of(
    {
        **_shared("model"),
        "prompt": told(SOME_TEXT, "the text; instead of messages"),
        "messages": _property(_CHAT["messages"]),
        "tools": told(_CHAT["tools"].schema, "functions that the model may call; with messages"),
        "chat_template_kwargs": told(_CHAT["chat_template_kwargs"].schema, "arguments of its template; with messages"),
        "add_special_tokens": {**TRUTH, "default": True, "description": "as the tokenizer would; with prompt"},
        "add_generation_prompt": told(_CHAT["add_generation_prompt"].schema, "an answer is begun; with messages"),
        "continue_final_message": told(_CHAT["continue_final_message"].schema, "the last goes on; with messages"),
    }
)
DETOKENIZE = object_of(
    {
        **_shared("model"),
        "tokens": told(TOKEN_IDS, "the ids"),
        "skip_special_tokens": {**TRUTH, "default": False, "description": "leave special tokens out of the text"},
    },
    ["tokens"],
)

BODIES: Mapping[str, Schema] = {
    "completion": fields_body(COMPLETION, "prompt"),
    "chat": fields_body(CHAT, "messages"),
    "embedding": EMBEDDINGS,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}


def _shape(route: str) -> Shape:
    shape = shape_of(BODIES[route], route)
    assert shape is not None
    return shape


SHAPES: Mapping[str, Shape] = {route: _shape(route) for route in BODIES}
