"""All pools as one: a call goes to the pool that has been chosen for it.

A pool is one Serve deployment, whose router knows its own replicas only. Which pool is decided before a call is made,
by the call's last argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .placement import Placement

Choose = Callable[[Placement], str]  # the name of the pool


class Method:
    """One method of the replicas, in whichever pool."""

    def __init__(self, pools: Pools, options: Mapping[str, Any], choose: Choose) -> None:
        self._pools = pools
        self._options = options
        self._choose = choose
        self._made: dict[str, tuple[Any, Any]] = {}  # of each pool: its handle, and what calls this method

    def remote(self, *args: Any) -> Any:
        """The last argument is the call's placement."""
        pool = self._choose(args[-1])
        handle = self._pools.handles[pool]
        if self._made.get(pool, (None,))[0] is not handle:
            self._made[pool] = handle, handle.options(**self._options)
        return self._made[pool][1].remote(*args)


class Pools:
    """`handles`: of the pools, by their names. Messages travel by value: Ray's object store would cost a trip each."""

    def __init__(self, handles: Mapping[str, Any], choose: Choose) -> None:
        self._choose = choose
        self.replace(handles)

    def method(self, name: str, *, stream: bool = False) -> Method:
        options: dict[str, Any] = {"method_name": name} | ({"stream": True} if stream else {})
        return Method(self, options, self._choose)

    def replace(self, handles: Mapping[str, Any]) -> None:
        """From now on these; calls on their way stay where they are."""
        assert handles, "at least one pool"
        # A handle learns of its replicas from its first options on.
        self.handles = {name: handle.options(_by_reference=False) for name, handle in handles.items()}
