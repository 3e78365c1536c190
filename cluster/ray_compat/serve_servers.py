"""Servers of Serve's proxies and of the ingress, as their hook changes them before they bind ports.

Imports Serve's own modules, whose names are replaced: import this in the hook, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ray.serve._private import default_impl, grpc_util, proxy_request_response

from .visible_names import GRPC_HEALTH


def replace_grpc_bind(bind: Callable[[Any, str], None]) -> None:
    """Make Serve bind its gRPC ports by this function of a server and an address."""
    default_impl.add_grpc_address = bind


def replace_own_service(add: Callable[[Any, Any], None]) -> None:
    """Make Serve register its own gRPC service by this function of a servicer and a server."""
    grpc_util.add_RayServeAPIServiceServicer_to_server = add


def add_grpc_options(options: Sequence[tuple[str, Any]]) -> None:
    """Make Serve start its gRPC servers with these options too."""
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = [*grpc_util.DEFAULT_GRPC_SERVER_OPTIONS, *options]


def replace_context_of_forwarded_calls(kind: type) -> None:
    """Make Serve's proxy hand this kind of RayServegRPCContext on with each call."""
    proxy_request_response.RayServegRPCContext = kind


def health_handler(server: Any) -> Any:
    """Return the function by which one of Serve's gRPC servers answers whether it is well."""
    unary = proxy_request_response.gRPCStreamingType.UNARY_UNARY
    return server.service_handler_factory(service_method=GRPC_HEALTH, streaming_type=unary)


def add_handlers(server: Any, handlers: Sequence[Any]) -> None:
    """Add handlers to one of Serve's gRPC servers as they are; its own method would put others in their place."""
    super(grpc_util.gRPCGenericServer, server).add_generic_rpc_handlers(tuple(handlers))
