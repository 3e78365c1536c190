"""Ports of Ray's that `ray.init` has no parameter for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ray._private import parameter

__all__ = ["free_agent_port"]


@contextmanager
def free_agent_port() -> Iterator[None]:
    """Make `ray.init` start a node whose agent takes a free port (0), instead of Ray's 52365.

    The agents of two clusters on one machine would want the same port: the second would have none, and its dashboard
    could show no logs.
    """
    whole = parameter.RayParams
    parameter.RayParams = partial(whole, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = whole
