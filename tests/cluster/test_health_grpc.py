"""grpc.health.v1 says what the replica says of itself."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from motley.cluster.protocols import health
from motley.replicas.errors import EngineFault

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


async def test_health_follows_the_replica(
    grpc_target: str, worker: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck() -> None:
        raise EngineFault("a step has been running for more than 60 s")

    monkeypatch.setattr(health, "WATCH_PERIOD_S", 0.0)
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(pb.HealthCheckRequest(service="motley.v1.Inference"))
        assert (await watch.read()).status == SERVING
        for service in health.SERVICES:
            assert (await stub.Check(pb.HealthCheckRequest(service=service))).status == SERVING
        monkeypatch.setattr(worker, "check_health", stuck)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(pb.HealthCheckRequest())).status == NOT_SERVING
        statuses = (await stub.List(pb.HealthListRequest())).statuses
        assert {name: status.status for name, status in statuses.items()} == dict.fromkeys(health.SERVICES, NOT_SERVING)
        reply = await call("GET", "/health")
        assert (reply.status, reply.json()["error"]["type"]) == (503, "server_error")
        monkeypatch.undo()
        assert (await watch.read()).status == SERVING
        watch.cancel()


async def test_unknown_services(grpc_target: str) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(pb.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(pb.HealthCheckRequest(service="other"))
        assert (await watch.read()).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
