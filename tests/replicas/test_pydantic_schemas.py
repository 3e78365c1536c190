"""Schemas of pydantic's models, as people write them: taken as they are, and what follows them is what they take."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import random
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import jsonschema
import numpy as np
import pydantic
import pytest
import typing_extensions
import xgrammar
from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    TypeAdapter,
    confloat,
    conint,
    conlist,
    constr,
)

from motley.replicas.errors import InvalidRequest
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.process.grammar_worker import (
    CompiledGrammarMatchers,
    GrammarRefused,
    TokenVocabulary,
    _compile,
)
from motley.replicas.host.child_frames import GrammarReply

END = 256
MOST = 400  # bytes, behind which a text is brought to an end


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    tokens = [bytes([value]) for value in range(END)]
    info = xgrammar.TokenizerInfo([*tokens, b"<end>"], xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return TokenVocabulary(tokens=tokens, plain=info, json=info, vocab_size=END + 1, stop_ids=(END,))


def texts(vocabulary: TokenVocabulary, schema: Any, count: int) -> list[str]:
    """Some that follow it, drawn byte by byte; few have much white space, and all end."""
    spec = GrammarSpec.json_schema(schema)
    matching = CompiledGrammarMatchers(_compile(vocabulary, spec.kind, spec.source), vocabulary)
    drawn = [_text(matching, random.Random(seed), seed) for seed in range(count)]
    return [text for text in drawn if text is not None]


def _text(matching: CompiledGrammarMatchers, draw: random.Random, sequence: int) -> str | None:
    said: list[int] = []
    while len(said) < 10 * MOST:
        answer, mask = matching.take(sequence, said[-1:], new=not said)
        if answer is GrammarReply.DONE:
            break
        assert answer is GrammarReply.MASK, bytes(said)
        able = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little").nonzero()[0].tolist()
        if END in able and (len(able) == 1 or draw.random() < 0.5):
            break
        able = [token for token in able if token < END]
        said.append(draw.choices(able, [_weight(token, len(said) > MOST) for token in able])[0])
    else:
        return None
    matching.close(sequence)
    return bytes(said).decode()


def _weight(token: int, late: bool) -> float:
    char = chr(token)
    if char in '"}]':
        return 1e6 if late else 6
    return 0.02 if char in " \t\n\r" else 3 if char.isalnum() else 0.3 if token < 0x80 else 0.05


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    S = 1
    L = 3


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=0, le=9)  # type: ignore[valid-type]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = Field(None, max_length=5)


class Bird(BaseModel):
    kind: Literal["bird", "parrot"]
    model_config = ConfigDict(extra="forbid")


Pet = Annotated[Union[Cat, Dog, Bird], Field(discriminator="kind")]  # noqa: UP007  # as people write it


class Owner(BaseModel):
    """A person and their pets."""

    pet: Pet
    others: list[Pet] = Field(default_factory=list, max_length=2)


class Node(BaseModel):
    value: int
    children: list[Node] = Field(default_factory=list, max_length=2)


class Add(BaseModel):
    op: Literal["add"]
    left: Expression
    right: Expression


class Number(BaseModel):
    op: Literal["number"]
    value: float


Expression = Annotated[Union[Add, Number], Field(discriminator="op")]  # noqa: UP007


class Root(BaseModel):
    expression: Expression


class Left(BaseModel):
    """Its tag has a default, and nothing of it is required."""

    kind: Literal["left"] = "left"
    size: int = 0


class Right(BaseModel):
    kind: Literal["right"] = "right"
    size: int = 0


class Up(BaseModel):
    kind: Literal["up"] = "up"
    way: Literal["steps"] = "steps"


class Lift(BaseModel):
    kind: Literal["up"] = "up"
    way: Literal["lift", "crane"] = "lift"
    next: Move | None = None


Side = Annotated[Union[Left, Right], Field(discriminator="kind")]  # noqa: UP007
Rise = Annotated[Union[Up, Lift], Field(discriminator="way")]  # noqa: UP007
Move = Annotated[Union[Side, Rise], Field(discriminator="kind")]  # noqa: UP007


class Moves(BaseModel):
    first: Move
    side: Side | None = None
    more: list[Side] = Field(default_factory=list, max_length=2)
    named: dict[Literal["a", "b"], Rise] = Field(default_factory=dict)


class Typed(typing_extensions.TypedDict):
    name: str
    size: int


class Point(NamedTuple):
    x: int
    y: float


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=2)
    final_answer: str = Field(description="What came out", examples=["x = 3"])


class Everything(BaseModel):
    model_config = ConfigDict(title="All kinds", extra="forbid", json_schema_extra={"examples": [{"id": 1}]})
    id: PositiveInt = Field(alias="Id")
    slug: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", min_length=3, max_length=20)]
    tags: set[Colour]
    made: datetime.datetime
    score: Annotated[float, Field(ge=0, le=1)] | None = None
    pet: Pet | None = None


KINDS: dict[str, Any] = {
    "discriminated union": Owner,
    "tags with defaults": Side,
    "optional union of tags with defaults": Optional[Side],  # noqa: UP045
    "list of tags with defaults": list[Side],
    "unions within a union": Move,
    "unions in all places": Moves,
    "recursive": Node,
    "recursive union": Root,
    "everything": Everything,
    "reasoning": Reasoning,
    "optional model": Optional[Cat],  # noqa: UP045
    "model or null": Cat | None,
    "union of models": Union[Cat, Dog],  # noqa: UP007
    "list of models": list[Cat],
    "typed dict": Typed,
    "named tuple": Point,
    "literal": Literal["a", 2, True, None],
    "enum": Colour,
    "int enum": Size,
    "set of enum": set[Colour],
    "set of literals": frozenset[Literal["a", "b", "c", "d", "e", "f", "g"]],
    "set of booleans": set[bool],
    "set of one": Annotated[set[str], Field(max_length=1)],
    "tuple": tuple[int, str, Colour],
    "tuple of any length": tuple[int, ...],
    "list with bounds": conlist(int, min_length=2, max_length=4),
    "dict": dict[str, int],
    "dict of literals": dict[Literal["a", "b"], int],
    "dict of enum": dict[Colour, float],
    "dict of patterns": dict[Annotated[str, Field(pattern="^x-[a-z]{1,3}$")], bool],
    "dict of uuids": dict[uuid.UUID, int],
    "dict of lists": dict[str, list[Cat]],
    "decimal": Decimal,
    "decimal with bounds": Annotated[Decimal, Field(gt=0, le=100)],
    "datetime": datetime.datetime,
    "aware datetime": AwareDatetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "uuid4": UUID4,
    "url": HttpUrl,
    "any url": AnyUrl,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "secret": SecretStr,
    "bytes": bytes,
    "constrained string": constr(pattern=r"^[A-Z]{2}\d{4}$", min_length=6, max_length=6),
    "half a pattern": constr(pattern=r"^[A-Z]"),
    "string with lengths": constr(min_length=2, max_length=4),
    "constrained integer": conint(ge=0, le=100, multiple_of=5),
    "multiple": conint(multiple_of=5),
    "integer between": conint(gt=-3, lt=1000),
    "constrained float": confloat(gt=0, lt=1),
    "positive": NonNegativeInt,
    "scalars": int | str | bool | None,
    "any": Any,
}


LESS = ("any url", "decimal", "decimal with bounds")  # of these pydantic takes less than its schema says


@pytest.mark.parametrize("name", KINDS)
def test_what_follows_a_models_schema_is_one_of_it(vocabulary: TokenVocabulary, name: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(KINDS[name])
    schema = adapter.json_schema()
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    found = texts(vocabulary, schema, 8)
    assert len(found) > 5
    for text in found:
        validator.validate(json.loads(text))
        if name not in LESS:
            adapter.validate_json(text)


class Circle(BaseModel):
    radius: float


class Disc(BaseModel):
    radius: float
    filled: bool = False


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (set[str], "'uniqueItems' is supported for lists of at most one item"),
        (set[int], "'uniqueItems'"),
        (conint(ge=0, multiple_of=5), "'multipleOf' beside bounds"),
        (conint(ge=1, le=4, multiple_of=5), "no multiple of 5"),
        (Annotated[float, Field(multiple_of=0.5)], "'multipleOf' is not supported for type number"),
        (pydantic.Base64UrlStr | ipaddress.IPv4Network, "format 'ipv4network'"),
        (dict[str, Annotated[str, Field(pattern=r"a\b")]], "word boundary"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(kind: Any, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GrammarSpec.json_schema(TypeAdapter(kind).json_schema())
    assert why in refused.value.message


def one_of(*kinds: Any) -> dict[str, Any]:
    """Definitions of its members at the top, where their references lead."""
    members = [kind if isinstance(kind, dict) else TypeAdapter(kind).json_schema() for kind in kinds]
    definitions = {name: inner for each in members for name, inner in each.pop("$defs", {}).items()}
    return {"oneOf": members, "$defs": definitions}


APART: list[tuple[Any, Any, bool]] = [
    (Cat, Dog, True),
    (Cat, Bird, True),
    (Circle, Disc, False),  # what has no `filled` is one of both
    (Circle, Cat, True),  # each requires what the other is never written with
    (int, str, True),
    (int, float, False),
    (Colour, Literal["green"], True),
    (Colour, str, False),
    (Colour, Literal["red"], False),
    (Literal[1], Literal[True], True),
    (Literal[1], {"const": 1.0}, False),
    (constr(max_length=2), constr(min_length=3), True),
    (constr(max_length=3), constr(min_length=3), False),
    (conint(le=4), confloat(ge=5), True),
    ({"type": "string"}, {"properties": {"a": {}}, "required": ["a"]}, False),  # a string has none to fail by
    ({"properties": {"a": {"const": 1}}, "type": "object"}, {"properties": {"a": {"const": 2}}}, False),
    ({"type": "object", "additionalProperties": True}, Cat, False),
    (list[int], list[str], False),  # [] is one of both
    (tuple[Literal["a"], int], tuple[Literal["b"], int], True),
    ({"const": {"kind": "cat", "lives": 3}}, Cat, False),
    ({"const": {"kind": "dog"}}, Cat, True),
    (Cat | None, Dog, True),
    (Cat | None, Dog | None, False),
    ({}, str, False),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "apart"), APART)
def test_schemas_of_one_of_are_told_apart(vocabulary: TokenVocabulary, one: Any, other: Any, apart: bool) -> None:
    """In either order; and what is written under them is one of exactly one."""
    for schema in (one_of(one, other), one_of(other, one)):
        if not apart:
            with pytest.raises(InvalidRequest, match="may be one of schema"):
                GrammarSpec.json_schema(schema)
            continue
        for text in texts(vocabulary, schema, 6):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def tagged(*kinds: Any, name: Any = "kind", keyword: str = "oneOf", **more: Any) -> dict[str, Any]:
    schema = one_of(*kinds)
    return {keyword: schema["oneOf"], "$defs": schema["$defs"], "discriminator": {"propertyName": name}, **more}


def has_kind(*values: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"enum": list(values)}, "x": {"type": "integer"}}, **more}


CLOSED = {"additionalProperties": False}
LEFT, RIGHT = has_kind("a", "b", **CLOSED), has_kind("c", **CLOSED)
VALUES = [
    {key: value for key, value in (("kind", kind), ("x", x)) if value is not None}
    for kind in ("a", "b", "c", "d", 1, None)
    for x in (1, "1", None)
]  # fmt: skip
TAGGED = {
    "two": tagged(LEFT, RIGHT),
    "anyOf": tagged(LEFT, RIGHT, keyword="anyOf"),
    "by reference": {
        "oneOf": [{"$ref": "#/$defs/l"}, {"allOf": [{"$ref": "#/$defs/r"}]}],
        "$defs": {"l": LEFT, "r": {"$ref": "#/$defs/s"}, "s": RIGHT},
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/l", "c": "#/$defs/r"}},
    },
    "a union within": tagged({"anyOf": [has_kind("a", **CLOSED), has_kind("b", **CLOSED)]}, RIGHT),
    "numbers": tagged(has_kind(1, **CLOSED), RIGHT),
    "one requires it": tagged({**LEFT, "required": ["kind"]}, RIGHT),
    "open": tagged(has_kind("a"), has_kind("c", additionalProperties=True)),
}


@pytest.mark.parametrize("name", TAGGED)
def test_tags_that_are_not_required_are_written(vocabulary: TokenVocabulary, name: str) -> None:
    """A value with its tag is taken just where the schema takes it, and one without is not written."""
    schema = TAGGED[name]
    validator = jsonschema.Draft202012Validator(schema)
    spec = GrammarSpec.json_schema(schema)
    for value in VALUES:
        assert takes(vocabulary, spec, value) == ("kind" in value and validator.is_valid(value)), value


@pytest.mark.parametrize(
    "schema",
    [
        tagged(LEFT, has_kind("b", "c", **CLOSED)),  # "b" is one of both
        tagged(LEFT, has_kind("c", **CLOSED), name="x"),  # 1 is one of both
        tagged(LEFT, RIGHT, name=["kind"]),
        tagged(LEFT, {"type": "object", "properties": {"x": {"type": "integer"}}}),  # has no tag to write
        tagged(LEFT, has_kind("c", maxProperties=0)),
        {**tagged(LEFT, RIGHT), "discriminator": "kind"},
    ],
)
def test_a_tag_that_tells_nothing_apart_is_no_help(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="may be one of schema"):
        GrammarSpec.json_schema(schema)


def test_the_members_of_unions_are_not_looked_at_for_ever() -> None:
    members = [{"oneOf": [{"$ref": "#/$defs/all"}], "discriminator": {"propertyName": f"p{i}"}} for i in range(150)]
    schema = {"anyOf": members, "$defs": {"all": {"anyOf": [{"type": "null"}] * 150}}}
    with pytest.raises(InvalidRequest, match="'discriminator' takes too long") as refused:
        GrammarSpec.json_schema(schema)
    assert refused.value.code == "grammar_too_complex"


def takes(vocabulary: TokenVocabulary, spec: GrammarSpec, value: Any) -> bool:
    """Whether the value's JSON may be written, its names in the schema's order."""
    matching = CompiledGrammarMatchers(_compile(vocabulary, spec.kind, spec.source), vocabulary)
    answer, mask = matching.take(0, list(json.dumps(value).encode()), new=True)
    return answer is GrammarReply.DONE or (answer is GrammarReply.MASK and bool(mask[END // 8] >> END % 8 & 1))


TEXT = {"type": "string"}
TOGETHER: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"maxLength": 2}},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "minProperties": 1},
    {"propertyNames": {"enum": ["a", "b", "c"]}, "minProperties": 2},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": False},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"properties": {"a": False, "b": TEXT}, "required": ["b"]},
    {"properties": {"a": False}, "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"properties": {"a": TEXT}, "required": ["a"], "additionalProperties": {"type": "null"}, "minProperties": 2},
    {
        "type": "array",
        "prefixItems": [TEXT, {"type": "null"}],
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 4,
    },
    {"type": ["array", "string"], "items": {"type": "null"}, "maxItems": 2, "maxLength": 3},
    {"type": ["string", "integer"], "minLength": 2, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 2.5, "minimum": 0, "maximum": 7, "exclusiveMaximum": 7},
    {"type": "string", "format": "int32", "maxLength": 3},
    {"allOf": [{"type": "object", "properties": {"a": TEXT}}]},
    {"enum": ["a", 1, None], "type": ["string", "integer", "null"]},
]


@pytest.mark.parametrize("schema", TOGETHER)
def test_keywords_beside_each_other_all_hold(vocabulary: TokenVocabulary, schema: dict[str, Any]) -> None:
    """Keywords that are not refused are enforced as a validator reads them."""
    found = texts(vocabulary, schema, 8)
    assert len(found) > 5
    for text in found:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *(("email", 0, most) for most in (8, 36, 100, 150, 254)),
        *(("hostname", 1, most) for most in (9, 36, 63, 200, 253)),
        *(("uri", 1, most) for most in (12, 30, 100, 255, 1024, 2083)),
        ("email", 40, 100),
        ("uri", 40, 255),
        ("uri", 30, None),
    ],
)
def test_formats_hold_with_lengths_beside_them(
    vocabulary: TokenVocabulary, name: str, least: int, most: int | None
) -> None:
    lengths = {"minLength": least} | ({} if most is None else {"maxLength": most})
    for text in texts(vocabulary, {**TEXT, "format": name, **lengths}, 4):
        value = json.loads(text)
        assert least <= len(value) <= (most or 9999)
        if name == "uri":
            assert str(AnyUrl(value)).startswith("http")
        labels = value.partition("://")[2].split("/")[0] if name == "uri" else value.rpartition("@")[2]
        labels = labels.split("?")[0].split(":")[0]
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.|$))+", labels), value
        assert name != "email" or re.fullmatch(r"(?!.*\.[.@])[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,63}@.*\.[A-Za-z]+", value)


@pytest.mark.parametrize(
    ("keywords", "why"),
    [
        ({"pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 9000}, "a-z]+(-[a-z]+)*$' with maxLength 9000 needs too many"),
        ({"pattern": "^(?=.*a.{20}$)[ab]*$"}, "lookaheads"),
    ],
)
def test_what_needs_too_many_states_is_told(vocabulary: TokenVocabulary, keywords: dict[str, Any], why: str) -> None:
    spec = GrammarSpec.json_schema({"type": "object", "properties": {"a": {**TEXT, **keywords}}})
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        _compile(vocabulary, spec.kind, spec.source)


@pytest.mark.parametrize(
    "schema",
    [
        {**TEXT, "allOf": [{"maxLength": 2}]},
        {"allOf": [{**TEXT, "maxLength": 9}, {"maxLength": 2}]},
        {"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": TEXT}},
        {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]},
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"enum": ["a", "abc"], "maxLength": 2},
        {"const": "abc", "enum": ["a"]},
        {"const": "abc", "type": "integer"},
        {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        {"type": "number", "multipleOf": 0.5},
        {"properties": {"a": TEXT}, "patternProperties": {"^a": {"maxLength": 1}}, "additionalProperties": False},
        {"patternProperties": {"^a": TEXT, "b$": {"maxLength": 1}}, "additionalProperties": False},
        {"properties": {"a": False}, "required": ["a"]},
        {"type": "object", "additionalProperties": TEXT, "minProperties": 2},
        {"type": "array", "contains": TEXT},
    ],
)
def test_what_does_not_hold_together_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GrammarSpec.json_schema(schema)
    assert refused.value.code == "invalid_grammar"
