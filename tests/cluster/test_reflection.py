"""Reflection by both its names: what a client of v1 asks and is told is what one of v1alpha is."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from motley.cluster.transport.grpc_server import reflection_v1
from motley.cluster.transport.grpc_server.servicers import SERVICES

[METHOD] = reflection_v1.SERVICE.methods
REQUEST, RESPONSE = map(message_factory.GetMessageClass, (METHOD.input_type, METHOD.output_type))
V1, ALPHA = (f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha"))


async def ask(channel: grpc.aio.Channel, path: str, kinds: tuple[Any, Any], **asked: Any) -> Any:
    request, response = kinds
    call = channel.stream_stream(
        path, request_serializer=request.SerializeToString, response_deserializer=response.FromString
    )
    [reply] = [reply async for reply in call(iter([request(**asked)]))]
    return reply


@pytest.mark.parametrize(
    "asked",
    [
        {"list_services": "", "host": "here"},
        {"file_containing_symbol": "motley.v1.Inference.Complete"},
        {"file_containing_symbol": "nothing"},
        {"file_by_filename": "grpc_reflection/v1/reflection.proto"},
        {"all_extension_numbers_of_type": "motley.v1.CompleteRequest"},
        {},
    ],
    ids=str,
)
async def test_v1_is_told_what_v1alpha_is(grpc_target: str, asked: dict[str, str]) -> None:
    alphas = (reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse)
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        new = await ask(channel, V1, (REQUEST, RESPONSE), **asked)
        old = await ask(channel, ALPHA, alphas, **asked)
    assert new.original_request == REQUEST(**asked)
    assert new.WhichOneof("message_response")
    assert RESPONSE.FromString(old.SerializeToString()) == new


async def test_v1_tells_all_services_and_describes_itself(grpc_target: str) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        told = await ask(channel, V1, (REQUEST, RESPONSE), list_services="")
        mine = await ask(channel, V1, (REQUEST, RESPONSE), file_containing_symbol=reflection_v1.SERVICE.full_name)
    names = {service.name for service in told.list_services_response.service}
    assert names == {service.full_name for service in SERVICES}
    assert {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} <= names
    [file] = map(descriptor_pb2.FileDescriptorProto.FromString, mine.file_descriptor_response.file_descriptor_proto)
    assert (file.package, file.service[0].name) == ("grpc.reflection.v1", "ServerReflection")


async def test_bytes_that_do_not_parse(grpc_target: str) -> None:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        call = channel.stream_stream(V1)(iter([b"\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "do not parse" in (caught.value.details() or "")
