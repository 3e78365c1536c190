"""JSON schemas of the answers of OpenAI's routes and the routes beside them, for the description of the interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...replicas.types import ReplicaLoad
from ..web.openapi import Schema, answer
from .openai_schemas import NULL, TEXT, told

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
IDS: Schema = {"type": "array", "items": COUNT}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _list_object(data: Schema, about: str, **more: Schema) -> Schema:
    return answer(object=_always("list"), data=told(list_of(data), about), **more)


def _always(kind: str) -> Schema:
    return {"const": kind, "description": "what this object is"}


_COUNTED: dict[str, Schema] = {
    "prompt_tokens": told(COUNT, "of all prompts, with what the template adds"),
    "completion_tokens": told(COUNT, "of all choices that were made"),
    "total_tokens": told(COUNT, "both together"),
    "prompt_tokens_details": told(
        answer(cached_tokens=told(COUNT, "those that were not computed again")), "more of the prompts"
    ),
}
_THINKING = answer(reasoning_tokens=told(COUNT, "those of what the model thought, with its marks"))
_USAGE = told(answer(**_COUNTED), "tokens that were read and made")
_CHAT_USAGE = told(
    answer(**_COUNTED, completion_tokens_details=told(_THINKING, "more of the choices")), _USAGE["description"]
)

_STOPPED: dict[str, Schema] = {
    "stop_reason": {"type": ["string", "integer"], "description": "the stop string or token id that ended the choice"}
}
_OUTPUT_IDS: dict[str, Schema] = {"token_ids": {**IDS, "description": "with return_token_ids: those of this choice"}}
_PROMPT_IDS: dict[str, Schema] = {
    "prompt_token_ids": {**IDS, "description": "with return_token_ids: the prompt's; in a stream, at its beginning"}
}
_ENDED: Schema = {
    "enum": ["stop", "length"],
    "description": "stop: an end-of-sequence id, a stop id or stop string; length: max_tokens, or the context is full",
}
_CHAT_ENDED: Schema = {
    "enum": [*_ENDED["enum"], "tool_calls"],
    "description": f"{_ENDED['description']}; tool_calls: the model called tools",
}
_FAULTS = ("deadline", "cancelled", "replica_lost", "error")  # after these the last event is the error


def _ends_in_chunk(ended: Schema) -> Schema:
    ends = [*ended["enum"], *_FAULTS, None]
    return {"enum": ends, "description": "null before the last chunk of the choice; after a fault there is an error"}


def _head(object_name: str, choice: Schema) -> dict[str, Schema]:
    return {
        "id": told(TEXT, "the server's own, of the whole answer; the log has it"),
        "object": _always(object_name),
        "created": told(COUNT, "Unix seconds"),
        "model": told(TEXT, "the name that is served"),
        "system_fingerprint": {
            **TEXT,
            "description": "of weights, their versions (several: the answer went on with others), and numerics: the "
            "same seed repeats on the same one",
        },
        "choices": told(list_of(choice), "answers; in an event, those that have something new"),
    }


def _chunk(object_name: str, choice: Schema, usage: Schema, more: dict[str, Schema] | None = None) -> Schema:
    more = more or {}
    last = {
        **_or_null(usage),
        "description": "with stream_options.include_usage: null, and of all in the last chunk; with "
        "continuous_usage_stats: so far",
    }
    return answer({"usage": last, **more}, **_head(object_name, choice))


_LEGACY_LOGPROBS = answer(
    tokens=told(list_of(TEXT), "each token as text"),
    token_logprobs=told(
        list_of({"type": ["number", "null"]}), "natural logarithms; null for the first token of an echoed prompt"
    ),
    top_logprobs=told(
        list_of({"type": ["object", "null"], "additionalProperties": NUMBER}),
        "at each place the likeliest tokens and theirs, and the chosen one",
    ),
    text_offset={**IDS, "description": "where each token begins in the text, in characters"},
)
_INDEX = told(COUNT, "choice i of prompt k is number k * n + i")
_COMPLETED: dict[str, Schema] = {
    "index": _INDEX,
    "text": told(TEXT, "what was made, behind the prompt if that is echoed; in an event what is new"),
    "logprobs": told(_or_null(_LEGACY_LOGPROBS), "null unless asked for"),
}
_WITH_IDS = {**_STOPPED, **_PROMPT_IDS, **_OUTPUT_IDS}
COMPLETION = answer(
    **_head("text_completion", answer(_WITH_IDS, **_COMPLETED, finish_reason=_ENDED)), usage=_USAGE
)  # fmt: skip
COMPLETION_CHUNK = _chunk(
    "text_completion", answer(_WITH_IDS, **_COMPLETED, finish_reason=_ends_in_chunk(_ENDED)), _USAGE
)

_TOKEN: dict[str, Schema] = {
    "token": told(TEXT, "as text; U+FFFD where its bytes are not whole characters"),
    "logprob": told(NUMBER, "natural logarithm; -9999 for none at all"),
    "bytes": told(list_of({**COUNT, "maximum": 255}), "its bytes, which joined with others' are UTF-8"),
}
_ALTERNATIVES = told(list_of(answer(**_TOKEN)), "the likeliest tokens at this place, best first")
_LOGPROBS = told(
    _or_null(
        answer(
            content=told(list_of(answer(**_TOKEN, top_logprobs=_ALTERNATIVES)), "one for each token of the choice"),
            refusal=told(NULL, "models here do not refuse apart from their text"),
        )
    ),
    "null unless asked for",
)
_THOUGHT: dict[str, Schema] = {
    "reasoning": {**TEXT, "description": "what the model thought"},
    "reasoning_content": {**TEXT, "description": "the same, under its older name"},
}
_ID = told(TEXT, "what the result of this call is to name")
_FUNCTION: Schema = {"const": "function", "description": "the only kind of call there is"}
_NAME = told(TEXT, "of the tool that is called")
_CALL = answer(
    id=_ID,
    type=_FUNCTION,
    function=told(
        answer(name=_NAME, arguments=told(TEXT, "a JSON object; where the answer ends within it, its beginning")),
        "what is called, and how",
    ),
)
_ROLE: Schema = {"const": "assistant", "description": "who speaks"}
_MESSAGE = answer(
    {
        **_THOUGHT,
        "tool_calls": told(
            list_of(_CALL),
            "what the model calls; the last may be cut off where finish_reason is length, or stop for a string of "
            "`stop` within it. Cut off before its name is known it is left out; its beginning is content only "
            "where tool_choice leaves calls free and none came before",
        ),
    },
    role=_ROLE,
    content=told(MAYBE_TEXT, "null where calls say it all"),
    refusal=told(NULL, "models here do not refuse apart from their text"),
)
_CHOICE = told(COUNT, "which choice this is, from 0")
CHAT = answer(
    _PROMPT_IDS,
    **_head(
        "chat.completion",
        answer(
            {**_STOPPED, **_OUTPUT_IDS},
            index=_CHOICE,
            message=told(_MESSAGE, "what the model says"),
            logprobs=_LOGPROBS,
            finish_reason=_CHAT_ENDED,
        ),
    ),
    usage=_CHAT_USAGE,
)
_PIECE = answer(
    {"id": _ID, "type": _FUNCTION},
    index=told(COUNT, "which call this is a piece of, from 0"),
    function=told(
        answer({"name": _NAME}, arguments=told(TEXT, "a piece, to be joined to those before")),
        "its name comes in the first piece, and so do id and type",
    ),
)
_DELTA = answer(
    {
        "role": _ROLE,
        "content": told(TEXT, "the next piece of text"),
        **_THOUGHT,
        "tool_calls": told(list_of(_PIECE), "the next pieces of calls"),
    }
)
CHAT_CHUNK = _chunk(
    "chat.completion.chunk",
    answer(
        {**_STOPPED, **_OUTPUT_IDS},
        index=_CHOICE,
        delta=told(_DELTA, "what is new"),
        logprobs=_LOGPROBS,
        finish_reason=_ends_in_chunk(_CHAT_ENDED),
    ),
    _CHAT_USAGE,
    _PROMPT_IDS,
)

_VECTOR = answer(
    object=_always("embedding"),
    index=told(COUNT, "which input it is of, from 0"),
    embedding={"anyOf": [list_of(NUMBER), TEXT], "description": "numbers, or base64 of them as little-endian fp32"},
)
_EMBEDDED = answer(prompt_tokens=told(COUNT, "of all inputs"), total_tokens=told(COUNT, "the same"))
EMBEDDINGS = _list_object(
    _VECTOR,
    "one vector for each input, in their order",
    model=told(TEXT, "the name that is served"),
    usage=told(_EMBEDDED, "tokens that were read"),
)
_CONTEXT = told(COUNT, "tokens of prompt and output together")
MODEL = answer(
    id=told(TEXT, "the name to ask for"),
    object=_always("model"),
    created=told(COUNT, "Unix seconds at which the service began"),
    owned_by=told(TEXT, "motley, whoever made the model"),
    max_model_len=_CONTEXT,
    quantization=told(TEXT, "how its weights are stored"),
)
MODELS = _list_object(MODEL, "the one model that is served")
TOKENIZED = answer(tokens=told(IDS, "the ids"), count=told(COUNT, "how many there are"), max_model_len=_CONTEXT)
DETOKENIZED = answer(prompt=told(TEXT, "their text"))
TOKENIZER_INFO = answer(
    bos_token=told(MAYBE_TEXT, "the token that begins a text; null where none is named"),
    eos_token=told(MAYBE_TEXT, "the token that ends one; null where none is named"),
    pad_token=told(MAYBE_TEXT, "the token that fills up; null where none is named"),
    tokenizer_class=told(TEXT, "always this word: no class of transformers is meant"),
    model_max_length=_CONTEXT,
    chat_template=told(MAYBE_TEXT, "the model's, in Jinja; null where it has none"),
)
_LOADED = {
    "running": "sequences that are computed",
    "waiting": "sequences that wait for room",
    "queued_prefill_tokens": "tokens of prompts that are still to be computed",
    "kv_blocks_free": "blocks of KV that are free, cached ones among them",
    "kv_blocks_total": "blocks of KV that there are",
    "steps": "steps of the engines so far",
    "max_running": "sequences that can be computed at once",
    "prompt_tokens": "of all prompts so far",
    "queried_tokens": "those of them that were looked for in the prefix cache",
    "cached_tokens": "and that were found there and not computed again",
    "generated_tokens_per_s": "over the last 10 s",
    "drafted_tokens": "tokens that speculation has tried so far",
    "accepted_tokens": "those of them that were right",
    "preemptions_swapped": "sequences that lost their place to others so far, and whose KV went to the host's memory",
    "preemptions_recomputed": "likewise, and whose KV was computed again",
    "external_queried_tokens": "tokens of prompts that the prefix store was asked for so far",
    "external_hit_tokens": "those of them that came from it",
    "draining": "whether all of them take nothing new",
    "weights_version": "updates of the weights that requests begin with; the fewest of any replica",
    "weights_contents": "digest of these weights; empty: there are none",
}
_OF_LOAD: dict[type, Schema] = {int: COUNT, float: NUMBER, bool: {"type": "boolean"}, str: TEXT}
_LOAD: dict[str, Any] = {
    field.name: told(_OF_LOAD[type(field.default)], _LOADED[field.name]) for field in dataclasses.fields(ReplicaLoad)
}
VERSION = answer(version=told(TEXT, "of Motley"))
HEALTH = answer(
    status={"const": "ok", "description": "anything else is a refusal"},
    state={
        "enum": ["serving", "holding"],
        "description": "whether a replica serves; or none is there, and requests are held for the first that comes",
    },
    held=told(COUNT, "requests that wait for any replica to take them"),
    load=told(answer(**_LOAD), "of the healthy replicas together"),
)
