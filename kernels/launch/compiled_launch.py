"""Launches of a kernel that Triton has already compiled, without Triton's lookup.

At every launch Triton looks a kernel up again by everything that it was specialized for: types, which pointers and
numbers are multiples of 16, and which numbers are 1. A variant fixes types and constants, so that little is left to
check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_ALIGNED = 16  # alignment of pointers in bytes, and divisor of numbers, for which Triton specializes


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """Cache a function's results by its arguments, so that there is one variant of each kind, which keeps its
    launches.
    """
    return cast("Callable[P, T]", functools.cache(make))


def cdiv(size: int, part: int) -> int:
    """Return the number of parts of a size, rounded up. Triton's own function is made for kernels and slow on
    the host.
    """
    return -(-size // part)


class CompiledLaunch:
    """Compiled kernel that can be launched directly with arguments like those of its first launch."""

    __slots__ = ("_compiled", "_constants", "_numbers", "_pointers")

    def __init__(
        self, compiled: Any, constants: tuple[Any, ...], pointers: Sequence[int], numbers: Sequence[tuple[int, int]]
    ) -> None:
        """Store a compiled kernel and the properties of arguments that it was specialized for.

        constants  in the kernel's order
        pointers   positions of the pointers that are aligned
        numbers    (position, kind) of the numbers
        """
        self._compiled, self._constants = compiled, constants
        self._pointers, self._numbers = tuple(pointers), tuple(numbers)

    def fits(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether Triton would use this kernel for the arguments, given that they have the variant's types."""
        for place in self._pointers:
            if arguments[place].data_ptr() % _ALIGNED:
                return False
        return all(_kind(arguments[place]) == kind for place, kind in self._numbers)

    def __call__(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self._compiled[(*grid, 1, 1)[:3]](*arguments, *self._constants)


def make_compiled_launch(
    function: Any, compiled: Any, constants: Mapping[str, Any], arguments: Sequence[Any]
) -> CompiledLaunch | None:
    """Return a direct launch of a compiled kernel.

    None if that is impossible: in Triton's interpreter, or with constants among the arguments.

    function   result of `triton.jit`
    compiled   result of its first launch
    arguments  arguments of that launch, in the kernel's order
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
    """Return the kind of number that Triton specializes for: 1, multiples of 16 (returned as 16), or others (0)."""
    return 1 if number == 1 else 16 if number % _ALIGNED == 0 else 0
