"""Settings of the ingress: who may call, and what is logged. They are sent to its process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ...routing.attempt.retry_decider import RetryPolicy
from ...routing.queueing.request_queue import RoutingConfig
from ...security.auth.api_keys import StoredKey
from ...security.auth.call_guard import CallGuard
from ...security.auth.key_file import KeyFile
from ...transport.slow_clients import READER_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """Settings of an ingress.

    api_keys      the file of API keys; None: only this machine may call
    own_key       key of `motley serve` itself, which must check that the ports answer; new at each start
    open_health   whether health is told without a key
    open_metrics  whether metrics are told without a key on this machine
    vllm_metrics  whether metrics are told by vLLM's prefix too
    otlp_endpoint URL of a collector that is told of each request; empty: none is
    cors_origins  web pages from there may call
    log_folder    folder of the access log; None: stderr
    echo_id       whether answers over HTTP get x-request-id here; Serve's own server adds it itself
    reader_timeout_s   seconds after which a client that reads nothing of its answer is disconnected
    resume             when a replica is given up, and how another is chosen
    routing            objectives, and how requests wait for their turn
    unknown_fields     whether unknown fields of a request are ignored or refused, where the protocol leaves that open
    salt               salt of all tenants' prefixes: ingresses with the same salt share prefixes
    """

    api_keys: Path | None = None
    own_key: StoredKey | None = None
    open_health: bool = False
    open_metrics: bool = False
    vllm_metrics: bool = False
    otlp_endpoint: str = ""
    cors_origins: tuple[str, ...] = ()
    log_folder: Path | None = None
    echo_id: bool = True
    reader_timeout_s: float = READER_TIMEOUT_S
    resume: RetryPolicy = RetryPolicy()  # noqa: RUF009  frozen
    routing: RoutingConfig = RoutingConfig()  # noqa: RUF009  frozen
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    salt: bytes = field(default_factory=partial(secrets.token_bytes, 16), repr=False)

    def guard(self) -> CallGuard:
        """Return the guard of these settings. Raises ConfigurationError when the file of keys cannot be used."""
        if self.api_keys is None:
            return CallGuard(open_health=self.open_health)
        own = () if self.own_key is None else (self.own_key,)
        keys = KeyFile(self.api_keys, own)
        return CallGuard(keys, open_health=self.open_health, open_metrics=self.open_metrics)
