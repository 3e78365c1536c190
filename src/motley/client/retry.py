"""Retries: which failures are retried, how long to wait, and which errors the caller gets for others."""

from __future__ import annotations

import random
import re
import time
from typing import Any, cast

import grpc

from ..cluster.service_errors import Forbidden, Unauthenticated
from ..replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    MotleyError,
    NotFound,
    Overloaded,
    Unavailable,
)

FIRST_WAIT_S = 0.25
WAIT_GROWTH = (
    4.0  # factor of further waits: the third attempt comes 4 to 6.5 s after the failure, when a lost HAProxy is back
)
LONGEST_WAIT_S = 10.0
RETRY_AFTER = "retry-after"  # trailing metadata, in seconds
_KINDS: dict[str, type[MotleyError]] = {
    kind.grpc_code: kind
    for kind in (
        DeadlineExceeded, EngineFault, Forbidden, InvalidRequest, NotFound, Overloaded, Unauthenticated, Unavailable,
    )
}  # fmt: skip


class CallRetries:
    """Attempts of one call.

    `timeout_s` bounds all of them and the waits between; `left_s` is what remains for the next.
    """

    def __init__(self, retries: int, timeout_s: float | None) -> None:
        self._retries = retries
        self.renew()
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def renew(self) -> None:
        """Reset the number of retries, since the call has made progress."""
        self._left, self._wait_s = self._retries, FIRST_WAIT_S

    def after(self, error: grpc.RpcError | MotleyError) -> float:
        """Return the seconds to wait before the next attempt. Raises the caller's error if no retry can help.

        Generating changes nothing in the service, so a request may be repeated unless it was refused for good.
        """
        failure = error if isinstance(error, MotleyError) else error_from_call(error)
        wait_s = max(self._wait_s * random.uniform(0.75, 1.25), failure.retry_after_s or 0.0)
        helps = isinstance(failure, Unavailable) or failure.retry_after_s is not None
        in_time = wait_s <= LONGEST_WAIT_S and (self.left_s is None or wait_s < self.left_s)
        if not (helps and in_time and self._left):
            raise failure from (None if failure is error else error)
        self._left -= 1
        self._wait_s *= WAIT_GROWTH
        return wait_s


def error_from_call(error: grpc.RpcError) -> MotleyError:
    """Convert gRPC's error to one of the service's own errors."""
    call = cast(grpc.Call, error)
    message = call.details() or "the call failed"
    kind = Unavailable if _is_stream_reset(call) else _KINDS.get(call.code().name, MotleyError)
    found = re.match(r"([\w.\[\]]+)(?:: | is )", message) if kind in (InvalidRequest, NotFound) else None
    return kind(message, param=found and found[1], code=call.code().name.lower(), retry_after_s=_retry_after(call))


def _is_stream_reset(call: grpc.Call) -> bool:
    """Return whether the proxy ended while it answered: HAProxy then resets the stream, which gRPC reports as a
    cancel.
    """
    return call.code() is grpc.StatusCode.CANCELLED and "RST_STREAM" in (call.details() or "")


def _retry_after(call: Any) -> int | None:
    given = dict(call.trailing_metadata() or ()).get(RETRY_AFTER, "")
    return int(given) if re.fullmatch(r"[0-9]{1,6}", str(given)) else None
