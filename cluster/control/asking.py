"""The policy that decides how many replicas there are: made of its plan, and asked now and then."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ...replicas.errors import MotleyError
from ..fleet.status import Demand, FleetStatus
from ..routing.predict import Speed
from ..scaling.arrivals import ASK_S, Arrivals, Rates
from ..scaling.state import Policy, Target
from .fleet import PoolLook
from .observe import arrived, cached, caches, observed, speeds
from .policies import policy_of
from .state import PolicyPlan, State

log = logging.getLogger(__name__)


class Asking:
    """Looks are many between two questions, and what came is counted at each. Nobody is asked while no ingress tells.

    rates   between the last two looks
    failed  why it could not be made, or did not answer when it was asked last; empty: it did
    """

    def __init__(self) -> None:
        self.rates = Rates()
        self.failed = ""
        self._came = Arrivals()  # since the last question
        self._counted: tuple[float, Demand] | None = None
        self._caches: dict[str, int] = {}  # what each replica had found in its cache, likewise
        self._speeds: dict[str, Speed] = {}  # of pools, also of those that have no replica by now
        self._policy: Policy | None = None
        self._made_of = PolicyPlan()  # `fixed`, of which nothing is made

    def saw(self, now: float, status: FleetStatus) -> None:
        came = arrived(self._counted, now, status.demand, cached(self._caches, status))
        self.rates = came.rates
        self._came += came
        self._counted, self._caches = (now, status.demand), caches(status)
        self._speeds |= speeds(status)

    def ask(
        self,
        now: float,
        state: State,
        look: Mapping[str, PoolLook],
        status: FleetStatus | None,
        cold_start_s: Mapping[str, float],
    ) -> Sequence[Target]:
        """What it wants; nothing where it is not its time, or it has failed: then the fleet stays as it is."""
        try:
            if state.policy != self._made_of:
                self._policy, self._made_of, self.failed = None, state.policy, ""
                self._policy = policy_of(state.policy)
            if self._came.seconds < ASK_S or status is None:  # what runs and waits is not known without it
                return ()
            rates, self._came = self._came.rates, Arrivals()
            if self._policy is None:
                return ()
            wanted = self._policy.decide(observed(now, state, look, status, rates, cold_start_s, self._speeds))
        except Exception as error:  # whatever it is: what is seen of the fleet must not end with it
            log.exception("the policy %s fails", state.policy.name)
            said = error.message if isinstance(error, MotleyError) else f"{type(error).__name__}: {error}"
            self.failed = " ".join(said.split())
            return ()
        self.failed = ""
        return wanted
