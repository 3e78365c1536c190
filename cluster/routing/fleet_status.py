"""Status of a fleet as its ingresses see it, for scaling, monitoring and queries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from ...replicas.errors import MotleyError
from ...replicas.kv.prefix.prefix_stats import PrefixStats
from ...replicas.types import ReplicaLoad, ReplicaProfile, WeightsStatus

RoutingState = Literal["ready", "suspect", "draining"]  # if ingresses disagree, the latest in this order counts
_STATES = get_args(RoutingState)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Status of one replica.

    replica_id          Serve's name of it
    age_s               age of the load in seconds
    ttft_off, tpot_off  corrections of the time to first token and of the time per token: observed over predicted
    """

    pool: str
    replica_id: str
    state: RoutingState
    profile: ReplicaProfile
    load: ReplicaLoad
    age_s: float
    ttft_off: float = 1.0
    tpot_off: float = 1.0


@dataclass(frozen=True, slots=True)
class DemandCounters:
    """Counters since the ingress began; subtract two of them for rates.

    requests       requests that came, including refused ones
    refused        requests refused because the service was full or no replica could meet the objectives
    late           requests that were served and missed an objective
    prompt_tokens  prompt tokens of the requests that came
    output_tokens  output tokens of the requests that were served
    held           requests that wait now for any replica to take them
    """

    requests: int = 0
    refused: int = 0
    late: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """Status of all replicas.

    ingress  ingress whose view it is; empty: the combined view of several
    """

    replicas: tuple[ReplicaStatus, ...]
    demand: DemandCounters
    ingress: str = ""


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """Prefix cache statistics of one replica that has just answered.

    stats  statistics of the store through which it shares prefixes; None: it does not share
    """

    pool: str
    replica_id: str
    load: ReplicaLoad
    stats: PrefixStats | None


@dataclass(frozen=True, slots=True)
class WeightStatus:
    """Result of a weight update on one replica.

    weights  the version of the weights that it has; None: it has not answered
    error    why it keeps its earlier weights; None: it has the new version
    """

    replica_id: str
    weights: WeightsStatus | None = None
    error: MotleyError | None = None


class FleetStatusMerger:
    """Combination of the views of several ingresses, which keeps the counts of ingresses that have ended."""

    def __init__(self) -> None:
        self._counted: dict[str, DemandCounters] = {}  # by ingress

    def together(self, statuses: Collection[FleetStatus]) -> FleetStatus | None:
        """Return the combined status; None if no ingress answers."""
        if not statuses:
            return None
        self._counted |= {status.ingress: status.demand for status in statuses}
        held = sum(status.demand.held for status in statuses)
        found: dict[str, ReplicaStatus] = {}
        for one in (one for status in statuses for one in status.replicas):
            found[one.replica_id] = _merge_replica(one, found.get(one.replica_id, one))
        counted = replace(_add_demand(self._counted.values()), held=held)
        return FleetStatus(tuple(found[name] for name in sorted(found)), counted)


def _merge_replica(one: ReplicaStatus, other: ReplicaStatus) -> ReplicaStatus:
    """Combine two views of a replica: the fresher load, and the worse state."""
    fresher = min(one, other, key=lambda each: each.age_s)
    return replace(fresher, state=max(one.state, other.state, key=_STATES.index))


def _add_demand(demands: Iterable[DemandCounters]) -> DemandCounters:
    each = list(demands)
    return DemandCounters(
        **{name.name: sum(getattr(one, name.name) for one in each) for name in fields(DemandCounters)}
    )
