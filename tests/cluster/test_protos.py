"""The checked-in generated code belongs to the checked-in protos, and every RPC has its method."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from motley.cluster.protos import generate
from motley.cluster.service.deployment.ingress import Ingress
from motley.cluster.transport.grpc_server import servicers
from motley.cluster.transport.grpc_server.servicers import SERVICES

SHARED_NAMES = {"ServerReflectionInfo"}  # for which one method does: of v1 and v1alpha the bytes are the same
CODE = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def test_digests_are_those_of_the_protos() -> None:
    recorded = json.loads((generate.HERE / generate.DIGESTS).read_text())
    assert recorded == generate.digests(), "a .proto has changed: run `make protos`"


def test_digests_change_with_a_proto(tmp_path: Path) -> None:
    proto = tmp_path / "inference.proto"
    proto.write_bytes((generate.HERE / "inference.proto").read_bytes())
    assert generate.digests(tmp_path)["inference.proto"] == generate.digests()["inference.proto"]
    proto.write_text(proto.read_text() + "message Another {}\n")
    assert generate.digests(tmp_path)["inference.proto"] != generate.digests()["inference.proto"]


def test_every_proto_has_its_code() -> None:
    for proto in generate.HERE.glob("*.proto"):
        assert all((generate.HERE / f"{proto.stem}{end}").is_file() for end in CODE), proto.name


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
def test_every_rpc_has_a_method_of_its_kind(service: ServiceDescriptor) -> None:
    for rpc in service.methods:
        method = getattr(Ingress, rpc.name)
        assert "grpc_context" in inspect.signature(method).parameters, "without it Serve gives no context"
        assert inspect.isasyncgenfunction(method) == rpc.server_streaming, rpc.name
        assert not rpc.client_streaming or rpc.server_streaming, "of those nothing reads the requests"


def test_no_two_services_share_a_method_name() -> None:
    """Serve dispatches on the last path segment; a name that is shared needs requests of different types."""
    requests: dict[str, set[str]] = {}
    for service in SERVICES:
        for rpc in service.methods:
            types = requests.setdefault(rpc.name, set())
            assert rpc.input_type.full_name not in types, f"{rpc.name} of {service.full_name} cannot be told apart"
            types.add(rpc.input_type.full_name)
    assert {name for name, types in requests.items() if len(types) > 1} <= SHARED_NAMES


def test_what_serve_registers_is_what_is_tested() -> None:
    registered: set[str] = set()

    class Server:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            registered.update(name for handler in handlers for name in handler._method_handlers)

        def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
            registered.update(f"/{service}/{name}" for name in handlers)

    for path in servicers.SERVICER_FUNCTIONS:
        module, _, name = path.rpartition(".")
        assert module == servicers.__name__
        getattr(servicers, name)(Mock(), Server())
    assert registered == {f"/{service.full_name}/{rpc.name}" for service in SERVICES for rpc in service.methods}
