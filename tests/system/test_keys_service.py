"""A service with API keys behind the TLS edge: every port that any of its processes listens on, and who comes in."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from certificates import Certificates
from echo_worker import EchoWorker
from listeners import Listener, listeners
from local_ingress import make_ingress, routes
from port_walk import Answer, Way, walk
from serve_process import Served, served, wait_for

from motley.cluster.fleet.control.rpcs.control_server import SERVICES as ADMIN_SERVICES
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import edit_keys
from motley.cluster.transport.grpc_server import servicers

KEY, REVOKED = new_key(), new_key()
PROMPT = "nobody else's business"
GET = ("GET", "/v1/models")
JSON = {"Content-Type": "application/json"}

# Paths and RPCs of Serve and HAProxy, beside every route and RPC of ours
NOT_OURS = [("GET", path) for path in ("/-/routes", "/-/healthz", "/stats", "/metrics", "/")]
# Of Ray's dashboard and its agent: what runs programs and tells of them, and what they tell without a token
HEALTHS = ("/api/healthz", "/api/gcs_healthz", "/api/local_raylet_healthz")
RAYS_PATHS = [
    *(("POST", path) for path in ("/api/jobs/", "/api/job_agent/jobs/", "/api/authenticate")),
    *(
        ("GET", path)
        for path in ("/api/jobs/", "/api/version", "/nodes?view=summary", "/logs", "/api/serve/applications/")
    ),
    *(("GET", path) for path in (*HEALTHS, "/api/authentication_mode", "/favicon.ico")),
]
SERVES_RPCS = ["ray.serve.RayServeAPIService/Healthz", "ray.serve.RayServeAPIService/ListApplications"]
# One call at least that each of Ray's gRPC servers knows, and wants its token for
RAYS_RPCS = [
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Push",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
    "grpc.channelz.v1.Channelz/GetServers",
    "grpc.channelz.v1.Channelz/GetTopChannels",
]
# Ray's own: on loopback, since the cluster is of one machine
RAYS = {
    "gcs_server": "the cluster's tables",
    "raylet": "the node's scheduler and objects",
    "ray::": "each worker's calls; Serve's messages between replicas; the agent's metrics and answers",
    "ray/dashboard": "the dashboard, which wants Ray's token, and its metrics",
    "ray/autoscaler": "the autoscaler's metrics",
    "motley serve": "the driver's calls",
}
# Doors of ours that are there too: HAProxy's own, the ingress behind it and Serve's fallback
OURS_INSIDE = ("haproxy", "ray::ServeReplica", "ray::ProxyActor")


def named(one: Listener) -> bool:
    """Whose it is has been said, with the reason."""
    return any(name in one.command for name in RAYS)


def shown(some: Iterable[Listener]) -> str:
    return ", ".join(f"{one.address}:{one.port} of {one.command.strip()[:60]}" for one in some)


@dataclass(frozen=True)
class Open:
    """A port that answers whoever asks from this machine, and is Ray's to close: it has no setting for it."""

    command: str  # a part of it
    call: str  # this and the next: as a regular expression, the whole
    said: str
    body: bytes

    def covers(self, answer: Answer) -> bool:
        one = answer.way.listener
        return (
            self.command in one.command
            and one.loopback
            and bool(re.fullmatch(self.call, answer.call))
            and self.said == answer.said
            and bool(re.fullmatch(self.body, answer.body, re.DOTALL))
        )


EXCEPTIONS = (
    # The page in which a browser asks for Ray's token.
    Open("ray/dashboard", "GET /", "200", b"<!doctype html>.*<title>Ray Dashboard</title>.*"),
    # What that page needs before it has one; and whether Ray's parts live, from the dashboard and from the agent.
    Open("ray/dashboard", "GET /favicon.ico", "200", b".*"),
    Open("ray/dashboard", "GET /api/authentication_mode", "200", rb'\{"authentication_mode": "token"\}'),
    Open("ray/dashboard", "GET /api/gcs_healthz", "200", b"success"),
    Open("ray::DashboardAgent", "GET /api/(local_raylet_)?healthz", "200", rb"(raylet: success\ngcs: )?success"),
    Open("ray", "GET /api/(gcs_|local_raylet_)?healthz", "503", b"503: Health check failed: RPC error: [A-Za-z ]*"),
    # Numbers about nodes and actors, under any path.
    *(
        Open(command, call, said, body)
        for command in ("ray::DashboardAgent", "ray/autoscaler", "ray/dashboard")
        for call, said, body in (
            ("GET /.*", "200", b"# HELP (python_gc_|autoscaler_|ray_).*"),
            ("GET /favicon.ico", "200", b""),
            ("(?!GET).*", "405", b"# HTTP 405 Method Not Allowed: [A-Z]+; use OPTIONS or GET\n"),
        )
    ),
    # gRPC's own, in Ray's servers in C++: health (SERVING), reflection (to an empty request: an error), channelz.
    *(
        Open(command, call, "OK", body)
        for command in ("gcs_server", "raylet", "ray::", "motley serve")
        for call, body in (
            (r"grpc\.health\.v1\.Health/(Check|Watch)", rb"\x08\x01"),
            (r"grpc\.reflection\.v1alpha\.ServerReflection/ServerReflectionInfo", rb"\x12\x00:\x02\x08\x0c"),
            (r"grpc\.channelz\.v1\.Channelz/GetServers", rb"\n.*Server created.*"),
            (r"grpc\.channelz\.v1\.Channelz/GetTopChannels", rb"(\n.*Channel created.*)?"),
        )
    ),
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    with edit_keys(path) as keys:
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


def requested(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> Any:
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
        stream = good.completions.create(model="tiny", prompt=PROMPT, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream)
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


async def test_every_port_of_every_process(
    secured: Served,
    checkpoint: Path,
    tls: ssl.SSLContext,
    certificates: Certificates,
    report: Callable[[str], None],
) -> None:
    """Whoever has no key gets nothing of ours, on any of them; off loopback there are the two doors alone."""
    found = listeners([secured.process.pid, *secured.descendants()])
    doors = {one for one in found if one.port in (secured.http_port, secured.grpc_port)}
    assert len(doors) == 2
    assert {one for one in found if not one.loopback} == doors
    over_tls = (tls, certificates.channel_credentials())
    ways = [*(Way(one) for one in found), *(Way(one, over_tls) for one in doors)]
    calls = routes(await make_ingress(checkpoint, EchoWorker(str(checkpoint)))) + NOT_OURS + RAYS_PATHS
    rpcs = [f"{service.full_name}/{rpc.name}" for service in servicers.SERVICES for rpc in service.methods]
    admins = [f"{service.full_name}/{rpc.name}" for service in ADMIN_SERVICES for rpc in service.methods]
    responses = await walk(ways, calls, list(dict.fromkeys([*rpcs, *admins, *SERVES_RPCS, *RAYS_RPCS])))

    reported = [str(one) for one in responses if not one.refused and not any(known.covers(one) for known in EXCEPTIONS)]
    assert reported == [], f"{len(reported)} answers for nobody in particular:\n" + "\n".join(reported)
    ours = {one.way for one in responses if one.ours}
    inner = [way for way in ours if way.listener.loopback]
    assert len(inner) == 7, "inner doors, ports of the ingress and Serve's fallback: HTTP and gRPC each; admin's"
    assert {way.listener for way in ours if not way.listener.loopback} == doors
    assert all(way.tls for way in ours if not way.listener.loopback), "no TLS, no answer"
    [admin] = [way for way in inner if secured.endpoints["admin"].endswith(f":{way.listener.port}")]
    assert {one.said for one in responses if one.way == admin and one.call in admins} == {"UNAUTHENTICATED"}
    as_tenant = await walk([replace(admin, key=KEY)], [GET], admins)
    assert {one.said for one in as_tenant if one.call in admins} == {"PERMISSION_DENIED"}
    ours.remove(admin)
    for way in ours:
        here = {one.call: one.said for one in responses if one.way == way}
        if "GET /" in here:
            assert {here[f"{method} {path}"] for method, path in calls if not path.startswith("/-/")} == {"401"}
        elif rpcs[0] in here:
            assert {here[rpc] for rpc in rpcs} == {"UNAUTHENTICATED"}
    opened = await walk([replace(way, key=KEY) for way in ours], [GET], ["motley.v1.Inference/GetModel"])
    assert {one.way.listener for one in opened if one.said in ("200", "OK")} == {way.listener for way in ours}

    guarded = {way.listener for way in inner}
    for name in OURS_INSIDE:
        assert sum(name in one.command for one in guarded) == 2, f"HTTP and gRPC of {name}: {shown(guarded)}"
    unknown = [one for one in found if one not in doors | guarded and not named(one)]
    assert unknown == [], f"ports that nobody has accounted for: {shown(unknown)}"
    others = [one for one in found if one not in doors | guarded]
    for one in others:
        said = {answer.said for answer in responses if answer.way.listener == one}
        assert said & {"UNAUTHENTICATED", "401"} or "405" in said, f"{one} wants no token, and has no metrics"
    report(f"{len(found)} ports, {len(responses)} calls; on loopback {len(inner)} of ours, {len(others)} of Ray's")


def test_paths_and_methods_that_are_serves_own(secured: Served, tls: ssl.SSLContext, channel: grpc.Channel) -> None:
    for path in ("/-/healthz", "/-/routes", "/%2d/routes"):
        assert requested(https(secured, tls), "GET", path)[0] == 404
    for path in ("/health", "/nowhere", "/metrics", "/docs", "/openapi.json"):
        assert requested(https(secured, tls), "GET", path)[0] == 401
    for method in ("Healthz", "ListApplications"):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/ray.serve.RayServeAPIService/{method}")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_heads_and_bodies(secured: Served, tls: ssl.SSLContext) -> None:
    def post(body: Any, **headers: str) -> tuple[int, Any]:
        given = {"x_api_key": KEY, "Content_Type": "application/json", **headers}
        status, answer = requested(https(secured, tls), "POST", "/v1/completions", body, **given)
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
    assert requested(https(secured, tls), *GET, x_api_key=REVOKED)[0] == 200
    command = [sys.executable, "-m", "motley", "keys", "revoke", REVOKED, "--file", str(key_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    wait_for(lambda: requested(https(secured, tls), *GET, x_api_key=REVOKED)[0] == 401, "the end of the key")
    assert requested(https(secured, tls), *GET, x_api_key=KEY)[0] == 200
    added = new_key()
    with edit_keys(key_path) as keys:
        keys.append(StoredKey("carol", hash_key(added)))
    wait_for(lambda: requested(https(secured, tls), *GET, x_api_key=added)[0] == 200, "a key that was added")


def test_the_access_log(secured: Served, tls: ssl.SSLContext) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True})
    given = {"x_request_id": f"logged-{time.monotonic_ns()}", "Content_Type": "application/json"}
    assert requested(https(secured, tls), "POST", "/v1/completions", body, x_api_key=KEY, **given)[0] == 200
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
