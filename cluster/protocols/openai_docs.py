"""OpenAI's routes, and those beside them, for the description of the interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ...replicas.errors import NotFound
from ...replicas.protocol import Pooling, ReplicaLoad
from ..web.openapi import Operation, Operations, Schema, answer, body
from .openai_table import CHAT, COMPLETION, Field, by_name

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TRUTH: Schema = {"type": "boolean"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_MAYBE: Schema = {"type": ["object", "null"]}
_LOAD = answer(**{field.name: _COUNT for field in dataclasses.fields(ReplicaLoad)})
_USAGE = answer(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_ENDS: Schema = {"enum": ["stop", "length", "tool_calls", None]}


def fields_body(fields: Iterable[Field], required: str) -> Schema:
    """The body that a table of fields describes. Refused fields are named, with what to do instead."""
    fields = tuple(fields)
    refused = "; ".join(f"{field.name}: {field.instead}" for field in fields if field.instead is not None)
    found = body({field.name: _property(field) for field in fields if field.instead is None}, [required])
    return {**found, "description": f"Refused by name where they are not null: {refused}."}


def _property(field: Field) -> Schema:
    if field.only:
        return {"enum": [*field.only], "description": f"{field.doc}; other values are refused"}
    return {**field.schema, "description": field.doc}


def _answers(object_name: str, choice: Schema, *, usage: bool) -> Schema:
    fields = {
        "id": _TEXT,
        "object": {"const": object_name},
        "created": _COUNT,
        "model": _TEXT,
        "choices": {"type": "array", "items": choice},
    }
    return answer(**fields, usage=_USAGE) if usage else answer(**fields)


_COMPLETED = answer(index=_COUNT, text=_TEXT, logprobs=_MAYBE, finish_reason=_ENDS)
_MESSAGE = answer(role={"const": "assistant"}, content=_MAYBE_TEXT)
_CHATTED = answer(index=_COUNT, message=_MESSAGE, logprobs=_MAYBE, finish_reason=_ENDS)
_DELTA = answer(index=_COUNT, delta={"type": "object"}, logprobs=_MAYBE, finish_reason=_ENDS)
_MODEL = answer(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_SHARED = by_name(COMPLETION)
_CHAT = by_name(CHAT)


def _shared(*names: str) -> dict[str, Schema]:
    return {name: _property(_SHARED[name]) for name in names}


_EMBEDDINGS = body(
    {
        "input": {**_SHARED["prompt"].schema, "description": "a text, token ids, or a list of either"},
        "encoding_format": {"enum": ["float", "base64"], "description": "base64: of little-endian fp32; default float"},
        "pooling": {
            "enum": [str(pooling) for pooling in Pooling],
            "description": "the last token's hidden state, or the mean of all tokens'; default last",
        },
        **_shared("model", "user", "timeout_s", "priority"),
    },
    ["input"],
)
_TOKENIZE = body(
    {
        **_shared("model", "prompt"),
        "prompt": {**_TEXT, "description": "the text; instead of messages"},
        "messages": _property(_CHAT["messages"]),
        "tools": _property(_CHAT["tools"]),
        "chat_template_kwargs": _property(_CHAT["chat_template_kwargs"]),
        "add_special_tokens": {**_TRUTH, "default": True, "description": "as the tokenizer would; of a prompt only"},
    }
)
_DETOKENIZE = body(
    {
        **_shared("model"),
        "tokens": _IDS,
        "skip_special_tokens": {**_TRUTH, "default": False},
    },
    ["tokens"],
)
_VECTOR = answer(object={"const": "embedding"}, index=_COUNT, embedding={"type": ["array", "string"]})
_LIST: dict[str, Any] = {"object": {"const": "list"}}

OPERATIONS: Operations = {
    ("POST", "/v1/completions"): Operation(
        "Continue a text",
        _answers("text_completion", _COMPLETED, usage=True),
        fields_body(COMPLETION, "prompt"),
        _answers("text_completion", _COMPLETED, usage=False),
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        _answers("chat.completion", _CHATTED, usage=True),
        fields_body(CHAT, "messages"),
        _answers("chat.completion.chunk", _DELTA, usage=False),
        engine=True,
        more=(NotFound,),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Turn texts into vectors of unit length",
        answer(**_LIST, data={"type": "array", "items": _VECTOR}, model=_TEXT, usage={"type": "object"}),
        _EMBEDDINGS,
        engine=True,
        more=(NotFound,),
    ),
    ("GET", "/v1/models"): Operation("The models served", answer(**_LIST, data={"type": "array", "items": _MODEL})),
    ("GET", "/v1/models/{name:path}"): Operation("One model", _MODEL, more=(NotFound,)),
    ("POST", "/tokenize"): Operation(
        "Token ids of a text, or of a conversation in the model's template",
        answer(tokens=_IDS, count=_COUNT, max_model_len=_COUNT),
        _TOKENIZE,
        more=(NotFound,),
    ),
    ("POST", "/detokenize"): Operation("The text of token ids", answer(prompt=_TEXT), _DETOKENIZE, more=(NotFound,)),
    ("GET", "/tokenizer_info"): Operation(
        "Named tokens and chat template, for programs that have no tokenizer",
        answer(tokenizer_class=_TEXT, model_max_length=_COUNT, chat_template=_MAYBE_TEXT),
    ),
    ("GET", "/health"): Operation(
        "Whether a replica's engine goes round, and what the healthy replicas carry together",
        answer(status={"const": "ok"}, load=_LOAD),
    ),
}
