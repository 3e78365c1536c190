"""Configs of launches, each looked up once: a step must not read tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..devices import Device
from ..operation import Operation, Shape, rounded
from ..precision import PrecisionPolicy
from ..registry import operation
from ..rig import Rig
from ..tuning import Choice, choose
from ..variant import Config

__all__ = ["Configs"]

T = TypeVar("T", bound=Operation)


class Configs:
    """By operator and shape, as the tables of that rig have them: one for all layers, most of which are alike."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._known: dict[tuple[str, tuple[tuple[str, int | str], ...]], Choice] = {}
        self._kernels: dict[tuple[object, tuple[tuple[str, int | str], ...]], Any] = {}

    def of(self, name: str, **fields: int | str) -> Config:
        """Numbers that change with every step come `rounded`: they are looked up so, and else there would be no end."""
        return self.looked_up(name, **fields).config

    def looked_up(self, name: str, **fields: int | str) -> Choice:
        """The same, and how it was found."""
        key = name, tuple(fields.items())
        found = self._known.get(key)
        if found is None:
            found = choose(operation(name), self._rig.policy, Shape.of(**fields), self._rig.about)
            self._known[key] = found
        return found

    def kernel(self, kernel_for: Callable[[PrecisionPolicy, Shape, Device], tuple[T, str]], **fields: int | str) -> T:
        """Which of several operators takes that shape, of any number of rows: `kernel_for` rounds as graphs do."""
        key = kernel_for, tuple(fields.items())
        found: T | None = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = kernel_for(self._rig.policy, Shape.of(**fields), self._rig.about)[0]
        return found

    def used(self, name: str, num_rows: int) -> Iterator[Choice]:
        """What was found for that operator and about so many rows, and how; of attention for any number."""
        for (known, fields), choice in self._known.items():
            sizes = dict(fields)
            rows = sizes.get("m", sizes.get("t", rounded(num_rows)))
            if known == name and rows == rounded(num_rows):
                yield choice
