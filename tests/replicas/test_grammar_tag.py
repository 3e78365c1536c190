"""Structural tags: what is in one is known by its name and type, and schemas in one are as kept to as alone."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar import structural_tag_check
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.regex.text_rules import TextRule
from motley.replicas.grammar.structural_tag_check import check_tag

FIELD = "response_format"
TEXT = {"type": "any_text"}
TAG = {"type": "tag", "begin": "<a>", "content": TEXT, "end": "</a>"}
TOKEN = {"type": "token", "token": 7}
FORMATS: list[dict[str, Any]] = [
    TEXT,
    {"type": "any_text", "excludes": ["x"], "max_tokens": 4, "max_chars": None},
    {"type": "const_string", "value": ""},
    {"type": "json_schema", "json_schema": True},
    {"type": "json_schema", "json_schema": {"type": "null"}, "style": "json", "any_order": False, "excludes": []},
    {"type": "json_schema", "json_schema": {"type": "null"}, "max_whitespace_cnt": 4},
    {"type": "grammar", "grammar": 'root ::= "a"'},
    {"type": "regex", "pattern": "a"},
    TOKEN,
    {"type": "exclude_token", "exclude_tokens": ["<a>", 0]},
    {"type": "any_tokens", "exclude_tokens": [], "max_tokens": 0},
    {"type": "sequence", "elements": [TAG, TEXT]},
    {"type": "or", "elements": [TEXT]},
    {"type": "optional", "content": TEXT},
    {"type": "plus", "content": TAG},
    {"type": "star", "content": TAG},
    {"type": "repeat", "min": 0, "max": -1, "content": TAG},
    TAG,
    {"type": "tag", "begin": TOKEN, "content": TEXT, "end": ["a", "b"]},
    {"type": "tag", "begin": "", "content": TEXT, "end": TOKEN},
    {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "excludes": ["x"], "stop_after_first": True},
    {"type": "token_triggered_tags", "trigger_tokens": [7], "tags": [{**TAG, "begin": TOKEN}], "at_least_one": True},
    {"type": "tags_with_separator", "tags": [TAG], "separator": ""},
    {"type": "dispatch", "rules": [["<", TEXT]], "loop": False, "excludes": []},
    {"type": "token_dispatch", "rules": [[7, TEXT], ["<a>", TAG]], "exclude_tokens": [8]},
]


def tagged(inner: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": inner}


@pytest.mark.parametrize("inner", FORMATS, ids=json.dumps)
def test_what_is_as_it_should_be_stays(inner: dict[str, Any]) -> None:
    assert check_tag(tagged(inner), FIELD) == tagged(inner)
    assert check_tag({"format": inner}, FIELD) == {"format": inner}
    within = {"type": "sequence", "elements": [{"type": "star", "content": inner}]}
    assert check_tag(tagged(within), FIELD) == tagged(within)


def test_every_format_is_tried() -> None:
    assert {inner["type"] for inner in FORMATS} == set(structural_tag_check._FIELDS)


def test_one_of_a_list_of_tags_is_a_tag() -> None:
    untyped = {name: value for name, value in TAG.items() if name != "type"}
    tags = {"type": "tags_with_separator", "tags": [untyped], "separator": ","}
    assert check_tag(tagged(tags), FIELD) == tagged({**tags, "tags": [TAG]})


def test_the_older_form_is_what_the_library_made_of_it() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    older = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    newer = tagged({"type": "triggered_tags", "triggers": ["<"], "tags": [tag]})
    for form in (older, {"type": "structural_tag", **older}):
        assert check_tag(form, FIELD) == check_tag(newer, FIELD)
        for source in (form, json.dumps(form)):
            assert GrammarSpec.structural_tag(source).source == GrammarSpec.structural_tag(newer).source


UNKNOWN = {"type": "array", "items": {"type": "integer"}, "not": {}}
REFUSED: list[tuple[Any, str]] = [
    ([], "#: expected an object"),
    ({"type": "other", "format": TEXT}, "#/type: expected 'structural_tag'"),
    ({"type": "structural_tag"}, "#/format: expected an object"),
    ({**tagged(TEXT), "strict": True}, "#: there is no field 'strict'; expected type, format"),
    ({"type": "structural_tag", "structures": [], "triggers": ["<"]}, "#/structures: expected a list of objects"),
    ({"structures": {}, "triggers": ["<"]}, "#/structures: expected a list of objects"),
    ({"structures": [{}], "triggers": []}, "#/triggers: expected at least one"),
    ({"structures": [{}], "triggers": ["<", 7]}, "#/triggers/1: expected a string"),
    ({"structures": [{}]}, "#/triggers: expected a list"),
    ({"structures": [7], "triggers": ["<"]}, "#/structures/0: expected an object"),
    ({"structures": [{"begin": "<", "end": ">"}], "triggers": ["<"]}, "#/structures/0: a structure needs 'schema'"),
    ({"structures": [{"begin": 1, "schema": {}, "end": ">"}], "triggers": ["<"]},
     "#/structures/0/begin: expected a string"),
    ({"structures": [{"begin": "<", "schema": UNKNOWN, "end": ">"}], "triggers": ["<"]},
     "#/structures/0/schema: #: the keyword 'not' is not supported"),
    ({"structures": [{"begin": "<", "schema": {}, "end": ">", "x": 1}], "triggers": ["<"]},
     "#/structures/0: there is no field 'x'"),
    ({"format": TEXT, "structures": []}, "#: there is no field 'format'; expected type, structures, triggers"),
    (tagged([TEXT]), "#/format: expected an object"),
    (tagged({"value": "x"}), "#/format/type: 'None' is none of const_string, "),
    (tagged({"type": []}), "#/format/type: '[]' is none of "),
    (tagged({"type": "what"}), "#/format/type: 'what' is none of "),
    (tagged({"type": "const_string"}), "#/format: const_string needs 'value'"),
    (tagged({**TEXT, "max_token": 4}), "#/format: there is no field 'max_token'; expected type, excludes, max_tokens"),
    (tagged({**TEXT, "max_tokens": -1}), "#/format/max_tokens: expected an integer from 0"),
    (tagged({**TEXT, "max_chars": True}), "#/format/max_chars: expected an integer from 0"),
    (tagged({**TEXT, "excludes": "x"}), "#/format/excludes: expected a list"),
    (tagged({**TEXT, "excludes": ["x", 7]}), "#/format/excludes/1: expected a string"),
    (tagged({"type": "repeat", "min": 0, "max": -2, "content": TEXT}), "#/format/max: expected an integer from -1"),
    (tagged({**TAG, "content": {**TEXT, "a": 1}}), "#/format/content: there is no field 'a'"),
    (tagged({**TAG, "begin": {**TEXT}}), "#/format/begin/type: expected 'token'"),
    (tagged({**TAG, "end": 7}), "#/format/end: expected a string"),
    (tagged({**FORMATS[-5], "tags": [TEXT]}), "#/format/tags/0/type: expected 'tag'"),
    (tagged({"type": "dispatch", "rules": [["<"]]}), "#/format/rules/0: expected a list of two"),
    (tagged({"type": "json_schema", "json_schema": 7}), "#/format/json_schema: #: a schema is an object"),
    (tagged({"type": "json_schema", "json_schema": UNKNOWN}),
     "#/format/json_schema: #: the keyword 'not' is not supported"),
    (tagged({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "#/format/style: expected 'json'"),
    (tagged({"type": "json_schema", "json_schema": {}, "any_order": True}), "#/format/any_order: expected false"),
    (tagged({"type": "json_schema", "json_schema": {}, "excludes": ["x"]}), "#/format/excludes: expected an empty"),
    (tagged({"type": "json_schema", "json_schema": {}, "parsing_type": "json"}), "#/format: there is no field"),
    (tagged({**TAG, "content": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"not": {}}}]}}),
     "#/format/content/elements/0/json_schema: #: the keyword 'not'"),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_not_is_refused_by_name(tag: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GrammarSpec.structural_tag(tag, field=FIELD)
    assert caught.value.message.startswith(f"{FIELD}: {said}")
    assert (caught.value.param, caught.value.code) == (FIELD, "invalid_grammar")


def test_schemas_are_in_the_librarys_words_and_parts_are_not_checked_twice() -> None:
    schema = {"items": {"type": "string", "pattern": r"a\s"}}
    spec = GrammarSpec.structural_tag(tagged({"type": "json_schema", "json_schema": schema}))
    said = {"items": {"type": "string", "pattern": TextRule(r"a\s").encoded()}, "type": "array"}
    assert json.loads(spec.source) == tagged({"type": "json_schema", "json_schema": said})
    assert GrammarSpec.from_checked_tag(json.loads(spec.source)).source == spec.source


def test_limits_of_schemas_are_those_within_tags() -> None:
    long = {"anyOf": [True] * 5000}
    with pytest.raises(InvalidRequest, match="32 deep, are accepted") as caught:
        GrammarSpec.structural_tag(tagged({"type": "json_schema", "json_schema": long}), field=FIELD)
    assert caught.value.code == "grammar_too_complex"
    deep: Any = TEXT
    for _ in range(structural_tag_check.MAX_DEPTH + 1):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(InvalidRequest, match="deep are accepted") as caught:
        GrammarSpec.structural_tag(tagged(deep), field=FIELD)
    assert caught.value.code == "grammar_too_complex"
    check_tag(tagged(deep["content"]), FIELD)


KINDS = st.sampled_from(sorted(structural_tag_check._FIELDS))
NAMES = sorted({"type", *(name for fields in structural_tag_check._FIELDS.values() for name in fields)})
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | KINDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        | st.sampled_from(FORMATS).flatmap(lambda one: inner.map(lambda value: one | {"content": value}))
    ),
    max_leaves=8,
)


@given(inner=ANYTHING)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_nothing_but_a_refusal_comes_of_what_is_no_tag(inner: Any) -> None:
    with suppress(InvalidRequest):
        check_tag(tagged(inner), FIELD)
