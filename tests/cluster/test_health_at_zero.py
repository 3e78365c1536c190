"""Health while there is no replica: well as long as what comes is held for the next one, and which it is is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import openapi_conformance
import pytest
from echo_worker import EchoWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_servers import serving
from local_ingress import make_ingress

from motley.cluster.api.health import health_protocol
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc, kserve_pb2, kserve_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from motley.cluster.routing import replica_client
from motley.cluster.routing.fleet_status import FleetStatus
from motley.cluster.routing.queueing.request_queue import RoutingConfig
from motley.cluster.service.deployment import ingress as ingress_module
from motley.cluster.service.deployment import served_profile
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.caller import Caller

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Service:
    """One ingress, one pool, and a replica that comes and goes as a control plane has it."""

    def __init__(self, ingress: Any, worker: EchoWorker) -> None:
        self.ingress, self._worker = ingress, worker
        self._pool = ingress._handles["cpu"]
        self._replicas = dict(self._pool.replicas)
        self.model = ingress.admitter.info.name
        self.call = openapi_conformance.caller(ingress.__serve_build_asgi_app__())

    def comes(self, replicas: dict[str, Any] | None = None) -> None:
        self._pool.replicas.update(self._replicas if replicas is None else replicas)
        for name in self._pool.replicas:
            self.ingress.router.live.joined(replace(self._worker.profile(), replica_id=name, pool="cpu"))

    def goes(self) -> None:
        for name in list(self._pool.replicas):
            self.ingress.router.live.left(name)
        self._pool.replicas.clear()

    async def told(self, target: str) -> dict[str, Any]:
        """Return for each protocol, by its name, whether it says that it is ready."""
        async with grpc.aio.insecure_channel(target) as channel:
            check, kserve = health_pb2_grpc.HealthStub(channel), kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
            listed = (await check.List(health_pb2.HealthListRequest())).statuses
            vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            found = {
                "Check": (await check.Check(health_pb2.HealthCheckRequest())).status == SERVING,
                "List": {status.status for status in listed.values()} == {SERVING},
                "ServerReady": (await kserve.ServerReady(kserve_pb2.ServerReadyRequest())).ready,
                "ModelReady": (await kserve.ModelReady(kserve_pb2.ModelReadyRequest(name=self.model))).ready,
                "HealthCheck": (await vllm.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy,
            }
        for path in ("/health", "/v2/health/ready", f"/v2/models/{self.model}/ready"):
            found[path] = (await self.call("GET", path)).status == 200
        return found

    async def state(self) -> tuple[str, int]:
        body = (await self.call("GET", "/health")).json()
        return body["state"], body["held"]


@pytest.fixture
async def worker(folder: Path) -> EchoWorker:
    worker = EchoWorker(str(folder))
    await worker.start()
    return worker


async def a_service(folder: Path, worker: EchoWorker, **routing: Any) -> Service:
    ingress_config = IngressConfig(routing=RoutingConfig(**routing))
    service = Service(await make_ingress(folder, worker, ingress_config=ingress_config), worker)
    service.comes()
    return service


@pytest.fixture
async def service(folder: Path, worker: EchoWorker) -> Service:
    return await a_service(folder, worker)


@pytest.fixture
async def target(service: Service) -> AsyncIterator[str]:
    async with serving(service.ingress) as target:
        yield target


async def completes(target: str) -> str:
    async with grpc.aio.insecure_channel(target) as channel:
        asked = pb.CompleteRequest(text="ab", sampling=pb.SamplingParams(max_tokens=4))
        reply = await inference_pb2_grpc.InferenceStub(channel).Complete(asked, timeout=60)
        return str(reply.choices[0].text)


async def test_at_zero_every_protocol_is_ready_and_what_comes_wakes_a_replica(service: Service, target: str) -> None:
    expected = await completes(target)
    assert set((await service.told(target)).values()) == {True}
    assert await service.state() == ("serving", 0)
    service.goes()
    assert set((await service.told(target)).values()) == {True}
    assert await service.state() == ("holding", 0)
    held = asyncio.create_task(completes(target))
    async with asyncio.timeout(60):
        while not service.ingress.router.held:
            await asyncio.sleep(0.001)
    assert await service.state() == ("holding", 1), "which is what a policy starts a replica for"
    service.comes()
    assert await held == expected
    assert await service.state() == ("serving", 0)


async def test_a_watch_sees_no_difference(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_protocol, "WATCH_PERIOD_S", 0.0)
    watch = service.ingress.health.watch(health_pb2.HealthCheckRequest(), Caller())
    assert (await anext(watch)).status == SERVING
    changed = asyncio.ensure_future(anext(watch))
    for change in (service.goes, service.comes, service.goes):
        change()
        assert (await service.ingress.health.check(health_pb2.HealthCheckRequest())).status == SERVING
        assert not changed.done()
    await service.ingress.drain()
    assert (await changed).status == NOT_SERVING


async def test_vllm_and_the_log_of_a_balancer_are_told_which(service: Service, target: str) -> None:
    service.goes()
    reply = await service.ingress.vllm.health()
    assert (reply.healthy, "held" in reply.message) == (True, True)
    service.comes()
    assert (await service.ingress.vllm.health()).message == ""


async def test_replicas_that_do_not_start_are_no_promise(service: Service, target: str) -> None:
    """The control plane says so with its next look; a replica that comes all the same counts for more."""
    service.goes()
    service.ingress.router.failing = "cpu: no such file"
    assert set((await service.told(target)).values()) == {False}
    reply = await service.call("GET", "/health")
    assert (reply.status, reply.json()["error"]["message"]) == (503, "replicas do not start: cpu: no such file")
    service.comes()
    assert set((await service.told(target)).values()) == {True}


async def test_what_is_not_held_is_not_ready(folder: Path, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "ALL_SILENT_S", 0.05)
    service = await a_service(folder, worker, hold_s=0.0)
    service.goes()
    assert (await service.call("GET", "/health")).status == 503


async def test_a_service_that_drains_is_not_ready(service: Service, target: str) -> None:
    service.goes()
    await service.ingress.drain()
    assert set((await service.told(target)).values()) == {False}


async def test_one_whose_first_replica_has_not_come_is_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads: whoever rolls out a new service goes on with the old one meanwhile."""
    monkeypatch.setattr(replica_client, "ALL_SILENT_S", 0.05)
    service.goes()
    service.ingress.router.live.had_replica = False
    assert (await service.call("GET", "/health")).status == 503


async def test_an_ingress_that_begins_at_zero_takes_requests_in(
    folder: Path, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for a replica to tell what is served, and so no request would ever wake one."""
    monkeypatch.setattr(ingress_module, "DEMAND_POLL_S", 0.01)
    kept = served_profile.encode_profile(str(folder), worker.profile())
    monkeypatch.setattr(
        ingress_module, "load_profile_at_zero", lambda model: served_profile.decode_profile(model, kept)
    )
    before = await a_service(folder, worker)
    async with asyncio.timeout(60):
        after = Service(await make_ingress(folder), worker)
    assert after.ingress.admitter.info == before.ingress.admitter.info
    assert await after.state() == ("holding", 0)
    async with serving(before.ingress) as one, serving(after.ingress) as other:
        held = asyncio.create_task(completes(other))
        async with asyncio.timeout(60):
            while not after.ingress.router.held:
                await asyncio.sleep(0.001)
        after.comes(before._replicas)
        assert await held == await completes(one)


async def test_an_ingress_takes_what_a_replica_says_of_itself_where_there_is_one(
    folder: Path, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(ingress_module, "store_served_profile", lambda *what: told.append(what))
    await a_service(folder, worker)
    assert told == [(str(folder), worker.profile())], "kept for one that begins at zero"


def test_what_is_kept_comes_back_and_of_another_model_nothing_does(worker: EchoWorker) -> None:
    profile = replace(worker.profile(), decode_s=(0.1, 0.2), choices={"weights": "why"})
    kept = served_profile.encode_profile("org/name", profile)
    assert served_profile.decode_profile("org/name", kept) == profile
    assert served_profile.decode_profile("org/other", kept) is None
    assert (
        served_profile.decode_profile("org/name", kept.replace(b"prefill_tokens_per_s", b"of another version")) is None
    )


async def test_the_control_plane_tells_which_ingress_asks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module.serve, "get_replica_context", lambda: FakeContext)
    status = await service.ingress.fleet("cpu: no such file")
    assert isinstance(status, FleetStatus)
    assert service.ingress.router.failing == "cpu: no such file"
    await service.ingress.fleet()
    assert service.ingress.router.failing == ""


class FakeContext:
    class replica_id:
        unique_id = "i"
