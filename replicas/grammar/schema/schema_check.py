"""Check of JSON Schemas: the grammar library drops what it cannot express; here that is refused by name.

The vocabulary is that of draft 2020-12. What is accepted is kept to exactly or more strictly: properties come in
the schema's order, an object whose properties are named has no others unless `additionalProperties` says so, a
`pattern` without anchors covers the whole string, and a keyword that implies a type makes it so. References lead to
schemas of the same document, and a schema is found only where draft 2020-12 has one.

One thing is not kept to, as the library cannot: where `additionalProperties` allows other names, one of them may come
twice, which counts as two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import InvalidRequest
from .keywords import SchemaRefused, check_node, format_path, inner_schemas
from .library_schema import LibrarySchemaWriter
from .references import BadReference, SchemaPath, SchemaReferences, TooManySteps

MAX_DEPTH = 32
MAX_NODES = 4096
MAX_PATTERNS = 65_536  # most characters of all patterns together


def check_schema(schema: Any, field: str) -> Any:
    """Return the schema in the grammar library's words, with patterns and formats in the form that it passes through.

    Raises InvalidRequest naming `field`, the place in the schema and the keyword that cannot be kept to.
    """
    try:
        return to_library_schema(schema)
    except SchemaRefused as refused:
        raise InvalidRequest(f"{field}: {refused.why}", param=field, code=refused.code) from None
    except RecursionError:  # an error message that shows a deeply nested value raises this
        raise InvalidRequest(f"{field}: nested too deeply", param=field, code="grammar_too_complex") from None


def to_library_schema(schema: Any) -> Any:
    """Return the schema in the grammar library's words. Raises SchemaRefused, which names the part of the schema that
    cannot be enforced.
    """
    schemas: dict[SchemaPath, Any] = {}
    patterns = 0
    for node, place, depth in _walk_schemas(schema, (), 0):
        if len(schemas) >= MAX_NODES or depth > MAX_DEPTH:
            raise SchemaRefused(f"at most {MAX_NODES} schemas, {MAX_DEPTH} deep, are accepted", "grammar_too_complex")
        schemas[place] = node
        if isinstance(node, bool):
            continue
        with _PathOfError(place):
            check_node(node, format_path(place))
        patterns += len(node.get("pattern", "")) + sum(map(len, node.get("patternProperties", ())))
        if patterns > MAX_PATTERNS:
            raise SchemaRefused(f"patterns of at most {MAX_PATTERNS} characters are accepted", "grammar_too_complex")
    return LibrarySchemaWriter(schemas, _checked_references(schemas)).document()


class _PathOfError:
    """Context that adds the place of the schema to a refusal."""

    def __init__(self, place: SchemaPath) -> None:
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, SchemaRefused):
            error.place = self._place


def _checked_references(schemas: Mapping[SchemaPath, Any]) -> SchemaReferences:
    references = SchemaReferences(schemas)
    for place, node in schemas.items():
        if isinstance(node, dict) and "$ref" in node:
            try:
                references.check(node["$ref"])
            except BadReference as error:
                code = "grammar_too_complex" if isinstance(error, TooManySteps) else "invalid_grammar"
                refused = SchemaRefused(f"{format_path(place)}/$ref: {error}", code, drops=["$ref"])
                refused.place = place
                raise refused from None
    return references


def _walk_schemas(node: Any, place: SchemaPath, depth: int) -> Iterator[tuple[Any, SchemaPath, int]]:
    """Yield every schema, outer ones first, so that a caller may stop before it gets too deep."""
    if not isinstance(node, dict | bool):
        raise SchemaRefused(f"{format_path(place)}: a schema is an object or a boolean, not {type(node).__name__}")
    yield node, place, depth
    if isinstance(node, dict):
        for more, inner in inner_schemas(node, place):
            yield from _walk_schemas(inner, (*place, *more), depth + 1)
