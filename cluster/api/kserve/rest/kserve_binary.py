"""Triton's binary tensor data over HTTP: a body is JSON, followed by the bytes of the tensors that the JSON names.

A header tells the length of the JSON. Tensors follow it in the order in which the JSON names them.
"""

from __future__ import annotations

from .....replicas.errors import InvalidRequest
from .....replicas.short_repr import short_repr
from ....transport.http_server.response_content import encode_json
from ..kserve_request import InferRequest
from ..kserve_response import InferResponse
from ..kserve_tensors import to_raw
from . import kserve_json

HEADER = "inference-header-content-length"
TENSORS = "application/octet-stream"
_SAID_AS = "Inference-Header-Content-Length"
_MAX_DIGITS = 19


def split_binary_body(body: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Split a body into its JSON and the bytes after it. length: the header's value. Raises InvalidRequest naming the
    header.
    """
    if length is None:
        return body, b""
    if not (length.isascii() and length.isdigit() and len(length) <= _MAX_DIGITS and int(length) <= len(body)):
        message = (
            f"{_SAID_AS}: {short_repr(length)} is not accepted; "
            f"expected a number of bytes up to {len(body)}, the body's"
        )
        raise InvalidRequest(message, param=_SAID_AS, code="invalid_value")
    return body[: int(length)], body[int(length) :]


def encode_binary_response(response: InferResponse, request: InferRequest) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON in bytes; None if it is JSON alone."""
    raw = {tensor.name: to_raw(tensor) for tensor in response.outputs if request.wants_binary(tensor.name)}
    head = encode_json(kserve_json.infer_response(response, {name: len(data) for name, data in raw.items()}))
    if not raw:
        return head, None
    return b"".join((head, *raw.values())), len(head)
