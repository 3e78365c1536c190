"""Whoever goes away takes the sequence along, and its KV."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
from raw_calls import PROTOCOLS, Asked, Protocol, RawCall
from served import Served, wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

LONG = {"max_tokens": 65_000, "ignore_eos": True, "n": 2, "temperature": 1.0}

PROMISED_S = 1.0  # until its KV is free; on an idle machine it takes some 40 ms
LATE_S = 5.0  # on a machine that stands still for a while; without leaving it would run for half a minute


class Table:
    """What was measured: the seconds until everything was free, by protocol and way."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._rows: dict[str, dict[str, float]] = {}

    def add(self, protocol: Protocol, way: str, seconds: float) -> None:
        self._rows.setdefault(protocol.name, {})[way] = seconds

    def check(self, report: Callable[[str], None]) -> None:
        for name, row in self._rows.items():
            told = ", ".join(f"{way} {1e3 * seconds:.0f}" for way, seconds in row.items())
            report(f"{self._state}, {name}: KV free after ms: {told}")
        assert statistics.median(seconds for row in self._rows.values() for seconds in row.values()) < PROMISED_S


def free_after(service: Served, call: RawCall, way: str) -> float:
    """Leave in that way, or let the deadline pass; the seconds until all is free since that was so."""
    if way in ("deadline", "field"):
        said = call.outcome()
        assert said.startswith(("504", "4 ")) or "deadline" in said, said[-200:]
    else:
        call.leave(way)
    began = time.monotonic()
    service.wait_idle(LATE_S)
    return time.monotonic() - began


def start(service: Served, protocol: Protocol, way: str, asked: Asked, seconds: float) -> RawCall:
    if way == "field":
        asked = replace(asked, timeout_s=seconds)
    return RawCall(service, protocol, asked, f"{round(1e3 * seconds)}m" if way == "deadline" else "")


def test_leaving_while_it_runs(service: Served, report: Callable[[str], None]) -> None:
    table = Table("running")
    for protocol in PROTOCOLS:
        for way in protocol.ways:
            service.wait_idle()
            before = service.load()["steps"]
            call = start(service, protocol, way, Asked(), 0.5)
            wait_for(lambda before=before: service.load()["steps"] > before, f"{protocol.name} to run")
            if protocol.streams and way not in ("deadline", "field"):
                assert call.begun(), "it streams"
            table.add(protocol, way, free_after(service, call, way))
            call.close()
    table.check(report)


def test_leaving_what_one_does_not_read(service: Served, report: Callable[[str], None]) -> None:
    """The client takes nothing, and what is made piles up on the way to it."""
    table = Table("slow reader")
    for protocol in PROTOCOLS:
        for way in protocol.ways if protocol.streams else ():
            service.wait_idle()
            before = service.load()["steps"]
            call = start(service, protocol, way, Asked(logprobs=20), 1.5)
            wait_for(lambda before=before: service.load()["steps"] > before + 500, f"{protocol.name} to run ahead")
            if way in ("deadline", "field"):
                service.wait_idle(20)  # nobody reads how it ended
            else:
                table.add(protocol, way, free_after(service, call, way))
            call.close()
    table.check(report)


def test_many_that_leave_at_once_do_not_hurt_a_neighbour(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        quiet = pb.CompleteRequest(text="neighbour", sampling=pb.SamplingParams(temperature=0, max_tokens=64))
        alone = stub.Complete(quiet).choices[0].token_ids
        neighbour = stub.Complete.future(quiet)
        long = pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(**LONG))
        calls = [stub.CompleteStream(long) for _ in range(50)]
        for number, call in enumerate(calls):
            if number % 2:
                next(call)  # half of them have begun, half may not even have arrived
            call.cancel()
        assert neighbour.result(timeout=60).choices[0].token_ids == alone
    service.wait_idle()
