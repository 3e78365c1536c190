"""Check of structural tags: the grammar library's (xgrammar 0.2.9) descriptions of text with constrained parts.

The library ignores fields that it does not know and some that it cannot read; here they are refused by name. Schemas
within a tag are checked and reworded like those that stand alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequest
from .schema.schema_check import check_schema

MAX_DEPTH = 32
MAX_COUNT = 2**31 - 1
MAX_SHOWN = 60

_OPTIONAL = frozenset((
    "any_order", "at_least_one", "exclude_tokens", "excludes", "loop", "max_chars", "max_tokens", "max_whitespace_cnt",
    "stop_after_first", "style",
))  # fmt: skip


class _TagRefused(Exception):
    """Error that says why a tag is refused, without the field's name."""

    def __init__(self, why: str, code: str | None = "invalid_grammar") -> None:
        super().__init__(why)
        self.why, self.code = why, code


def check_tag(tag: Any, field: str) -> Any:
    """Return the structural tag with its schemas in the library's words. Raises InvalidRequest naming `field` and the
    place.

    tag   the parsed JSON: an object with `format` and perhaps `type`; or with `structures` and `triggers`, the
          library's older form
    """
    try:
        older = isinstance(tag, dict) and "structures" in tag
        given = _check_fields(tag, ("type", "structures", "triggers") if older else ("type", "format"), "#")
        if given.get("type", "structural_tag") != "structural_tag":
            raise _TagRefused("#/type: expected 'structural_tag'")
        if older:
            return {"type": "structural_tag", "format": _triggered(given)}
        return {**given, "format": _format(given.get("format"), "#/format", 0)}
    except _TagRefused as refused:
        raise InvalidRequest(f"{field}: {refused.why}", param=field, code=refused.code) from None


def _format(value: Any, at: str, depth: int) -> Any:
    if not isinstance(value, dict):
        raise _TagRefused(f"{at}: expected an object")
    if depth > MAX_DEPTH:
        raise _TagRefused(f"{at}: formats at most {MAX_DEPTH} deep are accepted", "grammar_too_complex")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _TagRefused(f"{at}/type: {str(kind)[:MAX_SHOWN]!r} is none of {', '.join(_FIELDS)}")
    checks = _FIELDS[kind]
    given = _check_fields(value, ("type", *checks), at)
    missing = [name for name in checks if name not in given and name not in _OPTIONAL]
    if missing:
        raise _TagRefused(f"{at}: {kind} needs {missing[0]!r}")
    return {
        name: inner if name == "type" else checks[name](inner, f"{at}/{name}", depth) for name, inner in given.items()
    }


def _triggered(given: dict[str, Any]) -> Any:
    """Return the newer form of a tag with triggers: free text up to a trigger, then the structure that begins with
    it.
    """
    structures = given["structures"]
    if not isinstance(structures, list) or not structures:
        raise _TagRefused("#/structures: expected a list of objects with begin, schema and end")
    triggers = _TEXTS(given.get("triggers"), "#/triggers", 0)
    if not triggers:
        raise _TagRefused("#/triggers: expected at least one")
    tags = [_structure(one, f"#/structures/{index}") for index, one in enumerate(structures)]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _structure(value: Any, at: str) -> Any:
    names = ("begin", "schema", "end")
    given = _check_fields(value, names, at)
    for name in names:
        if name not in given:
            raise _TagRefused(f"{at}: a structure needs {name!r}")
    content = {"type": "json_schema", "json_schema": _schema(given["schema"], f"{at}/schema", 0)}
    begin, end = (_TEXT(given[name], f"{at}/{name}", 0) for name in ("begin", "end"))
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _check_fields(value: Any, field_names: tuple[str, ...], at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _TagRefused(f"{at}: expected an object")
    for name in value:
        if name not in field_names:
            raise _TagRefused(f"{at}: there is no field {name[:MAX_SHOWN]!r}; expected {', '.join(field_names)}")
    return value


TagCheck = Callable[[Any, str, int], Any]  # (value, its place, its depth) -> the value that the library gets


def _inner(value: Any, at: str, depth: int) -> Any:
    return _format(value, at, depth + 1)


def _schema(value: Any, at: str, depth: int) -> Any:
    try:
        return check_schema(value, at)
    except InvalidRequest as error:
        raise _TagRefused(error.message, error.code) from None


def _tag(value: Any, at: str, depth: int) -> Any:
    """Check a tag in a list of tags, which need not say that it is one."""
    if isinstance(value, dict) and value.get("type", "tag") != "tag":
        raise _TagRefused(f"{at}/type: expected 'tag'")
    return _inner({"type": "tag", **value} if isinstance(value, dict) else value, at, depth)


def _accepts(fits: Callable[[Any], bool], expected: str) -> TagCheck:
    def check(value: Any, at: str, depth: int) -> Any:
        if not fits(value):
            raise _TagRefused(f"{at}: expected {expected}")
        return value

    return check


def _list_of(inner: TagCheck) -> TagCheck:
    def check(value: Any, at: str, depth: int) -> Any:
        if not isinstance(value, list):
            raise _TagRefused(f"{at}: expected a list")
        return [inner(one, f"{at}/{index}", depth) for index, one in enumerate(value)]

    return check


def _pair_of(first: TagCheck) -> TagCheck:
    def check(value: Any, at: str, depth: int) -> Any:
        if not isinstance(value, list) or len(value) != 2:
            raise _TagRefused(f"{at}: expected a list of two")
        return [first(value[0], f"{at}/0", depth), _inner(value[1], f"{at}/1", depth)]

    return check


def _token_or(otherwise: TagCheck) -> TagCheck:
    """Return a check for a token as a format of its own, or for what the other check accepts."""

    def check(value: Any, at: str, depth: int) -> Any:
        if not isinstance(value, dict):
            return otherwise(value, at, depth)
        if value.get("type") != "token":
            raise _TagRefused(f"{at}/type: expected 'token'")
        return _inner(value, at, depth)

    return check


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_COUNT


_TEXT = _accepts(lambda value: isinstance(value, str), "a string")
_TRUTH = _accepts(lambda value: isinstance(value, bool), "true or false")
_COUNT = _accepts(lambda value: _is_integer(value, 0), f"an integer from 0 to {MAX_COUNT}")
_OPTIONAL_COUNT = _accepts(
    lambda value: value is None or _is_integer(value, 0), f"an integer from 0 to {MAX_COUNT}, or null"
)
_SPACES = _accepts(lambda value: value is None or _is_integer(value, 1), f"an integer from 1 to {MAX_COUNT}, or null")
_REPEATS = _accepts(lambda value: _is_integer(value, -1), f"an integer from -1, which is without end, to {MAX_COUNT}")
_TOKEN = _accepts(lambda value: isinstance(value, str) or _is_integer(value, 0), "a token's id or text")
_TEXTS, _TOKENS, _TAGS, _INNERS = (_list_of(each) for each in (_TEXT, _TOKEN, _tag, _inner))


def _end(value: Any, at: str, depth: int) -> Any:
    return (_TEXTS if isinstance(value, list) else _token_or(_TEXT))(value, at, depth)


_TAGGED: dict[str, TagCheck] = {"tags": _TAGS, "at_least_one": _TRUTH, "stop_after_first": _TRUTH}
_FIELDS: dict[str, dict[str, TagCheck]] = {
    "const_string": {"value": _TEXT},
    "json_schema": {
        "json_schema": _schema,
        # With another style, any order or excluded texts a schema would not be kept to as it says.
        "style": _accepts(lambda value: value == "json", "'json', no other is supported"),
        "any_order": _accepts(lambda value: value is False, "false: properties come in the schema's order"),
        "excludes": _accepts(lambda value: value == [], "an empty list: the schema alone says what there may be"),
        "max_whitespace_cnt": _SPACES,
    },
    "any_text": {"excludes": _TEXTS, "max_tokens": _OPTIONAL_COUNT, "max_chars": _OPTIONAL_COUNT},
    "grammar": {"grammar": _TEXT},
    "regex": {"pattern": _TEXT},
    "token": {"token": _TOKEN},
    "exclude_token": {"exclude_tokens": _TOKENS},
    "any_tokens": {"exclude_tokens": _TOKENS, "max_tokens": _OPTIONAL_COUNT},
    "sequence": {"elements": _INNERS},
    "or": {"elements": _INNERS},
    "optional": {"content": _inner},
    "plus": {"content": _inner},
    "star": {"content": _inner},
    "repeat": {"min": _COUNT, "max": _REPEATS, "content": _inner},
    "tag": {"begin": _token_or(_TEXT), "content": _inner, "end": _end},
    "triggered_tags": {"triggers": _TEXTS, **_TAGGED, "excludes": _TEXTS},
    "token_triggered_tags": {"trigger_tokens": _TOKENS, **_TAGGED, "exclude_tokens": _TOKENS},
    "tags_with_separator": {**_TAGGED, "separator": _TEXT},
    "dispatch": {"rules": _list_of(_pair_of(_TEXT)), "loop": _TRUTH, "excludes": _TEXTS},
    "token_dispatch": {"rules": _list_of(_pair_of(_TOKEN)), "loop": _TRUTH, "exclude_tokens": _TOKENS},
}
