"""Quotation of clients' values in errors: a few of their parts, in little time however large they are."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)

MAX_REPR_CHARS = 80


MAX_BITS = 10_000  # integers with more bits are not written out; Python refuses much longer ones


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() <= MAX_BITS else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return the first pairs in the dict's own order; the library would sort all keys first."""
        if level <= 0 and x:
            return "{...}"
        pairs = itertools.islice(x.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in pairs]
        return "{" + ", ".join(parts + ["..."] * (len(x) > self.maxdict)) + "}"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxlist, _SHORT_REPR.maxtuple, _SHORT_REPR.maxdict = 3, 6, 6, 4
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = MAX_REPR_CHARS


def short_repr(value: Any) -> str:
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= MAX_REPR_CHARS else text[: MAX_REPR_CHARS - 3] + "..."


def first_duplicate(names: Iterable[Name]) -> Name | None:
    """Return the first name that occurs a second time; None if all are different."""
    seen: set[Name] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
