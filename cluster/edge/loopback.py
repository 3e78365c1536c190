"""Serve binds its own gRPC ports, of the ingress and of its fallback proxy, on all interfaces, and has no setting.

HAProxy reaches them on loopback. Elsewhere they would be doors beside the edge: without its TLS and without
its client certificates.
"""

from __future__ import annotations

from typing import Any

from .edge import LOOPBACK

HOOK = f"{__name__}.stay_on_loopback"


def stay_on_loopback() -> list[Any]:
    """Serve calls it in each process before it binds, for HTTP middlewares: there are none."""
    from ray.serve._private import default_impl

    default_impl.add_grpc_address = _bind
    return []


def _bind(server: Any, address: str) -> None:
    server.add_insecure_port(f"{LOOPBACK}:{address.rpartition(':')[2]}")
