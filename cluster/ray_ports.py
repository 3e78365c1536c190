"""Ports of Ray's that `ray.init` has no parameter for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ray._private import parameter

__all__ = ["free_agent_port"]


@contextmanager
def free_agent_port() -> Iterator[None]:
    """Within it `ray.init` starts a node whose agent takes a port that is free (0), instead of Ray's 52365.

    The agents of two clusters of one machine would want the same one: the second has none then, and its dashboard no
    log to show.
    """
    whole = parameter.RayParams
    parameter.RayParams = partial(whole, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = whole
