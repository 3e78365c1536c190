"""Grammar specifications: all of what the client sent, or a refusal that says what is too much of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import MAX_SOURCE_BYTES, MAX_WRITTEN_BYTES, GrammarSpec

FIELD = "response_format.json_schema.schema"


def dates(count: int, kind: str = "date-time") -> dict[str, Any]:
    return {"type": "object", "properties": {f"at_{i}": {"type": "string", "format": kind} for i in range(count)}}


@pytest.mark.parametrize("count", [1, 300, 1200])
def test_formats_are_written_out_whole(count: int) -> None:
    schema = dates(count)
    assert len(json.dumps(schema)) < MAX_SOURCE_BYTES
    spec = GrammarSpec.json_schema(schema, field=FIELD)
    properties = json.loads(spec.source)["properties"]
    assert list(properties) == list(schema["properties"])
    assert all(each["pattern"] == properties["at_0"]["pattern"] for each in properties.values())
    assert spec.named("other") == copy.deepcopy(spec) == spec
    part = {"type": "json_schema", "json_schema": json.loads(spec.source)}
    assert json.loads(GrammarSpec.from_checked_tag({"type": "structural_tag", "format": part}).source)["format"] == part


def test_a_compact_text_is_kept_as_it_came() -> None:
    properties = {f"p{i:04}": {"type": "string"} for i in range(2300)}
    text = json.dumps({"type": "object", "properties": properties}, separators=(",", ":"))
    assert MAX_SOURCE_BYTES * 0.9 < len(text) < MAX_SOURCE_BYTES
    assert GrammarSpec.json_schema(text).source == text


def test_too_much_that_is_written_out_is_refused_as_that() -> None:
    """A definition holds what is within it: of a deep one, whose every place is one, all of it again and again."""
    deep: dict[str, Any] = {"enum": ["x"]}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep, "b": {"const": "x" * 1500}}}
    refs = [{"$ref": "#/$defs/a" + "/properties/a" * depth} for depth in range(30)]
    with pytest.raises(InvalidRequest, match="with its formats and patterns written out; at most 327680") as caught:
        GrammarSpec.json_schema({"$defs": {"a": deep}, "anyOf": refs}, field=FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "grammar_too_complex")


@pytest.mark.parametrize("make", [GrammarSpec.json_schema, GrammarSpec.structural_tag])
def test_what_the_client_sent_has_its_own_limit(make: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"bytes; at most {MAX_SOURCE_BYTES} are accepted") as caught:
        make({"type": "object", "description": "d" * MAX_SOURCE_BYTES}, field=FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "grammar_too_complex")


def test_parts_have_a_limit_together() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_WRITTEN_BYTES} are accepted") as caught:
        GrammarSpec.from_checked_tag({"type": "structural_tag", "format": "x" * MAX_WRITTEN_BYTES}, field=FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "grammar_too_complex")
