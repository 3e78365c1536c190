"""Whole page of the API reference: every RPC, endpoint, field, default and error."""

from __future__ import annotations

from pathlib import Path

from motley.cluster.transport.grpc_server.servicers import SERVICES

from .errors_section import write_errors
from .grpc_section import write_grpc
from .http_section import write_http
from .proto_text import read_proto
from .service_descriptors import read_service

PROTOS = Path(__file__).resolve().parents[2] / "cluster" / "protos"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_BEGIN = """# API reference

Written by `make reference` from the protos, the OpenAPI document and the sources; edit those.

One model is served over every protocol here by one service, and a request means the same over each of them. Every
call needs an API key where the service has any: `Authorization: Bearer …` or `x-api-key: …`, as a header over HTTP
and as metadata over gRPC. Fields that are not supported are refused by name; fields of HTTP that nobody knows go by
`--unknown-fields`. Where the column `default` is
empty, what is not given is not there. Every GET answers HEAD too, without the body. `motley.v1.ControlPlane` and KEDA's
`externalscaler.ExternalScaler` answer on the admin port, to admins' keys; to keys for metrics only KEDA's and
`GetMetrics`.
"""


def write_reference() -> str:
    """Return the page in Markdown."""
    files = [read_proto(path) for path in sorted(PROTOS.glob("*.proto"))]
    ours = {file.package for file in files}
    files += [read_service(service) for service in SERVICES if service.file.package not in ours]
    parts = [
        _BEGIN,
        *write_errors(),
        "## HTTP",
        *write_http(),
        "## gRPC",
        *(part for file in files for part in write_grpc(file)),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
