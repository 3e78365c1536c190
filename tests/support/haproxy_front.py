"""HAProxy before an ingress of this process: every door of a service, in the clear and over TLS, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Certificates
from edge_backends import HEALTHY, haproxy
from in_thread import in_thread
from serve_process import free_port

from motley.cluster.ray_compat.visible_names import HTTP_HEALTH
from motley.cluster.security.edge import haproxy_config
from motley.cluster.security.edge.early_response import EarlyResponseMiddleware
from motley.cluster.security.edge.haproxy_config import LOOPBACK, HAProxyEdge
from motley.cluster.security.edge.head_limits import GRPC_OPTIONS
from motley.cluster.security.edge.ports import free_port_block
from motley.cluster.security.edge.serve_patches import ServePathFilter
from motley.cluster.security.edge.tls import choose_tls
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.incoming_bodies import MAX_MESSAGE_BYTES

FRONT, DIRECT, TLS = "HAProxy", "direct", "TLS"


@dataclass(frozen=True, slots=True)
class Fronted:
    """Ports by door; those of TLS take `certificates`' authority."""

    ingress: Any
    http: dict[str, int]
    grpc: dict[str, int]
    certificates: Certificates


@contextmanager
def fronted(
    folder: Callable[[str], Path],
    worker: Any,
    ingress_config: IngressConfig,
    *,
    head_s: int = haproxy_config.HEAD_S,
    **limits: Any,
) -> Iterator[Fronted]:
    """`folder` makes an empty one, with a short path. `limits` are EarlyResponseMiddleware's.

    head_s: HAProxy's in the clear. Over TLS it is as in earnest, for a client's handshake counts for it, and takes
    seconds where many processes share two cores.
    """
    certificates = Certificates(folder("c"))
    tls = choose_tls(certificates.cert, certificates.key, None)
    plain = HAProxyEdge(host=LOOPBACK, http_port=free_port(), grpc_port=free_port())
    inner = free_port_block(2)
    ports = {"http_port": free_port(), "grpc_port": free_port(), "inner_http": inner, "inner_grpc": inner + 1}
    secure = HAProxyEdge(host=LOOPBACK, tls=tls, check=plain.check, **ports)
    around = partial(_as_serve_does, check=plain.check, **limits)
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), *GRPC_OPTIONS]
    with in_thread(worker.folder, worker, ingress_config, around, _health(plain.check), options) as served:
        direct = int(served.grpc.rpartition(":")[2])
        with (
            haproxy(folder("s"), secure, served.http_port, direct),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(haproxy_config, "HEAD_S", head_s)
            with haproxy(folder("f"), plain, served.http_port, direct):
                yield Fronted(
                    served.ingress,
                    {FRONT: plain.http_port, DIRECT: served.http_port, TLS: secure.http_port},
                    {FRONT: plain.grpc_port, DIRECT: direct, TLS: secure.grpc_port},
                    certificates,
                )


def _as_serve_does(app: Any, *, check: str, **limits: Any) -> Any:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != HTTP_HEALTH:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return EarlyResponseMiddleware(ServePathFilter(serve, check), **limits)


def _health(check: str) -> Sequence[grpc.GenericRpcHandler]:
    async def response(request: bytes, context: Any) -> bytes:
        return HEALTHY

    service, method = check.strip("/").split("/")
    return [grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(response)})]
