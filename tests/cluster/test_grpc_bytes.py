"""Random bytes to every unary and streaming RPC of every registered service: refused or answered, never a fault."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from motley.cluster.web.servicers import SERVICES

RPCS = [rpc for service in SERVICES for rpc in service.methods]
ROUNDS = 30
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
LONGEST_S = 20.0


def noise(rpc: MethodDescriptor) -> list[bytes]:
    """Of any length; half of them begin as a field of the message does, so that some parse a good way."""
    source = random.Random(rpc.full_name)
    tags = [bytes([(field.number << 3 | kind) & 0x7F]) for field in rpc.input_type.fields for kind in (0, 1, 2, 5)]
    found = [source.randbytes(source.choice((0, 1, 2, 5, 17, 300))) for _ in range(ROUNDS)]
    return [source.choice(tags) + data if tags and index % 2 else data for index, data in enumerate(found)]


async def status_of(channel: grpc.aio.Channel, rpc: MethodDescriptor, data: bytes) -> grpc.StatusCode:
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    if rpc.client_streaming:
        call: Any = channel.stream_stream(path)(iter([data]))
    else:
        call = (channel.unary_stream if rpc.server_streaming else channel.unary_unary)(path)(data)
    try:
        if rpc.server_streaming:
            await asyncio.wait_for(call.read(), 0.5)
            call.cancel()
        else:
            await call
    except TimeoutError:  # a watch that has nothing to tell
        call.cancel()
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.full_name)
async def test_no_bytes_are_a_fault(grpc_target: str, rpc: MethodDescriptor) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        found = [await asyncio.wait_for(status_of(channel, rpc, data), LONGEST_S) for data in noise(rpc)]
    assert not [status for status in found if status in FAULTS], [rpc.full_name, *found]
    if rpc.input_type.fields:
        assert grpc.StatusCode.INVALID_ARGUMENT in found, "bytes that are no message"
