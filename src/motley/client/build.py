"""Builder of protobuf messages from Python's values: what protobuf cannot carry is refused by name, as the service
would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from ..replicas.errors import InvalidRequest
from ..replicas.short_repr import MAX_REPR_CHARS, short_repr

MessageT = TypeVar("MessageT")
_UNFIT = (TypeError, ValueError, OverflowError, KeyError, AttributeError)  # UnicodeEncodeError is a ValueError


def build_message(kind: Callable[..., MessageT], fields: Mapping[str, Any], at: str = "") -> MessageT:
    """Return the message `kind` of these fields. Raises InvalidRequest naming the first that does not fit.

    `at`: what stands before their names, such as `messages[0].`.
    """
    try:
        return kind(**fields)
    except _UNFIT as error:
        for name, value in fields.items():  # each by itself: the error does not always say which it was
            with blame_parameter(f"{at}{name}", value):
                kind(**{name: value})
        raise InvalidRequest(f"{at.rstrip('.') or 'the request'}: {error}", param=at.rstrip(".") or None) from error


@contextmanager
def blame_parameter(param: str, value: Any) -> Iterator[None]:
    """Convert errors inside to InvalidRequest that names `param` and this value."""
    try:
        yield
    except _UNFIT as error:
        param = param[:MAX_REPR_CHARS]
        if str(error).startswith("Protocol message ") and " has no " in str(error):
            raise InvalidRequest(f"{param}: there is no such field", param=param, code="unknown_parameter") from error
        raise InvalidRequest(f"{param}: {short_repr(value)} is not accepted: {error}", param=param) from error
