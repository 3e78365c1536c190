"""Answers that Serve would give by itself: refused, but for who knows the name of the check."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import asgi
import grpc
import pytest
from listeners import listeners
from serve_process import free_port

from motley.cluster.ray_compat.visible_names import GRPC_HEALTH, HTTP_HEALTH, OWN_PATHS
from motley.cluster.security.edge import serve_patches

CHECK = OWN_PATHS + "c" * 34


async def tell_path(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.mark.parametrize("check", [CHECK, None])
async def test_paths(check: str | None) -> None:
    app = serve_patches.ServePathFilter(tell_path, check)
    for path in ("/-/routes", HTTP_HEALTH, "/-/", f"{CHECK}c", CHECK[:-1]):
        reply = await asgi.request(app, "GET", path, b"")
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "not_found"), path
    for path in ("/", "/v1/models", "/-"):
        assert (await asgi.request(app, "GET", path, b"")).body == path.encode()
    reply = await asgi.request(app, "GET", CHECK, b"")
    assert (reply.status, reply.body) == (200, HTTP_HEALTH.encode()) if check else reply.status == 404


async def test_a_web_socket_is_closed_before_it_opens() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await serve_patches.ServePathFilter(tell_path, CHECK)({"type": "websocket", "path": "/-/routes"}, None, send)
    assert sent == [{"type": "websocket.close"}]


def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end, all that the hook puts into Serve's place."""
    from ray.serve._private import default_impl, grpc_util, proxy_request_response, replica

    for module, name in (
        (default_impl, "add_grpc_address"),
        (grpc_util, "add_RayServeAPIServiceServicer_to_server"),
        (proxy_request_response, "RayServegRPCContext"),
        (replica, "add_port_to_grpc_server"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.parametrize("check", [CHECK, None])
async def test_rpcs(check: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own server, its handlers telling which of its methods they are for."""
    from ray.serve._private import grpc_util
    from ray.serve.config import gRPCOptions

    put_back(monkeypatch)
    if check is not None:
        monkeypatch.setenv(serve_patches.CHECK, check)
    serve_patches.close()

    def tell_method(service_method: str, streaming_type: Any) -> Any:
        async def answer(request: Any, context: Any) -> bytes:
            return service_method.encode()

        return answer

    ours = "/motley.v1.Inference/GetModel"
    options = gRPCOptions(
        port=free_port(),
        grpc_servicer_functions=["motley.cluster.transport.grpc_server.servicers.add_inference"],
        enable_reflection=False,
    )
    _, server = await grpc_util.start_grpc_server(tell_method, options, event_loop=asyncio.get_running_loop())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{options.port}") as channel:

        async def ask(method: str) -> Any:
            try:
                return await channel.unary_unary(method)(b"", timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code()

        assert await ask(ours) == ours.encode()
        for method in (GRPC_HEALTH, "/ray.serve.RayServeAPIService/ListApplications"):
            assert await ask(method) == grpc.StatusCode.UNIMPLEMENTED
        assert await ask(CHECK) == (GRPC_HEALTH.encode() if check else grpc.StatusCode.UNIMPLEMENTED)
    await server.stop(None)


async def test_the_port_for_other_replicas_is_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import replica

    put_back(monkeypatch)
    serve_patches.bind_to_loopback()
    server = grpc.aio.server()
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    await server.start()
    [listener] = [one for one in listeners([os.getpid()]) if one.port == port]
    assert listener.loopback
    await server.stop(None)


def test_a_call_that_serves_proxy_hands_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import proxy_request_response

    put_back(monkeypatch)
    serve_patches.close()
    assert proxy_request_response.RayServegRPCContext.forwarded
