"""Folders that weights may come from while a fleet serves, and the updates that a replica starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .....replicas.errors import InvalidRequest
from .....replicas.short_repr import short_repr
from .....replicas.updates.weight_file import WeightFile
from ....service_errors import Forbidden


def resolve_below_roots(path: str, roots: Sequence[Path]) -> Path:
    """Return the path without links, if it is within one of these folders. Raises Forbidden, and InvalidRequest for no
    path.

    Outside these folders the error does not say whether there is a file.
    """
    if not path or not Path(path).is_absolute() or not path.isprintable():
        raise InvalidRequest(f"path: {short_repr(path)} is not accepted; expected an absolute one", param="path")
    try:
        found = Path(path).resolve()
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(f"path: {short_repr(path)} leads nowhere", param="path") from error
    if not any(found.is_relative_to(root.resolve()) for root in roots):
        there = ", ".join(map(str, roots)) or "security.weights_roots names none"
        raise Forbidden(
            f"path: {short_repr(path)} is in no folder that weights may come from: {there}", code="weights_root"
        )
    return found


def pool_weight_updates(app: str, pool: str) -> Callable[[], Sequence[WeightFile]]:
    """Return a function by which a replica of that pool gets its weight updates when it starts."""
    return partial(_updates, app, pool)


def _updates(app: str, pool: str) -> Sequence[WeightFile]:
    from ..state.state_store import GcsStateStore

    state = GcsStateStore(app).load()
    return () if state is None else state.files(pool)
