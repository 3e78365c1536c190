"""Clients that press: each beside a steady neighbour, and everything at its baseline afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_cancellations import Leaving
from endless import CHUNK, MAX_TAKEN, flood, http_head
from grpc_health.v1 import health_pb2, health_pb2_grpc
from held_connections import half_closed, halves_of_bodies, halves_of_messages
from neighbour import NEIGHBOUR, Neighbour
from raw_calls import MANY_TOKENS, Asked, Protocol, RawCall, in_parts
from raw_http import GOAWAY, HEADERS, RST_STREAM, Http2, head, post, unread
from serve_process import Served, alive, served, wait_for
from thorough import thorough

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport.incoming_bodies import MAX_BYTES, MAX_MESSAGE_BYTES, TENANT_SHARE

READER_TIMEOUT_S = 5  # the neighbour's client shares its interpreter with whoever presses, and reads late itself
RUNNING, WAITING = 8, 16
CUTS = 400  # of connections over HTTP
IDLE = 500
MOST_LATE = int(MAX_BYTES * TENANT_SHARE) // MAX_MESSAGE_BYTES  # late calls of a tenant, each counted as this much
FULL = "too many requests are being sent and are not whole"
COMPLETE_STREAM = "/motley.v1.Inference/CompleteStream"
FLOOD: dict[str, Any] = {"max_tokens": 60_000, "ignore_eos": True, "n": 4}


@pytest.fixture(scope="module")
def pressed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "256MiB"]
    arguments += ["--max-running", str(RUNNING), "--max-waiting", str(WAITING)]
    arguments += ["--reader-timeout-s", str(READER_TIMEOUT_S)]
    with served(arguments, tmp_path_factory.mktemp("pressed")) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="module")
def neighbour(pressed: Served) -> Neighbour:
    """One for all tests: it need be alone no longer than the longest of its streams."""
    return Neighbour(pressed)


class Baseline:
    """Processes, files and memory of the service when it is idle."""

    def __init__(self, service: Served) -> None:
        self._service = service
        service.wait_idle()
        self.replicas = service.replicas()
        self.files, self.memory = self._look()

    def check(self, report: Callable[[str], None], what: str) -> None:
        """All is as it was; memory within what allocators keep."""
        self._service.wait_idle(60)
        assert self._service.replicas() == self.replicas, "the same processes"
        wait_for(lambda: self._look()[0] <= self.files + 64, f"files closed after {what}", 60)
        files, memory = self._look()
        report(f"{what}: files {self.files} -> {files}, memory {self.memory:.0f} -> {memory:.0f} MiB")
        assert memory < self.memory + 200, "memory of ingress and replica"

    def _look(self) -> tuple[int, float]:
        files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.replicas)
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.replicas)
        return files, pages * 4096 / 2**20


def access_log(service: Served) -> list[dict[str, Any]]:
    """Without the neighbour's calls."""
    path = Path(service.endpoints["folder"]) / "session_latest" / "logs" / "access.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["client_id"] != NEIGHBOUR]


def streams_in_log(service: Served) -> int:
    return sum(line["call"] == "CompleteStream" for line in access_log(service))


@in_parts
def test_leaving_and_deadlines_while_waiting(
    cases: list[Protocol], pressed: Served, report: Callable[[str], None]
) -> None:
    """All places are taken, so that these requests wait in the engine."""
    pressed.wait_idle()

    def short(protocol: Protocol, timeout_s: float | None = None) -> Asked:
        return Asked(f"{protocol.name} ", max_tokens=8, id=protocol.name, timeout_s=timeout_s)

    def waiting(count: int) -> None:
        wait_for(lambda: pressed.load()["waiting"] == count, f"{count} to wait", 10)

    with ExitStack() as fillers:  # which are gone at the end, whatever comes of it
        for _ in range(RUNNING):
            fillers.callback(RawCall(pressed, MANY_TOKENS, Asked()).close)
        wait_for(lambda: pressed.load()["running"] == RUNNING, "every place taken")
        with Leaving(pressed, "queued", "waiting", report).measured() as table:
            table.cancel_all(cases, short, waiting)
            table.out_of_time(cases, short, waiting, 1.0)
        assert pressed.load()["running"] == RUNNING, "those before them run on"
    pressed.wait_idle(10)


def test_readers_that_take_nothing(pressed: Served, neighbour: Neighbour, report: Callable[[str], None]) -> None:
    """Over both protocols: ended long before they would have been, and nothing of theirs is kept.

    The last one's TCP takes all that comes; it never lets its stream be sent anything.
    """
    baseline, seen = Baseline(pressed), len(access_log(pressed))
    body = {"prompt": "abc", "stream": True, "logprobs": 5, **FLOOD}
    with neighbour.beside(), ExitStack() as open_things:
        for _ in range(2):
            open_things.enter_context(unread(pressed.http_port, "/v1/completions", body))
        channel = open_things.enter_context(grpc.insecure_channel(pressed.grpc))
        flood = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(logprobs=20, **FLOOD))
        call = inference_pb2_grpc.InferenceStub(channel).CompleteStream(flood)
        open_things.callback(call.cancel)
        shut = Http2(pressed.grpc_port, window=0)
        open_things.callback(shut.close)
        _, opening = shut.open(pressed.grpc_port, COMPLETE_STREAM, flood.SerializeToString())
        shut.connection.sendall(opening)
        wait_for(lambda: pressed.load()["running"] >= 4, "the floods to run")
        wait_for(lambda: pressed.load()["running"] + pressed.load()["waiting"] <= 1, "their end", 180)
    report(f"stalled readers: {neighbour.pace()}")
    baseline.check(report, "stalled readers")

    def floods() -> list[dict[str, Any]]:
        return [line for line in access_log(pressed)[seen:] if line["status"] not in (200, "OK")]

    ended = wait_for(lambda: len(floods()) == 4 and floods(), "four lines in the access log", 60)
    assert {line["status"] for line in ended} <= {499, "CANCELLED"}
    assert all(line["completion_tokens"] < 4 * 60_000 for line in ended)
    report(f"stalled readers were left after {[line['completion_tokens'] for line in ended]} tokens")


def test_idle_connections(pressed: Served, neighbour: Neighbour, report: Callable[[str], None]) -> None:
    """HTTP/1.1, HTTP/2 and health watches; whoever comes after them is served."""
    baseline = Baseline(pressed)
    with neighbour.beside(), ExitStack() as open_things:
        for number in range(IDLE):
            if number % 2:
                open_things.callback(Http2(pressed.grpc_port).close)
                continue
            connection = open_things.enter_context(socket.create_connection(("127.0.0.1", pressed.http_port)))
            connection.sendall(head(pressed.http_port, "/v1/models", b"", "GET", close=False))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        with grpc.insecure_channel(pressed.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(16)]
            assert {next(watch).status for watch in watches} == {health_pb2.HealthCheckResponse.SERVING}
            assert pressed.load()["waiting"] == 0, "whoever watches is no load"
            got = neighbour.got
            wait_for(lambda: neighbour.got >= got + 1000, "the neighbour's tokens", 60)
            for watch in watches:
                watch.cancel()
    report(f"{IDLE} idle connections: {neighbour.pace()}")
    baseline.check(report, f"{IDLE} idle connections")


def test_senders_that_do_not_stop(pressed: Served, neighbour: Neighbour, report: Callable[[str], None]) -> None:
    """Bodies without end after their answer, halves of many, calls without a message, and heads of any size."""
    pressed.wait_idle()
    replicas = pressed.replicas()
    chunked = http_head("POST /v1/completions", "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n")
    with neighbour.beside():
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", pressed.http_port)) as connection:
                received, taken = flood(connection, chunked, CHUNK)
            assert received.startswith(b"HTTP/1.1 413 "), received
            assert b"\r\nconnection: close\r\n" in received.lower()
            assert taken < MAX_TAKEN
        with halves_of_bodies(pressed.http_port, 300, 2**20) as statuses:
            found = statuses()
        assert set(found) <= {"429", "408"}, "a slow machine has not read as much as may be held before they end"
        with halves_of_messages(pressed.grpc_port, MOST_LATE + 1, []) as ended:
            wait_for(lambda: any(FULL in told for told in ended()), "a refusal, since a tenant holds all it may", 25)
        for method in (COMPLETE_STREAM, "/motley.v1.Inference/Complete", "/vllm.grpc.engine.VllmEngine/Generate"):
            assert "closed without a whole message" in half_closed(pressed.grpc_port, method)
        with grpc.insecure_channel(pressed.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            beside = stub.CompleteStream(pb.CompleteRequest(text="a", sampling=pb.SamplingParams(max_tokens=300)))
            next(beside)
            assert responses_to_heads(stub, 12_000) == {"OK"}
            assert responses_to_heads(stub, 17_000) == responses_to_heads(stub, 64_000) == {"RESOURCE_EXHAUSTED"}
            assert sum(len(choice.token_ids) for chunk in beside for choice in chunk.choices) > 0
    report(f"senders that do not stop: {neighbour.pace()}")
    assert pressed.replicas() == replicas, "the same processes"
    pressed.wait_idle()


def responses_to_heads(stub: Any, size: int) -> set[str]:
    found = set()
    for _ in range(8):
        try:
            stub.GetModel(pb.GetModelRequest(), metadata=(("x", "y" * size),), timeout=60)
            found.add("OK")
        except grpc.RpcError as error:
            found.add(error.code().name)
    return found


def reset_at_once(port: int, message: bytes, count: int) -> int:
    """Calls opened and reset in one breath, as an attacker does."""
    done = 0
    while done < count:
        client = Http2(port)
        try:
            for _ in range(min(count - done, 500)):
                number, opening = client.open(port, COMPLETE_STREAM, message)
                client.connection.sendall(opening + client.reset(number))
                done += 1
            client.read(0.05)
        except OSError:
            pass  # it is free to close such a connection
        finally:
            client.close()
    return done


def reset_soon(port: int, message: bytes, count: int, at_once: int = 20) -> int:
    """Calls reset when HAProxy has most likely handed them on, and before they have an answer."""
    done = 0
    while done < count:
        client = Http2(port)
        try:
            for _ in range(min(count - done, 500) // at_once):
                calls = [client.open(port, COMPLETE_STREAM, message) for _ in range(at_once)]
                client.connection.sendall(b"".join(opening for _, opening in calls))
                time.sleep(0.01)
                client.connection.sendall(b"".join(client.reset(number) for number, _ in calls))
                done += at_once
        except OSError:
            pass
        finally:
            client.close()
    return done


def reset_when_begun(port: int, message: bytes, count: int, at_once: int = 20) -> int:
    """Calls reset as soon as they have an answer, or are refused."""
    done = 0
    client = Http2(port)
    while done < count:
        waiting = set()
        for _ in range(at_once):
            number, opening = client.open(port, COMPLETE_STREAM, message)
            waiting.add(number)
            client.connection.sendall(opening)
        deadline = time.monotonic() + 30
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} of {at_once} calls without an answer"
            for kind, number in client.read(1.0):
                assert kind != GOAWAY
                if kind in (HEADERS, RST_STREAM) and number in waiting:
                    waiting.remove(number)
                    client.connection.sendall(client.reset(number))
                    done += 1
    client.close()
    return done


@pytest.mark.parametrize("count", [2500, *thorough(10_000)])
def test_rapid_resets(pressed: Served, neighbour: Neighbour, report: Callable[[str], None], count: int) -> None:
    baseline = Baseline(pressed)
    sampling = pb.SamplingParams(max_tokens=60_000, ignore_eos=True)
    message = pb.CompleteRequest(text="abc", sampling=sampling).SerializeToString()
    before, began = streams_in_log(pressed), time.monotonic()
    with neighbour.beside():
        done = reset_at_once(pressed.grpc_port, message, count * 2 // 5)  # HAProxy hands none of these on
        done += reset_soon(pressed.grpc_port, message, count * 2 // 5)
        done += reset_when_begun(pressed.grpc_port, message, count - done)
    assert done >= count
    seconds = time.monotonic() - began

    def reached() -> int:
        return streams_in_log(pressed) - before

    wait_for(lambda: reached() >= count // 5, "calls that the ingress has begun", 20)
    report(f"{done} resets in {seconds:.1f} s, {reached()} of them of calls in the ingress: {neighbour.pace()}")
    baseline.check(report, f"{done} resets")


def reset_in_the_middle(port: int, count: int) -> None:
    """Connections cut without a word: within the head, within the body, behind it, and within the answer."""
    body = json.dumps({"prompt": "abc", "stream": True, **FLOOD}).encode()
    whole = head(port, "/v1/completions", body) + body
    parts = (whole[:40], whole[: -len(body) // 2], whole, whole)
    for number in range(count):
        part = number % len(parts)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(parts[part])
            if part == len(parts) - 1:
                assert connection.recv(64).startswith(b"HTTP/1.1 "), "a stream that has begun, or a refusal"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() is a reset


def test_connections_cut_in_the_middle(pressed: Served, neighbour: Neighbour, report: Callable[[str], None]) -> None:
    baseline = Baseline(pressed)
    before, began = len(access_log(pressed)), time.monotonic()
    with neighbour.beside():
        reset_in_the_middle(pressed.http_port, CUTS)
        seconds = time.monotonic() - began
    pressed.wait_idle()
    reached = len(access_log(pressed)) - before
    assert reached >= CUTS // 4, "calls that the ingress has begun"
    report(f"{CUTS} connections cut in {seconds:.1f} s, {reached} of them of calls: {neighbour.pace()}")
    baseline.check(report, f"{CUTS} cut connections")


def test_overload(pressed: Served, neighbour: Neighbour, report: Callable[[str], None]) -> None:
    """Ten times what runs and waits, at once and over both protocols: each gets its answer or a refusal.

    The neighbour is of the same tenant, and has its place.
    """
    baseline = Baseline(pressed)
    fields: dict[str, Any] = {"prompt": "over", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    right = asyncio.run(post(pressed.http_port, "/v1/completions", fields)).json()["choices"][0]["text"]
    with neighbour.beside():
        began = time.monotonic()
        outcomes = asyncio.run(burst(pressed, fields, 10 * (RUNNING + WAITING), right))
        seconds = time.monotonic() - began
    counts = Counter(outcomes)
    assert counts.total() == 10 * (RUNNING + WAITING), "one outcome each"
    assert set(counts) == {"right", "refused"}, counts
    assert counts["right"] >= RUNNING + WAITING, "what has room is served"
    report(f"overload: {counts} in {seconds:.1f} s: {neighbour.pace()}")
    baseline.check(report, "overload")


async def burst(service: Served, fields: dict[str, Any], count: int, right: str) -> list[str]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(service.grpc, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        forms = (
            lambda: over_http(service, fields, right, stream=False),
            lambda: over_http(service, fields, right, stream=True),
            lambda: over_grpc(stub, fields, right, stream=False),
            lambda: over_grpc(stub, fields, right, stream=True),
        )
        return list(await asyncio.gather(*(forms[number % 4]() for number in range(count))))


async def over_http(service: Served, fields: dict[str, Any], right: str, *, stream: bool) -> str:
    answer = await post(service.http_port, "/v1/completions", {**fields, "stream": stream})
    if answer.status in (429, 503):
        assert answer.json()["error"]["code"] == "queue_full"
        return "refused" if int(answer.headers["retry-after"]) >= 1 else "refused without a time"
    if answer.status != 200:
        return f"HTTP {answer.status}"
    if not stream:
        return "right" if answer.json()["choices"][0]["text"] == right else "wrong"
    events = answer.events()
    if events[-1] != "[DONE]":
        return f"a stream that ends with {events[-1]}"
    text = "".join(choice["text"] for event in events[:-1] for choice in event["choices"])
    return "right" if text == right else "wrong"


async def over_grpc(stub: Any, fields: dict[str, Any], right: str, *, stream: bool) -> str:
    sampling = {name: value for name, value in fields.items() if name != "prompt"}
    request = pb.CompleteRequest(text=fields["prompt"], sampling=pb.SamplingParams(**sampling))
    try:
        if stream:
            chunks = [chunk async for chunk in stub.CompleteStream(request)]
            text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        else:
            text = (await stub.Complete(request)).choices[0].text
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
            return f"gRPC {error.code()}: {error.details()}"
        trailing = dict(error.trailing_metadata() or ())
        return "refused" if int(trailing["retry-after"]) >= 1 else "refused without a time"
    return "right" if text == right else "wrong"


def test_at_last_a_signal_to_the_whole_group_ends_it(pressed: Served) -> None:
    """`timeout` and service managers send it so: Ray's daemons are gone before they could be asked to go."""
    children = pressed.descendants()
    os.killpg(pressed.process.pid, signal.SIGTERM)
    assert pressed.process.wait(60) == 0
    assert alive(children) == []
    assert pressed.leftovers() == []
