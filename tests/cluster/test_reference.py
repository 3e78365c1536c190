"""docs/api.md is what the protos and the OpenAPI document make of it, and nothing is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from motley.cluster.proto_text import read
from motley.cluster.protos import inference_pb2
from motley.cluster.reference import PAGE, PROTOS, page
from motley.cluster.web.servicers import SERVICES


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make reference`"


OURS = [service for service in SERVICES if (PROTOS / Path(service.file.name).name).is_file()]  # the rest: gRPC's own


@pytest.mark.parametrize("service", OURS, ids=lambda service: service.full_name)
def test_every_rpc_of_our_protos_is_there(service: ServiceDescriptor) -> None:
    text = page()
    assert f"#### Service `{service.full_name}`" in text
    assert all(f"| `{rpc.name}` |" in text for rpc in service.methods)


def test_every_message_field_and_number_is_read() -> None:
    blocks = {block.name: block for block in read(PROTOS / "inference.proto").blocks}
    for name, message in inference_pb2.DESCRIPTOR.message_types_by_name.items():
        assert _names(message) == {line.name for line in blocks[name].lines}, name
    for name, enum in inference_pb2.DESCRIPTOR.enum_types_by_name.items():
        assert {value.name for value in enum.values} == {line.name for line in blocks[name].lines}


def _names(message: Descriptor) -> set[str]:
    return {field.name for field in message.fields}


def test_comments_above_and_behind_are_kept(tmp_path: Path) -> None:
    proto = tmp_path / "a.proto"
    proto.write_text("// About.\npackage a.b;\n\n// Said\n// above.\nmessage M {\n  int32 x = 1;  // behind\n}\n")
    found = read(proto)
    assert (found.package, found.doc) == ("a.b", "About.")
    [block] = found.blocks
    assert (block.kind, block.name, block.doc) == ("message", "M", "Said above.")
    assert (block.lines[0].name, block.lines[0].kind, block.lines[0].doc) == ("x", "int32", "behind")
