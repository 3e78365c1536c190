"""Bounds of the numbers that commands take: each has some, whether its option says so or not."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import typer

from ..replicas.shown import shown

__all__ = ["MOST", "MOST_WHOLE", "WIDE", "bound_all", "bounded", "check_number"]

MOST_WHOLE = 2**31 - 1
MOST = 1e9  # seconds, requests per second, prices: what is made of two of them is finite
WIDE = {"seed", "generation", "expect_version"}  # any integer of 64 bits is one


def bounded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a check that refuses NaN and numbers beyond all bounds before it begins."""

    @functools.wraps(command)
    def checked(*given: Any, **named: Any) -> Any:
        for name, value in named.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, int | float) and not isinstance(one, bool):
                    check_number(functools.partial(_said, command, name), one, wide=name in WIDE)
        return command(*given, **named)

    return checked


def bound_all(app: typer.Typer) -> None:
    """Add the checks of numbers to all commands of an application, and of the applications in it."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = bounded(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            bound_all(group.typer_instance)


def check_number(name: Callable[[], str], value: float, *, wide: bool = False) -> None:
    """Raise typer.BadParameter with the name of a number that is NaN, infinite or out of its type's bounds."""
    if isinstance(value, float):
        least, most, words = -MOST, MOST, f"a number between -{MOST:g} and {MOST:g}"
    elif wide:
        least, most, words = -(2**63), 2**63 - 1, "an integer of 64 bits"
    else:
        least, most, words = -MOST_WHOLE, MOST_WHOLE, f"an integer between -{MOST_WHOLE} and {MOST_WHOLE}"
    if not least <= value <= most:
        raise typer.BadParameter(f"{name()}: {shown(value)} is not accepted; expected {words}")


def _said(command: Callable[..., Any], name: str) -> str:
    """Return the parameter's name as a user writes it: an option by its flag."""
    hint = typing.get_type_hints(command, include_extras=True).get(name)
    argument = any("Argument" in type(each).__name__ for each in getattr(hint, "__metadata__", ()))
    return name.upper() if argument else f"--{name.replace('_', '-')}"
