"""Every route and RPC there is, with API keys: none without a key, none with a wrong one, all with a right one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import asgi
import grpc
import pytest
from echo_worker import EchoWorker
from google.protobuf import message_factory
from google.protobuf.message import Message
from local_ingress import make_ingress, routes

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.call_guard import Headers
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport import access_log
from motley.cluster.transport.grpc_server import servicers
from motley.cluster.transport.grpc_server.unparsed_request import UnparsedRequest

KEY, OLD = new_key(), new_key()
GOOD = {"authorization": f"Bearer {KEY}"}
BAD: list[dict[str, str | None]] = [
    {},
    {"authorization": "Bearer "},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {OLD}"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"x-api-key": "wrong"},
    {"authorization": f"Bearer {KEY}", "x-api-key": "another"},
    {"cookie": f"authorization=Bearer {KEY}"},
]
OPEN_PATHS = {"/ping", "/health", "/v2/health/live", "/v2/health/ready"}
OPEN_RPCS = {"Check", "Watch", "List", "ServerLive", "ServerReady", "ModelReady", "HealthCheck"}


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, [StoredKey("alice", hash_key(KEY)), StoredKey("bob", hash_key(OLD), expires=1.0)])
    return path


@pytest.fixture(scope="module")
async def keyed(folder: Path, worker: EchoWorker, key_path: Path) -> Any:
    return await make_ingress(
        folder, worker, ingress_config=IngressConfig(api_keys=key_path, cors_origins=("https://good.example",))
    )


@pytest.fixture(scope="module")
async def healthy(folder: Path, worker: EchoWorker, key_path: Path) -> Any:
    return await make_ingress(folder, worker, ingress_config=IngressConfig(api_keys=key_path, open_health=True))


async def serve(ingress: Any) -> tuple[grpc.aio.Server, grpc.aio.Channel]:
    server = grpc.aio.server()
    for path in servicers.SERVICER_FUNCTIONS:
        getattr(servicers, path.rpartition(".")[2])(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, grpc.aio.insecure_channel(f"127.0.0.1:{port}")


@pytest.fixture(scope="module")
async def channel(keyed: Any) -> AsyncIterator[grpc.aio.Channel]:
    server, channel = await serve(keyed)
    yield channel
    await channel.close()
    await server.stop(None)


NOWHERE = [("GET", "/"), ("GET", "/nowhere"), ("POST", "/v1/nothing"), ("PATCH", "/v1/completions"), ("GET", "/docs")]


@pytest.mark.slow("Every route is asked 27 times with keys that are wrong")
async def test_every_route(keyed: Any) -> None:
    call = partial(asgi.request, keyed.__serve_build_asgi_app__())
    bodies = set()
    for method, path in routes(keyed) + NOWHERE:
        for headers in BAD:
            for extra in ({}, {"content-type": "text/plain"}, {"content-length": str(10**9)}):
                reply = await call(method, path, {"model": "x"}, headers={**headers, **extra}, client="10.0.0.7")
                assert reply.status == 401, (method, path, headers)
                assert reply.headers["www-authenticate"] == 'Bearer realm="motley"'
                bodies.add((path.startswith("/v2"), path == "/metrics", reply.body))
        reply = await call(method, path, {"model": "x"}, headers={**GOOD, "host": "example.com"}, client="10.0.0.7")
        assert reply.status != 401, (method, path)
        assert (await call(method, path, {"model": "x"}, headers={"x-api-key": KEY})).status != 401
    assert len(bodies) == 3, "the same words whatever was wrong, in KServe's form and in OpenAI's, and for a scraper"


async def test_a_web_socket_is_closed_before_it_opens(keyed: Any) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "query_string": b"", "scheme": "ws"}
    await keyed.__serve_build_asgi_app__()(scope, lambda: None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


RPCS = [
    pytest.param(service, rpc, id=f"{service.full_name}/{rpc.name}")
    for service in servicers.SERVICES
    for rpc in service.methods
]


async def late(message: Message) -> AsyncIterator[Message]:
    """By when a server that refuses has done so: grpcio's client fails where a message crosses the stream's end."""
    await asyncio.sleep(0.1)
    yield message


async def ask(
    channel: grpc.aio.Channel, service: Any, rpc: Any, headers: Headers, silence_s: float = 30.0, tries: int = 3
) -> grpc.StatusCode:
    """Call it with an empty message; the status, or OK as soon as something was answered.

    A stream that stays open for `silence_s` and says nothing is OK as well: there is nothing to tell yet.
    """
    kind = ("stream" if rpc.client_streaming else "unary") + ("_stream" if rpc.server_streaming else "_unary")
    request = message_factory.GetMessageClass(rpc.input_type)()
    method = getattr(channel, kind)(
        f"/{service.full_name}/{rpc.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=bytes,
    )
    call = method(late(request) if rpc.client_streaming else request, metadata=tuple(headers), timeout=20)
    try:
        if rpc.server_streaming:
            with suppress(TimeoutError):
                await asyncio.wait_for(call.read(), silence_s)
            if not call.done():
                return grpc.StatusCode.OK
            # Where it crosses it all the same.
            if tries > 1 and rpc.client_streaming and await call.details() == "internal":
                return await ask(channel, service, rpc, headers, silence_s, tries - 1)
            return await call.code()
        await call
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()


@pytest.mark.parametrize(("service", "rpc"), RPCS)
async def test_every_rpc(channel: grpc.aio.Channel, service: Any, rpc: Any) -> None:
    for headers in BAD:
        metadata = [(name, value) for name, value in headers.items() if value is not None]
        assert await ask(channel, service, rpc, metadata) == grpc.StatusCode.UNAUTHENTICATED, headers
    for name, value in (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)):
        assert await ask(channel, service, rpc, [(name, value)], silence_s=1.0) not in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
        )


async def test_malformed_bytes_are_not_looked_at_without_a_key(channel: grpc.aio.Channel) -> None:
    method = channel.unary_unary("/motley.v1.Inference/Complete")
    for headers, code in (((), "UNAUTHENTICATED"), ((("x-api-key", KEY),), "INVALID_ARGUMENT")):
        with pytest.raises(grpc.RpcError) as caught:
            await method(b"\xff\xff", metadata=headers)
        assert caught.value.code().name == code


@pytest.mark.parametrize(("service", "rpc"), RPCS)
async def test_a_message_is_never_parsed_without_a_key(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, service: Any, rpc: Any
) -> None:
    """Methods that Serve registers make no message of the bytes; the parser is called only for callers with a key."""
    assert isinstance(registered()[f"/{service.full_name}/{rpc.name}"].request_deserializer(b"\xff"), UnparsedRequest)
    parsed: list[str] = []
    parse = UnparsedRequest.parsed

    def spy(request: UnparsedRequest) -> Message:
        parsed.append(request.kind.DESCRIPTOR.full_name)
        return parse(request)

    monkeypatch.setattr(UnparsedRequest, "parsed", spy)
    await ask(channel, service, rpc, [])
    assert not parsed
    await ask(channel, service, rpc, [("x-api-key", KEY)], silence_s=2.0)
    assert parsed == [rpc.input_type.full_name.replace("reflection.v1.", "reflection.v1alpha.")], "v1 is read as that"


def registered() -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Server:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            for handler in handlers:
                found.update(handler._method_handlers)

        def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
            found.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    for path in servicers.SERVICER_FUNCTIONS:
        getattr(servicers, path.rpartition(".")[2])(Mock(), Server())
    return found


async def test_open_health_opens_health_and_nothing_else(healthy: Any) -> None:
    call = partial(asgi.request, healthy.__serve_build_asgi_app__())
    opened = {path for method, path in routes(healthy) if (await call(method, path, b"")).status != 401}
    assert opened == OPEN_PATHS & {path for _, path in routes(healthy)}
    assert (await call("POST", "/health", b"")).status == 401
    server, channel = await serve(healthy)
    found = {
        rpc.name
        for service in servicers.SERVICES
        for rpc in service.methods
        if await ask(channel, service, rpc, []) != grpc.StatusCode.UNAUTHENTICATED
    }
    await channel.close()
    await server.stop(None)
    assert found == OPEN_RPCS


async def test_the_tenant_reaches_the_engine_and_the_log(
    keyed: Any, channel: grpc.aio.Channel, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(map(json.loads, record.getMessage().splitlines()))  # type: ignore[method-assign]
    monkeypatch.setattr(access_log.log, "handlers", [handler])
    seen: list[Any] = []
    real = worker.generate

    def generate(request: Any) -> Any:
        seen.append(request)
        return real(request)

    monkeypatch.setattr(worker, "generate", generate)
    call = partial(asgi.request, keyed.__serve_build_asgi_app__())
    secret = "a prompt that is nobody's business"
    body = {"prompt": secret, "max_tokens": 5}
    reply = await call("POST", "/v1/completions", body, headers={**GOOD, "x-request-id": "mine\x01 own"})
    assert (reply.status, reply.headers["x-request-id"]) == (200, "mineown")
    rpc = inference_pb2_grpc.InferenceStub(channel).CompleteStream(
        pb.CompleteRequest(text=secret, sampling=pb.SamplingParams(max_tokens=3)),
        metadata=(("x-api-key", KEY),),
        timeout=100,
    )
    async for _ in rpc:
        pass
    [given] = [value for name, value in await rpc.trailing_metadata() if name == "x-request-id"]
    await call("POST", "/v1/completions", body, headers={"authorization": f"Bearer {KEY}x"})
    http, grpc_, refused = lines
    assert [request.tenant for request in seen] == ["alice", "alice"]
    assert seen[0].cache_salt == seen[1].cache_salt
    assert seen[0].cache_salt.endswith(b"alice")
    assert seen[0].deadline_s is None
    assert 90 < seen[1].deadline_s < 102, "the call's own deadline, as gRPC rounds it on the wire, is the engine's"
    assert (http["tenant"], http["client_id"], http["protocol"]) == ("alice", "mineown", "http")
    assert (http["call"], http["status"], http["completion_tokens"]) == ("POST /v1/completions", 200, 5)
    assert http["requests"] == [seen[0].request_id]
    assert (grpc_["tenant"], grpc_["call"], grpc_["status"]) == ("alice", "CompleteStream", "OK")
    assert (grpc_["id"], grpc_["completion_tokens"]) == (given, 3)
    assert http["prompt_tokens"] == grpc_["prompt_tokens"] == len(seen[0].prompt_ids)
    assert (refused["tenant"], refused["status"], refused["requests"]) == ("", 401, [])
    assert not any(word in json.dumps(lines) for word in (secret, KEY, hash_key(KEY)))


HEADERS = "authorization,content-type,x-stainless-lang,x-stainless-os"  # as OpenAI's own client in a browser asks


async def test_pages_of_other_origins(keyed: Any) -> None:
    call = partial(asgi.request, keyed.__serve_build_asgi_app__())

    def preflight(origin: str) -> Any:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": HEADERS}
        return call("OPTIONS", "/v1/completions", b"", headers={"origin": origin, **wanted})

    good, bad = await preflight("https://good.example"), await preflight("https://evil.example")
    assert (good.status, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
    assert "access-control-allow-credentials" not in good.headers, "keys travel in headers, never in cookies"
    assert bad.status == 400
    assert "access-control-allow-origin" not in bad.headers
    reply = await call("GET", "/v1/models", b"", headers={"origin": "https://good.example"})
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, "https://good.example")
    reply = await call("GET", "/v1/models", b"", headers={"origin": "https://evil.example", **GOOD})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("origin", "method", "param", "named"),
    [
        ("https://evil.example", "POST", "Origin", "https://evil.example"),
        ("https://good.example", "DELETE", "Access-Control-Request-Method", "'DELETE': expected GET or HEAD or POST"),
    ],
)
async def test_a_preflight_that_is_refused_says_why(
    keyed: Any, origin: str, method: str, param: str, named: str
) -> None:
    call = partial(asgi.request, keyed.__serve_build_asgi_app__())
    headers = {"origin": origin, "access-control-request-method": method}
    reply = await call("OPTIONS", "/v1/completions", b"", headers=headers)
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, "cors_refused")
    assert named in error["message"]
    assert (reply.headers["content-type"], len(reply.body)) == (
        "application/json",
        int(reply.headers["content-length"]),
    )
    assert ("access-control-allow-origin" in reply.headers) == (param != "Origin")
    assert "Origin" in reply.headers["vary"]
    kserve = (await call("OPTIONS", "/v2/models/echo/infer", b"", headers=headers)).json()
    assert kserve == {"error": error["message"]}


async def test_without_the_option_no_page_may_call(call: Any) -> None:
    reply = await call("GET", "/v1/models", b"", headers={"origin": "https://good.example"})
    assert not any(name.startswith("access-control") for name in reply.headers)
