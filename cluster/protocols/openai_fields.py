"""Reads a JSON body strictly: nothing is coerced, nothing is ignored."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from ...replicas.errors import InvalidRequest
from ...replicas.shown import MAX_CHARS, first_double, shown
from ..ask import Most
from ..door import check_text
from ..errors import TooLarge, unknown_field, unsupported_field
from .openai_table import Field

T = TypeVar("T")
_WORDS = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "an object"}


def parse_object(body: bytes, most: Most | None = None) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest with code `invalid_json`, or naming the doubled field.

    Nobody else is served while it is read, so what holds more than `most`, as far as punctuation tells, raises
    TooLarge at once.
    """
    if most is not None and body.count(b",") > most.values:
        raise TooLarge(f"the body holds more than {most.values} values", code="body_too_large")
    if most is not None and body.count(b'":') > most.members:
        raise TooLarge(f"the body holds more than {most.members} named values", code="body_too_large")
    try:
        return json_object(body.decode(), "the body")
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not JSON: it is not UTF-8", code="invalid_json") from None


def json_object(text: str, what: str, param: str | None = None) -> dict[str, Any]:
    """A JSON object from its text. Raises InvalidRequest that says `what` is wrong, or names the doubled field."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {_why(error)}", param=param, code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is not a JSON object", param=param, code="invalid_json")
    return value


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"a number has too many digits; expected at most {sys.get_int_max_str_digits()}"  # all else of ValueError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = first_double(name for name, _ in pairs) or ""
        raise InvalidRequest(f"{twice[:MAX_CHARS]}: given twice", param=twice[:MAX_CHARS], code="invalid_json")
    return value


def refuse_others(
    body: dict[str, Any], known: Collection[str], unsupported: Collection[str] = (), *, path: str = ""
) -> None:
    """Raise InvalidRequest naming a field outside `known`; those of `unsupported` may be null."""
    for name in body:
        if name in known:
            continue
        if name not in unsupported:
            raise unknown_field(path + name)
        if body[name] is not None:
            raise unsupported_field(path + name)


def check_fields(body: Mapping[str, Any], table: Mapping[str, Field]) -> None:
    """Raise InvalidRequest for a field that is unknown or not supported, or has a value that is not."""
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise unknown_field(name)
        if value is None:
            continue
        if field.instead is not None:
            raise unsupported_field(name, field.instead)
        if field.only and not any(type(value) is type(one) and value == one for one in field.only):
            accepted = " or ".join(json.dumps(one) for one in field.only)
            raise unsupported_field(name, f"leave it out, or give {accepted}", value)


def take(body: dict[str, Any], name: str, kind: type[T], default: T, *, path: str = "") -> T:
    """The field if it has exactly this type; the default if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise wrong_type(path + name, value, _WORDS[kind])
    if isinstance(value, str):
        check_text(path + name, value)
    return value


def wrong_type(name: str, value: Any, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {shown(value)} is not accepted; expected {accepted}", param=name, code="invalid_value"
    )


def missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is required", param=name, code="missing_field")


def pick(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """These fields, as they came, where they are neither absent nor null."""
    return {name: body[name] for name in names if body.get(name) is not None}
