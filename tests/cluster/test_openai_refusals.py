"""Refusals of OpenAI's HTTP: always in the same form, always naming the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_requests import (
    BAD_BODIES,
    BAD_JSON_FIELDS,
    BAD_MESSAGES,
    BAD_PROMPTS,
    BAD_SAMPLING,
    NO_ROOM,
    UNSUPPORTED_OR_UNKNOWN,
    label,
    refused,
)

from motley.cluster.api.openai.openai_protocol import OpenAIProtocol

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING + NO_ROOM + BAD_JSON_FIELDS, ids=label)
async def test_bad_fields_are_named(post: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(await post(COMPLETIONS, {"prompt": "abc", **fields}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_value", "unknown_parameter")


@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING, ids=label)
async def test_chat_names_them_in_its_own_words(post: Any, fields: dict[str, Any], param: str) -> None:
    if "logprobs" in fields:
        fields, param = {"logprobs": True, "top_logprobs": fields["logprobs"]}, "top_logprobs"
    if "max_tokens" in fields and "min_tokens" not in fields:
        fields, param = {"max_completion_tokens": fields["max_tokens"]}, "max_completion_tokens"
    error = refused(await post(CHAT, {"messages": HELLO, **fields}))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=label)
async def test_bad_prompts(post: Any, prompt: Any) -> None:
    assert refused(await post(COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


@pytest.mark.parametrize("body", [{}, {"prompt": None}])
async def test_missing_prompt(post: Any, body: Any) -> None:
    error = refused(await post(COMPLETIONS, body or {"model": "echo"}))
    assert (error["param"], error["code"]) == ("prompt", "missing_field")


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=label)
async def test_bad_messages(post: Any, messages: Any) -> None:
    assert refused(await post(CHAT, {"messages": messages}))["param"].startswith("messages")


@pytest.mark.parametrize(("fields", "param", "code"), UNSUPPORTED_OR_UNKNOWN, ids=label)
async def test_what_is_not_supported_is_never_ignored(post: Any, fields: Any, param: str, code: str) -> None:
    error = refused(await post(COMPLETIONS, {"prompt": "abc", **fields}))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "fields",
    [{"tools": {}}, {"tool_choice": "required"}, {"functions": [{}]}, {"prompt": "abc"}],
    ids=label,
)
async def test_chat_refuses_what_it_cannot_do(post: Any, fields: dict[str, Any]) -> None:
    assert refused(await post(CHAT, {"messages": HELLO, **fields}))["param"] == next(iter(fields))


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"output_ids": [[1]]}], ids=label)
async def test_what_only_grpc_answers_is_sent_there(post: Any, fields: dict[str, Any]) -> None:
    [name] = fields
    for path, body in ((COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1}), (CHAT, {"messages": HELLO})):
        error = refused(await post(path, {**body, **fields}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "gRPC" in error["message"]
        assert (await post(path, {**body, name: None, "max_tokens": 1})).status == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "a", "messages": HELLO}, "prompt", "invalid_value"),
        ({"prompt": "", "messages": []}, "prompt", "missing_field"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ({"messages": HELLO, "add_special_tokens": False}, "add_special_tokens", "invalid_value"),
        ({"prompt": "a", "chat_template_kwargs": {"a": True}}, "chat_template_kwargs", "invalid_value"),
        ({"prompt": None, "messages": None}, "prompt", "missing_field"),
        ({"messages": []}, "prompt", "missing_field"),
    ],
    ids=label,
)
async def test_tokenize_ignores_nothing(post: Any, body: dict[str, Any], param: str, code: str) -> None:
    error = refused(await post("/tokenize", body))
    assert (error["param"], error["code"]) == (param, code)


async def test_tokenize_takes_null_as_absent(post: Any) -> None:
    prompt, chat = {"prompt": "abc"}, {"messages": HELLO}
    for body, nulls in ((prompt, ("messages", "chat_template_kwargs")), (chat, ("prompt", "add_special_tokens"))):
        reply = await post("/tokenize", {**body, **dict.fromkeys(nulls)})
        assert reply.status == 200
        assert reply.json() == (await post("/tokenize", body)).json()


async def test_fields_of_a_message_that_are_not_supported(post: Any) -> None:
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert (await post(CHAT, {"messages": [message], "max_tokens": 1})).status == 200  # as clients send them back
    error = refused(await post(CHAT, {"messages": [{**message, "audio": {"id": "x"}}]}))
    assert (error["param"], error["code"]) == ("messages[0].audio", "unsupported_parameter")


@pytest.mark.parametrize("body", BAD_BODIES, ids=label)
async def test_bodies_that_are_not_json(post: Any, body: bytes) -> None:
    assert refused(await post(COMPLETIONS, body))["code"] == "invalid_json"


async def test_context_boundary(post: Any) -> None:
    for length, status in ((511, 200), (512, 400), (513, 400), (5000, 400)):
        reply = await post(COMPLETIONS, {"prompt": "x" * length, "max_tokens": 1})
        assert reply.status == status, length
        if status == 400:
            error = reply.json()["error"]
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


async def test_chat_longer_than_the_context_names_messages(post: Any) -> None:
    for length in (500, 10**6):
        error = refused(await post(CHAT, {"messages": [{"role": "user", "content": "x" * length}]}))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_max_tokens_beyond_the_context_ends_with_it(post: Any) -> None:
    answer = (await post(COMPLETIONS, {"prompt": "abc", "max_tokens": 10_000})).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_special_tokens_and_nul_in_content_are_text(post: Any, ingress: Any) -> None:
    plain = (await post("/tokenize", {"messages": [{"role": "user", "content": ""}]})).json()["count"]
    content = "<|im_end|>\x00"
    ids = (await post("/tokenize", {"messages": [{"role": "user", "content": content}]})).json()
    assert ids["count"] == plain + len(content)


async def test_unknown_model(post: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        error = refused(await post(path, {**body, "model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_too_many_choices_altogether(post: Any) -> None:
    assert refused(await post(COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}))["param"] == "n"


async def test_deadline_already_over_never_runs(post: Any) -> None:
    error = refused(await post(COMPLETIONS, {"prompt": "a", "timeout_s": 0}), 504)
    assert error["type"] == "timeout_error"


async def test_paths_and_methods(call: Any) -> None:
    assert refused(await call("POST", "/v1/nothing", {"input": "a"}), 404)["code"] == "not_found"
    reply = await call("GET", COMPLETIONS)
    assert refused(reply, 405)["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": None},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data"},
        {"content-encoding": "gzip"},
    ],
    ids=label,
)
async def test_other_media(post: Any, headers: dict[str, str]) -> None:
    assert refused(await post(COMPLETIONS, {"prompt": "a"}, headers=headers), 415)["code"] == "unsupported_media"


@pytest.mark.parametrize("charset", ["charset=utf-8", 'Charset="UTF-8"', "charset=us-ascii", "v=1", ""])
async def test_charset_is_no_other_medium(post: Any, charset: str) -> None:
    headers = {"content-type": f"Application/JSON; {charset}"}
    assert (await post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers)).status == 200


@pytest.mark.parametrize("charset", ["utf-16", "latin-1", '"ISO-8859-1"'])
async def test_another_charset_is_named(post: Any, charset: str) -> None:
    headers = {"content-type": f"application/json; v=1; charset={charset}"}
    error = refused(await post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers), 415)
    assert (error["param"], error["code"]) == ("Content-Type", "unsupported_media")
    assert charset.strip('"') in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "query", "param"),
    [
        ("POST", COMPLETIONS, b"max_tokens=1", "max_tokens"),
        ("POST", COMPLETIONS, b"api-version=2024-10-21&a%20b", "a b"),
        ("GET", "/v1/models", b"limit=1", "limit"),
        ("GET", "/v1/models", b"%ff=1", "\ufffd"),
    ],
)
async def test_a_query_is_not_ignored(call: Any, method: str, path: str, query: bytes, param: str) -> None:
    given = {"prompt": "a", "max_tokens": 1} if method == "POST" else b""
    error = refused(await call(method, path, given, query=query))
    assert (error["param"], error["code"]) == (param, "unknown_parameter")


async def test_azures_version_and_what_probes_add_are_no_fault(call: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert (await call("POST", COMPLETIONS, body, query=b"api-version=2024-10-21")).status == 200
    assert (await call("GET", "/health", query=b"now=1")).status == 200
    error = refused(await call("GET", COMPLETIONS.replace("completions", "files"), query=b"limit=1"), 404)
    assert error["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"prompt": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
    ids=["digits", "depth", "bytes"],
)
async def test_why_it_is_no_json(post: Any, body: bytes, why: str) -> None:
    error = refused(await post(COMPLETIONS, body))
    assert (error["code"], why in error["message"]) == ("invalid_json", True)


async def test_large_bodies_are_refused_unread(post: Any) -> None:
    class Untouched:
        def __iter__(self) -> Any:
            return iter([b""])

    declared = await post(COMPLETIONS, Untouched(), headers={"content-length": str(100 * 2**20)})
    assert refused(declared, 413)["code"] == "body_too_large"
    chunked = await post(COMPLETIONS, [b" " * 2**20] * 9)  # nothing declared: counted as it comes
    assert refused(chunked, 413)["code"] == "body_too_large"
    lying = await post(COMPLETIONS, [b" " * 2**20] * 9, headers={"content-length": "10"})
    assert refused(lying, 413)["code"] == "body_too_large"


async def test_refusals_leave_no_request_behind(post: Any, call: Any) -> None:
    await post(COMPLETIONS, {"prompt": "abc", "n": 0})
    assert (await call("GET", "/health")).json()["load"]["running"] == 0


async def test_a_bug_tells_nothing_of_itself(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(OpenAIProtocol, "completions", broken)
    # The framework answers, then raises again, for the server's log.
    reply = await post(COMPLETIONS, {"prompt": "a"}, raises=ZeroDivisionError)
    assert "secret" not in json.dumps(refused(reply, 500))


@pytest.mark.parametrize("timeout_s", [0, -1])
async def test_a_time_that_is_over_has_a_code(post: Any, timeout_s: int) -> None:
    error = refused(await post(COMPLETIONS, {"prompt": "a", "timeout_s": timeout_s}), 504)
    assert (error["param"], error["code"]) == ("timeout_s", "deadline_exceeded")


async def test_paths_and_methods_come_before_the_kind_of_body(call: Any) -> None:
    form = {"content-type": "multipart/form-data; boundary=x"}
    statuses = []
    for method, path in (("PUT", COMPLETIONS), ("POST", COMPLETIONS + "/x"), ("POST", "/v1/audio/transcriptions")):
        answer = await call(method, path, b"--x--", headers=form)
        statuses.append((answer.status, answer.json()["error"]["code"]))
    assert statuses[0] == (405, "method_not_allowed")
    assert statuses[1] == (404, "not_found")
    assert statuses[2][1] == "unsupported_endpoint"
