"""A real gRPC server whose servicer is an ingress of this process, registered as Serve does it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from motley.cluster.transport.grpc_server import servicers


@asynccontextmanager
async def serving(ingress: Any) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server()
    for path in servicers.SERVICER_FUNCTIONS:
        getattr(servicers, path.rpartition(".")[2])(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
