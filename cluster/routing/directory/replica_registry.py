"""Registry of the replicas that this process knows: Serve's routers, one for each pool, report to its listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakSet

from ....replicas.engine.streams.profile_text import profile_from_text
from ....replicas.types import ReplicaLoad, ReplicaProfile


@dataclass(frozen=True, slots=True)
class PublishedReplica:
    """State of a replica as Serve knows it: metadata, published when it became ready, and its latest statistics."""

    metadata: Mapping[str, Any]
    stats: Mapping[str, Any]


class ReplicaListener(Protocol):
    """Receiver of changes in the registry of replicas, called in the thread of Serve's router.

    With calls by gRPC (ray_settings.py) that is the thread of the ingress.
    """

    def joined(self, profile: ReplicaProfile) -> None: ...
    def left(self, replica: str) -> None: ...
    def reported(self, replica: str, load: ReplicaLoad) -> None: ...


class ReplicaRegistry:
    """Registry of replicas by pool and name. A listener is notified of those that exist, and then of every change."""

    def __init__(self) -> None:
        self._profiles: dict[str, dict[str, ReplicaProfile]] = {}  # by pool
        self._stats: dict[str, Mapping[str, Any]] = {}  # by replica
        self._listeners: WeakSet[ReplicaListener] = WeakSet()

    def listen(self, listener: ReplicaListener) -> None:
        self._listeners.add(listener)
        for replicas in self._profiles.values():
            for name, profile in replicas.items():
                listener.joined(profile)
                if (load := _load(self._stats[name])) is not None:
                    listener.reported(name, load)

    def update(self, pool: str, replicas: Mapping[str, PublishedReplica]) -> None:
        """Replace the pool's replicas with those that exist now.

        A replica that has published no profile is left out.
        """
        profiles = self._profiles.setdefault(pool, {})
        for name in [name for name in profiles if name not in replicas]:
            self.gone(pool, name)
        for name, published in replicas.items():
            if name not in profiles and "profile" in published.metadata:
                profile = replace(profile_from_text(published.metadata["profile"]), replica_id=name, pool=pool)
                profiles[name], self._stats[name] = profile, {}
                for listener in list(self._listeners):
                    listener.joined(profile)
            if name in profiles and published.stats is not self._stats[name] and published.stats != self._stats[name]:
                self._stats[name] = published.stats
                if (load := _load(published.stats)) is not None:
                    for listener in list(self._listeners):
                        listener.reported(name, load)

    def gone(self, pool: str, replica: str) -> None:
        if self._profiles.get(pool, {}).pop(replica, None) is None:
            return
        del self._stats[replica]
        for listener in list(self._listeners):
            listener.left(replica)


def _load(stats: Mapping[str, Any]) -> ReplicaLoad | None:
    return ReplicaLoad(**stats["load"]) if "load" in stats else None


REPLICA_REGISTRY = (
    ReplicaRegistry()
)  # one for the process, since Serve creates its routers itself and passes them nothing of ours


def process_registry() -> ReplicaRegistry:
    """Return the registry of this process.

    Classes that Serve pickles by value must call this: a registry that they named directly would be copied with them.
    """
    return REPLICA_REGISTRY
