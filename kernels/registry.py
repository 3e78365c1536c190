"""Every operator that has kernels of its own: one line each."""

from __future__ import annotations

from . import w4a16
from .operation import Operation

__all__ = ["OPERATIONS", "operation"]

OPERATIONS: tuple[Operation, ...] = (*w4a16.OPERATIONS,)


def operation(name: str) -> Operation:
    """Raises KeyError, with the names there are."""
    for known in OPERATIONS:
        if known.name == name:
            return known
    raise KeyError(f"{name!r} is no operator; there are {', '.join(known.name for known in OPERATIONS)}")
