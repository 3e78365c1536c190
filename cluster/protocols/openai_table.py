"""Every field of a completion and of a chat: what it takes, and what becomes of those that are not supported.

One table for the check of a body and for the description of the interface. Whether a number is in its range
is for SamplingParams to say: the ranges here describe, they do not check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...replicas import sampling_params as limits

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body.

    schema   its JSON schema, with the default where there is one
    doc      what it does
    only     if set, the values that change nothing or ask for what is done anyway; others are refused
    instead  if set, the field exists elsewhere and is refused here: what to do instead
    """

    name: str
    doc: str
    schema: Schema
    only: tuple[Any, ...] = ()
    instead: str | None = None


def _number(low: float, high: float, default: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "default": default}


def _integer(low: int, high: int, default: int | None = None) -> Schema:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema if default is None else schema | {"default": default}


_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_BOOLEAN: Schema = {"type": "boolean", "default": False}
_MODEL_SAYS = "default: the checkpoint's generation_config.json, else"
_INT32 = 2**31 - 1

SAMPLING = (
    Field("temperature", f"0 is greedy; {_MODEL_SAYS} 1", _number(0, limits.MAX_TEMPERATURE, 1)),
    Field("top_p", f"smallest set of tokens with this probability, above 0; {_MODEL_SAYS} 1", _number(0, 1, 1)),
    Field("top_k", f"the k most likely tokens; 0 or -1: all; {_MODEL_SAYS} 0", _integer(-1, _INT32, 0)),
    Field("min_p", f"no token below this fraction of the best one's probability; {_MODEL_SAYS} 0", _number(0, 1, 0)),
    Field("presence_penalty", "subtracted once from any token of the output so far", _number(-2, 2, 0)),
    Field("frequency_penalty", "subtracted for each time a token occurs in the output", _number(-2, 2, 0)),
    Field("repetition_penalty", f"above 0; divides tokens of prompt and output; {_MODEL_SAYS} 1", _number(0, 10, 1)),
    Field("logit_bias", "token id -> added to its logit, -100 to 100",
          {"type": "object", "maxProperties": limits.MAX_LOGIT_BIAS, "additionalProperties": {"type": "number"}}),
    Field("seed", "the same seed repeats the same answer; default: a fresh one", _integer(*limits.SEED_RANGE)),
    Field("n", "choices", _integer(1, limits.MAX_CHOICES, 1)),
    Field("min_tokens", "no end and no stop before this many", _integer(0, _INT32, 0)),
    Field("stop", "strings that end a choice and are no part of it",
          {"oneOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": limits.MAX_STOP_STRINGS}]}),
    Field("stop_token_ids", "ids that end a choice",
          {"type": "array", "items": {"type": "integer"}, "maxItems": limits.MAX_LOGIT_BIAS}),
    Field("ignore_eos", "go on behind the end of sequence", _BOOLEAN),
    Field("skip_special_tokens", "leave special tokens out of the text", {"type": "boolean", "default": True}),
)  # fmt: skip

_SHARED = (
    *SAMPLING,
    Field("model", "the name that /v1/models has; default: the one model served", _STRING),
    Field("stream", "answer in server-sent events", _BOOLEAN),
    Field("stream_options", "with stream: include_usage asks for a last chunk with usage",
          {"type": "object", "properties": {"include_usage": _BOOLEAN, "include_obfuscation": _BOOLEAN}}),
    Field("user", "whose request it is, in your own words; changes nothing", _STRING),
    Field("timeout_s", "seconds after which the request ends with status 504; at once where it is not above 0; "
          "default: none",
          {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}),
    Field("priority", "higher runs first", _integer(-_INT32, _INT32, 0)),
    Field("response_format", "what the text must look like: text, json_object, json_schema (kept to with or without "
          "strict), or regex, grammar (GBNF) and structural_tag; keywords that cannot be kept to are refused",
          {"type": "object", "required": ["type"], "properties": {"type": {
              "enum": ["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]}}}),
    Field("structured_outputs", "the same in vLLM's words: exactly one of the properties",
          {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False, "properties": {
              "json": {"oneOf": [_OBJECT, _STRING]}, "json_object": _BOOLEAN, "regex": _STRING,
              "choice": {"type": "array", "items": _STRING}, "grammar": _STRING,
              "structural_tag": {"oneOf": [_OBJECT, _STRING]}}}),
    Field("prompt_logprobs", "", _OBJECT, instead="use echo with logprobs, or gRPC"),
    Field("output_ids", "", _OBJECT, instead="use gRPC: its Complete and Chat resume after them"),
)  # fmt: skip

COMPLETION = (
    *_SHARED,
    Field("prompt", "a text, token ids, or a list of either", {"oneOf": [_STRING, {"type": "array"}]}),
    Field("parse_special", "text of a special token in the prompt is that token; false: it stays text",
          {"type": "boolean", "default": True}),
    Field("max_tokens", "tokens of the output; 0 only with echo", _integer(0, _INT32, 16)),
    Field("echo", "repeat the prompt before its completion; with logprobs, those of the prompt too", _BOOLEAN),
    Field("logprobs", "alternatives beside each token", _integer(0, limits.MAX_LOGPROBS)),
    Field("best_of", "choices to make, of which the n likeliest per token are returned; not with stream",
          _integer(1, limits.MAX_CHOICES)),
    Field("suffix", "", _STRING, instead="text is continued, not filled in"),
)  # fmt: skip

CHAT = (
    *_SHARED,
    Field("messages", "the conversation", {"type": "array", "minItems": 1, "items": _OBJECT}),
    Field("max_tokens", "the older name of max_completion_tokens", _integer(1, _INT32)),
    Field("max_completion_tokens", "tokens of the output; default: until the context is full", _integer(1, _INT32)),
    Field("logprobs", "log-probabilities of every token", _BOOLEAN),
    Field("top_logprobs", "with logprobs: alternatives beside each token", _integer(0, limits.MAX_LOGPROBS, 0)),
    Field("tools", "functions that the model may call", {"type": "array", "minItems": 1, "maxItems": 128}),
    Field("tool_choice", "auto, none, required, or one function by name; default: auto where there are tools",
          {"oneOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]}),
    Field("parallel_tool_calls", "false: one call at most", {"type": "boolean", "default": True}),
    Field("reasoning_effort", "as far as the model's template knows it: its own levels, or none and medium",
          {"type": "string"}),
    Field("chat_template_kwargs", "arguments of the model's template, such as enable_thinking: true, false or text",
          _OBJECT),
    Field("metadata", "up to 16 pairs of text for stored completions; nothing is stored",
          {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}}),
    Field("safety_identifier", "whose request it is, in your own words; changes nothing", _STRING),
    Field("prompt_cache_key", "changes nothing: what prompts have in common is found by itself", _STRING),
    Field("store", "nothing is stored", _BOOLEAN, only=(False,)),
    Field("service_tier", "there is one", _STRING, only=("auto", "default")),
    Field("modalities", "text", {"type": "array"}, only=(["text"],)),
    Field("verbosity", "as the model has it", _STRING, only=("medium",)),
    Field("prompt_cache_retention", "prefixes are kept in memory while there is room", _STRING, only=("in_memory",)),
    Field("prompt_cache_options", "prefixes are found without marks", _OBJECT, only=({"mode": "implicit"},)),
    Field("audio", "", _OBJECT, instead="the model writes text"),
    Field("functions", "", _OBJECT, instead="use tools"),
    Field("function_call", "", _OBJECT, instead="use tool_choice"),
    Field("moderation", "", _OBJECT, instead="leave it out"),
    Field("prediction", "", _OBJECT, instead="leave it out"),
    Field("web_search_options", "", _OBJECT, instead="describe a search as one of the tools"),
)  # fmt: skip


def by_name(fields: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for field in fields}
