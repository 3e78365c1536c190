"""Whoever goes away takes the sequence along, and its KV."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable

import grpc
import pytest
from client_cancellations import Leaving
from every_protocol import Grpc, Http, Responses, everything
from raw_calls import PROTOCOLS, Asked, Protocol, RawCall, in_parts
from serve_process import Served, children, command_line, wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

LONG = {"max_tokens": 65_000, "ignore_eos": True, "n": 2, "temperature": 1.0}
STREAMS = [protocol for protocol in PROTOCOLS if protocol.streams]
numbers = itertools.count()
AHEAD = 300  # steps: far more than a reader has taken that takes nothing


def long(protocol: Protocol, timeout_s: float | None = None) -> Asked:
    """Each time another prompt: an embedding whose prefix is known takes no time."""
    return Asked(f"{protocol.name} {next(numbers)} ", id=protocol.name, timeout_s=timeout_s)


def verbose(protocol: Protocol, timeout_s: float | None = None) -> Asked:
    return Asked(f"{protocol.name} ", logprobs=20, id=protocol.name, timeout_s=timeout_s)


def generating(cases: list[Protocol]) -> list[Protocol]:
    return [one for one in cases if not one.embeds]


def streaming(cases: list[Protocol]) -> list[Protocol]:
    return [one for one in cases if one.streams]


def running(service: Served) -> Callable[[int], object]:
    return lambda count: wait_for(lambda: service.load()["running"] == count, f"{count} to run", 10)


def test_every_way_to_ask_for_an_answer_is_here(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        requested = [
            one for one in everything(service.http_port, channel, None, "tiny") if not isinstance(one, Responses)
        ]
        assert all(isinstance(one, Grpc | Http) for one in requested)
        paths = {one.path.removeprefix("/") for one in requested if isinstance(one, Grpc | Http)}
    assert {protocol.call.removeprefix("/") for protocol in PROTOCOLS} == paths


@in_parts
def test_leaving_while_it_runs(cases: list[Protocol], service: Served, report: Callable[[str], None]) -> None:
    service.wait_idle()
    with Leaving(service, "running", "running", report).measured() as table:
        embedding = [[one] for one in cases if one.embeds]  # one long prompt at a time is computed
        for protocols in (generating(cases), *embedding):
            table.cancel_all(protocols, long, running(service))
            table.out_of_time(protocols, long, running(service), 1.0)


@in_parts
def test_leaving_while_it_streams(cases: list[Protocol], service: Served, report: Callable[[str], None]) -> None:
    """One at a time, as soon as something has come."""
    service.wait_idle()
    with Leaving(service, "streaming", "running", report).measured() as table:
        for protocol in streaming(cases):
            for way in protocol.leaves:
                call = RawCall(service, protocol, long(protocol))
                assert call.begun()
                table.one(protocol, way, call)


@in_parts
def test_leaving_what_one_does_not_read(cases: list[Protocol], service: Served, report: Callable[[str], None]) -> None:
    """The client takes nothing, and what is made piles up on the way to it."""
    service.wait_idle()

    def ahead(count: int) -> None:
        running(service)(count)
        before = service.load()["steps"]
        wait_for(lambda: service.load()["steps"] > before + AHEAD, "streams that run ahead of their readers")

    with Leaving(service, "slow reader", "running", report).measured() as table:
        table.cancel_all(streaming(cases), verbose, ahead)
        table.out_of_time(streaming(cases), verbose, ahead, 5.0, told=False)


@pytest.mark.parametrize("protocol", [STREAMS[0], STREAMS[3]], ids=lambda one: one.name)
def test_the_engine_waits_for_a_reader_that_takes_nothing(
    service: Served, protocol: Protocol, report: Callable[[str], None]
) -> None:
    """And keeps neither a place nor KV for it. Then it goes, like any other."""
    service.wait_idle()
    before = service.load()["steps"]
    call = RawCall(service, protocol, Asked(logprobs=20, n=32))

    def held() -> bool:
        load = service.load()
        return load["waiting"] == 32 and load["kv_blocks_free"] == load["kv_blocks_total"]

    wait_for(held, "an engine that computes nothing for it")
    steps = service.load()["steps"]
    report(f"{protocol.name}: a reader of nothing was waited for after {32 * (steps - before)} tokens with logprobs")
    assert steps - before < 2000, "a thirtieth of what it asked for; what is on the way is in buffers of known size"
    with Leaving(service, "waiting for its reader", "waiting", report).measured() as table:
        table.one(protocol, "disconnect", call)
    service.wait_idle(1.0)


@in_parts
def test_leaving_while_it_is_parked(cases: list[Protocol], service: Served, report: Callable[[str], None]) -> None:
    """It waits for its grammar's word, with its KV: the process that would say it is stopped."""
    service.wait_idle()

    def parked(count: int) -> None:
        signal_all(service, signal.SIGCONT)  # an earlier round has stopped it
        running(service)(count)
        before = service.load()["steps"]
        wait_for(lambda: service.load()["steps"] > before + 20, "tokens of all of them")
        signal_all(service, signal.SIGSTOP)
        steps = -1
        while steps != (steps := service.load()["steps"]):
            time.sleep(0.1)
        load = service.load()
        assert load["running"] == count
        assert load["kv_blocks_total"] - load["kv_blocks_free"] >= count, "they hold their KV"

    try:
        with Leaving(service, "parked", "running", report).measured() as table:
            table.cancel_all(generating(cases), held, parked)
    finally:
        signal_all(service, signal.SIGCONT)
    service.wait_idle()


def held(protocol: Protocol) -> Asked:
    """One grammar for all of them: one process."""
    return Asked(f"{protocol.name} ", id=protocol.name, regex="[a-z]+")


def signal_all(service: Served, number: signal.Signals) -> None:
    """To every process that has a grammar: children of the one that they are forked from."""
    forkservers = [pid for pid in service.descendants() if "grammar_forkserver" in command_line(pid)]
    for pid in [child for forkserver in forkservers for child in children(forkserver)]:
        os.kill(pid, number)


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
