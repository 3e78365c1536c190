"""Explanations of routes: each scenario has its cause, whatever became of the request, and no record is large."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError
from routed_fleet import Fleet, Stand, a_profile, begin, read, request, until

from motley.cluster.routing.explanation.route_explanation import ExplainedRoute, explain_route
from motley.cluster.routing.explanation.route_log import MAX_ROUTES, RouteLog
from motley.cluster.routing.explanation.route_record import (
    MAX_RECORD_BYTES,
    RouteAttempt,
    RouteRecord,
    pack_predictions,
)
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.routing.prediction.routing_query import LatencyPrediction
from motley.cluster.routing.queueing.request_queue import RoutingConfig
from motley.cluster.transport import access_log
from motley.cluster.transport.access_log import CallRecord
from motley.replicas.engine.streams.output_buffer import merge_messages
from motley.replicas.errors import MotleyError, Overloaded
from motley.replicas.types import (
    Delta,
    FinishReason,
    ReplicaLoad,
    Request,
    RequestTimings,
    SamplingParams,
    StreamMessage,
)

FAST, SLOW = a_profile(8.0), a_profile(1.0)


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()  # a fleet is told of its replicas by the true one

    def __call__(self) -> float:
        return self.now


class Timed(Stand):
    """Replica that lets the clock go on: by `way_s` and its timings before its first token, then by `token_s` each.

    dies_after  token after which it is lost; refuses: it has no room
    """

    def __init__(self, clock: Clock, profile: Any = SLOW, **script: Any) -> None:
        super().__init__(profile)
        self.clock = clock
        self.way_s, self.token_s, self.cached, self.preemptions, self.dies_after, self.refuse_s = (
            0.0,
            0.01,
            0,
            0,
            99,
            0.0,
        )
        self.timings = RequestTimings(0.0, 0.0, 0.03)
        vars(self).update(script)

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        await asyncio.sleep(0)
        if self.refuse_s:
            self.clock.now += self.refuse_s
            raise Overloaded("the queue is full", code="queue_full")
        begins, most = len(request.output_ids[0]) if request.output_ids else 0, request.sampling.max_tokens or 1
        self.running += 1
        try:
            for number in range(begins, most):
                await self.gate.wait()
                first, last = number == begins, number + 1 == most
                self.clock.now += self.way_s + sum(self.timings) if first else self.token_s
                if number >= self.dies_after:
                    raise ActorDiedError
                delta = Delta(0, (number,), finish_reason=FinishReason.LENGTH if last else None)
                message = StreamMessage((delta,), await self.load(), preemptions=self.preemptions if last else 0)
                yield message._replace(cached_tokens=self.cached, timings=self.timings) if first else message
        finally:
            self.running -= 1

    async def answer(self, request: Request) -> StreamMessage:
        return merge_messages([message async for message in self.generate(request)])


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timed(clock: Clock, routing: RoutingConfig | None = None, **pools: list[Any]) -> Fleet:
    fleet = Fleet(routing, **pools)
    fleet.router.live.clock = clock
    fleet.router.routes = RouteLog(clock)
    return fleet


def latest(fleet: Fleet, name: str = "r") -> ExplainedRoute:
    found = fleet.router.explain(name, "here").routes[0]
    assert sum(term.actual_s for term in found.terms) == pytest.approx(found.total_s), (
        "nothing is told twice or left out"
    )
    [record] = fleet.router.routes.find(name)[:1]
    assert len(cloudpickle.dumps(record)) <= MAX_RECORD_BYTES or found.outcome == "running"
    return found


async def explained(fleet: Fleet, asked: Request | None = None, *, whole: bool = False) -> ExplainedRoute:
    with suppress(MotleyError):
        async with aclosing(fleet.router.stream(asked or request(tokens=10), whole=whole)) as messages:
            async for _ in messages:
                pass
    return latest(fleet)


def reasons(found: ExplainedRoute) -> dict[str, tuple[str, ...]]:
    return {one.reason: one.replica_ids for one in found.attempts[0].excluded}


async def test_what_took_as_long_as_predicted_has_no_cause(clock: Clock) -> None:
    found = await explained(timed(clock, one=[Timed(clock)]))
    assert (found.outcome, found.slow_by, found.ingress) == ("answered", "", "here")
    assert found.cause == "It took about as long as predicted."
    assert found.choice.startswith("It went to one-0, predicted to begin in 40 ms, then 10.4 ms a token")
    assert found.choice.endswith("0 of 100 prompt tokens cached. No other replica could take it.")
    assert (found.prompt_tokens, found.output_tokens, found.retries, found.moves) == (100, 10, 0, 0)
    assert found.ttft_s == pytest.approx(0.03)


async def test_a_fast_replica_that_is_overloaded(clock: Clock) -> None:
    fleet = timed(clock, fast=[Timed(clock, FAST)], slow=[Timed(clock)])
    fleet.router.live.drains("fast-0", ReplicaLoad(running=8, queued_prefill_tokens=90_000, steps=1))
    found = await explained(fleet)
    assert found.choice.startswith("It went to slow-0")
    assert "fast-0 would have begun in 2.8" in found.choice
    assert "of them in its queue" in found.choice
    slow, fast = found.attempts[0].candidates
    assert (slow.pool, fast.pool) == ("slow", "fast")
    assert fast.queue_s == pytest.approx(2.8, abs=0.1)
    assert found.attempts[0].policy == "predicted_latency"


async def test_one_that_drains_is_left_out(clock: Clock) -> None:
    fleet = timed(clock, fast=[Timed(clock, FAST)], slow=[Timed(clock)])
    fleet.router.live.drains("fast-0", ReplicaLoad(draining=True, steps=1))
    found = await explained(fleet)
    assert reasons(found) == {"draining": ("fast-0",)}
    assert found.choice.endswith("No other replica could take it. 1 of 2 left behind: draining.")


async def test_one_that_failed_lately_comes_last(clock: Clock) -> None:
    fleet = timed(clock, fast=[Timed(clock, FAST)], slow=[Timed(clock)])
    fleet.router._suspects.add("fast-0")
    found = await explained(fleet)
    assert reasons(found) == {"failed lately": ("fast-0",)}
    assert [(one.replica_id, one.behind[:16]) for one in found.attempts[0].candidates] == [
        ("slow-0", ""), ("fast-0", "it failed lately"),
    ]  # fmt: skip


async def test_a_context_that_is_too_short(clock: Clock) -> None:
    fleet = timed(clock, short=[Timed(clock, a_profile(8.0, longest=64))], long=[Timed(clock)])
    found = await explained(fleet)
    assert reasons(found) == {"context too short": ("short-0",)}
    assert found.attempts[0].replica_id == "long-0"


async def test_one_that_refuses_costs_a_retry(clock: Clock) -> None:
    fleet = timed(clock, fast=[Timed(clock, FAST, refuse_s=0.5)], slow=[Timed(clock)])
    found = await explained(fleet)
    assert (found.retries, found.moves, found.slow_by) == (1, 0, "retries")
    assert found.cause == "500 ms went to attempts of which nothing came: fast-0 (queue_full)."
    assert [(one.replica_id, one.error) for one in found.attempts] == [("fast-0", "queue_full"), ("slow-0", "")]
    assert found.attempts[1].excluded[0].reason == "failed on this request"


async def test_a_lost_replica_costs_a_move(clock: Clock) -> None:
    lost = Timed(clock, a_profile(8.0, "a"), dies_after=4, token_s=0.002)
    near, far = (Timed(clock, a_profile(speed, name), way_s=0.7) for speed, name in ((4.0, "b"), (0.5, "a")))
    found = await explained(timed(clock, lost=[lost], near=[near], far=[far]))
    assert (found.retries, found.moves, found.slow_by) == (0, 1, "moves")
    assert found.cause.endswith("until the answer went on on another replica: lost-0 (replica_lost).")
    assert [(one.replica_id, one.error, one.tokens_before) for one in found.attempts] == [
        ("lost-0", "replica_lost", 0), ("far-0", "", 4),
    ]  # fmt: skip
    behind = {one.replica_id: one.behind for one in found.attempts[1].candidates}
    assert behind["near-0"] == "it is of another numerics class than the answer began with"


async def test_a_prefix_that_has_gone_cold(clock: Clock) -> None:
    only = Timed(clock, timings=RequestTimings(0.0, 0.0, 0.25))
    fleet, asked = timed(clock, one=[only]), request(tokens=4, prompt=1000)
    await explained(fleet, asked)
    found = await explained(fleet, asked)
    assert found.slow_by == "prefill"
    assert found.cause.endswith("of 960 prompt tokens that were expected in its cache, 0 were there.")
    assert "with 960 of 1000 prompt tokens cached" in found.choice
    assert found.attempts[0].cached_tokens == 0


@pytest.mark.parametrize(
    ("script", "slow_by", "words"),
    [
        (
            {"timings": RequestTimings(0.5, 0.0, 0.03)},
            "queue",
            "It waited 500 ms (0 ms predicted) in the queue of one-0.",
        ),
        ({"timings": RequestTimings(0.0, 0.5, 0.03)}, "fetch", "one-0 waited 500 ms (0 ms predicted) for the prefix"),
        ({"timings": RequestTimings(0.0, 0.0, 0.5)}, "prefill", "Its prompt took 500 ms ("),
        ({"way_s": 0.5}, "network", "The way to one-0 and back took 500 ms."),
        ({"token_s": 0.1}, "decode", "Its tokens after the first took 900 ms ("),
        ({"token_s": 0.1, "preemptions": 2}, "decode", "on one-0: it was preempted 2 times."),
        ({"timings": RequestTimings(0.5, 0.0, 0.03), "preemptions": 1}, "queue", "It waited 500 ms"),
    ],
    ids=["queue", "fetch", "prefill", "network", "decode", "preempted", "the largest"],
)
async def test_the_term_that_is_too_long_is_the_cause(
    clock: Clock, script: dict[str, Any], slow_by: str, words: str
) -> None:
    found = await explained(timed(clock, one=[Timed(clock, **script)]))
    assert found.slow_by == slow_by
    assert words in found.cause
    assert found.preemptions == script.get("preemptions", 0)


async def test_a_replica_that_tells_nothing(clock: Clock) -> None:
    untold = Timed(clock, way_s=0.5)
    fleet = timed(clock, one=[untold])
    generate = untold.generate

    async def silent(request: Request) -> AsyncGenerator[StreamMessage, None]:
        async for message in generate(request):
            yield message._replace(timings=None)

    untold.generate = silent  # type: ignore[method-assign]
    found = await explained(fleet)
    assert found.slow_by == "first_token"
    assert found.cause.startswith("one-0 took 530 ms (40 ms predicted)")


async def test_a_slow_client(clock: Clock) -> None:
    fleet = timed(clock, one=[Timed(clock)])
    async with aclosing(fleet.router.stream(request(tokens=3))) as messages:
        async for _ in messages:
            clock.now += 1.0
    found = latest(fleet)
    assert (found.slow_by, found.outcome) == ("client", "answered")
    assert found.cause == "Its client took 3.00 s to read what had come."


async def test_one_that_waited_for_the_first_replica(clock: Clock) -> None:
    fleet = timed(clock, one=[], two=[])
    reading = asyncio.create_task(explained(fleet))
    await until(lambda: fleet.router.held)
    clock.now += 4.0
    found = latest(fleet)
    assert (found.outcome, found.cause) == (
        "running", "It waited 4.00 s at the ingress: there was no replica when it came.",
    )  # fmt: skip
    fleet.pools["one"].replicas["one-0"] = Timed(clock)
    fleet.tell()
    found = await reading
    assert (found.outcome, found.slow_by) == ("answered", "held")
    assert found.cause == "It waited 4.00 s at the ingress: there was no replica when it came."


async def test_one_that_serve_held_for_the_only_pools_first_replica(clock: Clock) -> None:
    fleet = timed(clock, one=[])
    reading = asyncio.create_task(explained(fleet))
    await until(lambda: fleet.router.routes.find("r")[:1] and fleet.router.routes.find("r")[0].attempts)
    clock.now += 4.0
    fleet.pools["one"].replicas["one-0"] = Timed(clock)
    fleet.tell()
    found = await reading
    assert (found.slow_by, found.choice) == ("held", "It went to one-0, for which nothing was predicted.")
    assert found.cause == "It waited 4.00 s at the ingress: there was no replica when it came."


async def test_one_that_waited_since_all_were_full(clock: Clock) -> None:
    only = Timed(clock, a_profile(running=1))
    fleet = timed(clock, RoutingConfig(max_wait_s=5.0), one=[only])
    first = await begin(fleet.router, replace(request(tokens=10), request_id="first"))
    only.gate.clear()
    reading = asyncio.create_task(explained(fleet))
    await until(lambda: fleet.router.held)
    clock.now += 2.0
    await first.aclose()
    fleet.router.live.drains("one-0", await only.load())
    only.gate.set()
    found = await reading
    assert found.cause == "It waited 2.00 s at the ingress: no replica had room for it."
    assert latest(fleet, "first").outcome == "cancelled"


async def test_requests_that_were_refused(clock: Clock) -> None:
    fleet = timed(clock, RoutingConfig(slo=Slo(0.001, 0.1), shed=True, max_wait_s=5.0), one=[Timed(clock)])
    found = await explained(fleet)
    assert (found.outcome, found.attempts) == ("queue_full", ())
    assert found.cause == "It was refused: no replica had room for it in time."
    fleet = timed(clock, one=[Timed(clock)])
    for each in fleet.router.live.replicas.values():
        each.observed = 8
    found = await explained(fleet, request(deadline_s=0.001))
    assert (found.outcome, found.attempts) == ("deadline_unmeetable", ())
    fleet.router.drain()
    found = await explained(fleet)
    assert (found.outcome, found.cause) == ("draining", "It was refused: the service was stopping.")


async def test_a_deadline_before_the_first_token(clock: Clock) -> None:
    hung = Timed(clock)
    hung.gate.clear()
    fleet = timed(clock, one=[hung])
    fleet.router._liveness._tick_s = 0.01
    reading = asyncio.create_task(explained(fleet, request(deadline_s=0.05)))
    await until(lambda: fleet.sent)
    clock.now += 2.0
    found = await reading
    assert (found.outcome, found.slow_by, found.ttft_s) == ("deadline_exceeded", "first_token", None)
    assert found.cause.startswith("It ended with deadline_exceeded. No token came from one-0 for 2.00 s (40")


async def test_one_that_fails_everywhere(clock: Clock) -> None:
    stands = [Timed(clock, dies_after=0, way_s=0.4) for _ in range(3)]
    found = await explained(timed(clock, one=stands))
    assert (found.outcome, found.slow_by, found.output_tokens) == ("replica_lost", "retries", 0)
    assert [one.error for one in found.attempts] == ["replica_lost"] * 3
    assert found.cause.startswith("It ended with replica_lost. 1.29 s went to attempts of which nothing came: ")


async def test_one_that_every_replica_refuses_at_once(clock: Clock) -> None:
    found = await explained(timed(clock, one=[Timed(clock, refuse_s=1e-6)], two=[Timed(clock, refuse_s=1e-6)]))
    assert (found.outcome, found.slow_by, found.retries) == ("queue_full", "", 2)
    assert {*found.cause.removeprefix("It ended with queue_full. ").rstrip(".").split(", ")} == {
        "one-0 (queue_full)", "two-0 (queue_full)", "no replica (no_replica)",
    }  # fmt: skip


async def test_one_that_runs_and_one_whose_client_leaves(clock: Clock) -> None:
    fleet = timed(clock, one=[Timed(clock, way_s=0.5)])
    stream = await begin(fleet.router, request(tokens=10))
    await anext(stream)
    found = latest(fleet)
    assert (found.outcome, found.output_tokens, found.slow_by) == ("running", 2, "network")
    await stream.aclose()
    found = latest(fleet)
    assert (found.outcome, found.output_tokens) == ("cancelled", 2)


async def test_answers_in_one_message(clock: Clock) -> None:
    fleet = timed(clock, one=[Timed(clock, token_s=0.1)])
    found = await explained(fleet, whole=True)
    assert (found.slow_by, found.ttft_s, found.attempts[0].replica_id) == ("decode", None, "one-0")
    assert {term.name: term.actual_s for term in found.terms} == pytest.approx({"prefill": 0.03, "decode": 0.9})


async def test_a_request_is_found_by_every_id(clock: Clock) -> None:
    fleet, call = timed(clock, one=[Timed(clock)]), CallRecord("http", "POST /v1/completions", "of the call")
    access_log.begin_record(call)
    try:
        await read(fleet.router, replace(request(), request_id="ab12", client_id="its-own"))
        await read(fleet.router, replace(request(), request_id="cd34", client_id="another"))
    finally:
        call.ended(200)
        access_log._current.set(None)
    for name in ("ab12", "chatcmpl-ab12", "its-own"):
        assert [one.request_id for one in fleet.router.explain(name, "").routes] == ["ab12"], name
    for name in (call.id, "of the call"):
        assert [one.request_id for one in fleet.router.explain(name, "").routes] == ["cd34", "ab12"], "newest first"
    assert [fleet.router.explain(name, "").matches for name in ("", "own", "ab")] == [0, 0, 0]


def test_the_last_requests_are_kept(clock: Clock) -> None:
    log = RouteLog(clock)
    for number in range(MAX_ROUTES + 1):
        with log.begin(replace(request(prompt=1), request_id=f"{number}"), "", "", 0):
            pass
    assert [len(log.find(name)) for name in ("0", "1", f"{MAX_ROUTES}")] == [0, 1, 1]


PREDICTED = [LatencyPrediction(row, 0.1, 0.01, 0.1, 1.0, 1.0, 10.0, 0.05, 0.0) for row in range(8)]


@pytest.mark.parametrize("length", [8, 40, 400])
def test_a_record_that_would_be_too_large_is_cut(clock: Clock, length: int) -> None:
    """Its first and last attempts stay, however many there are, and however long names and ids are."""
    asked = Request("q" * 32, (10**9 + 7,) * 1000, SamplingParams(), client_id="c" * 128, tenant="t" * 64)
    with RouteRecord(asked, "i" * 32, "n" * 128, 1000, clock) as record:
        for number in range(20):
            names = tuple(f"{number}-{row}".ljust(length, "x") for row in range(8))
            decision = names, pack_predictions(PREDICTED), 1000, "predicted_latency", (("draining", 400, names[:4]),)
            record.placed(decision, None, "pool", number)
            record.failed(Overloaded("full", code="queue_full"))
    assert len(cloudpickle.dumps(record)) <= MAX_RECORD_BYTES
    found = explain_route(record, clock(), {})
    assert (found.retries + found.moves, found.left_out + len(found.attempts)) == (19, 20)
    assert [one.tokens_before for one in found.attempts][:: len(found.attempts) - 1] == [0, 19]
    assert found.left_out > 0
    assert str(10**9 + 7) not in str(found)
    assert (10**9 + 7).to_bytes(4, "little") not in cloudpickle.dumps(record), "it has nothing of the prompt"


def test_numbers_that_are_too_large_are_infinite() -> None:
    packed = pack_predictions([PREDICTED[0]._replace(ttft_s=1e300, tpot_s=math.inf)])
    attempt = RouteAttempt((("one",), packed, 1, "", ()), None, "pool", 0.0, 0)
    assert attempt.predictions["one"][1:3] == (math.inf, math.inf)
