"""Bound on the size of a request's head. HAProxy checks it before the ingress does; this check is for direct ports."""

from __future__ import annotations

from collections.abc import Sequence

from ...request_errors import HeadTooLarge
from .haproxy_config import LONG_HEAD, MAX_HEAD_BYTES, MAX_HEAD_FIELDS

# Most that HAProxy adds to a head: addresses, a deadline, forwarding headers.
_ADDED_BYTES, _ADDED_FIELDS = 512, 8
# gRPC's own limits, which count 32 bytes more for each field. Between its two limits it refuses at random, so both
# are the same.
_GRPC_BYTES = MAX_HEAD_BYTES + _ADDED_BYTES + 32 * (MAX_HEAD_FIELDS + _ADDED_FIELDS)
GRPC_OPTIONS = (
    ("grpc.max_metadata_size", _GRPC_BYTES),
    ("grpc.absolute_max_metadata_size", _GRPC_BYTES),
)


def check_head(path: str | bytes, fields: Sequence[tuple[str | bytes, str | bytes]]) -> None:
    """Raise HeadTooLarge for a head that is larger than what HAProxy lets through. Counts bytes as HTTP/1.1 writes
    them.
    """
    size = len(path) + sum(len(name) + len(value) + 4 for name, value in fields)
    if size > MAX_HEAD_BYTES + _ADDED_BYTES or len(fields) > MAX_HEAD_FIELDS + _ADDED_FIELDS:
        raise HeadTooLarge(LONG_HEAD[1], code="head_too_large")
