"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

import pytest

from motley.cluster.routing.attempt.placement import SUSPECT_S, Placement, ReplicaCandidate, SuspectReplicas

ABC = [ReplicaCandidate("a", "exact"), ReplicaCandidate("b", "exact"), ReplicaCandidate("c", "fast")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(placement: Placement, candidates: list[ReplicaCandidate]) -> list[str]:
    """Whom it asks, one after the other, until it would ask again."""
    asked = []
    while True:
        chosen, wait = placement.choose(candidates)
        if chosen is None or wait:
            return asked
        asked.append(chosen.id)


def test_each_is_asked_once_before_any_is_asked_again() -> None:
    placement = Placement(SuspectReplicas())
    first = order(placement, ABC)
    assert sorted(first) == ["a", "b", "c"]
    chosen, wait = placement.choose(ABC)
    assert (chosen is not None, wait) == (True, False), "the round has begun anew"


def test_the_idlest_comes_first_and_ties_fall_at_random() -> None:
    queues = [
        ReplicaCandidate("a", queue_len=2),
        ReplicaCandidate("b", queue_len=0),
        ReplicaCandidate("c", queue_len=1),
    ]
    assert order(Placement(SuspectReplicas()), queues) == ["b", "c", "a"]
    firsts = Counter(order(Placement(SuspectReplicas()), ABC)[0] for _ in range(200))
    assert set(firsts) == {"a", "b", "c"}


def test_requests_of_one_moment_are_spread() -> None:
    """Serve's queue lengths have not moved yet."""
    suspects = SuspectReplicas()
    placements = [Placement(suspects) for _ in range(9)]
    for placement in placements:
        placement.choose(ABC)
    assert suspects.carried == {"a": 3, "b": 3, "c": 3}
    for placement in placements:
        placement.release()
        placement.release()
    assert not suspects.carried
    Placement(suspects, only="a").choose(ABC)
    assert not suspects.carried, "a question is no load"


def test_a_length_that_is_no_longer_true_draws_nothing_away() -> None:
    """Serve may remember a busy second for ten: all that comes would go to the other replica."""
    suspects = SuspectReplicas()
    stale = [ReplicaCandidate("a", queue_len=50), ReplicaCandidate("b", queue_len=0)]
    placements = [Placement(suspects) for _ in range(10)]
    for placement in placements:
        placement.choose(stale)
    assert suspects.carried == {"a": 5, "b": 5}


def test_suspects_then_those_it_failed_on_then_other_numerics_come_last() -> None:
    suspects = SuspectReplicas()
    suspects.add("a")
    four = [*ABC, ReplicaCandidate("d", "exact")]
    placement = Placement(suspects, avoid=frozenset({"b"}), numerics="exact")
    assert order(placement, four) == ["d", "c", "b", "a"]


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
    ("placement", "candidates"),
    [
        (Placement(SuspectReplicas(), avoid=frozenset("abc"), strict=True), ABC),
        (Placement(SuspectReplicas(), only="z"), ABC),
        (Placement(SuspectReplicas(), only="a"), []),
    ],
)
def test_nowhere_is_told_when_waiting_is_of_no_use(placement: Placement, candidates: list[ReplicaCandidate]) -> None:
    told: list[bool] = []
    placement.on_nowhere = lambda: told.append(True)
    assert placement.choose(candidates) == (None, True)
    assert told == [True]
    assert placement.replica is None


def test_who_can_wait_goes_back_to_those_it_failed_on() -> None:
    suspects = SuspectReplicas()
    suspects.add("a")
    assert order(Placement(suspects, avoid=frozenset("a")), ABC[:1]) == ["a"]
    assert order(Placement(suspects, avoid=frozenset("a"), strict=True), ABC[:1]) == []


def test_what_is_told_of_the_choice() -> None:
    placement = Placement(SuspectReplicas(), only="c")
    placement.choose(ABC)
    assert (placement.replica, placement.found) == ("c", "fast")


def test_a_replica_gets_no_more_of_it_than_its_ticket() -> None:
    suspects = SuspectReplicas()
    function, arguments = Placement(suspects, avoid=frozenset("a")).__reduce__()[:2]
    assert function(*arguments) is None
