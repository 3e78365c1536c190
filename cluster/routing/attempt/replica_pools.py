"""Interface to all pools: a call goes to the pool that has been chosen for it.

A pool is one Serve deployment, whose router only knows its own replicas. The pool is chosen before the call is made,
from the call's last argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...ray_compat.serve_handles import by_value
from .placement import Placement

PoolChooser = Callable[[Placement], str]  # returns the name of the pool


class PoolMethod:
    """One method of the replicas, callable on any pool."""

    def __init__(self, pools: ReplicaPools, options: Mapping[str, Any], choose: PoolChooser) -> None:
        self._pools = pools
        self._options = options
        self._choose = choose
        self._made: dict[str, tuple[Any, Any]] = {}  # by pool: its handle, and the handle's method

    def remote(self, *args: Any) -> Any:
        """Call the method on the pool that is chosen from the last argument, the call's placement."""
        pool = self._choose(args[-1])
        handle = self._pools.handles[pool]
        if self._made.get(pool, (None,))[0] is not handle:
            self._made[pool] = handle, handle.options(**self._options)
        return self._made[pool][1].remote(*args)


class ReplicaPools:
    """Handles of all pools, by name.

    Messages travel by value, since a trip through Ray's object store would cost more for each.
    """

    def __init__(self, handles: Mapping[str, Any], choose: PoolChooser) -> None:
        self._choose = choose
        self.replace(handles)

    def method(self, name: str, *, stream: bool = False) -> PoolMethod:
        options: dict[str, Any] = {"method_name": name} | ({"stream": True} if stream else {})
        return PoolMethod(self, options, self._choose)

    def replace(self, handles: Mapping[str, Any]) -> None:
        """Use these handles from now on; calls that are under way stay where they are."""
        assert handles, "at least one pool"
        # A handle only begins to learn of its replicas with its first call of `options`.
        self.handles = {name: by_value(handle) for name, handle in handles.items()}
