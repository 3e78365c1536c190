"""Time after which a refused client may retry, in the form of each protocol."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from ...replicas.errors import MotleyError
from ..ray_compat.visible_names import REQUEST_ID_TRAILER

DEFAULT_S = 1  # seconds, if the error has no estimate
STATUSES = (429, 503)  # statuses of errors that a retry may help


def retry_after_s(error: MotleyError) -> int | None:
    """Return whole seconds, at least 1; None for errors that a retry does not help."""
    if error.status not in STATUSES:
        return None
    return max(error.retry_after_s or DEFAULT_S, DEFAULT_S)


def retry_metadata(error: MotleyError) -> list[tuple[str, str | bytes]]:
    """Return gRPC's trailing metadata: `retry-after` for people, google.rpc.RetryInfo for clients that know it."""
    seconds = retry_after_s(error)
    if seconds is None:
        return []
    status = Status(code=grpc.StatusCode[error.grpc_code].value[0], message=error.message)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return [("retry-after", str(seconds)), ("grpc-status-details-bin", status.SerializeToString())]


def add_retry_metadata(context: Any, error: MotleyError) -> None:
    """Add the retry time to the trailing metadata that the context has already."""
    if added := retry_metadata(error):
        # Serve adds its own trailer to what is set.
        metadata = [pair for pair in context.trailing_metadata() if pair[0] != REQUEST_ID_TRAILER]
        context.set_trailing_metadata([*metadata, *added])
