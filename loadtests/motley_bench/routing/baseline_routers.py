"""Baseline routers: an ingress with a policy that others use, and the limit of requests that an operator would set."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motley.cluster.routing.policy.routing_policies import create_routing_policy
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import SimulatedReplica
from motley.replicas.simulated.virtual_replica import SimulatedRequest

__all__ = ["BASELINES", "Baseline", "BaselineRouter", "RequestCap"]

_PROMPT, _OUTPUT = 500.0, 150.0  # tokens of a usual request


@dataclass(frozen=True, slots=True)
class RequestCap:
    """Limit of requests in flight beyond which a router refuses: on each replica, or in proportion to speed."""

    max_requests: int
    by_speed: bool = False

    def __str__(self) -> str:
        return f"{self.max_requests} by speed" if self.by_speed else str(self.max_requests)


_ALIKE = tuple(RequestCap(most) for most in (16, 32, 48, 64, 96))
_BY_SPEED = tuple(RequestCap(most, by_speed=True) for most in (32, 64, 80, 96, 112))


@dataclass(frozen=True, slots=True)
class Baseline:
    """Policy to compare with, by its name, and the limits of which the best is chosen as an operator would."""

    policy: str
    caps: tuple[RequestCap | None, ...] = (None, *_ALIKE, *_BY_SPEED)


BASELINES = {
    "round robin": Baseline("round_robin"),
    "random": Baseline("random"),
    "least requests": Baseline("least_requests"),
    "two choices": Baseline("two_choices", (None, *_ALIKE)),  # one limit for all replicas, as Ray Serve has it
    "two choices by speed": Baseline("two_choices", _BY_SPEED),  # limits that Serve lacks
    "prefix affinity": Baseline("prefix_affinity"),
    "weighted least work": Baseline("weighted_least_work"),
}


class BaselineRouter(MotleyRouter):
    """Router with another policy, which sends each request wherever that says, but to no replica at its limit.

    It knows its own requests in flight, and those of others from reported loads that are 0.2 to 0.4 s old.
    """

    def __init__(
        self, fleet: Sequence[SimulatedReplica], slo: Slo, seed: int, policy: str, cap: RequestCap | None = None
    ) -> None:
        chosen = create_routing_policy(policy, random.Random(f"baseline {seed}"))
        super().__init__(fleet, slo, seed, policy=chosen, sheds=False, prefixes=False)
        self._max_running = np.full(len(fleet), math.inf if cap is None else max(2.0, cap.max_requests))
        if cap is not None and cap.by_speed:
            # Requests per second at a batch of 64, which is about how cards differ in operation.
            speeds = 1 / np.array(
                [
                    _PROMPT / each.published.prefill_tokens_per_s + _OUTPUT * each.published.step_s(64, 64 * 500) / 64
                    for each in fleet
                ]
            )
            self._max_running = np.maximum(2.0, cap.max_requests * speeds / speeds.mean())

    def ranked(self, now: float, job: SimulatedRequest) -> list[int]:
        rows, in_flight = super().ranked(now, job), self.replicas.in_flight
        return [row for row in rows if in_flight[row] < self._max_running[row]]
