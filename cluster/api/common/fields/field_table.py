"""Table of every field of a completion and of a chat: what it takes, and what becomes of those that are not supported.

The check of a body and the description of the interface use the same table. Ranges of numbers here only describe:
SamplingParams checks them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .....replicas import sampling_params as limits
from ....transport.access_log import MAX_LABEL_CHARS
from ....transport.http_server.openapi import Schema
from . import field_schemas as schemas
from .field_schemas import BOOLEAN, INT32, OBJECT, TEXT
from .foreign_fields import NO_BOUND


@dataclass(frozen=True, slots=True)
class BodyField:
    """One field of a body.

    schema   its JSON schema, with the default if there is one
    doc      what it does
    only     if set, the values that change nothing or ask for what is done anyway; others are refused
    instead  if set, the field exists on other servers and is refused here: what to do instead
    neutral  for a refused field: values beside null and empty ones that ask for nothing
    """

    name: str
    doc: str
    schema: Schema
    only: tuple[Any, ...] = ()
    instead: str | None = None
    neutral: tuple[Any, ...] = ()


def _number(low: float, high: float, default: float, *, above: bool = False) -> Schema:
    """Return the schema of a number in a range. `above`: `low` itself is outside the range."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high, "default": default}


def _integer(low: int, high: int, default: int | None = None) -> Schema:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema if default is None else schema | {"default": default}


def _or_unbounded(low: int) -> Schema:
    return {"anyOf": [{"const": NO_BOUND}, _integer(low, INT32)]}


_BESIDE_GRAMMAR = "; but where the text is held to a form, the end of that is the end"
_MODEL_SAYS = "default: the checkpoint's generation_config.json, else"
_IN_LOG = f"; its first {MAX_LABEL_CHARS} characters are in the line of the access log"
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_CHARS}
_BAD_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": limits.MAX_BAD_WORD_CHARS}

SAMPLING = (
    BodyField("temperature", f"0 is greedy; {_MODEL_SAYS} 1", _number(0, limits.MAX_TEMPERATURE, 1)),
    BodyField("top_p", f"smallest set of tokens with this probability; {_MODEL_SAYS} 1", _number(0, 1, 1, above=True)),
    BodyField("top_k", f"the k most likely tokens; 0 or -1: all; {_MODEL_SAYS} 0", _integer(-1, INT32, 0)),
    BodyField("min_p",
          f"no token below this fraction of the best one's probability; {_MODEL_SAYS} 0", _number(0, 1, 0)),
    BodyField("presence_penalty", "subtracted once from any token of the output so far", _number(-2, 2, 0)),
    BodyField("frequency_penalty", "subtracted for each time a token occurs in the output", _number(-2, 2, 0)),
    BodyField("repetition_penalty",
          f"divides tokens of prompt and output; {_MODEL_SAYS} 1", _number(0, 10, 1, above=True)),
    BodyField("logit_bias",
          "token id -> added to its logit, -100 to 100; false: the token is never chosen. Or pairs of an "
          "id, or of a text for each of its tokens, and that", schemas.LOGIT_BIAS),
    BodyField("seed", "the same seed repeats the same answer; -1 asks for a fresh one; default: a fresh one",
          _integer(*limits.SEED_RANGE)),
    BodyField("n", "choices", _integer(1, limits.MAX_CHOICES, 1)),
    BodyField("min_tokens", f"no end and no stop before this many{_BESIDE_GRAMMAR}", _integer(0, INT32, 0)),
    BodyField("stop", "strings that end a choice and are no part of it; "
          f"{limits.MAX_ALL_STOP_CHARS} characters together at most",
          {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limits.MAX_STOP_STRINGS}]}),
    BodyField("stop_token_ids", "ids that end a choice",
          {"type": "array", "items": _integer(0, INT32), "maxItems": limits.MAX_LOGIT_BIAS}),
    BodyField("ignore_eos", f"go on behind the end of sequence{_BESIDE_GRAMMAR}", BOOLEAN),
    BodyField("skip_special_tokens", "leave special tokens out of the text", {"type": "boolean", "default": True}),
    BodyField("include_stop_str_in_output", "the string or token that ends a choice is the end of its text", BOOLEAN),
    BodyField("allowed_token_ids", "no other token is chosen, an end of sequence neither; empty: all are allowed; not "
          "where the text is held to a form",
          {"type": "array", "items": _integer(0, INT32), "maxItems": limits.MAX_ALLOWED_IDS}),
    BodyField("bad_words",
          "texts whose tokens are never chosen one after the other; other tokens may spell the same text",
          {"type": "array", "items": _BAD_WORD, "maxItems": limits.MAX_BAD_WORDS}),
)  # fmt: skip

_SHARED = (
    *SAMPLING,
    BodyField("do_sample", "false: greedy, as temperature 0; not beside a temperature other than 0 and 1",
          {"type": "boolean", "default": True}),
    BodyField("repeat_penalty", "repetition_penalty in the words of llama.cpp and Ollama; above or below 1 only with "
          "repeat_last_n: -1", _number(0, 10, 1, above=True)),
    BodyField("repeat_last_n",
          "of how many tokens repeat_penalty looks at the last; -1: of prompt and output as a whole; "
          "0: nothing is penalised; another window only where nothing is, 64 too where repeat_penalty is left out",
          _integer(-1, INT32, 64)),
    *(BodyField(name, "false: line ends are left out of penalties, which is refused where there is one",
            {"type": "boolean", "default": True}) for name in ("penalize_nl", "penalize_newline")),
    BodyField("model", "the name that /v1/models has; default: the one model served", TEXT),
    BodyField("stream", "answer in server-sent events", BOOLEAN),
    BodyField("stream_options", "only with stream", schemas.STREAM_OPTIONS),
    BodyField("user", f"whose request it is, in your own words{_IN_LOG}", TEXT),
    BodyField("timeout_s", "seconds after which the request ends with status 504; at once where it is not above 0; "
          "default: none",
          {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}),
    BodyField("priority", "higher runs first", _integer(-INT32, INT32, 0)),
    BodyField("response_format", "what the text must look like; what cannot be kept to is refused, or left out of a "
          "json_schema that is not strict",
          schemas.RESPONSE_FORMAT),
    BodyField("structured_outputs", "the same in vLLM's words: exactly one of the properties. Or OpenRouter's true or "
          "false, which changes nothing: what response_format asks for is kept to",
          {"anyOf": [{"type": "boolean"}, schemas.STRUCTURED_OUTPUTS]}),
    *(BodyField(name, f"an older name of structured_outputs.{kind}, or another server's",
            schemas.STRUCTURED[kind])
      for name, kind in schemas.CONSTRAINT_FIELDS.items() if name != "grammar"),
    BodyField("grammar", "structured_outputs.grammar; or in TGI's words what value is, and that",
          {"anyOf": [schemas.STRUCTURED["grammar"], schemas.TGI_GRAMMAR]}),
    BodyField("format", "the same in Ollama's words: json, or a JSON schema",
          {"anyOf": [{"enum": ["json", ""]}, OBJECT]}),
    BodyField("best_of", "choices to make, of which the n likeliest per token are returned; not with stream",
          _integer(1, limits.MAX_CHOICES)),
    BodyField("return_token_ids", "the answer has the token ids of prompt and choices", BOOLEAN),
    BodyField("return_tokens_as_token_ids", "log-probabilities name tokens as token_id:N", BOOLEAN),
    BodyField("request_id", f"what the client calls the request{_IN_LOG}", TEXT),
    BodyField("truncate_prompt_tokens", "the prompt is cut to so many tokens; -1: to what leaves room for the answer; "
          "default: a prompt that is too long is refused", {"anyOf": [{"const": -1}, _integer(1, INT32)]}),
    BodyField("truncation_side", "which end of the prompt is cut off", {"enum": ["left", "right"], "default": "left"}),
    BodyField("prompt_logprobs", "", OBJECT, instead="use echo with logprobs, or gRPC"),
    BodyField("output_ids", "", OBJECT, instead="use gRPC: its Complete and Chat resume after them"),
    BodyField("metadata", "up to 16 pairs of text, in your own words; in the line of the access log", schemas.METADATA),
    BodyField("safety_identifier", f"whose request it is, in your own words{_IN_LOG}", TEXT),
    BodyField("prompt_cache_key", f"what prompts have in common is found without it{_IN_LOG}", TEXT),
    BodyField("store", "nothing is stored", BOOLEAN, only=(False,)),
    BodyField("service_tier", "there is one", TEXT, only=("auto", "default")),
    BodyField("modalities", "text", {"type": "array"}, only=(["text"], [])),
    BodyField("verbosity", "as the model has it", TEXT, only=("medium",)),
    BodyField("prompt_cache_retention", "prefixes are kept in memory while there is room", TEXT, only=("in_memory",)),
    BodyField("prompt_cache_options", "prefixes are found without marks", OBJECT, only=({"mode": "implicit"}, {})),
    BodyField("audio", "", OBJECT, instead="the model writes text"),
    BodyField("moderation", "", OBJECT, instead="leave it out"),
    BodyField("prediction", "", OBJECT, instead="leave it out"),
    BodyField("web_search_options", "", OBJECT, instead="describe a search as one of the tools"),
)  # fmt: skip

COMPLETION = (
    *_SHARED,
    BodyField("prompt", "a text, token ids, or a list of either", schemas.PROMPT),
    BodyField("parse_special", "text of a special token in the prompt is that token; false: it stays text",
          {"type": "boolean", "default": True}),
    BodyField("max_tokens", "tokens of the output; 0 only with echo; -1: until the context is full",
          {**_or_unbounded(0), "default": 16}),
    BodyField("echo", "repeat the prompt before its completion; with logprobs, those of the prompt too", BOOLEAN),
    BodyField("logprobs", "alternatives beside each token; true: as many as top_logprobs says, as chats have it",
          {"anyOf": [_integer(0, limits.MAX_LOGPROBS), {"type": "boolean"}]}),
    BodyField("top_logprobs",
          "with logprobs: true: alternatives beside each token", _integer(0, limits.MAX_LOGPROBS, 0)),
    BodyField("add_special_tokens", "those that the tokenizer adds to a text are added",
          {"type": "boolean", "default": True}),
    BodyField("suffix", "", TEXT, instead="text is continued, not filled in"),
)  # fmt: skip

CHAT = (
    *_SHARED,
    BodyField("messages", "the conversation", schemas.MESSAGES),
    BodyField("max_tokens", "the older name of max_completion_tokens", _or_unbounded(1)),
    BodyField("max_completion_tokens", "tokens of the output; default, and -1: until the context is full",
          _or_unbounded(1)),
    BodyField("logprobs", "log-probabilities of every token", BOOLEAN),
    BodyField("top_logprobs", "with logprobs: alternatives beside each token", _integer(0, limits.MAX_LOGPROBS, 0)),
    BodyField("tools", "functions that the model may call", schemas.TOOLS),
    BodyField("tool_choice", "auto, none, required, one function by name, or some; default: auto where there are tools",
          schemas.TOOL_CHOICE),
    BodyField("parallel_tool_calls", "false: one call at most", {"type": "boolean", "default": True}),
    BodyField("reasoning_effort", "as far as the model's template knows it: its own levels, or none and medium",
          {"enum": list(schemas.EFFORTS)}),
    BodyField("reasoning", "the same in OpenRouter's words", schemas.REASONING),
    BodyField("think", "whether the model thinks, as far as its template knows that; or how much", schemas.THINK),
    BodyField("thinking", "whether the model thinks, as far as its template knows that", schemas.THINKING),
    BodyField("chat_template_kwargs",
          "arguments of the model's template, such as enable_thinking: true, false or text; "
          "those that it does not read are unknown fields, and those that are the service's are refused",
          schemas.TEMPLATE_ARGUMENTS),
    BodyField("include_reasoning", "false: what the model thought is left out of the answer",
          {"type": "boolean", "default": True}),
    BodyField("separate_reasoning",
          "false: what the model thought stands in the text as it wrote it; not where calls of "
          "tools are required", {"type": "boolean", "default": True}),
    BodyField("reasoning_format", "none: as separate_reasoning: false",
          {"enum": ["auto", "deepseek", "none"], "default": "auto"}),
    BodyField("add_generation_prompt", "the template begins an answer behind the messages",
          {"type": "boolean", "default": True}),
    BodyField("continue_final_message", "the model goes on with the last message, which is the assistant's; only with "
          "add_generation_prompt: false", BOOLEAN),
    BodyField("functions", "", OBJECT, instead="use tools"),
    BodyField("function_call", "", OBJECT, instead="use tool_choice", neutral=("none", [], {})),
)  # fmt: skip


def fields_by_name(fields: Iterable[BodyField]) -> dict[str, BodyField]:
    return {field.name: field for field in fields}
