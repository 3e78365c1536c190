"""KEDA's external scaler, on the control plane's port."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from admin_server import ADMIN, READER, TENANT, Plane, refused
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from motley.cluster.fleet.control.rpcs import keda_rpcs
from motley.cluster.protos import externalscaler_pb2 as keda_pb
from motley.cluster.routing.fleet_status import DemandCounters


def ref(**metadata: str) -> keda_pb.ScaledObjectRef:
    return keda_pb.ScaledObjectRef(name="workers", namespace="default", scalerMetadata={"key": ADMIN, **metadata})


async def test_keda_with_the_key_in_its_metadata(plane: Plane) -> None:
    plane.bench.fleet.demand = DemandCounters(held=3)
    await plane.bench.scale(2)
    await plane.bench.steps()
    for metric, target, value in (("replicas", "1", 2.0), ("queue", "2.5", 3.0), ("tokens", "4096", 0.0)):
        given = ref(pool="cpu", metric=metric, target=target, scalerAddress="motley:9190")
        [spec] = (await plane.keda.GetMetricSpec(given)).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat) == (f"motley-cpu-{metric}", float(target))
        assert spec.targetSize >= spec.targetSizeFloat
        request = keda_pb.GetMetricsRequest(scaledObjectRef=given, metricName=spec.metricName)
        [found] = (await plane.keda.GetMetrics(request)).metricValues
        assert (found.metricName, found.metricValueFloat, found.metricValue) == (spec.metricName, value, value)
        assert (await plane.keda.IsActive(given)).result == (value > 0)


async def test_keda_is_told_when_it_changes(plane: Plane) -> None:
    stream = plane.keda.StreamIsActive(ref(pool="cpu"), timeout=60)
    assert (await stream.read()).result is True
    await plane.bench.scale(0)
    assert (await asyncio.wait_for(stream.read(), 20)).result is False
    await plane.bench.scale(1)
    assert (await asyncio.wait_for(stream.read(), 20)).result is True
    stream.cancel()


async def test_keda_is_told_once_what_is_meant_for_each_pod(plane: Plane) -> None:
    given = ref(pool="cpu", metric="queue", target="2.5")
    stream = plane.keda.StreamMetricSpec(given, timeout=60)
    assert await stream.read() == await plane.keda.GetMetricSpec(given)
    await plane.bench.scale(3)
    await plane.bench.steps()
    assert not stream.done(), "it stays open, and nothing else comes"
    stream.cancel()


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({"pool": "cpu", "key": "mk-wrong"}, "UNAUTHENTICATED", "a key for metrics, or an admin's, is required"),
        ({"pool": "cpu", "keyFromEnv": READER}, "UNAUTHENTICATED", "is required"),  # and not the other key
        ({"pool": "cpu", "key": TENANT}, "PERMISSION_DENIED", "a tenant's key"),
        ({}, "NOT_FOUND", "there are: cpu"),
        ({"pool": "cpu", "metric": "temperature"}, "INVALID_ARGUMENT", "replicas, queue, tokens"),
        ({"pool": "cpu", "target": "0"}, "INVALID_ARGUMENT", "target"),
        ({"pool": "cpu", "target": "nan"}, "INVALID_ARGUMENT", "target"),
        ({"pool": "cpu", "target": "ten"}, "INVALID_ARGUMENT", "target"),
    ],
)
async def test_triggers_that_are_refused(plane: Plane, metadata: dict[str, str], code: str, words: str) -> None:
    for call in (
        plane.keda.IsActive(ref(**metadata)),
        plane.keda.GetMetricSpec(ref(**metadata)),
        plane.keda.GetMetrics(keda_pb.GetMetricsRequest(scaledObjectRef=ref(**metadata))),
        plane.keda.StreamIsActive(ref(**metadata)).read(),
        plane.keda.StreamMetricSpec(ref(**metadata)).read(),
    ):
        found = await refused(call)
        assert (found[0].name, words in found[1]) == (code, True)


def test_keda_finds_the_interface_that_it_publishes() -> None:
    """Full names, field names, numbers and types, as KEDA's own clients have them."""
    package = keda_pb.DESCRIPTOR.package
    assert package == "externalscaler"
    [service] = keda_pb.DESCRIPTOR.services_by_name.values()
    assert {rpc.name: (rpc.input_type.name, rpc.output_type.name, rpc.server_streaming) for rpc in service.methods} == {
        "IsActive": ("ScaledObjectRef", "IsActiveResponse", False),
        "StreamIsActive": ("ScaledObjectRef", "IsActiveResponse", True),
        "GetMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", False),
        "GetMetrics": ("GetMetricsRequest", "GetMetricsResponse", False),
        "StreamMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", True),
    }
    file = FileDescriptorProto.FromString(keda_pb.DESCRIPTOR.serialized_pb)
    kinds = FieldDescriptorProto
    text, whole, real = kinds.TYPE_STRING, kinds.TYPE_INT64, kinds.TYPE_DOUBLE
    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    found = {
        message.name: {field.name: (field.number, field.type, field.label) for field in message.field}
        for message in file.message_type
    }
    assert found == {
        "ScaledObjectRef": {
            "name": (1, text, one),
            "namespace": (2, text, one),
            "scalerMetadata": (3, kinds.TYPE_MESSAGE, many),
        },
        "IsActiveResponse": {"result": (1, kinds.TYPE_BOOL, one)},
        "GetMetricSpecResponse": {"metricSpecs": (1, kinds.TYPE_MESSAGE, many)},
        "MetricSpec": {
            "metricName": (1, text, one),
            "targetSize": (2, whole, one),
            "targetSizeFloat": (3, real, one),
        },
        "GetMetricsRequest": {"scaledObjectRef": (1, kinds.TYPE_MESSAGE, one), "metricName": (2, text, one)},
        "GetMetricsResponse": {"metricValues": (1, kinds.TYPE_MESSAGE, many)},
        "MetricValue": {
            "metricName": (1, text, one),
            "metricValue": (2, whole, one),
            "metricValueFloat": (3, real, one),
        },
    }
    assert keda_pb.MetricValue(metricValueFloat=0.1).SerializeToString() == b"\x19\x9a\x99\x99\x99\x99\x99\xb9?"


async def test_streams_of_keda_are_counted(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keda_rpcs, "MAX_STREAMS", 1)
    first = plane.keda.StreamIsActive(ref(pool="cpu"))
    await first.read()
    code, _ = await refused(plane.keda.StreamIsActive(ref(pool="cpu")).read())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()


@pytest.mark.parametrize("metric", ["queue", "tokens"])
async def test_keda_is_told_nothing_of_what_nobody_knows(plane: Plane, metric: str) -> None:
    """Silence of all ingresses does not mean that nothing waits: the pods that compute would be taken away."""
    asked = ref(pool="cpu", metric=metric)
    plane.bench.fleet.work = dict.fromkeys(plane.bench.fleet.replicas("cpu"), 1)
    await plane.bench.steps()
    stream = plane.keda.StreamIsActive(asked, timeout=60)
    assert (await stream.read()).result is True
    plane.bench.fleet.telling = False
    await plane.bench.steps()
    for call in (plane.keda.IsActive(asked), plane.keda.GetMetrics(keda_pb.GetMetricsRequest(scaledObjectRef=asked))):
        found = await refused(call)
        assert (found[0].name, "no ingress reports" in found[1]) == ("UNAVAILABLE", True)
    assert (await plane.keda.IsActive(ref(pool="cpu"))).result is True, "how many are wanted the plane knows itself"
    plane.bench.fleet.telling, plane.bench.fleet.work = True, {}
    await plane.bench.steps()
    assert (await stream.read()).result is False, "and nothing in between"
    stream.cancel()
