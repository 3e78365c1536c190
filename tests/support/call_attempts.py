"""Attempts at calls, for tests of where they go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from motley.cluster.routing.attempt.call_attempt import OPEN_CALLS, CallAttempt
from motley.cluster.routing.attempt.placement import Placement, SuspectReplicas
from motley.replicas.types import CallId


def an_attempt(suspects: SuspectReplicas | None = None, *, number: int = 0, **wish: Any) -> CallAttempt:
    return CallAttempt(CallId("ingress", number), Placement(**wish), suspects or SuspectReplicas())


@contextmanager
def an_open_attempt(suspects: SuspectReplicas | None = None, **wish: Any) -> Iterator[CallAttempt]:
    """Serve's router finds it by its call."""
    attempt = an_attempt(suspects, number=len(OPEN_CALLS), **wish)
    OPEN_CALLS[attempt.call] = attempt
    try:
        yield attempt
    finally:
        del OPEN_CALLS[attempt.call]
