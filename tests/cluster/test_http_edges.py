"""Requests of HTTP clients and load balancers besides posting: probe by HEAD, leave a name out, ask for a WebSocket."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from in_thread import in_thread

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models//ready"),
        ("GET", "/v2/models//config"),
        ("POST", "/v2/models//infer"),
        ("GET", "/v2/models//versions/1"),
        ("GET", "/v2/models//versions/1/ready"),
        ("GET", "/v2/models//versions/1/config"),
        ("POST", "/v2/models//versions/1/infer"),
    ],
)
async def test_a_path_without_a_models_name(ingress: Any, method: str, path: str) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
    body = {"inputs": [tensor]} if method == "POST" else b""
    reply = await asgi.request(ingress.__serve_build_asgi_app__(), method, path, body)
    assert reply.status == 404, reply.body
    assert reply.json()["error"] == "the path names no model; GET /v1/models tells which is served"


async def test_every_get_is_a_head_too(ingress: Any) -> None:
    app = ingress.__serve_build_asgi_app__()
    paths = {route.path.replace("{name:path}", "echo").replace("{number}", "1") for route in ingress._routes}
    found = set()
    for path in [*paths, "/nowhere"]:
        head, got = [await asgi.request(app, method, path) for method in ("HEAD", "GET")]
        assert (head.status, head.headers["content-type"]) == (got.status, got.headers["content-type"]), path
        assert got.headers["content-type"] == "application/json" or path == "/metrics"
        found.add(head.status)
    assert found == {200, 404, 405}


async def test_a_long_path_is_not_echoed_whole(ingress: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = ingress.__serve_build_asgi_app__()
    for method, path in (("GET", "/" + "a" * 15_000), ("DELETE", "/v1/models/" + "a" * 15_000)):
        reply = await asgi.request(app, method, path)
        assert (reply.status in (404, 405), len(reply.body) < 400) == (True, True)
    assert caplog.messages
    assert max(map(len, caplog.messages)) < 1000, "nor in the log"


@pytest.mark.parametrize(
    ("path", "kserve"), [("/v1/realtime", False), ("/v1/chat/completions", False), ("/v2/models/echo", True)]
)
async def test_a_websocket_is_refused_with_a_body(ingress: Any, path: str, kserve: bool) -> None:
    app, sent = ingress.__serve_build_asgi_app__(), []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1)}
    await app({**scope, "extensions": {"websocket.http.response": {}}}, None, send)
    begin, body = sent
    assert (begin["type"], begin["status"]) == ("websocket.http.response.start", 501)
    error = json.loads(body["body"])["error"]
    message = error if kserve else error["message"]
    assert message == "WebSocket is not supported; POST, and read streams as events"
    sent.clear()
    await app(
        {**scope, "headers": [(b"host", b"elsewhere.example")], "extensions": {"websocket.http.response": {}}},
        None,
        send,
    )
    assert sent[0]["status"] == 403, "the guard comes first"
    sent.clear()
    await app(scope, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"], "all that such a server knows"


async def test_on_the_wire(folder: Path) -> None:
    """The server leaves a HEAD's body out, and sends that of a WebSocket's refusal."""
    with in_thread(folder, EchoWorker(str(folder))) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=30)
        connection.request("HEAD", "/v1/models")
        head = connection.getresponse()
        assert (head.status, head.read()) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        connection.request("GET", "/v1/models")  # on the same connection: nothing was left in it
        assert json.loads(connection.getresponse().read())["object"] == "list"
        connection.request("GET", "/v1/realtime", headers=UPGRADE)
        refused = connection.getresponse()
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (501, "not_implemented")
        connection.close()
