"""A control plane's server, and a client with an admin's key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from certificates import Certificates
from fake_fleet import Bench

from motley.cluster.fleet.control.rpcs.control_server import AdminEndpoint, start_server
from motley.cluster.protos import control_pb2_grpc
from motley.cluster.protos import externalscaler_pb2_grpc as keda_grpc
from motley.cluster.security.auth.api_keys import KeyRing, StoredKey, hash_key, new_key
from motley.cluster.security.edge.ports import free_port_block
from motley.cluster.security.edge.tls import choose_tls

ADMIN, TENANT, READER = new_key(), new_key(), new_key()
KEYS = KeyRing(
    [
        StoredKey("ops", hash_key(ADMIN), scope="admin"),
        StoredKey("alice", hash_key(TENANT)),
        StoredKey("keda", hash_key(READER), scope="metrics"),
    ]
)
AS_ADMIN = (("authorization", f"Bearer {ADMIN}"),)


@dataclass
class Plane:
    bench: Bench
    channel: grpc.aio.Channel
    target: str

    def __post_init__(self) -> None:
        self.stub: Any = control_pb2_grpc.ControlPlaneStub(self.channel)
        self.keda: Any = keda_grpc.ExternalScalerStub(self.channel)

    async def call(self, name: str, request: Any, metadata: Any = AS_ADMIN) -> Any:
        return await getattr(self.stub, name)(request, metadata=metadata, timeout=20)


@asynccontextmanager
async def admin_server(replicas: int = 1, *, certificates: Certificates | None = None) -> AsyncIterator[Plane]:
    bench = Bench(replicas)
    await bench.steps()
    port = free_port_block(1)
    target = f"127.0.0.1:{port}"
    tls = None if certificates is None else choose_tls(certificates.cert, certificates.key, None)
    server = await start_server(bench.plane, KEYS, AdminEndpoint("127.0.0.1", port, tls))
    if certificates is None:
        opened = grpc.aio.insecure_channel(target)
    else:
        opened = grpc.aio.secure_channel(target, certificates.channel_credentials(own=False))
    async with opened as channel:
        yield Plane(bench, channel, target)
    await server.stop(None)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
