"""What `motley serve` can be told. Imports neither Ray nor torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..replicas.engine_config import EngineConfig
from .fleet.file import FleetFile

ADMIN_PORT = 9190


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of one service.

    model              folder or Hugging Face id; None serves the built-in demo model
    engine             settings of the replica's engine
    replicas           how many
    max_replicas       most that may be asked for later; None: one for each core
    host               where HTTP and gRPC listen; without API keys loopback only
    api_keys           file of API keys (`motley keys`); None: only this machine may call
    open_health        health is told without a key
    weights_roots      folders from which admins may update the weights; none: nobody may
    cors_origins       web pages from there may call, each as `https://host[:port]`; `*` alone: from anywhere
    tls_cert, tls_key  PEM files: HTTP and gRPC are served over TLS
    client_ca          PEM file: with TLS, only clients with a certificate of this authority
    tls_terminated_upstream  something before this service does TLS
    http_port          OpenAI's HTTP
    grpc_port          gRPC: every protocol that is not HTTP
    control            the control plane, for `motley fleet`
    admin_host         where the control plane listens; off loopback with API keys and TLS only
    admin_port         its gRPC; None takes ADMIN_PORT if it is free, or another
    dashboard_port     Ray's dashboard, on loopback; None takes 8265 if it is free, or another
    served_model_name  what clients call the model; None: its folder's name
    null_engine        compute nothing, to measure the service itself; then the model is only its tokenizer and limits
    null_step_ms       what a step of it takes; 0: as long as its readers
    simulate           a GPU of the table: compute nothing, and take the time that the roofline says it would
    simulate_model     whose time: a name of the kernels' model shapes; None: that of the model itself
    tool_parser        how the model writes calls of tools; auto: told from its chat template
    reasoning_parser   likewise for what it thinks before it answers
    unknown_fields     of requests, where the protocol leaves open what becomes of them: ignore (and log), or refuse
    prefix_cache       where replicas share prompts' prefixes: embedded, a URL of Redis, memory or off
    prefix_memory      bytes: of the redis-server of its own, or of each replica
    prefix_secret      file with what services have in common to share prefixes; None: this one is for itself
    drain_s            how long streams may go on after Ctrl-C, or on a replica that is taken away before they move
    stall_s            a replica that shows no sign of life for so long is given up, and its streams move
    spare              on each node with a replica a process waits for the next one, with all that it imports
    greet              show an answer over gRPC and one over HTTP when ready
    fleet              its pools stand in place of engine, replicas and what is simulated; None: flags say it all
    address            a Ray cluster that runs already, to deploy the fleet there; None: one of its own
    ready_file         written when ready, as JSON, for whoever waits for that
    """

    model: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    max_replicas: int | None = None
    host: str = "127.0.0.1"
    api_keys: Path | None = None
    open_health: bool = False
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

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas or os.cpu_count() or 1)
