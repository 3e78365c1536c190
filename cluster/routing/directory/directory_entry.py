"""State of one replica as an ingress knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....replicas.types import ReplicaLoad, ReplicaProfile


@dataclass(slots=True)
class DirectoryEntry:
    """State of one replica as an ingress knows it.

    row         its row in the prediction model
    pool        name of its pool in the ingress
    store       number of the prefix store that it reads; None: it reads none
    load        its latest known load
    heard       when that load was taken, in seconds of the directory's clock
    taken       when a load was last taken from one of its messages
    overhead_s  seconds that a call to it and back takes beside the replica's own work
    observed    predictions that have been compared with what was observed
    """

    row: int
    pool: str
    profile: ReplicaProfile
    store: int | None = None
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    heard: float = 0.0
    taken: float = 0.0
    overhead_s: float = 0.0
    observed: int = 0
