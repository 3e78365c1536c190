"""Functions that register Motley's gRPC services with Serve, which imports them by name.

Serve overwrites every handler with one that calls the ingress method of the same name, and parses a request before
that, whoever calls; it answers UNKNOWN if the bytes do not parse. Here a request stays `UnparsedRequest` until the
ingress knows the caller.

Every handler is registered as one that takes a stream of requests, which on the wire is the same. For any other, gRPC
would read the message before it calls the handler: from callers without a key too, for as long as they take, and it
would never answer a call that is half-closed without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ...protos import (
    inference_pb2,
    inference_pb2_grpc,
    kserve_pb2,
    kserve_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from . import reflection_v1
from .unparsed_request import UnparsedRequest

SERVICER_FUNCTIONS = tuple(
    f"motley.cluster.transport.grpc_server.servicers.add_{name}"
    for name in ("inference", "kserve", "vllm", "health", "reflection", "reflection_v1")
)
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    reflection_v1.SERVICE,
)


def add_inference(servicer: Any, server: grpc.aio.Server) -> None:
    inference_pb2_grpc.add_InferenceServicer_to_server(
        servicer, cast(grpc.aio.Server, UnparsedHandlerRegistrar(server))
    )


def add_kserve(servicer: Any, server: grpc.aio.Server) -> None:
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
        servicer, cast(grpc.aio.Server, UnparsedHandlerRegistrar(server))
    )


def add_vllm(servicer: Any, server: grpc.aio.Server) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
        servicer, cast(grpc.aio.Server, UnparsedHandlerRegistrar(server))
    )


def add_health(servicer: Any, server: grpc.aio.Server) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, cast(grpc.aio.Server, UnparsedHandlerRegistrar(server)))


def add_reflection(servicer: Any, server: grpc.aio.Server) -> None:
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        servicer, cast(grpc.aio.Server, UnparsedHandlerRegistrar(server))
    )


def add_reflection_v1(servicer: Any, server: grpc.aio.Server) -> None:
    reflection_v1.add_reflection_v1_handlers(server, servicer)


class UnparsedHandlerRegistrar:
    """Stand-in for a server while handlers are added. Each is then called once the head has arrived, and reads
    `UnparsedRequest` requests.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            handler._method_handlers = {
                path: _unparsed(path, method) for path, method in handler._method_handlers.items()
            }
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        unparsed = {name: _unparsed(f"/{service}/{name}", method) for name, method in handlers.items()}
        self._server.add_registered_method_handlers(service, unparsed)


def _unparsed(path: str, method: Any) -> Any:
    service, name = path.strip("/").split("/")
    rpc = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    make = grpc.stream_stream_rpc_method_handler if method.response_streaming else grpc.stream_unary_rpc_method_handler
    behavior = method.unary_unary or method.unary_stream or method.stream_unary or method.stream_stream
    kind = message_factory.GetMessageClass(rpc.input_type)
    return make(behavior, partial(UnparsedRequest, kind), method.response_serializer)
