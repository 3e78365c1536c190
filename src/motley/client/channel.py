"""Channels by which a client reaches the service: without TLS on this machine, over TLS from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.enable_retries", 0),  # `Retry` knows what is safe, and how long the service asks to wait
    ("grpc.initial_reconnect_backoff_ms", 100),  # at 1000, attempts in that time fail with the first one's error
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files.

    ca         authorities to trust; None: those that come with gRPC
    cert, key  the client's own certificate, if the service asks for one
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(*map(_read, (self.ca, self.key, self.cert)))


def blocking_channel(target: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    return grpc.secure_channel(target, tls.credentials(), options=_OPTIONS)


def aio_channel(target: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, tls.credentials(), options=_OPTIONS)


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
