"""Each field of each body with each empty value: what is as good as leaving it out is taken, the rest refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import ShortEchoWorker
from local_ingress import make_ingress
from tool_templates import write_tool_tokenizer

from motley.cluster.api.common.fields.body_shapes import BodyShape, open_schema
from motley.cluster.api.common.fields.empty_values import (
    ALSO_NONE,
    EMPTY,
    MEANS_SOMETHING,
    accepts_value,
    values_meaning_none,
)
from motley.cluster.api.openai.openai_request_schemas import BODY_SCHEMAS, BODY_SHAPES
from motley.cluster.service.deployment.ingress_config import IngressConfig

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "compatibility.md"
USER = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPOKEN = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "x"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions", "embedding": "/v1/embeddings"}
PATHS |= {"tokenize": "/tokenize", "detokenize": "/detokenize"}
# Between them they have an object of each kind; each is taken as it is.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("completion", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    ("completion", {"prompt": "a", "structured_outputs": {"regex": "a"}}),
    ("chat", {"messages": SPOKEN}),
    ("chat", {"messages": USER, "response_format": {"type": "json_object"}}),
    (
        "chat",
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    ),
    ("chat", {"messages": USER, "tools": [TOOL], "tool_choice": NAMED}),
    ("chat", {"messages": USER, "tools": [TOOL], "tool_choice": SOME}),
    ("chat", {"messages": USER, "reasoning": {"enabled": True}}),
    ("chat", {"messages": USER, "thinking": {"type": "enabled"}}),
    ("embedding", {"input": "a"}),
    ("tokenize", {"messages": USER}),
    ("tokenize", {"prompt": "a"}),
    ("detokenize", {"tokens": [65]}),
]
# Without these the rest of such a body makes no sense.
NEEDED = {
    ("chat", "tools"): "tool_choice",
    ("chat", "messages[].tool_calls"): "messages[2]",
    ("chat", "response_format"): "",
    ("completion", "structured_outputs.regex"): "structured_outputs",
    ("tokenize", "messages"): "prompt",
    ("tokenize", "prompt"): "prompt",
}


@pytest.fixture(scope="module")
async def post(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")
    ingress = await make_ingress(
        folder, ShortEchoWorker(str(folder)), ingress_config=IngressConfig(unknown_fields="refuse")
    )
    return partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")


def objects(value: Any, shape: BodyShape, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], BodyShape]]:
    """Where the body has an object of fields that are known."""
    if isinstance(value, list) and shape.items is not None:
        for index, item in enumerate(value):
            yield from objects(item, shape.items, (*at, index))
    elif isinstance(value, dict):
        yield at, shape
        for name, inner in shape.inner.items():
            if name in value:
                yield from objects(value[name], inner, (*at, name))


def changed(body: dict[str, Any], at: tuple[Any, ...], name: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(body)
    inner: Any = found
    for key in at:
        inner = inner[key]
    inner[name] = value
    return found


def path_of(shape: BodyShape, name: str) -> str:
    return f"{shape.path}.{name}" if shape.path else name


@pytest.mark.slow("Every field of every body is sent with its empty values")
async def test_what_is_as_good_as_nothing_is_taken_wherever_it_stands(post: Any) -> None:
    met = []
    for route, body in WHOLE:
        assert (await post(PATHS[route], body)).status == 200, body
        for at, shape in objects(body, BODY_SHAPES[route]):
            for name, values in shape.empty.items():
                for value in (None, *values) if values else ():
                    reply = await post(PATHS[route], changed(body, at, name, value))
                    met.append((route, path_of(shape, name), value))
                    if reply.status != 200:
                        needed = NEEDED[route, path_of(shape, name)]
                        assert needed in reply.json()["error"]["param"], (path_of(shape, name), value)
    assert len(met) > 200
    for path, value in (("response_format", {}), ("bad_words", ""), ("messages[].name", ""), ("reasoning_effort", ""),
                        ("messages[].tool_calls[].function.arguments", None), ("tool_choice", "")):  # fmt: skip
        assert ("chat", path, value) in met


async def test_empty_values_that_mean_something_are_left_to_the_reader(post: Any) -> None:
    for path, values in MEANS_SOMETHING.items():
        for value in values:
            if path == "tools[].function.parameters":
                body = changed(WHOLE[5][1], ("tools", 0, "function"), "parameters", value)
                assert (await post(PATHS["chat"], body)).status == 200
            else:
                reply = await post(PATHS["chat"], {"messages": USER, path: value})
                assert (reply.status, reply.json()["error"]["param"]) == (400, path)


async def test_calls_without_arguments_are_shown_to_the_template_as_calls_with_none(post: Any) -> None:
    def body(function: dict[str, Any]) -> dict[str, Any]:
        calls = [{**CALL, "function": {"name": "f", **function}}]
        return {"messages": [SPOKEN[0], {"role": "assistant", "content": "x", "tool_calls": calls}, SPOKEN[2]]}

    found = [
        (await post(PATHS["tokenize"], body(function))).json()["tokens"]
        for function in ({"arguments": "{}"}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}, {})
    ]
    assert all(one == found[0] for one in found)


def test_the_empty_value_of_a_fields_own_kind_is_none_unless_it_must_be_there() -> None:
    text, number, refused = {"type": "string"}, {"type": "integer"}, {"type": "null"}
    assert values_meaning_none("a", [text]) == ("",)
    assert values_meaning_none("a", [text, {"type": "array", "items": text}, refused]) == ("", [])
    assert values_meaning_none("a", [{"anyOf": [{"enum": ["x", None]}, {"type": "object"}]}]) == ("", {})
    assert values_meaning_none("a", [number]) == values_meaning_none("a", []) == ()
    assert values_meaning_none("a", [refused]) == EMPTY
    assert values_meaning_none("stop", [text, {"type": "array", "items": text}]) == ([],)
    for path, values in ALSO_NONE.items():
        assert values_meaning_none(path, []) == tuple(value for value in EMPTY if value in values)


@pytest.mark.parametrize("route", BODY_SCHEMAS)
def test_the_document_of_the_interface_has_each_of_them(route: str) -> None:
    def check(schema: dict[str, Any], shape: BodyShape) -> None:
        for one in schema.get("anyOf", [schema]):
            if "items" in one and shape.items is not None:
                check(one["items"], shape.items)
            for name in shape.supported & one.get("properties", {}).keys() - set(one.get("required", ())):
                assert all(accepts_value(one["properties"][name], value) for value in shape.empty[name]), path_of(
                    shape, name
                )
                if name in shape.inner:
                    check(one["properties"][name], shape.inner[name])

    check(open_schema(BODY_SCHEMAS[route], route), BODY_SHAPES[route])


def test_the_page_for_users_names_what_differs_from_the_rule() -> None:
    text = DOCS.read_text()
    for path, values in MEANS_SOMETHING.items():
        for value in values:
            assert f"`{path.rpartition('.')[2]}: {json.dumps(value)}`" in text
