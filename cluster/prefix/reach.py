"""Whether the Redis that a fleet names answers from here: told when a service starts, and no reason not to start."""

from __future__ import annotations

import sys

from ..fleet.spec import PrefixCacheSpec
from .source import EMBEDDED, MEMORY, OFF, check_url, shown

__all__ = ["tell_silent", "unreached"]

CONNECT_S = 2.0


def tell_silent(cache: PrefixCacheSpec) -> None:
    """A line where it does not: a wrong port or password would show in nothing but metrics else."""
    if cache.reuse and cache.store not in (EMBEDDED, MEMORY, OFF) and (reason := unreached(cache.store)):
        line = f"{shown(cache.store)} does not answer from here ({reason}): nothing is shared until it does"
        print(f"prefix cache: {line}", file=sys.stderr, flush=True)


def unreached(url: str) -> str:
    """Why a connection cannot be made, user and password included; empty: it can."""
    from redis.connection import Connection
    from redis.exceptions import RedisError

    settings = {**check_url(url), "socket_connect_timeout": CONNECT_S, "socket_timeout": CONNECT_S}
    connection = settings.pop("connection_class", Connection)(**settings)
    try:
        connection.connect()
    except (RedisError, OSError) as error:
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    finally:
        connection.disconnect()
    return ""
