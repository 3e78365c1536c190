"""Client's names in errors: a protocol that has another name for a field maps it, and errors use that name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .....replicas.errors import MotleyError


@contextmanager
def in_wire_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field in errors that are raised inside, by `names` (Motley's name -> the client's)."""
    try:
        yield
    except MotleyError as error:
        wire = names.get(error.param or "")
        if wire is None:
            raise
        error.message = error.message.replace(str(error.param), wire, 1)
        error.param, error.args = wire, (error.message,)
        raise
