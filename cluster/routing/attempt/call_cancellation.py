"""Cancellation of a call to a replica, whatever state the call is in."""

from __future__ import annotations

from typing import Any

from ...ray_compat.serve_handles import replica_call


def cancel_call(response: Any) -> None:
    """Cancel a call to a replica; calling it twice does no harm.

    Serve's own `cancel` (2.60) forgets a call that has just been handed to a replica when its caller, cancelled at that
    moment, has not yet learned which replica it was. The sequence would then run to its end with nobody to read it.
    """
    given = replica_call(response)
    response.cancel()
    if given is not None and given.done() and not given.cancelled() and given.exception() is None:
        given.result().cancel()
