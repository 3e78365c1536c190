"""A service with API keys behind the TLS edge: every port that any of its processes listens on, and who comes in."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from certificates import Certificates
from listeners import Listener, listeners
from served import Served, served, wait_for

from motley.cluster.auth.key_file import edited
from motley.cluster.auth.keys import StoredKey, hash_key, new_key
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

KEY, REVOKED = new_key(), new_key()
PROMPT = "nobody else's business"
GET = ("GET", "/v1/models")
JSON = {"Content-Type": "application/json"}

# Ray's own, which it binds on all interfaces whatever it is told. Calls want Ray's token; its metrics, which are
# numbers about nodes and actors, do not.
RAYS = {
    "gcs_server": "the cluster's tables",
    "raylet": "the node's scheduler and objects",
    "ray::": "each worker's calls; Serve's messages between replicas; the agent's metrics",
    "ray/dashboard": "the dashboard's metrics",
    "ray/autoscaler": "the autoscaler's metrics",
    "motley serve": "the driver's calls",
}
# One call at least that each of its gRPC servers knows.
RAYS_CALLS = (
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Push",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    with edited(path) as keys:
        keys += [StoredKey("alice", hash_key(KEY)), StoredKey("bob", hash_key(REVOKED))]
    return path


@pytest.fixture(scope="module")
def secured(
    checkpoint: Path, certificates: Certificates, key_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    tls = ["--tls-cert", certificates.cert, "--tls-key", certificates.key, "--client-ca", certificates.ca]
    arguments = [checkpoint, "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB", "--greet"]
    arguments += ["--host", "0.0.0.0", "--api-keys", key_path, *tls]
    with served([str(one) for one in arguments], tmp_path_factory.mktemp("secured")) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> ssl.SSLContext:
    return certificates.client_context()


@pytest.fixture(scope="module")
def channel(secured: Served, certificates: Certificates) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(f"localhost:{secured.grpc_port}", certificates.channel_credentials()) as channel:
        yield channel


def asked(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Status and body."""
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def https(service: Served, tls: ssl.SSLContext) -> http.client.HTTPConnection:
    return http.client.HTTPSConnection("localhost", service.http_port, context=tls, timeout=60)


def test_the_openai_client(secured: Served, certificates: Certificates, tls: ssl.SSLContext) -> None:
    def client(key: str) -> openai.OpenAI:
        http_client = openai.DefaultHttpxClient(verify=tls)
        return openai.OpenAI(
            base_url=f"https://localhost:{secured.http_port}/v1", api_key=key, max_retries=0, http_client=http_client
        )

    with client(KEY) as good:
        assert good.completions.create(model="tiny", prompt=PROMPT, max_tokens=4).usage.completion_tokens <= 4
        assert "".join(
            chunk.choices[0].text for chunk in good.completions.create(model="tiny", prompt=PROMPT, stream=True)
        )
    with client(f"{KEY}x") as bad, pytest.raises(openai.AuthenticationError) as caught:
        bad.models.list()
    assert caught.value.code == "invalid_api_key"


def test_grpc(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    for metadata in ((), (("authorization", f"Bearer {KEY}x"),), (("authorization", KEY),)):
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModel(pb.GetModelRequest(), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    metadata = (("authorization", f"Bearer {KEY}"), ("x-request-id", "mine"))
    reply, call = stub.GetModel.with_call(pb.GetModelRequest(), metadata=metadata)
    assert reply.name == "tiny"
    assert ("x-request-id", "mine") in list(call.trailing_metadata())


def http_denies(listener: Listener) -> str | None:
    """What an HTTP request without a key comes to; None if nothing there speaks HTTP."""
    try:
        status, body = asked(http.client.HTTPConnection(_at(listener), listener.port, timeout=10), *GET)
    except (OSError, http.client.HTTPException):
        return None
    if status == 200:
        return "metrics" if b"# TYPE" in body or b"Statistics Report" in body else "OPEN"
    return "denied" if status == 401 and b"invalid_api_key" in body else f"{status}"


def grpc_denies(listener: Listener) -> str | None:
    """Likewise over gRPC."""
    with grpc.insecure_channel(f"{_at(listener)}:{listener.port}") as channel:
        try:
            inference_pb2_grpc.InferenceStub(channel).GetModel(pb.GetModelRequest(), timeout=10)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                return "denied" if "an API key is required" in (error.details() or "") else "Ray's token"
            return None if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) else code.name
    return "OPEN"


def wants_rays_token(listener: Listener) -> bool:
    """Whether Ray's calls are refused there without its token."""
    codes = set()
    with grpc.insecure_channel(f"{_at(listener)}:{listener.port}") as channel:
        for method in RAYS_CALLS:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{method}")(b"", timeout=10)
            codes.add(caught.value.code())
    return grpc.StatusCode.UNAUTHENTICATED in codes


def _at(listener: Listener) -> str:
    return "127.0.0.1" if listener.loopback or listener.address in ("0.0.0.0", "::") else listener.address


def test_every_port_of_every_process(secured: Served, report: Callable[[str], None]) -> None:
    """Whoever has no key gets nothing of ours, on any of them; off loopback there are the two doors and Ray's own."""
    doors = {secured.http_port, secured.grpc_port}
    found = listeners([secured.process.pid, *secured.descendants()])
    assert doors <= {one.port for one in found}
    answers = {one: (http_denies(one), grpc_denies(one)) for one in found}
    assert not [one for one, answer in answers.items() if "OPEN" in answer]
    for one in found:
        if one.port in doors:
            assert not one.loopback
            assert answers[one] == (None, None), "no TLS, no answer"
        elif not one.loopback:
            assert any(name in one.command for name in RAYS), f"{one} is open to others, and nobody has said why"
            assert "haproxy" not in one.command
            assert "denied" not in answers[one], f"{one} is a door of ours, and open to others"
            assert answers[one][0] in ("401", "metrics") or wants_rays_token(one), f"{one} answers anybody"
    denied = [one for one, answer in answers.items() if "denied" in answer]
    assert len(denied) >= 6, "inner doors, direct ports of the ingress and Serve's fallback: HTTP and gRPC each"
    assert all(one.loopback for one in denied)
    open_ = [one for one in found if not one.loopback]
    report(f"{len(found)} ports, {len(denied)} of them ours on loopback, {len(open_) - len(doors)} Ray's on others")


def test_paths_and_methods_that_are_serves_own(secured: Served, tls: ssl.SSLContext, channel: grpc.Channel) -> None:
    for path in ("/-/healthz", "/-/routes", "/%2d/routes"):
        assert asked(https(secured, tls), "GET", path)[0] == 404
    for path in ("/health", "/nowhere", "/metrics", "/docs", "/openapi.json"):
        assert asked(https(secured, tls), "GET", path)[0] == 401
    for method in ("Healthz", "ListApplications"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/ray.serve.RayServeAPIService/{method}")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_heads_and_bodies(secured: Served, tls: ssl.SSLContext) -> None:
    def post(body: Any, **headers: str) -> tuple[int, Any]:
        given = {"x_api_key": KEY, "Content_Type": "application/json", **headers}
        status, answer = asked(https(secured, tls), "POST", "/v1/completions", body, **given)
        return status, json.loads(answer)["error"]["code"]

    assert post("{}", x="y" * 20_000) == (431, "head_too_large")
    assert post(b"\x1f\x8b", Content_Encoding="gzip") == (415, "unsupported_media")
    assert post("{}", Content_Type="text/plain") == (415, "unsupported_media")
    assert post(iter([b" " * 2**20] * 9)) == (413, "body_too_large")
    assert post("{}", Content_Length=str(100 * 2**20)) == (413, "body_too_large")


def test_a_slow_head_is_closed(secured: Served, tls: ssl.SSLContext) -> None:
    connection = https(secured, tls)
    connection.connect()
    assert connection.sock is not None
    connection.sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
    assert connection.sock.recv(4096).startswith(b"HTTP/1.1 408 ")
    connection.close()


def test_a_revoked_key_is_refused_while_the_service_runs(secured: Served, tls: ssl.SSLContext, key_path: Path) -> None:
    assert asked(https(secured, tls), *GET, x_api_key=REVOKED)[0] == 200
    command = [sys.executable, "-m", "motley", "keys", "revoke", REVOKED, "--file", str(key_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    wait_for(lambda: asked(https(secured, tls), *GET, x_api_key=REVOKED)[0] == 401, "the end of the key")
    assert asked(https(secured, tls), *GET, x_api_key=KEY)[0] == 200
    added = new_key()
    with edited(key_path) as keys:
        keys.append(StoredKey("carol", hash_key(added)))
    wait_for(lambda: asked(https(secured, tls), *GET, x_api_key=added)[0] == 200, "a key that was added")


def test_the_access_log(secured: Served, tls: ssl.SSLContext) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
    given = {"x_request_id": f"logged-{time.monotonic_ns()}", "Content_Type": "application/json"}
    assert asked(https(secured, tls), "POST", "/v1/completions", body, x_api_key=KEY, **given)[0] == 200
    path = Path(secured.endpoints["folder"]) / "session_latest" / "logs" / "access.log"

    def mine() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if line["client_id"] == given["x_request_id"]]

    [line] = wait_for(mine, "the line")
    assert (line["tenant"], line["status"], line["completion_tokens"]) == ("alice", 200, 3)
    assert line["call"] == "POST /v1/completions"
    everything = path.read_text()
    assert not any(word in everything for word in (PROMPT, KEY, REVOKED, hash_key(KEY)))
    assert "_motley" in everything, "the start's own look at the doors"


def test_what_the_start_shows(secured: Served) -> None:
    assert f"https://0.0.0.0:{secured.http_port}/v1" in secured.output
    assert "over gRPC: " in secured.output
    assert "Bearer" in secured.output
    assert "mk-" not in secured.output + json.dumps(secured.endpoints), "no key is shown"
