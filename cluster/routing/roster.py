"""The replicas that this process knows of: told by Serve's routers, one for each pool, to whoever ranks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakSet

from ...replicas.protocol import ReplicaLoad, ReplicaProfile
from ...replicas.published import profile_of

__all__ = ["ROSTER", "Listener", "Roster", "Seen", "this_process"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What Serve has of a replica: what it published once when it was ready, and what it says again and again."""

    metadata: Mapping[str, Any]
    stats: Mapping[str, Any]


class Listener(Protocol):
    """Told in the thread of Serve's router: with RAY_SERVE_THROUGHPUT_OPTIMIZED that is the one of the ingress."""

    def joined(self, profile: ReplicaProfile) -> None: ...
    def left(self, replica: str) -> None: ...
    def reported(self, replica: str, load: ReplicaLoad) -> None: ...


class Roster:
    """By pool and replica. Whoever listens is told of those there are, and then of every change."""

    def __init__(self) -> None:
        self._profiles: dict[str, dict[str, ReplicaProfile]] = {}  # by pool
        self._stats: dict[str, Mapping[str, Any]] = {}  # by replica
        self._listeners: WeakSet[Listener] = WeakSet()

    def listen(self, listener: Listener) -> None:
        self._listeners.add(listener)
        for replicas in self._profiles.values():
            for name, profile in replicas.items():
                listener.joined(profile)
                if (load := _load(self._stats[name])) is not None:
                    listener.reported(name, load)

    def update(self, pool: str, replicas: Mapping[str, Seen]) -> None:
        """All of the pool's replicas as they are now. One that has published no profile is not told of."""
        known = self._profiles.setdefault(pool, {})
        for name in [name for name in known if name not in replicas]:
            self.gone(pool, name)
        for name, seen in replicas.items():
            if name not in known and "profile" in seen.metadata:
                profile = replace(profile_of(seen.metadata["profile"]), replica_id=name, pool=pool)
                known[name], self._stats[name] = profile, {}
                for listener in list(self._listeners):
                    listener.joined(profile)
            if name in known and seen.stats is not self._stats[name] and seen.stats != self._stats[name]:
                self._stats[name] = seen.stats
                if (load := _load(seen.stats)) is not None:
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


ROSTER = Roster()  # this process's: Serve makes its routers itself, and gives them nothing of ours


def this_process() -> Roster:
    """For whom Serve pickles by value: a roster that he names himself would come along as a copy."""
    return ROSTER
