"""Service as a whole in a fleet file: its addresses, access to it, tenants, and the queue of its ingresses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .value_types import Count, FilePath, Port, Positive, Seconds, Spec, Text, Timeout


class QueueSpec(Spec):
    """Queue of requests in the ingress that no replica takes yet. Tenants take turns by their weights."""

    max_wait_s: Seconds = 10.0
    """Longest wait in seconds while every replica is full; 0: requests are refused at once."""
    hold_s: Seconds = 60.0
    """Longest wait in seconds while there is no replica at all."""
    max_requests: Count = 1024
    """Maximum number of waiting requests; further ones are refused."""
    max_tokens: Count = 1 << 20
    """Maximum number of prompt tokens of waiting requests; further requests are refused."""


class TenantSpec(Spec):
    """Settings of one tenant."""

    weight: Positive = 1.0
    """Share of the service relative to other tenants, when there is not enough for all."""
    cache_group: Text | None = None
    """Tenants of the same group trust each other and reuse each other's prefixes; by default a tenant only reuses its
    own."""


class SecuritySpec(Spec):
    """Access control and encryption of the service."""

    api_keys: FilePath | None = None
    """File of API keys, created by `motley keys`. Without it, only this machine may call."""
    open_health: bool = False
    """Answer health checks without a key."""
    open_metrics: bool = False
    """Answer `GET /metrics` without a key where the call comes from this machine."""
    cors_origins: list[Text] = Field(default_factory=list)
    """Origins of web pages that may call the service from a browser."""
    tls_cert: FilePath | None = None
    """PEM file with the certificate for serving over TLS."""
    tls_key: FilePath | None = None
    """PEM file with the private key of the certificate."""
    client_ca: FilePath | None = None
    """PEM file with a certificate authority: only clients with a certificate of it are admitted."""
    tls_terminated_upstream: bool = False
    """A proxy in front of the service terminates TLS."""
    weights_roots: list[FilePath] = Field(default_factory=list)
    """Folders on the replicas' hosts from which admins may update the weights; if empty, nobody may."""


class ListenSpec(Spec):
    """Addresses at which the service is reached."""

    host: Text = "127.0.0.1"
    """Address to listen on. Any other than loopback requires API keys and TLS."""
    http_port: Port = 8000
    """Port of the OpenAI-compatible HTTP API."""
    grpc_port: Port = 9000
    """Port of the gRPC APIs."""
    dashboard_port: Port | None = None
    """Port of Ray's dashboard; by default 8265 or another free one."""


class ServiceSpec(Spec):
    """Settings of the service as a whole: timeouts, ingresses and parsers."""

    drain_s: Seconds = 3.0
    """Seconds for which streams may continue when the service stops, or on a removed replica before they move to
    another."""
    stall_s: float = Field(5.0, ge=1, le=7 * 24 * 3600, allow_inf_nan=False)
    """Seconds without a sign of life after which a replica is given up."""
    ingresses: int = Field(1, ge=1, le=16)
    """Number of ingress processes, which accept requests and place them."""
    reader_timeout_s: Timeout = 30.0
    """Seconds without reading after which a client's request is cancelled."""
    tool_parser: Text = "auto"
    """Format in which the model writes tool calls."""
    reasoning_parser: Text = "auto"
    """Format in which the model writes its reasoning before the answer."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Treatment of unknown fields in requests. ignore: each name is logged once; refuse: status 400. Requests of
    motley.v1 with unknown fields are always refused."""
    vllm_metrics: bool = False
    """Tell each metric by vLLM's prefix too, `vllm:`, for dashboards that were made for vLLM."""
    otlp_endpoint: str = ""
    """URL of OpenTelemetry's collector, which is told of each request: `http://127.0.0.1:4318`. Empty: none is."""
    spare: bool = True
    """Keep a spare process waiting on each node with a replica, which has already imported what the next process needs.
    That one starts 2 s to 3 s sooner, for 0.3 GiB of the node's memory. There is none while less than 2 GiB are
    free."""
