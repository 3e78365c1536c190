"""Choice of the replica that an attempt of a request goes to, and what is known of the candidates. Pure."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ....replicas.engine.streams.stream_multiplexer import StreamId
from ..directory.dispatch_tracker import DispatchTracker

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


@dataclass(slots=True, eq=False)
class Placement:
    """Destination of one attempt of a request: where it may go, and where it went.

    It is the last argument of a call, as far as Serve's router in this process; on the way to a replica it is pickled
    as its `ticket` alone.

    suspects    replicas that any request has failed on
    avoid       replicas that this request has failed on: they rank last
    strict      leave out the replicas of `avoid` and `suspects`: if there is no other, the attempt ends
    numerics    numerics class that the answer began with: replicas of others rank behind; empty: any
    weights     digest of the weights that the answer began with: replicas with others rank behind; decides before
                numerics
    only        the one replica that the call is meant for
    unfit       replicas whose contexts are too short: they are left out
    weight      number of requests that go there together
    visit       ranks the replicas where nothing above decides, and tracks where the request goes; None: the replica
                with the fewest requests of this ingress is preferred
    pool        output: pool of the call
    elsewhere   other pools have replicas, so that the attempt need not wait for one of this pool
    ticket      lets the replica send its messages together with those of others (stream_demultiplexer.py); None: it
                may not
    replica     output: the replica that it was last sent to; None while it waits for one
    found       output: numerics class of that replica
    seen        output: all replicas that existed
    on_nowhere  called when no replica is allowed and waiting is of no use
    asked       output: replicas that were offered in this round
    """

    suspects: SuspectReplicas
    avoid: frozenset[str] = frozenset()
    strict: bool = False
    numerics: str = ""
    weights: str = ""
    only: str | None = None
    unfit: frozenset[str] = frozenset()
    weight: int = 1
    visit: DispatchTracker | None = None
    pool: str = ""
    elsewhere: bool = False
    ticket: StreamId | None = None
    replica: str | None = None
    found: str = ""
    seen: frozenset[str] = frozenset()
    on_nowhere: Callable[[], None] | None = None
    asked: set[str] = field(default_factory=set)
    _counted: bool = False

    def __reduce__(self) -> tuple[Callable[[StreamId | None], StreamId | None], tuple[StreamId | None]]:
        return _only, (self.ticket,)

    def choose(self, candidates: Iterable[ReplicaCandidate]) -> tuple[ReplicaCandidate | None, bool]:
        """Return the next replica to try, and whether to wait a little before trying once more.

        The replica is None if no candidate is allowed. Each candidate is tried once before any is tried again.
        """
        candidates = list(candidates)
        self.seen = frozenset(candidate.id for candidate in candidates)
        allowed = [candidate for candidate in candidates if self._allows(candidate)]
        if not allowed:
            self._nowhere()
            return None, True
        fresh = [candidate for candidate in allowed if candidate.id not in self.asked]
        if not fresh:
            if self.elsewhere:
                self._nowhere()
                return None, True
            self.asked.clear()
        chosen = min(_shuffled(fresh or allowed), key=self._rank)
        self._take(chosen)
        return chosen, not fresh

    def choose_best(self, candidates: Mapping[str, ReplicaCandidate]) -> ReplicaCandidate | None:
        """Return the next replica in the visit's order, or None if `choose` has to decide among all candidates."""
        if self.visit is None or self.only is not None:
            return None
        for name in self.visit.order:
            if name not in self.asked and (chosen := candidates.get(name)) is not None and self._allows(chosen):
                self._take(chosen)
                return chosen
        return None

    def _take(self, chosen: ReplicaCandidate) -> None:
        self.asked.add(chosen.id)
        self._leave()
        self.replica, self.found = chosen.id, chosen.numerics
        if self.only is None:
            self._counted = True
            self.suspects.carried[chosen.id] += self.weight
        if self.visit is not None:
            self.visit.to(chosen.id)

    def release(self) -> None:
        """Stop counting the request on its replica."""
        self._leave()
        if self.visit is not None:
            self.visit.end()

    def _leave(self) -> None:
        if self._counted and self.replica is not None:
            self.suspects.carried[self.replica] -= self.weight
            if self.suspects.carried[self.replica] <= 0:
                del self.suspects.carried[self.replica]
        self._counted = False

    def _allows(self, candidate: ReplicaCandidate) -> bool:
        if self.only is not None:
            return candidate.id == self.only
        if candidate.id in self.unfit:
            return False
        return not (self.strict and (candidate.id in self.avoid or candidate.id in self.suspects))

    def _rank(self, candidate: ReplicaCandidate) -> tuple[bool, bool, bool, bool, int, int, int]:
        """Return the sort key of a candidate, lower is better.

        This ingress's own count of requests is exact. Serve's queue length is seconds old, and decides only between
        equals.
        """
        return (
            candidate.id in self.suspects,
            candidate.id in self.avoid,
            bool(self.weights) and candidate.weights != self.weights,
            bool(self.numerics) and candidate.numerics != self.numerics,
            self._position(candidate.id),
            self.suspects.carried[candidate.id],
            candidate.queue_len,
        )

    def _position(self, replica: str) -> int:
        order = () if self.visit is None else tuple(self.visit.order)
        return order.index(replica) if replica in order else len(order)

    def _nowhere(self) -> None:
        self.release()
        self.replica = None
        if (self.strict or self.elsewhere or self.only is not None) and self.on_nowhere is not None:
            self.on_nowhere()


def _only(ticket: StreamId | None) -> StreamId | None:
    return ticket


def _shuffled(candidates: Sequence[ReplicaCandidate]) -> list[ReplicaCandidate]:
    """Return the candidates in random order, so that several ingresses do not all choose the same among equals."""
    return random.sample(candidates, len(candidates))
