"""State of the control plane, as it is kept outside its process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .....replicas.updates.weight_file import WeightFile

SCHEMA = 1
FIXED = "fixed"  # policy that decides nothing: operators set the targets
MAX_EVENTS = 200  # maximum number of events that are kept


@dataclass(frozen=True, slots=True)
class AppliedWeightUpdate:
    """One completed weight update, as it is kept; the fields are those of `WeightFile`."""

    path: str
    delta: bool
    contents: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Plan of a pool: how many replicas are wanted, and within which bounds.

    cost_per_hour  cost of one replica
    cold_start_s   seconds from a new target until a replica serves, used until a start has been observed
    model          folder or id of the model that its replicas were last rolled to; empty: as the service was started
    said           model that the fleet file names for it, if any: when that changes, an earlier roll no longer counts
    weights        updates of that model's weights, oldest first; their number is the version of the weights
    """

    target: int
    minimum: int = 0
    maximum: int = 1
    cost_per_hour: float = 0.0
    cold_start_s: float = 30.0
    model: str = ""
    said: str = ""
    weights: tuple[AppliedWeightUpdate, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.minimum <= self.target <= self.maximum, "0 <= minimum <= target <= maximum"


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """Scaling policy that decides how many replicas there are: name, objectives in seconds, and settings of its own."""

    name: str = FIXED
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaDrain:
    """A replica that is leaving.

    remove  no other replica takes its place
    until   Unix seconds after which it leaves whatever it still has to do
    ended   its process has been ended, which Serve has yet to notice
    """

    pool: str
    remove: bool
    until: float
    ended: bool = False


@dataclass(frozen=True, slots=True)
class PoolRollout:
    """Roll of a pool, whose replicas are being replaced.

    version  version of the deployment at the end; chosen at the beginning, so that it is deployed only once
    model    folder or id of the new model
    before   version before the roll; empty until it is known
    failed   why replicas of the new version do not start; then the version before is deployed again
    """

    version: str
    model: str = ""
    before: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class OngoingWeightUpdate:
    """Weight update that a pool's replicas are performing; kept before any of them is asked.

    path, delta  see `WeightFile`
    by, reason   who wants it, and why
    """

    path: str
    delta: bool
    by: str = ""
    reason: str = ""

    @property
    def file(self) -> WeightFile:
        return WeightFile(Path(self.path), self.delta)


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Event of the fleet: a decision, or what became of one.

    sequence       number of the event, counted from 1
    time           Unix seconds
    kind           name of an EventKind, in lower case
    before, after  number of replicas or version of the weights, for kinds that change these
    generation     number of decisions so far
    by, reason     who decided it, and why
    """

    sequence: int
    time: float
    kind: str
    pool: str = ""
    replica_id: str = ""
    before: int = 0
    after: int = 0
    generation: int = 0
    by: str = ""
    reason: str = ""

    @property
    def line(self) -> str:
        """One line for the log."""
        what = f"{self.before} -> {self.after}" if self.kind == "scaled" else self.replica_id
        by = f"({self.by})" if self.by else ""
        return " ".join(filter(None, (self.kind, self.pool, what, by, self.reason)))


@dataclass(frozen=True, slots=True)
class ControlState:
    """Decisions of the control plane, and the events that were recorded.

    generation  number of decisions so far
    deployment  name of the operator's last deployment whose bounds have been taken over
    drains      replicas that are leaving, by replica
    rolls       rolls under way, by pool
    updates     weight updates under way, by pool
    settled     pools whose last event says that they have as many replicas as are wanted
    """

    pools: Mapping[str, PoolPlan] = field(default_factory=dict)
    generation: int = 0
    policy: PolicyPlan = PolicyPlan()
    deployment: str = ""
    drains: Mapping[str, ReplicaDrain] = field(default_factory=dict)  # by replica
    rolls: Mapping[str, PoolRollout] = field(default_factory=dict)  # by pool
    updates: Mapping[str, OngoingWeightUpdate] = field(default_factory=dict)  # by pool
    events: tuple[FleetEvent, ...] = ()
    settled: frozenset[str] = frozenset()

    def files(self, pool: str) -> tuple[WeightFile, ...]:
        """Return the weight files that a new replica of the pool applies in order; none if it gets another model."""
        plan, roll = self.pools.get(pool), self.rolls.get(pool)
        if plan is None or (roll is not None and not roll.failed and roll.model != plan.model):
            return ()
        return tuple(WeightFile(Path(one.path), one.delta, one.contents) for one in plan.weights)

    @property
    def sequence(self) -> int:
        return self.events[-1].sequence if self.events else 0

    def with_event(self, time: float, kind: str, **more: Any) -> ControlState:
        """Return the state with one more event."""
        event = FleetEvent(self.sequence + 1, time, kind, **{"generation": self.generation, **more})
        return replace(self, events=(*self.events, event)[-MAX_EVENTS:])

    def leaving(self, pool: str) -> int:
        """Return how many of the pool's replicas are to be removed and still exist; Serve's target includes these."""
        return sum(drain.remove for drain in self.drains.values() if drain.pool == pool)


def encode_state(state: ControlState) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(state), "settled": sorted(state.settled)}).encode()


def decode_state(data: bytes) -> ControlState:
    """Parse a kept state. Raises ValueError for one that another version of Motley kept in another form."""
    record = json.loads(data)
    if record.pop("schema") != SCHEMA:
        raise ValueError("the control plane's state was kept by another version of Motley")
    return ControlState(
        pools={name: _pool_plan(**one) for name, one in record.pop("pools").items()},
        policy=PolicyPlan(**record.pop("policy")),
        drains={name: ReplicaDrain(**one) for name, one in record.pop("drains").items()},
        rolls={name: PoolRollout(**one) for name, one in record.pop("rolls").items()},
        updates={name: OngoingWeightUpdate(**one) for name, one in record.pop("updates", {}).items()},
        events=tuple(FleetEvent(**one) for one in record.pop("events")),
        settled=frozenset(record.pop("settled")),
        **record,
    )


def _pool_plan(*, weights: Sequence[Mapping[str, Any]] = (), **record: Any) -> PoolPlan:
    return PoolPlan(weights=tuple(AppliedWeightUpdate(**one) for one in weights), **record)
