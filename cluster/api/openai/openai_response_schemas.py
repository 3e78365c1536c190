"""JSON schemas of the answers of OpenAI's routes and the routes beside them, for the description of the interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from ....replicas.host.metric_fields import metrics_of
from ....replicas.types import ReplicaLoad
from ...transport.http_server.openapi import Schema, response_object
from ..common.fields.field_schemas import COUNT, NULL, TEXT, list_schema, with_description

NUMBER: Schema = {"type": "number"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
IDS: Schema = {"type": "array", "items": COUNT}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _list_object(data: Schema, about: str, **more: Schema) -> Schema:
    return response_object(object=_always("list"), data=with_description(list_schema(data), about), **more)


def _always(kind: str) -> Schema:
    return {"const": kind, "description": "what this object is"}


_COUNTED: dict[str, Schema] = {
    "prompt_tokens": with_description(COUNT, "of all prompts, with what the template adds"),
    "completion_tokens": with_description(COUNT, "of all choices that were made"),
    "total_tokens": with_description(COUNT, "both together"),
    "prompt_tokens_details": with_description(
        response_object(cached_tokens=with_description(COUNT, "those that were not computed again")),
        "more of the prompts",
    ),
}
_THINKING = response_object(reasoning_tokens=with_description(COUNT, "those of what the model thought, with its marks"))
_USAGE = with_description(response_object(**_COUNTED), "tokens that were read and made")
_CHAT_USAGE = with_description(
    response_object(**_COUNTED, completion_tokens_details=with_description(_THINKING, "more of the choices")),
    _USAGE["description"],
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
        "id": with_description(TEXT, "the server's own, of the whole answer; the log has it"),
        "object": _always(object_name),
        "created": with_description(COUNT, "Unix seconds"),
        "model": with_description(TEXT, "the name that is served"),
        "system_fingerprint": {
            **TEXT,
            "description": "of weights, their versions (several: the answer went on with others), and numerics: the "
            "same seed repeats on the same one",
        },
        "choices": with_description(list_schema(choice), "answers; in an event, those that have something new"),
    }


def _chunk(object_name: str, choice: Schema, usage: Schema, more: dict[str, Schema] | None = None) -> Schema:
    more = more or {}
    last = {
        **_or_null(usage),
        "description": "with stream_options.include_usage: null, and of all in the last chunk; with "
        "continuous_usage_stats: so far",
    }
    return response_object({"usage": last, **more}, **_head(object_name, choice))


_LEGACY_LOGPROBS = response_object(
    tokens=with_description(list_schema(TEXT), "each token as text"),
    token_logprobs=with_description(
        list_schema({"type": ["number", "null"]}), "natural logarithms; null for the first token of an echoed prompt"
    ),
    top_logprobs=with_description(
        list_schema({"type": ["object", "null"], "additionalProperties": NUMBER}),
        "at each place the likeliest tokens and theirs, and the chosen one",
    ),
    text_offset={**IDS, "description": "where each token begins in the text, in characters"},
)
_INDEX = with_description(COUNT, "choice i of prompt k is number k * n + i")
_COMPLETED: dict[str, Schema] = {
    "index": _INDEX,
    "text": with_description(TEXT, "what was made, behind the prompt if that is echoed; in an event what is new"),
    "logprobs": with_description(_or_null(_LEGACY_LOGPROBS), "null unless asked for"),
}
_WITH_IDS = {**_STOPPED, **_PROMPT_IDS, **_OUTPUT_IDS}
COMPLETION = response_object(
    **_head("text_completion", response_object(_WITH_IDS, **_COMPLETED, finish_reason=_ENDED)), usage=_USAGE
)  # fmt: skip
COMPLETION_CHUNK = _chunk(
    "text_completion", response_object(_WITH_IDS, **_COMPLETED, finish_reason=_ends_in_chunk(_ENDED)), _USAGE
)

_TOKEN: dict[str, Schema] = {
    "token": with_description(TEXT, "as text; U+FFFD where its bytes are not whole characters"),
    "logprob": with_description(NUMBER, "natural logarithm; -9999 for none at all"),
    "bytes": with_description(list_schema({**COUNT, "maximum": 255}), "its bytes, which joined with others' are UTF-8"),
}
_ALTERNATIVES = with_description(
    list_schema(response_object(**_TOKEN)), "the likeliest tokens at this place, best first"
)
_LOGPROBS = with_description(
    _or_null(
        response_object(
            content=with_description(
                list_schema(response_object(**_TOKEN, top_logprobs=_ALTERNATIVES)), "one for each token of the choice"
            ),
            refusal=with_description(NULL, "models here do not refuse apart from their text"),
        )
    ),
    "null unless asked for",
)
_THOUGHT: dict[str, Schema] = {
    "reasoning": {**TEXT, "description": "what the model thought"},
    "reasoning_content": {**TEXT, "description": "the same, under its older name"},
}
_ID = with_description(TEXT, "what the result of this call is to name")
_FUNCTION: Schema = {"const": "function", "description": "the only kind of call there is"}
_NAME = with_description(TEXT, "of the tool that is called")
_CALL = response_object(
    id=_ID,
    type=_FUNCTION,
    function=with_description(
        response_object(
            name=_NAME,
            arguments=with_description(TEXT, "a JSON object; where the answer ends within it, its beginning"),
        ),
        "what is called, and how",
    ),
)
_ROLE: Schema = {"const": "assistant", "description": "who speaks"}
_MESSAGE = response_object(
    {
        **_THOUGHT,
        "tool_calls": with_description(
            list_schema(_CALL),
            "what the model calls; the last may be cut off where finish_reason is length, or stop for a string of "
            "`stop` within it. Cut off before its name is known it is left out; its beginning is content only "
            "where tool_choice leaves calls free and none came before",
        ),
    },
    role=_ROLE,
    content=with_description(MAYBE_TEXT, "null where calls say it all"),
    refusal=with_description(NULL, "models here do not refuse apart from their text"),
)
_CHOICE = with_description(COUNT, "which choice this is, from 0")
CHAT = response_object(
    _PROMPT_IDS,
    **_head(
        "chat.completion",
        response_object(
            {**_STOPPED, **_OUTPUT_IDS},
            index=_CHOICE,
            message=with_description(_MESSAGE, "what the model says"),
            logprobs=_LOGPROBS,
            finish_reason=_CHAT_ENDED,
        ),
    ),
    usage=_CHAT_USAGE,
)
_PIECE = response_object(
    {"id": _ID, "type": _FUNCTION},
    index=with_description(COUNT, "which call this is a piece of, from 0"),
    function=with_description(
        response_object({"name": _NAME}, arguments=with_description(TEXT, "a piece, to be joined to those before")),
        "its name comes in the first piece, and so do id and type",
    ),
)
_DELTA = response_object(
    {
        "role": _ROLE,
        "content": with_description(TEXT, "the next piece of text"),
        **_THOUGHT,
        "tool_calls": with_description(list_schema(_PIECE), "the next pieces of calls"),
    }
)
CHAT_CHUNK = _chunk(
    "chat.completion.chunk",
    response_object(
        {**_STOPPED, **_OUTPUT_IDS},
        index=_CHOICE,
        delta=with_description(_DELTA, "what is new"),
        logprobs=_LOGPROBS,
        finish_reason=_ends_in_chunk(_CHAT_ENDED),
    ),
    _CHAT_USAGE,
    _PROMPT_IDS,
)

_VECTOR = response_object(
    object=_always("embedding"),
    index=with_description(COUNT, "which input it is of, from 0"),
    embedding={"anyOf": [list_schema(NUMBER), TEXT], "description": "numbers, or base64 of them as little-endian fp32"},
)
_EMBEDDED = response_object(
    prompt_tokens=with_description(COUNT, "of all inputs"), total_tokens=with_description(COUNT, "the same")
)
EMBEDDINGS = _list_object(
    _VECTOR,
    "one vector for each input, in their order",
    model=with_description(TEXT, "the name that is served"),
    usage=with_description(_EMBEDDED, "tokens that were read"),
)
_CONTEXT = with_description(COUNT, "tokens of prompt and output together")
MODEL = response_object(
    id=with_description(TEXT, "the name to ask for"),
    object=_always("model"),
    created=with_description(COUNT, "Unix seconds at which the service began"),
    owned_by=with_description(TEXT, "motley, whoever made the model"),
    max_model_len=_CONTEXT,
    quantization=with_description(TEXT, "how its weights are stored"),
)
MODELS = _list_object(MODEL, "the one model that is served")
TOKENIZED = response_object(
    tokens=with_description(IDS, "the ids"), count=with_description(COUNT, "how many there are"), max_model_len=_CONTEXT
)
DETOKENIZED = response_object(prompt=with_description(TEXT, "their text"))
TOKENIZER_INFO = response_object(
    bos_token=with_description(MAYBE_TEXT, "the token that begins a text; null where none is named"),
    eos_token=with_description(MAYBE_TEXT, "the token that ends one; null where none is named"),
    pad_token=with_description(MAYBE_TEXT, "the token that fills up; null where none is named"),
    tokenizer_class=with_description(TEXT, "always this word: no class of transformers is meant"),
    model_max_length=_CONTEXT,
    chat_template=with_description(MAYBE_TEXT, "the model's, in Jinja; null where it has none"),
)
_LOADED = {name: metric.description for name, metric in metrics_of(ReplicaLoad).items()} | {
    "running": "sequences that are computed",
    "waiting": "sequences that wait for room",
    "swapped": "those of them whose KV is in the host's memory meanwhile",
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
    field.name: with_description(_OF_LOAD[type(field.default)], _LOADED[field.name])
    for field in dataclasses.fields(ReplicaLoad)
}
VERSION = response_object(version=with_description(TEXT, "of Motley"))
HEALTH = response_object(
    status={"const": "ok", "description": "anything else is a refusal"},
    state={
        "enum": ["serving", "holding"],
        "description": "whether a replica serves; or none is there, and requests are held for the first that comes",
    },
    held=with_description(COUNT, "requests that wait for any replica to take them"),
    load=with_description(response_object(**_LOAD), "of the healthy replicas together"),
)
