"""An engine with a small random model whose tokens are bytes, and texts of it under a grammar."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import strategies as st
from service_checkpoint import build

from motley.replicas.engine.entrypoints.offline import CompletionOutput, Engine
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import FinishReason

CONTEXT = 2048
# Those of annotations too: the grammar library drops them from what it takes for a schema.
ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "readOnly", "$comment", "$schema")
NAMES = st.text(string.ascii_letters + 'é_ "\\', min_size=1, max_size=6) | st.sampled_from(ANNOTATIONS)
VALUES = st.none() | st.booleans() | st.integers(-99, 10**6) | NAMES


def make_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(build(folder, max_len=CONTEXT), threads=1, **settings)


def texts(engine: Engine, spec: GrammarSpec, **sampling: Any) -> list[CompletionOutput]:
    """Choices of one prompt, those that ended by the grammar."""
    params = SamplingParams(**{"temperature": 1.2, "max_tokens": 1500, "seed": 3, "grammar": spec} | sampling)
    outputs = engine.generate("Say:", params)[0].outputs
    return [output for output in outputs if output.finish_reason is FinishReason.STOP]


def check_json(text: str, schema: Any) -> None:
    """It parses, no object has a name twice, and it validates, formats included."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text, object_pairs_hook=_unique, parse_constant=_none))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    assert len(value) == len(pairs), f"a name twice: {[name for name, _ in pairs]}"
    return value


def _none(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def _bounds(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Neither bound, one, or both in order."""

    def ordered(pair: tuple[Any, Any]) -> dict[str, Any]:
        first, last = sorted(pair)
        return {low: first, high: last}

    return (
        st.just({})
        | values.map(lambda value: {low: value})
        | values.map(lambda value: {high: value})
        | st.tuples(values, values).map(ordered)
    )


def _of_type(name: str, *parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {"type": name} | {k: v for part in found for k, v in part.items()})


PATTERNS = (
    "^a+b?$",
    "[0-9]{2,4}",
    "^(yes|no)$",
    r"\d\d-\w",
    "^[^a]{3}$",
    "^[ -~][+*].$",
    r"\S[\s\w]x$",
    r"[\x00-\x7f]{2}",
    "^é.$",
)
LENGTHS = st.tuples(st.integers(0, 5), st.integers(5, 9)).map(lambda p: {"minLength": p[0], "maxLength": p[1]})
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")
STRINGS = st.one_of(
    _of_type("string", st.integers(0, 12).map(lambda most: {"maxLength": most})),
    _of_type("string", LENGTHS),
    _of_type("string", st.sampled_from(PATTERNS).map(lambda pattern: {"pattern": pattern})),
    _of_type("string", st.sampled_from(FORMATS).map(lambda name: {"format": name})),
)
LEAVES = st.one_of(
    STRINGS,
    _of_type("integer", _bounds("minimum", "maximum", st.integers(-200, 3000))),
    _of_type("number", _bounds("minimum", "maximum", st.floats(-50, 50).map(lambda value: round(value, 2)))),
    _of_type("integer", st.sampled_from((2, 5, 7)).map(lambda step: {"multipleOf": step})),
    st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]})),
    st.lists(VALUES, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
    (VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(NAMES, VALUES, max_size=2)).map(lambda v: {"const": v}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | inner)
    return schema


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    counts = st.tuples(st.integers(0, 2), st.integers(2, 3)).map(lambda p: {"minItems": p[0], "maxItems": p[1]})
    plain = st.tuples(inner, counts).map(lambda p: {"type": "array", "items": p[0]} | p[1])
    prefixed = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return plain | prefixed


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        _objects(inner) | _arrays(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
    ),
    max_leaves=5,
)
