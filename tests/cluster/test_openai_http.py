"""OpenAI's HTTP on the whole ingress, in one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


async def test_completion_with_usage(post: Any) -> None:
    reply = await post(COMPLETIONS, {"model": "echo", "prompt": "abc", "max_tokens": 5})
    assert reply.status == 200
    answer = reply.json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_completions_default_to_openais_16_tokens_and_chat_to_the_rest_of_the_context(post: Any) -> None:
    completion = (await post(COMPLETIONS, {"prompt": "abc"})).json()
    chat = (await post(CHAT, {"messages": HELLO})).json()
    assert completion["usage"]["completion_tokens"] == 16
    assert chat["usage"]["total_tokens"] == 512


async def test_min_tokens_does_not_raise_the_default_of_completions(post: Any) -> None:
    error = (await post(COMPLETIONS, {"prompt": "abc", "min_tokens": 17})).json()["error"]
    assert error["param"] == "min_tokens"
    assert "at most 16: the default of max_tokens" in error["message"]
    for fields in ({"min_tokens": 16}, {"min_tokens": 20, "max_tokens": 20}):
        used = (await post(COMPLETIONS, {"prompt": "abc", **fields})).json()["usage"]
        assert used["completion_tokens"] == fields["min_tokens"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        ([65, 66], ["AB"]),
        (["ab", "xy"], ["ab", "xy"]),
        ([[65, 66], [67]], ["AB", "CC"]),
    ],
)
async def test_all_forms_of_prompt(post: Any, prompt: Any, texts: list[str], ingress: Any) -> None:
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        # In this vocabulary an id is not a code point: ask for ids by their text.
        ids = [ingress.admitter.tokenizer.encode(text) for text in ["AB", "C"]]
        prompt = ids[0] if isinstance(prompt[0], int) else ids
    answer = (await post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(post: Any) -> None:
    body = {"prompt": ["ab", "xy"], "n": 2, "max_tokens": 2}
    whole = (await post(COMPLETIONS, body)).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "ab"), (1, "ab"), (2, "xy"), (3, "xy")]
    streamed = await post(COMPLETIONS, {**body, "stream": True})
    assert texts(streamed.events()) == {0: "ab", 1: "ab", 2: "xy", 3: "xy"}


async def test_as_many_choices_as_are_wanted_may_be_made(post: Any) -> None:
    for n in (1, 2):
        reply = await post("/v1/completions", {"prompt": "a", "n": n, "best_of": n, "max_tokens": 1})
        assert (reply.status, len(reply.json()["choices"])) == (200, n)


async def test_stream_ends_with_usage_and_done(post: Any) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    reply = await post(COMPLETIONS, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = reply.events()
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    assert texts(chunks) == {0: "abca"}
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert {c["choices"][0]["finish_reason"] for c in chunks[:-1]} == {None}


async def test_stream_without_options_has_no_usage(post: Any) -> None:
    *chunks, done = (await post(COMPLETIONS, {"prompt": "abc", "max_tokens": 2, "stream": True})).events()
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


async def test_chat_streams_the_role_first(post: Any) -> None:
    reply = await post(CHAT, {"messages": HELLO, "max_tokens": 6, "stream": True})
    first, *rest, done = reply.events()
    assert first["object"] == "chat.completion.chunk"
    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    whole = (await post(CHAT, {"messages": HELLO, "max_tokens": 6})).json()
    assert (
        "".join(c["choices"][0]["delta"].get("content", "") for c in rest) == whole["choices"][0]["message"]["content"]
    )


async def test_echo_repeats_the_prompt(post: Any) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True}
    assert (await post(COMPLETIONS, body)).json()["choices"][0]["text"] == "abcab"
    assert texts((await post(COMPLETIONS, {**body, "stream": True})).events()) == {0: "abcab"}


async def test_models(call: Any) -> None:
    models = (await call("GET", "/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["echo"]
    assert (await call("GET", "/v1/models/echo")).json() == models["data"][0]
    missing = await call("GET", "/v1/models/org/other")
    assert missing.status == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize_are_inverse(post: Any) -> None:
    tokens = (await post("/tokenize", {"prompt": "Grüße, 世界"})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len("Grüße, 世界".encode())
    assert (await post("/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "Grüße, 世界"}


async def test_tokenize_of_messages_is_what_chat_counts(post: Any) -> None:
    tokens = (await post("/tokenize", {"messages": HELLO})).json()
    chat = (await post(CHAT, {"messages": HELLO, "max_tokens": 1})).json()
    assert tokens["count"] == chat["usage"]["prompt_tokens"]


async def test_health_reports_the_load(call: Any) -> None:
    health = (await call("GET", "/health")).json()
    assert health["status"] == "ok"
    assert health["load"]["kv_blocks_free"] == health["load"]["kv_blocks_total"] == 100


async def test_nothing_but_json_leaves_the_service(post: Any) -> None:
    reply = await post(COMPLETIONS, {"prompt": "\u2028 \x00 é", "max_tokens": 3})
    assert json.loads(reply.body)["usage"]["prompt_tokens"] == len("\u2028 \x00 é".encode())


def texts(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found
