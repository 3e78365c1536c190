"""Every field that OpenAI's own client can send works or is refused by name. A new one fails here until decided."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, get_args, get_type_hints

import openai.types.chat as chat_types
import openapi_conformance
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_tool_union_param import ChatCompletionToolUnionParam
from openai.types.shared_params import FunctionDefinition
from tool_templates import write_tool_tokenizer

from motley.cluster.api.common.fields.field_table import CHAT, COMPLETION, fields_by_name

WORKS, REFUSED, WRONG = "works", "unsupported_parameter", "invalid_value"
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "abc", "max_tokens": 2},
    "chat": {"messages": HELLO, "max_completion_tokens": 2},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
NAMED = {"type": "function", "function": {"name": "f"}}

# field -> (more of the body, the outcome); the field itself is among what is given.
BOTH: dict[str, list[tuple[dict[str, Any], str]]] = {
    "model": [({"model": "echo"}, WORKS)],
    "frequency_penalty": [({"frequency_penalty": 0.5}, WORKS)],
    "presence_penalty": [({"presence_penalty": 0.5}, WORKS)],
    "logit_bias": [({"logit_bias": {"65": 5}}, WORKS)],
    "n": [({"n": 2}, WORKS)],
    "seed": [({"seed": 7}, WORKS)],
    "stop": [({"stop": "x"}, WORKS), ({"stop": ["x", "y"]}, WORKS)],
    "stream": [({"stream": True}, WORKS), ({"stream": False}, WORKS)],
    "stream_options": [
        ({"stream": True, "stream_options": {"include_usage": True}}, WORKS),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, WORKS),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, REFUSED),
    ],
    "temperature": [({"temperature": 0}, WORKS)],
    "top_p": [({"top_p": 0.5}, WORKS)],
    "user": [({"user": "me"}, WORKS)],
    "max_tokens": [({"max_tokens": 1}, WORKS)],
}
FIELDS: dict[str, dict[str, list[tuple[dict[str, Any], str]]]] = {
    "completion": {
        **BOTH,
        "prompt": [({"prompt": ["a", "b"]}, WORKS)],
        "best_of": [({"best_of": 2}, WORKS)],
        "echo": [({"echo": True}, WORKS), ({"echo": True, "max_tokens": 0}, WORKS)],
        "logprobs": [({"logprobs": 2}, WORKS)],
        "suffix": [({"suffix": "x"}, REFUSED)],
    },
    "chat": {
        **{name: cases for name, cases in BOTH.items() if name != "max_tokens"},
        "messages": [({"messages": HELLO}, WORKS)],
        "max_tokens": [({"max_tokens": 1, "max_completion_tokens": None}, WORKS)],
        "max_completion_tokens": [({"max_completion_tokens": 1}, WORKS)],
        "logprobs": [({"logprobs": True}, WORKS)],
        "top_logprobs": [({"logprobs": True, "top_logprobs": 3}, WORKS)],
        "tools": [({"tools": [TOOL]}, WORKS)],
        "tool_choice": [
            ({"tool_choice": "auto", "tools": [TOOL]}, WORKS),
            ({"tool_choice": "none", "tools": [TOOL]}, WORKS),
            ({"tool_choice": "required", "tools": [TOOL]}, WORKS),
            ({"tool_choice": "required"}, WRONG),
        ],
        "parallel_tool_calls": [({"parallel_tool_calls": False, "tools": [TOOL]}, WORKS)],
        "functions": [({"functions": [{"name": "f"}]}, REFUSED)],
        "function_call": [({"function_call": "auto"}, REFUSED)],
        "response_format": [({"response_format": {"type": "text"}}, WORKS)],
        "reasoning_effort": [
            ({"reasoning_effort": "none"}, WORKS),
            ({"reasoning_effort": "medium"}, WORKS),
            ({"reasoning_effort": "high"}, REFUSED),
            ({"reasoning_effort": "extreme"}, WRONG),
        ],
        "metadata": [({"metadata": {"a": "b"}}, WORKS)],
        "store": [({"store": False}, WORKS), ({"store": True}, REFUSED)],
        "service_tier": [({"service_tier": "auto"}, WORKS), ({"service_tier": "flex"}, REFUSED)],
        "modalities": [({"modalities": ["text"]}, WORKS), ({"modalities": ["text", "audio"]}, REFUSED)],
        "verbosity": [({"verbosity": "medium"}, WORKS), ({"verbosity": "low"}, REFUSED)],
        "prompt_cache_key": [({"prompt_cache_key": "k"}, WORKS)],
        "prompt_cache_retention": [
            ({"prompt_cache_retention": "in_memory"}, WORKS),
            ({"prompt_cache_retention": "24h"}, REFUSED),
        ],
        "prompt_cache_options": [
            ({"prompt_cache_options": {"mode": "implicit"}}, WORKS),
            ({"prompt_cache_options": {"mode": "explicit"}}, REFUSED),
            ({"prompt_cache_options": {"ttl": "30m"}}, REFUSED),
        ],
        "safety_identifier": [({"safety_identifier": "me"}, WORKS)],
        "audio": [({"audio": {"voice": "x", "format": "wav"}}, REFUSED)],
        "moderation": [({"moderation": {"model": "m"}}, REFUSED)],
        "prediction": [({"prediction": {"type": "content", "content": "x"}}, REFUSED)],
        "web_search_options": [({"web_search_options": {}}, REFUSED)],
    },
}
# field of a message -> a conversation with it, the outcome
MESSAGES: dict[str, list[tuple[list[dict[str, Any]], str]]] = {
    "role": [([{"role": role, "content": "x"}, *HELLO], WORKS) for role in ("system", "developer", "assistant")],
    "content": [
        ([{"role": "user", "content": "x"}], WORKS),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], WORKS),
    ],
    "name": [([{"role": "user", "content": "x", "name": "Ann"}], WORKS)],  # ignored: the template has no place for it
    "tool_calls": [
        ([*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], WORKS),
        ([*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}], WRONG),
    ],
    "tool_call_id": [
        ([*HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT], WORKS),
        ([*HELLO, {"role": "assistant", "tool_calls": [CALL]}, RESULT | {"tool_call_id": "call_2"}], WRONG),
        ([*HELLO, RESULT], WRONG),
    ],
    "tool_calls[0].index": [
        ([*HELLO, {"role": "assistant", "tool_calls": [CALL | {"index": 0, "type": None}]}, RESULT], WORKS),
        ([*HELLO, {"role": "assistant", "tool_calls": [CALL | {"index": "0"}]}], WRONG),
    ],
    "reasoning": [  # vLLM's and others': under either name, or under both
        ([*HELLO, {"role": "assistant", "content": "x", "reasoning": "y"}], WORKS),
        ([*HELLO, {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "y"}], WORKS),
        ([*HELLO, {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "z"}], WRONG),
        ([*HELLO, {"role": "assistant", "content": "x", "reasoning": 7, "reasoning_content": "z"}], WRONG),
    ],
    "audio": [([*HELLO, {"role": "assistant", "content": "x", "audio": {"id": "a"}}], REFUSED)],
    "function_call": [
        ([*HELLO, {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": ""}}], REFUSED)
    ],
    "refusal": [
        ([*HELLO, {"role": "assistant", "content": "x", "refusal": None}], WORKS),
        ([*HELLO, {"role": "assistant", "content": "x", "refusal": "no"}], REFUSED),
    ],
}
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "x"}, WORKS),
    "image_url": ({"image_url": {"url": "x"}}, REFUSED),
    "input_audio": ({"input_audio": {"data": "x", "format": "wav"}}, REFUSED),
    "file": ({"file": {"file_id": "x"}}, REFUSED),
    "refusal": ({"refusal": "x"}, REFUSED),
}
CHOICES: dict[str, tuple[Any, str]] = {
    "function": (NAMED, WORKS),
    "custom": ({"type": "custom", "custom": {"name": "f"}}, REFUSED),
    "allowed_tools": ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, WORKS),
}


@pytest.fixture(scope="module")
async def post(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that takes tools and can think."""
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")
    ingress = await make_ingress(folder, EchoWorker(str(folder)))
    return partial(openapi_conformance.caller(ingress.__serve_build_asgi_app__()), "POST")


def fields_of(*types: Any) -> set[str]:
    return {name for kind in types for name in kind.__annotations__}


def kinds_of(types: Iterable[Any]) -> set[str]:
    """Values of `type` that these objects can have."""
    return {value for kind in types for value in get_args(get_type_hints(kind)["type"])}


def test_every_field_of_the_client_is_decided() -> None:
    for kind, params in (("completion", completion_params), ("chat", chat_params)):
        offered = fields_of(params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
        assert offered - set(FIELDS[kind]) == set()
        assert len(offered) > 15
    offered = fields_of(*get_args(chat_types.ChatCompletionMessageParam))
    assert offered - set(MESSAGES) == set()
    assert fields_of(chat_types.ChatCompletionStreamOptionsParam) <= {"include_usage", "include_obfuscation"}
    if options := getattr(chat_params, "PromptCacheOptions", None):  # not in older releases
        assert fields_of(options) <= {"mode", "ttl"}
    assert fields_of(FunctionDefinition) == {"name", "description", "parameters", "strict"}


def test_every_kind_of_part_and_tool_is_decided() -> None:
    parts = (*get_args(chat_types.ChatCompletionContentPartParam), chat_types.ChatCompletionContentPartRefusalParam)
    assert kinds_of(parts) == set(PARTS)
    assert kinds_of(get_args(ChatCompletionToolUnionParam)) == {"function", "custom"}
    choices = [
        kind for kind in get_args(chat_types.ChatCompletionToolChoiceOptionParam) if hasattr(kind, "__annotations__")
    ]
    assert kinds_of(choices) == set(CHOICES)


def test_the_tables_say_the_same() -> None:
    for kind, table in (("completion", fields_by_name(COMPLETION)), ("chat", fields_by_name(CHAT))):
        for name, cases in FIELDS[kind].items():
            assert (table[name].instead is not None) == all(outcome == REFUSED for _, outcome in cases), name
            assert table[name].doc or table[name].instead
        assert len(table) == len({field.name for field in (COMPLETION if kind == "completion" else CHAT)})


CASES = [(kind, name, fields, outcome) for kind, names in FIELDS.items()
         for name, cases in names.items() for fields, outcome in cases]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "fields", "outcome"), CASES, ids=lambda value: str(value)[:30])
async def test_fields(kind: str, name: str, fields: dict[str, Any], outcome: str, post: Any) -> None:
    assert name in fields
    settle(await post(PATHS[kind], BODIES[kind] | fields), outcome, name)


@pytest.mark.parametrize(("messages", "outcome"), [case for cases in MESSAGES.values() for case in cases])
async def test_messages(messages: list[dict[str, Any]], outcome: str, post: Any) -> None:
    settle(await post(PATHS["chat"], BODIES["chat"] | {"messages": messages}), outcome, "messages[")


async def test_messages_of_functions_are_refused(post: Any) -> None:
    message = {"role": "function", "name": "f", "content": "x"}
    settle(await post(PATHS["chat"], BODIES["chat"] | {"messages": [message]}), WRONG, "messages[0].role")


@pytest.mark.parametrize("kind", PARTS)
async def test_parts(kind: str, post: Any) -> None:
    fields, outcome = PARTS[kind]
    for more, expected in (({}, outcome), ({"prompt_cache_breakpoint": {"at": 1}}, REFUSED)):
        content = [{"type": kind, **fields, **more}]
        reply = await post(PATHS["chat"], BODIES["chat"] | {"messages": [{"role": "user", "content": content}]})
        settle(reply, expected, "messages[0].content[0]")


@pytest.mark.parametrize("kind", CHOICES)
async def test_tool_choices(kind: str, post: Any) -> None:
    choice, outcome = CHOICES[kind]
    reply = await post(PATHS["chat"], BODIES["chat"] | {"tools": [TOOL], "tool_choice": choice})
    settle(reply, outcome, "tool_choice")


@pytest.mark.parametrize("path", ["", "/resp_1", "/resp_1/cancel", "/compact", "/input_tokens"])
async def test_responses_are_refused_by_name(path: str, post: Any) -> None:
    reply = await post(f"/v1/responses{path}", {"model": "echo", "input": "Hello"})
    assert reply.status == 404
    error = reply.json()["error"]
    assert error["code"] == "unsupported_endpoint"
    assert "/v1/responses is not supported; use /v1/chat/completions" in error["message"]


def settle(reply: Any, outcome: str, name: str) -> None:
    if outcome == WORKS:
        assert reply.status == 200, reply.body
        assert b"error" not in reply.body
        return
    assert reply.status == 400
    error = reply.json()["error"]
    assert error["code"] == outcome
    assert error["param"].startswith(name)
    assert error["param"] in error["message"]
