from __future__ import annotations

import pytest

from motley.replicas.engine.streams.admission_limiter import MAX_RETRY_AFTER_S, AdmissionLimiter
from motley.replicas.errors import Overloaded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def admission(clock: Clock, **settings: float) -> AdmissionLimiter:
    return AdmissionLimiter(**{"max_waiting": 10, "max_waiting_tokens": 1000, "clock": clock} | settings)  # type: ignore[arg-type]


def test_it_counts_requests_and_tokens_until_they_begin_or_leave(clock: Clock) -> None:
    room = admission(clock)
    for _ in range(10):
        room.enter(50)
    with pytest.raises(Overloaded, match="10 requests with 500 prompt tokens"):
        room.enter(1)
    room.began(50)
    room.left(50)
    assert (room.waiting, room.waiting_tokens) == (8, 400)
    room.enter(600)
    with pytest.raises(Overloaded, match="9 requests with 1000 prompt tokens"):
        room.enter(1)


def test_a_request_larger_than_the_bound_is_taken_when_it_is_alone(clock: Clock) -> None:
    room = admission(clock)
    room.enter(5000)
    with pytest.raises(Overloaded):
        room.enter(1)
    room.began(5000)
    room.enter(1)
    with pytest.raises(Overloaded):
        room.enter(5000)


def test_when_to_retry_follows_the_pace_of_what_begins(clock: Clock) -> None:
    room = admission(clock, max_waiting=40)
    for _ in range(40):
        room.enter(1)
    for _ in range(20):  # two begin each second, and others take their places
        clock.now += 0.5
        room.began(1)
        room.enter(1)
    with pytest.raises(Overloaded) as caught:
        room.enter(1)
    assert caught.value.retry_after_s == pytest.approx(40 / 2, abs=1)
    clock.now += 1000.0
    assert room.retry_after_s() == MAX_RETRY_AFTER_S, "nothing has begun for long"


def test_before_anything_has_begun_the_prefill_rate_says_when(clock: Clock) -> None:
    room = admission(clock, prefill_tokens_per_s=100.0)
    for _ in range(10):
        room.enter(100)
    assert room.retry_after_s() == 10
    assert admission(clock).retry_after_s() == 1, "at least a second, whatever is known"


def test_a_part_of_a_second_counts_as_one_and_the_time_since_the_last_as_waiting(clock: Clock) -> None:
    room = admission(clock, prefill_tokens_per_s=100.0)
    room.enter(210)
    assert room.retry_after_s() == 3, "2.1 s, rounded up"
    paced = admission(clock)
    for _ in range(9):
        paced.enter(1)
    paced.began(1)
    clock.now += 1.0
    paced.began(1)
    clock.now += 1.0
    assert paced.retry_after_s() == 7, "two have begun in two seconds, and seven wait"
