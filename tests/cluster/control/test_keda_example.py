"""The example of deploy/keda, read as KEDA and Kubernetes read it, and its trigger sent to a real control plane.

KEDA and Kubernetes are imitated here. What KEDA does was read in its source: `parseExternalScalerMetadata` in
pkg/scalers/external_scaler.go, `ResolveContainerEnv` in pkg/scaling/resolver/scale_resolvers.go.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import yaml
from admin_server import ADMIN, READER, TENANT, Plane, admin_server, refused
from certificates import Certificates

from motley.cluster.fleet.control.state.control_state import PolicyPlan
from motley.cluster.fleet.control.state.decisions import DRAIN_S
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.protos import externalscaler_pb2 as keda_pb
from motley.cluster.routing.fleet_status import DemandCounters

EXAMPLE = Path(__file__).parents[3] / "deploy/keda/scaledobject.yaml"
FOUND = {one["kind"]: one for one in yaml.safe_load_all(EXAMPLE.read_text())}
SCALED, [TRIGGER] = FOUND["ScaledObject"]["spec"], FOUND["ScaledObject"]["spec"]["triggers"]


def container_env(secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of the container that the ScaledObject names, as KEDA's operator resolves it."""
    assert SCALED["scaleTargetRef"]["name"] == FOUND["Deployment"]["metadata"]["name"]
    containers = FOUND["Deployment"]["spec"]["template"]["spec"]["containers"]
    [container] = [one for one in containers if one["name"] == SCALED["scaleTargetRef"]["envSourceContainerName"]]
    references = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
    return {name: secrets[given["name"]][given["key"]] for name, given in references.items()}


def scaler_metadata(metadata: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return what KEDA sends of a trigger's metadata: all of it, with the variables that `…FromEnv` names looked up.

    Their values keep the entry's whole name. Nothing is sent of a variable that is empty or not there.
    """
    found = {name: env.get(value, "") if name.endswith("FromEnv") else value for name, value in metadata.items()}
    return {name: value for name, value in found.items() if value or not name.endswith("FromEnv")}


def auth_parameters(secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    assert TRIGGER["authenticationRef"]["name"] == FOUND["TriggerAuthentication"]["metadata"]["name"]
    given = FOUND["TriggerAuthentication"]["spec"]["secretTargetRef"]
    return {one["parameter"]: secrets[one["name"]][one["key"]] for one in given}


def as_keda(key: str, /, **other: str) -> keda_pb.ScaledObjectRef:
    """Return the trigger as it is sent for a pool of the tests, with the secret's key; the arguments change it."""
    secrets = {"motley-keda": {"key": key}}
    metadata = scaler_metadata({**TRIGGER["metadata"], "pool": "cpu", **other}, container_env(secrets))
    return keda_pb.ScaledObjectRef(name="motley-t4", namespace="default", scalerMetadata=metadata)


async def pods_wanted(plane: Plane, ref: keda_pb.ScaledObjectRef) -> int:
    """Return the pods that the example leads to: KEDA's 0 or 1, and above that what Kubernetes computes of an
    AverageValue. Both wait before they remove a pod, which this does not.
    """
    assert TRIGGER["metricType"] == "AverageValue"
    [spec] = (await plane.keda.GetMetricSpec(ref)).metricSpecs
    request = keda_pb.GetMetricsRequest(scaledObjectRef=ref, metricName=spec.metricName)
    [value] = (await plane.keda.GetMetrics(request)).metricValues
    if not (await plane.keda.IsActive(ref)).result:
        return int(SCALED["minReplicaCount"])
    pods = math.ceil(value.metricValueFloat / spec.targetSizeFloat)
    return min(max(pods, SCALED["minReplicaCount"], 1), SCALED["maxReplicaCount"])


@pytest.fixture
async def idle() -> AsyncIterator[Plane]:
    """A pool at zero, on a cluster without pods."""
    async with admin_server(0) as plane:
        plane.bench.fleet.room = 0
        yield plane


@pytest.mark.parametrize("key", [READER, ADMIN, f"{READER}\n"], ids=["metrics", "admin", "a secret's newline"])
async def test_keys_from_the_environment(plane: Plane, key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert await pods_wanted(plane, as_keda(key)) == 1
    for stream in (plane.keda.StreamIsActive(as_keda(key)), plane.keda.StreamMetricSpec(as_keda(key))):
        assert await stream.read()
        stream.cancel()
    assert key.strip() not in caplog.text


@pytest.mark.parametrize(
    ("key", "other", "code"),
    [
        ("mk-wrong", {}, "UNAUTHENTICATED"),
        ("", {}, "UNAUTHENTICATED"),
        (READER, {"keyFromEnv": "MISSING"}, "UNAUTHENTICATED"),
        (READER, {"key": "mk-other"}, "UNAUTHENTICATED"),
        (TENANT, {}, "PERMISSION_DENIED"),
    ],
    ids=["wrong", "empty", "no such variable", "two that differ", "a tenant's"],
)
async def test_keys_that_are_refused(
    plane: Plane, key: str, other: dict[str, str], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ref = as_keda(key, **other)
    calls = [plane.keda.IsActive(ref), plane.keda.GetMetricSpec(ref)]
    calls += [plane.keda.GetMetrics(keda_pb.GetMetricsRequest(scaledObjectRef=ref))]
    for call in (*calls, plane.keda.StreamIsActive(ref).read(), plane.keda.StreamMetricSpec(ref).read()):
        found, words = await refused(call)
        assert found.name == code
        assert not key or key not in words + caplog.text


async def test_a_key_in_the_headers_counts_as_before(plane: Plane) -> None:
    ref = keda_pb.ScaledObjectRef(scalerMetadata={"pool": "cpu"})
    assert (await plane.keda.IsActive(ref, metadata=(("x-api-key", READER),))).result
    assert (await refused(plane.keda.IsActive(ref, metadata=(("x-api-key", TENANT),))))[0].name == "PERMISSION_DENIED"


async def test_the_authority_comes_with_the_trigger_authentication(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    assert auth_parameters({"motley-keda": {"ca.pem": "the authority"}}) == {"caCert": "the authority"}
    async with admin_server(certificates=certificates) as plane:
        assert await pods_wanted(plane, as_keda(READER)) == 1


@pytest.mark.parametrize(("metric", "target"), [("replicas", "1"), ("queue", "2"), ("tokens", "0.3")])
async def test_a_replica_that_loads_keeps_its_pod(idle: Plane, metric: str, target: str) -> None:
    """Neither do further pods come for the same demand, whatever becomes of that meanwhile."""
    ref, fleet = as_keda(READER, metric=metric, target=target), idle.bench.fleet
    fleet.demand = DemandCounters(held=3)
    await idle.bench.scale(2)
    await idle.bench.steps()
    asked = await pods_wanted(idle, ref)
    assert asked == (0 if metric == "tokens" else 2), "replicas without a place hold no pod"
    fleet.room, fleet.loading = 2, True
    await idle.bench.steps()
    assert [one.state for one in fleet.pools["cpu"].replicas] == ["starting"] * 2
    assert await pods_wanted(idle, ref) == 2
    fleet.demand = DemandCounters(held=0)
    await idle.bench.steps()
    assert await pods_wanted(idle, ref) == 2
    fleet.loading = False
    await idle.bench.steps()
    assert await pods_wanted(idle, ref) == (2 if metric == "replicas" else 0)


async def test_no_pod_goes_while_a_replica_loads(idle: Plane) -> None:
    """Kubernetes would remove the newest, where the replica that loads is, and not the one whose replica has left."""
    ref, fleet = as_keda(READER), idle.bench.fleet
    fleet.room = 8
    await idle.bench.scale(2)
    await idle.bench.steps()
    [_, leaves] = fleet.replicas("cpu")
    fleet.loading = True
    await idle.bench.scale(3)
    await idle.bench.steps()
    assert await pods_wanted(idle, ref) == 3
    fleet.work = {leaves: 1}
    drain = {"remove": True, "by": "test", "reason": "why"}
    await idle.bench.plane.drain(leaves, **drain)
    await idle.bench.steps()
    assert idle.bench.plane.state.pools["cpu"].target == 2
    assert await pods_wanted(idle, ref) == 3
    fleet.loading, fleet.work = False, {}
    await idle.bench.steps(12)
    assert await pods_wanted(idle, ref) == 2


async def test_to_zero_and_back_for_a_request_that_is_held(idle: Plane) -> None:
    ref, bench = as_keda(READER), idle.bench
    await bench.plane.set_policy(PolicyPlan("queue", settings={"idle_s": 30}), [], by="test", reason="why")
    await bench.steps()
    stream = idle.keda.StreamIsActive(ref, timeout=60)
    assert (await stream.read()).result is False
    bench.fleet.demand, bench.fleet.loading = DemandCounters(requests=1, held=1), True
    await bench.steps(20)
    assert (await asyncio.wait_for(stream.read(), 20)).result is True
    bench.fleet.room = await pods_wanted(idle, ref)
    assert bench.fleet.room == 1
    for _ in range(3):  # it loads
        await bench.steps(20)
        assert await pods_wanted(idle, ref) == 1
    bench.fleet.loading = False
    await bench.steps(2)
    bench.fleet.demand = DemandCounters(requests=1)
    await bench.steps(20)
    assert (len(bench.fleet.replicas("cpu")), await pods_wanted(idle, ref)) == (1, 1)
    await bench.steps(80)
    assert (await asyncio.wait_for(stream.read(), 20)).result is False
    assert await pods_wanted(idle, ref) == 0
    stream.cancel()


def test_the_fleet_of_the_example_has_its_bounds() -> None:
    [pool] = load_fleet(EXAMPLE.with_name("fleet.yaml")).spec.pools
    assert pool.name == TRIGGER["metadata"]["pool"]
    assert (pool.replicas.min, pool.replicas.max) == (SCALED["minReplicaCount"], SCALED["maxReplicaCount"])


def test_the_example_waits_for_replicas_that_leave() -> None:
    behavior = SCALED["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert min(behavior["scaleDown"]["stabilizationWindowSeconds"], SCALED["cooldownPeriod"]) > DRAIN_S
