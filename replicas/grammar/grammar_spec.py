"""Specification of a grammar, as a client gives it: checked for size and sense, not yet compiled."""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from ..errors import InvalidRequest
from ..strict_json import parse_strict_json
from .schema.relaxed_schema import relax_schema
from .schema.schema_check import check_schema
from .structural_tag_check import check_tag

MAX_SOURCE_BYTES = 64 * 2**10
# For a source whose formats are written out as patterns and whose parts are joined. A process can compile even 1,200
# written-out formats, as many as 64 KiB may ask for, within its limits.
MAX_WRITTEN_BYTES = 320 * 2**10
MAX_CHOICES = 1024
OBJECT_SCHEMA = '{"type": "object", "additionalProperties": true}'


class GrammarKind(enum.StrEnum):
    """Kind of a grammar: how `source` is read."""

    JSON_OBJECT = "json_object"  # any JSON object; no source
    JSON_SCHEMA = "json_schema"  # JSON Schema, as JSON text
    REGEX = "regex"  # the whole text matches
    EBNF = "ebnf"  # GBNF as llama.cpp has it; the rule `root` is the whole text
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's description of text with constrained parts, as JSON text


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar that the whole output of a choice follows. Specs compare and hash by their content, not by `field`.

    source   the schema, expression or grammar; at most 64 KiB of UTF-8. A schema, alone or in a structural tag, is kept
             without spaces and in the words of the grammar library, up to 320 KiB
    field    the client's name for it, which errors give
    checked  whether the source is in the library's words already, which no client writes
    dropped  a list: everything in a schema that can be kept to is kept, and what is dropped is added to the list, with
             its place. None: a schema is refused if anything in it cannot be kept to

    Raises InvalidRequest naming `field`, code `invalid_grammar` or `grammar_too_complex`.
    """

    kind: GrammarKind
    source: str = ""
    field: str = field(default="grammar", compare=False)
    checked: InitVar[bool] = False
    dropped: InitVar[list[str] | None] = None

    def __post_init__(self, checked: bool, dropped: list[str] | None) -> None:
        if not isinstance(self.kind, GrammarKind):
            raise self.invalid(f"kind {str(self.kind)[:40]!r} is none of {', '.join(GrammarKind)}")
        if not isinstance(self.source, str):
            raise self.invalid(f"expected text, not {type(self.source).__name__}")
        self._check_size(MAX_WRITTEN_BYTES if checked else MAX_SOURCE_BYTES)
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.source:
                raise self.invalid("json_object takes no source")
        elif not self.source:
            raise self.invalid("it is empty")
        if self.kind is GrammarKind.JSON_SCHEMA and not checked:
            self._keep(self._supported_schema(dropped))
        elif self.kind is GrammarKind.STRUCTURAL_TAG and not checked:
            self._keep(check_tag(_parse(self), self.field))

    @classmethod
    def json_object(cls, *, field: str = "grammar") -> GrammarSpec:
        return cls(GrammarKind.JSON_OBJECT, field=field)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, field: str = "grammar") -> GrammarSpec:
        """Return the spec of a JSON Schema, given as an object or as its text."""
        return cls(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _dump(schema, field), field)

    @classmethod
    def loose_json_schema(cls, schema: Mapping[str, Any], *, field: str = "grammar") -> tuple[GrammarSpec, list[str]]:
        """Return the spec of a JSON Schema without the keywords that cannot be kept to, and what was dropped, with its
        places.
        """
        dropped: list[str] = []
        return cls(GrammarKind.JSON_SCHEMA, _dump(schema, field), field, dropped=dropped), dropped

    @classmethod
    def regex(cls, pattern: str, *, field: str = "grammar") -> GrammarSpec:
        return cls(GrammarKind.REGEX, pattern, field)

    @classmethod
    def ebnf(cls, grammar: str, *, field: str = "grammar") -> GrammarSpec:
        return cls(GrammarKind.EBNF, grammar, field)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str, *, field: str = "grammar") -> GrammarSpec:
        return cls(GrammarKind.STRUCTURAL_TAG, tag if isinstance(tag, str) else _dump(tag, field), field)

    @classmethod
    def from_checked_tag(cls, tag: Mapping[str, Any], *, field: str = "grammar") -> GrammarSpec:
        """Return the spec of a structural tag of schemas and grammars, each of which has been accepted by itself."""
        return cls(GrammarKind.STRUCTURAL_TAG, _dump(tag, field, MAX_WRITTEN_BYTES), field, checked=True)

    @classmethod
    def choice(cls, texts: Sequence[str], *, field: str = "grammar") -> GrammarSpec:
        """Return the spec of a choice of exactly one of these texts."""
        strings = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
        if not strings or not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidRequest(
                f"{field}: expected a list of 1 to {MAX_CHOICES} strings, none of them empty",
                param=field,
                code="invalid_grammar",
            )
        return cls(GrammarKind.EBNF, "root ::= " + " | ".join(map(_quoted, dict.fromkeys(texts))), field)

    def named(self, field: str) -> GrammarSpec:
        """Return the same grammar spec under another field name."""
        same = copy.copy(self)  # a copy is not checked again; in the library's words it may be longer than is accepted
        object.__setattr__(same, "field", field)
        return same

    def invalid(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.field}: {why}", param=self.field, code="invalid_grammar")

    def too_complex(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.field}: {why}", param=self.field, code="grammar_too_complex")

    def _supported_schema(self, dropped: list[str] | None) -> Any:
        """Return the schema in the grammar library's words."""
        schema = _parse(self)
        if dropped is None:
            return check_schema(schema, self.field)
        relaxed, left_out = relax_schema(schema)
        dropped += left_out
        return relaxed

    def _keep(self, source: Any) -> None:
        object.__setattr__(self, "source", _dump(source, self.field, MAX_WRITTEN_BYTES))
        self._check_size(MAX_WRITTEN_BYTES, " with its formats and patterns written out")

    def _check_size(self, max_bytes: int, when: str = "") -> None:
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise self.invalid("it holds a lone surrogate") from None
        if "\0" in self.source:
            raise self.invalid("it holds a NUL character")
        if size > max_bytes:
            raise self.too_complex(f"{size} bytes{when}; at most {max_bytes} are accepted")


def _parse(spec: GrammarSpec) -> Any:
    try:
        return parse_strict_json(spec.source, _refuse_constant)
    except RecursionError:
        raise spec.too_complex("nested too deeply") from None
    except ValueError as error:
        raise spec.invalid(f"not valid JSON: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _dump(value: Any, field: str, max_bytes: int = MAX_SOURCE_BYTES) -> str:
    """Return JSON text in the given order, which is the order of the properties in the output. Cut off beyond
    `max_bytes`.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts: list[str] = []
    size = 0
    try:
        for part in encoder.iterencode(value):
            parts.append(part)
            size += len(part)
            if size > max_bytes:  # too large and refused later; shared parts could make the text endless
                break
        return "".join(parts)
    except RecursionError:
        raise InvalidRequest(f"{field}: nested too deeply", param=field, code="grammar_too_complex") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field}: not JSON: {error}", param=field, code="invalid_grammar") from None


def _quoted(text: str) -> str:
    """Return the text as a literal of the grammar's notation. Every character that could mean something there is
    escaped.
    """
    plain = "".join(char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}" for char in text)
    return f'"{plain}"'
