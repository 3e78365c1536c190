"""Strict reader of JSON bodies: coerces nothing and ignores nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from .....replicas.errors import InvalidRequest
from .....replicas.short_repr import short_repr
from .....replicas.strict_json import DuplicateName, parse_strict_json
from ....request_errors import BodyTooLarge, too_many_message, unknown_field, unsupported_field
from ..admission import MIN_VALUES, check_text
from ..parsed_request import BodyLimits
from .field_table import BodyField

T = TypeVar("T")
_TYPE_NAMES = {str: "a string", bool: "true or false", int: "an integer", list: "a list", dict: "an object"}


def parse_body(body: bytes, limits: BodyLimits | None = None) -> dict[str, Any]:
    """Return the JSON object of a body. Raises InvalidRequest with code `invalid_json`, or naming the doubled field.

    Reading blocks all other requests, so a body that holds more than `limits`, estimated from its punctuation, raises
    BodyTooLarge at once.
    """
    if limits is not None and body.count(b",") > limits.values:
        raise BodyTooLarge(too_many_message("the body", f"{limits.values} values"), code="too_many_values")
    # Some clients write a space before the colon.
    if limits is not None and body.translate(None, b" \t\n\r").count(b'":') > limits.members:
        raise BodyTooLarge(too_many_message("the body", f"{limits.members} named values"), code="too_many_values")
    if limits is not None and body.count(b"[") + body.count(b"{") > limits.members:
        raise BodyTooLarge(too_many_message("the body", f"{limits.members} lists and objects"), code="too_many_values")
    try:
        return parse_json_object(body.decode(), "the body")
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not JSON: it is not UTF-8", code="invalid_json") from None


def parse_json_object(text: str, what: str, param: str | None = None) -> dict[str, Any]:
    """Return a JSON object from its text. Raises InvalidRequest that says `what` is wrong, or names the doubled
    field.
    """
    try:
        value = parse_strict_json(text)
    except DuplicateName as error:
        raise InvalidRequest(str(error), param=error.path, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {_why(error)}", param=param, code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} is not a JSON object", param=param, code="invalid_json")
    return value


def check_json_values(name: str, *texts: str) -> None:
    """Raise InvalidRequest if JSON texts in a message hold too many values, before they are read, which blocks as a
    body does.
    """
    if max(sum(text.count(mark) for text in texts for mark in marks) for marks in (",", "[{")) > MIN_VALUES:
        message = too_many_message(f"{name}: its JSON", f"{MIN_VALUES} values")
        raise InvalidRequest(message, param=name, code="too_many_values")


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"a number has too many digits; expected at most {sys.get_int_max_str_digits()}"  # the only other ValueError


def refuse_other_fields(
    body: dict[str, Any], supported: Collection[str], unsupported: Collection[str] = (), *, path: str = ""
) -> None:
    """Raise InvalidRequest naming a field outside `supported` that is not null."""
    for name in body:
        if name in supported or body[name] is None:
            continue
        if name not in unsupported:
            raise unknown_field(path + name)
        raise unsupported_field(path + name)


def check_fields(body: Mapping[str, Any], table: Mapping[str, BodyField], path: str = "") -> None:
    """Raise InvalidRequest for a field that is unknown or not supported, or whose value is not supported."""
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            raise unknown_field(path + name)
        if value is None:
            continue
        if field.instead is not None:
            if value in field.neutral:
                continue
            raise unsupported_field(path + name, field.instead)
        if field.only and not any(type(value) is type(one) and value == one for one in field.only):
            accepted = " or ".join(json.dumps(one) for one in field.only)
            raise unsupported_field(path + name, f"leave it out, or give {accepted}", value)


def take_field(body: dict[str, Any], name: str, kind: type[T], default: T, *, path: str = "") -> T:
    """Return the field if it has exactly this type; the default if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise invalid_value(path + name, value, _TYPE_NAMES[kind])
    if isinstance(value, str):
        check_text(path + name, value)
    return value


def invalid_value(name: str, value: Any, accepted: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {short_repr(value)} is not accepted; expected {accepted}", param=name, code="invalid_value"
    )


def missing_field(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is required", param=name, code="missing_field")


def pick_fields(body: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return these fields unchanged, without those that are absent or null."""
    return {name: body[name] for name in names if body.get(name) is not None}
