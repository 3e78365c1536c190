"""Registers our gRPC services with Serve, which imports these functions by name.

Serve overwrites every handler with one that calls the ingress method of the same name, and answers UNKNOWN
when a request's bytes do not parse. Here a request that does not parse becomes a `Malformed`, which the
ingress answers with INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ..protos import (
    inference_pb2,
    inference_pb2_grpc,
    kserve_pb2,
    kserve_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

SERVICER_FUNCTIONS = tuple(
    f"motley.cluster.web.servicers.add_{name}" for name in ("inference", "kserve", "vllm", "health", "reflection")
)
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not the message the method takes."""

    reason: str


def add_inference(servicer: Any, server: grpc.aio.Server) -> None:
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, cast(grpc.aio.Server, _Tolerant(server)))


def add_kserve(servicer: Any, server: grpc.aio.Server) -> None:
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, cast(grpc.aio.Server, _Tolerant(server)))


def add_vllm(servicer: Any, server: grpc.aio.Server) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, cast(grpc.aio.Server, _Tolerant(server)))


def add_health(servicer: Any, server: grpc.aio.Server) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, cast(grpc.aio.Server, _Tolerant(server)))


def add_reflection(servicer: Any, server: grpc.aio.Server) -> None:
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, cast(grpc.aio.Server, _Tolerant(server)))


def parse(decode: Callable[[bytes], Message], data: bytes) -> Message | Malformed:
    try:
        return decode(data)
    except DecodeError as error:
        return Malformed(str(error))


class _Tolerant:
    """Stands before a server while handlers are added, and makes their deserializers return `Malformed`."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            handler._method_handlers = _tolerant(handler._method_handlers)
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._server.add_registered_method_handlers(service, _tolerant(handlers))


def _tolerant(handlers: Mapping[str, Any]) -> dict[str, Any]:
    def wrap(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message | Malformed]:
        return lambda data: parse(decode, data)

    return {
        name: handler._replace(request_deserializer=wrap(handler.request_deserializer))
        for name, handler in handlers.items()
    }
