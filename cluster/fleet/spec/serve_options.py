"""Options of `motley serve`. Imports neither Ray nor torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ....replicas.engine_config import EngineConfig
from .fleet_file_loader import FleetFile

ADMIN_PORT = 9190


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of one service.

    model              folder or Hugging Face id; None serves the built-in demo model
    engine             settings of the replicas' engine
    replicas           number of replicas
    max_replicas       most replicas that may be asked for later; None: one for each core
    host               address at which HTTP and gRPC listen; without API keys loopback only
    api_keys           file of API keys (`motley keys`); None: only this machine may call
    open_health        whether health is told without a key
    open_metrics       whether metrics are told on this machine without a key
    vllm_metrics       whether metrics are told by vLLM's prefix too
    otlp_endpoint      URL of OpenTelemetry's collector that is told of each request; empty: none is
    weights_roots      folders from which admins may update the weights; none: nobody may
    cors_origins       web pages from there may call, each as `https://host[:port]`; `*` alone: from anywhere
    tls_cert, tls_key  PEM files: HTTP and gRPC are served over TLS
    client_ca          PEM file: with TLS, only clients with a certificate of this authority may connect
    tls_terminated_upstream  whether a proxy before this service does TLS
    http_port          port of HTTP: OpenAI's and KServe's protocols
    grpc_port          port of gRPC: every protocol that is not HTTP
    control            whether to run the control plane, for `motley fleet`
    admin_host         address at which the control plane listens; off loopback with API keys and TLS only
    admin_port         the control plane's gRPC port; None takes ADMIN_PORT if it is free, or another
    dashboard_port     port of Ray's dashboard, on loopback; None takes 8265 if it is free, or another
    served_model_name  model name for clients; None: its folder's name
    null_engine        compute nothing, to measure the service itself; then the model is only its tokenizer and limits
    null_step_ms       duration of a step of the null engine; 0: as long as its readers take
    simulate           GPU of the table to simulate: compute nothing, and take the time that the roofline predicts
    simulate_model     model whose time is simulated: a name of the kernels' model shapes; None: the model itself
    tool_parser        parser of the model's tool calls; auto: chosen by its chat template
    reasoning_parser   parser of the model's reasoning; auto: chosen by its chat template
    unknown_fields     what to do with unknown fields, where the protocol leaves it open: ignore (and log), or refuse
    prefix_cache       where replicas share prompts' prefixes: embedded, a URL of Redis, memory or off
    prefix_memory      bytes of memory of the service's own Redis, or of each replica
    prefix_secret      file with the secret by which services share prefixes; None: this one shares with no other
    drain_s            seconds for streams to end after Ctrl-C, or on a replica that is removed, before they move
    stall_s            seconds without a sign of life after which a replica is given up, and its streams move
    spare              whether a warm process waits on each node with a replica, with all imports done
    greet              show an answer over gRPC and one over HTTP when ready
    fleet              fleet file whose pools replace engine, replicas and simulation; None: flags say it all
    address            running Ray cluster to deploy the fleet on; None: a cluster of the service's own
    ready_file         JSON file that is written when ready, for a process that waits for that
    log_format         form of Motley's log lines: text or json
    keep_logs          folder in which the logs of each run are kept when it ends; None: those of failed runs alone
    """

    model: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    max_replicas: int | None = None
    host: str = "127.0.0.1"
    api_keys: Path | None = None
    open_health: bool = False
    open_metrics: bool = False
    vllm_metrics: bool = False
    otlp_endpoint: str = ""
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    tls_terminated_upstream: bool = False
    weights_roots: tuple[Path, ...] = ()
    http_port: int = 8000
    grpc_port: int = 9000
    control: bool = True
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    dashboard_port: int | None = None
    served_model_name: str | None = None
    null_engine: bool = False
    null_step_ms: float = 0.0
    simulate: str | None = None
    simulate_model: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    unknown_fields: str = "ignore"
    prefix_cache: str = "embedded"
    prefix_memory: int = 1 << 30
    prefix_secret: Path | None = None
    drain_s: float = 3.0
    stall_s: float = 5.0
    spare: bool = True
    greet: bool = False
    fleet: FleetFile | None = None
    address: str | None = None
    ready_file: Path | None = None
    log_format: str = "text"
    keep_logs: Path | None = None

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas or os.cpu_count() or 1)
