"""Shapes, requests and series of load tests by Locust. Locust itself replaces sockets and threads of the process that
imports it, so that it runs in `tests/system/test_locust_load.py`, as a process.
"""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import Clock

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.length_distribution import LengthDistribution
from motley_bench.load.measured_service import MeasuredService
from motley_bench.locust_load.load_shapes import SHAPES, users_at
from motley_bench.locust_load.request_source import RequestSource
from motley_bench.locust_load.stream_series import BETWEEN, FIRST_TOKEN, GOODPUT, TOKENS, StreamTimer

SLO = Slo(1.0, 0.1)
WHOLE = "end to end"


class Recorded:
    """In the place of Locust's environment: what it is told, by type; milliseconds or tokens, and lengths."""

    def __init__(self) -> None:
        self.logged: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.errors: list[tuple[str, Any]] = []
        self.stats, self.events = self, SimpleNamespace(request=SimpleNamespace(fire=self._fire))

    def log_request(self, kind: str, name: str, value: float, length: int) -> None:
        assert name == "motley.v1"
        self.logged[kind].append((pytest.approx(value), length))

    def log_error(self, kind: str, name: str, why: Any) -> None:
        self.errors.append((kind, why))

    def _fire(
        self, request_type: str, name: str, response_time: float, response_length: int, exception: Any, context: Any
    ) -> None:
        self.log_request(request_type, name, response_time, response_length)
        if exception is not None:
            self.log_error(request_type, name, exception)


def answer(*messages: tuple[float, int], error: Exception | None = None) -> Recorded:
    """An answer whose messages came so many seconds after the one before, with so many tokens each."""
    clock, found = Clock(), Recorded()
    timer = StreamTimer(found, "motley.v1", SLO, clock)  # type: ignore[arg-type]
    for seconds, tokens in messages:
        clock.now += seconds
        timer.message(tokens)
    clock.now += 0.5
    timer.ended(error)
    return found


def test_an_answer_is_in_every_series() -> None:
    assert answer((0.8, 1), (0.1, 2), (0.3, 1)).logged == {
        WHOLE: [(1700, 4)], FIRST_TOKEN: [(800, 0)], BETWEEN: [(100, 0), (300, 0)], TOKENS: [(4, 4)],
        GOODPUT: [(1700, 4)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "error", "why"),
    [
        ([(0.9, 1), (0.1, 1)], None, ""),
        ([(1.1, 1), (0.1, 1)], None, "the first token was late"),
        ([(0.9, 1), (0.3, 1), (0.1, 1)], None, "tokens came slowly"),
        ([(0.9, 1), (0.3, 4)], None, ""),
        ([], None, "the first token was late"),
        ([(0.5, 1)], OSError("gone"), "failed"),
    ],
)
def test_what_misses_an_objective_is_no_goodput(
    messages: list[tuple[float, int]], error: Exception | None, why: str
) -> None:
    found = answer(*messages, error=error)
    assert len(found.logged[GOODPUT]) == 1
    assert found.errors == [(WHOLE, error)] * (error is not None) + [(GOODPUT, why)] * bool(why)


def test_shapes_are_what_they_are_called() -> None:
    def users(name: str, *at_s: float, peak: int = 100) -> list[int]:
        return [users_at(name, peak, at, 60.0) for at in at_s]

    assert users("none", 0.0, 59.0) == users("steady", 0.0, 59.0) == [100, 100]
    assert users("ramp", 0.0, 15.0, 30.0, 59.4, 60.0) == [1, 25, 50, 99, 1]
    assert users("spike", 0.0, 23.0, 24.0, 35.0, 36.0) == [10, 10, 100, 100, 10]
    assert users("sawtooth", 3.0, 29.7, 30.0, 45.0) == [10, 99, 1, 50]
    assert users("burst", 0.0, 2.9, 3.0, 29.0, 30.0, 33.0) == [100, 100, 100, 10, 100, 100]
    assert {users_at(name, 1, 61.0, 60.0) for name in SHAPES} == {1}, "there is always one"


def source(seed: int, **given: Any) -> RequestSource:
    service = MeasuredService("http", "http://here", "tiny", (3, 4, 5), 128, null=True)
    lengths = {"prompt_tokens": "uniform:1:200", "output_tokens": "uniform:1:100"} | given
    prompt, output = (LengthDistribution.parse(str(lengths[name])) for name in ("prompt_tokens", "output_tokens"))
    return RequestSource(service, prompt, output, given.get("shared", 0.0), SLO, random.Random(seed))


def test_requests_fit_the_model_and_follow_from_the_seed() -> None:
    one, same, other = source(0), source(0), source(1)
    made = [one.next() for _ in range(200)]
    assert made == [same.next() for _ in range(200)] != [other.next() for _ in range(200)]
    assert all(len(each.prompt_ids) + each.output_tokens <= 128 for each in made)
    assert {token for each in made for token in each.prompt_ids} == {3, 4, 5}


def test_the_shared_part_is_that_of_every_process() -> None:
    made = [source(seed, prompt_tokens="40", output_tokens="2", shared=0.5).next().prompt_ids for seed in (0, 1)]
    assert made[0][:20] == made[1][:20]
    assert made[0][20:] != made[1][20:]
