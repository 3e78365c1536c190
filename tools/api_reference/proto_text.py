"""Reader of Motley's .proto files with their comments, which generated code does not keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^\s*(service|message|enum|oneof)\s+(\w+)\s*{(})?")
_RPC = re.compile(r"^\s*rpc\s+(\w+)\((stream )?([\w.]+)\)\s*returns\s*\((stream )?([\w.]+)\)")
_FIELD = re.compile(r"^\s*(optional |repeated )?(map<[^>]+>|[\w.]+)\s+(\w+)\s*=\s*(\d+)")
_ZEROS = {"string": '`""`', "bytes": '`""`', "bool": "`false`", "double": "`0`", "float": "`0`"}
_ZEROS |= {f"{sign}int{bits}": "`0`" for sign in ("", "u") for bits in (32, 64)}
_VALUE = re.compile(r"^\s*(\w+)\s*=\s*(\d+)")


@dataclass(slots=True)
class ProtoLine:
    """An RPC, a field or a value: its name, its type, and its comment.

    default   for a field: what its absence means; empty for lists, maps and messages, which are then absent
    """

    name: str
    kind: str
    doc: str = ""
    default: str = ""


@dataclass(slots=True)
class ProtoBlock:
    """A service, message or enum. `name` is as written; a nested one's is `Outer.Inner`."""

    kind: str
    name: str
    doc: str
    lines: list[ProtoLine] = field(default_factory=list)


@dataclass(slots=True)
class ProtoFile:
    package: str
    doc: str
    blocks: list[ProtoBlock]

    def of(self, kind: str) -> Iterator[ProtoBlock]:
        return (block for block in self.blocks if block.kind == kind)


def read_proto(path: Path) -> ProtoFile:
    """Parse a file in Motley's own layout: one declaration on each line, comments above it or after it."""
    reader = _ProtoReader()
    for line in path.read_text(encoding="utf-8").splitlines():
        reader.take(line)
    return ProtoFile(reader.package, reader.doc, reader.blocks)


class _ProtoReader:
    def __init__(self) -> None:
        self.package = self.doc = ""
        self.blocks: list[ProtoBlock] = []
        self._open: list[ProtoBlock] = []
        self._comment: list[str] = []
        self._in_oneof = False

    def take(self, line: str) -> None:
        code, _, behind = line.partition("//")
        if not code.strip():
            self._comment = [*self._comment, behind[1:].rstrip()] if "//" in line else []
            return
        doc = " ".join([*self._comment, behind.strip()]).strip()
        raw, self._comment = self._comment, []
        if found := re.match(r"package ([\w.]+);", code):
            self.package, self.doc = found[1], "\n".join(raw)
        elif found := _BLOCK.match(code):
            self._begin(found[1], found[2], doc, closed=bool(found[3]))
        elif code.strip().startswith("}"):
            self._open.pop()
            self._in_oneof = False
        elif self._open:
            self._declare(code, doc)

    def _begin(self, kind: str, name: str, doc: str, *, closed: bool) -> None:
        if kind == "oneof":  # the fields of a oneof are its message's
            self._open.append(self._open[-1])
            self._in_oneof = True
            return
        outer = f"{self._open[-1].name}." if self._open else ""
        block = ProtoBlock(kind, outer + name, doc)
        self.blocks.append(block)
        if not closed:
            self._open.append(block)

    def _declare(self, code: str, doc: str) -> None:
        lines = self._open[-1].lines
        if found := _RPC.match(code):
            requested, returned = (f"{found[i] or ''}{found[i + 1]}" for i in (2, 4))
            lines.append(ProtoLine(found[1], f"{requested} → {returned}", doc))
        elif found := _FIELD.match(code):
            doc, said = _default(doc)
            zero = "" if found[1] or self._in_oneof else _ZEROS.get(found[2], "")
            lines.append(ProtoLine(found[3], f"{found[1] or ''}{found[2]}", doc, said or zero))
        elif found := _VALUE.match(code):
            lines.append(ProtoLine(found[1], found[2], doc))


def _default(doc: str) -> tuple[str, str]:
    """Split a comment into the text without its default, and the default."""
    found = re.search(r"(?:^|; )default: ([^;]+)", doc)
    return (doc, "") if found is None else ((doc[: found.start()] + doc[found.end() :]).removeprefix("; "), found[1])
