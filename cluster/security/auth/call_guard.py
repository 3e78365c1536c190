"""Access control of all protocols. With API keys a call needs one; without, only this machine may call (keyless rule).

Behind HAProxy every peer is 127.0.0.1, so the peer alone proves nothing: without keys the start refuses to bind off
loopback (`check_bind`), and each call must neither have been forwarded nor name a foreign host. A direct port that
listens on all interfaces serves loopback peers only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from ...service_errors import ConfigurationError, Forbidden, Unauthenticated

FORWARDED = ("forwarded", "via", "x-real-ip")
FORWARDED_PREFIX = "x-forwarded-"

Headers = Sequence[tuple[str, str]]  # names in upper or lower case; gRPC metadata have the same form


class CallerKeys(Protocol):
    def tenant_of(self, key: str) -> str | None: ...
    def reader_of(self, key: str) -> str | None: ...


class CallGuard:
    """Access control that is asked about every call of every protocol before anything else. It denies by default.

    keys          the API keys; None: the keyless rule applies
    open_health   health checks need no key, for load balancers that have none
    open_metrics  metrics need no key on this machine, for scrapers that have none
    """

    def __init__(
        self, keys: CallerKeys | None = None, *, open_health: bool = False, open_metrics: bool = False
    ) -> None:
        self._keys = keys
        self._open_health = open_health
        self._open_metrics = open_metrics

    def tenant(self, peer: str, headers: Headers, *, host: str | None = None, health: bool = False) -> str:
        """Return the calling tenant; empty without keys. Raises Unauthenticated or Forbidden.

        host    the Host header, for protocols that have one
        health  the call is a health check and nothing else
        """
        if self._keys is None:
            check_peer(peer, (name for name, _ in headers))
            if host is not None:
                check_host(host)
            return ""
        given = credentials(headers)
        tenant = self._keys.tenant_of(given.pop()) if len(given) == 1 else None
        if tenant is None and not (health and self._open_health):
            # The same message whatever was wrong, since different ones would reveal which part was right.
            raise Unauthenticated(
                "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
            )
        return tenant or ""

    def reader(self, peer: str, headers: Headers, host: str) -> str:
        """Return who reads metrics; empty without keys. Raises Unauthenticated, or Forbidden for a tenant's key."""
        if self._keys is None:
            return self.tenant(peer, headers, host=host)
        given = credentials(headers)
        if not given and self._open_metrics:
            check_local(peer, headers, host)
            return ""
        return find_reader(self._keys, given.pop() if len(given) == 1 else "")


def find_reader(keys: CallerKeys, key: str) -> str:
    """Return who may read metrics by this key. Raises Unauthenticated, or Forbidden for a tenant's key."""
    if (reader := keys.reader_of(key)) is not None:
        return reader
    if keys.tenant_of(key) is not None:
        raise Forbidden(
            "this is a tenant's key; metrics are of all tenants: motley keys new NAME --metrics", code="not_reader"
        )
    raise Unauthenticated(
        "a key for metrics, or an admin's, is required: Authorization: Bearer KEY, or x-api-key: KEY",
        code="invalid_api_key",
    )


def credentials(headers: Headers) -> set[str]:
    """Return all different keys of a call; more than one is as bad as none."""
    found = set()
    for name, value in headers:
        match name.lower():
            case "authorization":
                scheme, _, key = value.strip().partition(" ")
                found.add(key.strip() if scheme.lower() == "bearer" else "")
            case "x-api-key":
                found.add(value.strip())
    return found


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Return whether an address or name can only be reached from this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_bind(host: str, *, keys: bool = False, tls: bool = False, tls_upstream: bool = False) -> None:
    """Raise ConfigurationError for an address that would admit strangers, or send keys unencrypted."""
    if not keys and (tls or tls_upstream):
        flag = "--tls-cert" if tls else "--tls-terminated-upstream"
        raise ConfigurationError(
            f"{flag} means that others than this machine will call; give their keys with --api-keys FILE",
            param="api_keys",
            code="keys_required",
        )
    if is_loopback(host):
        return
    if not keys:
        raise ConfigurationError(
            f"--host {host} would let other machines in, and there are no API keys; give --api-keys FILE, or use "
            "--host 127.0.0.1",
            param="host",
            code="keys_required",
        )
    if not tls and not tls_upstream:
        raise ConfigurationError(
            f"--host {host} would let keys and prompts travel in the clear; give --tls-cert and --tls-key, or "
            "--tls-terminated-upstream if something before this service does it",
            param="host",
            code="tls_required",
        )


def check_peer(peer: str, header_names: Iterable[str]) -> None:
    """Raise Forbidden for a call that did not start on this machine."""
    if not is_loopback(peer):
        raise Forbidden("without API keys only this machine may call", code="keys_required")
    for name in header_names:
        if name.lower() in FORWARDED or name.lower().startswith(FORWARDED_PREFIX):
            raise Forbidden(f"without API keys forwarded calls are refused ({name})", param=name, code="forwarded")


def check_local(peer: str, headers: Headers, host: str) -> None:
    """Raise Unauthenticated unless a call without a key came from this machine.

    Behind HAProxy the header x-forwarded-for, which it sets anew, has the peer; without it there is no such header.
    """
    forwarded = [value for name, value in headers if name.lower() == "x-forwarded-for"]
    peers = [peer, *(each.strip() for value in forwarded for each in value.split(","))]
    if not all(map(is_loopback, peers)) or any(name.lower() in FORWARDED for name, _ in headers):
        raise Unauthenticated(
            "without a key only this machine may read metrics: motley keys new NAME --metrics", code="invalid_api_key"
        )
    check_host(host)


def check_host(header: str) -> None:
    """Raise Forbidden unless the Host header names this machine, so that no web page can rebind its name to it."""
    host = header[: header.rindex("]") + 1] if header.startswith("[") and "]" in header else header.partition(":")[0]
    if not is_loopback(host):
        raise Forbidden(f"without API keys the Host must be this machine, not {host!r}", param="Host", code="host")
