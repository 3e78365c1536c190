"""Errors in the client's own words: a protocol that calls a field differently says so, and errors name that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...replicas.errors import MotleyError


@contextmanager
def in_wire_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field in `names` (ours -> the client's) leave with the client's name for it."""
    try:
        yield
    except MotleyError as error:
        wire = names.get(error.param or "")
        if wire is None:
            raise
        error.message = error.message.replace(str(error.param), wire, 1)
        error.param, error.args = wire, (error.message,)
        raise
