"""Interface to all pools: a call goes to the pool that has been chosen for it.

A pool is one Serve deployment, whose router only knows its own replicas. The pool is chosen before the call is made,
from the call's placement.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ....replicas.errors import MotleyError
from ....replicas.types import CallId
from ...ray_compat.serve_handles import by_value
from ...request_errors import error_from_replica
from ..directory.dispatch_tracker import DispatchTracker
from .call_attempt import OPEN_CALLS, CallAttempt
from .call_cancellation import cancel_call
from .liveness_monitor import LivenessMonitor
from .placement import Placement, SuspectReplicas

REPLICA_CALL_ERRORS = (MotleyError, RayError, RayServeException, grpc.RpcError)
PoolChooser = Callable[[Placement], str]  # returns the name of the pool


class PoolMethod:
    """One method of the replicas, callable on any pool."""

    def __init__(self, pools: ReplicaPools, options: Mapping[str, Any]) -> None:
        self._pools = pools
        self._options = options
        self._made: dict[str, tuple[Any, Any]] = {}  # by pool: its handle, and the handle's method

    def of(self, pool: str) -> Any:
        """Return the method of a pool's handle."""
        handle = self._pools.handles[pool]
        if self._made.get(pool, (None,))[0] is not handle:
            self._made[pool] = handle, handle.options(**self._options)
        return self._made[pool][1]


class ReplicaPools:
    """Handles of all pools, by name, and the calls to them.

    Messages travel by value, since a trip through Ray's object store would cost more for each.

    choose    chooses the pool of a call whose placement has none
    suspects  replicas that any request has failed on
    liveness  watches the calls, and ends those whose replica hangs
    """

    def __init__(
        self, handles: Mapping[str, Any], choose: PoolChooser, suspects: SuspectReplicas, liveness: LivenessMonitor
    ) -> None:
        self._choose = choose
        self._suspects = suspects
        self.liveness = liveness
        self._ingress = secrets.token_hex(8)
        self._numbers = itertools.count()
        self.replace(handles)

    def method(self, name: str, *, stream: bool = False) -> PoolMethod:
        return PoolMethod(self, {"method_name": name} | ({"stream": True} if stream else {}))

    def replace(self, handles: Mapping[str, Any]) -> None:
        """Use these handles from now on; calls that are under way stay where they are."""
        assert handles, "at least one pool"
        # A handle only begins to learn of its replicas with its first call of `options`.
        self.handles = {name: by_value(handle) for name, handle in handles.items()}

    def attempt(
        self,
        placement: Placement,
        dispatch: DispatchTracker | None = None,
        *,
        deadline: float = math.inf,
        wait_s: float = math.inf,
    ) -> CallAttempt:
        """Return an attempt that is still to be made. The arguments are as in `CallAttempt`."""
        call, pool = CallId(self._ingress, next(self._numbers)), placement.pool or self._choose(placement)
        return CallAttempt(call, placement, self._suspects, dispatch, pool=pool, deadline=deadline, wait_s=wait_s)

    @contextmanager
    def call(self, attempt: CallAttempt, method: PoolMethod, *args: Any, watched: bool = True) -> Iterator[Any]:
        """Make the call and provide Serve's response, which is cancelled in the end. Raises MotleyError for all that
        can be wrong with a replica.

        watched  the reader is interrupted when its replica hangs, and when all streams are to end
        """
        OPEN_CALLS[attempt.call] = attempt
        # In an empty context, since Serve mixes up two calls that one request makes to the same deployment.
        response = contextvars.Context().run(lambda: method.of(attempt.pool).remote(*args, attempt.call))
        if watched:
            self.liveness.watch(attempt)
        try:
            yield response
        except REPLICA_CALL_ERRORS as error:
            raise error_from_replica(error) from error
        finally:
            self.liveness.forget(attempt)
            del OPEN_CALLS[attempt.call]
            attempt.release()
            cancel_call(response)
