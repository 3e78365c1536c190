"""Service grpc.reflection.v1, which clients try first. grpcio-reflection has v1alpha alone, which is the same but for
its name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from .unparsed_request import UnparsedRequest

_METHOD = "ServerReflectionInfo"


def _service() -> ServiceDescriptor:
    alpha = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
    file = text_format.Parse(text, FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    return descriptor_pool.Default().FindServiceByName("grpc.reflection.v1.ServerReflection")


SERVICE = _service()


def add_reflection_v1_handlers(server: grpc.aio.Server, servicer: Any) -> None:
    """Register the service. Its requests are read and answered as those of v1alpha."""
    handler = grpc.stream_stream_rpc_method_handler(
        getattr(servicer, _METHOD),
        request_deserializer=partial(UnparsedRequest, reflection_pb2.ServerReflectionRequest),
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, {_METHOD: handler}),))
