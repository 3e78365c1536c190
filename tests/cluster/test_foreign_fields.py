"""Treatment of every field that clients of other servers send, and of those that nobody knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import asgi
import openapi_conformance
import pytest
from bad_requests import refused
from echo_worker import EchoWorker
from local_ingress import make_ingress
from tool_templates import write_tool_tokenizer

from motley.cluster.api.common.fields.body_shapes import normalize_body
from motley.cluster.api.common.fields.foreign_fields import FOREIGN_FIELDS, FieldEffect, ForeignField
from motley.cluster.api.common.fields.unknown_fields import ALWAYS_REFUSED, MAX_NAMES, UnknownFieldPolicy
from motley.cluster.api.openai import openai_request
from motley.cluster.api.openai.openai_request_schemas import BODY_SCHEMAS, BODY_SHAPES
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.sampling_params import MAX_ALL_STOP_CHARS, MAX_STOP_STRINGS

HELLO = [{"role": "user", "content": "Hello"}]
PATHS = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embedding": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
PLAIN: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "abc", "max_tokens": 2, "seed": 1},
    "chat": {"messages": HELLO, "max_tokens": 2, "seed": 1},
    "embedding": {"input": "abc"},
    "tokenize": {"messages": HELLO},
    "detokenize": {"tokens": [65]},
}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# The object at each path, with a hole for one more field.
AT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "": lambda field: field,
    "stream_options": lambda field: {"stream": True, "stream_options": field},
    "reasoning": lambda field: {"reasoning": {"enabled": True, **field}},
    "thinking": lambda field: {"thinking": {"type": "enabled", **field}},
    "response_format": lambda field: {"response_format": {"type": "json_object", **field}},
    "structured_outputs": lambda field: {"structured_outputs": {"regex": "a", **field}},
    "tool_choice": lambda field: {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}, **field},
    },
    "tools[]": lambda field: {"tools": [{"type": "function", "function": {"name": "f"}, **field}]},
    "tools[].function": lambda field: {"tools": [{"type": "function", "function": {"name": "f", **field}}]},
    "messages[]": lambda field: {"messages": [*HELLO, {"role": "assistant", "content": "x", **field}, *HELLO]},
    "messages[].content[]": lambda field: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **field}]}]
    },
    "messages[].tool_calls[]": lambda field: {
        "messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{**CALL, **field}]},
                     {"role": "tool", "tool_call_id": "a", "content": "x"}]
    },
    "messages[].tool_calls[].function": lambda field: {
        "messages": [*HELLO, {"role": "assistant", "content": "",
                              "tool_calls": [{**CALL, "function": {**CALL["function"], **field}}]},
                     {"role": "tool", "tool_call_id": "a", "content": "x"}]
    },
}  # fmt: skip
CASES = [
    (one, route)
    for one in FOREIGN_FIELDS
    for route in one.routes
    if one.effect is not FieldEffect.WORKS
    and (route in ("completion", "chat") or (route != "detokenize" and not one.at))
    if not one.at or route == "chat" or (route == "completion" and one.at in ("stream_options", "structured_outputs"))
]


@pytest.fixture(scope="module")
async def ingress(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An ingress before a model that takes tools and can think; what it says depends on the prompt alone."""
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return await make_ingress(folder, EchoWorker(str(folder)))


@pytest.fixture(scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An ingress with `--unknown-fields refuse`."""
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("strict"), "qwen3")
    ingress = await make_ingress(folder, EchoWorker(str(folder)), ingress_config=IngressConfig(unknown_fields="refuse"))
    return partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")


@pytest.fixture(scope="module")
def post(ingress: Any) -> Any:
    return partial(openapi_conformance.caller(ingress.__serve_build_asgi_app__()), "POST")


def settled(route: str, one: ForeignField, value: Any) -> dict[str, Any]:
    """The body with that field, as the check leaves it. Nothing of it may be unknown."""
    plain = {name: given for name, given in PLAIN[route].items() if name != one.why}
    body = json.loads(json.dumps({**plain, **AT[one.at]({one.name: value})}))
    return normalize_body(body, BODY_SHAPES[route], UnknownFieldPolicy("refuse"))


def without(route: str, one: ForeignField) -> dict[str, Any]:
    plain = {name: given for name, given in PLAIN[route].items() if name != one.why}
    return json.loads(json.dumps({**plain, **AT[one.at]({})}))


def filled(body: dict[str, Any]) -> dict[str, Any]:
    """An empty object is none."""
    return {name: value for name, value in body.items() if value != {}}


def test_what_asks_for_nothing_is_taken() -> None:
    for one, route in CASES:
        for value in (None, "", [], {}, *one.neutral):
            found, plain = settled(route, one, value), without(route, one)
            assert filled(found) == filled(plain), (one.path, route, value)


def test_what_asks_for_something_is_refused_by_name_renamed_or_without_effect() -> None:
    for one, route in CASES:
        if one.effect is FieldEffect.REFUSED:
            with pytest.raises(InvalidRequest) as caught:
                settled(route, one, "anything else")
            assert caught.value.code == "unsupported_parameter", one.path
            assert (caught.value.param or "").rpartition(".")[2] == one.name
            assert one.why in caught.value.message
        elif one.effect is FieldEffect.RENAMED:
            is_renamed(one, route, "anything else")
        elif one.effect is FieldEffect.SPREAD:
            assert settled(route, one, {"top_k": 5, "num_ctx": 9}) == {**PLAIN[route], "top_k": 5}
        else:
            assert filled(settled(route, one, "anything else")) == filled(without(route, one)), one.path


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ("fast", "options", "invalid_value"),
        ({"mood": 1}, "mood", "unknown_parameter"),
        ({"options": {"top_k": 5}}, "options.options", "unknown_parameter"),
        ({"parameters": {"top_k": 5}}, "options.parameters", "unknown_parameter"),
        ({"cache_salt": "mine"}, "cache_salt", "unknown_parameter"),
        ({"mirostat": 2}, "mirostat", "unsupported_parameter"),
        ({"seed": 2}, "options.seed", "invalid_value"),
        ({"num_predict": 7}, "num_predict", "invalid_value"),
    ],
)
def test_what_stands_in_options_is_held_to_the_same_rules(options: Any, param: str, code: str) -> None:
    for route in ("completion", "chat"):
        for name in ("options", "parameters"):
            body = json.loads(json.dumps({**PLAIN[route], name: options}))
            with pytest.raises(InvalidRequest) as caught:
                normalize_body(body, BODY_SHAPES[route], UnknownFieldPolicy("refuse"))
            assert (caught.value.param, caught.value.code) == (param.replace("options", name, 1), code)


def is_renamed(one: ForeignField, route: str, value: str) -> None:
    found: Any = settled(route, one, value)
    for name in one.why.split("."):
        found = found.get(name)
    assert found == ([value] if one.is_item else value) or one.why.partition(".")[0] not in BODY_SHAPES[route].supported
    outer, _, inner = one.why.partition(".")
    route = route if outer in BODY_SHAPES[route].supported else "chat"
    both = {**PLAIN[route], outer: {inner: "a"} if inner else "a", one.name: "b"}
    with pytest.raises(InvalidRequest, match=f"no value beside {one.why}"):
        normalize_body(both, BODY_SHAPES[route], UnknownFieldPolicy("refuse"))


def test_what_works_is_in_the_tables_and_whatever_they_have_of_others_is_listed() -> None:
    for one in FOREIGN_FIELDS:
        if one.effect is FieldEffect.WORKS:
            for route in one.routes:
                shape = BODY_SHAPES[route]
                for part in one.at.replace("[]", ".[]").split(".") if one.at else ():
                    shape = shape.items if part == "[]" else shape.inner[part]  # type: ignore[assignment]
                assert one.name in shape.supported, one.path
    by_route = {(one.name, route) for one in FOREIGN_FIELDS for route in one.routes if not one.at}
    openai_and_own = {
        "audio", "best_of", "echo", "encoding_format", "dimensions", "frequency_penalty", "function_call", "functions",
        "input", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata", "modalities",
        "model", "moderation", "n", "output_ids", "parallel_tool_calls", "parse_special", "pooling", "prediction",
        "presence_penalty", "prompt", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "prompt_logprobs", "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop",
        "store", "stream", "stream_options", "suffix", "temperature", "timeout_s", "tool_choice", "tools",
        "top_logprobs", "top_p", "user", "verbosity", "web_search_options", "tokens", "skip_special_tokens",
    }  # fmt: skip
    for route in BODY_SCHEMAS:
        others = BODY_SHAPES[route].supported - openai_and_own
        assert {name for name in others if (name, route) not in by_route} == set(), "no source is told"


def test_each_is_listed_once_and_has_a_source() -> None:
    listed = [(one.path, route) for one in FOREIGN_FIELDS for route in one.routes]
    assert len(listed) == len(set(listed))
    assert all(one.sources for one in FOREIGN_FIELDS)
    assert all(one.why for one in FOREIGN_FIELDS if one.effect is not FieldEffect.WORKS)
    assert not {one.name for one in FOREIGN_FIELDS if not one.at} & ALWAYS_REFUSED


# Bodies as clients send them, whole, with their defaults.
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "sglang-router": ("chat", {
        "model": "echo", "messages": HELLO, "stream": False, "ignore_eos": False, "no_stop_trim": False,
        "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "include_reasoning": True, "parallel_tool_calls": True,
        "logprobs": False, "log_metrics": True, "session_params": None, "lora_path": None, "max_tokens": 2}),
    "vllm-router": ("completion", {
        "model": "echo", "prompt": "abc", "stream": False, "echo": False, "no_stop_trim": False, "ignore_eos": False,
        "skip_special_tokens": True, "return_hidden_states": False, "bootstrap_host": None, "max_tokens": 2}),
    "guidellm": ("chat", {
        "model": "echo", "messages": HELLO, "stream": True, "max_completion_tokens": 2, "max_tokens": 2, "stop": None,
        "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "vLLM's own defaults": ("chat", {
        "messages": HELLO, "logprobs": False, "top_logprobs": 0, "n": 1, "stop": [], "stream": False,
        "tool_choice": "none", "parallel_tool_calls": True, "use_beam_search": False, "length_penalty": 1.0,
        "stop_token_ids": [], "include_stop_str_in_output": False, "min_tokens": 0,
        "spaces_between_special_tokens": True, "bad_words": [], "echo": False, "add_generation_prompt": True,
        "add_special_tokens": False, "priority": 0, "request_id": "0f", "cache_salt": "", "chat_template": None,
        "documents": None, "mm_processor_kwargs": None, "return_token_offsets": False, "return_mm_kwargs": True,
        "routed_experts_prompt_start": 0, "thinking_token_budget": None, "vllm_xargs": None, "max_tokens": 2}),
    "llama.cpp's web page": ("chat", {
        "messages": HELLO, "stream": True, "cache_prompt": True, "samplers": "", "dynatemp_range": 0,
        "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1, "repeat_last_n": 64,
        "repeat_penalty": 1, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "n_predict": -1, "timings_per_token": True, "reasoning_format": "auto", "max_tokens": 2}),
    "an answer of OpenAI sent back": ("chat", {
        "messages": [*HELLO, {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None,
                              "function_call": None, "tool_calls": [], "parsed": None}, *HELLO],
        "tools": [], "store": False, "max_tokens": 2}),
    "OpenRouter through LiteLLM": ("chat", {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "Be kind", "cache_control":
                      {"type": "ephemeral"}}]}, *HELLO,
                     {"role": "assistant", "content": "Hi", "provider_specific_fields": {"a": 1}, "reasoning": "hm",
                      "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, *HELLO],
        "provider": {"order": ["x"]}, "transforms": [], "usage": {"include": True}, "litellm_call_id": "7",
        "max_tokens": 2}),
}  # fmt: skip


@pytest.mark.parametrize("client", SENT)
async def test_clients_send_their_defaults(client: str, post: Any, strict: Any) -> None:
    route, body = SENT[client]
    reply = await post(PATHS[route], body)
    assert reply.status == 200, reply.body
    assert (await strict(PATHS[route], body)).status == 200, "all of it is known"


@pytest.mark.parametrize("route", PATHS)
async def test_unknown_fields_are_ignored_and_logged_once(
    route: str, post: Any, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, name = PLAIN[route], f"mood_of_{route}\u00fc\ud800"
    with caplog.at_level(logging.WARNING, "motley.cluster.api.common.fields.unknown_fields"):
        replies = [await post(PATHS[route], {**plain, name: {"deep": [1]}}) for _ in range(3)]
    assert [reply.status for reply in replies] == [200] * 3
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "motley.cluster.api.common.fields.unknown_fields"
    ]
    assert said == [f"a request has the unknown field 'mood_of_{route}\\xfc\\ud800', which is ignored "
                    "(--unknown-fields refuse would refuse it)"]  # fmt: skip
    error = refused(await strict(PATHS[route], {**plain, name: 1}))
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert (await strict(PATHS[route], {**plain, name: None, "other": [], "third": ""})).status == 200


NESTED = [
    ({"messages": [{**HELLO[0], "mood": 1}]}, "messages[0].mood"),
    ({"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
     "messages[1].content[0].mood"),
    ({"messages": HELLO, "tools": [{"type": "function", "mood": 1, "function": {"name": "f"}}]}, "tools[0].mood"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "mood": 1}}]},
     "tools[0].function.mood"),
    ({"messages": HELLO, "stream": True, "stream_options": {"mood": 1}}, "stream_options.mood"),
    ({"messages": HELLO, "response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
    ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema":
      {"name": "x", "schema": {"type": "integer"}, "mood": 1}}}, "response_format.json_schema.mood"),
    ({**AT["tool_choice"]({"mood": 1}), "messages": HELLO}, "tool_choice.mood"),
    ({**AT["messages[].tool_calls[]"]({"mood": 1})}, "messages[1].tool_calls[0].mood"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path"), NESTED, ids=[path for _, path in NESTED])
async def test_the_same_holds_within(body: dict[str, Any], path: str, post: Any, strict: Any) -> None:
    assert (await post(PATHS["chat"], {**body, "max_tokens": 1})).status == 200
    error = refused(await strict(PATHS["chat"], {**body, "max_tokens": 1}))
    assert (error["param"], error["code"]) == (path, "unknown_parameter")


async def test_names_within_a_schema_are_the_schemas_own(post: Any, strict: Any) -> None:
    parameters = {"type": "object", "properties": {"cache_salt": {"type": "string"}}, "x-mood": 1, "$comment": ""}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for to in (post, strict):
        assert (await to(PATHS["chat"], {"messages": HELLO, "tools": tools, "max_tokens": 1})).status == 200
        metadata = {"mood": "x", "cache_salt": "y"}
        assert (await to(PATHS["chat"], {"messages": HELLO, "metadata": metadata, "max_tokens": 1})).status == 200


@pytest.mark.parametrize("name", sorted(ALWAYS_REFUSED))
@pytest.mark.parametrize("route", PATHS)
async def test_what_a_client_has_no_say_in_is_refused_whatever_the_option_says(
    name: str, route: str, post: Any, strict: Any
) -> None:
    for to in (post, strict):
        for value in ("mine", ["mine"], {"a": 1}, 0, False):
            error = refused(await to(PATHS[route], {**PLAIN[route], name: value}))
            assert (error["param"], error["code"]) == (name, "unknown_parameter")
        for nothing in (None, "", [], {}):
            assert (await to(PATHS[route], {**PLAIN[route], name: nothing})).status == 200


def test_a_log_of_names_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFieldPolicy()
    with caplog.at_level(logging.WARNING, "motley.cluster.api.common.fields.unknown_fields"):
        for number in range(4 * MAX_NAMES):
            unknown.meet(f"{number} {'x' * 10_000}", 1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MAX_NAMES + 1
    assert max(map(len, lines)) < 200
    assert lines[-1].startswith(f"{MAX_NAMES} unknown fields have been logged")


async def test_token_ids_are_told(post: Any) -> None:
    whole = (await post(PATHS["completion"], {"prompt": "abc", "max_tokens": 2, "return_token_ids": True})).json()
    abc = (await post("/tokenize", {"prompt": "abc"})).json()["tokens"]
    assert whole["choices"][0]["prompt_token_ids"] == abc
    assert whole["choices"][0]["token_ids"] == abc[:2]
    more = {"stream": True, "return_token_ids": True}
    events = (await post(PATHS["completion"], {"prompt": "abc", "max_tokens": 2, **more})).events()[:-1]
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [abc, None]
    assert [event["choices"][0]["token_ids"] for event in events] == [abc[:1], abc[1:2]]
    chat = {"messages": HELLO, "max_tokens": 2, "return_token_ids": True}
    answer = (await post(PATHS["chat"], chat)).json()
    prompt = (await post("/tokenize", {"messages": HELLO})).json()["tokens"]
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, prompt[:2])
    events = (await post(PATHS["chat"], {**chat, "stream": True})).events()[:-1]
    assert events[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert [one for event in events for one in event["choices"][0].get("token_ids", [])] == prompt[:2]


async def test_usage_so_far(post: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    events = (await post(PATHS["completion"], body)).events()[:-1]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in events} == {3}
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in event for event in (await post(PATHS["completion"], alone)).events()[:-1])


@pytest.mark.parametrize(
    ("more", "left"),
    [({"truncate_prompt_tokens": 2}, "ef"), ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
     ({"truncate_prompt_tokens": -1}, "abcdef"), ({"truncate_prompt_tokens": 512}, None), ({"truncate": 3}, "def")],
)  # fmt: skip
async def test_prompts_are_cut(more: dict[str, Any], left: str | None, post: Any) -> None:
    ids = (await post("/tokenize", {"prompt": "abcdef"})).json()["tokens"]
    kept = (await post("/tokenize", {"prompt": left or "abcdef"})).json()["tokens"]
    for prompt in ("abcdef", ids):
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **more}
        reply = await post(PATHS["completion"], body)
        assert reply.json()["choices"][0]["prompt_token_ids"] == kept


async def test_a_prompt_longer_than_the_context_is_cut_to_leave_room(post: Any) -> None:
    for prompt in ("x" * 2000, [120] * 2000):
        body = {"prompt": prompt, "max_tokens": 10, "truncate_prompt_tokens": -1}
        assert (await post(PATHS["completion"], body)).json()["usage"]["prompt_tokens"] == 512 - 10
    chat = {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 4, "truncate_prompt_tokens": 100}
    assert (await post(PATHS["chat"], chat)).json()["usage"]["prompt_tokens"] == 100
    embedding = {"input": "x" * 2000, "truncate_prompt_tokens": -1}
    assert (await post(PATHS["embedding"], embedding)).json()["usage"]["prompt_tokens"] == 512
    far = refused(await post(PATHS["completion"], {"prompt": "x" * 100_000, "truncate_prompt_tokens": 5}))
    assert far["code"] == "context_length_exceeded", "a megabyte is not read to keep five tokens of it"


async def test_a_last_message_is_continued(post: Any) -> None:
    said = [*HELLO, {"role": "assistant", "content": "Once upon <|im_end|> a "}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = (await post("/tokenize", {"messages": said, **more})).json()["tokens"]
    text = (await post("/detokenize", {"tokens": tokens})).json()["prompt"]
    assert text.endswith("Once upon <|im_end|> a ")
    begun = (await post("/tokenize", {"messages": said, "add_generation_prompt": False})).json()["tokens"]
    assert (await post("/detokenize", {"tokens": begun})).json()["prompt"].endswith("<|im_end|>\n")
    answer = (await post(PATHS["chat"], {"messages": said, **more, "max_tokens": 1, "return_token_ids": True})).json()
    assert answer["prompt_token_ids"] == tokens
    for wrong in ({"continue_final_message": True}, {**more, "messages": HELLO}):
        error = refused(await post(PATHS["chat"], {"messages": said, "max_tokens": 1, **wrong}))
        assert error["param"] == "continue_final_message"


async def test_other_names_of_a_format(post: Any, ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    admit = ingress.admitter.admit
    monkeypatch.setattr(ingress.admitter, "admit", lambda ask, caller: seen.append(ask) or admit(ask, caller))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    same = [
        {"structured_outputs": {"json": schema}}, {"guided_json": schema}, {"json_schema": json.dumps(schema)},
        {"response_format": {"type": "json_object", "schema": schema}},
    ]  # fmt: skip
    for body in same:
        assert (await post(PATHS["completion"], {**PLAIN["completion"], **body})).status == 200
    assert len({ask.sampling["grammar"].source for ask in seen}) == 1
    assert (await post(PATHS["chat"], {"messages": HELLO, "max_tokens": 1, "enable_thinking": False})).status == 200
    assert seen[-1].template_arguments == {"enable_thinking": False}
    for given, status in ((None, 200), ({}, 200), ("x", 400), ([1], 400)):
        body = {"messages": HELLO, "max_tokens": 1, "enable_thinking": False, "chat_template_kwargs": given}
        assert (await post(PATHS["chat"], body)).status == status
    assert (await post(PATHS["chat"], {"messages": HELLO, "max_tokens": 1, "rid": "mine"})).status == 200
    assert seen[-1].client_id == "mine"


async def test_an_answer_until_the_context_is_full(post: Any, ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    admit = ingress.admitter.admit
    monkeypatch.setattr(ingress.admitter, "admit", lambda ask, caller: seen.append(ask) or admit(ask, caller))
    plain = {"completion": {"prompt": "abc"}, "chat": {"messages": HELLO}}
    for more in ({"n_predict": -1}, {"options": {"num_predict": -2}}, {"n_predict": -1, "num_predict": -1}):
        for route, body in plain.items():
            assert (await post(PATHS[route], {**body, **more})).status == 200
            assert "max_tokens" not in seen[-1].sampling
            assert seen[-1].default_max_tokens is None
    bound = {"n_predict": -1, "num_predict": 3}, {"n_predict": 3, "num_predict": -1}, {"n_predict": -1, "max_tokens": 3}
    for more in bound:
        for route, body in plain.items():
            assert (await post(PATHS[route], {**body, **more})).status == 200
            assert seen[-1].sampling["max_tokens"] == 3
    for name, wrong in (("max_tokens", -2), ("n_predict", -3), ("max_new_tokens", -2)):
        assert refused(await post(PATHS["completion"], {"prompt": "abc", name: wrong}))["param"] == name
    assert (await post(PATHS["completion"], {"prompt": "abc"})).status == 200
    assert seen[-1].default_max_tokens == 16


async def test_log_probabilities_of_completions_in_the_words_of_others(post: Any, ingress: Any) -> None:
    plain = {"prompt": "abc", "max_tokens": 2}
    ways = [
        ({"logprobs": 2}, {"logprobs": True, "top_logprobs": 2}, {"n_probs": 2}),
        ({"logprobs": 0}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 0}),
        ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"n_probs": 0}),
        ({"echo": True}, {"return_full_text": True}),
    ]
    for same in ways:
        calls = [openai_request.parse_completion(normalize_body({**plain, **one}, BODY_SHAPES["completion"],
        UnknownFieldPolicy("refuse")))
                 for one in same]  # fmt: skip
        told = [(call.requests[0].sampling, call.logprobs, call.echo) for call in calls]
        assert told == [told[0]] * len(same)
        assert (await post(PATHS["completion"], {**plain, **same[-1]})).status == 200
    for wrong in ({"logprobs": 2, "top_logprobs": 3}, {"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}):
        assert refused(await post(PATHS["completion"], {**plain, **wrong}))["param"] == "top_logprobs"


async def test_formats_in_the_words_of_others(post: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    any_object = [
        {"format": "json"},
        {"response_format": {"type": "json"}},
        {"response_format": {"type": "json_object"}},
    ]
    kept = [
        {"format": schema},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"response_format": {"type": "json_object", "value": schema}},
        {"response_format": {"type": "json", "value": schema}},
    ]
    for same in (any_object, kept):
        found = [
            openai_request.parse_completion({"prompt": "a", **one}).requests[0].sampling["grammar"] for one in same
        ]
        assert len({one.source for one in found}) == 1
        for one in same:
            assert (await post(PATHS["chat"], {"messages": HELLO, "max_tokens": 1, **one})).status == 200
    assert "grammar" not in openai_request.parse_completion({"prompt": "a", "format": ""}).requests[0].sampling
    for wrong, param in (
        ({"format": "xml"}, "format"),
        ({"format": "json", "regex": "a"}, "regex"),
        ({"response_format": {"type": "json", "value": schema, "schema": schema}}, "response_format.value"),
    ):
        assert refused(await post(PATHS["chat"], {"messages": HELLO, **wrong}))["param"] == param


async def test_patterns_and_grammars_in_the_words_of_others(post: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    structures = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    newer = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}}
    alike = [
        [{"regex": "a+"}, {"response_format": {"type": "regex", "regex": "a+"}},
         {"response_format": {"type": "regex", "value": "a+"}}, {"response_format": {"type": "regex", "pattern": "a+"}},
         {"grammar": {"type": "regex", "value": "a+"}}, {"parameters": {"grammar": {"type": "regex", "value": "a+"}}},
         {"sampling_params": {"regex": "a+"}}],
        [{"json_schema": schema}, {"grammar": {"type": "json", "value": schema}},
         {"grammar": {"type": "json_object", "value": json.dumps(schema)}},
         {"grammar": {"type": "json_schema", "value": {"name": "x", "schema": schema}}},
         {"grammar": {"type": "json_schema", "value": {"schema": schema}}},
         {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": schema}}},
         {"response_format": {"type": "json", "value": json.dumps(schema)}}],
        [{"response_format": newer}, {"response_format": {"type": "structural_tag", **structures}},
         {"structural_tag": newer}, {"structural_tag": json.dumps(structures)},
         {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **structures})}}],
    ]  # fmt: skip
    for same in alike:
        bodies = [normalize_body({"prompt": "a", **json.loads(json.dumps(one))}, BODY_SHAPES["completion"],
        UnknownFieldPolicy("refuse"))
                  for one in same]  # fmt: skip
        found = [openai_request.parse_completion(body).requests[0].sampling["grammar"] for body in bodies]
        assert len({(one.kind, one.source) for one in found}) == 1
        for one in same:
            assert (await post(PATHS["completion"], {**PLAIN["completion"], **one})).status == 200
            assert (await post(PATHS["chat"], {"messages": HELLO, "max_tokens": 1, **one})).status == 200
    bare = {name: value for name, value in structures.items() if name != "triggers"}
    for wrong, param in (
        ({"grammar": {"type": "xml", "value": "a"}}, "grammar.type"),
        ({"grammar": {"value": "a"}}, "grammar.type"),
        ({"grammar": {"type": "regex"}}, "grammar.value"),
        ({"grammar": {"type": "regex", "value": ["a"]}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": {"name": "x"}}}, "grammar.value.schema"),
        ({"grammar": {"type": "json_schema", "value": "x"}}, "grammar.value"),
        ({"grammar": {"type": "regex", "value": "a"}, "regex": "a"}, "grammar"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "regex", "regex": "a", "pattern": "a"}}, "response_format.pattern"),
        ({"response_format": {"type": "json", "value": "{"}}, "response_format.value"),
        ({"response_format": {"type": "json", "value": False}}, "response_format.value"),
        ({"response_format": {"type": "json_object", "schema": 0}}, "response_format.schema"),
        ({"response_format": {"type": "regex", "pattern": False}}, "response_format.pattern"),
        ({"response_format": {"type": "structural_tag", **bare}}, "response_format"),
        ({"response_format": {**newer, **structures}}, "response_format.format"),
    ):
        for route in ("completion", "chat"):
            assert refused(await post(PATHS[route], {**PLAIN[route], **wrong}))["param"] == param, wrong


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("n_indent", 4, 0), ("grammar_lazy", True, False), ("grammar_triggers", [{"type": 1, "value": "<"}], []),
        ("preserved_tokens", ["<a>"], []), ("logprob_start_len", 0, -1), ("token_ids_logprob", [5], None),
        ("verbosity", "low", "medium"), ("modalities", ["text", "audio"], ["text"]), ("audio", {"voice": "x"}, None),
        ("prediction", {"type": "content", "content": "x"}, None), ("moderation", {"model": "m"}, None),
        ("web_search_options", {}, None), ("service_tier", "flex", "auto"), ("store", True, False),
        ("prompt_cache_retention", "24h", "in_memory"), ("prompt_cache_options", {"ttl": "30m"}, {"mode": "implicit"}),
        ("mirostat", 2, 0), ("mirostat_mode", 2, 0), ("lora_request", {"lora_name": "x"}, None), ("lora_name", "x", ""),
        ("logit_bias_type", "tokens", "input_ids"), ("prompt_ignore_length", 4, 0), ("detokenize", False, True),
        ("disaggregated_params", {"a": 1}, {}), ("beam_width", 4, 1),
        ("exclude_input_in_output", False, True), ("return_context_logits", True, False),
        ("guided_decoding_guide", "x", ""), ("no_repeat_ngram_size", 3, 0), ("input_ids", [1], None),
        ("text", {"format": {"type": "json_object"}}, None), ("truncation", "auto", "disabled"),
        ("previous_response_id", "x", None), ("instructions", "Be kind", ""), ("thinking_budget", 10, -1),
        ("reasoning_budget_tokens", 10, -1), ("input_suffix", "x", ""), ("lora_weights", "x", ""),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_never_ignored(name: str, value: Any, neutral: Any, post: Any) -> None:
    for route in ("completion", "chat"):
        error = refused(await post(PATHS[route], {**PLAIN[route], name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter"), route
        assert (await post(PATHS[route], {**PLAIN[route], name: neutral})).status == 200, route


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"stop_words": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"stop_words": [""]}, {}),
        ({"min_length": 2}, {"min_tokens": 2}),
        ({"min_new_tokens": 2}, {"min_tokens": 2}),
        ({"end_id": 65}, {"stop_token_ids": [65]}),
        ({"end_id": 65, "stop_token_ids": [65]}, {"stop_token_ids": [65]}),
        ({"n_cmpl": 2}, {"n": 2}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"max_output_tokens": 2}, {"max_tokens": 2}),
        ({"return_logprob": True, "top_logprobs_num": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"return_log_probs": True}, {"logprobs": True}),
        ({"return_log_probs": False}, {}),
        ({"sampling_parameters": {"max_tokens": 2, "stop": ["x"]}}, {"stop": ["x"]}),
        ({"return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": -1}, {}),
        ({"sampling_params": {"max_new_tokens": 2, "stop": "x", "min_new_tokens": 1}},
         {"max_tokens": 2, "stop": "x", "min_tokens": 1}),
    ],
)  # fmt: skip
async def test_other_names_of_what_there_is(
    theirs: dict[str, Any], ours: dict[str, Any], post: Any, ingress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    admit = ingress.admitter.admit
    monkeypatch.setattr(ingress.admitter, "admit", lambda ask, caller: seen.append(ask) or admit(ask, caller))
    for route, plain in (("completion", {"prompt": "abc"}), ("chat", {"messages": HELLO})):
        for more in (theirs, ours):
            assert (await post(PATHS[route], {"max_tokens": 2, **plain, **more})).status == 200
        assert seen[-2].sampling == seen[-1].sampling


async def test_two_words_for_one_thing_that_differ_are_refused(post: Any) -> None:
    for more, param in (
        ({"end_id": 65, "stop_token_ids": [66]}, "end_id"),
        ({"end_id": True, "stop_token_ids": [1]}, "end_id"),
        ({"n": 1, "options": {"n": True}}, "options.n"),
        ({"max_tokens": 2, "max_new_tokens": 3}, "max_new_tokens"),
        ({"stop_words": "x", "stop": "y"}, "stop_words"),
        ({"n_cmpl": 2, "n": 3}, "n_cmpl"),
        ({"sampling_params": {"seed": 5}}, "sampling_params.seed"),
    ):
        for route in ("completion", "chat"):
            assert refused(await post(PATHS[route], {**PLAIN[route], **more}))["param"] == param
    false_is_not_true = {**PLAIN["completion"], "logprobs": False, "return_logprob": True}
    assert refused(await post(PATHS["completion"], false_is_not_true))["param"] == "return_logprob"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_tokens": 3, "max_new_tokens": -1}, {"max_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": -1}, {"max_tokens": 3}),
        ({"max_output_tokens": -1, "max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "options": {"max_tokens": -1}}, {"max_tokens": 3}),
        ({"max_tokens": -1, "options": {"max_tokens": 3}}, {"max_tokens": 3}),
        ({"n_predict": -2, "options": {"n_predict": 3}}, {"max_tokens": 3}),
        ({"max_tokens": 3, "options": {"max_tokens": None}}, {"max_tokens": 3}),
        ({"stop": ["a"], "options": {"stop": []}}, {"stop": ["a"]}),
        ({"stop": [], "stop_sequences": ["a"]}, {"stop": ["a"]}),
        ({"stop": "a", "stop_sequences": ["a"]}, {"stop": "a"}),
        ({"stop": "a", "parameters": {"stop": ["a"]}}, {"stop": "a"}),
        ({"end_id": 5, "stop_token_ids": [5]}, {"stop_token_ids": [5]}),
        ({"n": 2, "n_cmpl": 2.0, "options": {"num_return_sequences": 2}}, {"n": 2}),
    ],
    ids=repr,
)
async def test_the_same_said_twice_is_taken(
    post: Any, seen: list[Any], more: dict[str, Any], expected: dict[str, Any]
) -> None:
    for route, plain in (("completion", {"prompt": "abc"}), ("chat", {"messages": HELLO})):
        assert (await post(PATHS[route], {**plain, **more})).status == 200
        assert {name: seen[-1].sampling.get(name) for name in expected} == expected


async def test_a_number_is_taken_beside_true_as_logprobs(post: Any, seen: list[Any]) -> None:
    for more in ({"logprobs": 1, "return_logprob": True}, {"return_log_probs": True, "n_probs": 1}):
        assert (await post(PATHS["completion"], {**PLAIN["completion"], **more})).status == 200
        assert seen[-1].sampling["logprobs"] == 1


async def test_one_form_of_the_text_may_be_said_twice(post: Any, seen: list[Any]) -> None:
    schema = {"type": "integer"}
    for route in ("completion", "chat"):
        for more in (
            {"guided_json": schema, "json_schema": json.dumps(schema)},
            {"structured_outputs": {"json": schema, "regex": None}, "guided_json": schema},
            {"structured_outputs": {"choice": ["a"]}, "guided_choice": ["a"]},
        ):
            assert (await post(PATHS[route], {**PLAIN[route], **more})).status == 200
            assert seen[-1].sampling["grammar"] is not None
        for more, param in (
            ({"guided_json": schema, "json_schema": {"type": "null"}}, "json_schema"),
            ({"guided_regex": "1", "regex": "2"}, "regex"),
            ({"structured_outputs": {"json": schema}, "guided_regex": "a"}, "guided_regex"),
        ):
            assert refused(await post(PATHS[route], {**PLAIN[route], **more}))["param"] == param


async def test_what_a_client_calls_a_completion_is_in_the_log(post: Any, ingress: Any) -> None:
    labels = {"metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k"}
    asked = openai_request.parse_completion({"prompt": "abc", **labels}).requests[0]
    assert asked.labels == labels
    assert (await post(PATHS["completion"], {**PLAIN["completion"], **labels})).status == 200


async def test_the_best_of_several_chats(post: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "best_of": 3, "n": 2}
    for more in ({}, {"logprobs": True}):
        call = openai_request.parse_chat({**body, **more}, lambda _: None, UnknownFieldPolicy())
        assert (call.keep, call.requests[0].sampling["n"], call.requests[0].sampling["logprobs"]) == (2, 3, 0)
        assert call.logprobs is bool(more)
        choices = (await post(PATHS["chat"], {**body, **more})).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
    assert (await post(PATHS["chat"], {**body, "best_of": 2, "stream": True})).status == 200
    assert refused(await post(PATHS["chat"], {**body, "stream": True}))["param"] == "best_of"
    assert refused(await post(PATHS["chat"], {**body, "best_of": 1}))["param"] == "best_of"


@pytest.fixture
def seen(ingress: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that are admitted, in order."""
    found: list[Any] = []
    admit = ingress.admitter.admit
    monkeypatch.setattr(ingress.admitter, "admit", lambda ask, caller: found.append(ask) or admit(ask, caller))
    return found


async def test_false_as_do_sample_is_greedy(post: Any, seen: list[Any]) -> None:
    """In TGI and transformers it is so beside the default temperature, 1; beside another the two differ."""
    for route, plain in (("completion", {"prompt": "abc"}), ("chat", {"messages": HELLO})):
        for more, expected in (
            ({"do_sample": False}, 0),
            ({"do_sample": False, "temperature": 0, "top_p": 0.9}, 0),
            ({"parameters": {"do_sample": False, "temperature": 1.0}}, 0),
            ({"do_sample": True}, None),
            ({"do_sample": True, "temperature": 0.5}, 0.5),
            ({"do_sample": None, "temperature": 1}, 1),
        ):
            assert (await post(PATHS[route], {**plain, "max_tokens": 2, **more})).status == 200
            assert seen[-1].sampling.get("temperature") == expected
        for more, param in (
            ({"do_sample": False, "temperature": 0.5}, "do_sample"),
            ({"do_sample": 0}, "do_sample"),
            ({"do_sample": False, "temperature": True}, "temperature"),
            ({"do_sample": False, "temperature": "1"}, "temperature"),
        ):
            assert refused(await post(PATHS[route], {**plain, **more}))["param"] == param


async def test_minus_one_as_max_tokens_is_no_bound(post: Any, seen: list[Any]) -> None:
    """Samples for llama.cpp's server and LM Studio send it."""
    both = {"completion": ({"prompt": "abc"}, ("max_tokens", "max_new_tokens", "max_completion_tokens")),
            "chat": ({"messages": HELLO}, ("max_tokens", "max_completion_tokens", "max_output_tokens"))}  # fmt: skip
    for route, (plain, names) in both.items():
        for name in names:
            assert (await post(PATHS[route], {**plain, name: -1})).status == 200
            assert "max_tokens" not in seen[-1].sampling
            assert seen[-1].default_max_tokens is None
            assert refused(await post(PATHS[route], {**plain, name: -2}))["param"] == name
        for bound in ({"n_predict": 3}, {"max_completion_tokens": 3}, {"options": {"num_predict": 3}}):
            assert (await post(PATHS[route], {**plain, "max_tokens": -1, **bound})).status == 200
            assert seen[-1].sampling["max_tokens"] == 3
    assert (await post(PATHS["chat"], {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": -1})).status == 200
    assert seen[-1].sampling["max_tokens"] == 3


async def test_true_or_false_as_structured_outputs_changes_nothing(post: Any, seen: list[Any]) -> None:
    """OpenRouter's clients send it: whether response_format is kept to, as it is."""
    form = {"response_format": {"type": "json_object"}}
    for route in ("completion", "chat"):
        for wanted in (True, False):
            for more in ({}, form, {"response_format": {"type": "text"}}):
                body = {**PLAIN[route], "structured_outputs": wanted, **more}
                assert (await post(PATHS[route], body)).status == 200
                assert ("grammar" in seen[-1].sampling) is (more is form)
        for wrong in (1, "true"):
            error = refused(await post(PATHS[route], {**PLAIN[route], "structured_outputs": wrong}))
            assert error["param"] == "structured_outputs"
        beside = {"structured_outputs": {"regex": "a"}, **form}
        assert refused(await post(PATHS[route], {**PLAIN[route], **beside}))["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("name", "wrong", "routes"),
    [
        ("truncate", True, ("completion", "chat")),
        ("truncate", 2**24, ("completion", "chat")),
        ("max_new_tokens", 0, ("completion", "chat")),
        ("n_predict", "many", ("completion", "chat")),
        ("stop_sequences", [7], ("completion", "chat")),
        ("sampling_seed", 2**64, ("completion", "chat")),
        ("num_return_sequences", 1000, ("completion", "chat")),
        ("no_stop_trim", 1, ("completion", "chat")),
        ("end_id", 2**30, ("completion", "chat")),
        ("min_length", -1, ("completion", "chat")),
        ("rid", 7, ("completion", "chat", "embedding")),
        ("n_probs", 1000, ("completion",)),
        ("return_full_text", 1, ("completion",)),
        ("return_log_probs", "x", ("chat",)),
    ],
)
async def test_an_error_has_the_name_that_was_sent(name: str, wrong: Any, routes: tuple[str, ...], post: Any) -> None:
    for route in routes:
        plain = {key: value for key, value in PLAIN[route].items() if key not in ("max_tokens", "seed")}
        for body in ({name: wrong}, {"options": {name: wrong}}) if route != "embedding" else ({name: wrong},):
            error = refused(await post(PATHS[route], {**plain, **body}))
            assert (error["param"], error["message"].startswith(name)) == (name, True), error


async def test_an_error_of_what_was_sent_under_two_names_has_motleys(post: Any) -> None:
    error = refused(await post(PATHS["completion"], {"prompt": "a", "max_tokens": 0, "max_new_tokens": 0}))
    assert error["param"] == "max_tokens"


async def test_an_evaluations_stop_strings_are_all_taken(post: Any, seen: list[Any]) -> None:
    """lm_eval sends a task's own and the end of sequence, six for HumanEval."""
    stops = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "<|endoftext|>"]
    for route, plain in PLAIN.items():
        if route in ("completion", "chat"):
            assert (await post(PATHS[route], {**plain, "stop": stops})).status == 200
            assert seen[-1].sampling["stop"] == stops
            many = [f"{i:02}" for i in range(MAX_STOP_STRINGS)]
            assert (await post(PATHS[route], {**plain, "stop": many})).status == 200
            for wrong, said in (
                ([*many, "x"], f"at most {MAX_STOP_STRINGS} strings"),
                (["x" * 1000] * 5, f"at most {MAX_ALL_STOP_CHARS} characters in all strings, which have 5000"),
            ):
                error = refused(await post(PATHS[route], {**plain, "stop": wrong}))
                assert (error["param"], said in error["message"]) == ("stop", True)
