"""The end of a call to a replica, whatever state it is in."""

from __future__ import annotations

from typing import Any


def leave(response: Any) -> None:
    """Cancel it. Once is enough, twice does no harm.

    `cancel` of Serve (2.60) forgets a call that has just been given to a replica when its caller, cancelled in
    that very moment, has not yet seen to whom: such a sequence would run on to its end with nobody to read it.
    """
    given = getattr(response, "_replica_result_future", None)
    response.cancel()
    if given is not None and given.done() and not given.cancelled() and given.exception() is None:
        given.result().cancel()
