"""Input and output of scaling policies. Pure: the same for a live fleet and a simulated one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...routing.prediction.latency_model import ReplicaSpeed, Slo


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """State of one pool of equal replicas.

    target            wanted number of replicas
    ready, starting   replicas that serve, and that will
    speed             speed of one replica, by its profile and observations; None: none has been ready yet
    cost_per_hour     cost of one replica
    cold_start_s      seconds from a new target until a replica serves
    queued_tokens     waiting prompt tokens on all of its replicas
    running, waiting  running and waiting sequences on all of its replicas
    placeable         whether a replica may be placed at all; False: it is known that no machine can hold one
    """

    name: str
    minimum: int
    maximum: int
    target: int
    ready: int
    starting: int
    speed: ReplicaSpeed | None
    cost_per_hour: float
    cold_start_s: float
    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0
    placeable: bool = True


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """State of the fleet at `now` (in seconds of any clock), and the rates of arrivals since the last observation.

    held                 requests that wait because there is no replica to take them
    cached_tokens_per_s  prompt tokens that were found in caches
    """

    now: float
    pools: tuple[PoolObservation, ...]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    held: int = 0
    cached_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    pool: str
    replicas: int
    reason: str


class ScalingPolicy(Protocol):
    """Scaling policy. It has a memory of its own, so it is asked every few seconds, in order."""

    slo: Slo

    def decide(self, observed: FleetObservation) -> tuple[ReplicaTarget, ...]:
        """Return new targets, only for the pools whose target is to change."""
        ...
