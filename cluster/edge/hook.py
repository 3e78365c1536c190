"""What Serve opens by itself, in the processes of the ingress and of its fallback proxy, closed.

It answers paths below /-/ and the RPCs of RayServeAPIService before any guard of ours, and has no setting for that.
Here they are refused. HAProxy, which must know who is healthy, asks by a path that only it was told (`Edge.check`).

Serve also binds gRPC ports on all interfaces: those that HAProxy reaches on loopback, which elsewhere would be doors
beside the edge, without its TLS and without its client certificates; and one of each replica for the others of this
machine.

Its servers bound neither a head (`BoundedHttp`, `GRPC_OPTIONS`) nor the body that comes after an early answer
(`EarlyAnswer`).

And its own proxy forgets with which status a stream ended in which there was no message. What it hands on says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from .edge import GRPC_HEALTH, HTTP_HEALTH, LOOPBACK, OWN_PATHS, SERVES_OWN, body_of

HOOK = f"{__name__}.close"
INSTALL = f"{__package__}.manager.install"
SPREAD = "MOTLEY_SPREAD"  # "1" in a cluster that others have started
CHECK = "MOTLEY_HEALTH_CHECK"  # holds `Edge.check`; not set without HAProxy, when nobody asks


def close() -> list[Any]:
    """Serve calls it in its proxy and the ingress before they bind; the HTTP middlewares, outermost last."""
    from ray.serve._private import default_impl, grpc_util, proxy_request_response
    from starlette.middleware import Middleware

    from .bounded_http import bound_heads
    from .early_answer import EarlyAnswer
    from .forwarded import ForwardedContext
    from .heads import GRPC_OPTIONS

    check = os.environ.get(CHECK)
    if check is not None:
        default_impl.add_grpc_address = _bind
    grpc_util.add_RayServeAPIServiceServicer_to_server = partial(_add_check, check)
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = [*grpc_util.DEFAULT_GRPC_SERVER_OPTIONS, *GRPC_OPTIONS]
    proxy_request_response.RayServegRPCContext = ForwardedContext
    bound_heads()
    keep_inside()
    return [Middleware(Refuse, check=check), Middleware(EarlyAnswer)]


def keep_inside() -> None:
    """The port by which other replicas call this one is for this machine. To be called in each replica's process.

    In a cluster that others have started they call one another by their nodes' addresses; a firewall keeps others out.
    """
    if os.environ.get(SPREAD) == "1":
        return
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    def bind(server: Any, address: str) -> Any:
        return add_port_to_grpc_server(server, f"{LOOPBACK}:{address.rpartition(':')[2]}")

    replica.add_port_to_grpc_server = bind


def started_inside(make_worker: Callable[[], Any]) -> Any:
    """What `make_worker` makes, in a replica's process, before Serve opens a port there.

    It is here, and not where deployments are made, as the process imports whatever module it is in before it starts.
    """
    keep_inside()
    return make_worker()


class Refuse:
    """ASGI middleware: 404 below /-/; `check` alone is passed on, as the health check that Serve knows."""

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
            answer = body_of(SERVES_OWN).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": answer})


def _add_check(check: str | None, _: Any, server: Any) -> None:
    """In place of the whole RayServeAPIService: what answers its Healthz, as the method `check`."""
    if check is None:
        return
    import grpc
    from ray.serve._private.grpc_util import gRPCGenericServer
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    answer = server.service_handler_factory(service_method=GRPC_HEALTH, streaming_type=gRPCStreamingType.UNARY_UNARY)
    service, method = check.strip("/").split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    # Not by Serve's own `add_generic_rpc_handlers`, for which a method's name also says what answers.
    add = super(gRPCGenericServer, server).add_generic_rpc_handlers
    add((grpc.method_handlers_generic_handler(service, handlers),))


def _bind(server: Any, address: str) -> None:
    server.add_insecure_port(f"{LOOPBACK}:{address.rpartition(':')[2]}")
