"""OpenAI's routes, and those beside them, for the description of the interface."""

from __future__ import annotations

from collections.abc import Iterable

from ...replicas.errors import NotFound, Unavailable
from ...replicas.protocol import Pooling
from ..embed import MAX_INPUTS
from ..web.openapi import Operation, Operations, Schema, object_of
from . import openai_answers as answers
from .openai_schemas import NULL, SOME_TEXT, TOKEN_IDS, TRUTH, prompts_of, told
from .openai_table import CHAT, COMPLETION, Field, by_name


def fields_body(fields: Iterable[Field], required: str) -> Schema:
    """The body that a table of fields describes. Refused fields are there as null, with what to do instead."""
    return object_of({field.name: _property(field) for field in fields}, [required])


def _property(field: Field) -> Schema:
    if field.instead is not None:
        return told(NULL, f"refused: {field.instead}")
    if field.only:
        return {"enum": [*field.only], "description": f"{field.doc}; other values are refused"}
    return told(field.schema, field.doc)


_SHARED = by_name(COMPLETION)
_CHAT = by_name(CHAT)


def _shared(*names: str) -> dict[str, Schema]:
    return {name: _property(_SHARED[name]) for name in names}


_EMBEDDINGS = object_of(
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
        **_shared("model", "user", "timeout_s", "priority"),
    },
    ["input"],
)
_TOKENIZE = object_of(
    {
        **_shared("model"),
        "prompt": told(SOME_TEXT, "the text; instead of messages"),
        "messages": _property(_CHAT["messages"]),
        "tools": told(_CHAT["tools"].schema, "functions that the model may call; with messages"),
        "chat_template_kwargs": told(_CHAT["chat_template_kwargs"].schema, "arguments of its template; with messages"),
        "add_special_tokens": {**TRUTH, "default": True, "description": "as the tokenizer would; with prompt"},
    }
)
_DETOKENIZE = object_of(
    {
        **_shared("model"),
        "tokens": told(TOKEN_IDS, "the ids"),
        "skip_special_tokens": {**TRUTH, "default": False, "description": "leave special tokens out of the text"},
    },
    ["tokens"],
)

OPERATIONS: Operations = {
    ("POST", "/v1/completions"): Operation(
        "Continue a text",
        answers.COMPLETION,
        fields_body(COMPLETION, "prompt"),
        answers.COMPLETION_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        answers.CHAT,
        fields_body(CHAT, "messages"),
        answers.CHAT_CHUNK,
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Turn texts into vectors of unit length", answers.EMBEDDINGS, _EMBEDDINGS, engine=True, more=(NotFound,)
    ),
    ("GET", "/v1/models"): Operation("The models served", answers.MODELS),
    ("GET", "/v1/models/{name:path}"): Operation("One model", answers.MODEL, more=(NotFound,)),
    ("POST", "/tokenize"): Operation(
        "Token ids of a text, or of a conversation in the model's template",
        answers.TOKENIZED,
        _TOKENIZE,
        more=(NotFound,),
    ),
    ("POST", "/detokenize"): Operation("The text of token ids", answers.DETOKENIZED, _DETOKENIZE, more=(NotFound,)),
    ("GET", "/tokenizer_info"): Operation(
        "Named tokens and chat template, for programs that have no tokenizer", answers.TOKENIZER_INFO
    ),
    ("GET", "/health"): Operation(
        "Whether requests are served, or held for a replica that is still to come, and what the healthy ones carry",
        answers.HEALTH,
        more=(Unavailable,),
    ),
}
