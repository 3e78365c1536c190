"""Weight updates of pools while their replicas serve.

An update is recorded before any replica is asked. From then on a task of the control plane carries it to its end, even
if the caller no longer waits, and a restarted control plane continues it. Replicas may be asked repeatedly: each
recognizes by the digest whether it has that version already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from .....replicas.errors import MotleyError
from ....routing.fleet_status import FleetStatus, WeightStatus
from ....service_errors import Conflict
from ..backend.fleet_backend import FleetBackend, PoolSnapshot
from ..state import decisions
from ..state.control_state import ControlState, FleetEvent, OngoingWeightUpdate
from .fleet_observation import replicas_by_pool

log = logging.getLogger(__name__)

CATCH_UP_S = 5.0  # minimum time between two attempts to bring replicas the updates that they have missed
RETRY_S = 1.0  # delay before replicas whose weights are unknown are asked again


class StateKeeper(Protocol):
    """Interface to the control plane's state for weight updates (see `Plane`)."""

    state: ControlState
    snapshots: Mapping[str, PoolSnapshot]

    async def change(self, change: Callable[[ControlState, float], ControlState]) -> list[FleetEvent]: ...


class WeightUpdater:
    """Runner of weight updates, one at a time over all pools.

    task  the update that is under way, or the last one
    """

    def __init__(self, fleet: FleetBackend, plane: StateKeeper) -> None:
        self.task: asyncio.Future[Any] | None = None
        self._fleet, self._plane = fleet, plane
        self._began = -CATCH_UP_S  # monotonic time when an unfinished or missed update was last found

    async def update(
        self, path: str, *, delta: bool, pool: str, expected: int | None, by: str, reason: str
    ) -> tuple[str, Sequence[WeightStatus]]:
        """Update a pool's weights: see `FleetReconciler.update_weights`. Cancelling this only stops the waiting."""
        state = self._plane.state
        if not pool and len(state.pools) == 1:
            [pool] = state.pools
        decisions.check_update(state, pool, expected, reason)
        found = await self._fleet.check_weights(path)
        if not self._serves(pool):
            decisions.updated_weights_digest(())  # raises
        if self._busy:
            raise Conflict(
                "another update of weights is in progress; try again when it has ended", code="weights_in_use"
            )
        one = OngoingWeightUpdate(str(found), delta, by, reason)
        return pool, await asyncio.shield(self._start(self._begin(pool, one, expected)))

    def step(self, status: FleetStatus | None, now: float) -> None:
        """Continue an update that an earlier process began, or else bring replicas the updates that they have missed.

        It runs beside the control loop.
        """
        if self._busy or now - self._began < CATCH_UP_S:
            return
        for pool, one in self._plane.state.updates.items():
            self._began = now
            self._start(self._carry(pool, one))
            return
        for pool, replicas in replicas_by_pool(status).items():
            oldest = min((one.load.weights_version for one in replicas), default=0)
            if oldest < len(self._plane.state.files(pool)):
                self._began = now
                self._start(self._bring(pool, oldest))
                return

    @property
    def _busy(self) -> bool:
        return self.task is not None and not self.task.done()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(_log_failure)
        return self.task

    async def _begin(self, pool: str, one: OngoingWeightUpdate, expected: int | None) -> Sequence[WeightStatus]:
        await self._plane.change(partial(decisions.begin_update, pool=pool, one=one, expected=expected))
        return await self._carry(pool, one)

    async def _carry(self, pool: str, one: OngoingWeightUpdate) -> Sequence[WeightStatus]:
        """Repeat an update until it is recorded that a replica has it, or that none has.

        That raises the first error.
        """
        while self._plane.state.updates.get(pool) == one:
            results = await self._request_update(pool, one)
            try:
                digest = decisions.updated_weights_digest(results) if results is not None else None
            except MotleyError:
                if await self._is_stored(partial(decisions.undo_update, pool=pool, one=one)):
                    raise
            else:
                if digest and await self._is_stored(
                    partial(decisions.finish_update, pool=pool, one=one, digest=digest)
                ):
                    assert results is not None
                    return results
            await asyncio.sleep(RETRY_S)
        raise Conflict(f"pool {pool!r} has another model by now", param="pool", code="rolling")

    async def _request_update(self, pool: str, one: OngoingWeightUpdate) -> Sequence[WeightStatus] | None:
        """Ask each replica to update, and return what became of it.

        None if the ingress does not answer or know them yet.
        """
        version = len(self._plane.state.pools[pool].weights) + 1
        try:
            results = await self._fleet.update_weights(pool, one.file, version)
        except MotleyError as error:
            log.warning("the update of pool %s's weights has no result; it is asked for again: %s", pool, error.message)
            return None
        return results or (None if self._serves(pool) else ())

    async def _is_stored(self, change: Callable[[ControlState, float], ControlState]) -> bool:
        try:
            await self._plane.change(change)
        except MotleyError as error:
            log.warning("the outcome of an update of weights could not be stored: %s", error.message)
            return False
        return True

    async def _bring(self, pool: str, oldest: int) -> None:
        for version, file in enumerate(self._plane.state.files(pool)[oldest:], oldest + 1):
            try:
                results = await self._fleet.update_weights(pool, file, version)
            except MotleyError as error:
                log.warning("replicas of pool %s lack an update of weights; it is tried again: %s", pool, error.message)
                return
            for one in results:
                if one.error is not None and one.error.code != "version_mismatch":
                    said = one.error.message
                    log.warning("replica %s lacks an update of weights; it is tried again: %s", one.replica_id, said)

    def _serves(self, pool: str) -> bool:
        """Return whether the pool has a serving replica, as far as is known."""
        return pool not in self._plane.snapshots or bool(self._plane.snapshots[pool].running)


def _log_failure(task: asyncio.Future[Any]) -> None:
    """Log the error of a failed update, since its caller may no longer be waiting."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning(
            "an update of weights has failed: %s", error, exc_info=None if isinstance(error, MotleyError) else error
        )
