"""Method of gRPC's reflection on the ingress. Serve's own would answer before the caller's API key is checked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from ..transport.caller import Caller
from ..transport.grpc_server.rpc_methods import bidirectional
from ..transport.grpc_server.servicers import SERVICES


class ReflectionRpcs:
    """Methods of gRPC's reflection, as published in grpcio-reflection: list the services here, for programs without
    the protos.
    """

    reflected: Sequence[ServiceDescriptor] = SERVICES

    @bidirectional
    def ServerReflectionInfo(self, requests: Any, caller: Caller) -> AsyncGenerator[pb.ServerReflectionResponse, None]:
        """Stream one reply for each request, in order; what is not found is an error_response, and the stream goes on.

        A request whose bytes do not parse ends it with INVALID_ARGUMENT.
        """
        servicer = reflection.aio.ReflectionServicer([service.full_name for service in self.reflected])
        replies: AsyncGenerator[pb.ServerReflectionResponse, None] = servicer.ServerReflectionInfo(requests, None)
        return replies
