"""Every number that an RPC of the control plane takes, as no client should send it: right, or refused by its name.

Requests are made from the descriptors, so a field that is added is tried too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from admin_server import ADMIN, AS_ADMIN, Plane
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from motley.cluster.fleet.control.rpcs.control_server import SERVICES
from motley.cluster.fleet.control.rpcs.keda_rpcs import METRICS
from motley.cluster.protos import control_pb2 as pb
from motley.cluster.protos import externalscaler_pb2 as keda_pb

F = FieldDescriptor
SIZES = {F.CPPTYPE_INT32: (-(2**31), 2**31 - 1), F.CPPTYPE_INT64: (-(2**63), 2**63 - 1)}
SIZES |= {F.CPPTYPE_UINT32: (0, 2**32 - 1), F.CPPTYPE_UINT64: (0, 2**64 - 1)}
FLOATS = (math.nan, math.inf, -math.inf, 1e300, -1e300, -0.0, -1.0, 5e-324, 2.0**63, 2.0**64)
INTEGERS = (-1, 2**31 - 1, -(2**31), 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
TEXTS = (
    "nan",
    "inf",
    "-inf",
    "1e300",
    "-0.0",
    "-1",
    "0",
    "1e-320",
    "9" * 400,
    "1e3",
    "1_0",
    "\u0661",
    "0x10",
    "True",
    "",
)
# What else a request needs before its numbers are looked at.
BASE: dict[type[Message], dict[str, Any]] = {
    pb.ScalePoolRequest: {"pool": "cpu", "replicas": 1, "reason": "a test"},
    pb.SetScalingPolicyRequest: {"policy": "slo", "reason": "a test"},
    pb.DrainReplicaRequest: {"replica_id": "r1", "reason": "a test"},
    pb.RollModelRequest: {"pool": "cpu", "reason": "a test"},
    pb.UpdateWeightsRequest: {"path": "/w/one", "reason": "a test"},
    pb.Bounds: {"pool": "cpu", "minimum": 0, "maximum": 8},
}
TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OUT_OF_RANGE,
}  # fmt: skip


def numbers(descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Ways to each number of a message, also within others and in maps."""
    for field in descriptor.fields:
        if field.cpp_type == F.CPPTYPE_MESSAGE and field not in path:
            yield from numbers(field.message_type, (*path, field))
        elif field.cpp_type in {*SIZES, F.CPPTYPE_DOUBLE, F.CPPTYPE_FLOAT}:
            yield (*path, field)


def values(field: FieldDescriptor) -> list[float]:
    least, most = SIZES.get(field.cpp_type, (-math.inf, math.inf))
    return list(FLOATS) if field.cpp_type not in SIZES else [one for one in INTEGERS if least <= one <= most]


def put(message: Message, path: tuple[FieldDescriptor, ...], value: float) -> None:
    field, *rest = path
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for name in ("share", "settle_s", "unheard_of"):
            getattr(message, field.name)[name] = value
    elif rest and field.is_repeated:
        inner = getattr(message, field.name).add(**BASE.get(GetMessageClass(field.message_type), {}))
        put(inner, tuple(rest), value)
    elif rest:
        put(getattr(message, field.name), tuple(rest), value)
    else:
        setattr(message, field.name, value)


UNARY = [rpc for service in SERVICES for rpc in service.methods if not rpc.server_streaming]
TRIED = [(rpc, path) for rpc in UNARY for path in numbers(rpc.input_type)]


def test_the_walk_has_what_it_is_for() -> None:
    found = {".".join([rpc.name, *(field.name for field in path)]) for rpc, path in TRIED}
    assert {
        "ScalePool.replicas", "ScalePool.generation", "SetScalingPolicy.bounds.maximum", "SetScalingPolicy.ttft_s",
        "SetScalingPolicy.settings.value", "DrainReplica.timeout_s", "UpdateWeights.expected_version",
    } <= found  # fmt: skip


async def outcome(plane: Plane, rpc: MethodDescriptor, request: Message) -> grpc.aio.AioRpcError | Message:
    call = plane.channel.unary_unary(
        f"/{rpc.containing_service.full_name}/{rpc.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(rpc.output_type).FromString,
    )
    try:
        reply: Message = await call(request, metadata=AS_ADMIN, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error
    return reply


@pytest.mark.parametrize(
    ("rpc", "path"), TRIED, ids=[".".join([rpc.name, *(field.name for field in path)]) for rpc, path in TRIED]
)
async def test_a_number_is_right_or_refused_by_name(
    plane: Plane, rpc: MethodDescriptor, path: tuple[FieldDescriptor, ...]
) -> None:
    kind = GetMessageClass(rpc.input_type)
    name = next(field.name for field in reversed(path) if field.name != "value")
    for value in values(path[-1]):
        request = kind(**BASE.get(kind, {}))
        put(request, path, value)
        found = await outcome(plane, rpc, request)
        if isinstance(found, grpc.aio.AioRpcError):
            assert found.code() in TYPED, (value, found.code(), found.details())
            if found.code() == grpc.StatusCode.INVALID_ARGUMENT:
                words = found.details() or ""
                assert name in words or words.partition(":")[0] in ("share", "settle_s", "unheard_of"), (value, words)
        else:
            assert path[-1].cpp_type in SIZES or math.isfinite(value), (value, found)
    fleet = await plane.call("GetFleet", pb.GetFleetRequest())  # it goes on, with nothing absurd in it
    assert [(pool.name, 0 <= pool.minimum <= pool.target <= pool.maximum) for pool in fleet.pools] == [("cpu", True)]


@pytest.mark.parametrize("metric", METRICS)
async def test_kedas_target(plane: Plane, metric: str) -> None:
    """It is text in a map. Whatever passes comes back as it was given, and as an integer that is no less."""
    [rpc] = [each for each in UNARY if each.name == "GetMetricSpec"]
    for text in (*TEXTS, "0.001", "1e9", "1000000001", "0.0009"):
        given = keda_pb.ScaledObjectRef(scalerMetadata={"key": ADMIN, "pool": "cpu", "metric": metric, "target": text})
        found = await outcome(plane, rpc, given)
        if isinstance(found, grpc.aio.AioRpcError):
            assert found.code() == grpc.StatusCode.INVALID_ARGUMENT, (text, found.details())
            assert (found.details() or "").startswith("target: "), (text, found.details())
        else:
            [spec] = found.metricSpecs  # type: ignore[attr-defined]
            assert spec.targetSizeFloat == float(text)
            assert spec.targetSizeFloat <= spec.targetSize <= 1e9
        assert isinstance(found, Message) is (text in ("1e3", "0.001", "1e9")), text
