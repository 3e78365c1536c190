"""The checked-in generated code belongs to the checked-in protos, and every RPC has its method."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from motley.cluster.ingress import Ingress
from motley.cluster.protos import generate
from motley.cluster.servicers import SERVICES

CODE = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def test_digests_are_those_of_the_protos() -> None:
    recorded = json.loads((generate.HERE / generate.DIGESTS).read_text())
    assert recorded == generate.digests(), "a .proto has changed: run `make protos`"


def test_digests_change_with_a_proto(tmp_path: Path) -> None:
    proto = tmp_path / "inference.proto"
    proto.write_bytes((generate.HERE / "inference.proto").read_bytes())
    assert generate.digests(tmp_path) == generate.digests()
    proto.write_text(proto.read_text() + "message Another {}\n")
    assert generate.digests(tmp_path) != generate.digests()


def test_every_proto_has_its_code() -> None:
    for proto in generate.HERE.glob("*.proto"):
        assert all((generate.HERE / f"{proto.stem}{end}").is_file() for end in CODE), proto.name


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
def test_every_rpc_has_a_method_of_its_kind(service: ServiceDescriptor) -> None:
    for rpc in service.methods:
        method = getattr(Ingress, rpc.name)
        assert "grpc_context" in inspect.signature(method).parameters, "without it Serve gives no context"
        assert inspect.isasyncgenfunction(method) == rpc.server_streaming, rpc.name
        assert not rpc.client_streaming


def test_no_two_services_share_a_method_name() -> None:
    """Serve dispatches on the last path segment."""
    names = [rpc.name for service in SERVICES for rpc in service.methods]
    assert len(names) == len(set(names))
