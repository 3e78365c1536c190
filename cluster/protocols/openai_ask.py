"""OpenAI request bodies -> Asks. Fields of SamplingParams go through as they are: it is the one validator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ask import Ask
from ..errors import unsupported_field
from .openai_fields import missing, pick, refuse_others, take, wrong_type

MAX_PROMPTS = 128
COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions give when max_tokens is absent

_SHARED_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "n", "min_tokens", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
_SHARED = ("model", "stream", "stream_options", "user", "timeout_s", "priority", *_SHARED_SAMPLING)
_COMPLETION = frozenset((*_SHARED, "prompt", "echo", "logprobs"))
_CHAT = frozenset((
    *_SHARED, "messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format",
    "chat_template_kwargs",
))  # fmt: skip
# OpenAI's answers have no place for what these ask for.
_GRPC_ONLY = {
    "prompt_logprobs": "use gRPC: its Complete and Chat return them",
    "output_ids": "use gRPC: its Complete and Chat resume after them",
}
_COMPLETION_UNSUPPORTED = frozenset((*_GRPC_ONLY, "suffix", "best_of"))
_CHAT_UNSUPPORTED = frozenset((
    *_GRPC_ONLY,
    "audio", "function_call", "functions", "metadata", "modalities", "moderation", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store",
    "tool_choice", "tools", "verbosity", "web_search_options",
))  # fmt: skip
_MESSAGE = ("role", "content", "name")
_MESSAGE_UNSUPPORTED = frozenset(("annotations", "audio", "function_call", "refusal", "tool_call_id", "tool_calls"))


@dataclass(frozen=True, slots=True)
class Call:
    """One OpenAI request: a prompt or several, and the form of its answer."""

    asks: tuple[Ask, ...]
    stream: bool
    include_usage: bool
    echo: bool = False

    @property
    def n(self) -> int:
        n = self.asks[0].sampling.get("n", 1)
        return n if isinstance(n, int) else 1


def completion_call(body: dict[str, Any]) -> Call:
    _refuse_grpc_only(body)
    refuse_others(body, _COMPLETION, _COMPLETION_UNSUPPORTED)
    sampling = pick(body, (*_SHARED_SAMPLING, "logprobs"))
    echo = take(body, "echo", bool, False)
    if echo and sampling.get("logprobs") is not None:
        sampling["prompt_logprobs"] = sampling["logprobs"]
    asks = tuple(
        _ask(body, prompt, sampling, default_max_tokens=COMPLETION_MAX_TOKENS) for prompt in prompts(body.get("prompt"))
    )
    return Call(asks, *_streaming(body), echo=echo)


def chat_call(body: dict[str, Any]) -> Call:
    _refuse_grpc_only(body)
    refuse_others(body, _CHAT, _CHAT_UNSUPPORTED)
    _check_response_format(body)
    sampling = pick(body, _SHARED_SAMPLING)
    names = _chat_logprobs(body, sampling) | _chat_max_tokens(body, sampling)
    arguments = take(body, "chat_template_kwargs", dict, {})
    ask = _ask(body, messages(body), sampling, chat=True, wire_names=names, template_arguments=arguments)
    return Call((ask,), *_streaming(body))


def tokenizes_chat(body: dict[str, Any]) -> bool:
    """Whether `messages` are to be tokenized, not `prompt`. Refuses both, neither, and an option of the other."""
    chat = body.get("messages") is not None
    if not chat and body.get("prompt") is None:
        raise missing("prompt")
    beside = "messages" if chat else "prompt"
    for name in ("prompt", "add_special_tokens") if chat else ("chat_template_kwargs",):
        if body.get(name) is not None:
            raise wrong_type(name, body[name], f"no value beside {beside}")
    return chat


def _refuse_grpc_only(body: dict[str, Any]) -> None:
    for name, instead in _GRPC_ONLY.items():
        if body.get(name) is not None:
            raise unsupported_field(name, instead)


def _ask(body: dict[str, Any], prompt: Any, sampling: dict[str, Any], **more: Any) -> Ask:
    take(body, "user", str, "")
    return Ask(
        model=take(body, "model", str, ""),
        prompt=prompt,
        sampling=sampling,
        timeout_s=body.get("timeout_s"),
        priority=0 if body.get("priority") is None else body["priority"],
        **more,
    )


def prompts(prompt: Any) -> Sequence[str | list[int]]:
    """A string, token ids, or a list of either -> a list of prompts. Ids are checked at the door."""
    if prompt is None:
        raise missing("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong_type("prompt", prompt, "a string, token ids, or a list of them that is not empty")
    if len(prompt) <= MAX_PROMPTS and all(isinstance(item, str) for item in prompt):
        return prompt
    if len(prompt) <= MAX_PROMPTS and all(isinstance(item, list) for item in prompt):
        return prompt
    if any(isinstance(item, str | list) for item in prompt):
        raise wrong_type("prompt", prompt, f"token ids, or at most {MAX_PROMPTS} prompts of one kind")
    return [prompt]


def messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body.get("messages") is None:
        raise missing("messages")
    given = take(body, "messages", list, [])
    if not given:
        raise wrong_type("messages", given, "at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(message: Any, path: str) -> dict[str, Any]:
    """Role and content go through as they are: the chat template's own check names what is wrong with them."""
    if not isinstance(message, dict):
        raise wrong_type(path, message, "an object with role and content")
    refuse_others(message, _MESSAGE, _MESSAGE_UNSUPPORTED, path=f"{path}.")
    return {"content": None} | pick(message, _MESSAGE)


def _chat_logprobs(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    wanted = take(body, "logprobs", bool, False)
    top = body.get("top_logprobs")
    if top is not None and not wanted:
        raise wrong_type("top_logprobs", top, "no value unless logprobs is true")
    if wanted:
        sampling["logprobs"] = 0 if top is None else top
    return {"logprobs": "top_logprobs"}


def _chat_max_tokens(body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, str]:
    newer = body.get("max_completion_tokens")
    if newer is None:
        return {}
    if sampling.get("max_tokens") is not None:
        raise wrong_type("max_tokens", sampling["max_tokens"], "no value beside max_completion_tokens")
    sampling["max_tokens"] = newer
    return {"max_tokens": "max_completion_tokens"}


def _check_response_format(body: dict[str, Any]) -> None:
    wanted = take(body, "response_format", dict, {"type": "text"})
    if wanted != {"type": "text"}:
        raise unsupported_field("response_format", 'only {"type": "text"} is')


def _streaming(body: dict[str, Any]) -> tuple[bool, bool]:
    stream = take(body, "stream", bool, False)
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise wrong_type("stream_options", options, "no value unless stream is true")
    options = take(body, "stream_options", dict, {})
    refuse_others(options, ("include_usage",), ("include_obfuscation",), path="stream_options.")
    return stream, take(options, "include_usage", bool, False, path="stream_options.")
