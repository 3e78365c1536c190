"""The keyless rule: without API keys this service is for this machine only.

Behind HAProxy every peer is 127.0.0.1, so the peer alone proves nothing: the start refuses to bind off
loopback (`check_bind`), and each call must neither have been forwarded nor name a foreign host. A direct
port that listens on all interfaces serves loopback peers only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from .failures import ConfigurationError, Forbidden

FORWARDED = ("forwarded", "via", "x-real-ip")
FORWARDED_PREFIX = "x-forwarded-"


def is_loopback(host: str) -> bool:
    """An address or name that only this machine can reach."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def check_bind(host: str) -> None:
    """Raise ConfigurationError unless `host` is loopback: there are no API keys yet to let others in by."""
    if not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} would let other machines in, and there are no API keys; use --host 127.0.0.1",
            param="host",
            code="keys_required",
        )


def check_peer(peer: str, header_names: Iterable[str]) -> None:
    """Raise Forbidden for a call that did not start on this machine."""
    if not is_loopback(peer):
        raise Forbidden("without API keys only this machine may call", code="keys_required")
    for name in header_names:
        if name.lower() in FORWARDED or name.lower().startswith(FORWARDED_PREFIX):
            raise Forbidden(f"without API keys forwarded calls are refused ({name})", param=name, code="forwarded")


def check_host(header: str) -> None:
    """Raise Forbidden unless the Host header names this machine (else a web page could rebind its name)."""
    host = header[: header.rindex("]") + 1] if header.startswith("[") and "]" in header else header.partition(":")[0]
    if not is_loopback(host):
        raise Forbidden(f"without API keys the Host must be this machine, not {host!r}", param="Host", code="host")
