"""Hook that closes what Serve opens by itself, in the processes of the ingress and of its fallback proxy.

Serve answers paths below /-/ and the RPCs of RayServeAPIService before any guard of Motley's, and has no setting for
that. Here they are refused. HAProxy, which must know who is healthy, asks by a secret path (`HAProxyEdge.check`).

Serve also binds gRPC ports on all interfaces: those that HAProxy reaches on loopback, which from elsewhere would bypass
the edge's TLS and its client certificates; and one of each replica for the other replicas of this machine.

Its servers bound neither a head (`BoundedHttp`, `GRPC_OPTIONS`) nor the body that comes after an early answer
(`EarlyResponseMiddleware`).

And its own proxy loses the status of a stream that ended without a message; `ForwardedContext` marks its calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ...ray_compat.visible_names import HTTP_HEALTH, OWN_PATHS
from .haproxy_config import LOOPBACK, SERVES_OWN, error_page_body

HOOK = f"{__name__}.close"
FORMER_HOOK = "motley.cluster.edge.hook.close"  # that of earlier versions: nodes may have been started with it
INSTALL = f"{__package__}.haproxy_manager.install"
SPREAD = "MOTLEY_SPREAD"  # environment variable: "1" in a cluster that was started by others
CHECK = "MOTLEY_HEALTH_CHECK"  # environment variable with `HAProxyEdge.check`; not set without HAProxy


def close() -> list[Any]:
    """Return the HTTP middlewares, outermost last, and patch Serve. Serve calls it in its proxy and the ingress before
    they bind ports.
    """
    from ...ray_compat import serve_servers  # imports Serve's modules, before all else here

    # isort: split
    from starlette.middleware import Middleware

    from .bounded_http import bound_heads
    from .early_response import EarlyResponseMiddleware
    from .forwarded_context import ForwardedContext
    from .head_limits import GRPC_OPTIONS

    check = os.environ.get(CHECK)
    if check is not None:
        serve_servers.replace_grpc_bind(_bind)
    serve_servers.replace_own_service(partial(_add_check, check))
    serve_servers.add_grpc_options(GRPC_OPTIONS)
    serve_servers.replace_context_of_forwarded_calls(ForwardedContext)
    bound_heads()
    bind_to_loopback()
    return [Middleware(ServePathFilter, check=check), Middleware(EarlyResponseMiddleware)]


def bind_to_loopback() -> None:
    """Bind the port by which other replicas call this one to loopback. Call it in each replica's process.

    In a cluster that was started by others, replicas call one another by their nodes' addresses, so the port stays
    open; a firewall must protect it.
    """
    if os.environ.get(SPREAD) == "1":
        return
    from ...ray_compat.replica_port import bind_replica_port

    bind_replica_port(LOOPBACK)


def make_on_loopback(make_worker: Callable[[], Any]) -> Any:
    """Return what `make_worker` returns, in a replica's process, before Serve opens a port there.

    It stands in this module, since the process imports the function's module before it starts.
    """
    bind_to_loopback()
    return make_worker()


class ServePathFilter:
    """ASGI middleware that answers 404 below /-/; only `check` is passed on, as the health check that Serve knows."""

    def __init__(self, app: Any, check: str | None) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if not path.startswith(OWN_PATHS):
            await self._app(scope, receive, send)
        elif path == self._check:
            await self._app({**scope, "path": HTTP_HEALTH}, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            body = error_page_body(SERVES_OWN).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def _add_check(check: str | None, _: Any, server: Any) -> None:
    """Register only the handler of Healthz, as the method `check`, in place of the whole RayServeAPIService."""
    if check is None:
        return
    import grpc

    from ...ray_compat.serve_servers import add_handlers, health_handler

    service, method = check.strip("/").split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(health_handler(server))}
    add_handlers(server, [grpc.method_handlers_generic_handler(service, handlers)])


def _bind(server: Any, address: str) -> None:
    server.add_insecure_port(f"{LOOPBACK}:{address.rpartition(':')[2]}")
