"""Counts of an ingress's requests, message by message, as clients see them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from engine_parts import Clock
from hypothesis import given

from motley.cluster.metrics.metric_series import series_of
from motley.cluster.routing.ingress_counters import PoolCounters
from motley.cluster.routing.ingress_stats import IngressStats
from motley.replicas.errors import EngineFault
from motley.replicas.kv.histogram import Histogram, HistogramSnapshot
from motley.replicas.types import Delta, FinishReason, Request, SamplingParams, StreamMessage

REQUEST = Request("r", (1, 2), SamplingParams(seed=0))


def told(counters: PoolCounters) -> dict[str, tuple[int, float]]:
    """Return the count and the sum of each latency's histogram, by the first part of its name."""
    return {
        each.name.split("_")[0]: (each.value.count, pytest.approx(each.value.total))
        for each in series_of(counters, {})
        if isinstance(each.value, HistogramSnapshot) and not each.name.startswith("request")
    }


def counted(*messages: tuple[float, int], choices: int = 1, ends: float = 0.0) -> PoolCounters:
    """Return the counters of a request whose messages came so many seconds after the one before, with so many tokens
    each.
    """
    clock = Clock()
    tally = IngressStats(None, clock)
    with tally.counted(Request("r", (1, 2), SamplingParams(n=choices, seed=0))) as seen:
        for seconds, tokens in messages:
            clock.now += seconds
            seen.message(message(tokens), "cpu")
        clock.now += ends
    return tally.pools.get("cpu", PoolCounters())


def message(tokens: int, *ends: FinishReason) -> StreamMessage:
    last = [Delta(index, finish_reason=reason) for index, reason in enumerate(ends)]
    return StreamMessage((Delta(0, tuple(range(tokens))), *last))


def totals(counters: PoolCounters) -> dict[str, float]:
    return {
        ",".join([each.name, *(value for _, value in each.labels)]): each.value
        for each in series_of(counters, {})
        if not isinstance(each.value, HistogramSnapshot) and each.value
    }


def test_first_tokens_gaps_and_ends_are_counted_message_by_message() -> None:
    found = counted((0.5, 1), (0.1, 3), (0.2, 0), (0.3, 1), ends=1.0)
    assert told(found) == {"time": (1, 0.5), "inter": (2, 0.6), "e2e": (1, 2.1)}, "one message had no token"
    assert (found.tpot.spread().count, found.tpot.spread().total) == (1, pytest.approx(0.6 / 4))


def test_an_answer_in_one_message_tells_nothing_of_its_first_token() -> None:
    assert told(counted((2.0, 9))) == {"time": (0, 0.0), "inter": (0, 0.0), "e2e": (1, 2.0)}
    assert told(counted((2.0, 1)))["time"] == (1, 2.0), "but of its only one"
    assert told(counted((2.0, 2), choices=2))["time"] == (1, 2.0)
    assert counted((2.0, 9)).tpot.spread().count == 0


def test_a_request_that_said_nothing_is_in_no_latency() -> None:
    assert all(count == 0 for count, _ in told(counted(ends=3.0)).values())
    assert all(count == 0 for count, _ in told(counted((1.0, 0), ends=3.0)).values())


def test_of_a_request_that_moves_each_pool_has_what_came_from_there() -> None:
    clock = Clock()
    tally = IngressStats(None, clock)
    with tally.counted(REQUEST) as seen:
        for seconds, pool in ((0.5, "a"), (4.0, "b"), (0.1, "b"), (2.0, "a")):
            clock.now += seconds
            seen.message(message(1), pool)
        clock.now += 1.0
    a, b = tally.pools["a"], tally.pools["b"]
    assert told(a) == {"time": (1, 0.5), "inter": (1, 2.0), "e2e": (1, 7.6)}
    assert told(b) == {"time": (0, 0.0), "inter": (2, 4.1), "e2e": (0, 0.0)}
    assert totals(a) == {"prompt_tokens": 2, "generation_tokens": 2}, "the prompt is in the first pool alone"
    assert totals(b) == {"generation_tokens": 2}


def test_tokens_lengths_and_reasons_are_what_clients_were_sent() -> None:
    tally = IngressStats(None, Clock())
    tally.know(["cpu", "idle"])
    with tally.counted(Request("r", tuple(range(30)), SamplingParams(n=3, seed=0))) as seen:
        seen.message(message(4), "cpu")
        seen.message(message(5, FinishReason.STOP, FinishReason.LENGTH), "cpu")
        seen.message(message(0, FinishReason.STOP), "cpu")
    cpu = tally.pools["cpu"]
    assert totals(cpu) == {
        "prompt_tokens": 30, "generation_tokens": 9, "request_success,stop": 2, "request_success,length": 1,
    }  # fmt: skip
    assert (cpu.prompt_lengths.spread().total, cpu.output_lengths.spread().total) == (30, 9)
    reasons = {dict(each.labels)["finished_reason"] for each in series_of(cpu, {}) if each.name == "request_success"}
    assert reasons == {"stop", "length", "abort", "deadline", "replica_lost", "error"}, "each is there, at 0"
    assert not totals(tally.pools["idle"]), "and pools that have answered nothing"


@pytest.mark.parametrize("gone", [GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize(("sent", "pool"), [([], ""), ([message(1, FinishReason.STOP)], "cpu")])
def test_choices_of_a_client_that_leaves_are_aborted(
    gone: type[BaseException], sent: Sequence[StreamMessage], pool: str
) -> None:
    tally = IngressStats(None, Clock())

    def leave() -> None:
        with tally.counted(Request("r", (1,), SamplingParams(n=3, seed=0))) as seen:
            for each in sent:
                seen.message(each, pool)
            raise gone

    with pytest.raises(gone):
        leave()
    assert totals(tally.pools[pool])["request_success,abort"] == 3 - len(sent)


def test_an_error_is_no_abort() -> None:
    tally = IngressStats(None, Clock())

    def fail() -> None:
        with tally.counted(REQUEST) as seen:
            seen.message(message(1), "cpu")
            seen.message(message(0, FinishReason.ERROR), "cpu")
            raise EngineFault("gone")

    with pytest.raises(EngineFault):
        fail()
    assert totals(tally.pools["cpu"])["request_success,error"] == 1
    assert "request_success,abort" not in totals(tally.pools["cpu"])
    assert tally.counters.requests == 1


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.001, 50), unique=True, min_size=1))
def test_buckets_hold_what_is_up_to_their_bounds(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.add(value)
    *within, (last, every) = histogram.spread().cumulative()
    assert [count for _, count in within] == [sum(value <= bound for value in values) for bound in sorted(bounds)]
    assert (last, every) == ("+Inf", len(values))
    assert histogram.spread().total == pytest.approx(sum(values))
