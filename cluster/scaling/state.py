"""What a scaling policy sees, and what it says. Pure: the same for a live fleet and for one in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..routing.predict import Slo, Speed

__all__ = ["Observed", "Policy", "PoolState", "Target"]


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool of like replicas.

    target         how many are wanted now; ready: that serve; starting: that will
    speed          of one replica, by its profile and what was observed; None: none has been ready yet
    cost_per_hour  of one replica
    cold_start_s   from a new target to a replica that serves
    queued_tokens  of prompts, over all its replicas; running, waiting: sequences
    """

    name: str
    minimum: int
    maximum: int
    target: int
    ready: int
    starting: int
    speed: Speed | None
    cost_per_hour: float
    cold_start_s: float
    queued_tokens: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Observed:
    """The fleet at `now` (seconds, any clock), and what came since the last look, as rates.

    held                 requests that wait since no replica is there to take them
    cached_tokens_per_s  of the prompts', found in caches
    """

    now: float
    pools: tuple[PoolState, ...]
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    held: int = 0
    cached_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    pool: str
    replicas: int
    reason: str


class Policy(Protocol):
    """Has a memory of its own: it is asked every few seconds, in order."""

    slo: Slo

    def decide(self, observed: Observed) -> tuple[Target, ...]:
        """Only of pools whose target is to change."""
        ...
