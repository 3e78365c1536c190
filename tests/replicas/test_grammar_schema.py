"""Work of a schema's check is bounded by what the schema holds: counted, not timed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.schema import keywords, references
from motley.replicas.grammar.schema.one_of import DisjointnessProof
from motley.replicas.grammar.schema.references import SchemaPath, SchemaReferences
from motley.replicas.grammar.schema.schema_check import MAX_PATTERNS, _walk_schemas, check_schema
from motley.replicas.text.chat.tool_definitions import MAX_CHARS, MAX_VALUES, check_tools

KEYWORDS = sorted(keywords.KEYWORDS | keywords.ANNOTATION_KEYWORDS | {"x-own", "not"})
WORDS = ("string", "object", "array", "date", "#", "#/properties", "#/$defs/a", "", r"\u{110000}", "[^]", "a")


def _of_type(name: str, inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A schema with keywords of its type, whatever they are given."""
    allowed = st.sampled_from((*keywords.TYPE_KEYWORDS[name], "title"))
    return st.dictionaries(allowed, inner, max_size=3).map(lambda given: {"type": name, **given})


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS) | st.sampled_from(WORDS), inner, max_size=4)
        | st.sampled_from(sorted(keywords.TYPE_KEYWORDS)).flatmap(lambda name: _of_type(name, inner))
    ),
    max_leaves=12,
)
FIELD = "response_format.json_schema.schema"


class Counted(dict[SchemaPath, Any]):
    """Schemas that count how often one is looked up."""

    looked_up = 0

    def __getitem__(self, place: SchemaPath) -> Any:
        self.looked_up += 1
        return super().__getitem__(place)


def chain(links: int, refs: int) -> dict[str, Any]:
    """So many references to the first of a chain of definitions."""
    defs: dict[str, Any] = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(links)}
    return {"$defs": defs | {f"{links}": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/0"}] * refs}


def counted(schema: dict[str, Any]) -> Counted:
    return Counted({("$defs", name): inner for name, inner in schema["$defs"].items()})


@pytest.mark.parametrize(("links", "refs"), [(1, 1), (300, 1), (300, 300), (1000, 1200)])
def test_each_link_of_a_chain_is_followed_once(links: int, refs: int) -> None:
    schema = chain(links, refs)
    assert check_schema(schema, FIELD) == schema
    schemas = counted(schema)
    references = SchemaReferences(schemas)
    for _ in range(refs):
        references.check("#/$defs/0")
    assert schemas.looked_up == links + 1


def test_a_chain_that_joins_a_known_one_ends_there() -> None:
    schemas = counted(chain(100, 1))
    schemas["$defs", "other"] = {"$ref": "#/$defs/50"}
    references = SchemaReferences(schemas)
    references.check("#/$defs/0")
    references.check("#/$defs/other")
    assert schemas.looked_up == 102


@pytest.mark.parametrize("start", ["#/$defs/a", "#/$defs/b", "#/$defs/c"])
def test_a_circle_is_found_wherever_it_is_entered(start: str) -> None:
    defs = {"end": {}, "a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}}
    with pytest.raises(InvalidRequest, match="leads back to itself"):
        check_schema({"anyOf": [{"$ref": "#/$defs/end"}, {"$ref": start}], "$defs": defs}, FIELD)


def test_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_STEPS", 20)
    check_schema(chain(9, 30), FIELD)
    with pytest.raises(InvalidRequest, match="takes too long") as caught:
        check_schema(chain(10, 1), FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "grammar_too_complex")


INTEGER = {"type": "integer"}
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "a name with a space, escaped": ({"$defs": {"a b": INTEGER}}, "#/$defs/a%20b"),
    "a name with a space": ({"$defs": {"a b": INTEGER}}, "#/$defs/a b"),
    "a name with a slash": ({"$defs": {"a/b": INTEGER}}, "#/$defs/a~1b"),
    "a name with a tilde": ({"$defs": {"~1": INTEGER}}, "#/$defs/~01"),
    "a name with a tilde, escaped twice": ({"$defs": {"~": INTEGER}}, "#/$defs/%7E0"),
    "a name of other letters": ({"definitions": {"größe": INTEGER}}, "#/definitions/gr%C3%B6%C3%9Fe"),
    "a name with a percent sign": ({"$defs": {"50%": INTEGER}}, "#/$defs/50%25"),
    "no name": ({"$defs": {"": INTEGER}}, "#/$defs/"),
    "a property": ({"$defs": {"o": {"properties": {"a": INTEGER}}}}, "#/$defs/o/properties/a"),
    "one of a list": ({"$defs": {"l": {"anyOf": [{"type": "null"}, INTEGER]}}}, "#/$defs/l/anyOf/1"),
    "additional properties": ({"$defs": {"o": {"additionalProperties": INTEGER}}}, "#/$defs/o/additionalProperties"),
    "inner definitions": ({"$defs": {"o": {"$defs": {"o": INTEGER}, "type": "null"}}}, "#/$defs/o/$defs/o"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_reference_is_a_json_pointer(name: str) -> None:
    """And becomes one that the library reads too."""
    given, target = PLACES[name]
    assert check_schema({**given, "$ref": target}, FIELD) == {"$ref": "#/$defs/0", "$defs": {"0": INTEGER}}


def test_a_property_may_be_that_of_another() -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"a": either, "b": {"$ref": "#/properties/a/anyOf/0"}}}
    said = check_schema(schema, FIELD)
    assert said["properties"] == {"a": either, "b": {"$ref": "#/$defs/0"}}
    assert said["$defs"] == {"0": {"type": "string"}}


NO_SCHEMAS = {"type": "array", "minItems": 1, "items": INTEGER, "x-own": INTEGER, "default": INTEGER, "title": "t"}
NO_SCHEMAS |= {"example": INTEGER, "examples": [INTEGER], "discriminator": INTEGER, "$comment": "c"}


@pytest.mark.parametrize(
    "target",
    [
        *(f"#/{name}" for name in NO_SCHEMAS if name != "items"),
        "#/examples/0",
        "#/",
        "#/prefixItems/0",
        "#/$defs",
        "#/items/",
    ],
)
def test_a_reference_leads_to_a_schema_that_is_checked(target: str) -> None:
    """A value elsewhere is no schema, or nobody has looked whether it can be enforced."""
    with pytest.raises(InvalidRequest) as caught:
        check_schema({**NO_SCHEMAS, "$defs": {"a": {"$ref": target}}}, FIELD)
    assert caught.value.message == f"{FIELD}: #/$defs/a/$ref: no schema stands at {target!r}"


@pytest.mark.parametrize("target", ["other.json", "other.json#/a", "#a", "/$defs/a", "", 7, None, "#/%FF"])
def test_a_reference_that_is_no_pointer_is_refused(target: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"#/\$ref: "):
        check_schema({"$ref": target, "$defs": {"a": {}}}, FIELD)


def test_what_the_library_does_not_read_is_not_handed_on() -> None:
    noise = dict.fromkeys(("title", "description", "$comment", "x-own", "default", "example", "deprecated"), "x")
    schema = {"type": "array", "items": {"type": "integer", **noise}, **noise, "$defs": {"unused": INTEGER}}
    assert check_schema(schema, FIELD) == {"type": "array", "items": INTEGER}


def test_places_within_places_are_said_once_each() -> None:
    """Whoever refers to every schema of a deep one asks for all of them again, and gets the same ones."""
    deep: dict[str, Any] = INTEGER
    for _ in range(30):
        deep = {"type": "array", "items": deep}
    refs = [{"$ref": "#/$defs/a" + "/items" * depth} for depth in range(31)]
    said = check_schema({"$defs": {"a": deep}, "anyOf": refs}, FIELD)["$defs"]
    for depth in range(30):
        assert said[f"{depth}"]["items"] is said[f"{depth + 1}"]


def test_each_value_is_held_to_each_type_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(keywords, "has_type", lambda value, name: asked.append(name) or name == "integer")
    check_schema({"type": ["null"] * 500 + ["integer"] * 500, "enum": [0] * 500}, FIELD)
    assert len(asked) == 2 * 500


def test_patterns_have_a_limit_together() -> None:
    half = {"type": "string", "pattern": "a" * (MAX_PATTERNS // 2)}
    check_schema({"anyOf": [half, half]}, FIELD)
    with pytest.raises(InvalidRequest, match="patterns of at most") as caught:
        check_schema({"anyOf": [half, half, {"type": "string", "pattern": "a"}]}, FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "grammar_too_complex")


@pytest.mark.slow("500 drawn values of any shape are checked as schemas")
@given(schema=ANYTHING)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_what_is_no_schema_is_refused_and_breaks_nothing(schema: Any) -> None:
    with suppress(InvalidRequest):
        check_schema(schema, FIELD)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "format": []}, "#/format: expected a string"),
        ({"type": "string", "format": {}}, "#/format: expected a string"),
        ({"allOf": True}, "#/allOf: expected a list"),
        ({"items": {"oneOf": 7}}, "#/items/oneOf: expected a list"),
        ({"properties": 5, "required": ["a"]}, "#/properties: expected an object"),
        ({"type": "string", "pattern": r"\u{80000000}"}, r"#/pattern: \u{80000000} is not supported"),
        ({"type": "string", "pattern": r"\u{110000}"}, r"#/pattern: \u{110000} is not supported"),
        ({"type": "string", "pattern": r"[a-\u{110000}]"}, r"#/pattern: \u{110000} is not supported"),
    ],
)
def test_a_keyword_of_another_type_is_refused_by_name(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema, FIELD)
    assert caught.value.message.startswith(f"{FIELD}: {said}")
    assert (caught.value.param, caught.value.code) == (FIELD, "invalid_grammar")


@pytest.mark.parametrize("pattern", [r"\u{" + "0" * 9999 + "d800}", r"[\u{" + "f" * 9999 + "}]"])
def test_a_long_piece_of_a_pattern_is_not_quoted_whole(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"type": "string", "pattern": pattern}, FIELD)
    assert len(caught.value.message) < 300


def test_a_value_that_is_too_deep_to_show_is_refused() -> None:
    value: Any = 0
    for _ in range(20_000):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        check_schema({"type": "string", "const": value}, FIELD)


@pytest.mark.parametrize(
    ("schema", "least"),
    [
        ({"properties": {}, "minProperties": 1}, "minProperties"),
        ({"type": ["object", "null"], "properties": {"a": {}}, "minProperties": 2}, "minProperties"),
        ({"minProperties": 1, "additionalProperties": False}, "minProperties"),
        ({"minItems": 1, "items": False}, "minItems"),
        ({"prefixItems": [{}], "minItems": 2, "items": False}, "minItems"),
    ],
)
def test_more_than_is_let_in_is_refused(schema: Any, least: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{least}' is {schema[least]}, but the schema describes") as caught:
        check_schema(schema, FIELD)
    assert (caught.value.param, caught.value.code) == (FIELD, "invalid_grammar")
    check_schema({**schema, least: schema[least] - 1}, FIELD)
    if least == "minItems":
        check_schema({**schema, "items": True}, FIELD)
    else:
        more = {"additionalProperties": True, "required": list(schema.get("properties", ()))}
        check_schema({**schema, **more}, FIELD)
        with pytest.raises(InvalidRequest, match="that names differ which the schema does not list cannot be kept to"):
            check_schema({**schema, **more, least: schema[least] + 1}, FIELD)


def test_a_place_that_is_told_is_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"properties": {"long" * 5000: {"not": {}}}}, FIELD)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"enum": [0] * (MAX_VALUES // 4)}, "names and values"),
        ({"description": "d" * (MAX_CHARS // 4)}, "characters"),
        ({"properties": {"p" * (MAX_CHARS // 4): {}}}, "characters"),
    ],
    ids=["values", "texts", "names"],
)
def test_tools_have_a_limit_together(parameters: dict[str, Any], words: str) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(5)]
    check_tools(tools[:3])
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_tools(tools)
    assert (caught.value.param, caught.value.code) == ("tools", "grammar_too_complex")


def test_descriptions_of_tools_count_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * (MAX_CHARS + 1)}}
    with pytest.raises(InvalidRequest, match="characters"):
        check_tools([tool])


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def tagged(number: int) -> dict[str, Any]:
    tags = {"version": {"const": 1}, "kind": {"const": f"k{number}"}}
    return {"type": "object", "properties": {**tags, "text": TEXT}, "required": ["kind", "version", "text"]}


def by_two_tags(number: int) -> dict[str, Any]:
    tags = {"a": {"const": number % 10}, "b": {"enum": [number // 10, f"{number // 10}"]}}
    return {"type": "object", "properties": tags, "required": ["a", "b"]}


def many(name: str, count: int) -> dict[str, Any]:
    match name:
        case "tagged":
            return {"oneOf": [tagged(number) for number in range(count)]}
        case "referred to":
            members = [{"$ref": f"#/$defs/{number}"} for number in range(count)]
            definitions = {f"{number}": tagged(number) for number in range(count)}
            return {"oneOf": members, "$defs": definitions, "discriminator": {"propertyName": "kind"}}
        case "two tags":
            return {"oneOf": [by_two_tags(number) for number in range(count)]}
        case "of unions":
            halves = [tagged(number) for number in range(count)]
            return {"oneOf": [{"oneOf": halves[::2]}, {"anyOf": halves[1::2]}, {"type": "null"}]}
    return {"oneOf": [{"const": (number, f"{number}")[number % 2], "title": f"t{number}"} for number in range(count)]}


@pytest.mark.parametrize("name", ["tagged", "referred to", "two tags", "of unions", "constants"])
def test_many_schemas_are_told_apart_in_as_many_steps(name: str) -> None:
    for count in (60, 120, 150, 700):
        check_schema(many(name, count), FIELD)
    looked_up = []
    for count in (200, 800):
        schemas = Counted({place: node for node, place, _ in _walk_schemas(many(name, count), (), 0)})
        DisjointnessProof(schemas, SchemaReferences(schemas)).check(())
        looked_up.append(schemas.looked_up)
    assert looked_up[1] < 5 * looked_up[0] + 100


@pytest.mark.parametrize("name", ["tagged", "referred to", "two tags", "constants"])
def test_one_that_comes_twice_among_many_is_told(name: str) -> None:
    schema = many(name, 300)
    schema["oneOf"].append(schema["oneOf"][7])
    with pytest.raises(InvalidRequest, match=r"a value of schema (7|300) may be one of schema (7|300) as well"):
        check_schema(schema, FIELD)


def test_an_integer_is_no_boolean_and_a_whole_number_is_one() -> None:
    check_schema({"oneOf": [{"const": 1}, {"const": True}, {"const": 0}, {"type": "null"}, {"const": "1"}]}, FIELD)
    for one, other in ((1, 1.0), ([1], [1.0]), ({"a": 1, "b": 2}, {"b": 2.0, "a": 1})):
        with pytest.raises(InvalidRequest, match="may be one of"):
            check_schema({"oneOf": [{"const": one}, {"const": other}]}, FIELD)


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


TOLD_APART: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({**INTEGER, "exclusiveMaximum": 0}, {**INTEGER, "minimum": 0}, True),
    ({**INTEGER, "maximum": 0}, {**INTEGER, "exclusiveMinimum": 0}, True),
    ({**INTEGER, "exclusiveMaximum": 1}, {**INTEGER, "exclusiveMinimum": 0}, True),
    ({**INTEGER, "exclusiveMaximum": 1}, {"type": "number", "exclusiveMinimum": 0}, True),
    ({"type": "number", "exclusiveMaximum": 1}, {"type": "number", "exclusiveMinimum": 0}, False),
    ({"type": "number", "exclusiveMaximum": 1}, {"type": "number", "exclusiveMinimum": 1}, True),
    ({"type": "number", "maximum": 1}, {"type": "number", "minimum": 1}, False),
    ({**INTEGER, "maximum": 0}, {**INTEGER, "minimum": 0}, False),
    ({"const": 5}, {**INTEGER, "minimum": 7}, True),
    ({"const": 7}, {**INTEGER, "minimum": 7}, False),
    ({"const": 7}, {"type": "number", "exclusiveMinimum": 7}, True),
    ({"const": True}, {**INTEGER, "minimum": 7}, True),
    ({"const": "abc"}, {**TEXT, "maxLength": 2}, True),
    ({"const": "ab"}, {**TEXT, "maxLength": 2}, False),
    ({"enum": ["a", 9]}, {"type": ["string", "integer"], "minLength": 2, "maximum": 8}, True),
    ({"const": [1]}, array(minItems=2, items=INTEGER), True),
    ({"const": [1, "a"]}, array(items=INTEGER), True),
    (array(items=INTEGER, minItems=1), array(items=TEXT, minItems=1), True),
    (array(items=INTEGER, minItems=1), array(items=TEXT), True),
    (array(items=INTEGER), array(items=TEXT), False),
    (array(prefixItems=[INTEGER], items=TEXT, minItems=2), array(items=INTEGER), True),
    (array(prefixItems=[INTEGER], items=TEXT, minItems=1), array(items=INTEGER), False),
]


@pytest.mark.parametrize(("one", "other", "apart"), TOLD_APART)
def test_bounds_lengths_and_items_tell_schemas_apart(one: dict[str, Any], other: dict[str, Any], apart: bool) -> None:
    for pair in ([one, other], [other, one]):
        if apart:
            check_schema({"oneOf": pair}, FIELD)
        else:
            with pytest.raises(InvalidRequest, match="may be one of"):
                check_schema({"oneOf": pair}, FIELD)


@pytest.mark.parametrize(
    ("items", "most", "lists"),
    [
        ({**INTEGER, "minimum": 1, "maximum": 3}, 3, 16),
        ({**INTEGER, "exclusiveMinimum": 0.5, "maximum": 6, "multipleOf": 2}, 3, 16),
        ({**INTEGER, "minimum": 1, "maximum": 8}, 8, 2**8),
        ({**INTEGER, "minimum": 1, "maximum": 40}, 2, 1 + 40 + 40 * 39 // 2),
    ],
)
def test_lists_of_few_integers_none_twice_are_named(items: dict[str, Any], most: int, lists: int) -> None:
    schema = array(items=items, uniqueItems=True, maxItems=most)
    found = check_schema(schema, FIELD)["enum"]
    assert len(found) == lists == len(set(map(tuple, found)))
    valid = jsonschema_rs.Draft202012Validator(schema).is_valid
    assert all(map(valid, found))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (array(minItems=2), array(minItems=2, items=True)),
        (array(maxItems=2), array(maxItems=2, items=True)),
        ({"minItems": 1}, array(minItems=1, items=True)),
        ({"type": ["array", "null"], "minItems": 1}, {"anyOf": [array(minItems=1, items=True), {"type": "null"}]}),
        (array(prefixItems=[INTEGER, TEXT], maxItems=1), array(prefixItems=[INTEGER], maxItems=1)),
        (array(prefixItems=[INTEGER], maxItems=0, items=TEXT), array(maxItems=0, items=TEXT)),
    ],
)
def test_lengths_of_lists_are_what_json_schema_says(schema: dict[str, Any], words: dict[str, Any]) -> None:
    assert check_schema(schema, FIELD) == words
    xgrammar.Grammar.from_json_schema(json.dumps(words), any_whitespace=False)


@pytest.mark.parametrize("bounds", [{"minimum": 1}, {"minimum": 1, "maximum": 11}, {"minimum": 0, "maximum": 2**40}])
def test_lists_of_many_integers_none_twice_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="'uniqueItems' is supported for"):
        check_schema(array(items={**INTEGER, **bounds}, uniqueItems=True), FIELD)


def test_lists_of_anything_none_twice_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'uniqueItems' is supported for"):
        check_schema(array(maxItems=3, uniqueItems=True), FIELD)


BASIC: list[Any] = [None, False, True, 0, 1, 2, 3, -1, 0.5, 1.0, 1.5, "", "a", "b", "ab", "abc"]


def some_values(depth: int) -> Iterator[Any]:
    yield from BASIC
    inner = BASIC if depth == 0 else [*BASIC[1:14:3], [], [1], {"a": 1}]
    for count in range(3):
        yield from map(list, itertools.product(inner, repeat=count))
    yield from ({name: value} for name in "ab" for value in inner)
    yield from ({"a": one, "b": other} for one in inner for other in inner)


VALUES = list({repr(value): value for depth in (0, 1) for value in some_values(depth)}.values())


def drawn(draw: random.Random, depth: int) -> Any:
    """A schema whose objects have no other properties, so that what is written is what is valid."""
    within = [drawn(draw, depth - 1) for _ in range(2)] if depth else [INTEGER, TEXT]
    number = {key: draw.choice([-1, 0, 0.5, 1, 2]) for key in keywords.NUMBER_BOUNDS if draw.random() < 0.3}
    size = {key: draw.randrange(3) for key in ("min", "max") if draw.random() < 0.5}
    names = draw.sample("ab", draw.randrange(3))
    needed = [name for name in names if draw.random() < 0.7]
    properties = dict(zip(names, within, strict=False))
    choices: list[Any] = [
        {"type": draw.choice(["integer", "number"]), **number},
        {"type": draw.choice(["string", ["string", "null"]]), **{f"{key}Length": value for key, value in size.items()}},
        array(items=within[0], **{f"{key}Items": value for key, value in size.items()}),
        array(prefixItems=[within[0]], items=within[1], **{f"{key}Items": value for key, value in size.items()}),
        {"type": "object", "properties": properties, "required": needed, "additionalProperties": False},
        {"type": draw.choice(["boolean", "null"])},
        {"const": draw.choice(VALUES)},
        {"enum": draw.sample(BASIC, draw.randrange(1, 4))},
        {"anyOf": within},
        {"allOf": within[:1]},
        {"$ref": f"#/$defs/{draw.randrange(2)}"},
    ]
    return draw.choice(choices)


@pytest.mark.slow("2500 drawn schemas; whichever is accepted is tried with every value")
def test_schemas_that_are_told_apart_have_no_value_in_common() -> None:
    draw = random.Random(5)
    accepted = 0
    for _ in range(2500):
        options = [drawn(draw, 2) for _ in range(draw.randrange(2, 4))]
        definitions = {"0": drawn(draw, 0), "1": {"type": "object", "properties": {"a": {"const": 1}}}}
        definitions["0"] = {"enum": ["a", 1]} if "$ref" in definitions["0"] else definitions["0"]
        definitions["1"] |= {"required": ["a"], "additionalProperties": False}
        try:
            check_schema({"oneOf": options, "$defs": definitions}, FIELD)
        except InvalidRequest:
            continue
        accepted += 1
        readers = [jsonschema_rs.Draft202012Validator({"allOf": [each], "$defs": definitions}) for each in options]
        for value in VALUES:
            assert sum(reader.is_valid(value) for reader in readers) <= 1, (value, options, definitions)
    assert accepted > 600
