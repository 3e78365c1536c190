"""Bad requests against the whole service: refused in the right form, and nothing else happens."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from bad_requests import BAD_BODIES, BAD_JSON_FIELDS, BAD_MESSAGES, BAD_PROMPTS, UNSUPPORTED_OR_UNKNOWN
from serve_process import Served

from motley.client import Client
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.security.edge.ports import is_listening
from motley.replicas.errors import Overloaded

JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True, scope="module")
def _nothing_else_happens(service: Served) -> Iterator[None]:
    """Same processes, same greedy answer, everything free, whatever was asked in between."""
    with Client(service.grpc) as client:

        def reply() -> list[int]:
            return list(client.complete("neighbour", temperature=0.0, max_tokens=48).choices[0].token_ids)

        before, replicas = reply(), service.replicas()
        assert len(replicas) == 2, "an ingress and an engine"
        yield
        assert reply() == before
        assert service.replicas() == replicas
        service.wait_idle()


def send(service: Served, method: str, path: str, body: Any = None, headers: dict[str, str] = JSON) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=30)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.getheader("content-type") == "application/json", content[:200]
    return response.status, json.loads(content).get("error")


def test_every_bad_field_over_http(service: Served) -> None:
    for fields, param in BAD_JSON_FIELDS:  # the others: test_battery, over every protocol
        status, error = send(service, "POST", "/v1/completions", json.dumps({"prompt": "abc", **fields}))
        assert (status, error["param"]) == (400, param)
    for prompt in BAD_PROMPTS:
        status, error = send(service, "POST", "/v1/completions", json.dumps({"prompt": prompt}))
        assert (status, error["param"]) == (400, "prompt")
    for fields, param, code in UNSUPPORTED_OR_UNKNOWN:
        status, error = send(service, "POST", "/v1/completions", json.dumps({"prompt": "abc", **fields}))
        assert (status, error["param"], error["code"]) == (400, param, code)
    for messages in BAD_MESSAGES:
        status, error = send(service, "POST", "/v1/chat/completions", json.dumps({"messages": messages}))
        assert status == 400
        assert error["param"].startswith("messages")


def test_bodies_paths_methods_and_media(service: Served) -> None:
    for body in BAD_BODIES:
        status, error = send(service, "POST", "/v1/completions", body)
        assert (status, error["code"]) == (400, "invalid_json")
    assert send(service, "POST", "/nowhere", "{}")[0] == 404
    assert send(service, "GET", "/v1/completions")[0] == 405
    assert send(service, "POST", "/v1/completions", "{}", {"Content-Type": "text/plain"})[0] == 415
    assert send(service, "POST", "/v1/completions", "{}", {**JSON, "Content-Encoding": "gzip"})[0] == 415


def test_probes_and_upgrades(service: Served) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    status, error = send(service, "GET", "/v1/realtime", None, {**upgrade, "Sec-WebSocket-Key": "A" * 22 + "=="})
    assert (status, error["code"]) == (501, "not_implemented")
    for path in ("/health", "/v1/models", "/v2/health/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=30)
        connection.request("HEAD", path)
        head = connection.getresponse()
        assert (head.status, head.read()) == (200, b"")
        connection.close()


def test_large_bodies_over_both_protocols(service: Served) -> None:
    status, error = send(service, "POST", "/v1/completions", iter([b" " * 2**20] * 9))
    assert (status, error["code"]) == (413, "body_too_large")
    with Client(service.grpc) as client:
        with pytest.raises(Overloaded) as caught:  # what RESOURCE_EXHAUSTED is read as
            client.complete("x" * (9 * 2**20))
        assert caught.value.retry_after_s is None, "trying again would not help"


def test_a_declared_size_is_refused_before_it_is_sent(service: Served) -> None:
    with socket.create_connection(("127.0.0.1", service.http_port), timeout=30) as connection:
        head = f"Content-Length: {100 * 2**20}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_malformed_messages_over_grpc(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/motley.v1.Inference/Complete")(b"\xff\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/motley.v1.Inference/NoSuchMethod")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_without_keys_strangers_are_refused(service: Served) -> None:
    for headers in ({"Host": "example.com"}, {"X-Forwarded-For": "127.0.0.1"}):
        assert send(service, "GET", "/v1/models", headers=headers)[0] == 403
    with Client(service.grpc) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.ListModels(pb.ListModelsRequest(), metadata=(("x-forwarded-for", "127.0.0.1"),))
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_direct_ports_are_on_loopback_only(service: Served) -> None:
    """HAProxy's way to the ingress would be open to the network as Serve binds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which address would be used
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    [file] = Path(service.endpoints["folder"]).glob("**/haproxy.cfg")
    config = file.read_text()
    ports = {int(port) for port in re.findall(r"server SERVE_REPLICA\S+ \S+:(\d+) proto h2", config)}
    assert ports
    for port in ports:
        assert is_listening("127.0.0.1", port)
        assert not is_listening(own, port)
