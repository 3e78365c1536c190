"""Check at the start of a service that its Redis answers from this machine; the service starts even if it does not."""

from __future__ import annotations

import sys

from ...prefix_store.redis_source import EMBEDDED, MEMORY, OFF, check_url, redact_url
from ..spec.prefix_cache_spec import PrefixCacheSpec

CONNECT_S = 2.0


def warn_if_unreachable(cache: PrefixCacheSpec) -> None:
    """Print a line if Redis does not answer: a wrong port or password would otherwise show in metrics only."""
    if cache.reuse and cache.store not in (EMBEDDED, MEMORY, OFF) and (reason := connection_failure(cache.store)):
        line = f"{redact_url(cache.store)} does not answer from here ({reason}): nothing is shared until it does"
        print(f"prefix cache: {line}", file=sys.stderr, flush=True)


def connection_failure(url: str) -> str:
    """Return why a connection with this URL's user and password fails; empty if it succeeds."""
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
