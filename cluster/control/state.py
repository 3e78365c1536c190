"""What the control plane knows by heart, as it is kept outside its process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...replicas.updates.file import WeightFile

__all__ = [
    "FIXED",
    "SCHEMA",
    "Drain",
    "Event",
    "PolicyPlan",
    "PoolPlan",
    "Roll",
    "State",
    "Update",
    "WeightUpdate",
    "dump",
    "load",
]

SCHEMA = 1
FIXED = "fixed"  # the policy of nobody: targets are what operators say
MAX_EVENTS = 200  # that are kept


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """See `WeightFile`: as it is kept."""

    path: str
    delta: bool
    contents: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool: how many replicas are wanted, and may be.

    cost_per_hour  of one replica
    cold_start_s   from a new target to a replica that serves, until one has been seen to start
    model          folder or id that its replicas were last rolled to; empty: as the service was started
    said           the one that the fleet's file says for it, if any: where that changes, nothing is rolled any more
    weights        updates of that model's, first of all first: as many as their version says
    """

    target: int
    minimum: int = 0
    maximum: int = 1
    cost_per_hour: float = 0.0
    cold_start_s: float = 30.0
    model: str = ""
    said: str = ""
    weights: tuple[WeightUpdate, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.minimum <= self.target <= self.maximum, "0 <= minimum <= target <= maximum"


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """Who decides how many replicas there are: a policy's name, objectives in seconds, and settings of its own."""

    name: str = FIXED
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    settings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica on its way out.

    remove    nothing takes its place
    until     Unix seconds: then it goes, whatever it still has
    ended     its process has been ended, and Serve is to notice
    """

    pool: str
    remove: bool
    until: float
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Roll:
    """A pool whose replicas are being replaced.

    version  of the deployment, once it is done; drawn at the beginning, so that it is rolled once
    model    folder or id that they get
    before   the version that was there before; empty until that is to be replaced
    failed   why replicas of the new version do not start; then the one before is deployed again
    """

    version: str
    model: str = ""
    before: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """Weights that a pool's replicas are taking up, if they can: kept before any of them is asked.

    path, delta  see `WeightFile`; by, reason: who wants it, and why
    """

    path: str
    delta: bool
    by: str = ""
    reason: str = ""

    @property
    def file(self) -> WeightFile:
        return WeightFile(Path(self.path), self.delta)


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. `kind`: the name of an EventKind, in lower case. `time`: Unix seconds."""

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
        """For the log."""
        what = f"{self.before} -> {self.after}" if self.kind == "scaled" else self.replica_id
        by = f"({self.by})" if self.by else ""
        return " ".join(filter(None, (self.kind, self.pool, what, by, self.reason)))


@dataclass(frozen=True, slots=True)
class State:
    """What is to be, and what was told of it.

    generation  counts decisions
    deployment  names the last deployment by an operator: what that said of bounds has been taken over
    settled     pools that have as many replicas as are wanted, as was last told
    """

    pools: Mapping[str, PoolPlan] = field(default_factory=dict)
    generation: int = 0
    policy: PolicyPlan = PolicyPlan()
    deployment: str = ""
    drains: Mapping[str, Drain] = field(default_factory=dict)  # by replica
    rolls: Mapping[str, Roll] = field(default_factory=dict)  # by pool
    updates: Mapping[str, Update] = field(default_factory=dict)  # likewise
    events: tuple[Event, ...] = ()
    settled: frozenset[str] = frozenset()

    def files(self, pool: str) -> tuple[WeightFile, ...]:
        """That a replica takes, one after the other, to begin with the pool's weights; none of another model's."""
        plan, roll = self.pools.get(pool), self.rolls.get(pool)
        if plan is None or (roll is not None and not roll.failed and roll.model != plan.model):
            return ()
        return tuple(WeightFile(Path(one.path), one.delta, one.contents) for one in plan.weights)

    @property
    def sequence(self) -> int:
        return self.events[-1].sequence if self.events else 0

    def told(self, time: float, kind: str, **more: Any) -> State:
        """With one more event."""
        event = Event(self.sequence + 1, time, kind, **{"generation": self.generation, **more})
        return replace(self, events=(*self.events, event)[-MAX_EVENTS:])

    def leaving(self, pool: str) -> int:
        """How many replicas of it are to go, and are still there: Serve must want so many more."""
        return sum(drain.remove for drain in self.drains.values() if drain.pool == pool)


def dump(state: State) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(state), "settled": sorted(state.settled)}).encode()


def load(data: bytes) -> State:
    """Raises ValueError for what another version of Motley has kept in another form."""
    kept = json.loads(data)
    if kept.pop("schema") != SCHEMA:
        raise ValueError("the control plane's state was kept by another version of Motley")
    return State(
        pools={name: _pool_plan(**one) for name, one in kept.pop("pools").items()},
        policy=PolicyPlan(**kept.pop("policy")),
        drains={name: Drain(**one) for name, one in kept.pop("drains").items()},
        rolls={name: Roll(**one) for name, one in kept.pop("rolls").items()},
        updates={name: Update(**one) for name, one in kept.pop("updates", {}).items()},
        events=tuple(Event(**one) for one in kept.pop("events")),
        settled=frozenset(kept.pop("settled")),
        **kept,
    )


def _pool_plan(*, weights: Sequence[Mapping[str, Any]] = (), **kept: Any) -> PoolPlan:
    return PoolPlan(weights=tuple(WeightUpdate(**one) for one in weights), **kept)
