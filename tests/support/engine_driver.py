"""Requests through an engine's core, step by step, to their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motley.replicas.engine.engine import EngineCore
from motley.replicas.types import Request, StreamMessage

_STEPS = 3000


def drive(
    core: EngineCore, requests: Sequence[Request], *, apart: int = 0, each: Callable[[], None] = lambda: None
) -> list[list[StreamMessage]]:
    """All messages of each request, of which none may fail; blocks of the device and of the host are free afterwards.

    apart  steps from one request to the next; each: called after every step
    """
    seen: list[list[StreamMessage]] = [[] for _ in requests]
    waiting = list(enumerate(requests))
    for step in range(_STEPS):
        while waiting and step >= apart * waiting[0][0]:
            core.add(*waiting.pop(0))
        if not core.busy and not waiting:
            break
        for emission in core.step():
            assert emission.error is None, emission.error
            seen[emission.key].append(emission.message)
        each()
    assert not core.busy
    core.scheduler.pool.check(idle=True)
    core.scheduler.swap.pool.check_idle()
    return seen
