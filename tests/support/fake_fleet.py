"""A fleet in memory, as Serve would have it: replicas start and end step by step, and some do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from motley.cluster.fleet.control.backend.fleet_backend import PlannedFleet, PoolSnapshot, ReplicaSnapshot
from motley.cluster.fleet.control.reconciler.fleet_reconciler import FleetReconciler
from motley.cluster.fleet.control.state.control_state import ControlState, PoolPlan, decode_state, encode_state
from motley.cluster.routing.explanation.route_explanation import FoundRoutes, explain_routes, join_routes
from motley.cluster.routing.explanation.route_log import RouteLog
from motley.cluster.routing.fleet_status import (
    DemandCounters,
    FleetStatus,
    PrefixStatus,
    ReplicaStatus,
    WeightStatus,
)
from motley.cluster.service_errors import Forbidden
from motley.replicas.errors import InvalidRequest, MotleyError, Unavailable
from motley.replicas.kv.prefix.prefix_stats import PrefixStats
from motley.replicas.types import ModelInfo, ReplicaLoad, ReplicaProfile, WeightsStatus
from motley.replicas.updates.weight_file import WeightFile

MODEL = ModelInfo("tiny", "llama", 256, 1024, (0,), "float32", "none")
PROFILE = ReplicaProfile("", MODEL, "cpu", "P40, simulated", "6.1", "exact", "f", 1000.0, 0.02, 640, 512)


class FakeFleet:
    """A fleet like that of Serve. `turn` lets Serve do what it would do meanwhile.

    room      replicas that find a place, each on a node of its own
    loading   whether replicas that have found a place go on loading
    calls     what was asked of it, in order
    work      sequences that a replica has
    weights   versions that replicas have; contents: of what
    taken     how often one has taken any
    stubborn  who of them stays as it is; silent: who changes, and does not say so
    go_on     until it happens nobody takes weights, who are asked for them; asked: they are
    telling   whether there is an ingress; failing: what it was told of replicas that do not start
    plan      what was deployed last
    routes    where its requests went
    """

    def __init__(self, pools: Mapping[str, int], *, room: int = 100) -> None:
        self.room = room
        self.loading = False
        self.calls: list[tuple[object, ...]] = []
        self.work: dict[str, int] = {}
        self.telling = True
        self.failing = ""
        self.plan: PlannedFleet | None = None
        self.prefix_stats: PrefixStats | None = None
        self.routes = RouteLog(time.monotonic)
        self.demand = DemandCounters()
        self.age_s = 0.0  # of what replicas have told
        self.marked: set[str] = set()
        self.weights: dict[str, int] = {}
        self.contents: dict[str, str] = {}
        self.taken = 0
        self.silent: set[str] = set()
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.stubborn: set[str] = set()
        self.bad_versions: set[str] = set()
        self._born = 0
        self.pools = {name: PoolSnapshot(target, version="v0") for name, target in pools.items()}
        self._versions: dict[str, str] = {}
        for _ in range(3):
            self.turn()

    def replicas(self, pool: str) -> list[str]:
        return [one.replica_id for one in self.pools[pool].running]

    def turn(self) -> None:
        """Old replicas that are outdated end one at a time, too many end newest first, too few are started."""
        for name, pool in self.pools.items():
            there = [one for one in pool.replicas if one.state != "stopping"]
            fits = sum(len(other.replicas) for key, other in self.pools.items() if key != name)
            there = [self._placed(one) if fits + at < self.room else one for at, one in enumerate(there)]
            outdated = [one for one in there if self._versions[one.replica_id] != pool.version]
            state = "healthy"
            if pool.version in self.bad_versions:
                state = "failed"
            elif outdated and len(there) >= pool.target:
                there.remove(outdated[0])
                state = "changing"
            while len(there) > pool.target:
                starting = [one for one in there if one.state == "starting"]
                there.remove(starting[0] if starting else max(there, key=lambda one: one.started))
            while len(there) < pool.target and state != "failed":
                there.append(self._start(pool.version))
            if outdated or any(one.state != "running" for one in there):
                state = "failed" if state == "failed" else "changing"
            message = "it is bad" if state == "failed" else ""
            self.pools[name] = replace(pool, replicas=tuple(there), state=state, message=message, failing=message)  # type: ignore[arg-type]

    def _placed(self, one: ReplicaSnapshot) -> ReplicaSnapshot:
        return replace(one, state=one.state if self.loading else "running", node=f"node of {one.replica_id}")

    def _start(self, version: str) -> ReplicaSnapshot:
        self._born += 1
        name = f"r{self._born}"
        self._versions[name] = version
        return ReplicaSnapshot(name, "starting", started=float(self._born))

    async def planned(self) -> PlannedFleet | None:
        return self.plan

    async def snapshots(self) -> Mapping[str, PoolSnapshot]:
        return dict(self.pools)

    async def status(self, failing: str = "") -> FleetStatus | None:
        self.failing = failing
        if not self.telling:
            return None
        return FleetStatus(
            tuple(
                ReplicaStatus(
                    name,
                    one.replica_id,
                    "draining" if one.replica_id in self.marked else "ready",
                    PROFILE,
                    ReplicaLoad(
                        running=self.work.get(one.replica_id, 0),
                        kv_blocks_free=600,
                        kv_blocks_total=640,
                        weights_version=self.weights.get(one.replica_id, 0),
                        weights_contents=f"digest of {one.replica_id}'s",
                    ),
                    age_s=self.age_s,
                )
                for name, pool in self.pools.items()
                for one in pool.running
            ),
            self.demand,
        )

    async def pending(self, pool: str) -> str:
        return "no GPU free"

    async def set_target(self, pool: str, replicas: int) -> None:
        self.calls.append(("target", pool, replicas))
        self.pools[pool] = replace(self.pools[pool], target=replicas)

    async def mark(self, replica_id: str) -> bool:
        if self.telling:
            self.calls.append(("mark", replica_id))
            self.marked.add(replica_id)
        return self.telling

    async def flush(self, tenant: str | None) -> int:
        self.calls.append(("flush", tenant))
        return sum(len(pool.running) for pool in self.pools.values())

    async def prefixes(self) -> tuple[PrefixStatus, ...]:
        names = [(pool, one.replica_id) for pool in self.pools for one in self.pools[pool].running]
        load = ReplicaLoad(prompt_tokens=100, cached_tokens=40)
        return tuple(PrefixStatus(pool, name, load, self.prefix_stats) for pool, name in names)

    async def explain(self, request: str) -> FoundRoutes:
        one = explain_routes(self.routes.find(request), time.monotonic(), {"r1": "cpu"}, "i1")
        return join_routes([one, FoundRoutes((), 0)])

    async def check_weights(self, path: str) -> Path:
        if "secret" in path:
            raise Forbidden(f"path: {path} is in no folder that weights may come from")
        return Path(path)

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> tuple[WeightStatus, ...]:
        """Take no file with "bad" in its name; replicas in `stubborn` take nothing at all."""
        self.calls.append(("update", pool, str(file.path), file.delta, version))
        self.asked.set()
        await self.go_on.wait()
        return tuple(self._update(name, file, version) for name in self.replicas(pool))

    def _update(self, name: str, file: WeightFile, version: int) -> WeightStatus:
        has, contents = self.weights.get(name, 0), f"digest of {file.path.name}"
        bad = "bad" in file.path.name or name in self.stubborn
        if has == version and self.contents[name] != contents:
            return WeightStatus(name, error=InvalidRequest(f"{name} has others", code="weights_differ"))
        if has != version and (bad or has != version - 1):
            code = None if bad else "version_mismatch"
            return WeightStatus(name, error=InvalidRequest(f"{file.path.name} is bad", code=code))
        self.taken += has != version
        self.weights[name], self.contents[name] = version, contents
        if name in self.silent:
            return WeightStatus(name, error=Unavailable("it was lost", code="replica_lost"))
        return WeightStatus(name, WeightsStatus(version, contents))

    async def end(self, replica_id: str) -> None:
        self.calls.append(("end", replica_id))
        for name, pool in self.pools.items():
            left = tuple(one for one in pool.replicas if one.replica_id != replica_id)
            self.pools[name] = replace(pool, replicas=left)

    async def check_model(self, model: str) -> None:
        if "bad" in model:
            raise MotleyError(f"model: {model}")

    async def redeploy(
        self, targets: Mapping[str, int], versions: Mapping[str, str], models: Mapping[str, str]
    ) -> None:
        self.calls.append(("redeploy", dict(targets), dict(versions), dict(models)))
        for name, pool in self.pools.items():
            version = versions.get(name, pool.version)
            self.pools[name] = replace(pool, target=targets[name], version=version, state="changing")


class FakeStore:
    """Keeps bytes, as Ray's GCS does. `full`: it takes no more."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.full = False
        self.times = 0

    async def keep(self, state: ControlState) -> None:
        if self.full:
            raise Unavailable("the decision could not be stored", code="not_kept")
        self.data = encode_state(state)
        self.times += 1

    def load(self) -> ControlState:
        assert self.data is not None
        return decode_state(self.data)


class Clock:
    """`set_by`: seconds by which somebody has set it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.set_by = 0.0

    def set(self, seconds: float) -> None:
        """Forward, or back where negative."""
        self.now += seconds
        self.set_by += seconds

    def __call__(self) -> float:
        return self.now


class Bench:
    """A plane on a fleet in memory, whose process can be ended."""

    def __init__(self, target: int = 1, maximum: int = 8, *, room: int = 100) -> None:
        self.fleet = FakeFleet({"cpu": target}, room=room)
        self.store, self.clock = FakeStore(), Clock()
        self.plane = FleetReconciler(
            self.fleet,
            self.store,
            ControlState(pools={"cpu": PoolPlan(target, 0, maximum)}),
            self.clock,
            self.monotonic,
        )

    def again(self) -> None:
        """Another process, with nothing but what was kept."""
        self.plane = FleetReconciler(self.fleet, self.store, self.store.load(), self.clock, self.monotonic)

    def monotonic(self) -> float:
        """Return the time of the clock where nobody sets it."""
        return self.clock.now - self.clock.set_by

    async def steps(self, number: int = 8) -> None:
        for _ in range(number):
            await self.plane.step()
            self.fleet.turn()
            self.clock.now += 0.5

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.plane.state.events]

    async def caught_up(self) -> None:
        """Time enough passes for those with older weights to be asked."""
        self.clock.now += 10
        await self.steps(1)
        if self.plane.updating.task is not None:
            await self.plane.updating.task

    async def scale(self, replicas: int, **how: object) -> None:
        await self.plane.scale("cpu", replicas, **{"by": "test", "reason": "why", "allow_zero": True, **how})
