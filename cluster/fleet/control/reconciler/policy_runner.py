"""Calls of the scaling policy that decides how many replicas there are: built from its plan, and asked at intervals."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .....replicas.errors import MotleyError
from ....routing.fleet_status import DemandCounters, FleetStatus
from ....routing.prediction.latency_model import ReplicaSpeed
from ...scaling.arrival_rates import POLICY_INTERVAL_S, ArrivalCounts, ArrivalRates
from ...scaling.scaling_policy import ReplicaTarget, ScalingPolicy
from ..backend.fleet_backend import PoolSnapshot
from ..state.control_state import ControlState, PolicyPlan
from .fleet_observation import (
    cached_tokens_by_replica,
    count_arrivals,
    count_cached_tokens,
    observe_fleet,
    speeds_by_pool,
)
from .policy_selection import make_policy

log = logging.getLogger(__name__)


class PolicyRunner:
    """Scaling policy of the control plane, with the arrivals that it is given.

    The fleet is looked at many times between two decisions of the policy, and the arrivals are summed over these. The
    policy is not asked while no ingress reports.

    rates   rates of requests and tokens between the last two looks at the fleet
    failed  why the policy could not be built, or did not decide when last called; empty: it did
    """

    def __init__(self) -> None:
        self.rates = ArrivalRates()
        self.failed = ""
        self._arrivals = ArrivalCounts()  # arrivals since the policy last decided
        self._counted: tuple[float, DemandCounters] | None = None
        self._caches: dict[str, int] = {}  # cached tokens that each replica had found at the last look
        self._speeds: dict[str, ReplicaSpeed] = {}  # speeds of pools, kept while they have no replica
        self._policy: ScalingPolicy | None = None
        self._made_of = PolicyPlan()  # plan that the policy was built from; `fixed` builds none

    def saw(self, now: float, status: FleetStatus) -> None:
        arrivals = count_arrivals(self._counted, now, status.demand, count_cached_tokens(self._caches, status))
        self.rates = arrivals.rates
        self._arrivals += arrivals
        self._counted, self._caches = (now, status.demand), cached_tokens_by_replica(status)
        self._speeds |= speeds_by_pool(status)

    def decide(
        self,
        now: float,
        state: ControlState,
        snapshots: Mapping[str, PoolSnapshot],
        status: FleetStatus | None,
        cold_start_s: Mapping[str, float],
    ) -> Sequence[ReplicaTarget]:
        """Return the policy's targets.

        Empty if it is not time to decide or the policy fails: then the fleet stays as it is.
        """
        try:
            if state.policy != self._made_of:
                self._policy, self._made_of, self.failed = None, state.policy, ""
                self._policy = make_policy(state.policy)
            # A policy needs to know what runs and waits.
            if self._arrivals.seconds < POLICY_INTERVAL_S or status is None:
                return ()
            rates, self._arrivals = self._arrivals.rates, ArrivalCounts()
            if self._policy is None:
                return ()
            targets = self._policy.decide(
                observe_fleet(now, state, snapshots, status, rates, cold_start_s, self._speeds)
            )
        except Exception as error:  # a policy's fault, whatever it is, must not end the control loop
            log.exception("the scaling policy %s failed; nothing is scaled until it works again", state.policy.name)
            said = error.message if isinstance(error, MotleyError) else f"{type(error).__name__}: {error}"
            self.failed = " ".join(said.split())
            return ()
        self.failed = ""
        return targets
