"""Wish where a call goes, and what is known of the candidates. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SUSPECT_S = 30.0  # after this Serve has replaced a replica that hangs, or it has answered


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica as Serve's router sees it.

    queue_len  requests that it had when Serve last heard of it
    weights    digest of the weights that new requests begin with there, as in `ReplicaLoad`; empty: unknown
    """

    id: str
    numerics: str = ""
    queue_len: int = 0
    weights: str = ""


class SuspectReplicas:
    """Replicas that were lost recently. They rank last, and must answer a probe before they get a request.

    carried  number of requests that this ingress has on each replica now; Serve's queue lengths lag behind
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self.carried: Counter[str] = Counter()

    def add(self, replica: str) -> None:
        self._until[replica] = self._clock() + SUSPECT_S

    def clear(self, replica: str) -> None:
        """Remove a replica that has shown that it is alive."""
        self._until.pop(replica, None)

    def __contains__(self, replica: str) -> bool:
        until = self._until.get(replica)
        if until is not None and until <= self._clock():
            self.clear(replica)
            return False
        return until is not None

    def __iter__(self) -> Iterator[str]:
        return iter([replica for replica in list(self._until) if replica in self])


@dataclass(frozen=True, slots=True)
class Placement:
    """Wish where one call goes. Where it went is known to its `CallAttempt`.

    avoid      replicas that this request has failed on: they rank last
    strict     leave out the replicas of `avoid` and suspects: if there is no other, the attempt ends
    numerics   numerics class that the answer began with: replicas of others rank behind; empty: any
    weights    digest of the weights that the answer began with: replicas with others rank behind; decides before
               numerics
    only       the one replica that the call is meant for
    unfit      replicas whose contexts are too short: they are left out
    weight     number of requests that go there together
    order      replicas that are predicted to be best, best first; they rank so where nothing above decides, and others
               by how few requests of this ingress they have
    pool       pool of the call; empty: any
    elsewhere  other pools have replicas, so that the attempt need not wait for one of this pool
    """

    avoid: frozenset[str] = frozenset()
    strict: bool = False
    numerics: str = ""
    weights: str = ""
    only: str | None = None
    unfit: frozenset[str] = frozenset()
    weight: int = 1
    order: tuple[str, ...] = ()
    pool: str = ""
    elsewhere: bool = False

    def allows(self, candidate: ReplicaCandidate, suspects: SuspectReplicas) -> bool:
        if self.only is not None:
            return candidate.id == self.only
        if candidate.id in self.unfit:
            return False
        return not (self.strict and (candidate.id in self.avoid or candidate.id in suspects))

    def rank(
        self, candidate: ReplicaCandidate, suspects: SuspectReplicas
    ) -> tuple[bool, bool, bool, bool, int, int, int]:
        """Return the sort key of a candidate, lower is better.

        This ingress's own count of requests is exact. Serve's queue length is seconds old, and decides only between
        equals.
        """
        return (
            candidate.id in suspects,
            candidate.id in self.avoid,
            bool(self.weights) and candidate.weights != self.weights,
            bool(self.numerics) and candidate.numerics != self.numerics,
            self.order.index(candidate.id) if candidate.id in self.order else len(self.order),
            suspects.carried[candidate.id],
            candidate.queue_len,
        )
