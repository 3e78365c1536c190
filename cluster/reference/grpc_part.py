"""Services, messages and enums of one proto."""

from __future__ import annotations

from collections.abc import Iterator

from .markdown import table
from .proto_text import Block, ProtoFile


def grpc(file: ProtoFile) -> Iterator[str]:
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
            yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    yield f"#### `{block.name}`" + (f"\n\n{block.doc}" if block.doc else "")
    head = ("value", "number", "") if block.kind == "enum" else ("field", "type", "")
    yield table(head, ((f"`{line.name}`", f"`{line.kind}`", line.doc) for line in block.lines))
