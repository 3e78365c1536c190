"""Caller of a request, as the guard has established it, and its deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MAX_CLIENT_ID = 128  # characters; the rest is cut off


@dataclass(frozen=True, slots=True)
class Caller:
    """One call's origin, the same over every protocol.

    tenant      tenant of the API key; empty without keys. Separates prefix caches and queues
    timeout_s   seconds left of the call's own deadline (gRPC); None: it has none
    client_id   the client's own id of the call, for the log only
    arrived_s   arrival by the monotonic clock: all timeouts count from it, however many prompts the call has
    peer        the client's address (gRPC), as HAProxy gives it; without HAProxy whatever the caller claims
    """

    tenant: str = ""
    timeout_s: float | None = None
    client_id: str = ""
    peer: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
