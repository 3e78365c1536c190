"""Every answer is what the document says of it, to the last field: no more and, all of them together, no less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_conformance import check_answer, operation_of, parts_of, schema_of
from scripted_model import Scripted

from motley.replicas.errors import EngineFault

COMPLETIONS, CHAT = ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")
INFER = ("POST", "/v2/models/{name}/infer")
ASK: dict[str, Any] = {"prompt": "ab", "max_tokens": 100, "logprobs": 1, "stop_token_ids": [258]}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "logprobs": True, "top_logprobs": 1}
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
TENSORS = {"inputs": [TENSOR], "parameters": {"logprobs": 1}, "outputs": [{"name": "text_output"}, {"name": "top_ids"}]}
THINKS_AND_CALLS = '<think>\nHm.\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'

# operation, its path or what is sent, the status
CASES: list[tuple[tuple[str, str], Any, int]] = [
    (COMPLETIONS, ASK, 200),
    (COMPLETIONS, ASK | STREAM, 200),
    (COMPLETIONS, ASK | {"stream": True}, 200),
    (COMPLETIONS, ASK | {"echo": True, "return_token_ids": True}, 200),
    (COMPLETIONS, ASK | STREAM | {"return_token_ids": True}, 200),
    (COMPLETIONS, {"prompt": 7}, 400),
    (COMPLETIONS, {"prompt": "a", "model": "x"}, 404),
    (CHAT, SAY, 200),
    (CHAT, SAY | TOOLS | {"return_token_ids": True}, 200),
    (CHAT, SAY | STREAM, 200),
    (CHAT, SAY | TOOLS | STREAM | {"return_token_ids": True}, 200),
    (CHAT, {"messages": []}, 400),
    (("POST", "/v1/embeddings"), {"input": "a"}, 200),
    (("POST", "/v1/embeddings"), {"input": "a", "encoding_format": "base64"}, 200),
    (("GET", "/v1/models"), "/v1/models", 200),
    (("GET", "/v1/models/{name}"), "/v1/models/echo", 200),
    (("GET", "/v1/models/{name}"), "/v1/models/x", 404),
    (("POST", "/tokenize"), {"prompt": "a"}, 200),
    (("POST", "/detokenize"), {"tokens": [1]}, 200),
    (("GET", "/tokenizer_info"), "/tokenizer_info", 200),
    (("GET", "/health"), "/health", 200),
    (("GET", "/v2"), "/v2", 200),
    (("GET", "/v2/health/live"), "/v2/health/live", 200),
    (("GET", "/v2/health/ready"), "/v2/health/ready", 200),
    (("GET", "/v2/models/{name}"), "/v2/models/echo", 200),
    (("GET", "/v2/models/{name}/ready"), "/v2/models/echo/ready", 200),
    (("GET", "/v2/models/{name}/config"), "/v2/models/echo/config", 200),
    (("GET", "/v2/models/{name}/config"), "/v2/models/x/config", 404),
    (("GET", "/v2/models/{name}"), "/v2/models/x", 404),
    (INFER, TENSORS, 200),
    (INFER, {"inputs": []}, 400),
]


# Of answers with tensors behind their JSON, which are no JSON as a whole: test_kserve_clients.py has them.
BINARY = ["outputs[].parameters", "outputs[].parameters.binary_data_size"]


@pytest.fixture(scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    """It thinks, and then says something and calls a tool."""
    model = Scripted(tmp_path_factory.mktemp("qwen3"), "qwen3")
    await model(THINKS_AND_CALLS, logprobs=True, stop_reason=258)
    return model


async def send(model: Scripted, operation: tuple[str, str], what: Any) -> Any:
    method, path = operation
    if method == "GET":
        return await model.call(method, what)
    return await model.call(method, path.replace("{name}", "echo"), what)


@pytest.mark.parametrize(("operation", "what", "status"), CASES, ids=lambda value: str(value)[:40])
async def test_no_more_than_is_described(operation: tuple[str, str], what: Any, status: int, model: Scripted) -> None:
    reply = await send(model, operation, what)
    assert reply.status == status, reply.body
    check_answer(operation_of(*operation), reply)


@pytest.mark.parametrize(("operation", "body"), [(COMPLETIONS, ASK), (CHAT, SAY)])
async def test_an_error_within_a_stream(operation: tuple[str, str], body: Any, model: Scripted) -> None:
    model.worker._error, whole = EngineFault("it broke"), model.worker._messages
    model.worker._messages = whole[:2]
    try:
        reply = await model.call(*operation, body | STREAM)
    finally:
        model.worker._error, model.worker._messages = None, whole
    assert parts_of(reply)[-1]["error"]["code"] == "engine_fault"
    check_answer(operation_of(*operation), reply)


async def test_no_less_than_is_described(model: Scripted) -> None:
    """Each field of a good answer that the document has is in one of the answers above."""
    told: dict[str, set[str]] = {}
    seen: dict[str, set[str]] = {}
    for operation, what, status in CASES:
        if status != 200:
            continue
        reply = await send(model, operation, what)
        name = f"{operation} {reply.headers['content-type']}"
        told.setdefault(name, set()).update(described(schema_of(operation_of(*operation), reply)))
        for part in parts_of(reply):
            seen.setdefault(name, set()).update(given(part))
    missing = {name: sorted(paths - seen[name]) for name, paths in told.items() if paths - seen[name]}
    assert list(missing.values()) == [ERRORS, ERRORS, BINARY], missing
    assert len(told) > 15


ERRORS = ["error", "error.code", "error.message", "error.param", "error.type"]  # of a stream: tested by itself


def described(schema: Any, at: str = "") -> Iterator[str]:
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key, ()):
            yield from described(one, at)
    for name, field in schema.get("properties", {}).items():
        yield f"{at}{name}"
        yield from described(field, f"{at}{name}.")
    if "items" in schema:
        yield from described(schema["items"], re.sub(r"\.$", "[].", at))


def given(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{at}{name}"
            yield from given(inner, f"{at}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from given(inner, re.sub(r"\.$", "[].", at))
