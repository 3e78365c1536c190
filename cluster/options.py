"""What `motley serve` can be told. Imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..replicas.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of one service.

    model              folder or Hugging Face id; None serves the built-in demo model
    engine             settings of the replica's engine
    replicas           how many
    host               where HTTP and gRPC listen; without API keys loopback only
    http_port          OpenAI's HTTP
    grpc_port          motley.v1
    dashboard_port     Ray's dashboard, on loopback; None takes 8265 if it is free, or another
    served_model_name  what clients call the model; None: its folder's name
    drain_s            how long streams may go on after Ctrl-C
    greet              show an answer over gRPC and one over HTTP when ready
    ready_file         written when ready, as JSON, for whoever waits for that
    """

    model: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    dashboard_port: int | None = None
    served_model_name: str | None = None
    drain_s: float = 3.0
    greet: bool = False
    ready_file: Path | None = None
