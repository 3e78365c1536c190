"""Whole messages, spoilt messages and noise to every RPC of every registered service: answered or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import grpc
import pytest
from any_messages import GARBAGE, AtOnce, spoilt, whole
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_thread import in_thread

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport.grpc_server.servicers import SERVICES

RPCS = [rpc for service in SERVICES for rpc in service.methods]
ENDLESS = ("Watch", "SubscribeKvEvents")  # which may have nothing to tell
FAULTS = {
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DATA_LOSS,
}  # fmt: skip
NOT_A_MESSAGE = b"\xff\xff\xff"
LEAST, MOST, AT_ONCE = 8, 40, 8  # examples, by the number of fields; and messages of each: three to eight


@pytest.fixture(scope="module")
def channel(folder: Path) -> Iterator[grpc.Channel]:
    with in_thread(folder, AtOnce(str(folder))) as service, grpc.insecure_channel(service.grpc) as channel:
        yield channel


@pytest.fixture(autouse=True)
def _it_lives(channel: grpc.Channel) -> Iterator[None]:
    request = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(n=2))
    stub = inference_pb2_grpc.InferenceStub(channel)
    before = stub.Complete(request).choices
    yield
    assert stub.Complete(request).choices == before


def status_of(channel: grpc.Channel, rpc: MethodDescriptor, data: bytes) -> tuple[grpc.StatusCode, str]:
    """The call is left after its first answers: some have no end."""
    path, timeout = f"/{rpc.containing_service.full_name}/{rpc.name}", 0.05 if rpc.name in ENDLESS else 60
    try:
        if rpc.client_streaming:
            replies = channel.stream_stream(path)(iter([data, data]), timeout=timeout)
        elif rpc.server_streaming:
            replies = channel.unary_stream(path)(data, timeout=timeout)
        else:
            channel.unary_unary(path)(data, timeout=timeout)
            return grpc.StatusCode.OK, ""
        with suppress(StopIteration):
            for _ in range(1 if rpc.name in ENDLESS else 300):
                next(replies)
        replies.cancel()
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)
        return call.code(), call.details() or ""
    return grpc.StatusCode.OK, ""


def examples(rpc: MethodDescriptor) -> int:
    """A message without fields has few ways to be spoilt."""
    return 5 if rpc.name in ENDLESS else min(MOST, LEAST + 2 * num_fields(rpc.input_type, set()))


def num_fields(message: Descriptor, seen: set[Descriptor]) -> int:
    """At any depth; each message counts once."""
    if message in seen:
        return 0
    seen.add(message)
    return len(message.fields) + sum(num_fields(one.message_type, seen) for one in message.fields if one.message_type)


@pytest.mark.slow("Every RPC is called with up to 40 lists of drawn messages")
@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.full_name)
def test_no_bytes_are_a_fault(channel: grpc.Channel, rpc: MethodDescriptor) -> None:
    @given(messages=st.lists(whole(rpc.input_type) | spoilt(rpc.input_type) | GARBAGE, min_size=3, max_size=AT_ONCE))
    @settings(max_examples=examples(rpc), derandomize=True, suppress_health_check=list(HealthCheck))
    def ask(messages: list[bytes]) -> None:
        for data in messages:
            status, details = status_of(channel, rpc, data)
            assert status not in FAULTS, (data, details)

    ask()
    status, details = status_of(channel, rpc, NOT_A_MESSAGE)
    assert (status, "do not parse" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
