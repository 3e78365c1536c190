"""Conversion of a fleet's prefix cache settings to what each replica is given, done once when the fleet is deployed."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ....replicas.kv.store.store_access import SECRET_BYTES, PrefixStoreAccess
from ...prefix_store.embedded_redis import EmbeddedRedis, set_memory_limit
from ...prefix_store.redis_binaries import find_redis_binaries, no_redis
from ...prefix_store.redis_source import EMBEDDED, MEMORY, OFF, RedisSource, redact_url
from ...prefix_store.redis_store import redis_prefix_access
from ...service_errors import ConfigurationError
from ..spec.fleet_spec import FleetSpec, fleet_prefix_wire
from ..spec.prefix_cache_spec import PrefixCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """Settings by which the replicas of a fleet share prefixes.

    own     URL of the service's own Redis; empty if there is none
    secret  secret of the fleet
    """

    own: str = ""
    secret: bytes = field(repr=False)

    @property
    def salt(self) -> bytes:
        """Salt of tenants' prefixes, the same for all who have the secret, now and after a restart."""
        return hmac.digest(self.secret, b"motley tenants' prefixes: salt, v1", "sha256")[:16]


def start_embedded_redis(spec: FleetSpec, folder: Path, *, null: bool = False) -> Future[EmbeddedRedis | None]:
    """Start the service's own Redis in `folder`, if one is wanted, while the caller starts the rest.

    The result is None without one. If none can be started, a line is printed and the service runs without.
    """
    executor = ThreadPoolExecutor(1, "own-redis-start")
    starting = executor.submit(_start_first, spec, folder, null)
    executor.shutdown(wait=False)
    return starting


def _start_first(spec: FleetSpec, folder: Path, null: bool) -> EmbeddedRedis | None:
    cache = spec.prefix_cache
    simulated = all(pool.simulate is not None for pool in spec.pools)
    if cache.store != EMBEDDED or not cache.reuse or null or simulated:
        return None
    binaries = find_redis_binaries()
    for binary in binaries:
        own = EmbeddedRedis(binary, folder, cache.memory, _report)
        try:
            own.start()
        except ConfigurationError as error:  # such as one before Redis 6.2, which knows other rules
            _report(error.message)
        else:
            return own
    _report("off: no server could be started" if binaries else f"off: {no_redis()}")
    return None


def describe_prefix_sharing(spec: FleetSpec, own: EmbeddedRedis | None) -> str:
    """Return in words where the replicas of a fleet share prefixes. `own`: the service's own Redis."""
    cache = spec.prefix_cache
    if not cache.reuse:
        return "not reused"
    if cache.store == EMBEDDED:
        return "not shared by replicas" if own is None else f"shared through {own.where}"
    if cache.store in (MEMORY, OFF):
        return "not shared by replicas"
    return f"shared through {redact_url(cache.store)}"


def limit_embedded_redis(spec: FleetSpec, shared: PrefixSharing) -> None:
    """Give the service's own running Redis the fleet's memory limit; print a line if that fails."""
    if spec.prefix_cache.store != EMBEDDED or not shared.own:
        return
    try:
        there = set_memory_limit(Path(shared.own.removeprefix("unix://")), spec.prefix_cache.memory)
    except OSError as error:
        _report(f"the memory of its Redis stays as it is: {error.strerror}")
    else:
        if not there:
            _report("its Redis does not answer; it has the memory of now when it is started again")


def choose_prefix_sharing(spec: FleetSpec, own: str = "", secret: bytes | None = None) -> PrefixSharing:
    """Return how the fleet shares prefixes.

    The secret is that of the file `prefix_cache.secret` if the fleet names one, else `secret`, that of the fleet that
    is deployed already, else a new one. Raises ConfigurationError if the file cannot be used.

    own  URL of the service's own Redis; empty if there is none
    """
    path = spec.prefix_cache.secret
    return PrefixSharing(own=own, secret=read_secret(path) if path is not None else secret or os.urandom(SECRET_BYTES))


def warn_if_no_embedded_redis(spec: FleetSpec, shared: PrefixSharing) -> None:
    """Print a line if the fleet wants a Redis of its own and the running service has none.

    Such a server only starts with the service. On a Ray cluster that others started nobody would supervise it, and not
    all nodes could reach its socket.
    """
    if spec.prefix_cache.store == EMBEDDED and spec.prefix_cache.reuse and not shared.own:
        _report("off: what runs has no Redis of its own; name one that its nodes reach by prefix_cache.store")


def print_shared_dtype(spec: FleetSpec, shared: PrefixSharing) -> None:
    """Print the dtype in which pools of different numerics share KV, and why, if it was chosen automatically."""
    cache = spec.prefix_cache
    wire, why = fleet_prefix_wire(spec)
    if wire is not None and cache.wire == "auto" and prefix_access_factory(cache, shared) is not None:
        _report(f"pools share KV in {wire}: {why}")


def prefix_access_factory(
    cache: PrefixCacheSpec, shared: PrefixSharing | None
) -> Callable[[], PrefixStoreAccess] | None:
    """Return a function that creates a replica's access to the store, in the replica's process.

    None: the settings give it no access, or one to its own memory only.
    """
    if shared is None or not cache.reuse or cache.store in (MEMORY, OFF):
        return None
    url = shared.own if cache.store == EMBEDDED else cache.store
    if not url:
        return None
    source = RedisSource(url=url, secret=shared.secret, ttl_s=cache.ttl_s, tenant_bytes=cache.tenant_memory)
    return partial(redis_prefix_access, source)


def read_secret(path: Path) -> bytes:
    """Read a fleet's secret from a file. Raises ConfigurationError."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"prefix secret {path}: {error.strerror}", param="prefix_secret", code="bad_prefix_cache"
        ) from None
    if len(text) < SECRET_BYTES:
        message = (
            f"prefix secret {path}: {len(text)} bytes; expected {SECRET_BYTES} at least, as of `openssl rand -hex 32`"
        )
        raise ConfigurationError(message, param="prefix_secret", code="bad_prefix_cache")
    return hashlib.sha256(text).digest()


def _report(line: str) -> None:
    print(f"prefix cache: {line}", file=sys.stderr, flush=True)
