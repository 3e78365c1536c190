"""Location of a fleet's shared prefixes, and what its replicas must know to use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..service_errors import ConfigurationError

EMBEDDED, MEMORY, OFF = "embedded", "memory", "off"  # values of `store` that are not URLs

SCHEMES = ("redis", "rediss", "unix")
TTL_S = 3600.0
QUEUE_BYTES = 64 * 2**20
CONNECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSource:
    """Settings of a fleet's prefix store, which are sent to every replica.

    url           redis://, rediss:// or unix://, with user and password if there are any
    secret        secret of the fleet: whoever has it shares prefixes
    ttl_s         seconds for which a value is kept, give or take a tenth
    tenant_bytes  bytes that a tenant may write within `ttl_s`; None: no limit
    queue_bytes   maximum bytes that wait to be written by one replica; more is dropped
    connections   maximum number of connections of one replica
    """

    url: str = field(repr=False)  # may contain a password
    secret: bytes = field(repr=False)
    ttl_s: float = TTL_S
    tenant_bytes: int | None = None
    queue_bytes: int = QUEUE_BYTES
    connections: int = CONNECTIONS

    @property
    def epoch_ms(self) -> int:
        """Milliseconds for which an epoch is kept after the last write in it: longer than all of its values."""
        return round(2000 * self.ttl_s)


def check_store(store: str) -> None:
    """Raise ConfigurationError for a value of `store` that is neither a known word nor a valid URL."""
    if store not in (EMBEDDED, MEMORY, OFF):
        check_url(store)


def check_url(url: str) -> dict[str, Any]:
    """Return redis-py's settings for a URL. Raises ConfigurationError, which does not show the password."""
    from redis import connection as of_redis

    parse_url: Any = of_redis.parse_url  # untyped
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        expected = "redis://, rediss://, unix://, embedded, memory or off"
        raise ConfigurationError(
            f"{redact_url(url)!r} is not accepted; expected {expected}", param="prefix_cache", code="bad_prefix_cache"
        )
    try:
        settings: dict[str, Any] = parse_url(url)
        if scheme == "unix" and not settings.get("path"):
            raise ValueError("it has no path to a socket")
        kind = settings.get("connection_class", of_redis.Connection)
        kind(**{name: value for name, value in settings.items() if name != "connection_class"})  # does not connect yet
    except (TypeError, ValueError) as error:
        reason = "it cannot be understood" if "@" in url else error  # the error may quote a password
        raise ConfigurationError(
            f"{redact_url(url)!r} is not accepted; {reason}", param="prefix_cache", code="bad_prefix_cache"
        ) from None
    return settings


def redact_url(url: str) -> str:
    """Return a URL for display, without user, password and query."""
    scheme, found, rest = url.partition("://")
    if not found:
        return scheme
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{place.partition('?')[0]}"
