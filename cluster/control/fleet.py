"""What the control plane wants of the fleet: to see it, and to change it. Serve's is serve_fleet.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ...replicas.updates.file import WeightFile
from ..fleet.status import FleetStatus, PrefixStatus, WeightStatus
from .state import PolicyPlan, PoolPlan

__all__ = ["Fleet", "Planned", "PoolLook", "ReplicaLook", "pool_of"]


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """A replica as Serve sees it. started: Unix seconds; node: its address, empty where it has none yet."""

    replica_id: str
    state: Literal["starting", "running", "stopping"]
    node: str = ""
    pid: int = 0
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolLook:
    """A pool as Serve sees it.

    target   what Serve wants
    version  that its replicas have or will have
    state    healthy: all of them do, and serve; failed: Serve has given up to start more
    message  why it is not healthy
    failing  why its replicas do not start; empty: they do, as far as is known
    """

    target: int
    replicas: tuple[ReplicaLook, ...] = ()
    version: str = ""
    state: Literal["healthy", "changing", "failed"] = "healthy"
    message: str = ""
    failing: str = ""

    @property
    def running(self) -> tuple[ReplicaLook, ...]:
        return tuple(one for one in self.replicas if one.state == "running")

    @property
    def starting(self) -> int:
        return sum(one.state == "starting" for one in self.replicas)


def pool_of(look: Mapping[str, PoolLook], replica_id: str) -> str | None:
    """Of a replica that serves; None: there is none of that name."""
    return next(
        (name for name, pool in look.items() if any(one.replica_id == replica_id for one in pool.running)), None
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """What was deployed last says of bounds and of who decides. name: another one when it says something else."""

    name: str
    pools: Mapping[str, PoolPlan]
    policy: PolicyPlan


class Fleet(Protocol):
    """All of it may raise MotleyError: Unavailable while Serve's controller or the ingress is away."""

    async def planned(self) -> Planned | None:
        """None where nothing is deployed."""
        ...

    async def look(self) -> Mapping[str, PoolLook]:
        """Every pool, by name."""
        ...

    async def status(self, failing: str = "") -> FleetStatus | None:
        """What the ingress knows; None where it does not tell. It is told why replicas that are wanted do not start."""
        ...

    async def pending(self, pool: str) -> str:
        """Why a pool has fewer replicas than it wants, in a sentence."""
        ...

    async def set_target(self, pool: str, replicas: int) -> None:
        """Again is as good as once."""
        ...

    async def mark(self, replica_id: str) -> bool:
        """It is never chosen again; whether that could be arranged."""
        ...

    async def flush(self, tenant: str | None) -> int:
        """Of that tenant's prefixes, or everyone's, on so many replicas."""
        ...

    async def prefixes(self) -> Sequence[PrefixStatus]:
        """Of replicas that answer."""
        ...

    async def check_weights(self, path: str) -> Path:
        """Where that file is. Raises MotleyError unless weights may be taken from there."""
        ...

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> Sequence[WeightStatus]:
        """That version of the weights, on every replica of the pool that there is. Again is as good as once."""
        ...

    async def end(self, replica_id: str) -> None:
        """End its process; Serve puts another in its place unless it wants fewer by then."""
        ...

    async def check_model(self, model: str) -> None:
        """Raises MotleyError unless a pool can be rolled to it."""
        ...

    async def redeploy(
        self, targets: Mapping[str, int], versions: Mapping[str, str], models: Mapping[str, str]
    ) -> None:
        """Deploy the application again: pools in `versions` anew, the others as they are. Again is as good as once."""
        ...
