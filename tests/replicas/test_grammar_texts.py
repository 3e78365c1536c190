"""Whatever a model says under a grammar follows it: random schemas, expressions and grammars at high temperature."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_engine import SCHEMAS, check_json, make_engine, texts
from hypothesis import HealthCheck, given, settings

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.regex.string_formats import FORMATS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tmp_path_factory.mktemp("grammar"))


@given(schema=SCHEMAS)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_finished_text_validates(engine: Engine, schema: Any) -> None:
    for output in texts(engine, GrammarSpec.json_schema(schema), n=3):
        check_json(output.text, schema)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{3}-[a-f]{2}",
        r"(foo|ba[rz])+x",
        r"\d{1,3}(\.\d{1,3}){3}",
        r"[^a-z]{4}",
        r"é[中文]?ü",
        r"\w+@\w{2,5}\.com",
        r'"\\{2}',
    ],
)
def test_a_regex_matches_the_whole_text(engine: Engine, pattern: str) -> None:
    found = texts(engine, GrammarSpec.regex(pattern), n=4)
    assert found
    for output in found:
        assert re.fullmatch(pattern, output.text), output.text


def test_a_choice_is_one_of_them(engine: Engine) -> None:
    choices = ["yes", "no", 'a"quote\\', "naïve\n文", "yes and more"]
    found = {output.text for output in texts(engine, GrammarSpec.choice(choices), n=24)}
    assert found <= set(choices)
    assert len(found) > 1


def test_gbnf(engine: Engine) -> None:
    grammar = 'root ::= "(" item ("," item)* ")"\nitem ::= [0-9]+ | root\n'
    for output in texts(engine, GrammarSpec.ebnf(grammar), n=4):
        assert re.fullmatch(r"[(),0-9]+", output.text)
        assert output.text.count("(") == output.text.count(")") > 0


def test_any_json_object(engine: Engine) -> None:
    found = texts(engine, GrammarSpec.json_object(), n=16, logit_bias={ord("}") - 33: 6.0})
    assert found
    for output in found:
        assert isinstance(json.loads(output.text), dict)


def test_a_structural_tag(engine: Engine) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99, "minimum": 0}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<n>", "end": "</n>", "content": content}}
    for output in texts(engine, GrammarSpec.structural_tag(tag), n=4):
        assert re.fullmatch(r"<n>\s*\d{1,2}\s*</n>", output.text)


def test_recursive_schema(engine: Engine) -> None:
    following = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = {"type": "object", "properties": {"v": {"enum": [1, 2]}, "next": following}, "required": ["v", "next"]}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    found = texts(engine, GrammarSpec.json_schema(schema), n=6)
    assert found
    for output in found:
        check_json(output.text, schema)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec.regex("(a"), "parenthesis"),
        (GrammarSpec.regex(r"(a)\1"), "Backreference"),
        (GrammarSpec.regex("(?=a)b"), "Lookahead"),
        (GrammarSpec.regex(r"a\bc"), "boundary"),
        (GrammarSpec.ebnf("root = 'a'"), "EBNF"),
        (GrammarSpec.ebnf('start ::= "a"'), "root"),
        (GrammarSpec.ebnf("root ::= root"), "no text"),
        (GrammarSpec.structural_tag({"format": {"type": "or", "elements": []}}), "element"),
        (GrammarSpec.json_schema({"type": "string", "pattern": "^(?=a)b$"}), "no text at all"),
    ],
)
def test_what_the_library_cannot_keep_to_is_refused(engine: Engine, spec: GrammarSpec, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        texts(engine, spec)
    assert refused.value.param == "grammar"
    assert refused.value.code == "invalid_grammar"
    assert words.lower() in refused.value.message.lower()
    assert "is false" not in refused.value.message, "the library's words, and not its code"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "decimals"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "decimals"),
        ({"items": {"type": ["number", "null"], "minimum": 0.9, "maximum": 0.8}}, "decimals"),
        ({"type": "number", "minimum": 2**53 + 1}, "minimum"),
        ({"type": "number", "maximum": 10**400}, "maximum"),
        ({"type": "number", "maximum": True}, "maximum"),
        ({"const": {"a": [2**64 - 1]}}, "double"),
        ({"enum": [10**400]}, "double"),
        ({"type": []}, "type"),
        ({"type": "integer", "minimum": 10**30}, "Integer exceeds"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 1}, "no integer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "a(?=b)"}, "Lookahead"),
    ],
)
def test_what_the_library_would_write_otherwise_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        GrammarSpec.json_schema(schema)
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 1e-6, "maximum": 1e-6},
        {"type": "number", "minimum": 0.1234561, "maximum": 0.1234579},
        {"type": "number", "exclusiveMinimum": -0.000002, "exclusiveMaximum": 0},
        {"enum": [2**64, -(2**63), 10**15]},
    ],
)
def test_numbers_at_the_edge_of_what_the_library_tells_apart(engine: Engine, schema: Any) -> None:
    found = texts(engine, GrammarSpec.json_schema(schema), n=6)
    assert found
    for output in found:
        check_json(output.text, schema)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(engine: Engine, name: str) -> None:
    """JSON Schema's own checkers accept the texts; where there is no checker, they are JSON."""
    schema = {"type": "string", "format": name}
    found = texts(engine, GrammarSpec.json_schema(schema), n=16)
    assert found
    for output in found:
        check_json(output.text, schema)
