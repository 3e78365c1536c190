"""Interface of the fleet to the control plane, which reads and changes it.

Ray Serve implements it in serve_backend.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from .....replicas.updates.weight_file import WeightFile
from ....routing.explanation.route_explanation import FoundRoutes
from ....routing.fleet_status import FleetStatus, PrefixStatus, WeightStatus
from ..state.control_state import PolicyPlan, PoolPlan


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A replica as Serve sees it.

    node     IP address of its node; empty while it has none
    started  start time in Unix seconds
    """

    replica_id: str
    state: Literal["starting", "running", "stopping"]
    node: str = ""
    pid: int = 0
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool as Serve sees it.

    target     number of replicas that Serve aims for
    version    version of the deployment that its replicas have or will have
    state      healthy: all replicas have the version and serve; failed: Serve has given up starting more
    message    why it is not healthy
    failing    why its replicas do not start; empty: they do, as far as is known
    placeable  False: it is known that no node could ever hold a replica
    """

    target: int
    replicas: tuple[ReplicaSnapshot, ...] = ()
    version: str = ""
    state: Literal["healthy", "changing", "failed"] = "healthy"
    message: str = ""
    failing: str = ""
    placeable: bool = True

    @property
    def running(self) -> tuple[ReplicaSnapshot, ...]:
        return tuple(one for one in self.replicas if one.state == "running")

    @property
    def starting(self) -> int:
        return sum(one.state == "starting" for one in self.replicas)


def pool_of_replica(snapshots: Mapping[str, PoolSnapshot], replica_id: str) -> str | None:
    """Return the pool of a serving replica; None if no serving replica has that name."""
    return next(
        (name for name, pool in snapshots.items() if any(one.replica_id == replica_id for one in pool.running)), None
    )


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """Bounds of the pools and scaling policy of the last deployment.

    name  digest of its content, so that another deployment with the same content has the same name
    """

    name: str
    pools: Mapping[str, PoolPlan]
    policy: PolicyPlan


class FleetBackend(Protocol):
    """Fleet that the control plane reads and changes.

    Every method may raise MotleyError, and Unavailable while Serve's controller or the ingress does not answer.
    """

    async def planned(self) -> PlannedFleet | None:
        """Return what the last deployment planned; None if nothing is deployed."""
        ...

    async def snapshots(self) -> Mapping[str, PoolSnapshot]:
        """Return all pools by name."""
        ...

    async def status(self, failing: str = "") -> FleetStatus | None:
        """Return what the ingress knows of the replicas; None if it does not answer.

        failing  tells the ingress why wanted replicas do not start
        """
        ...

    async def pending(self, pool: str) -> str:
        """Return in one sentence why a pool has fewer replicas than it wants."""
        ...

    async def set_target(self, pool: str, replicas: int) -> None:
        """Set the number of replicas that Serve aims for. Repeating the call does no harm."""
        ...

    async def mark(self, replica_id: str) -> bool:
        """Make a replica refuse new requests for good; return whether that succeeded."""
        ...

    async def flush(self, tenant: str | None) -> int:
        """Drop the cached prefixes of one tenant, or of all (None); return on how many replicas."""
        ...

    async def prefixes(self) -> Sequence[PrefixStatus]:
        """Return the prefix cache statistics of the replicas that answer."""
        ...

    async def explain(self, request: str) -> FoundRoutes:
        """Return where the latest requests of that id went, of all ingresses."""
        ...

    async def check_weights(self, path: str) -> Path:
        """Return the path of a weight file. Raises MotleyError unless weights may be read from there."""
        ...

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> Sequence[WeightStatus]:
        """Bring that version of the weights to every replica of the pool. Repeating the call does no harm."""
        ...

    async def end(self, replica_id: str) -> None:
        """End a replica's process; Serve starts another in its place unless it wants fewer by then."""
        ...

    async def check_model(self, model: str) -> None:
        """Raise MotleyError unless a pool can be rolled to this model."""
        ...

    async def redeploy(
        self, targets: Mapping[str, int], versions: Mapping[str, str], models: Mapping[str, str]
    ) -> None:
        """Deploy the application again, with new replicas for the pools in `versions` and no change to the others.

        Repeating the call does no harm.
        """
        ...
