"""Requests that must be refused, with the field to be named. One table for both protocols and both test levels."""

from __future__ import annotations

from typing import Any

from motley.replicas.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS


def label(value: Any) -> str:
    """A short test id."""
    return repr(value)[:40]


def refused(reply: Any, status: int = 400) -> dict[str, Any]:
    """The error of a JSON reply, which must be in OpenAI's form."""
    assert reply.status == status, reply.body[:300]
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    return dict(error["error"])


# fields of a completion -> the field named in the refusal. VOCABULARY ids exist: 0 to 258.
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10**9}, "n"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": float("-inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),  # -1 asks for no bound
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 10**6}, "min_tokens"),
    ({"logit_bias": {259: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, "stop"),
    ({"stop": ["x" * MAX_STOP_CHARS] * 5}, "stop"),
    ({"stop": ["x" * 2**20]}, "stop"),
    ({"stop_token_ids": [259]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
]

# The whole context of the worker that echoes, and there is a prompt.
NO_ROOM: list[tuple[dict[str, Any], str]] = [({"min_tokens": 512}, "min_tokens")]

# Only JSON can say these.
BAD_JSON_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_k": 0.01}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": [None]}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop_token_ids": [None]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": 2**63}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"timeout_s": "soon"}, "timeout_s"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"allowed_token_ids": [2**20]}, "allowed_token_ids"),
    ({"allowed_token_ids": [65], "regex": "a"}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2**24}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"request_id": 7}, "request_id"),
    ({"echo": 1}, "echo"),
    ({"user": 7}, "user"),
    ({"model": 7}, "model"),
]

BAD_PROMPTS: list[Any] = [
    "",
    [],
    [[]],
    [""],
    [259],
    [-1],
    [2**63],
    [True],
    [1.0],
    [None],
    ["a", 1],
    ["a", [1]],
    {"text": "a"},
    7,
    "\ud800",
]

UNSUPPORTED_OR_UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
    ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"best_of": 200}, "best_of", "invalid_value"),
    ({"best_of": 1.5}, "best_of", "invalid_value"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
    ({"output_ids": [[1]]}, "output_ids", "unsupported_parameter"),
    ({"messages": [{}]}, "messages", "unsupported_parameter"),
    ({"top_n_tokens": 3}, "top_n_tokens", "unsupported_parameter"),
    ({"cache_salt": "mine"}, "cache_salt", "unknown_parameter"),
    ({"block_hashes": ["00"]}, "block_hashes", "unknown_parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unknown_parameter"),
]

BAD_MESSAGES: list[Any] = [
    [],
    {},
    "hello",
    [7],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "oracle", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
]

BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"[" * 50_000 + b"]" * 50_000,
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a", "prompt": "b"}',
    b"{'prompt': 'a'}",
]
