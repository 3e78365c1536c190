"""Clients that send without end, or never finish, through every door, with a key, a wrong one and none.

HAProxy is real, the ingress is of this process.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from echo_worker import EchoWorker
from endless import CHUNK, MAX_TAKEN, drip, flood, http_head
from haproxy_front import DIRECT, FRONT, TLS, Fronted, fronted
from raw_http import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MOST_DATA,
    RST_STREAM,
    WINDOW_UPDATE,
    Http2,
    frame,
    header_block,
)
from thorough import thorough

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.security.edge import bounded_http
from motley.cluster.security.edge.haproxy_config import BUFFER_BYTES, MAX_HEAD_BYTES, MAX_HEAD_FIELDS
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.grpc_server import unparsed_request
from motley.cluster.transport.http_server import http_guard

KEY = new_key()
WITH_KEY, WRONG, NONE = f"Authorization: Bearer {KEY}\r\n", f"Authorization: Bearer {KEY}x\r\n", ""
HEAD_S, LIMIT_S = 1, 0.3  # shorter than in earnest
LINGER_BYTES = 2**21
WAIT_S = 30.0
COMPLETIONS = "POST /v1/completions"
JSON = "Content-Type: application/json\r\n"
COMPLETE, STREAM, INFER = (
    "/motley.v1.Inference/Complete",
    "/motley.v1.Inference/CompleteStream",
    "/inference.GRPCInferenceService/ModelStreamInfer",
)
REFLECT = tuple(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha"))
doors = pytest.mark.parametrize("door", [FRONT, DIRECT, TLS])
clear_doors = pytest.mark.parametrize("door", [FRONT, DIRECT])


class SlowEcho(EchoWorker):
    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), step_s=0.002)
        self.folder = folder


@pytest.fixture(scope="module")
def threads_before(service: Fronted) -> int:
    """Threads of this process, other tests' included."""
    return threading.active_count()


@pytest.fixture(autouse=True)
def _threads_are_counted_first(threads_before: int) -> None:
    pass


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    keys = tmp_path_factory.mktemp("k") / "keys.yaml"
    write_keys(keys, [StoredKey("alice", hash_key(KEY))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_http, "HEAD_S", HEAD_S)
        ingress_config = IngressConfig(api_keys=keys)
        limits = {"linger_bytes": LINGER_BYTES, "linger_s": LIMIT_S}
        with fronted(tmp_path_factory.mktemp, SlowEcho(folder), ingress_config, head_s=HEAD_S, **limits) as running:
            yield running


def connected(service: Fronted, door: str, alpn: str = "http/1.1") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", service.http[door]), timeout=WAIT_S)
    if door != TLS:
        return connection
    context = service.certificates.client_context(own=False)
    context.set_alpn_protocols([alpn])
    return context.wrap_socket(connection, server_hostname="localhost")


EARLY = {
    "no key": (COMPLETIONS, JSON, NONE, 401),
    "a wrong key": (COMPLETIONS, JSON, WRONG, 401),
    "too large": (COMPLETIONS, JSON, WITH_KEY, 413),
    "another kind": (COMPLETIONS, "Content-Type: text/plain\r\n", WITH_KEY, 415),
    "no such path": ("POST /v1/nowhere", JSON, WITH_KEY, 404),
    "no body is read": ("GET /v1/models", "", WITH_KEY, 200),
    "Serve's own path": ("POST /-/routes", "", NONE, 404),
}


FLOODS = [(door, what, how) for door in (FRONT, DIRECT, TLS) for what in EARLY for how in ("chunked", "with a length")]
# Everything by one door, and by each door what is refused by its head and what by its body.
EACH_TIME = [one for one in FLOODS if one[::2] == (FRONT, "chunked") or one[1] in ("no key", "too large")]


@pytest.mark.parametrize(
    ("door", "what", "how"), [*EACH_TIME, *thorough(*(one for one in FLOODS if one not in EACH_TIME))]
)
def test_a_body_without_end_is_not_read_after_the_answer(service: Fronted, door: str, what: str, how: str) -> None:
    first, media, key, status = EARLY[what]
    if how == "with a length" and key == WITH_KEY and first.startswith("POST"):
        status = 413  # by its head, before anything else
    length = "Transfer-Encoding: chunked\r\n" if how == "chunked" else f"Content-Length: {10**12}\r\n"
    part = CHUNK if how == "chunked" else b" " * 65_536
    with connected(service, door) as connection:
        received, taken = flood(connection, http_head(first, media + key + length), part)
    assert received.startswith(f"HTTP/1.1 {status} ".encode()), received
    assert b"\r\nconnection: close\r\n" in received.lower(), "its client is told"
    assert b"motley-last" not in received or door == DIRECT
    assert received.count(b"HTTP/1.1 ") == 1, "what follows is no request"
    assert taken < MAX_TAKEN


@doors
@pytest.mark.parametrize(("key", "status"), [(NONE, 401), (WITH_KEY, 408)])
def test_a_body_that_drips_is_closed_after_the_answer(
    service: Fronted, door: str, key: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "BODY_S", LIMIT_S)
    with connected(service, door) as connection:
        received = drip(connection, http_head(COMPLETIONS, JSON + key + "Content-Length: 100000\r\n"))
    assert received.startswith(f"HTTP/1.1 {status} ".encode()), received
    assert b"\r\nconnection: close\r\n" in received.lower()


@clear_doors
def test_what_is_refused_with_its_whole_body_keeps_its_connection(service: Fronted, door: str) -> None:
    """Also where the body comes in a packet of its own, which it mostly does."""
    with connected(service, door) as connection:
        for _ in range(2):
            connection.sendall(http_head("POST /v1/nowhere", JSON + WITH_KEY + "Content-Length: 2\r\n") + b"{}")
            received = b""
            while not received.endswith(b"}}"):
                received += connection.recv(65_536)
            assert received.startswith(b"HTTP/1.1 404 "), received
            assert b"connection: close" not in received.lower()


@doors
@pytest.mark.parametrize("cut", ["half-closed", "reset"])
def test_who_leaves_in_the_middle_of_a_body_is_gone(service: Fronted, door: str, cut: str) -> None:
    with connected(service, door) as connection:
        connection.sendall(http_head(COMPLETIONS, JSON + WITH_KEY + "Content-Length: 100000\r\n") + b"{")
        if cut == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while connection.recv(65_536):
                    pass
    assert alive(service)


@doors
def test_requests_behind_one_that_is_closed_are_not_run(service: Fronted, door: str) -> None:
    refused = http_head(COMPLETIONS, JSON + "Content-Length: 3000000\r\n") + b" " * 10
    with connected(service, door) as connection:
        received = drip(connection, refused, http_head("GET /v1/models", WITH_KEY))
    assert received.count(b"HTTP/1.1 ") == 1, received
    assert b"echo" not in received


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_direct_port_closes_heads_that_drip(service: Fronted, begin: bytes) -> None:
    """HAProxy's door: test_edge.py."""
    with connected(service, DIRECT) as connection:
        assert drip(connection, begin, b"x: y\r\n" if begin else b"") == b""


def test_a_direct_port_closes_a_next_head_that_drips(service: Fronted) -> None:
    with connected(service, DIRECT) as connection:
        received = drip(connection, http_head("GET /v1/models", WITH_KEY) + b"GET / HTTP/1.1\r\n", b"x: y\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1 ") == 1


def test_a_direct_port_bounds_heads_without_end(service: Fronted) -> None:
    with connected(service, DIRECT) as connection:
        received, taken = flood(connection, b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 1000 + b"\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert taken < BUFFER_BYTES + 16 * 2**20, "and what lies in sockets"


@doors
@pytest.mark.parametrize("what", ["path", "a field", "fields"])
def test_how_large_a_head_may_be_over_http(service: Fronted, door: str, what: str) -> None:
    def status(size: int) -> bytes:
        path, fields = "/v1/models", WITH_KEY
        if what == "path":
            path += "?api-version=" + "x" * size
        elif what == "a field":
            fields += f"X: {'x' * size}\r\n"
        else:
            fields += "".join(f"X{number}: y\r\n" for number in range(size * MAX_HEAD_FIELDS // MAX_HEAD_BYTES))
        with connected(service, door) as connection:
            connection.sendall(http_head(f"GET {path}", fields + "Connection: close\r\n"))
            return b"".join(iter(lambda: connection.recv(65_536), b""))

    assert status(MAX_HEAD_BYTES - 2000).startswith(b"HTTP/1.1 200 ")
    for size in (MAX_HEAD_BYTES + 2000, 60_000):
        refused = status(size)
        assert refused.startswith(b"HTTP/1.1 431 "), refused
        assert b'"code": "head_too_large"' in refused


# gRPC


def channel(service: Fronted, door: str) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1)]
    address = f"localhost:{service.grpc[door]}"
    if door == TLS:
        return grpc.secure_channel(address, service.certificates.channel_credentials(own=False), options)
    return grpc.insecure_channel(address, options)


def alive(service: Fronted) -> bool:
    with channel(service, FRONT) as found:
        model = inference_pb2_grpc.InferenceStub(found).GetModel(
            pb.GetModelRequest(), metadata=(("x-api-key", KEY),), timeout=WAIT_S
        )
    return bool(model.name)


HEADS = {
    "12 KB": ([("x", "y" * 12_000)], grpc.StatusCode.OK),
    "as much as there may be": ([("x", "y" * (MAX_HEAD_BYTES - 1000))], grpc.StatusCode.OK),
    "as many as there may be": ([(f"k{i}", "v") for i in range(MAX_HEAD_FIELDS - 20)], grpc.StatusCode.OK),
    "more": ([("x", "y" * (MAX_HEAD_BYTES + 600))], grpc.StatusCode.RESOURCE_EXHAUSTED),
    "64 KB": ([("x", "y" * 64_000)], grpc.StatusCode.RESOURCE_EXHAUSTED),
    "binary": ([("x-bin", b"y" * 20_000)], grpc.StatusCode.RESOURCE_EXHAUSTED),
    "many": ([(f"k{i}", "v") for i in range(200)], grpc.StatusCode.RESOURCE_EXHAUSTED),
    "1,000": ([(f"k{i}", "v") for i in range(1000)], grpc.StatusCode.RESOURCE_EXHAUSTED),
}


@doors
@pytest.mark.parametrize("key", [KEY, ""])
def test_how_large_a_head_may_be_over_grpc(service: Fronted, door: str, key: str) -> None:
    """One answer however often it is asked for, and a stream beside it on the same connection goes on."""
    right = (("x-api-key", KEY),)
    mine = (("x-api-key", key),) if key else ()
    with channel(service, door) as found:
        stub = inference_pb2_grpc.InferenceStub(found)
        sampling = pb.SamplingParams(max_tokens=400)
        neighbour = stub.CompleteStream(pb.CompleteRequest(text="abc", sampling=sampling), metadata=right)
        got = sum(len(choice.token_ids) for choice in next(neighbour).choices)
        for what, (metadata, expected) in HEADS.items():
            expected = grpc.StatusCode.UNAUTHENTICATED if expected is grpc.StatusCode.OK and not key else expected
            codes = {_status(stub, (*mine, *metadata)) for _ in range(8)}
            assert codes == {expected}, what
        got += sum(len(choice.token_ids) for chunk in neighbour for choice in chunk.choices)
        assert got == 400


def _status(stub: inference_pb2_grpc.InferenceStub, metadata: tuple[tuple[str, str | bytes], ...]) -> grpc.StatusCode:
    try:
        stub.GetModel(pb.GetModelRequest(), metadata=metadata, timeout=WAIT_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def opened(service: Fronted, door: str, method: str, key: str) -> tuple[Http2, int]:
    """A call whose head has been sent, and no more."""
    client = Http2(service.grpc[door])
    fields = [("x-api-key", key)] if key else []
    number, head = client.head(service.grpc[door], method, fields)
    client.connection.sendall(head)
    return client, number


def ended(client: Http2, number: int) -> str:
    """The status and message of a call, from whichever frame has them."""
    deadline = time.monotonic() + WAIT_S
    while b"grpc-status" not in client.payloads.get((HEADERS, number), b""):
        assert time.monotonic() < deadline, client.payloads
        frames = client.read(1.0)
        assert (RST_STREAM, number) not in frames or b"grpc-status" in client.payloads.get((HEADERS, number), b"")
    said = client.payloads[HEADERS, number]
    return said[said.index(b"grpc-status") :].decode("latin-1")


PARTS = {"nothing": b"", "a part of the prefix": b"\0\0\0", "a part": b"\0" + struct.pack(">I", 100) + b"x" * 50}


@clear_doors
@pytest.mark.parametrize("method", [COMPLETE, STREAM, INFER, *REFLECT])
@pytest.mark.parametrize("part", PARTS)
def test_a_call_half_closed_without_a_whole_message(service: Fronted, door: str, method: str, part: str) -> None:
    client, number = opened(service, door, method, KEY)
    client.connection.sendall(frame(DATA, END_STREAM, number, PARTS[part]))
    assert "closed without a whole message" in ended(client, number)
    client.close()
    assert service.ingress.router.num_streams == 0


@clear_doors
def test_a_stream_that_breaks_off_in_a_later_message_has_its_answers(service: Fronted, door: str) -> None:
    client, number = opened(service, door, REFLECT[0], KEY)
    list_services = b"\0" + struct.pack(">I", 2) + b"\x3a\0"
    client.connection.sendall(frame(DATA, END_STREAM, number, list_services + PARTS["a part"]))
    assert ended(client, number).startswith("grpc-status\x010")
    assert b"motley.v1.Inference" in client.payloads[DATA, number]
    client.close()


@clear_doors
@pytest.mark.parametrize("key", ["", "wrong"])
@pytest.mark.parametrize("method", [COMPLETE, STREAM, INFER])
def test_a_call_without_a_key_is_refused_by_its_head(service: Fronted, door: str, method: str, key: str) -> None:
    """It need not send a message, and none is read."""
    client, number = opened(service, door, method, key)
    assert "a valid API key is required" in ended(client, number)
    client.close()


@clear_doors
@pytest.mark.parametrize("method", [COMPLETE, STREAM, INFER])
def test_a_first_message_that_drips(service: Fronted, door: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unparsed_request, "FIRST_S", LIMIT_S)
    client, number = opened(service, door, method, KEY)
    begin = b"\0" + struct.pack(">I", 200_000) + b"x" * (MOST_DATA - 5)
    client.connection.sendall(frame(DATA, 0, number, begin))
    deadline = time.monotonic() + WAIT_S
    while (HEADERS, number) not in client.payloads:
        assert time.monotonic() < deadline
        client.read(0.05)
        client.connection.sendall(frame(DATA, 0, number, b"x"))
    assert "first message did not arrive" in ended(client, number)
    client.close()


@clear_doors
def test_a_call_that_sends_on_after_its_end(service: Fronted, door: str) -> None:
    """No more is asked for than its window has room for, and others go on."""
    client, number = opened(service, door, COMPLETE, "")
    ended(client, number)
    seen: set[tuple[int, int]] = set()
    with suppress(OSError):  # it may be closed
        for _ in range(3):
            client.connection.sendall(frame(DATA, 0, number, b"x" * MOST_DATA))
            seen.update(client.read(0.1))
    assert (WINDOW_UPDATE, number) not in seen
    client.close()
    assert alive(service)


def test_http_2_over_tls_after_the_answer(service: Fronted) -> None:
    connection = connected(service, TLS, alpn="h2")
    client = Http2(service.http[TLS], connection=connection)
    number, head = client.head(service.http[TLS], "/v1/completions", [], media="application/json", scheme="https")
    connection.sendall(head)
    deadline = time.monotonic() + WAIT_S
    sent = 0
    with suppress(OSError):
        while (RST_STREAM, number) not in client.read(0.01) and sent < 65_000:
            assert time.monotonic() < deadline
            connection.sendall(frame(DATA, 0, number, b" " * 1000))
            sent += 1000
    while (DATA, number) not in client.payloads:
        assert time.monotonic() < deadline
        client.read(1.0)
    assert b"a valid API key is required" in client.payloads[DATA, number]
    connection.close()
    assert alive(service)


@pytest.mark.parametrize("stop", ["after its preface", "within a head"])
def test_http_2_heads_that_stall(service: Fronted, stop: str) -> None:
    """On the door whose clients may be silent for an hour once they have called."""
    client = Http2(service.grpc[FRONT])
    if stop == "within a head":
        block = header_block([(":method", "POST"), (":path", COMPLETE)])
        client.connection.sendall(frame(HEADERS, END_HEADERS, 1, block)[:20])
    deadline = time.monotonic() + WAIT_S
    with suppress(OSError):
        while True:
            assert time.monotonic() < deadline
            client.read(1.0)
    client.close()


def test_it_has_been_answering_all_the_time(service: Fronted, threads_before: int) -> None:
    assert alive(service)
    assert threading.active_count() < threads_before + 40, "none for each sender"
