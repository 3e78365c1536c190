"""The control plane's gRPC: who may call, what is refused and with which status, and what a watcher sees."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from admin_server import ADMIN, AS_ADMIN, KEYS, READER, TENANT, Plane, refused
from fake_fleet import Bench
from google.protobuf.descriptor import ServiceDescriptor
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from motley.cli import fleet_view
from motley.cluster.fleet.control.backend.fleet_backend import PlannedFleet
from motley.cluster.fleet.control.rpcs import control_rpcs
from motley.cluster.fleet.control.rpcs import control_server as server_module
from motley.cluster.fleet.control.rpcs.control_server import SERVICES, AdminEndpoint, start_on_free_port
from motley.cluster.fleet.control.state.control_state import PolicyPlan, PoolPlan
from motley.cluster.protos import control_pb2 as pb
from motley.cluster.routing.explanation.route_record import pack_predictions
from motley.cluster.routing.fleet_status import DemandCounters
from motley.cluster.routing.prediction.routing_query import LatencyPrediction
from motley.cluster.security.edge.ports import free_port_block, is_listening
from motley.replicas.errors import Overloaded
from motley.replicas.kv.prefix.popular_prefixes import PopularPrefix
from motley.replicas.kv.prefix.prefix_stats import PrefixStats
from motley.replicas.kv.store.prefix_store import BreakerState, StoreStats
from motley.replicas.types import Request, SamplingParams


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
async def test_nobody_gets_in_without_an_admins_key(plane: Plane, service: ServiceDescriptor) -> None:
    """Every RPC of every service, and the same words whatever was wrong. A key for metrics reads those alone."""
    wrong = [(), (("x-api-key", "mk-wrong"),), (("authorization", ADMIN),), (*AS_ADMIN, ("x-api-key", TENANT))]
    for rpc in service.methods:
        metrics = service.name == "ExternalScaler" or rpc.full_name == "motley.v1.ControlPlane.GetMetrics"
        wanted = "a key for metrics, or an admin's, is" if metrics else "a valid API key of an admin is"
        for metadata in wrong:
            call = plane.channel.unary_stream(f"/{service.full_name}/{rpc.name}")(b"", metadata=metadata, timeout=20)
            code, words = await refused(_first(call))
            assert (code, f"{wanted} required" in words) == (grpc.StatusCode.UNAUTHENTICATED, True), rpc.name
        call = plane.channel.unary_stream(f"/{service.full_name}/{rpc.name}")(
            b"", metadata=(("x-api-key", TENANT),), timeout=20
        )
        code, words = await refused(_first(call))
        assert code == grpc.StatusCode.PERMISSION_DENIED, rpc.name
        assert ("--metrics" if metrics else "--admin") in words
        call = plane.channel.unary_stream(f"/{service.full_name}/{rpc.name}")(
            b"", metadata=(("x-api-key", READER),), timeout=20
        )
        if rpc.full_name == "motley.v1.ControlPlane.GetMetrics":
            assert await _first(call)
        else:
            code, words = await refused(_first(call))
            admitted = grpc.StatusCode.NOT_FOUND, "pool: there is no ''"
            refusal = grpc.StatusCode.PERMISSION_DENIED, "this is a key for metrics; an admin's is needed here"
            assert (code, words[: len((admitted if metrics else refusal)[1])]) == (admitted if metrics else refusal)


async def test_calls_without_a_message_and_heads_that_are_too_large(plane: Plane) -> None:
    path = "/motley.v1.ControlPlane/GetFleet"
    half_closed = plane.channel.stream_unary(path)(iter(()), metadata=AS_ADMIN, timeout=20)
    code, words = await refused(half_closed)
    assert (code, "without a whole message" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, _ = await refused(plane.channel.stream_unary(path)(timeout=20))
    assert code == grpc.StatusCode.UNAUTHENTICATED, "before a message is sent"
    await plane.call("GetFleet", pb.GetFleetRequest(), metadata=(*AS_ADMIN, ("x", "y" * 15_000)))
    for size in (17_000, 64_000):
        for _ in range(8):
            call = plane.call("GetFleet", pb.GetFleetRequest(), metadata=(*AS_ADMIN, ("x", "y" * size)))
            assert (await refused(call))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


POPULAR = PopularPrefix("ann", "ab" * 8, 5, found_tokens=300, fetched_tokens=96, longest=96)


async def test_prefixes_are_shown_and_flushed(plane: Plane) -> None:
    alone = await plane.call("GetPrefixes", pb.GetPrefixesRequest())
    assert [(one.shares, one.prompt_tokens, one.cached_tokens) for one in alone.replicas] == [(False, 100, 40)]
    store = StoreStats(hits=3, misses=1, reads=4, read_s=2.0, errors={"timeout": 2}, breaker=BreakerState.OPEN)
    plane.bench.fleet.prefix_stats = PrefixStats(64, 48, {"hit": 3}, 2, 1e9, 16, 1000, store, (POPULAR,))
    (shown,) = (await plane.call("GetPrefixes", pb.GetPrefixesRequest())).replicas
    assert (shown.queried_tokens, shown.hit_tokens, dict(shown.outcomes), shown.value_bytes) == (
        64,
        48,
        {"hit": 3},
        1000,
    )
    assert (shown.store.hits, shown.store.read_s, shown.store.breaker) == (3, 0.5, "open")
    assert dict(shown.store.errors) == {"timeout": 2}
    assert [(one.tenant, one.requests, one.longest) for one in shown.popular] == [("ann", 5, 96)]
    for request in (pb.FlushPrefixesRequest(tenant="ann"), pb.FlushPrefixesRequest()):
        assert (await plane.call("FlushPrefixes", request)).replicas == 1
    assert [call for call in plane.bench.fleet.calls if call[0] == "flush"] == [("flush", "ann"), ("flush", None)]
    code, words = await refused(plane.call("FlushPrefixes", pb.FlushPrefixesRequest(tenant="")))
    assert (code, "tenant" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_route_is_explained(plane: Plane) -> None:
    asked = Request("ab12", (1,) * 100, SamplingParams(), tenant="ann", client_id="mine")
    predicted = [LatencyPrediction(0, 0.1, 0.01, 0.2, 1.0, 1.0, 36.0), LatencyPrediction(1, 0.2, 0.01, 0.4)]
    decision = ("r1", "r2"), pack_predictions(predicted), 3, "predicted_latency", (("draining", 1, ("r3",)),)
    with plane.bench.fleet.routes.begin(asked, "call", "", 3) as record:
        record.placed(decision, None, "cpu", 0)
        record.failed(Overloaded("full", code="queue_full"))
        record.placed(decision, None, "cpu", 0)
        record.answered(7, done=True)
    found = await plane.call("ExplainRoute", pb.ExplainRouteRequest(request="mine"))
    [route] = found.routes
    [same] = (await plane.call("ExplainRoute", pb.ExplainRouteRequest(request="cmpl-ab12"))).routes
    assert same.request_id == route.request_id
    assert (found.matches, route.request_id, list(route.client_ids), route.tenant) == (1, "ab12", ["mine"], "ann")
    assert (route.outcome, route.retries, route.prompt_tokens, route.output_tokens) == ("answered", 1, 100, 7)
    assert (route.ingress, route.HasField("ttft_s")) == ("i1", False)
    first, last = route.attempts
    assert (first.error, last.error, last.replicas, last.policy) == ("queue_full", "", 3, "predicted_latency")
    assert [(one.replica_id, one.pool, one.cached_tokens) for one in first.candidates] == [
        ("r1", "cpu", 64), ("r2", "", 100),
    ]  # fmt: skip
    assert [(one.reason, one.replicas, list(one.replica_ids)) for one in first.excluded] == [("draining", 1, ["r3"])]
    code, words = await refused(plane.call("ExplainRoute", pb.ExplainRouteRequest(request="other")))
    assert (code, "no ingress knows 'other'; each keeps its last 10,000" in words) == (grpc.StatusCode.NOT_FOUND, True)
    code, words = await refused(plane.call("ExplainRoute", pb.ExplainRouteRequest()))
    assert (code, words[:8]) == (grpc.StatusCode.INVALID_ARGUMENT, "request:")


async def _first(call: Any) -> Any:
    async for reply in call:
        if reply:  # an empty one goes before a refusal
            return reply
    raise AssertionError("nothing came")


async def test_the_fleet_as_it_is(plane: Plane) -> None:
    plane.bench.fleet.work = {"r1": 3}
    plane.bench.fleet.demand = DemandCounters(requests=7, held=2)
    await plane.bench.steps(1)
    fleet = await plane.call("GetFleet", pb.GetFleetRequest())
    [pool] = fleet.pools
    assert (pool.name, pool.target, pool.minimum, pool.maximum, pool.ready) == ("cpu", 1, 0, 8, 1)
    [replica] = pool.replicas
    assert (replica.replica_id, replica.state, replica.running) == ("r1", pb.REPLICA_STATE_READY, 3)
    assert replica.device == "P40, simulated"
    assert replica.kv_used == pytest.approx(40 / 640)
    assert (fleet.generation, fleet.policy, fleet.demand.requests, fleet.demand.held) == (0, "fixed", 7, 2)
    assert [event.kind for event in fleet.events] == [pb.EVENT_KIND_SETTLED]
    metrics = await plane.call("GetMetrics", pb.GetMetricsRequest())
    assert (metrics.pools[0].running, metrics.requests_per_s) == (3, pytest.approx(7 / 0.5))


async def test_a_policy_that_fails_is_told(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.bench.fleet.plan = PlannedFleet("a", {"cpu": PoolPlan(1, 0, 8)}, PolicyPlan("slo", ttft_s=1e6))
    await plane.bench.steps(2)
    told = await plane.call("GetFleet", pb.GetFleetRequest())
    assert told.policy_failed.startswith("ttft_s: 1e+06 is not accepted")
    [event] = [event for event in told.events if event.kind == pb.EVENT_KIND_POLICY_FAILED]
    assert (event.by, event.reason) == ("policy slo", told.policy_failed)
    fleet_view.show_fleet(told)
    assert "policy slo, which fails: ttft_s: 1e+06 is not accepted" in " ".join(capsys.readouterr().out.split())


async def test_weights_that_are_updated(
    plane: Plane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.UpdateWeightsRequest(path="/w/one", expected_version=0, reason="step 100")
    made = await plane.call("UpdateWeights", request)
    assert (made.pool, made.weights_version, made.contents) == ("cpu", 1, "digest of one")
    assert [(one.replica_id, one.weights_version, one.error) for one in made.replicas] == [("r1", 1, "")]
    code, words = await refused(plane.call("UpdateWeights", request))
    assert (code, "by now" in words) == (grpc.StatusCode.ABORTED, True)
    code, _ = await refused(plane.call("UpdateWeights", pb.UpdateWeightsRequest(path="/secret/one")))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    code, _ = await refused(plane.call("UpdateWeights", pb.UpdateWeightsRequest(path="/w/bad")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    await plane.bench.steps(1)
    fleet = await plane.call("GetFleet", pb.GetFleetRequest())
    assert (fleet.pools[0].weights_version, fleet.pools[0].replicas[0].weights_version) == (1, 1)
    assert fleet.pools[0].replicas[0].weights_contents == "digest of r1's"
    assert fleet.events[-1].reason == "/w/one: step 100"
    fleet.pools[0].weights_version = 2  # that one of its replicas is behind of
    monkeypatch.setenv("COLUMNS", "200")
    fleet_view.show_fleet(fleet)
    lines = capsys.readouterr().out.splitlines()
    for first, version in (("pool", "2"), ("replica", "1")):
        [number] = [number for number, line in enumerate(lines) if line.startswith(first)]
        at = lines[number].index("weights")
        assert lines[number + 1][at:].split()[0] == version
    fleet.pools[0].weights_version = 0
    fleet_view.show_fleet(fleet)
    assert "weights" not in capsys.readouterr().out.split("\n\n")[1], "a terminal is narrow"


async def test_a_decision_and_who_made_it(plane: Plane) -> None:
    request = pb.ScalePoolRequest(pool="cpu", replicas=3, generation=0, reason="the afternoon")
    made = await plane.call("ScalePool", request)
    assert (made.generation, made.event.kind, made.event.before, made.event.after) == (1, pb.EVENT_KIND_SCALED, 1, 3)
    assert (made.event.by, made.event.reason) == ("key of ops", "the afternoon")
    code, words = await refused(plane.call("ScalePool", request))
    assert code == grpc.StatusCode.ABORTED
    assert "it is 1 by now, not 0" in words
    again = await plane.call("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=3, reason="why"))
    assert (again.generation, again.HasField("event")) == (1, False), "it was so already"


@pytest.mark.parametrize(
    ("name", "request_", "code", "words"),
    [
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=-1, reason="why"), "INVALID_ARGUMENT", "from 0 to 8"),
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=2**31, reason="why"), "INVALID_ARGUMENT", "from 0 to 8"),
        ("ScalePool", pb.ScalePoolRequest(pool="gpu", replicas=1, reason="why"), "NOT_FOUND", "there are: cpu"),
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", reason="why"), "FAILED_PRECONDITION", "allow_zero"),
        (
            "ScalePool",
            pb.ScalePoolRequest(pool="cpu", replicas=2, generation=9, reason="why"),
            "ABORTED",
            "it is 0 by now",
        ),
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=2, reason="\n"), "INVALID_ARGUMENT", "reason"),
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=2, reason="é" * 40_000), "RESOURCE_EXHAUSTED", ""),
        ("DrainReplica", pb.DrainReplicaRequest(replica_id="r9", reason="why"), "NOT_FOUND", "r9"),
        (
            "DrainReplica",
            pb.DrainReplicaRequest(replica_id="r1", remove=True, reason="why"),
            "FAILED_PRECONDITION",
            "allow_zero",
        ),
        (
            "DrainReplica",
            pb.DrainReplicaRequest(replica_id="r1", timeout_s=-1, reason="why"),
            "INVALID_ARGUMENT",
            "timeout_s",
        ),
        ("RollModel", pb.RollModelRequest(pool="gpu", reason="why"), "NOT_FOUND", "there are: cpu"),
        ("SetScalingPolicy", pb.SetScalingPolicyRequest(ttft_s=1, reason="why"), "INVALID_ARGUMENT", "policy"),
        (
            "SetScalingPolicy",
            pb.SetScalingPolicyRequest(policy="fixed", tpot_s=0, reason="why"),
            "INVALID_ARGUMENT",
            "tpot_s",
        ),
        (
            "SetScalingPolicy",
            pb.SetScalingPolicyRequest(bounds=[pb.Bounds(pool="cpu", minimum=2, maximum=1)], reason="why"),
            "INVALID_ARGUMENT",
            "bounds",
        ),
        ("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=2), "INVALID_ARGUMENT", "reason: it is missing"),
        ("DrainReplica", pb.DrainReplicaRequest(replica_id="r1"), "INVALID_ARGUMENT", "reason: it is missing"),
        ("RollModel", pb.RollModelRequest(pool="cpu", reason=" "), "INVALID_ARGUMENT", "reason: it is missing"),
        ("SetScalingPolicy", pb.SetScalingPolicyRequest(policy="queue"), "INVALID_ARGUMENT", "reason: it is missing"),
        ("GetMetrics", pb.GetMetricsRequest(pool="gpu"), "NOT_FOUND", "there are: cpu"),
    ],
)
async def test_refusals_change_nothing(plane: Plane, name: str, request_: Any, code: str, words: str) -> None:
    state = plane.bench.plane.state
    found = await refused(plane.call(name, request_))
    assert found[0].name == code
    assert words in found[1]
    assert plane.bench.plane.state == state


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", b"\x08", b"\x90\x03\x00"], ids=["no message", "cut", "unknown field"]
)
async def test_bytes_that_are_no_request(plane: Plane, data: bytes) -> None:
    call = plane.channel.unary_unary("/motley.v1.ControlPlane/ScalePool")
    code, _ = await refused(call(data, metadata=AS_ADMIN, timeout=20))
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_what_may_be_tried_again_says_when(plane: Plane) -> None:
    plane.bench.store.full = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.call("ScalePool", pb.ScalePoolRequest(pool="cpu", replicas=2, reason="why"))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    status = Status.FromString(dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"])  # type: ignore[arg-type]
    info = RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.retry_delay.seconds >= 1


async def test_a_watcher_misses_nothing(plane: Plane) -> None:
    watch = plane.stub.WatchFleet(pb.WatchFleetRequest(), metadata=AS_ADMIN, timeout=60)
    first = await watch.read()
    assert [event.kind for event in first.events] == [pb.EVENT_KIND_SETTLED]
    assert first.fleet.pools[0].target == 1
    await plane.bench.scale(3, reason="why")
    seen: list[pb.Event] = []
    while not seen or seen[-1].kind != pb.EVENT_KIND_SETTLED:
        await plane.bench.steps(1)
        update = await asyncio.wait_for(watch.read(), 20)
        seen += update.events
    watch.cancel()
    assert [event.sequence for event in seen] == list(range(2, 2 + len(seen)))
    assert (seen[0].kind, seen[0].reason) == (pb.EVENT_KIND_SCALED, "why")
    assert update.fleet.pools[0].ready == 3
    later = plane.stub.WatchFleet(pb.WatchFleetRequest(after=seen[-2].sequence), metadata=AS_ADMIN, timeout=60)
    assert [event.sequence for event in (await later.read()).events] == [seen[-1].sequence], "from where one was"
    later.cancel()
    code, words = await refused(plane.stub.WatchFleet(pb.WatchFleetRequest(after=99), metadata=AS_ADMIN).read())
    assert (code, "99" in words) == (grpc.StatusCode.NOT_FOUND, True)


async def test_watchers_are_counted(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_rpcs, "MAX_WATCHES", 2)
    watches = [plane.stub.WatchFleet(pb.WatchFleetRequest(), metadata=AS_ADMIN) for _ in range(2)]
    for watch in watches:
        await watch.read()
    code, _ = await refused(plane.stub.WatchFleet(pb.WatchFleetRequest(), metadata=AS_ADMIN).read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    watches[0].cancel()
    for _ in range(200):
        watch = plane.stub.WatchFleet(pb.WatchFleetRequest(), metadata=AS_ADMIN)
        try:
            assert await watch.read()
            break
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.02)
    else:
        raise AssertionError("its place was not given back")
    watch.cancel()
    watches[1].cancel()


async def test_a_drain_over_the_wire(plane: Plane) -> None:
    await plane.bench.scale(2)
    await plane.bench.steps()
    made = await plane.call("DrainReplica", pb.DrainReplicaRequest(replica_id="r1", remove=True, reason="its fan"))
    assert (made.event.kind, made.event.replica_id, made.event.reason) == (pb.EVENT_KIND_DRAINING, "r1", "its fan")
    plane.bench.fleet.work = {"r1": 1}
    await plane.bench.steps(2)
    [pool] = (await plane.call("GetFleet", pb.GetFleetRequest())).pools
    assert {one.replica_id: one.state for one in pool.replicas} == {
        "r1": pb.REPLICA_STATE_DRAINING, "r2": pb.REPLICA_STATE_READY
    }  # fmt: skip
    assert (pool.target, pool.ready, pool.draining) == (1, 1, 1)
    plane.bench.fleet.work = {}
    await plane.bench.steps()
    [pool] = (await plane.call("GetFleet", pb.GetFleetRequest())).pools
    assert [one.replica_id for one in pool.replicas] == ["r2"]


async def test_health_and_reflection(plane: Plane) -> None:
    health: Any = health_pb2_grpc.HealthStub(plane.channel)
    plane.bench.plane.observed_s = 0.0
    answer = await health.Check(health_pb2.HealthCheckRequest(), metadata=AS_ADMIN)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING, "the fleet has not been seen for long"
    plane.bench.plane.observed_s = float("inf")
    request = health_pb2.HealthCheckRequest(service="motley.v1.ControlPlane")
    assert (await health.Check(request, metadata=AS_ADMIN)).status == health_pb2.HealthCheckResponse.SERVING
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(plane.channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    [told] = [reply async for reply in stub.ServerReflectionInfo(iter(asked), metadata=AS_ADMIN)]
    names = {service.name for service in told.list_services_response.service}
    assert names == {service.full_name for service in SERVICES}


async def test_of_two_that_find_one_port_free_each_has_its_own() -> None:
    """Both services of a machine that start at once would take the usual one."""
    port, bench = free_port_block(1), Bench()
    door = AdminEndpoint("127.0.0.1", port, yields=True)
    servers = [await start_on_free_port(bench.plane, KEYS, door) for _ in range(2)]
    assert [found == port for _, found in servers] == [True, False]
    for server, found in servers:
        assert is_listening("127.0.0.1", found)
        await server.stop(None)


async def test_a_port_that_was_asked_for_is_taken_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BIND_S", 0.0)
    bench, door = Bench(), AdminEndpoint("127.0.0.1", free_port_block(1))
    server, _ = await start_on_free_port(bench.plane, KEYS, door)
    with pytest.raises(OSError, match="is taken"):
        await start_on_free_port(bench.plane, KEYS, door)
    await server.stop(None)
