"""Errors that cross from process to process, with their type and the place where they were raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError, InvalidRequest, MotleyError, Unavailable

_KINDS: dict[str, type[MotleyError]] = {each.__name__: each for each in (CheckpointError, InvalidRequest, Unavailable)}


def encode_error(error: Exception) -> dict[str, Any]:
    """Return an error as JSON fields. One of a type that users do not see becomes a CheckpointError whose message has
    its name.
    """
    if isinstance(error, MotleyError) and type(error).__name__ in _KINDS:
        return {"kind": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}
    return {"kind": "CheckpointError", "message": f"{type(error).__name__}: {error}", "param": None, "code": None}


def decode_error(fields: Mapping[str, Any], where: str) -> MotleyError:
    return _KINDS[fields["kind"]](f"{fields['message']} ({where})", param=fields["param"], code=fields["code"])
