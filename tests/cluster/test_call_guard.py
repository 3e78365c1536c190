"""The keyless rule: who may bind, and who may call."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from motley.cluster.security.auth.api_keys import KeyRing, StoredKey, hash_key
from motley.cluster.security.auth.call_guard import CallGuard, check_bind, check_host, check_peer, is_loopback
from motley.cluster.security.edge.haproxy_config import HAProxyEdge
from motley.cluster.service_errors import ConfigurationError, Forbidden, Unauthenticated
from motley.cluster.transport.grpc_server.rpc_methods import _host
from motley.cluster.transport.http_server import http_guard

LOOPBACK = ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST.", "api.localhost", "::ffff:127.0.0.1"]
FOREIGN = ["0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "example.com", "localhost.example.com", "", "127.0.0.1.nip.io"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_bind(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_off_loopback_nothing_binds_without_keys(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1"):
        check_bind(host)


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"])
def test_own_hosts(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize("host", ["", "example.com", "example.com:8000", "evil.test:80", "[::2]:1", "[", "127.0.0.1.x"])
def test_foreign_hosts(host: str) -> None:
    with pytest.raises(Forbidden):
        check_host(host)


@pytest.mark.parametrize("name", ["X-Forwarded-For", "x-forwarded-proto", "Forwarded", "X-Real-IP", "via"])
def test_forwarded_calls(name: str) -> None:
    with pytest.raises(Forbidden):
        check_peer("127.0.0.1", ["accept", name])


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv4:10.1.2.3:4711", "10.1.2.3"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[::1]:4711", "::1"),
        ("unix:/tmp/socket", "127.0.0.1"),
        ("", ""),
    ],
)
def test_peers_of_grpc(peer: str, host: str) -> None:
    assert _host(peer) == host


async def test_http_asks_all_of_them(call: Any) -> None:
    for options in (
        {"client": "10.0.0.7"},
        {"headers": {"host": "example.com"}},
        {"headers": {"host": None}},
        {"headers": {"x-forwarded-for": "127.0.0.1"}},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/nowhere")):
            reply = await call(method, path, {}, **options)
            assert (reply.status, reply.json()["error"]["type"]) == (403, "permission_error"), options


async def test_a_header_that_would_keep_closed_connections_running(post: Any) -> None:
    reply = await post("/v1/completions", {"prompt": "a"}, headers={"x-request-disconnect-disabled": "?1"})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "x-request-disconnect-disabled"


async def test_a_body_that_does_not_arrive(ingress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "BODY_S", 0.05)
    sent: list[Any] = []
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Any:
        for part in parts:
            return part
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await ingress.__serve_build_asgi_app__()(scope | {"client": ("127.0.0.1", 1)}, receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "slow_body"


@pytest.mark.parametrize("reader_timeout_s", [0.0, 5.0, 100.0])
def test_the_ingress_ends_its_wait_for_a_body_before_haproxy_does(reader_timeout_s: float, tmp_path: Path) -> None:
    """Or it is chance whether a client reads that its body is slow, or HAProxy's page that its request is malformed."""
    edge = HAProxyEdge(host="127.0.0.1", http_port=1, grpc_port=2, reader_timeout_s=reader_timeout_s)
    timeouts = "".join(replacement for _, replacement, _ in edge.edits(tmp_path))
    found = [int(seconds) for seconds in re.findall(r"timeout client (\d+)s", timeouts)]
    assert len(found) == 2, "of HTTP, and of gRPC"
    assert min(found) >= max(http_guard.BODY_S, reader_timeout_s) + 5


SCOPES = {"tenant": "", "admin": "admin", "reader": "metrics"}
RING = KeyRing([StoredKey(name, hash_key(f"mk-{name}"), scope=scope) for name, scope in SCOPES.items()])
OPEN, SHUT = CallGuard(RING, open_metrics=True), CallGuard(RING)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}")]


def test_metrics_are_read_with_a_key_for_them_or_an_admins() -> None:
    for guard in (OPEN, SHUT):
        for name in ("admin", "reader"):
            assert guard.reader("10.0.0.1", bearer(f"mk-{name}"), "example.com") == name
        with pytest.raises(Forbidden, match="a tenant's key") as refused:
            guard.reader("127.0.0.1", bearer("mk-tenant"), "localhost")
        assert refused.value.status == 403
        for wrong in ([*bearer("mk-reader"), ("x-api-key", "mk-admin")], bearer("mk-other"), bearer("")):
            with pytest.raises(Unauthenticated):
                guard.reader("127.0.0.1", wrong, "localhost")


def test_a_key_for_metrics_opens_nothing_else() -> None:
    assert RING.admin_of("mk-reader") is None
    with pytest.raises(Unauthenticated):
        SHUT.tenant("127.0.0.1", bearer("mk-reader"))


LOCAL: list[tuple[str, list[tuple[str, str]]]] = [
    ("127.0.0.1", []),
    ("127.0.0.1", [("X-Forwarded-For", "127.0.0.1"), ("x-forwarded-proto", "https")]),
]
REMOTE = [
    ("10.0.0.1", []),
    ("127.0.0.1", [("X-Forwarded-For", "10.0.0.1")]),
    ("127.0.0.1", [("X-Forwarded-For", "127.0.0.1, 10.0.0.1")]),
    ("127.0.0.1", [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-for", "10.0.0.1")]),
    ("127.0.0.1", [("Forwarded", "for=127.0.0.1")]),
]


@pytest.mark.parametrize(("peer", "headers"), LOCAL)
def test_open_metrics_are_told_on_this_machine(peer: str, headers: list[tuple[str, str]]) -> None:
    assert OPEN.reader(peer, headers, "localhost:8000") == ""
    with pytest.raises(Unauthenticated):
        SHUT.reader(peer, headers, "localhost:8000")
    with pytest.raises(Forbidden, match="Host"):
        OPEN.reader(peer, headers, "rebound.example.com")


@pytest.mark.parametrize(("peer", "headers"), REMOTE)
def test_open_metrics_are_told_to_nobody_else(peer: str, headers: list[tuple[str, str]]) -> None:
    with pytest.raises(Unauthenticated, match="only this machine"):
        OPEN.reader(peer, headers, "localhost:8000")


def test_without_keys_metrics_are_for_this_machine() -> None:
    assert CallGuard().reader("127.0.0.1", [], "localhost") == ""
    with pytest.raises(Forbidden):
        CallGuard().reader("10.0.0.1", [], "localhost")
