"""gRPC server of the control plane, with health and reflection; each service has its guard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from .....replicas.errors import Unavailable
from ....api.health.health_protocol import HealthProtocol
from ....api.health.health_rpcs import HealthRpcs
from ....api.reflection_rpcs import ReflectionRpcs
from ....one_shot_event import OneShotEvent, create_event
from ....protos import control_pb2, control_pb2_grpc, externalscaler_pb2, externalscaler_pb2_grpc
from ....security.edge.head_limits import GRPC_OPTIONS
from ....security.edge.ports import bracket_host, free_port_block
from ....security.edge.tls import EdgeTls
from ....transport.grpc_server import reflection_v1
from ....transport.grpc_server.servicers import UnparsedHandlerRegistrar
from ....transport.slow_clients import SlowClientMonitor
from ..reconciler.fleet_reconciler import FleetReconciler
from .admin_guard import AdminGuard, AdminKeys
from .control_rpcs import ControlRpcs
from .keda_rpcs import KedaRpcs

MAX_MESSAGE_BYTES = 64 * 2**10  # requests of operators and KEDA are short
MAX_CALLS = 512  # maximum concurrent calls
MAX_PORT_TRIES = 20  # ports to try, since a free port may be taken a moment later
BIND_S = 20.0  # longest wait for the previous process to release the port
# Limits on connections without calls, in milliseconds, since there is no HAProxy in front of this port.
_UNUSED = (("grpc.server_handshake_timeout_ms", 10_000), ("grpc.max_connection_idle_ms", 90_000))
STALE_S = 15.0  # a control plane that has not seen the fleet for this long is unhealthy

SERVICES = (
    control_pb2.DESCRIPTOR.services_by_name["ControlPlane"],
    externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    reflection_v1.SERVICE,
)


@dataclass(frozen=True, slots=True)
class AdminEndpoint:
    """Address where the control plane's server listens.

    tls          certificate and key, which it has unless it listens on loopback only
    open_health  health checks need no key
    yields       take another port if this one is taken: two services that start together may find the same port free
    """

    host: str
    port: int
    tls: EdgeTls | None = None
    open_health: bool = False
    yields: bool = False


class _AdminHealthRpcs(HealthRpcs):
    def __init__(self, plane: FleetReconciler, guard: AdminGuard) -> None:
        names = ("", *(service.full_name for service in SERVICES))
        self.guard, self.readers = guard, SlowClientMonitor()
        self.health = HealthProtocol(_ReconcilerHealth(plane), names)


class _AdminReflectionRpcs(ReflectionRpcs):
    reflected = SERVICES

    def __init__(self, guard: AdminGuard) -> None:
        self.guard, self.readers = guard, SlowClientMonitor()


class _ReconcilerHealth:
    """Health of the control plane: it is healthy while it sees the fleet."""

    def __init__(self, plane: FleetReconciler, clock: Callable[[], float] = time.monotonic) -> None:
        self.stopping: OneShotEvent = create_event()
        self._plane = plane
        self._clock = clock

    @property
    def draining(self) -> bool:
        return self.stopping.done()

    async def load(self) -> None:
        if not self._plane.observed_s or self._clock() - self._plane.observed_s > STALE_S:
            raise Unavailable("the state of the fleet cannot be read", code="not_ready")


async def start_on_free_port(
    plane: FleetReconciler, keys: AdminKeys, endpoint: AdminEndpoint
) -> tuple[grpc.aio.Server, int]:
    """Start the server; return it with its port, which is the requested one or, if allowed, another free one.

    Raises OSError.
    """
    if not endpoint.yields:
        return await start_server(plane, keys, endpoint), endpoint.port
    guard = AdminGuard(keys, open_health=endpoint.open_health)
    for port in (endpoint.port, *(free_port_block(1) for _ in range(MAX_PORT_TRIES))):
        server = _server(plane, keys, guard)
        try:
            _bind(server, replace(endpoint, port=port))
        except RuntimeError:
            continue  # another process took the port first
        await server.start()
        return server, port
    raise OSError("no port is free for the control plane")


async def start_server(plane: FleetReconciler, keys: AdminKeys, endpoint: AdminEndpoint) -> grpc.aio.Server:
    """Start the server and return it. Raises OSError if the port stays taken for `BIND_S`."""
    guard = AdminGuard(keys, open_health=endpoint.open_health)
    deadline = time.monotonic() + BIND_S
    while True:
        server = _server(plane, keys, guard)
        try:
            _bind(server, endpoint)
        except RuntimeError as error:
            if time.monotonic() > deadline:
                raise OSError(f"port {endpoint.port} of the control plane is taken") from error
            await asyncio.sleep(0.2)
            continue
        await server.start()
        return server


def _server(plane: FleetReconciler, keys: AdminKeys, guard: AdminGuard) -> grpc.aio.Server:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            *GRPC_OPTIONS,
            *_UNUSED,
        ],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    patient = cast(grpc.aio.Server, UnparsedHandlerRegistrar(server))
    control_pb2_grpc.add_ControlPlaneServicer_to_server(ControlRpcs(plane, guard), patient)  # type: ignore[arg-type]
    keda = KedaRpcs(plane, AdminGuard(keys, later=True))
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(keda, patient)  # type: ignore[arg-type]
    health_pb2_grpc.add_HealthServicer_to_server(_AdminHealthRpcs(plane, guard), patient)
    reflection = _AdminReflectionRpcs(guard)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection, patient)
    reflection_v1.add_reflection_v1_handlers(server, reflection)
    return server


def _bind(server: grpc.aio.Server, endpoint: AdminEndpoint) -> None:
    address = f"{bracket_host(endpoint.host)}:{endpoint.port}"
    if endpoint.tls is None:
        server.add_insecure_port(address)
        return
    tls = endpoint.tls
    ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    pair = (_read(tls.key), _read(tls.cert))
    server.add_secure_port(address, grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None))


def _read(path: Path) -> bytes:
    return path.read_bytes()
