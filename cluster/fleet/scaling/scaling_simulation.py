"""Simulated fleet whose replicas come and go as a scaling policy wants: they start cold, and leave once drained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from ....replicas.simulated.simulated_device import SimulatedModel
from ....replicas.simulated.virtual_replica import SimulatedRequest
from ...routing.prediction.latency_model import Slo
from ...routing.prediction.replica_speeds import profile_speed
from ...simulation.fleet_simulation import CALL, PUBLISH, FleetSimulation, SimulationOutcome, make_virtual_replica
from ...simulation.motley_router import MotleyRouter
from ...simulation.simulated_fleet import simulated_fleet
from ...simulation.traffic import Arrival
from .arrival_rates import POLICY_INTERVAL_S, ArrivalCounts
from .scaling_policy import FleetObservation, PoolObservation, ReplicaTarget, ScalingPolicy

__all__ = ["ScalingOutcome", "SimulatedPool", "simulate_scaling"]

RELEASE_S = 0.5  # interval of the attempts to place held requests


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Pool of up to `maximum` replicas on GPUs of one class, `initial` of which serve from the beginning."""

    gpu: str
    minimum: int
    maximum: int
    initial: int
    cost_per_hour: float
    cold_start_s: float


@dataclass(slots=True)
class ScalingOutcome:
    """Result of a simulation with scaling.

    cost       cost of all replicas, each from the moment it was wanted until it had drained
    decisions  targets of the policy with their times
    ready      number of ready replicas in each pool at each question to the policy, with the times
    """

    outcome: SimulationOutcome
    cost: float = 0.0
    decisions: list[tuple[float, ReplicaTarget]] = field(default_factory=list)
    ready: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)


class _ReplicaPhase(Enum):
    FREE, STARTING, READY, DRAINING = range(4)


def simulate_scaling(
    pools: Sequence[SimulatedPool], model: SimulatedModel, traffic: Iterable[Arrival], policy: ScalingPolicy, slo: Slo,
    seed: int, *, ingresses: int = 1,
) -> ScalingOutcome:  # fmt: skip
    """Simulate a fleet whose replicas come and go as a scaling policy wants, until the last request has ended.

    Requests that come while no replica serves are held until one takes them.
    """
    return _ScalingSimulation(pools, model, traffic, policy, slo, seed, ingresses).scaled()


class _ScalingSimulation(FleetSimulation):
    """Simulation of a fleet with scaling.

    Every replica that may ever exist has its number from the beginning; routers cannot use those that are absent.
    """

    def __init__(
        self, pools: Sequence[SimulatedPool], model: SimulatedModel, traffic: Iterable[Arrival], policy: ScalingPolicy,
        slo: Slo, seed: int, ingresses: int,
    ) -> None:  # fmt: skip
        self._fleet = simulated_fleet("+".join(f"{pool.maximum}*{pool.gpu}" for pool in pools), model, seed)
        self._routers_of_all = [MotleyRouter(self._fleet, slo, 1000 * seed + number) for number in range(ingresses)]
        super().__init__(self._fleet, traffic, self._routers_of_all, seed)
        self._pools = pools
        self._policy = policy
        ends = [0]
        for pool in pools:
            ends.append(ends[-1] + pool.maximum)
        self._numbers = [range(first, end) for first, end in pairwise(ends)]
        self._pool_of = [pool for pool in pools for _ in range(pool.maximum)]
        self._places = [_ReplicaPhase.FREE] * len(self._fleet)
        self._requested_s = [0.0] * len(self._fleet)
        self._turns = [0] * len(self._fleet)  # numbers of starts, to tell an abandoned start from a later one
        self._targets = [pool.initial for pool in pools]
        self._was_ready = [
            bool(pool.initial) for pool in pools
        ]  # whether a replica was ever ready, so its speed is known
        self._waiting: deque[tuple[int, SimulatedRequest]] = deque()
        self._arrivals = ArrivalCounts()  # arrivals since the policy last decided
        self._scaled = ScalingOutcome(self._outcome)

    def scaled(self) -> ScalingOutcome:
        self.run()
        for number, place in enumerate(self._places):
            if place is not _ReplicaPhase.FREE:
                self._pay(self._outcome.ended_s, number)
        return self._scaled

    @property
    def _live(self) -> bool:
        return super()._live or bool(self._waiting)

    def _start(self) -> None:
        for numbers, pool in zip(self._numbers, self._pools, strict=True):
            for number in numbers:
                self._usable(number, False)
            for number in numbers[: pool.initial]:
                self._places[number] = _ReplicaPhase.READY
                self._usable(number, True)
                self._push(self._rng.uniform(0, 0.2), PUBLISH, number)
        self._push(0.0, CALL, self._decide)

    def _arrive(self, now: float, arrival: Arrival) -> None:
        self._arrivals += ArrivalCounts(requests=1, prompt_tokens=arrival.prompt_tokens)
        if _ReplicaPhase.READY in self._places:
            super()._arrive(now, arrival)
            return
        job = self._job(arrival)
        self._waiting.append((len(self._outcome.jobs), job))
        self._outcome.jobs.append(job)
        self._outcome.replicas.append(None)

    def _publish(self, now: float, number: int) -> None:
        if self._places[number] is not _ReplicaPhase.FREE:
            super()._publish(now, number)

    def _ended(self, job: SimulatedRequest) -> None:
        self._arrivals += ArrivalCounts(output_tokens=job.output_tokens)

    def _end_step(self, now: float, number: int) -> None:
        super()._end_step(now, number)
        if self._places[number] is _ReplicaPhase.DRAINING:
            self._finish_drain(now, number)

    def _decide(self, now: float) -> None:
        states = tuple(self._state(at) for at in range(len(self._pools)))
        rates, self._arrivals = (self._arrivals + ArrivalCounts(seconds=POLICY_INTERVAL_S)).rates, ArrivalCounts()
        observed = FleetObservation(
            now,
            states,
            rates.requests,
            rates.prompt_tokens,
            rates.output_tokens,
            len(self._waiting),
            rates.cached_tokens,
        )
        by_name = {state.name: at for at, state in enumerate(states)}
        for target in self._policy.decide(observed):
            self._scaled.decisions.append((now, target))
            self._scale(now, by_name[target.pool], target.replicas)
        self._scaled.ready.append((now, tuple(state.ready for state in states)))
        self._push(now + POLICY_INTERVAL_S, CALL, self._decide)

    def _state(self, at: int) -> PoolObservation:
        pool, numbers = self._pools[at], self._numbers[at]
        ready = self._in(at, _ReplicaPhase.READY)
        loads = [self._replicas[number].load() for number in ready]
        return PoolObservation(
            pool.gpu, pool.minimum, pool.maximum, self._targets[at], len(ready), len(self._in(at,
            _ReplicaPhase.STARTING)), profile_speed(self._fleet[numbers[0]].profile()) if self._was_ready[at] else None,
            pool.cost_per_hour, pool.cold_start_s, sum(load.queued_prefill_tokens for load in loads),
            sum(load.running for load in loads), sum(load.waiting for load in loads),
        )  # fmt: skip

    def _scale(self, now: float, at: int, target: int) -> None:
        self._targets[at] = target
        there = len(self._in(at, _ReplicaPhase.STARTING)) + len(self._in(at, _ReplicaPhase.READY))
        for number in self._in(at, _ReplicaPhase.FREE)[: max(0, target - there)]:  # draining replicas cannot be reused
            self._begin_start(now, number)
        for _ in range(there - target):
            starting, ready = self._in(at, _ReplicaPhase.STARTING), self._in(at, _ReplicaPhase.READY)
            if starting:
                self._free(now, max(starting, key=self._requested_s.__getitem__))
                continue
            leaving = min(ready, key=lambda number: self._replicas[number].num_sequences)
            self._places[leaving] = _ReplicaPhase.DRAINING
            self._usable(leaving, False)
            self._finish_drain(now, leaving)

    def _begin_start(self, now: float, number: int) -> None:
        self._places[number] = _ReplicaPhase.STARTING
        self._requested_s[number] = now
        self._turns[number] += 1
        turn = self._turns[number]

        def come(then: float) -> None:
            if self._places[number] is _ReplicaPhase.STARTING and self._turns[number] == turn:
                self._come(then, number)

        self._push(now + self._pool_of[number].cold_start_s, CALL, come)

    def _come(self, now: float, number: int) -> None:
        busy_s = self._replicas[number].busy_s
        self._replicas[number] = make_virtual_replica(self._fleet[number])
        self._replicas[number].busy_s = busy_s
        self._places[number] = _ReplicaPhase.READY
        self._was_ready[self._pools.index(self._pool_of[number])] = True
        self._usable(number, True)
        self._publish(now, number)
        self._release(now)

    def _release(self, now: float) -> None:
        """Place held requests in the order of their arrival while there is capacity; try again later for the rest."""
        while self._waiting and _ReplicaPhase.READY in self._places:
            index, job = self._waiting[0]
            taken = self._outcome.replicas[index] = self._place(now, job)
            if taken is None:
                self._push(now + RELEASE_S, CALL, self._release)
                return
            self._waiting.popleft()

    def _finish_drain(self, now: float, number: int) -> None:
        if not self._replicas[number].scheduler:
            self._free(now, number)

    def _free(self, now: float, number: int) -> None:
        self._pay(now, number)
        self._places[number] = _ReplicaPhase.FREE

    def _pay(self, now: float, number: int) -> None:
        rented_s = max(0.0, now - self._requested_s[number])
        self._scaled.cost += rented_s / 3600 * self._pool_of[number].cost_per_hour

    def _in(self, at: int, place: _ReplicaPhase) -> list[int]:
        return [number for number in self._numbers[at] if self._places[number] is place]

    def _usable(self, number: int, usable: bool) -> None:
        for router in self._routers_of_all:
            router.set_usable(number, usable=usable)
