"""One replica as an ingress sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...replicas.protocol import ReplicaLoad, ReplicaProfile

__all__ = ["Member"]


@dataclass(slots=True)
class Member:
    """One replica. pool: as the ingress calls it. store: the prefix store that it reads, by number; None: none."""

    row: int
    pool: str
    profile: ReplicaProfile
    store: int | None = None
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    heard: float = 0.0  # of when that is
    taken: float = 0.0  # when it was last taken from a message
    overhead_s: float = 0.0
    observed: int = 0
