"""Who calls, as the guard has established it, and how long they wait."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MAX_CLIENT_ID = 128  # characters; the rest is cut off


@dataclass(frozen=True, slots=True)
class Caller:
    """One call's origin, the same over every protocol.

    tenant      whose key came with it; empty without keys. Separates prefix caches and queues
    timeout_s   seconds left of the call's own deadline (gRPC); None: it has none
    client_id   the client's own id of the call, for the log only
    arrived_s   by the monotonic clock: all timeouts count from then, however many prompts the call has
    peer        the address it comes from (gRPC), as HAProxy says, or where there is none whatever the caller says
    """

    tenant: str = ""
    timeout_s: float | None = None
    client_id: str = ""
    peer: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
