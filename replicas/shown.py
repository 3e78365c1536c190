"""Values of strangers, as errors quote them: a few of their parts, in little time however large they are."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)

MAX_CHARS = 80


MAX_BITS = 10_000  # Python refuses to write out much longer integers


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() <= MAX_BITS else f"an integer of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the order it has: the library sorts all keys first."""
        if level <= 0 and x:
            return "{...}"
        pairs = itertools.islice(x.items(), self.maxdict)
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in pairs]
        return "{" + ", ".join(parts + ["..."] * (len(x) > self.maxdict)) + "}"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 6, 6, 4
_SHORT.maxstring = _SHORT.maxother = MAX_CHARS


def shown(value: Any) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 3] + "..."


def first_double(names: Iterable[Name]) -> Name | None:
    """The first that has been there before."""
    seen: set[Name] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
