"""Conversion of OpenAI's request bodies to `ParsedRequest`s. Fields of SamplingParams are passed on unchecked: it is
the one validator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...request_errors import unsupported_field
from ...transport.access_log import MAX_LABEL_CHARS, clean_id
from ...transport.caller import MAX_CLIENT_ID
from ..common.chat.chat_reasoning import TemplateFor, read_template_arguments, separates_reasoning, shows_reasoning
from ..common.chat.chat_tools import read_tool_use
from ..common.chat.speaker_names import drop_unplaced_names
from ..common.fields.do_sample import apply_do_sample
from ..common.fields.field_schemas import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PROMPTS,
    MESSAGE_FIELDS,
    MESSAGE_UNSUPPORTED,
    STREAM_OPTIONS,
)
from ..common.fields.field_table import CHAT, COMPLETION, SAMPLING, fields_by_name
from ..common.fields.foreign_fields import is_unbounded
from ..common.fields.json_body import (
    check_fields,
    invalid_value,
    missing_field,
    pick_fields,
    refuse_other_fields,
    take_field,
)
from ..common.fields.output_formats import FORMAT_FIELDS, read_output_format
from ..common.fields.repeat_penalty import read_repetition_penalty
from ..common.fields.same_values import agreed_value
from ..common.fields.unknown_fields import UnknownFieldPolicy
from ..common.parsed_request import ParsedRequest

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of a completion's max_tokens

_COMPLETION, _CHAT = fields_by_name(COMPLETION), fields_by_name(CHAT)
_SAMPLING = tuple(field.name for field in SAMPLING)
_GRAMMARS = (*FORMAT_FIELDS, "tools")
_OF_AUTOMATA = (b"attern", b'"format"', b"ropert", b"\\u")  # parts of the keywords that may need an automaton
_LONG = 64 * 2**10  # bytes of a grammar that is too long to check while others wait
_LABELS = ("user", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One OpenAI request: a prompt or several, and the form of the answer.

    keep                number of choices of each prompt to return, of those that are generated; None: all
    silent              whether nothing is generated as far as the client sees
    logprobs            whether the choices' log-probabilities are part of the answer; otherwise they only rank choices
    usage_so_far        whether every chunk has the usage so far
    token_ids           whether the answer has the token ids of prompt and choices
    named_by_id         whether log-probabilities name tokens by their ids
    reasoning           whether the model's reasoning is part of the answer
    separate_reasoning  whether reasoning is not part of the text
    """

    requests: tuple[ParsedRequest, ...]
    stream: bool
    include_usage: bool
    usage_so_far: bool = False
    token_ids: bool = False
    named_by_id: bool = False
    reasoning: bool = True
    separate_reasoning: bool = True
    echo: bool = False
    keep: int | None = None
    silent: bool = False
    logprobs: bool = True

    @property
    def n(self) -> int:
        n = self.requests[0].sampling.get("n", 1)
        return n if isinstance(n, int) else 1


def has_grammar(body: dict[str, Any]) -> bool:
    """Return whether a body has a grammar or a schema, which takes long to check if it is long."""
    return any(body.get(name) is not None for name in _GRAMMARS)


def grammar_bytes(body: dict[str, Any], source: bytes) -> int:
    """Return the size of the grammar to check, in bytes; 0 if there is none.

    For a schema that is not strict, automata show which parts can be enforced, which takes some hundred milliseconds
    even for short patterns. So a schema that may need them counts as a long one; an escape may hide a keyword.
    """
    if not has_grammar(body):
        return 0
    needs_automata = any(word in source for word in _OF_AUTOMATA)
    return max(len(source), _LONG) if needs_automata else len(source)


def parse_completion(body: dict[str, Any]) -> OpenAIRequest:
    check_fields(body, _COMPLETION)
    sampling = pick_fields(body, (*_SAMPLING, "max_tokens", "logprobs")) | _grammar(body)
    apply_do_sample(body.get("do_sample"), sampling)
    names = _completion_logprobs(body, sampling) | read_repetition_penalty(body, sampling)
    logprobs = "logprobs" in sampling
    unbounded = _is_unbounded(sampling)
    echo = take_field(body, "echo", bool, False)
    if echo and sampling.get("logprobs") is not None:
        sampling["prompt_logprobs"] = sampling["logprobs"]
    silent = echo and type(sampling.get("max_tokens")) is int and sampling["max_tokens"] == 0
    if silent:
        if take_field(body, "min_tokens", int, 0) > 0:
            raise invalid_value("min_tokens", body["min_tokens"], "at most max_tokens (0)")
        sampling["max_tokens"] = 1  # the engine always computes what follows; it is not shown
    keep = _best_of(body, sampling)
    more = {
        "default_max_tokens": None if unbounded else COMPLETION_MAX_TOKENS,
        "wire_names": names | _names(keep),
        "parse_special": take_field(body, "parse_special", bool, True),
        "add_special_tokens": take_field(body, "add_special_tokens", bool, True),
        "prompt_shown": keep,
    }
    requests = tuple(_parse_prompt(body, prompt, sampling, **more) for prompt in parse_prompts(body.get("prompt")))
    return OpenAIRequest(requests, **_shown(body), echo=echo, keep=keep, silent=silent, logprobs=logprobs)


def parse_chat(body: dict[str, Any], template_for: TemplateFor, unknown: UnknownFieldPolicy) -> OpenAIRequest:
    """Parse a chat. `template_for`: returns the model's template for given tools, which decides what some fields can
    do.
    """
    check_fields(body, _CHAT)
    sampling = pick_fields(body, (*_SAMPLING, "max_tokens")) | _grammar(body)
    _is_unbounded(sampling)  # a chat has no default bound
    apply_do_sample(body.get("do_sample"), sampling)
    names = _chat_logprobs(body, sampling) | _chat_max_tokens(body, sampling) | read_repetition_penalty(body, sampling)
    keep = _best_of(body, sampling)
    tools = read_tool_use(body)
    template = template_for(tools.tools)
    parsed = _parse_prompt(
        body,
        drop_unplaced_names(parse_messages(body), template, unknown),
        sampling,
        chat=True,
        wire_names=names if keep is None else names | {"n": "best_of"},
        template_arguments=read_template_arguments(body, template, unknown),
        tools=tools,
        **parse_prompt_end(body),
    )
    reasoning, separate_reasoning = shows_reasoning(body), separates_reasoning(body)
    if tools.required and not separate_reasoning:
        raise invalid_value(
            "separate_reasoning", separate_reasoning, "no value beside a tool_choice that requires calls"
        )
    return OpenAIRequest(
        (parsed,),
        **_shown(body),
        keep=keep,
        logprobs=body.get("logprobs") is True,
        reasoning=reasoning,
        separate_reasoning=separate_reasoning or not reasoning,
    )


def parse_prompt_end(body: dict[str, Any]) -> dict[str, Any]:
    """Return whether a chat's prompt begins a new answer, or continues its last message."""
    return {
        "add_generation_prompt": take_field(body, "add_generation_prompt", bool, True),
        "continue_final_message": take_field(body, "continue_final_message", bool, False),
    }


def parse_truncation(body: dict[str, Any]) -> dict[str, Any]:
    side = take_field(body, "truncation_side", str, "left")
    if side not in ("left", "right"):
        raise invalid_value("truncation_side", side, "left or right")
    return {"truncate": body.get("truncate_prompt_tokens"), "truncate_end": side == "right"}


def tokenizes_chat(body: dict[str, Any]) -> bool:
    """Return whether `messages` are to be tokenized, not `prompt`. Refuses both, neither, and an option of the
    other.
    """
    chat = body.get("messages") is not None
    if not chat and body.get("prompt") is None:
        raise missing_field("prompt")
    beside = "messages" if chat else "prompt"
    of_chats = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")
    for name in ("prompt", "add_special_tokens") if chat else of_chats:
        if body.get(name) is not None:
            raise invalid_value(name, body[name], f"no value beside {beside}")
    return chat


def _parse_prompt(body: dict[str, Any], prompt: Any, sampling: dict[str, Any], **more: Any) -> ParsedRequest:
    return ParsedRequest(
        model=take_field(body, "model", str, ""),
        prompt=prompt,
        sampling=sampling,
        timeout_s=body.get("timeout_s"),
        priority=0 if body.get("priority") is None else body["priority"],
        client_id=clean_id(take_field(body, "request_id", str, ""), MAX_CLIENT_ID),
        labels=parse_labels(body),
        **parse_truncation(body),
        **more,
    )


def parse_prompts(prompt: Any, name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> Sequence[str | list[int]]:
    """Return a list of prompts from a string, token ids, or a list of up to `max_prompts` of either.

    Errors name the field `name`. Token ids are checked at admission.
    """
    if prompt is None:
        raise missing_field(name)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid_value(name, prompt, "a string, token ids, or a list of them that is not empty")
    kinds = set(map(type, prompt))
    if len(prompt) <= max_prompts and kinds in ({str}, {list}):
        return prompt
    if kinds & {str, list}:
        raise invalid_value(name, prompt, f"token ids, or at most {max_prompts} prompts of one kind")
    return [prompt]


def parse_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body.get("messages") is None:
        raise missing_field("messages")
    given = take_field(body, "messages", list, [])
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise invalid_value("messages", given, f"1 to {MAX_MESSAGES} messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(message: Any, path: str) -> dict[str, Any]:
    """Return the fields of a message unchecked: a later check of messages refuses wrong ones by name."""
    if not isinstance(message, dict):
        raise invalid_value(path, message, "an object with role and content")
    refuse_other_fields(message, MESSAGE_FIELDS, MESSAGE_UNSUPPORTED, path=f"{path}.")
    given = {"content": None} | pick_fields(message, MESSAGE_FIELDS)
    if "reasoning" in given:  # the newer name; clients send back what they received, which may be both
        reasoning = take_field(given, "reasoning", str, "", path=f"{path}.")
        if given.setdefault("reasoning_content", reasoning) != given.pop("reasoning"):
            raise invalid_value(
                f"{path}.reasoning", reasoning, "the text of reasoning_content, or one of the two alone"
            )
    return given


def _best_of(body: dict[str, Any], sampling: dict[str, Any]) -> int | None:
    """Return how many choices to keep if `best_of` is given, else None: n of them, the likeliest per token."""
    made = take_field(body, "best_of", int, 0)
    if body.get("best_of") is None:
        return None
    n = take_field(body, "n", int, 1)
    if made < n:
        raise invalid_value("best_of", made, f"at least n ({n})")
    if made > n and take_field(body, "stream", bool, False):
        raise invalid_value("best_of", made, f"n ({n}) with stream: which is best shows at the end")
    sampling["n"] = made
    if made > n:
        sampling.setdefault("logprobs", 0)
    return n


def _names(keep: int | None) -> dict[str, str]:
    return {"prompt_logprobs": "logprobs"} | ({} if keep is None else {"n": "best_of"})


def parse_labels(body: dict[str, Any]) -> dict[str, Any]:
    """Return the client's own labels of its request, for the log: those that it gave."""
    given: dict[str, Any] = {name: take_field(body, name, str, "") for name in _LABELS if body.get(name) is not None}
    if metadata := _metadata(body):
        given["metadata"] = metadata
    return given


def _metadata(body: dict[str, Any]) -> dict[str, str]:
    metadata = take_field(body, "metadata", dict, {})
    if len(metadata) > MAX_METADATA:
        raise invalid_value("metadata", metadata, f"at most {MAX_METADATA} pairs")
    pairs = {key: take_field(metadata, key, str, "", path="metadata.") for key in metadata}
    for key, value in pairs.items():
        if len(key) > 64 or len(value) > MAX_LABEL_CHARS:
            expected = f"keys of 64 and values of {MAX_LABEL_CHARS} characters at most"
            raise invalid_value(f"metadata.{key[:64]}", value, expected)
    return pairs


def _is_unbounded(sampling: dict[str, Any]) -> bool:
    """Return whether the answer may fill the context; if so, remove the bound from `sampling`."""
    if not is_unbounded(sampling.get("max_tokens")):
        return False
    del sampling["max_tokens"]
    return True


def _completion_logprobs(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    """Read a completion's `logprobs`: a number; or a boolean and `top_logprobs`, as chats have it."""
    if isinstance(sampling.get("logprobs"), bool):
        del sampling["logprobs"]
    elif body.get("top_logprobs") is None or sampling.get("logprobs") == body["top_logprobs"]:
        return {}
    elif "logprobs" in sampling:
        raise invalid_value("top_logprobs", body["top_logprobs"], "no value beside a number of logprobs")
    return _chat_logprobs(body, sampling)


def _chat_logprobs(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    wanted = take_field(body, "logprobs", bool, False)
    top = body.get("top_logprobs")
    if top not in (None, 0) and not wanted:
        raise invalid_value("top_logprobs", top, "no value unless logprobs is true")
    if wanted:
        sampling["logprobs"] = 0 if top is None else top
    return {"logprobs": "top_logprobs"}


def _chat_max_tokens(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    newer = body.get("max_completion_tokens")
    if newer is None or is_unbounded(newer):
        return {}
    if "max_tokens" in sampling and agreed_value("max_tokens", sampling["max_tokens"], newer) is None:
        raise invalid_value("max_tokens", sampling["max_tokens"], "no value beside max_completion_tokens")
    sampling["max_tokens"] = newer
    return {"max_tokens": "max_completion_tokens"}


def _grammar(body: dict[str, Any]) -> dict[str, Any]:
    wanted = read_output_format(body)
    return {} if wanted is None else {"grammar": wanted}


def _shown(body: dict[str, Any]) -> dict[str, Any]:
    """Return which parts the answer has, and whether it is a stream."""
    stream, include_usage, usage_so_far = _streaming(body)
    return {
        "stream": stream,
        "include_usage": include_usage,
        "usage_so_far": usage_so_far,
        "token_ids": take_field(body, "return_token_ids", bool, False),
        "named_by_id": take_field(body, "return_tokens_as_token_ids", bool, False),
    }


def _streaming(body: dict[str, Any]) -> tuple[bool, bool, bool]:
    stream = take_field(body, "stream", bool, False)
    options = body.get("stream_options")
    if options is None or (isinstance(options, dict) and not stream and not any(options.values())):
        return stream, False, False
    if not stream:
        raise invalid_value("stream_options", options, "no value unless stream is true")
    options = take_field(body, "stream_options", dict, {})
    refuse_other_fields(options, STREAM_OPTIONS["properties"], path="stream_options.")
    if take_field(options, "include_obfuscation", bool, False, path="stream_options."):
        raise unsupported_field("stream_options.include_obfuscation", "leave it out, or give false")
    include_usage = take_field(options, "include_usage", bool, False, path="stream_options.")
    so_far = take_field(options, "continuous_usage_stats", bool, False, path="stream_options.")
    return stream, include_usage, include_usage and so_far
