"""Client by which `motley serve` calls the service that it started, with an API key of its own."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from .haproxy_config import LOOPBACK
from .ports import bracket_host

_EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True, slots=True)
class InternalClient:
    """Address and API key of the service. `key` is empty if the service has no API keys."""

    host: str
    http_port: int
    grpc_port: int
    key: str = ""

    @property
    def http(self) -> str:
        return f"http://{self._host}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{self._host}:{self.grpc_port}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of gRPC calls."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return urllib.request.Request(self.http + path, body, headers)

    @property
    def _host(self) -> str:
        return bracket_host(_EVERYWHERE.get(self.host, self.host))
