"""Errors that clients of this process have got, over every protocol, counted by code for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...replicas.errors import MotleyError
from ...replicas.host.metric_fields import counter

MAX_CODES = 256  # codes that are counted by themselves; they come from the sources, never from a client
OTHER = "other"
# Codes that operators watch for: they are there, at 0, before they first occur.
_REFUSALS = ("queue_full", "deadline_unmeetable", "bodies_full", "invalid_api_key", "invalid_value")
_FAILURES = ("no_replica", "replica_lost", "replica_unavailable", "engine_fault", "draining", "internal_error")


@dataclass(slots=True, eq=False)
class CallErrors:
    """Numbers of calls by the code of the error that the client got.

    refused  errors that the request or its time was to blame for: HTTP's 4xx
    failed   errors of the service: HTTP's 5xx
    """

    refused: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(_REFUSALS, 0)),
        metadata=counter(
            "request_refusals",
            "Calls that were refused: wrong requests, missing keys, a full service",
            labels=("code",),
        ),
    )
    failed: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(_FAILURES, 0)),
        metadata=counter("request_errors", "Calls that the service failed to answer", labels=("code",)),
    )

    def add(self, error: MotleyError) -> None:
        counts = self.failed if error.status >= 500 else self.refused
        code = error.code or OTHER
        counts[code if code in counts or len(counts) < MAX_CODES else OTHER] += 1


CALL_ERRORS = CallErrors()  # of this process
