"""Baseline routers that others use, each with the information it has in practice: its own requests or loads too."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from motley.cluster.simulation.simulated_fleet import SimulatedReplica
from motley.replicas.simulated.virtual_replica import SimulatedRequest
from motley.replicas.types import ReplicaLoad

__all__ = ["BASELINES", "BaselineRouter", "RequestCap"]

Floats = NDArray[np.float64]
TRIED = 128  # maximum replicas that are drawn, or visited on a ring, for one request
_PROMPT, _OUTPUT = 500.0, 150.0  # assumed tokens before any requests have been seen


@dataclass(frozen=True, slots=True)
class RequestCap:
    """Limit of requests in flight beyond which a router refuses: on each replica, or in proportion to speed."""

    most: int
    by_speed: bool = False

    def __str__(self) -> str:
        return f"{self.most} by speed" if self.by_speed else str(self.most)


_ALIKE = tuple(RequestCap(most) for most in (16, 32, 48, 64, 96))
_BY_SPEED = tuple(RequestCap(most, by_speed=True) for most in (32, 64, 80, 96, 112))


class BaselineRouter:
    """Router that knows its own requests in flight, and those of others from reported loads that are 0.2 to 0.4 s old.

    cap   limit of requests in flight, tuned for each router as an operator would; None: no limit
    CAPS  limits among which the best is chosen
    """

    CAPS: ClassVar[tuple[RequestCap | None, ...]] = (None, *_ALIKE, *_BY_SPEED)

    def __init__(self, fleet: Sequence[SimulatedReplica], seed: int, cap: RequestCap | None = None) -> None:
        self.size = len(fleet)
        self.rng = random.Random(f"baseline {seed}")
        # Usual requests per second at a batch of 64, which is about how cards differ in operation.
        self.prefill_s = np.array([1 / each.known.prefill_tokens_per_s for each in fleet])
        self.decode_s = np.array([each.known.step_s(64, 64 * 500) / 64 for each in fleet])
        self.speeds = 1 / (_PROMPT * self.prefill_s + _OUTPUT * self.decode_s)
        self._flying = np.zeros(self.size, dtype=int)
        self._others = np.zeros(self.size, dtype=int)
        self._changes: list[deque[tuple[float, int]]] = [deque() for _ in fleet]
        self._room = np.full(self.size, math.inf)
        if cap is not None:
            share = self.speeds / self.speeds.mean() if cap.by_speed else np.ones(self.size)
            self._room = np.maximum(2.0, cap.most * share)

    def ranked(self, now: float, job: SimulatedRequest) -> Iterator[int]:
        has_room = self._flying + self._others < self._room
        return (replica for replica in self.order(job) if has_room[replica])

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        raise NotImplementedError

    def carried(self, replica: int) -> int:
        return int(self._flying[replica] + self._others[replica])

    def sent(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._change(now, replica, 1)

    def first(self, now: float, job: SimulatedRequest, replica: int) -> None:
        pass

    def done(self, now: float, job: SimulatedRequest, replica: int) -> None:
        self._change(now, replica, -1)

    def heard(self, now: float, replica: int, load: ReplicaLoad, of: float) -> None:
        changes = self._changes[replica]
        while changes and changes[0][0] <= of:
            changes.popleft()
        mine = self._flying[replica] - sum(change for _, change in changes)  # own requests at the time of the load
        self._others[replica] = max(0, load.running + load.waiting - mine)

    def _change(self, now: float, replica: int, by: int) -> None:
        self._flying[replica] += by
        self._changes[replica].append((now, by))


class RoundRobin(BaselineRouter):
    _next = 0

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        start, self._next = self._next, (self._next + 1) % self.size
        return ((start + step) % self.size for step in range(self.size))


class RandomReplica(BaselineRouter):
    def order(self, job: SimulatedRequest) -> Iterator[int]:
        return iter(self.rng.sample(range(self.size), min(self.size, TRIED)))


class LeastRequests(BaselineRouter):
    """Router that chooses the replica with the fewest requests, at random among equals."""

    def __init__(self, fleet: Sequence[SimulatedReplica], seed: int, cap: RequestCap | None = None) -> None:
        super().__init__(fleet, seed, cap)
        self._chance = np.random.default_rng(seed)

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        return _ascending_order(self._flying + self._others + self._chance.random(self.size))


class TwoChoices(BaselineRouter):
    """Router that draws two replicas and chooses the less loaded, as Ray Serve's default does.

    Then it draws two others.

    It has one limit for all replicas, as Serve has.
    """

    CAPS = (None, *_ALIKE)

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        drawn = self.rng.sample(range(self.size), min(self.size, TRIED))
        pairs = (drawn[at : at + 2] for at in range(0, len(drawn), 2))
        return (replica for pair in pairs for replica in sorted(pair, key=self.carried))


class TwoChoicesBySpeed(TwoChoices):
    """Router of two random choices where replicas have limits in proportion to their speeds, which Serve lacks."""

    CAPS = _BY_SPEED


class PrefixAffinity(BaselineRouter):
    """Router that hashes a prompt's prefix onto a ring, and moves on along the ring from overloaded replicas.

    This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), as routers for language
    models use it. Shares of the ring and bounds of the load are in proportion to speed.
    """

    BEGINNING = 8  # blocks at the beginning of a prompt that are hashed
    BOUND = 1.25  # bound of a replica's load, as a multiple of its fair share of all requests in flight
    POINTS = 64  # points on the ring of a mean replica

    def __init__(self, fleet: Sequence[SimulatedReplica], seed: int, cap: RequestCap | None = None) -> None:
        super().__init__(fleet, seed, cap)
        self._shares = self.speeds / self.speeds.sum()
        counts = np.maximum(1, np.rint(self._shares * self.size * self.POINTS)).astype(int)
        points = (
            (_ring_position(b"%d %d" % (replica, n)), replica)
            for replica in range(self.size)
            for n in range(counts[replica])
        )
        self._points, self._replicas = zip(*sorted(points), strict=True)

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        hashes = job.hashes[: self.BEGINNING]
        at = bisect(self._points, _ring_position(hashes[-1] if hashes else self.rng.randbytes(8)))
        seen: list[int] = []
        while len(seen) < min(self.size, TRIED):
            replica = self._replicas[at % len(self._points)]
            at += 1
            if replica not in seen:
                seen.append(replica)
        room = np.maximum(1.0, self.BOUND * self._shares * (1 + int((self._flying + self._others).sum())))
        return iter(sorted(seen, key=lambda replica: self.carried(replica) >= room[replica]))


class WeightedLeastWork(BaselineRouter):
    """Router that chooses the replica with the least work in flight for its speed.

    Work is the tokens of prompts, and of answers with the mean length so far. Requests of other routers count as usual
    ones.
    """

    def __init__(self, fleet: Sequence[SimulatedReplica], seed: int, cap: RequestCap | None = None) -> None:
        super().__init__(fleet, seed, cap)
        self._mean_prompt, self._mean_output = _PROMPT, _OUTPUT
        self._work = np.zeros(self.size)
        self._costs: dict[int, float] = {}

    def order(self, job: SimulatedRequest) -> Iterator[int]:
        return _ascending_order(
            self._work + self._cost(job.prompt_tokens) + self._others * self._cost(self._mean_prompt)
        )

    def _cost(self, prompt_tokens: float) -> Floats:
        return prompt_tokens * self.prefill_s + self._mean_output * self.decode_s

    def sent(self, now: float, job: SimulatedRequest, replica: int) -> None:
        super().sent(now, job, replica)
        self._costs[id(job)] = cost = float(self._cost(job.prompt_tokens)[replica])
        self._mean_prompt += (job.prompt_tokens - self._mean_prompt) / 200
        self._work[replica] += cost

    def done(self, now: float, job: SimulatedRequest, replica: int) -> None:
        super().done(now, job, replica)
        self._work[replica] = max(0.0, self._work[replica] - self._costs.pop(id(job)))
        self._mean_output += (job.output_tokens - self._mean_output) / 200


def _ascending_order(key: Floats) -> Iterator[int]:
    """Yield all replicas, the one with the lowest key first."""
    return iter(key.argsort(kind="stable").tolist())


def _ring_position(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())


BASELINES: dict[str, type[BaselineRouter]] = {
    "round robin": RoundRobin,
    "random": RandomReplica,
    "least requests": LeastRequests,
    "two choices": TwoChoices,
    "two choices by speed": TwoChoicesBySpeed,
    "prefix affinity": PrefixAffinity,
    "weighted least work": WeightedLeastWork,
}
