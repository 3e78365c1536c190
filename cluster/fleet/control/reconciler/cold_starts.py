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
        self._since: dict[str, float] = {}  # replica -> when it was first seen

    def saw(self, now: float, look: Mapping[str, PoolSnapshot]) -> None:
        there = {one.replica_id for pool in look.values() for one in pool.replicas}
        for pool, seen in look.items():
            for one in seen.replicas:
                if one.state == "starting":
                    self._since.setdefault(one.replica_id, now)
                elif one.state == "running" and one.replica_id in self._since:
                    self.cold_start_s[pool] = now - self._since.pop(one.replica_id)
        self._since = {name: since for name, since in self._since.items() if name in there}
