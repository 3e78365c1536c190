"""Calls to replicas of all pools, and what else an ingress requests of one replica or all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from ...replicas.errors import MotleyError, Unavailable
from ...replicas.types import KvEvents, ReplicaLoad, ReplicaProfile, sum_loads
from ...replicas.updates.weight_file import WeightFile
from ..async_streams import merge_streams, run_all
from ..one_shot_event import create_event, set_event, take_until
from .attempt.call_attempt import CallAttempt
from .attempt.liveness_monitor import LivenessMonitor
from .attempt.placement import Placement, SuspectReplicas
from .attempt.replica_pools import PoolMethod, ReplicaPools
from .attempt.retry_decider import RetryDecider, RetryPolicy, is_replica_loss
from .directory.replica_directory import ReplicaDirectory
from .directory.replica_registry import REPLICA_REGISTRY, ReplicaRegistry
from .fleet_status import PrefixStatus, WeightStatus
from .prediction.latency_model import Slo

HEALTH_S = 1.0  # timeout of one replica's answer about its load, which usually takes milliseconds
ALL_SILENT_S = 5.0  # timeout of a health check while no replica at all answers


class ReplicaClient:
    """Client of the replicas of all pools, which also keeps the directory of replicas of this ingress.

    handles   Serve's deployment handles, by the names of the pools
    policy    timeouts and limits of retries
    slo       latency objectives, if the fleet has any
    registry  source of the replicas that Serve's routers know
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        policy: RetryPolicy,
        slo: Slo | None = None,
        registry: ReplicaRegistry = REPLICA_REGISTRY,
    ) -> None:
        self.stopping = create_event()  # set once the drain has begun
        self.live = ReplicaDirectory(_by_deployment(handles), slo)
        self._registry = registry
        registry.listen(self.live)
        self._policy = policy
        self._suspects = SuspectReplicas()
        self._liveness = LivenessMonitor(self._probe, self._suspects, policy.stall_s)
        self._pools = pools = ReplicaPools(handles, self._find_pool, self._suspects, self._liveness)
        self._kv_events = pools.method("kv_events", stream=True)
        self._flush = pools.method("flush")
        self._prefix_stats = pools.method("prefix_stats")
        self._load = pools.method("load")
        self._health = pools.method("health")
        self._profile = pools.method("profile")
        self._drain = pools.method("drain")
        self._update = pools.method("update_weights")

    def replace_pools(self, handles: Mapping[str, Any]) -> None:
        """Send requests to these pools from now on; streams of a pool that was removed move when its replicas end."""
        self._pools.replace(handles)
        self.live.rename(_by_deployment(handles))
        self._registry.listen(self.live)

    @property
    def draining(self) -> bool:
        return self.stopping.done()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        set_event(self.stopping)

    async def load(self) -> ReplicaLoad:
        """Return the summed load of all healthy replicas.

        Raises Unavailable if none is healthy or the service is stopping.
        """
        self._refuse_if_draining()
        try:
            async with asyncio.timeout(ALL_SILENT_S):
                first, attempt = await self._call(self._health, wait_s=self._policy.wait_s)
        except MotleyError as error:
            raise Unavailable(error.message, code="unhealthy") from error
        except TimeoutError:
            raise Unavailable("no replica answers", code="unhealthy") from None
        others = sorted({*attempt.candidate_ids, *self.live.replicas} - {attempt.replica})
        return sum_loads([first, *await run_all([self._load_of(name) for name in others])])

    async def _load_of(self, replica: str) -> ReplicaLoad:
        """Return a replica's load; an empty one after `HEALTH_S`, so that a slow replica fails no health check."""
        with suppress(MotleyError, TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                load: ReplicaLoad = await self._at(replica, self._load)
                return load
        return ReplicaLoad()

    async def profile(self) -> ReplicaProfile:
        """Wait until there is a replica, and return the profile with the longest context among all known replicas."""
        profile: ReplicaProfile
        profile, _ = await self._call(self._profile)
        profiles = [entry.profile for entry in self.live.replicas.values()]
        return max([profile, *profiles], key=lambda each: each.model.max_model_len)

    async def loads(self) -> list[ReplicaLoad]:
        """Return the load of each replica, ordered by replica name. Raises Unavailable."""
        self._refuse_if_draining()
        loads: list[ReplicaLoad] = await self._of_each(self._load)
        return loads

    async def flush(self, tenant: str | None) -> int:
        """Drop the cached prefixes of one tenant, or of all (None), on every replica, and return how many replicas did.

        Raises Unavailable.
        """
        self._refuse_if_draining()
        flushed = await self._of_each(self._flush, tenant)
        self.live.forget_prefixes()
        return len(flushed)

    async def prefixes(self) -> tuple[PrefixStatus, ...]:
        """Return the load and prefix cache statistics of every replica that answers. Raises Unavailable."""
        calls = [self._prefixes_of(name) for name in await self._replica_names()]
        return tuple(one for one in await asyncio.gather(*calls) if one is not None)

    async def _prefixes_of(self, replica: str) -> PrefixStatus | None:
        try:
            load, stats = await run_all([self._at(replica, method) for method in (self._load, self._prefix_stats)])
        except MotleyError:
            return None
        entry = self.live.replicas.get(replica)
        return PrefixStatus("" if entry is None else entry.pool, replica, load, stats)

    async def update_weights(self, pool: str, file: WeightFile, version: int) -> tuple[WeightStatus, ...]:
        """Update the weights on every replica of the pool (see `Replica.update_weights`). Raises Unavailable."""
        self._refuse_if_draining()
        await self._replica_names()
        names = sorted(name for name, entry in self.live.replicas.items() if entry.pool == pool)
        found = tuple(await asyncio.gather(*(self._update_of(name, file, version) for name in names)))
        if any(one.error is None for one in found):
            self.live.forget_prefixes()
        return found

    async def _update_of(self, replica: str, file: WeightFile, version: int) -> WeightStatus:
        try:
            weights = await self._at(replica, self._update, file, version)
        except MotleyError as error:
            return WeightStatus(replica, error=error)
        return WeightStatus(replica, weights)

    async def drain_replica(self, replica: str) -> bool:
        """Make a replica refuse new requests while it finishes those that it has; False if there is no such replica.

        Raises Unavailable.
        """
        if replica not in self.live.replicas:
            return False
        load = await self._at(replica, self._drain, wait_s=self._policy.wait_s)
        self.live.drains(replica, load)
        return True

    async def kv_events(self, tenant: str) -> AsyncGenerator[tuple[int | None, KvEvents], None]:
        """Stream one tenant's KV block events of every replica, with the replica's index if there are several."""
        self._refuse_if_draining()
        streams = [self._events_of(name, tenant) for name in await self._replica_names()]
        async with aclosing(merge_streams(streams)) as messages, aclosing(take_until(self.stopping, messages)) as taken:
            async for number, message in taken:
                yield number if len(streams) > 1 else None, message
        self._refuse_if_draining()

    async def _replica_names(self) -> list[str]:
        census = self._pools.attempt(Placement())
        await self._once(census, self._load)
        return sorted({*census.candidate_ids, *self.live.replicas})

    async def _of_each(self, method: PoolMethod, *args: Any) -> list[Any]:
        return await run_all([self._at(name, method, *args) for name in await self._replica_names()])

    async def _events_of(self, name: str, tenant: str) -> AsyncGenerator[KvEvents, None]:
        attempt = self._pools.attempt(Placement(only=name))
        with self._pools.call(attempt, self._kv_events, tenant, watched=False) as response:
            async for message in response:
                yield message

    def _find_pool(self, placement: Placement) -> str:
        """Return the name of the pool that a call without a pool goes to."""
        replicas = self.live.replicas
        any_pool, *others = self._pools.handles
        if not others:
            return any_pool
        if placement.only is not None:
            return self.live.pool_of(placement.only) or any_pool
        if placement.unfit:  # prefer a pool that has none of the unfit replicas
            unfit = {self.live.pool_of(name) for name in placement.unfit}
            if fit := [name for name in self._pools.handles if name not in unfit]:
                return fit[0]
        doubtful = {*placement.avoid, *self._suspects}
        sound = (entry.pool for name, entry in replicas.items() if name not in doubtful)
        return next(sound, None) or next((entry.pool for entry in replicas.values()), any_pool)

    def _suspect(self, attempt: CallAttempt | None, error: MotleyError) -> str | None:
        """Return the name of the replica that failed, and make it a suspect if the error says that it was lost."""
        replica = attempt.replica if attempt is not None else None
        if replica is not None and is_replica_loss(error):
            self._suspects.add(replica)
        return replica

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Unavailable("the service is stopping", code="draining")

    async def _probe(self, replica: str) -> None:
        """Request the load of a replica, and return if it answers. Raises MotleyError."""
        await self._at(replica, self._load)

    async def _call(self, method: PoolMethod, wait_s: float = math.inf) -> tuple[Any, CallAttempt]:
        """Return the answer of any live replica, with the attempt; retry on other replicas after errors."""
        retry = RetryDecider(self._policy)
        await self._somewhere(wait_s)
        while True:
            attempt = self._pools.attempt(Placement(retry.avoid, retry.strict), wait_s=wait_s)
            try:
                return await self._once(attempt, method), attempt
            except MotleyError as error:
                await asyncio.sleep(retry.after(error, self._suspect(attempt, error)))

    async def _somewhere(self, wait_s: float) -> None:
        """Wait until any pool has a replica. Raises Unavailable after `wait_s`.

        With a single pool this returns at once, since Serve itself waits for its first replica.
        """
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                while len(self._pools.handles) > 1 and not self.live.replicas:
                    self.live.changed.clear()
                    await self.live.changed.wait()
        except TimeoutError:
            raise Unavailable("no pool has a replica that serves; try again shortly", code="no_replica") from None

    async def _at(self, replica: str, method: PoolMethod, *args: Any, wait_s: float = math.inf) -> Any:
        """Return one replica's answer. Raises MotleyError."""
        return await self._once(self._pools.attempt(Placement(only=replica), wait_s=wait_s), method, *args)

    async def _once(self, attempt: CallAttempt, method: PoolMethod, *args: Any) -> Any:
        with self._pools.call(attempt, method, *args) as response:
            return await attempt.wait(response)


def _by_deployment(handles: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the pools, by the names of their Serve deployments."""
    return {getattr(handle, "deployment_name", name): name for name, handle in handles.items()}
