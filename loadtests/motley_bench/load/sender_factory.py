"""Choice of the client that sends a benchmark's requests, by the protocol and by what is installed."""

from __future__ import annotations

from importlib.util import find_spec

from motley.client import Tls

from .load_senders import GrpcSender, HttpSender, LoadSender
from .load_workload import Workload


def create_sender(
    workload: Workload, target: str, model: str, api_key: str | None, tls: Tls | None = None
) -> LoadSender:
    """Return the sender for the workload's protocol. It must be called where the event loop runs.

    target  host:port for gRPC, a URL without a path for HTTP
    tls     whom to trust; None over gRPC: not encrypted. For HTTP the URL says whether it is encrypted
    """
    if workload.protocol == "http":
        return HttpSender(target, model, api_key, tls)
    if grpc_client_name() == "grpcio":
        return GrpcSender(target, model, api_key, tls)
    from .curl_sender import CurlSender

    return CurlSender(target, model, api_key, tls)


def grpc_client_name() -> str:
    """Return which client is used over gRPC: libcurl where pycurl is installed, as it takes far less processor time."""
    return "libcurl" if find_spec("pycurl") else "grpcio"
