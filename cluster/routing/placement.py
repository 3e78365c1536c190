"""Which replica an attempt goes to: what is known of the candidates, and the choice. Pure."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...replicas.trunk import Ticket
from .visit import Visit

SUSPECT_S = 30.0  # by then Serve has replaced a replica that hangs, or it has shown that it lives


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the router sees it. `queue_len`: requests it carried when Serve last heard of that.

    weights  digest of those that requests begin with there, as ReplicaLoad has it; empty: nobody has said
    """

    id: str
    numerics: str = ""
    queue_len: int = 0
    weights: str = ""


class Suspects:
    """Replicas that were lost lately. They come last, and must answer a probe before they get a request.

    carried   what this ingress has on each replica right now: Serve's queue lengths come later
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self.carried: Counter[str] = Counter()

    def add(self, replica: str) -> None:
        self._until[replica] = self._clock() + SUSPECT_S

    def clear(self, replica: str) -> None:
        """It has shown that it lives."""
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
    """Where one attempt of a request may go, and where it went.

    It goes along with the request, by its last argument, as far as Serve's router in this process; to a
    replica it travels as its `ticket`.

    avoid      replicas this request has failed on: they come last
    strict     they do not come at all, and neither do suspects: no other replica ends the attempt
    suspects   replicas any request has failed on
    numerics   the class that began the answer: replicas of others come after; empty: any
    weights    digest of those that the answer was made with so far: likewise, and before numerics
    only       the one replica it is meant for
    unfit      replicas whose contexts are too short: they do not come at all
    weight     how many requests go there together
    visit      by whose order replicas come where nothing above decides, and which is told where it goes; None: by what
               this ingress has on each
    pool       out: that of the call
    elsewhere  other pools have replicas: there is no use in waiting for those of this one
    ticket     by which the replica may send messages together with those of others (trunks.py); None: it may not
    replica    out: the one it was sent to last; None while it waits for one
    found      out: the numerics class of that replica
    seen       out: all replicas there were
    on_nowhere called when there is no replica that it may go to and no use in waiting
    """

    suspects: Suspects
    avoid: frozenset[str] = frozenset()
    strict: bool = False
    numerics: str = ""
    weights: str = ""
    only: str | None = None
    unfit: frozenset[str] = frozenset()
    weight: int = 1
    visit: Visit | None = None
    pool: str = ""
    elsewhere: bool = False
    ticket: Ticket | None = None
    replica: str | None = None
    found: str = ""
    seen: frozenset[str] = frozenset()
    on_nowhere: Callable[[], None] | None = None
    asked: set[str] = field(default_factory=set)  # out: in this round
    _counted: bool = False

    def __reduce__(self) -> tuple[Callable[[Ticket | None], Ticket | None], tuple[Ticket | None]]:
        return _only, (self.ticket,)

    def choose(self, candidates: Iterable[Candidate]) -> tuple[Candidate | None, bool]:
        """The next replica to ask, and whether to wait a little before asking once more.

        None: no candidate will do. Each is asked once before any is asked again.
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

    def choose_best(self, candidates: Mapping[str, Candidate]) -> Candidate | None:
        """The next one of the visit's order, without a look at all of them; None: `choose` is to."""
        if self.visit is None or self.only is not None:
            return None
        for name in self.visit.order:
            if name not in self.asked and (chosen := candidates.get(name)) is not None and self._allows(chosen):
                self._take(chosen)
                return chosen
        return None

    def _take(self, chosen: Candidate) -> None:
        self.asked.add(chosen.id)
        self._leave()
        self.replica, self.found = chosen.id, chosen.numerics
        if self.only is None:
            self._counted = True
            self.suspects.carried[chosen.id] += self.weight
        if self.visit is not None:
            self.visit.to(chosen.id)

    def release(self) -> None:
        """The replica no longer carries it."""
        self._leave()
        if self.visit is not None:
            self.visit.end()

    def _leave(self) -> None:
        if self._counted and self.replica is not None:
            self.suspects.carried[self.replica] -= self.weight
            if self.suspects.carried[self.replica] <= 0:
                del self.suspects.carried[self.replica]
        self._counted = False

    def _allows(self, candidate: Candidate) -> bool:
        if self.only is not None:
            return candidate.id == self.only
        if candidate.id in self.unfit:
            return False
        return not (self.strict and (candidate.id in self.avoid or candidate.id in self.suspects))

    def _rank(self, candidate: Candidate) -> tuple[bool, bool, bool, bool, int, int, int]:
        """What this ingress has there is exact; Serve's figure is seconds old, and decides only between equals."""
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


def _only(ticket: Ticket | None) -> Ticket | None:
    return ticket


def _shuffled(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Ties fall at random, so that several ingresses do not herd."""
    return random.sample(candidates, len(candidates))
