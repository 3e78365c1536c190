"""Launches of a kernel that Triton has compiled, as it launched it first.

Triton looks a kernel up anew at every launch, by what it has specialized it for: types, which pointers and numbers are
multiples of 16, which numbers are 1. Of a variant types and constants are fixed; what is left is little.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["CompiledLaunch", "cached", "cdiv", "make_compiled_launch"]

P = ParamSpec("P")
T = TypeVar("T")

_ALIGNED = 16  # bytes, and what numbers may be multiples of


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """Of the same arguments the same result: of a variant there is one, which knows its launches."""
    return cast("Callable[P, T]", functools.cache(make))


def cdiv(size: int, part: int) -> int:
    """Parts of a size, the last of which may be smaller. triton's own is made for kernels, and slow on the host."""
    return -(-size // part)


class CompiledLaunch:
    """One compiled kernel, for arguments that are as those of its first launch."""

    __slots__ = ("_compiled", "_constants", "_numbers", "_pointers")

    def __init__(
        self, compiled: Any, constants: tuple[Any, ...], pointers: Sequence[int], numbers: Sequence[tuple[int, int]]
    ) -> None:
        """constants: in the kernel's order. pointers: places of those that are aligned. numbers: places, and kinds."""
        self._compiled, self._constants = compiled, constants
        self._pointers, self._numbers = tuple(pointers), tuple(numbers)

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Whether Triton would take this kernel for them; of the types that the variant has."""
        for place in self._pointers:
            if arguments[place].data_ptr() % _ALIGNED:
                return False
        return all(_kind(arguments[place]) == kind for place, kind in self._numbers)

    def __call__(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self._compiled[(*grid, 1, 1)[:3]](*arguments, *self._constants)


def make_compiled_launch(
    function: Any, compiled: Any, constants: Mapping[str, Any], arguments: Sequence[Any]
) -> CompiledLaunch | None:
    """None if it cannot be launched so: in Triton's interpreter, or with constants among the arguments.

    function   what `triton.jit` made
    compiled   what its launch gave
    arguments  of that launch, in the kernel's order
    """
    if not hasattr(compiled, "packed_metadata"):
        return None
    pointers: list[int] = []
    numbers: list[tuple[int, int]] = []
    after: list[Any] = []
    for place, parameter in enumerate(function.params):
        if parameter.is_constexpr:
            after.append(constants[parameter.name])
        elif after:
            return None
        elif parameter.do_not_specialize:
            continue
        elif hasattr(value := arguments[place], "data_ptr"):
            if value.data_ptr() % _ALIGNED == 0 and not parameter.do_not_specialize_on_alignment:
                pointers.append(place)
        elif isinstance(value, int):
            numbers.append((place, _kind(value)))
    return CompiledLaunch(compiled, tuple(after), pointers, numbers)


def _kind(number: int) -> int:
    """What Triton tells apart: 1, multiples of 16, others."""
    return 1 if number == 1 else 16 if number % _ALIGNED == 0 else 0
