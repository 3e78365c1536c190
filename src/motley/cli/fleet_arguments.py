"""Conversion of the arguments of `motley fleet` to the control plane's messages."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING

import typer

from .numbers import MAX_REPLICAS, Between, check_number

if TYPE_CHECKING:
    from ..cluster.protos import control_pb2 as pb


def decision_reason(reason: str | None, command: str) -> str:
    """Return the reason of a decision; if none was given, the command that made it, and by whom."""
    if reason is not None:
        return reason
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # the system does not know the user; the type depends on Python
        user = "somebody"
    return f"motley fleet {command} by {''.join(filter(str.isprintable, user))[:64]}"


def read_bounds(text: str) -> pb.Bounds:
    from ..cluster.protos import control_pb2 as pb

    pool, _, range_ = text.partition("=")
    low, _, high = range_.partition(":")
    try:
        minimum, maximum = int(low), int(high)
    except ValueError as error:
        raise typer.BadParameter(f"--bounds {text}: expected POOL=MIN:MAX, such as cpu=1:4") from error
    check_number(lambda: "--bounds", minimum, Between(0, MAX_REPLICAS))
    check_number(lambda: "--bounds", maximum, Between(0, MAX_REPLICAS))
    return pb.Bounds(pool=pool, minimum=minimum, maximum=maximum)


def read_setting(text: str) -> tuple[str, float]:
    from ..cluster.fleet.spec.scaling_spec import ScalingSpec

    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError as error:
        raise typer.BadParameter(f"--set {text}: expected NAME=NUMBER") from error
    bounds = ScalingSpec.bounds(name)
    check_number(lambda: f"--set {name}", value, None if bounds is None else Between(*bounds))
    return name, value
