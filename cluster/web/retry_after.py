"""When a refused client may try again, in the words of each protocol."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from ...replicas.errors import MotleyError

DEFAULT_S = 1  # where nobody has reckoned it
STATUSES = (429, 503)  # that trying again may mend


def retry_after_s(error: MotleyError) -> int | None:
    """Whole seconds, at least 1; None for errors that trying again does not mend."""
    if error.status not in STATUSES:
        return None
    return max(error.retry_after_s or DEFAULT_S, DEFAULT_S)


def metadata(error: MotleyError) -> list[tuple[str, str | bytes]]:
    """gRPC's trailing metadata: `retry-after` for people, google.rpc.RetryInfo for clients that know it."""
    seconds = retry_after_s(error)
    if seconds is None:
        return []
    status = Status(code=grpc.StatusCode[error.grpc_code].value[0], message=error.message)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return [("retry-after", str(seconds)), ("grpc-status-details-bin", status.SerializeToString())]


def add_metadata(context: Any, error: MotleyError) -> None:
    """Beside what the context has already."""
    if added := metadata(error):
        kept = [pair for pair in context.trailing_metadata() if pair[0] != "request_id"]  # Serve puts it on itself
        context.set_trailing_metadata([*kept, *added])
