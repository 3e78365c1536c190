"""docs/api.md and docs/reference are what protos, OpenAPI document and sources make of them; nothing is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference_pages
from api_reference import raised_codes as sources
from api_reference.error_codes import AT_START, MEANINGS
from api_reference.proto_text import read_proto
from api_reference.raised_codes import RaisedError, raised_in
from api_reference.reference_page import PAGE, PROTOS, write_reference
from fastapi.routing import APIRoute
from google.protobuf.descriptor import Descriptor, EnumDescriptor, ServiceDescriptor

from motley.cluster.api.health.health_protocol import MAX_OF_TENANT, MAX_WATCHES
from motley.cluster.api.kserve.rest.kserve_refused import refused_kserve_routes
from motley.cluster.api.openai.openai_refused import refused_routes
from motley.cluster.api.openapi_routes import OPERATIONS
from motley.cluster.fleet.control.rpcs.control_server import SERVICES as ADMIN_SERVICES
from motley.cluster.protos import inference_pb2
from motley.cluster.security.edge.haproxy_config import HAProxyEdge
from motley.cluster.transport.grpc_server.servicers import SERVICES
from motley.cluster.transport.http_server.openapi import openapi_document

BELOW = "/{rest:path}"


@pytest.fixture(scope="module")
def text() -> str:
    return write_reference()


def test_the_page_is_up_to_date(text: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == text, "run `make reference`"


def test_the_pages_of_commands_fleet_files_and_metrics_are_up_to_date() -> None:
    stale = [path.name for path, text in reference_pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make reference`, and commit docs/reference"


@pytest.mark.parametrize("service", [*SERVICES, *ADMIN_SERVICES[:2]], ids=lambda service: service.full_name)
def test_every_rpc_and_what_it_takes_and_gives_is_there(text: str, service: ServiceDescriptor) -> None:
    own = _package(text, service.file.package)
    assert f"#### Service `{service.full_name}`" in own
    for rpc in service.methods:
        assert f"| `{rpc.name}` |" in own
        for kind in _reached(rpc.input_type) | _reached(rpc.output_type):
            there = _package(text, kind.file.package)
            name = kind.full_name.removeprefix(f"{kind.file.package}.")
            names = [field.name for field in (kind.values if isinstance(kind, EnumDescriptor) else kind.fields)]
            if names:
                table = _section(there, "####", f"`{name}`")
                assert [field for field in names if f"| `{field}` |" not in table] == []


def _package(text: str, name: str) -> str:
    """Return the sections of a package, of all of its files."""
    title = f"### Package `{name}`\n"
    parts = [f"{title}{part}" for part in text.split(title)[1:]]
    assert parts, f"there is no {title}"
    return "".join(_section(part, "###", f"Package `{name}`") for part in parts)


def _section(text: str, level: str, title: str) -> str:
    """From this heading to the next of its level or above."""
    _, found, rest = f"\n{text}".partition(f"\n{level} {title}\n")
    assert found, f"there is no {title}"
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def _reached(message: Descriptor, seen: set[Any] | None = None) -> set[Any]:
    """The message, and all messages and enums in it. A map's entries have no name."""
    seen = set() if seen is None else seen
    if message not in seen:
        seen.add(message)
        for field in message.fields:
            if field.enum_type is not None:
                seen.add(field.enum_type)
            elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
                _reached(field.message_type, seen)
            elif field.message_type is not None and (value := field.message_type.fields_by_name["value"]).message_type:
                _reached(value.message_type, seen)
    return seen


def test_limits_of_grpcs_own_services_are_told(text: str) -> None:
    part = _package(text, "grpc.health.v1")
    assert f"{MAX_WATCHES} watches at a time from one address, and beyond {MAX_OF_TENANT} of one tenant" in part


def test_every_route_of_the_application_is_there(text: str, ingress: Any) -> None:
    refused = {(route.method, route.path) for route in (*refused_routes(), *refused_kserve_routes())}
    of_kserve = {(route.method, route.path) for route in refused_kserve_routes()}
    rows = _section(text, "###", "Endpoints that are refused by name").splitlines()
    seen = 0
    for route in ingress.__serve_build_asgi_app__().routes:
        assert isinstance(route, APIRoute), f"{route} is a kind of route that the page does not know"
        seen += 1
        for method in route.methods - {"HEAD"}:  # said once for all
            if (method, route.path) in of_kserve:
                path = re.sub(":path", "", route.path)
                assert any(_is_refusal(row, path, ("it",), method) for row in rows), (method, route.path)
            elif (method, route.path) in refused:
                path, below = route.path.removesuffix(BELOW), route.path.endswith(BELOW)
                which = ("all below it", "it and all below it") if below else ("it", "it and all below it")
                assert any(_is_refusal(row, path, which, method) for row in rows), (method, route.path)
            else:
                _section(text, "###", f"{method} {route.path.replace(':path}', '}')}")
    assert seen > len(refused)


def _is_refusal(row: str, path: str, which: tuple[str, ...], method: str) -> bool:
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    return len(cells) == 4 and cells[0] == f"`{path}`" and cells[1] in which and method in cells[2].split(", ")


def test_every_answer_of_haproxy_is_there(text: str, tmp_path: Path) -> None:
    """Read from what is written for HAProxy."""
    edge = HAProxyEdge(host="127.0.0.1", http_port=1, grpc_port=2)
    edge.write(tmp_path)
    pages = [path.read_text() for path in (tmp_path / "errors").iterdir()]
    rules = [line for _, new, _ in edge.edits(tmp_path) for line in new.splitlines() if '"code"' in line]
    said = [re.search(r'(?:status|HTTP/1.1) (\d{3})\b.*"code": "(\w+)"', answer, re.DOTALL) for answer in pages + rules]
    answers = {(found[1], found[2]) for found in said if found is not None}
    assert None not in said
    assert len(pages) == 6
    assert {("431", "head_too_large"), ("503", "not_ready"), ("504", "timeout")} <= answers
    table = _section(text, "###", "Answered by HAProxy")
    for status, code in answers:
        assert re.search(rf"^\| {status} \| `\w+` \| `{code}` \|", table, re.MULTILINE), (status, code)


def test_every_code_in_the_sources_is_there(text: str) -> None:
    """Found by their look, as the page does not."""
    listed = set(re.findall(r"^\| `(\w+)` \|", _section(text, "###", "Codes"), re.MULTILINE))
    listed |= set(re.findall(r"^\| `(\w+)` \|", _section(text, "###", "At the start"), re.MULTILINE))
    written: set[str] = set()
    for package in ("cluster", "replicas"):
        for path in (sources.ROOT / package).rglob("*.py"):
            written |= set(re.findall(r"""\bcode: str(?: \| None)? = "(\w+)"|\bcode="(\w+)\"""", path.read_text()))
    assert written
    assert {word for pair in written for word in pair if word} <= listed
    assert listed == MEANINGS.keys() | AT_START.keys()


def test_a_code_that_is_not_listed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    more = sources.raised_errors() | {RaisedError("brand_new", "NotFound", "cluster")}
    monkeypatch.setattr("api_reference.errors_section.raised_errors", lambda: more)
    with pytest.raises(ValueError, match="brand_new"):
        write_reference()


def test_a_code_that_is_raised_no_longer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    less = {one for one in sources.raised_errors() if one.code != "queue_full"}
    monkeypatch.setattr("api_reference.errors_section.raised_errors", lambda: less)
    with pytest.raises(ValueError, match="queue_full"):
        write_reference()


def silent(text: str) -> list[str]:
    """Rows of fields, RPCs and values that say nothing of themselves. What is refused as a whole is, and an enum may
    say it for all its values.
    """
    found: list[str] = []
    for section in re.split(r"^#{2,4} ", text, flags=re.MULTILINE):
        said = re.search(r"^[A-Z].*$", section.partition("\n")[2], re.MULTILINE)
        whole = said is not None and (said[0].startswith("Refused") or "| value | number |" in section)
        rows = [] if whole else [row for row in section.splitlines() if re.match(r"\| `.*\|  \|$", row)]
        found += [f"{section.splitlines()[0]}: {row}" for row in rows]
    return found


def test_every_field_rpc_and_value_has_a_sentence(text: str) -> None:
    assert silent(text) == []
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) > 1000


def test_what_has_no_sentence_is_found() -> None:
    table = "#### `M`\n\n| field | type |  |\n| --- | --- | --- |\n| `x` | `int32` | said |\n| `y` | `int32` |  |\n"
    assert silent(table) == ["`M`: | `y` | `int32` |  |"]
    assert silent(table.replace("`M`\n", "`M`\n\nRefused.\n")) == []


def properties(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every property at any depth of the OpenAPI document, by its path."""
    if isinstance(node, dict):
        known = node.get("properties")
        for name, schema in known.items() if isinstance(known, dict) else ():
            yield f"{at}.{name}", schema
    for name, inner in node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ()):
        yield from properties(inner, f"{at}/{name}")


def test_every_property_of_the_document_has_a_sentence() -> None:
    found = dict(properties(openapi_document(OPERATIONS)))
    assert len(found) > 1200
    assert [path for path, schema in found.items() if not schema.get("description")] == []


def test_what_the_absence_of_a_requests_field_means_is_said(text: str) -> None:
    """Covers fields that can be absent, and those whose zero is the same as absence."""
    grpc = text[text.index("\n## gRPC\n") :]
    tables = [part for part in re.split(r"^#### ", grpc, flags=re.MULTILINE) if "| default |" in part]
    rows = [row.split(" | ") for table in tables if "\nRefused" not in table for row in table.splitlines()[4:] if row]
    rows = [row for row in rows if row[0].startswith("| `")]
    assert len(rows) > 120
    assert [row for row in rows if row[1].startswith("`optional") and not row[2].strip()] == []
    http = text[text.index("\n## HTTP\n") : text.index("\n## gRPC\n")]
    tables = [part for part in re.split(r"^###? ", http, flags=re.MULTILINE) if "| default |" in part]
    assert len(tables) >= 7
    for table in tables:
        rows = [row.split(" | ") for row in table.partition("The answer")[0].splitlines() if row.startswith("| `")]
        assert rows
        assert [row for row in rows if not row[2].strip()] == []


HELPER = "def made(at, code='second'):\n    return NotFound(at, code=code)\n"
OWN = "class Own(Exception):\n    def __init__(self, why, code='third'): self.code = code\n"
SHAPES = {
    "raise NotFound('x', code='first')": {("first", "NotFound")},
    "raise NotFound('x', code='first' if y else 'other')": {("first", "NotFound"), ("other", "NotFound")},
    "raise errors.Overloaded('x')": {(None, "Overloaded")},
    "raise CheckpointError('x')": {("bad_checkpoint", "CheckpointError")},
    HELPER + "raise made('x')": {("second", "NotFound")},
    HELPER + "raise made('x', 'given')": {("given", "NotFound")},
    HELPER + "raise made('x', code='given')": {("given", "NotFound")},
    "class Mine(InvalidRequest): pass\nraise Mine('x', code='own')": {("own", "InvalidRequest")},
    OWN + "try:\n    raise Own('y', 'given')\nexcept Own as own:\n    raise NotFound('x', code=own.code)": {
        ("given", "NotFound")
    },
    OWN + "raise Own('y')\nNotFound('x', code=own.code)": {("third", "NotFound")},
    "print('x', file=y)": set(),
}


@pytest.mark.parametrize("source", SHAPES)
def test_how_codes_are_raised(source: str) -> None:
    found = raised_in(source, Path("cluster/web/x.py"))
    assert {(one.code, one.kind) for one in found} == SHAPES[source]
    assert {one.folder for one in found} <= {"cluster/web"}


@pytest.mark.parametrize("source", ["raise NotFound('x', code=word)", "raise found_elsewhere('x', code='first')"])
def test_what_cannot_be_told_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"cluster/x\.py:1"):
        raised_in(source, Path("cluster/x.py"))


def test_every_message_field_and_number_is_read() -> None:
    blocks = {block.name: block for block in read_proto(PROTOS / "inference.proto").blocks}
    for name, message in inference_pb2.DESCRIPTOR.message_types_by_name.items():
        assert _names(message) == {line.name for line in blocks[name].lines}, name
    for name, enum in inference_pb2.DESCRIPTOR.enum_types_by_name.items():
        assert {value.name for value in enum.values} == {line.name for line in blocks[name].lines}


def _names(message: Descriptor) -> set[str]:
    return {field.name for field in message.fields}


def test_comments_above_and_behind_are_kept(tmp_path: Path) -> None:
    proto = tmp_path / "a.proto"
    proto.write_text("// About.\npackage a.b;\n\n// Said\n// above.\nmessage M {\n  int32 x = 1;  // behind\n}\n")
    found = read_proto(proto)
    assert (found.package, found.doc) == ("a.b", "About.")
    [block] = found.blocks
    assert (block.kind, block.name, block.doc) == ("message", "M", "Said above.")
    assert (block.lines[0].name, block.lines[0].kind, block.lines[0].doc) == ("x", "int32", "behind")
