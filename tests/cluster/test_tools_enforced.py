"""Calls that are required, and arguments that must follow their schema: by grammar, in every style."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ingress import make_ingress
from long_worker import LongWorker
from tiny_checkpoints import build_checkpoint
from tool_templates import TEMPLATES, write_tool_tokenizer

from motley.cluster.api.common.chat.chat_tools import read_tool_use
from motley.cluster.api.common.fields import dropped_keywords_log
from motley.cluster.api.common.parsers.answer_parser import parse_whole
from motley.cluster.api.common.parsers.parser_selection import TOOL_PARSERS, AnswerParserConfig
from motley.cluster.api.common.parsers.reasoning_parser import with_reasoning_before
from motley.cluster.api.common.parsers.structural_tags import TagFormat, ToolSignature, any_of, json_schema
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarKind
from motley.replicas.grammar.process.xgrammar_rules import schema_rules
from motley.replicas.grammar.schema.schema_check import check_schema

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Weather?"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "th\"e'r}e"]}, "days": {"type": "integer"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 6}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
SIGNATURES = [ToolSignature(name, schema) for name, schema in SCHEMAS.items()]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"</think>"]
END = len(TOKENS)
LONG = 200  # bytes after which a walk takes every way to an end


class Walk:
    """Writes at random what a format allows."""

    def __init__(self) -> None:
        vocabulary = xgrammar.TokenizerInfo(
            [*TOKENS, "<end>"], vocab_type=xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END]
        )
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
        self._compiled: dict[str, Any] = {}

    def __call__(self, format: TagFormat, seed: int) -> str:
        source = json.dumps({"type": "structural_tag", "format": format})
        if source not in self._compiled:
            self._compiled[source] = self._compiler.compile_structural_tag(source)
        matcher, draw = xgrammar.GrammarMatcher(self._compiled[source]), random.Random(seed)
        mask, written = np.zeros((1, (END + 32) // 32), dtype=np.int32), bytearray()
        while not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: END + 1].nonzero()[0].tolist()
            allowed = [token for token in allowed if token >= 256 or 0x20 <= token < 0x7F] or allowed
            token = draw.choice(_closing(allowed) if len(written) > LONG or draw.random() < 0.3 else allowed)
            assert matcher.accept_token(token)
            written += b"" if token == END else TOKENS[token]

        return written.decode()


def _closing(allowed: list[int]) -> list[int]:
    """Return the tokens that lead to an end, if there are any; no white space, which leads nowhere."""
    closing = [token for token in allowed if token == END or TOKENS[token] in (b'"', b"}", b"</think>")]
    return closing or [token for token in allowed if TOKENS[token] not in b" \t\r\n"] or allowed


WALK = Walk()


@pytest.mark.parametrize("style", TOOL_PARSERS)
@pytest.mark.parametrize("thinks", [None, False, True])
@pytest.mark.parametrize("single", [False, True])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_written_under_a_required_call_is_one(style: str, thinks: Any, single: bool, seed: int) -> None:
    """`thinks`: None not at all, else whether the prompt has opened it."""
    format = TOOL_PARSERS[style].required(SIGNATURES, single=single)
    text = WALK(format if thinks is None else with_reasoning_before(format, opened=thinks), seed)
    reading = AnswerParserConfig(TOOL_PARSERS[style].parser, tuple(SCHEMAS), False, thinks is not None, bool(thinks))
    parser = reading.parser()
    assert parser is not None
    answer = parse_whole(parser, text)
    assert answer.text == ""
    assert parser.num_calls == len(answer.calls) >= 1
    assert not single or len(answer.calls) == 1
    for call in answer.calls.values():
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_a_call_that_is_free_to_come_follows_its_schema(seed: int) -> None:
    hermes = TOOL_PARSERS["hermes"]
    assert hermes.optional is not None
    text = WALK(hermes.optional(SIGNATURES), seed) + "<tool_call>"
    answer = parse_whole(AnswerParserConfig(hermes.parser, tuple(SCHEMAS)).parser(), text)  # type: ignore[arg-type]
    assert answer.text.count("<tool_call>") == 1  # what was appended


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_calls_or_an_answer_in_a_format(seed: int) -> None:
    answer_schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    hermes = TOOL_PARSERS["hermes"]
    text = WALK(any_of(hermes.required(SIGNATURES, single=False), json_schema(answer_schema)), seed)
    answer = parse_whole(AnswerParserConfig(hermes.parser, tuple(SCHEMAS)).parser(), text)  # type: ignore[arg-type]
    assert bool(answer.calls) != bool(answer.text)
    if answer.text:
        jsonschema.validate(json.loads(answer.text), answer_schema)


@pytest.fixture(params=TEMPLATES)
async def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Sends a chat; the format that it is held to, or the refusal."""
    folder = write_tool_tokenizer(tmp_path, request.param)
    worker = LongWorker(str(folder), [])
    ingress = await make_ingress(folder, worker)
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")

    async def ask(**fields: Any) -> Any:
        worker.requests.clear()
        reply = await post(CHAT, {"messages": HELLO, **fields})
        if not worker.requests:
            return reply.json()["error"]
        grammar = worker.requests[-1].sampling.grammar
        if grammar is None or grammar.kind is not GrammarKind.STRUCTURAL_TAG:
            return grammar
        return json.loads(grammar.source)["format"]

    ask.style = request.param  # type: ignore[attr-defined]
    return ask


async def test_what_is_held_and_what_is_free(asked: Any) -> None:
    thinking = asked.style in ("qwen3", "opened")
    named = {"type": "function", "function": {"name": "note"}}
    assert await asked(tools=TOOLS) is None
    assert await asked(tools=TOOLS, tool_choice="none") is None
    for choice, names in (("required", list(SCHEMAS)), (named, ["note"])):
        held = await asked(tools=TOOLS, tool_choice=choice)
        text = json.dumps(held)
        assert [name for name in SCHEMAS if f'\\"name\\": \\"{name}\\"' in text] == names
        assert ("</think>" in text) == thinking
    off = {"chat_template_kwargs": {"enable_thinking": False}} if thinking else {}
    assert (await asked(tools=TOOLS, tool_choice=named, parallel_tool_calls=False, **off))["stop_after_first"] is True


async def test_a_format_leaves_room_for_thoughts_and_calls(asked: Any) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS["note"]}}
    alone = await asked(response_format=format)
    if asked.style in ("qwen3", "opened"):
        assert "</think>" in json.dumps(alone)
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert (await asked(response_format=format, **off)).kind is GrammarKind.JSON_SCHEMA
    else:
        assert alone.kind is GrammarKind.JSON_SCHEMA
    assert '\\"name\\": \\"weather\\"' in json.dumps(await asked(response_format=format, tools=TOOLS))
    refused = await asked(response_format=format, tools=TOOLS, tool_choice="required")
    assert (refused["param"], refused["code"]) == ("response_format.json_schema.schema", "unsupported_parameter")


async def test_strict_arguments_are_held_or_refused(asked: Any) -> None:
    def tools(schema: Any) -> list[Any]:
        return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]

    held = await asked(tools=tools(SCHEMAS["note"]))
    if asked.style == "llama31":  # a text that begins with { may be anything
        assert held["code"] == "unsupported_parameter"
    else:
        assert held["type"] == "triggered_tags"
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    refused = await asked(tools=tools(odd), tool_choice="required")
    assert refused["param"] == "tools[0].function.parameters"
    for schema in (
        {"type": "object", "required": ["city"], "additionalProperties": {"type": "integer"}},
        {"anyOf": [SCHEMAS["note"]]},
        {"minProperties": 2},
        {"type": "object", "unheardOf": 1},
    ):
        refused = await asked(tools=tools(schema), tool_choice="required")
        assert refused["param"] == "tools[0].function.parameters", schema
    empty = await asked(tools=tools({"type": "object", "additionalProperties": False}), tool_choice="required")
    assert '"additionalProperties": false' in json.dumps(empty).replace("\\", "")
    loose = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    assert "uniqueItems" not in json.dumps(await asked(tools=loose, tool_choice="required"))


@pytest.mark.parametrize("special_marks", [False, True])
async def test_a_random_model_calls_when_it_must(special_marks: bool, tmp_path: Path) -> None:
    """The real engine: weights that mean nothing, and only the grammar to follow."""
    build_checkpoint(tmp_path, "qwen2", vocab_size=272, max_position_embeddings=4096, eos_token_id=258, seed=7)
    worker = Worker(
        str(write_tool_tokenizer(tmp_path, "qwen3", special_marks=special_marks)), EngineConfig(threads=1), name="tiny"
    )
    ingress = await make_ingress(tmp_path, worker)
    post = partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "n": 2, "seed": 3, **off}
    try:
        for fields in (body, {**body, "parallel_tool_calls": False}):
            answer = (await post(CHAT, fields)).json()
            for choice in answer["choices"]:
                assert choice["finish_reason"] == "tool_calls"
                for call in choice["message"]["tool_calls"]:
                    function = call["function"]
                    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    finally:
        await worker.close()


def _kept(parameters: dict[str, Any], **more: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
    return read_tool_use({"tools": [tool], "tool_choice": "required"}).allowed[0].schema


NOTE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {**NOTE, "properties": {"id": {"type": "integer", "format": "sha"}}},
        {**NOTE, "properties": {"id": {"type": "integer", "exclusiveMinimum": True}}},
        {**NOTE, "not": {"required": ["x"]}},
        {"$ref": "#/$defs/Note", "$defs": {"Note": NOTE}},
        {"required": ["id"], "properties": {"id": {"type": "integer"}}, "$schema": "x", "if": {}},
        {**NOTE, "nullable": True},
        {**NOTE, "type": ["object", "null"]},
        {**NOTE, "type": "OBJECT"},
        {**NOTE, "type": "dict"},
        {"anyOf": [NOTE, {"type": "null"}]},
        {"$ref": "#/$defs/Note", "$defs": {"Note": {**NOTE, "nullable": True}}},
        {"anyOf": [{"$ref": "#/$defs/Note"}, {"type": "string"}], "$defs": {"Note": NOTE}},
    ],
)
def test_one_keyword_does_not_cost_the_whole_schema(parameters: dict[str, Any]) -> None:
    kept = _kept(parameters)
    kept = kept["$defs"]["0"] if "$ref" in kept else kept
    assert (kept["properties"], kept["required"]) == ({"id": {"type": "integer"}}, ["id"])


@pytest.mark.parametrize(
    ("keywords", "kept"),
    [
        ({"format": "email", "maxLength": 100}, {"format": "email", "maxLength": 100}),
        ({"format": "uri", "maxLength": 255}, {"format": "uri", "maxLength": 255}),
        ({"pattern": "^[a-z0-9]+(-[a-z0-9]+)*$", "maxLength": 1000}, {"pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"}),
        ({"pattern": "^/?([^/]+/)*[^/]+$", "maxLength": 4096}, {"pattern": "^/?([^/]+/)*[^/]+$"}),
        ({"pattern": "^[a-z]$", "minLength": 3}, {"pattern": "^[a-z]$"}),
    ],
)
def test_a_length_does_not_cost_the_whole_request(keywords: dict[str, Any], kept: dict[str, Any]) -> None:
    """The grammar's own process makes rules of what is kept."""
    note = {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}
    held = {**note, "properties": {"a": {"type": "string", **kept}}}
    assert _kept(note) == check_schema(held, "x")
    assert schema_rules(json.dumps(_kept(note)), 1)


def test_what_is_left_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        _kept({**NOTE, "properties": {"id": {"type": "integer"}, "told": {"contains": {}}}})
    [told] = [record.getMessage() for record in caplog.records]
    assert (
        told
        == "tools[0].function.parameters of f: kept without #/properties/told: 'contains'; with strict it is refused"
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "integer"}}},
    ],
    ids=str,
)
def test_a_schema_that_is_lost_as_a_whole_is_told(parameters: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    dropped_keywords_log._log_once.cache_clear()
    assert _kept(parameters) == {"type": "object", "additionalProperties": True}
    assert [record.getMessage() for record in caplog.records] == [
        "tools[0].function.parameters of f: kept without #: the schema; with strict it is refused"
    ]


_NEXT = {**NOTE, "properties": {"id": {"type": "integer"}, "next": {"$ref": "#"}}}
# Unions that lead back to themselves: by a definition, as a whole, and along a chain longer than Python's stack.
_CIRCULAR: dict[str, dict[str, Any]] = {
    "a definition": {"$ref": "#/$defs/N", "$defs": {"N": {"anyOf": [NOTE, {"$ref": "#/$defs/N"}]}}},
    "two of each other": {
        "$ref": "#/$defs/A",
        "$defs": {
            "A": {"anyOf": [{"$ref": "#/$defs/B"}, NOTE]},
            "B": {"oneOf": [{"allOf": [{"$ref": "#/$defs/A"}]}]},
        },
    },
    "the whole": {"anyOf": [{"$ref": "#"}, NOTE]},
    "a long chain": {
        "$ref": "#/$defs/0",
        "$defs": {
            f"{i}": {"anyOf": [{"$ref": f"#/$defs/{(i + 1) % 1200}"}, {"$ref": "#/$defs/n"}]} for i in range(1200)
        }
        | {"n": NOTE},
    },
}


@pytest.mark.parametrize("name", _CIRCULAR)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_union_that_leads_back_to_itself_is_held_and_ends(name: str, choice: str) -> None:
    """It is enforced with `strict` too, unless the schema itself is a union."""
    function = {"name": "f", "parameters": _CIRCULAR[name]}
    for strict in (False, True):
        body = {"tools": [{"type": "function", "function": {**function, "strict": strict}}], "tool_choice": choice}
        if strict and name == "the whole":
            with pytest.raises(InvalidRequest, match="expected a schema of type object"):
                read_tool_use(body)
            continue
        kept = read_tool_use(body).allowed[0].schema
        if name != "a long chain":
            value = json.loads(WALK({"type": "json_schema", "json_schema": kept}, 3))
            assert value.keys() == {"id"}
        assert kept != {"type": "object", "additionalProperties": True}


@pytest.mark.parametrize("parameters", [{**_NEXT, "nullable": True}, {**_NEXT, "type": ["object", "null"]}], ids=str)
def test_objects_that_hold_the_whole_are_told_from_its_null(parameters: dict[str, Any]) -> None:
    kept = _kept(parameters)
    assert kept["properties"] == {"id": {"type": "integer"}, "next": {"$ref": "#/$defs/0"}}
    inner = {key: value for key, value in kept.items() if key != "$defs"}
    assert kept["$defs"] == {"0": {"anyOf": [inner, {"type": "null"}]}}
    for seed in range(5):
        jsonschema.validate(json.loads(WALK({"type": "json_schema", "json_schema": kept}, seed)), kept)


def test_a_constant_that_looks_like_a_reference_stays_as_it_is() -> None:
    like = {"enum": [{"$ref": "#"}]}
    kept = _kept({**_NEXT, "nullable": True, "properties": {**_NEXT["properties"], "like": like}})
    assert kept["properties"]["like"] == like


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], 5, None, []])
def test_arguments_of_another_type_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.function\.parameters\.type: expected object"):
        _kept({**NOTE, "type": kind})


def test_strict_refuses_what_it_cannot_keep() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]\.function\.parameters: #: the keyword 'not'"):
        _kept({**NOTE, "not": {}}, strict=True)
    with pytest.raises(InvalidRequest, match="expected a schema of type object"):
        _kept({"anyOf": [NOTE, {"type": "null"}]}, strict=True)
    assert "$ref" in _kept({"$ref": "#/$defs/Note", "$defs": {"Note": NOTE}}, strict=True)


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"description": "x"}, {"anyOf": [{"type": "null"}]}])
def test_arguments_of_which_nothing_is_said_are_any_object(parameters: dict[str, Any]) -> None:
    assert _kept(parameters) == {"type": "object", "additionalProperties": True}
