"""Observed start times of replicas."""

from __future__ import annotations

from collections.abc import Mapping

from ..backend.fleet_backend import PoolSnapshot


class ColdStartTimes:
    """Measurement of how long replicas take to start.

    cold_start_s  by pool, seconds from the first sight of its last started replica until that one served
    """

    def __init__(self) -> None:
        self.cold_start_s: dict[str, float] = {}
        self._first_seen_s: dict[str, float] = {}  # replica -> when it was first seen

    def saw(self, now: float, snapshots: Mapping[str, PoolSnapshot]) -> None:
        there = {one.replica_id for pool in snapshots.values() for one in pool.replicas}
        for pool, snapshot in snapshots.items():
            for one in snapshot.replicas:
                if one.state == "starting":
                    self._first_seen_s.setdefault(one.replica_id, now)
                elif one.state == "running" and one.replica_id in self._first_seen_s:
                    self.cold_start_s[pool] = now - self._first_seen_s.pop(one.replica_id)
        self._first_seen_s = {name: first_seen_s for name, first_seen_s in self._first_seen_s.items() if name in there}
