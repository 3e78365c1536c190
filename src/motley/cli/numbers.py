"""Bounds of the numbers that commands take: those of the option itself, and of every number where it has none."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from ..replicas.short_repr import short_repr

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e9  # seconds, requests per second, prices: what is made of two of them is finite
MAX_REPLICAS = 10_000
MAX_TEMPERATURE = 100.0
DAY_S, WEEK_S = 24 * 3600.0, 7 * 24 * 3600.0
WIDE_PARAMETERS = {"seed", "generation", "expect_version"}  # any integer of 64 bits is one


@dataclass(frozen=True)
class Between:
    """Bounds of a number. Among an option's annotations: for one that must exceed its minimum, which typer cannot say.

    above  the minimum itself is not accepted
    """

    minimum: float
    maximum: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum and not (self.above and value == self.minimum)

    def describe(self, kind: str) -> str:
        if self.above:
            return f"{kind} above {_shown(self.minimum)}, at most {_shown(self.maximum)}"
        return f"{kind} between {_shown(self.minimum)} and {_shown(self.maximum)}"


def check_numbers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a check that refuses NaN and numbers beyond their bounds before it begins."""

    @functools.wraps(command)
    def checked(*given: Any, **named: Any) -> Any:
        for name, value in named.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, int | float) and not isinstance(one, bool):
                    check_number(functools.partial(_said, command, name), one, _own(command, name, one))
        return command(*given, **named)

    return checked


def check_all_numbers(app: typer.Typer) -> None:
    """Add the checks of numbers to all commands of an application, and of the applications in it."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = check_numbers(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            check_all_numbers(group.typer_instance)


def check_number(name: Callable[[], str], value: float, bounds: Between | None = None) -> None:
    """Raise typer.BadParameter with the name and the bounds of a number that is NaN, infinite or out of bounds."""
    bounds = bounds or Between(*_default(value))
    if value not in bounds:
        kind = "a number" if isinstance(value, float) else "an integer"
        raise typer.BadParameter(f"{name()}: {short_repr(value)} is not accepted; expected {bounds.describe(kind)}")


def _default(value: float) -> tuple[float, float]:
    return (-MAX_NUMBER, MAX_NUMBER) if isinstance(value, float) else (-MAX_INTEGER, MAX_INTEGER)


def _own(command: Callable[..., Any], name: str, value: float) -> Between:
    """Return the bounds that a parameter's annotations give, with those of any number where they give none."""
    minimum, maximum = (-(2**63), 2**63 - 1) if name in WIDE_PARAMETERS else _default(value)
    for each in _annotations(command, name):
        if isinstance(each, Between):
            return each
        minimum = minimum if getattr(each, "min", None) is None else each.min
        maximum = maximum if getattr(each, "max", None) is None else each.max
    return Between(minimum, maximum)


def _annotations(command: Callable[..., Any], name: str) -> tuple[Any, ...]:
    return getattr(_hints(command).get(name), "__metadata__", ())


@functools.cache
def _hints(command: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(command, include_extras=True)


def _shown(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _said(command: Callable[..., Any], name: str) -> str:
    """Return the parameter's name as a user writes it: an option by its flag."""
    argument = any("Argument" in type(each).__name__ for each in _annotations(command, name))
    return name.upper() if argument else f"--{name.replace('_', '-')}"
