"""What OpenAI's routes, and those beside them, answer: as JSON schemas, for the description of the interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...replicas.protocol import ReplicaLoad
from ..web.openapi import Schema, answer
from .openai_schemas import NULL, TEXT

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
IDS: Schema = {"type": "array", "items": COUNT}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _list_object(data: Schema, **more: Schema) -> Schema:
    return answer(object={"const": "list"}, data=list_of(data), **more)


_COUNTED: dict[str, Schema] = {
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
    "total_tokens": COUNT,
    "prompt_tokens_details": answer(cached_tokens={**COUNT, "description": "those that were not computed again"}),
}
_USAGE = answer(**_COUNTED)
_CHAT_USAGE = answer(**_COUNTED, completion_tokens_details=answer(reasoning_tokens=COUNT))

_STOPPED: dict[str, Schema] = {
    "stop_reason": {"type": ["string", "integer"], "description": "the stop string or token id that ended the choice"}
}
_ENDED: Schema = {"enum": ["stop", "length"]}
_CHAT_ENDED: Schema = {"enum": ["stop", "length", "tool_calls"]}
_FAULTS = ("deadline", "cancelled", "replica_lost", "error")  # the next event, the last, is the error


def _ends_in_chunk(ended: Schema) -> Schema:
    ends = [*ended["enum"], *_FAULTS, None]
    return {"enum": ends, "description": "null before the last chunk of the choice; after a fault there is an error"}


def _head(object_name: str, choice: Schema) -> dict[str, Schema]:
    return {
        "id": TEXT,
        "object": {"const": object_name},
        "created": {**COUNT, "description": "Unix seconds"},
        "model": TEXT,
        "system_fingerprint": {**TEXT, "description": "of weights and numerics: the same seed repeats on the same one"},
        "choices": list_of(choice),
    }


def _chunk(object_name: str, choice: Schema, usage: Schema) -> Schema:
    last = {**_or_null(usage), "description": "with stream_options.include_usage: null, and of all in the last chunk"}
    return answer({"usage": last}, **_head(object_name, choice))


_LEGACY_LOGPROBS = answer(
    tokens=list_of(TEXT),
    token_logprobs=list_of({"type": ["number", "null"]}),
    top_logprobs=list_of({"type": ["object", "null"], "additionalProperties": NUMBER}),
    text_offset={**IDS, "description": "where each token begins in the text, in characters"},
)
_COMPLETED: dict[str, Schema] = {"index": COUNT, "text": TEXT, "logprobs": _or_null(_LEGACY_LOGPROBS)}
COMPLETION = answer(
    **_head("text_completion", answer(_STOPPED, **_COMPLETED, finish_reason=_ENDED)), usage=_USAGE
)  # fmt: skip
COMPLETION_CHUNK = _chunk(
    "text_completion", answer(_STOPPED, **_COMPLETED, finish_reason=_ends_in_chunk(_ENDED)), _USAGE
)

_TOKEN: dict[str, Schema] = {
    "token": TEXT,
    "logprob": {**NUMBER, "description": "natural logarithm; -9999 for none at all"},
    "bytes": list_of({**COUNT, "maximum": 255}),
}
_LOGPROBS = _or_null(
    answer(content=list_of(answer(**_TOKEN, top_logprobs=list_of(answer(**_TOKEN)))), refusal=NULL)
)  # fmt: skip
_THOUGHT: dict[str, Schema] = {
    "reasoning": {**TEXT, "description": "what the model thought"},
    "reasoning_content": {**TEXT, "description": "the same, under its older name"},
}
_CALL = answer(id=TEXT, type={"const": "function"}, function=answer(name=TEXT, arguments=TEXT))
_MESSAGE = answer(
    {**_THOUGHT, "tool_calls": list_of(_CALL)},
    role={"const": "assistant"},
    content={**MAYBE_TEXT, "description": "null where calls say it all"},
    refusal=NULL,
)
CHAT = answer(
    **_head(
        "chat.completion",
        answer(_STOPPED, index=COUNT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_CHAT_ENDED),
    ),
    usage=_CHAT_USAGE,
)
_PIECE = answer(
    {"id": TEXT, "type": {"const": "function"}},
    index=COUNT,
    function=answer({"name": TEXT}, arguments={**TEXT, "description": "a piece, to be joined to those before"}),
)
_DELTA = answer({"role": {"const": "assistant"}, "content": TEXT, **_THOUGHT, "tool_calls": list_of(_PIECE)})
CHAT_CHUNK = _chunk(
    "chat.completion.chunk",
    answer(_STOPPED, index=COUNT, delta=_DELTA, logprobs=_LOGPROBS, finish_reason=_ends_in_chunk(_CHAT_ENDED)),
    _CHAT_USAGE,
)

_VECTOR = answer(
    object={"const": "embedding"},
    index=COUNT,
    embedding={"anyOf": [list_of(NUMBER), TEXT], "description": "numbers, or base64 of them as little-endian fp32"},
)
EMBEDDINGS = _list_object(_VECTOR, model=TEXT, usage=answer(prompt_tokens=COUNT, total_tokens=COUNT))
MODEL = answer(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    max_model_len={**COUNT, "description": "tokens of prompt and output together"},
    quantization=TEXT,
)
MODELS = _list_object(MODEL)
TOKENIZED = answer(tokens=IDS, count=COUNT, max_model_len=COUNT)
DETOKENIZED = answer(prompt=TEXT)
TOKENIZER_INFO = answer(
    bos_token=MAYBE_TEXT,
    eos_token=MAYBE_TEXT,
    pad_token=MAYBE_TEXT,
    tokenizer_class=TEXT,
    model_max_length=COUNT,
    chat_template=MAYBE_TEXT,
)
_LOAD: dict[str, Any] = {
    field.name: COUNT if isinstance(field.default, int) else NUMBER for field in dataclasses.fields(ReplicaLoad)
}
HEALTH = answer(status={"const": "ok"}, load=answer(**_LOAD))
