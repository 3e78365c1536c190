"""Senders that press every limit of a real service with keys, through HAProxy: what each sees, when, and at what cost.

What each costs, and takes, is reported; of times nothing is asserted.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from endless import CHUNK, MAX_TAKEN, flood, http_head
from head_calls import Fields, http_fields, over_grpc, over_http
from health_probes import Health
from held_connections import (
    COMPLETE,
    COMPLETIONS,
    JSON,
    Closed,
    half_closed,
    halves_of_bodies,
    halves_of_messages,
    held,
    held_call,
)
from neighbour import Neighbour
from serve_process import Served, served, wait_for
from whole_streams import whole_streams

from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import write_keys

pytestmark = pytest.mark.thorough

KEY = new_key()
RIGHT: Fields = [("x-api-key", KEY)]
WRONG: Fields = [("x-api-key", f"{KEY}x")]
NONE: Fields = []
TIMES = 20
HALVES = 300
Report = Callable[[str], None]


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(keys, [StoredKey("alice", hash_key(KEY))])
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "256MiB"]
    arguments += ["--api-keys", str(keys), "--open-health"]
    with served(arguments, tmp_path_factory.mktemp("guarded")) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def neighbour(guarded: Served) -> Neighbour:
    return Neighbour(guarded, KEY)


@pytest.fixture(autouse=True)
def _the_same_processes(guarded: Served) -> Iterator[None]:
    guarded.wait_idle()
    before = guarded.replicas()
    assert len(before) == 2, "an ingress and an engine"
    yield
    assert guarded.replicas() == before, "none was replaced"
    guarded.wait_idle(90)


HEADS = {
    "4 KB": ([("x", "y" * 4096)], True),
    "12 KB": ([("x", "y" * 12 * 1024)], True),
    "15 KB": ([("x", "y" * 15 * 1024)], True),
    "17 KB": ([("x", "y" * 17 * 1024)], False),
    "64 KB": ([("x", "y" * 64 * 1024)], False),
    "1,000 entries": ([(f"k{number}", "v") for number in range(1000)], False),
}


def test_heads_of_every_size(guarded: Served) -> None:
    """One answer for each, and streams of the same connection, one after the other, are what they are alone."""
    with whole_streams(guarded.grpc, RIGHT) as stub:
        for key, metadata, taken, status in heads():
            found = Counter(over_grpc(stub, [*key, *metadata], turn % 2 == 0) for turn in range(TIMES))
            assert found == {taken: TIMES}
            responses = Counter(over_http(guarded.http_port, [*key, *metadata]) for _ in range(TIMES))
            assert responses == {status: TIMES}


def heads() -> Iterator[tuple[Fields, Fields, str, int]]:
    """A key, what is sent beside it, and the answer to that over gRPC and over HTTP."""
    for key in (RIGHT, WRONG, NONE):
        for metadata, fits in HEADS.values():
            responses = ("OK", 200) if key is RIGHT else ("UNAUTHENTICATED", 401)
            yield key, metadata, *(responses if fits else ("RESOURCE_EXHAUSTED", 431))


ENDLESS = {
    "without a key": (NONE, 401),
    "with a wrong key": (WRONG, 401),
    "with a key": (RIGHT, 413),
}


@pytest.mark.parametrize("how", ["chunked", "with a length"])
@pytest.mark.parametrize("who", ENDLESS)
def test_bodies_without_end(guarded: Served, neighbour: Neighbour, report: Report, who: str, how: str) -> None:
    key, status = ENDLESS[who]
    length = "Transfer-Encoding: chunked\r\n" if how == "chunked" else f"Content-Length: {10**12}\r\n"
    begin = http_head(COMPLETIONS, f"{JSON}{http_fields(key)}{length}")
    taken, took = [], []
    with neighbour.beside():
        for _ in range(5):
            began = time.monotonic()
            with socket.create_connection(("127.0.0.1", guarded.http_port)) as connection:
                received, bytes_taken = flood(connection, begin, CHUNK if how == "chunked" else b" " * 65_536)
            taken.append(bytes_taken)
            took.append(time.monotonic() - began)
            assert received.startswith(f"HTTP/1.1 {status} ".encode()), received
            assert b"\r\nconnection: close\r\n" in received.lower()
            assert received.count(b"HTTP/1.1 ") == 1
    assert max(taken) < MAX_TAKEN
    report(
        f"endless body {who}, {how}: {status}, {min(taken) / 2**20:.1f} to {max(taken) / 2**20:.1f} MiB taken, closed "
        f"after {min(took):.2f} to {max(took):.2f} s: {neighbour.pace()}"
    )


def test_a_flood_behind_a_408(guarded: Served, report: Report) -> None:
    """It drips for as long as a body may take, and sends without end from then on."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", guarded.http_port)) as connection:
        connection.sendall(http_head(COMPLETIONS, f"{JSON}{http_fields(RIGHT)}Content-Length: {8 * 2**20}\r\n"))
        connection.settimeout(0.1)
        first = b""
        while not first:
            assert time.monotonic() < began + 120
            connection.sendall(b" ")
            try:
                first = connection.recv(65_536)
            except TimeoutError:
                continue
        answered = time.monotonic() - began
        _, taken = flood(connection, b" ", b" " * 65_536)
    assert first.startswith(b"HTTP/1.1 408 "), first
    assert b"\r\nconnection: close\r\n" in first.lower()
    assert taken < MAX_TAKEN
    closed = time.monotonic() - began
    report(f"a dripped body: 408 after {answered:.1f} s, then {taken / 2**20:.1f} MiB taken, closed at {closed:.1f} s")


BODY = f"{JSON}Content-Length: 100000\r\n"
PART_OF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
# Who holds a place of HAProxy, through which door; what it is told, and after how many seconds it is closed at most
# by docs/operate/limits.md: each row is the sum of those that apply to it.
HELD: dict[str, tuple[str, partial[Closed], bytes, int]] = {
    "nothing": ("http_port", partial(held, begin=b""), b"", 10),
    "half a head": ("http_port", partial(held, begin=PART_OF_A_HEAD), b" 408 ", 10),
    "a head that drips": ("http_port", partial(held, begin=PART_OF_A_HEAD, part=b"x: y\r\n"), b" 408 ", 10),
    "no key, a body that drips": (
        "http_port", partial(held, begin=http_head(COMPLETIONS, BODY) + b" ", part=b" "), b" 401 ", 5 + 35),
    "no key, a silent body": ("http_port", partial(held, begin=http_head(COMPLETIONS, BODY) + b" "), b" 401 ", 35),
    "a key, a body that drips": (
        "http_port", partial(held, begin=http_head(COMPLETIONS, BODY + http_fields(RIGHT)), part=b" "), b" 408 ",
        30 + 35),
    "a key, a silent body": (
        "http_port", partial(held, begin=http_head(COMPLETIONS, BODY + http_fields(RIGHT))), b" 408 ", 30 + 35),
    "no key, kept alive": ("http_port", partial(held, begin=http_head("GET /v1/models", "")), b" 401 ", 90),
    "gRPC, nothing": ("grpc_port", partial(held, begin=b""), b"", 10),
    "gRPC, part of a preface": ("grpc_port", partial(held, begin=b"PRI * HTTP/2.0\r\n"), b"", 10),
    "gRPC, no key, silent": ("grpc_port", partial(held_call, fields=NONE, data=b""), b"a valid API key is", 90),
    "gRPC, no key, drips on": (
        "grpc_port", partial(held_call, fields=NONE, data=b"\0\0\x70\0\0x", part=b"x"), b"a valid API key is", 90),
    "gRPC, a key, silent": (
        "grpc_port", partial(held_call, fields=RIGHT, data=b""), b"first message did not arrive", 30 + 90),
    "gRPC, a key, drips on": (
        "grpc_port", partial(held_call, fields=RIGHT, data=b"\0\0\x70\0\0x", part=b"x"),
        b"first message did not arrive", 30 + 90),
}  # fmt: skip


def test_nobody_holds_a_place_for_long(guarded: Served, report: Report) -> None:
    """All at once. When it is closed is reported beside the limit: on a machine that is busy that comes late."""
    with ThreadPoolExecutor(len(HELD)) as threads:
        holding = {what: threads.submit(hold, getattr(guarded, port)) for what, (port, hold, _, _) in HELD.items()}
        found = {what: future.result() for what, future in holding.items()}
    for what, one in found.items():
        _, _, says, limit = HELD[what]
        assert says in one.received, (what, one)
        report(f"held by {what}: answered after {one.answered_s:.1f} s, closed after {one.closed_s:.1f} s of {limit}")


@pytest.mark.parametrize(
    ("key", "says"), [(RIGHT, "closed without a whole message"), (NONE, "a valid API key is required")]
)
def test_calls_half_closed_without_a_message(guarded: Served, key: Fields, says: str) -> None:
    for method in (COMPLETE, "/motley.v1.Inference/CompleteStream", "/vllm.grpc.engine.VllmEngine/Generate"):
        assert says in half_closed(guarded.grpc_port, method, key)


@pytest.mark.parametrize("size", [2**20, 6 * 10**6])
@pytest.mark.parametrize("key", [RIGHT, NONE], ids=["with a key", "without"])
def test_health_beside_halves_of_bodies(
    guarded: Served, neighbour: Neighbour, report: Report, key: Fields, size: int
) -> None:
    health = Health(guarded)
    halves = partial(halves_of_bodies, guarded.http_port, HALVES, size, http_fields(key))
    with neighbour.beside(), health.asked(), halves() as statuses:
        found = statuses()
        health.go_on()
    assert not health.bad
    assert set(found) <= ({"429", "408"} if key is RIGHT else {"401"}), found
    held = "a key" if key is RIGHT else "no key"
    report(f"{HALVES} halves of bodies of {size / 2**20:.1f} MiB, {held}: {dict(found)}; health {health.told()}")
    report(f"  {neighbour.pace()}")


@pytest.mark.parametrize("key", [RIGHT, NONE], ids=["with a key", "without"])
def test_health_beside_halves_of_messages(guarded: Served, neighbour: Neighbour, report: Report, key: Fields) -> None:
    health = Health(guarded)
    with neighbour.beside(), health.asked(), halves_of_messages(guarded.grpc_port, HALVES, key) as ended:
        if key is NONE:
            wait_for(lambda: len(ended()) == HALVES, "each to be refused by its head", 120)
        health.go_on()
        count = len(ended())
    assert not health.bad
    held = "a key" if key is RIGHT else "no key"
    report(f"{HALVES} halves of messages, {held}: {count} ended by then; health {health.told()}")
    report(f"  {neighbour.pace()}")
