"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from call_attempts import an_attempt
from ray import cloudpickle

from motley.cluster.routing.attempt.call_attempt import CallAttempt, NoReplicaInPool
from motley.cluster.routing.attempt.placement import SUSPECT_S, Placement, ReplicaCandidate, SuspectReplicas
from motley.replicas.errors import MotleyError, Unavailable

ABC = [ReplicaCandidate("a", "exact"), ReplicaCandidate("b", "exact"), ReplicaCandidate("c", "fast")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(attempt: CallAttempt, candidates: list[ReplicaCandidate]) -> list[str]:
    """Whom it asks, one after the other, until it would ask again."""
    asked = []
    while True:
        chosen, wait = attempt.choose(candidates)
        if chosen is None or wait:
            return asked
        asked.append(chosen.id)


def test_each_is_asked_once_before_any_is_asked_again() -> None:
    attempt = an_attempt()
    first = order(attempt, ABC)
    assert sorted(first) == ["a", "b", "c"]
    chosen, wait = attempt.choose(ABC)
    assert (chosen is not None, wait) == (True, False), "the round has begun anew"


def test_the_idlest_comes_first_and_ties_fall_at_random() -> None:
    queues = [
        ReplicaCandidate("a", queue_len=2),
        ReplicaCandidate("b", queue_len=0),
        ReplicaCandidate("c", queue_len=1),
    ]
    assert order(an_attempt(), queues) == ["b", "c", "a"]
    firsts = Counter(order(an_attempt(), ABC)[0] for _ in range(200))
    assert set(firsts) == {"a", "b", "c"}


def test_requests_of_one_moment_are_spread() -> None:
    """Serve's queue lengths have not moved yet."""
    suspects = SuspectReplicas()
    attempts = [an_attempt(suspects) for _ in range(9)]
    for attempt in attempts:
        attempt.choose(ABC)
    assert suspects.carried == {"a": 3, "b": 3, "c": 3}
    for attempt in attempts:
        attempt.release()
        attempt.release()
    assert not suspects.carried
    an_attempt(suspects, only="a").choose(ABC)
    assert not suspects.carried, "a question is no load"


def test_a_length_that_is_no_longer_true_draws_nothing_away() -> None:
    """Serve may remember a busy second for ten: all that comes would go to the other replica."""
    suspects = SuspectReplicas()
    stale = [ReplicaCandidate("a", queue_len=50), ReplicaCandidate("b", queue_len=0)]
    attempts = [an_attempt(suspects) for _ in range(10)]
    for attempt in attempts:
        attempt.choose(stale)
    assert suspects.carried == {"a": 5, "b": 5}


def test_suspects_then_those_it_failed_on_then_other_numerics_come_last() -> None:
    suspects = SuspectReplicas()
    suspects.add("a")
    four = [*ABC, ReplicaCandidate("d", "exact")]
    attempt = an_attempt(suspects, avoid=frozenset({"b"}), numerics="exact")
    assert order(attempt, four) == ["d", "c", "b", "a"]


def test_a_suspect_is_one_until_it_lives_or_has_been_replaced() -> None:
    clock = Clock()
    suspects = SuspectReplicas(clock)
    suspects.add("a")
    suspects.add("b")
    assert "a" in suspects
    suspects.clear("a")
    assert "a" not in suspects
    clock.now = SUSPECT_S
    assert "b" not in suspects


@pytest.mark.parametrize(
    ("wish", "candidates", "error"),
    [
        ({"avoid": frozenset("abc"), "strict": True}, ABC, Unavailable),
        ({"only": "z"}, ABC, Unavailable),
        ({"only": "a"}, [], Unavailable),
        ({"elsewhere": True}, [], NoReplicaInPool),
    ],
)
def test_nowhere_is_told_when_waiting_is_of_no_use(
    wish: dict[str, Any], candidates: list[ReplicaCandidate], error: type[MotleyError], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[MotleyError] = []
    attempt = an_attempt(**wish)
    monkeypatch.setattr(attempt, "interrupt", told.append)
    assert attempt.choose(candidates) == (None, True)
    assert [type(each) for each in told] == [error]
    assert attempt.replica is None


def test_the_first_replica_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[MotleyError] = []
    attempt = an_attempt()
    monkeypatch.setattr(attempt, "interrupt", told.append)
    assert attempt.choose([]) == (None, True)
    assert told == []


def test_who_can_wait_goes_back_to_those_it_failed_on() -> None:
    suspects = SuspectReplicas()
    suspects.add("a")
    assert order(an_attempt(suspects, avoid=frozenset("a")), ABC[:1]) == ["a"]
    assert order(an_attempt(suspects, avoid=frozenset("a"), strict=True), ABC[:1]) == []


def test_what_is_told_of_the_choice() -> None:
    attempt = an_attempt(only="c")
    attempt.choose(ABC)
    assert (attempt.replica, attempt.found) == ("c", "fast")


def test_a_placement_goes_one_way_and_is_what_it_was() -> None:
    """Nothing is written into it, and nothing of an attempt but its identity goes to a replica."""
    wish = Placement(avoid=frozenset("a"), order=("c", "b"))
    attempt = an_attempt(avoid=wish.avoid, order=wish.order)
    order(attempt, ABC)
    assert attempt.placement == wish
    with pytest.raises(FrozenInstanceError):
        wish.pool = "other"  # type: ignore[misc]
    assert cloudpickle.loads(cloudpickle.dumps(wish)) == wish
    assert cloudpickle.loads(cloudpickle.dumps(attempt.call)) == attempt.call
