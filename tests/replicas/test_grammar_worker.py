"""Continuations that a grammar's own process allows, byte by byte."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import xgrammar

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarKind, GrammarSpec
from motley.replicas.grammar.process.grammar_worker import (
    _COUNTED,
    CompiledGrammarMatchers,
    TokenVocabulary,
    _compile,
    _library_rules,
)
from motley.replicas.host.child_frames import GrammarReply

END = 256


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    """A token for each byte, and one that ends."""
    tokens = [bytes([value]) for value in range(END)]
    info = xgrammar.TokenizerInfo([*tokens, b"<end>"], xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return TokenVocabulary(tokens=tokens, plain=info, json=info, vocab_size=END + 1, stop_ids=(END,))


def following(matching: CompiledGrammarMatchers, begun: bytes, sequence: int) -> set[int]:
    answer, mask = matching.take(sequence, list(begun), new=True)
    assert answer is GrammarReply.MASK
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist()) - {END}


@pytest.mark.parametrize("pattern", [r"[^a]+", r"[^0-9]+", r"[^!-~]", r"."])
def test_only_bytes_of_characters_follow(vocabulary: TokenVocabulary, pattern: str) -> None:
    """None written too long, no half of a pair, none beyond the last: decoding would put something else there."""
    spec = GrammarSpec.json_schema({"type": "string", "pattern": pattern})
    matching = CompiledGrammarMatchers(_compile(vocabulary, spec.kind, spec.source), vocabulary)
    sequences = itertools.count()
    for lead in range(0xC2, 0xF5):
        rest = b"\x80" * (1 if lead < 0xE0 else 2 if lead < 0xF0 else 3)
        good = {second for second in range(0x80, 0xC0) if is_text(bytes([lead, second]) + rest[1:])}
        assert following(matching, b'"' + bytes([lead]), next(sequences)) == good, hex(lead)


def written(value: Any) -> str:
    """Return a value of an `enum` as the library writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def takes(vocabulary: TokenVocabulary, spec: GrammarSpec, text: str) -> bool:
    """Whether it may be the whole text."""
    return complete(CompiledGrammarMatchers(_compile(vocabulary, spec.kind, spec.source), vocabulary), text)


def complete(matching: CompiledGrammarMatchers, text: str) -> bool:
    answer, mask = matching.take(0, list(text.encode()), new=True)
    return answer is GrammarReply.DONE or (answer is GrammarReply.MASK and bool(mask[END // 8] >> END % 8 & 1))


def titled(name: str, kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind}}, "required": [name], "additionalProperties": False}


def both(a: Any, b: Any) -> GrammarSpec:
    properties = {"a": a, "b": b}
    return GrammarSpec.json_schema({"type": "object", "properties": properties, "required": ["a", "b"]})


@pytest.mark.parametrize("name", ["name", "title", "description", "default", "examples", "$comment", "readOnly"])
def test_properties_called_as_annotations_are_told_apart(vocabulary: TokenVocabulary, name: str) -> None:
    kinds = both(titled(name, "string"), titled(name, "integer"))
    assert takes(vocabulary, kinds, written({"a": {name: "x"}, "b": {name: 1}}))
    assert not takes(vocabulary, kinds, written({"a": {name: "x"}, "b": {name: "x"}}))
    inner = both({"items": titled(name, "string")}, {"items": titled(name, "integer")})
    assert takes(vocabulary, inner, written({"a": [{name: "x"}], "b": [{name: 1}]}))
    constants = both({"const": {name: 1}}, {"const": {name: 2}})
    assert takes(vocabulary, constants, written({"a": {name: 1}, "b": {name: 2}}))
    assert not takes(vocabulary, constants, written({"a": {name: 1}, "b": {name: 1}}))
    listed = both({"enum": [[{name: 1}], 3]}, {"enum": [[{name: 2}], 3]})
    assert takes(vocabulary, listed, written({"a": [{name: 1}], "b": [{name: 2}]}))
    assert not takes(vocabulary, listed, written({"a": 3, "b": [{name: 1}]}))


def test_names_that_look_like_more_are_told_apart(vocabulary: TokenVocabulary) -> None:
    constants = both({"const": {'x":1,"y': 2}}, {"const": {"x": 1, "y": 2}})
    assert takes(vocabulary, constants, written({"a": {'x":1,"y': 2}, "b": {"x": 1, "y": 2}}))


@pytest.mark.parametrize("text", ["éa", "Größe", "\xa00", "\x80f", "\u2028a", "中5", "😀a", "\x1fa", "ÿ", "a\x7fb"])
def test_letters_beside_digits_are_what_they_are(vocabulary: TokenVocabulary, text: str) -> None:
    for schema in ({"const": text}, {"enum": [text, 1]}, {"const": {text: [text]}}):
        spec = GrammarSpec.json_schema(schema)
        value = schema.get("const", text)
        assert takes(vocabulary, spec, written(value).replace("\x7f", r"\u007f"))
        assert not takes(vocabulary, spec, written("x"))
    tag = {"type": "sequence", "elements": [{"type": "const_string", "value": text}, {"type": "regex", "pattern": "a"}]}
    assert takes(vocabulary, GrammarSpec.structural_tag({"format": tag}), f"{text}a")


def test_each_schema_has_its_own_order(vocabulary: TokenVocabulary) -> None:
    kinds: list[dict[str, Any]] = [{name: {"type": "null"} for name in names} for names in ("xy", "yx", "xy")]
    spec = both({"properties": kinds[0], "required": ["x", "y"]}, {"properties": kinds[1], "required": ["x", "y"]})
    assert takes(vocabulary, spec, written({"a": dict.fromkeys("xy"), "b": dict.fromkeys("yx")}))
    assert not takes(vocabulary, spec, written({"a": dict.fromkeys("xy"), "b": dict.fromkeys("xy")}))


def test_a_count_of_names_that_the_library_would_let_come_twice_is_refused(vocabulary: TokenVocabulary) -> None:
    """Once the library keeps to this, it is to be served, and docs/guides/structured-output.md to say no more of it."""
    schema = {"additionalProperties": {"type": "integer"}, "minProperties": 2}
    with pytest.raises(InvalidRequest, match="'minProperties' of more than 1"):
        GrammarSpec.json_schema(schema)
    loose = {"additionalProperties": {"type": "integer"}, "minProperties": 1}
    assert takes(vocabulary, GrammarSpec.json_schema(loose), '{"c":3,"c":3}')


NAMES = ['a"b', "a\\b", "a", "ab", "\n", "\x01", "é", "éa", "😀", "title", "", "/", "\x7f", "{", '"', '":1,"']


@pytest.mark.parametrize("required", [[], NAMES])
def test_other_names_are_none_of_the_schemas_own(vocabulary: TokenVocabulary, required: list[str]) -> None:
    """Whatever characters they hold, and in escapes neither; what is no JSON is let in nowhere."""
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in NAMES}, "required": required}
    spec = GrammarSpec.json_schema({**schema, "additionalProperties": {"type": "string"}})
    matching = CompiledGrammarMatchers(_compile(vocabulary, spec.kind, spec.source), vocabulary)
    whole = dict.fromkeys(NAMES, 1)
    begun = written(whole).replace("\x7f", r"\u007f")[:-1] + ","  # as the library has them
    for name in [*NAMES, "b", 'a"', 'a"bc', "aa", "a\\", "\r", "e\u0301", "ö", "😁", "titl", "x" * 50]:
        assert complete(matching, begun + written(name) + ':"x"}') == (name not in NAMES), name
    for text in (begun + '"\\u0061":"x"}', begun + '"a"b":"x"}', begun + '"a\\":"x"}', begun + '"\\ud800":"x"}'):
        assert not complete(matching, text), text


def test_escapes_in_a_string_are_of_whole_characters(vocabulary: TokenVocabulary) -> None:
    matching = CompiledGrammarMatchers(_compile(vocabulary, GrammarKind.JSON_SCHEMA, '{"type":"string"}'), vocabulary)
    for text in ('"\\ud83d\\ude00"', '"\\uD7FF\\ue000"', '"\\u0000"', '"\\n\\/"', '"a"'):
        assert complete(matching, text), text
    for text in ('"\\ud800"', '"\\udc00"', '"\\ud83d\\ud83d"', '"\\uDBFFx"', '"\\x"'):
        assert not complete(matching, text), text


INTEGERS = {"type": "array", "items": {"type": "integer"}}
REFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty name": ({"$defs": {"": {"type": "integer"}}, "$ref": "#/$defs/"}, "1", '"x"'),
    "an escaped slash": ({"$defs": {"a/b": {"type": "integer"}}, "$ref": "#/$defs/a~1b"}, "1", '"x"'),
    "an escaped space": ({"$defs": {"a b": {"type": "integer"}}, "$ref": "#/$defs/a%20b"}, "1", '"x"'),
    "one of a list": ({"$defs": {"o": {"anyOf": [{"type": "null"}, INTEGERS]}}, "$ref": "#/$defs/o/anyOf/1"},
                      "[1]", "null"),
    "a reworded place": ({"type": "object", "properties": {"a": {"type": "string", "format": "date"},
                          "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
                         '{"a":"2023-04-30","b":"2023-04-30"}', '{"a":"2023-04-30","b":"2023-04-31"}'),
    "the whole": ({"type": "object", "properties": {"title": {"$ref": "#"}}}, '{"title":{"title":{}}}', '{"title":1}'),
    "a circle": ({"$defs": {"~/": {"type": "array", "items": {"$ref": "#/$defs/~0~1"}}}, "$ref": "#/$defs/~0~1"},
                 "[[],[[]]]", "[1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_references_lead_where_they_say(vocabulary: TokenVocabulary, name: str) -> None:
    schema, good, bad = REFERENCES[name]
    spec = GrammarSpec.json_schema(schema)
    assert takes(vocabulary, spec, good)
    assert not takes(vocabulary, spec, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"maxItems": 1}, "[]", ['"x"', "1", "{}", "[1,1]"]),
        ({"minItems": 1, "maxItems": 2, "items": {}}, "[1]", ['"x"', "{}", "[]", "[1,1,1]"]),
        ({"maxProperties": 1}, "{}", ['"x"', "1", "[]", '{"a":1,"b":1}']),
        ({"minProperties": 1, "additionalProperties": {}}, '{"a":1}', ['"x"', "[]", "{}"]),
        ({"required": []}, "{}", ['"x"', "[]"]),
    ],
)
def test_a_keyword_that_implies_a_type_makes_it_so(
    vocabulary: TokenVocabulary, schema: dict[str, Any], good: str, bad: list[str]
) -> None:
    spec = GrammarSpec.json_schema(schema)
    assert takes(vocabulary, spec, good)
    assert [text for text in bad if takes(vocabulary, spec, text)] == []


def is_text(given: bytes) -> bool:
    try:
        given.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_lengths_are_written_as_the_library_counts_them_at_once() -> None:
    """A class that leaves something out, a rule of its own, between its quotes: otherwise each token takes seconds."""

    def rules(**text: Any) -> str:
        spec = GrammarSpec.json_schema({"type": "object", "properties": {"text": {"type": "string", **text}}})
        return _library_rules(spec.kind, spec.source)

    title = rules(minLength=1, maxLength=200)
    assert '"\\"" root_prop_0_1_l0{1,200} "\\""' in title
    assert "\nroot_prop_0_1_l0 ::= [^" in title
    assert _COUNTED.search(title) is None
    assert _COUNTED.search(rules(format="uri", maxLength=2083)), "worked out as the text gets there"
