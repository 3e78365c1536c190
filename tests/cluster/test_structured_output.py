"""response_format, structured_outputs and the grammars of gRPC: a real engine behind every protocol's own words."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any, Literal

import asgi
import grpc
import openai
import pytest
import service_checkpoint
import uvicorn
from grammar_engine import check_json
from local_ingress import make_ingress
from openai.lib._parsing import type_to_response_format_param
from pydantic import BaseModel, Field

from motley.cluster.api.common.fields import dropped_keywords_log
from motley.cluster.api.common.fields.output_formats import read_output_format
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport.grpc_server import servicers
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarKind
from motley.replicas.grammar.schema.schema_check import check_schema

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
HELLO = [{"role": "user", "content": "Hello"}]


class Step(BaseModel):
    title: str = Field(max_length=6)
    minutes: int = Field(ge=0, le=90)
    kind: Literal["boil", "bake"]
    note: str | None = Field(max_length=4)


class Recipe(BaseModel):
    steps: list[Step] = Field(max_length=2)


@pytest.fixture(scope="module")
async def ingress(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = service_checkpoint.build(tmp_path_factory.mktemp("structured"), max_len=1024)
    worker = Worker(str(folder), EngineConfig(threads=1), name="tiny")
    yield await make_ingress(folder, worker)
    await worker.close()


@pytest.fixture(scope="module")
def post(ingress: Any) -> Callable[..., Any]:
    return partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")


@pytest.fixture(scope="module")
async def client(ingress: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """The unmodified client, over a socket."""
    server = uvicorn.Server(uvicorn.Config(ingress.__serve_build_asgi_app__(), log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        server.should_exit = True
        await serving


@pytest.fixture(scope="module")
async def stub(ingress: Any) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    servicers.add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(None)


async def test_openai_json_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=NAMED, max_tokens=400, n=3, seed=1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_json(choice.message.content, COLOUR)


async def test_openai_parse(client: openai.AsyncOpenAI) -> None:
    """The client makes the schema of a class, and an object of that class of the answer."""
    for seed in range(4):
        answer = await client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Recipe, max_tokens=900, seed=seed
        )
        recipe = answer.choices[0].message.parsed
        assert isinstance(recipe, Recipe)
        assert len(recipe.steps) <= 2


async def test_openai_stream_is_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "response_format": NAMED, "max_tokens": 400, "seed": 9}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"


async def test_openai_json_object(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=800, n=8, seed=2
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert isinstance(json.loads(choice.message.content or ""), dict)


WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "vllm regex": ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
    "vllm choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "vllm grammar": ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "b*a"),
    "vllm json": ({"structured_outputs": {"json": {"const": 12}}}, "12"),
    "vllm json text": ({"structured_outputs": {"json": '{"enum": [7]}'}}, "7"),
    "regex": ({"response_format": {"type": "regex", "regex": "x{3}"}}, "xxx"),
    "grammar": ({"response_format": {"type": "grammar", "grammar": 'root ::= "ok"'}}, "ok"),
    "text": ({"response_format": {"type": "text"}}, "(?s).*"),
    "structural tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}},
        "so",
    ),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("name", WORDS)
async def test_all_the_words(post: Callable[..., Any], path: str, name: str) -> None:
    given, pattern = WORDS[name]
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    reply = await post(path, {**prompt, **given, "max_tokens": 200, "seed": 4})
    assert reply.status == 200, reply.body
    choice = reply.json()["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"] if "chat" in path else choice["text"])


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (pb.Grammar(regex="[a-c]{5}"), "[a-c]{5}"),
        (pb.Grammar(ebnf='root ::= "x" [0-9]'), "x[0-9]"),
        (pb.Grammar(choice=pb.Choices(texts=["left", "right"])), "left|right"),
        (pb.Grammar(json_schema='{"const": true}'), "true"),
    ],
)
async def test_grpc(stub: Any, grammar: pb.Grammar, pattern: str) -> None:
    request = pb.CompleteRequest(text="x", sampling=pb.SamplingParams(grammar=grammar, max_tokens=50))
    (choice,) = (await stub.Complete(request)).choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == pb.FINISH_REASON_STOP
    chunks = [chunk async for chunk in stub.CompleteStream(request)]
    assert re.fullmatch(pattern, "".join(choice.text for chunk in chunks for choice in chunk.choices))


async def test_grpc_resumes_within_a_grammar(stub: Any) -> None:
    sampling = pb.SamplingParams(grammar=pb.Grammar(regex="[a-z]{30}"), max_tokens=50, seed=11)
    whole = (await stub.Complete(pb.CompleteRequest(text="x", sampling=sampling))).choices[0]
    begun = pb.TokenIds(ids=whole.token_ids[:12])
    rest = (await stub.Complete(pb.CompleteRequest(text="x", sampling=sampling, output_ids=[begun]))).choices[0]
    assert [*begun.ids, *rest.token_ids] == list(whole.token_ids)


def _loose(schema: dict[str, Any], **strict: bool | None) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}}


SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


def _tagged(inner: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": inner, **more}}


SCHEMA = "response_format.json_schema.schema"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no type": ({"response_format": {"name": "x"}}, "response_format.type", "invalid_value"),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    "not an object": ({"response_format": "json"}, "response_format", "invalid_value"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA, "missing_field",
    ),
    "a name with a space": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name", "invalid_value",
    ),
    "strict is no word": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict", "invalid_value",
    ),
    "no object for a schema": (
        {"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema", "invalid_value",
    ),
    "a schema of another name": ({"guided_json": {"not": {}}}, "guided_json", "invalid_grammar"),
    "two names of one": ({"guided_regex": "a", "regex": "b"}, "regex", "invalid_value"),
    "a set where the schema is to be followed strictly": (_strict(SET), SCHEMA, "invalid_grammar"),
    "a set, and what is forbidden": (_strict({"anyOf": [SET, {"not": {}}]}), SCHEMA, "invalid_grammar"),
    "a set alone": ({"guided_json": SET}, "guided_json", "invalid_grammar"),
    "if": (_strict({"if": {"type": "string"}, "then": False}), SCHEMA, "invalid_grammar"),
    "two of allOf": (_strict({"allOf": [{"type": "integer"}, {"minimum": 3}]}), SCHEMA, "invalid_grammar"),
    "overlapping oneOf": (_strict({"oneOf": [{"type": "integer"}, {"type": "number"}]}), SCHEMA, "invalid_grammar"),
    "foreign reference": (_strict({"$ref": "http://x/y"}), SCHEMA, "invalid_grammar"),
    "members of oneOf that may be one": (
        _strict({"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "required": []}]}),
        SCHEMA, "invalid_grammar",
    ),
    "bounds without a type": (_strict({"minimum": 3}), SCHEMA, "invalid_grammar"),
    "wrong type": (_strict({"type": "foo"}), SCHEMA, "invalid_grammar"),
    "bounds in the wrong order": (_strict({"type": "integer", "minimum": 4, "maximum": 3}), SCHEMA, "invalid_grammar"),
    "a pattern of no text": (_strict({"type": "string", "pattern": '^(?!")"$'}), SCHEMA, "invalid_grammar"),
    "a boundary in a pattern": (_strict({"type": "string", "pattern": r"a\b"}), SCHEMA, "invalid_grammar"),
    "more than may be sent, strict or not": (
        _loose({"type": "object", "description": "d" * 65_536}), SCHEMA, "grammar_too_complex",
    ),
    "no text, strict or not": (_loose({"type": "object", "title": "\ud800"}), SCHEMA, "invalid_grammar"),
    "a billion items": (_strict({"type": "array", "minItems": 10**9}), SCHEMA, "grammar_too_complex"),
    "a format that is no text": (_strict({"type": "string", "format": []}), SCHEMA, "invalid_grammar"),
    "a reference to no schema": (_strict({"$ref": "#/x-own", "x-own": {}}), SCHEMA, "invalid_grammar"),
    "no structural tag": ({"response_format": {"type": "structural_tag"}}, "response_format.format", "missing_field"),
    "an empty structural tag": (_tagged({}), "response_format", "invalid_grammar"),
    "an unknown field in a tag": (_tagged({"type": "any_text", "x": 1}), "response_format", "invalid_grammar"),
    "an unknown keyword in a tag": (
        _tagged({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}),
        "response_format", "invalid_grammar",
    ),
    "lookahead": ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "invalid_grammar"),
    "bad regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid_grammar"),
    "empty regex": ({"structured_outputs": {"regex": ""}}, "structured_outputs", "invalid_value"),
    "huge regex": ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "grammar_too_complex"),
    "endless rule": (
        {"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar", "invalid_grammar",
    ),
    "no choice": ({"structured_outputs": {"choice": []}}, "structured_outputs", "invalid_value"),
    "two of them": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_value"),
    "neither": ({"structured_outputs": {"regex": None, "json": None}}, "structured_outputs", "invalid_value"),
    "whitespace": (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern", "unsupported_parameter",
    ),
    "both": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs", "invalid_value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD)
async def test_refused_by_name(post: Callable[..., Any], name: str, stream: bool) -> None:
    given, param, code = BAD[name]
    reply = await post("/v1/chat/completions", {"messages": HELLO, **given, "max_tokens": 5, "stream": stream})
    assert reply.status == 400, reply.body
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (pb.Grammar(), "sampling.grammar"),
        (pb.Grammar(regex="(a"), "sampling.grammar.regex"),
        (pb.Grammar(json_schema="{"), "sampling.grammar.json_schema"),
        (pb.Grammar(json_schema='{"not": {}}'), "sampling.grammar.json_schema"),
        (pb.Grammar(choice=pb.Choices()), "sampling.grammar.choice"),
    ],
)
async def test_grpc_refused_by_name(stub: Any, grammar: pb.Grammar, field: str) -> None:
    request = pb.CompleteRequest(text="x", sampling=pb.SamplingParams(grammar=grammar, max_tokens=5))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Complete(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(field)


async def test_one_grammar_two_names(post: Callable[..., Any]) -> None:
    """A refusal that is remembered names the field of whoever asks again."""
    for given, param in (
        ({"structured_outputs": {"regex": "(z"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "regex", "regex": "(z"}}, "response_format.regex"),
    ):
        reply = await post("/v1/chat/completions", {"messages": HELLO, **given})
        assert reply.json()["error"]["param"] == param


class Labels(BaseModel):
    """Sets as pydantic's users write them: the first two have no end, of the third each comes at most once."""

    tags: set[str]
    numbers: frozenset[int]
    moods: set[Literal["calm", "glad"]]
    few: Annotated[set[str], Field(json_schema_extra=lambda schema: schema.pop("uniqueItems"))]


ANY: dict[str, Any] = {}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
TEXT = {"type": "string"}
# What is kept of each schema of BAD that is refused for one keyword where it is strict, and what is left out.
KEPT: dict[str, tuple[Any, list[str]]] = {
    "a set where the schema is to be followed strictly": ({"type": "array", "items": TEXT}, ["#: 'uniqueItems'"]),
    "a set, and what is forbidden": (
        {"anyOf": [{"type": "array", "items": TEXT}, ANY]}, ["#/anyOf/1: 'not'", "#/anyOf/0: 'uniqueItems'"],
    ),
    "if": (ANY, ["#: 'if'", "#: 'then'"]),
    "two of allOf": ({"type": "integer", "minimum": 3}, []),
    "overlapping oneOf": ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, ["#: 'oneOf'"]),
    "foreign reference": (ANY, ["#: '$ref'"]),
    "members of oneOf that may be one": (
        {"anyOf": [{"type": "object", "properties": {"a": ANY}}, {**ANY_OBJECT, "required": []}]}, ["#: 'oneOf'"],
    ),
    "bounds without a type": (ANY, ["#: 'minimum'"]),
    "wrong type": (ANY, ["#: 'type'"]),
    "bounds in the wrong order": ({"type": "integer"}, ["#: 'minimum'", "#: 'maximum'"]),
    "a pattern of no text": (TEXT, ["#: 'pattern'"]),
    "a boundary in a pattern": (TEXT, ["#: 'pattern'"]),
    "a billion items": ({"type": "array"}, ["#: 'minItems'"]),
    "a format that is no text": (TEXT, ["#: 'format'"]),
    "a reference to no schema": ({"$ref": "#/$defs/own", "$defs": {"own": {}}}, []),
}  # fmt: skip
NARROW = {**TEXT, "pattern": "^[a-z]+(-[a-z]+)*$"}
MANY = {f"p{i}": {"anyOf": [{"const": j} for j in range(3)]} for i in range(1100)}
MORE_KEPT: dict[str, tuple[Any, Any, list[str]]] = {
    "nothing": (ANY, ANY, []),
    "any object": ({"type": "object"}, ANY_OBJECT, []),
    "any object with a property": ({"type": "object", "minProperties": 1}, {**ANY_OBJECT, "minProperties": 1}, []),
    "any object, or null": ({"type": ["object", "null"]}, {**ANY_OBJECT, "type": ["object", "null"]}, []),
    "an object of values": ({"type": "object", "enum": [{"a": 1}]}, {"type": "object", "enum": [{"a": 1}]}, []),
    "more states than an engine makes": ({**NARROW, "maxLength": 4096}, NARROW, ["#: 'maxLength'"]),
    "a list of too many schemas": (
        {"type": "array", "items": {"type": "object", "properties": MANY}}, ANY, ["#: the schema"],
    ),
    "too many schemas to choose from": ({"anyOf": [*MANY.values()]}, ANY, ["#: the schema"]),
    "an object of too many schemas": (
        {"type": "object", "properties": {"a": TEXT, "b": {"properties": MANY}}, "required": ["b"]},
        {"type": "object", "properties": {"a": True, "b": True}, "required": ["b"], "additionalProperties": False},
        ["#: all but the names of its properties"],
    ),
}  # fmt: skip


def _told(schema: dict[str, Any], caplog: pytest.LogCaptureFixture, **strict: bool | None) -> tuple[Any, list[str]]:
    """Return what is enforced of a schema that is not strict, and what the log says was left out."""
    dropped_keywords_log._log_once.cache_clear()
    caplog.clear()
    spec = read_output_format(_loose(schema, **strict))
    assert spec is not None
    assert spec.kind == GrammarKind.JSON_SCHEMA
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = [re.fullmatch(f"{SCHEMA} of x: kept without (.*); with strict it is refused", line) for line in lines]
    assert len(found) <= 1
    return json.loads(spec.source), [name for line in found if line is not None for name in line[1].split(", ")]


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}], ids=["no word", "false", "null"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_strict_keeps_what_can_be_kept(
    name: str, strict: dict[str, bool | None], caplog: pytest.LogCaptureFixture
) -> None:
    schema = BAD[name][0]["response_format"]["json_schema"]["schema"]
    kept, dropped = KEPT[name]
    assert _told(schema, caplog, **strict) == (check_schema(kept, "x"), dropped)


@pytest.mark.parametrize("name", MORE_KEPT)
def test_more_that_is_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    schema, kept, dropped = MORE_KEPT[name]
    assert _told(schema, caplog) == (check_schema(kept, "x"), dropped)


@pytest.mark.parametrize("schema", [COLOUR, Recipe.model_json_schema(), {"type": "array"}, {"const": 2**53}])
def test_strict_or_not_is_the_same_where_all_can_be_kept(
    schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_output_format(_loose(schema)) == read_output_format(_strict(schema))
    assert not caplog.records


async def test_what_is_kept_of_a_schema_is_followed(post: Callable[..., Any]) -> None:
    """The engine, too, takes what the pattern leaves without its length."""
    schema = {"type": "object", "properties": {"a": {**NARROW, "maxLength": 4096}}, "required": ["a"], "not": {}}
    body = {"prompt": "x", **_loose(schema), "max_tokens": 60, "seed": 1}
    reply = await post("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert re.match(r'\{\s*"a"', reply.json()["choices"][0]["text"])


def test_a_client_writes_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    _told({"properties": {"a\nERROR b": {"not": {}}}}, caplog)
    assert "a\\nERROR b" in caplog.text


def test_sets_are_lists_where_nobody_asks_for_strictness(caplog: pytest.LogCaptureFixture) -> None:
    schema = Labels.model_json_schema()
    kept, dropped = _told(schema, caplog)
    assert kept == check_schema({**schema, "properties": _lists(schema)}, "x")
    assert dropped == ["#/properties/tags: 'uniqueItems'", "#/properties/numbers: 'uniqueItems'"]


def _lists(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties, of which those without an end are lists."""
    found = copy.deepcopy(schema["properties"])
    for name in ("tags", "numbers"):
        del found[name]["uniqueItems"]
    return found


def test_openais_parse_says_how_to_have_a_set() -> None:
    """Its `parse` sends each model as strict; OpenAI's own service refuses `uniqueItems` there as well."""
    strict = type_to_response_format_param(Labels)
    with pytest.raises(InvalidRequest, match=r"#/properties/tags: 'uniqueItems' .* Take the keyword out of the schema"):
        read_output_format({"response_format": strict})
    schema = strict["json_schema"]["schema"]
    schema["properties"] = _lists(schema)
    assert read_output_format({"response_format": strict}) is not None
    assert Labels.model_validate_json('{"tags":["a","a"],"numbers":[1],"moods":[],"few":["b","b"]}').few == {"b"}
