"""grpc.health.v1 says what the replica says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from echo_worker import EchoWorker
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from local_ingress import make_ingress

from motley.cluster.api.health import health_protocol
from motley.cluster.api.health.health_protocol import HealthProtocol
from motley.cluster.transport.caller import Caller
from motley.cluster.transport.grpc_server import servicers
from motley.cluster.transport.grpc_server.servicers import add_health
from motley.replicas.errors import EngineFault, Overloaded

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


class CountedWorker(EchoWorker):
    """Counts how often it is asked for its health; `fault` is its answer."""

    asked = 0
    fault: EngineFault | None = None

    async def check_health(self) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
async def counted(folder: Path) -> CountedWorker:
    return CountedWorker(str(folder))


@pytest.fixture
async def own(folder: Path, counted: CountedWorker) -> Any:
    """An ingress for one test, which may drain it."""
    return await make_ingress(folder, counted)


@pytest.fixture
async def stub(own: Any) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    server = grpc.aio.server()
    add_health(own, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


def request(service: str = "") -> pb.HealthCheckRequest:
    return pb.HealthCheckRequest(service=service)


async def stuck() -> None:
    raise EngineFault("a step has been running for more than 60 s")


def slow() -> None:
    raise EngineFault("no step has ended for more than 5 s", code="engine_slow")


@pytest.mark.parametrize(("asked", "fault"), [("check_health", stuck), ("check_pace", slow)])
async def test_health_follows_the_replica(
    grpc_target: str, worker: Any, call: Any, monkeypatch: pytest.MonkeyPatch, asked: str, fault: Any
) -> None:
    monkeypatch.setattr(health_protocol, "WATCH_PERIOD_S", 0.0)
    async with grpc.aio.insecure_channel(grpc_target) as channel, asyncio.timeout(60):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(request("motley.v1.Inference"))
        assert (await watch.read()).status == SERVING
        for service in health_protocol.SERVICES:
            assert (await stub.Check(request(service))).status == SERVING
        monkeypatch.setattr(worker, asked, fault)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(request())).status == NOT_SERVING
        statuses = (await stub.List(pb.HealthListRequest())).statuses
        assert {name: status.status for name, status in statuses.items()} == dict.fromkeys(
            health_protocol.SERVICES, NOT_SERVING
        )
        reply = await call("GET", "/health")
        assert (reply.status, reply.json()["error"]["type"]) == (503, "server_error")
        monkeypatch.undo()
        assert (await watch.read()).status == SERVING
        watch.cancel()


def test_every_registered_service_has_its_health() -> None:
    assert set(health_protocol.SERVICES) == {"", *(service.full_name for service in servicers.SERVICES)}


async def test_unknown_services(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request("other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request("other"))
    assert (await watch.read()).status == pb.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_watches_end_with_not_serving_at_the_drain(stub: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when they would have asked again."""
    monkeypatch.setattr(health_protocol, "WATCH_PERIOD_S", 3600.0)
    watches = [stub.Watch(request()) for _ in range(3)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 3
    assert await own.drain() == 0, "whoever watches is no load"
    async with asyncio.timeout(30):
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() == grpc.StatusCode.OK
    assert (await stub.Check(request())).status == NOT_SERVING
    assert [message.status async for message in stub.Watch(request())] == [NOT_SERVING], "one that comes too late"


async def test_nobody_waits_for_a_replica_that_hangs_while_the_service_drains(
    own: Any, counted: CountedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = asyncio.Event()
    monkeypatch.setattr(counted, "check_health", hangs.wait)
    watch = own.health.watch(request(), Caller())
    asked = [asyncio.ensure_future(one) for one in (anext(watch), own.health.check(request()))]
    await asyncio.sleep(0.01)
    await own.drain()
    async with asyncio.timeout(1):
        assert [answer.status for answer in await asyncio.gather(*asked)] == [NOT_SERVING] * 2
    hangs.set()
    await watch.aclose()


async def test_watches_of_one_caller_are_capped_and_their_places_come_back(
    stub: Any, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_protocol, "WATCH_PERIOD_S", 0.01)
    watches = [stub.Watch(request()) for _ in range(health_protocol.MAX_WATCHES)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * health_protocol.MAX_WATCHES
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Watch(request()).read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for other in (Caller(tenant="other", peer="127.0.0.1"), Caller(peer="192.0.2.7")):
        watch = own.health.watch(request(), other)
        assert (await anext(watch)).status == SERVING, "the cap is each caller's own"
        await watch.aclose()
    monkeypatch.setattr(health_protocol, "MAX_OF_TENANT", health_protocol.MAX_WATCHES)
    with pytest.raises(Overloaded):
        await anext(own.health.watch(request(), Caller(peer="192.0.2.7")))
    assert (await stub.Check(request())).status == SERVING, "checks are not watches"
    for watch in watches:
        watch.cancel()
    async with asyncio.timeout(10):
        while own.health._watches.total():
            await asyncio.sleep(0.005)
    watch = stub.Watch(request())
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_watchers_share_one_question(own: Any, counted: CountedWorker) -> None:
    protocol: HealthProtocol = own.health
    counted.asked = 0
    watchers = [protocol.watch(request(), Caller(tenant=str(number))) for number in range(50)]
    answers = await asyncio.gather(*(anext(watcher) for watcher in watchers))
    assert {answer.status for answer in answers} == {SERVING}
    assert counted.asked == 1
    late = protocol.watch(request(), Caller())
    assert (await anext(late)).status == SERVING
    assert counted.asked == 1, "an answer lasts for a period"
    for watcher in [*watchers, late]:
        await watcher.aclose()
    counted.fault = EngineFault("a step hangs")
    assert (await protocol.check(request())).status == NOT_SERVING, "a check is asked anew"


async def test_one_question_serves_all_checks_that_wait_for_it(own: Any, counted: CountedWorker) -> None:
    counted.asked = 0
    await asyncio.gather(*(own.health.check(request()) for _ in range(20)))
    assert counted.asked == 1
    watchers = [own.health.watch(request(), Caller()) for _ in range(health_protocol.MAX_WATCHES + 1)]
    for watcher in watchers[:-1]:
        await anext(watcher)
    with pytest.raises(Overloaded):
        await anext(watchers[-1])
    for watcher in watchers:
        await watcher.aclose()
    assert own.health._watches.total() == 0
