"""gRPC part of the page: services, messages and enums of one proto."""

from __future__ import annotations

from collections.abc import Iterator

from motley.cluster.fleet.control.rpcs.control_server import SERVICES as ADMIN_SERVICES
from motley.cluster.transport.grpc_server.servicers import SERVICES

from .markdown_table import table
from .proto_text import ProtoBlock, ProtoFile
from .service_descriptors import reachable_messages

# Full names of the messages in requests, where an absent field has a meaning.
REQUEST_MESSAGES = frozenset(
    one.full_name
    for service in (*SERVICES, *ADMIN_SERVICES)
    for rpc in service.methods
    for one in reachable_messages(rpc.input_type)
)


def write_grpc(file: ProtoFile) -> Iterator[str]:
    yield f"### Package `{file.package}`"
    if file.doc:
        yield f"```text\n{file.doc}\n```"
    for service in file.of("service"):
        yield f"#### Service `{file.package}.{service.name}`"
        if service.doc:
            yield service.doc
        yield table(("RPC", "request → reply", ""), ((f"`{x.name}`", f"`{x.kind}`", x.doc) for x in service.lines))
    for block in file.blocks:
        if block.kind != "service" and block.lines:
            yield from _block(block, requested=f"{file.package}.{block.name}" in REQUEST_MESSAGES)


def _block(block: ProtoBlock, *, requested: bool) -> Iterator[str]:
    yield f"#### `{block.name}`" + (f"\n\n{block.doc}" if block.doc else "")
    lines = [(f"`{line.name}`", f"`{line.kind}`", line.default, line.doc) for line in block.lines]
    if requested and block.kind == "message":
        yield table(("field", "type", "default", ""), lines)
    else:
        head = ("value", "number", "") if block.kind == "enum" else ("field", "type", "")
        yield table(head, ((name, kind, doc) for name, kind, _, doc in lines))
