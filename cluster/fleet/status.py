"""A fleet as its ingresses see it: what their routers know, for whoever scales, watches or asks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from ...replicas.errors import MotleyError
from ...replicas.prefix.told import PrefixStats
from ...replicas.protocol import ReplicaLoad, ReplicaProfile, WeightsTold

__all__ = ["Demand", "FleetStatus", "Gathered", "PrefixStatus", "ReplicaStatus", "WeightStatus"]


State = Literal["ready", "suspect", "draining"]  # in the order in which views of several give way
_STATES = get_args(State)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica.

    replica_id  Serve's name for it
    age_s       how old the load is
    ttft_off    times to the first token, observed over predicted, as corrections have it; tpot_off: likewise per token
    """

    pool: str
    replica_id: str
    state: State
    profile: ReplicaProfile
    load: ReplicaLoad
    age_s: float
    ttft_off: float = 1.0
    tpot_off: float = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Counted since the ingress began: whoever wants rates subtracts.

    requests       that came, refused ones too
    refused        for want of room, or since no replica could meet the objectives
    late           that were served and missed an objective
    prompt_tokens  of those that came; output_tokens: of those that were served
    held           right now: requests that wait for any replica to take them
    """

    requests: int = 0
    refused: int = 0
    late: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """`ingress`: whose view it is; empty: several."""

    replicas: tuple[ReplicaStatus, ...]
    demand: Demand
    ingress: str = ""


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """Of one replica that has just answered. stats: of what it shares prefixes through; None: it does not."""

    pool: str
    replica_id: str
    load: ReplicaLoad
    stats: PrefixStats | None


@dataclass(frozen=True, slots=True)
class WeightStatus:
    """What became of one replica's weights. error: why they are what they were; None: they are of the new version.

    told  of the version that it has; None: it has not answered
    """

    replica_id: str
    told: WeightsTold | None = None
    error: MotleyError | None = None


class Gathered:
    """What several ingresses know, as one. Remembers what those that have ended have counted: it came as well."""

    def __init__(self) -> None:
        self._counted: dict[str, Demand] = {}  # by ingress

    def together(self, seen: Collection[FleetStatus]) -> FleetStatus | None:
        """None where no ingress tells."""
        if not seen:
            return None
        self._counted |= {status.ingress: status.demand for status in seen}
        held = sum(status.demand.held for status in seen)
        found: dict[str, ReplicaStatus] = {}
        for one in (one for status in seen for one in status.replicas):
            found[one.replica_id] = _both(one, found.get(one.replica_id, one))
        counted = replace(_sum(self._counted.values()), held=held)
        return FleetStatus(tuple(found[name] for name in sorted(found)), counted)


def _both(one: ReplicaStatus, other: ReplicaStatus) -> ReplicaStatus:
    """The fresher load, and the worse of what is thought of it."""
    fresher = min(one, other, key=lambda each: each.age_s)
    return replace(fresher, state=max(one.state, other.state, key=_STATES.index))


def _sum(demands: Iterable[Demand]) -> Demand:
    each = list(demands)
    return Demand(**{name.name: sum(getattr(one, name.name) for one in each) for name in fields(Demand)})
