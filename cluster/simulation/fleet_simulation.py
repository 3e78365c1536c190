"""Simulation of a fleet in virtual time: requests arrive, routers place them, replicas take their time.

The same seeds give the same result.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...replicas.errors import Overloaded
from ...replicas.sampling_params import SamplingParams
from ...replicas.simulated.virtual_replica import SimulatedRequest, VirtualReplica
from ...replicas.types import ReplicaLoad, Request
from .simulated_fleet import SimulatedReplica
from .traffic import Arrival, arrival_block_hashes

PUBLISH_S = 0.2  # interval at which replicas publish their loads
HEARD_S = 0.2  # delay until routers hear of a load, so that what they know is 0.2 to 0.4 s old
_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)


ReplicaFactory = Callable[[SimulatedReplica], VirtualReplica]


class SimulatedRouter(Protocol):
    """Router of one ingress. Replicas are numbers, times are in seconds. It must not look at `job.output_tokens`.

    ranked             replicas in the order in which to try them; none: nobody can serve the job in time
    sent, first, done  called when a job of its own was placed, had its first token, and ended
    heard              called with a replica's load as it was at `of`
    """

    def ranked(self, now: float, job: SimulatedRequest) -> Iterable[int]: ...
    def sent(self, now: float, job: SimulatedRequest, replica: int) -> None: ...
    def first(self, now: float, job: SimulatedRequest, replica: int) -> None: ...
    def done(self, now: float, job: SimulatedRequest, replica: int) -> None: ...
    def heard(self, now: float, replica: int, load: ReplicaLoad, of: float) -> None: ...


@dataclass(slots=True)
class SimulationOutcome:
    """Result of a simulation.

    jobs      all requests in the order of their arrival
    replicas  the replica of each request; None: nobody took it
    refusals  refusals by replicas that were full
    ended_s   time of the last arrival or end of a step
    busy_s    seconds that each replica computed
    """

    jobs: list[SimulatedRequest] = field(default_factory=list)
    replicas: list[int | None] = field(default_factory=list)
    refusals: int = 0
    ended_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LoadReport:
    """A published load of a replica, as it was at the time `of`."""

    replica: int
    load: ReplicaLoad
    of: float


_ARRIVAL, _STEP, _HEARD, PUBLISH, CALL = range(5)


def simulate(
    fleet: Sequence[SimulatedReplica],
    traffic: Iterable[Arrival],
    routers: Sequence[SimulatedRouter],
    seed: int,
    *,
    heard_s: float = HEARD_S,
    until_s: float = math.inf,
    make: ReplicaFactory | None = None,
) -> SimulationOutcome:
    """Simulate a fleet until the last request has ended. Each request comes to one of the routers, chosen at random.

    until_s  end once all requests that came before this have ended; later ones only add load
    make     makes replicas of another kind than `make_virtual_replica` does
    """
    return FleetSimulation(fleet, traffic, routers, seed, heard_s=heard_s, until_s=until_s, make=make).run()


def make_virtual_replica(replica: SimulatedReplica) -> VirtualReplica:
    return VirtualReplica(
        replica.name, replica.true, max_batch_tokens=replica.max_batch_tokens, max_running=replica.max_running,
        num_blocks=replica.published.num_blocks,
    )  # fmt: skip


class FleetSimulation:
    def __init__(
        self,
        fleet: Sequence[SimulatedReplica],
        traffic: Iterable[Arrival],
        routers: Sequence[SimulatedRouter],
        seed: int,
        *,
        heard_s: float = HEARD_S,
        until_s: float = math.inf,
        make: ReplicaFactory | None = None,
    ) -> None:
        self._heard_s, self._until_s = heard_s, until_s
        self._rng = random.Random(f"simulation {seed}")
        self._replicas = list(map(make or make_virtual_replica, fleet))
        self._traffic = iter(traffic)
        self._routers = routers
        self._router_of: dict[int, tuple[SimulatedRouter, int]] = {}  # by id of the job
        self._awaited = 0  # number of these that were sent before `until_s`
        self._events: list[tuple[float, int, int, object]] = []
        self._order = itertools.count()
        self._outcome = SimulationOutcome()
        self._prompts: dict[int, tuple[int, ...]] = {}

    def run(self) -> SimulationOutcome:
        self._start()
        self._next_arrival()
        while self._live:
            now, _, kind, what = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                assert isinstance(what, Arrival)
                self._next_arrival()
                self._arrive(now, what)
            elif kind == _STEP:
                assert isinstance(what, int)
                self._end_step(now, what)
            elif kind == PUBLISH:
                assert isinstance(what, int)
                self._publish(now, what)
            elif kind == CALL:
                assert callable(what)
                what(now)
            else:
                assert isinstance(what, _LoadReport)
                for router in self._routers:
                    router.heard(now, what.replica, what.load, what.of)
            if kind in (_ARRIVAL, _STEP):
                self._outcome.ended_s = now
        self._outcome.busy_s = [replica.busy_s for replica in self._replicas]
        return self._outcome

    def _start(self) -> None:
        for number in range(len(self._replicas)):
            self._push(self._rng.uniform(0, PUBLISH_S), PUBLISH, number)

    @property
    def _live(self) -> bool:
        """Whether requests are still to come or awaited, beside published loads and requests that nobody waits for."""
        return self._more or self._awaited > 0

    def _publish(self, now: float, number: int) -> None:
        self._push(now + self._heard_s, _HEARD, _LoadReport(number, self._replicas[number].load(), now))
        self._push(now + PUBLISH_S, PUBLISH, number)

    def _push(self, at: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, what))

    def _next_arrival(self) -> None:
        arrival = next(self._traffic, None)
        self._more = arrival is not None and arrival.at_s < self._until_s
        if arrival is not None:
            self._push(arrival.at_s, _ARRIVAL, arrival)

    def _arrive(self, now: float, arrival: Arrival) -> None:
        job = self._job(arrival)
        self._outcome.jobs.append(job)
        self._outcome.replicas.append(self._place(now, job))

    def _place(self, now: float, job: SimulatedRequest) -> int | None:
        router = self._rng.choice(self._routers)
        for number in router.ranked(now, job):
            replica = self._replicas[number]
            if not replica.holds(job):
                continue
            try:
                replica.add(now, job)
            except Overloaded:
                self._outcome.refusals += 1
                continue
            router.sent(now, job, number)
            self._router_of[id(job)] = router, number
            self._awaited += now < self._until_s
            if replica.idle:
                self._begin(now, number)
            else:
                self._push(replica.ends, _STEP, number)  # steps that were merged may end earlier now
            return number
        return None

    def _begin(self, now: float, number: int) -> None:
        ends, wakes = self._replicas[number].begin(now), self._replicas[number].wakes
        if ends is not None:
            self._push(ends, _STEP, number)
        elif wakes is not None:
            self._push(wakes, CALL, partial(self._wake, number))

    def _wake(self, number: int, now: float) -> None:
        if self._replicas[number].idle:
            self._begin(now, number)

    def _end_step(self, now: float, number: int) -> None:
        replica = self._replicas[number]
        if replica.idle or replica.ends != now:
            return  # the step ended earlier, or another one has begun since
        for job in replica.end(now):
            router, _ = self._router_of[id(job)]
            if job.first_s == now:
                router.first(now, job, number)
            if job.done_s is not None:
                router.done(now, job, number)
                self._ended(job)
                del self._router_of[id(job)]
                self._awaited -= job.sent_s < self._until_s
        self._begin(now, number)

    def _ended(self, job: SimulatedRequest) -> None:
        """Handle the end of a job; for subclasses that count."""

    def _job(self, arrival: Arrival) -> SimulatedRequest:
        prompt = self._prompts.setdefault(arrival.prompt_tokens, (0,) * arrival.prompt_tokens)
        request = Request("", prompt, _SAMPLING, tenant=arrival.tenant)
        return SimulatedRequest(request, arrival.output_tokens, arrival_block_hashes(arrival), arrival.at_s)
