"""gRPC's own services: published in packages without their .proto files, so read from the descriptors.

What a method does here is said by the docstring of ours.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor

from ..protocols import health
from ..protocols.health_rpcs import HealthRpcs
from ..protocols.reflection_rpcs import ReflectionRpcs
from .proto_text import Block, Line, ProtoFile

METHODS: Mapping[str, type] = {
    "grpc.health.v1.Health": HealthRpcs,
    "grpc.reflection.v1alpha.ServerReflection": ReflectionRpcs,
}
_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}


def published(service: ServiceDescriptor) -> ProtoFile:
    """The file of `service`. Raises KeyError where METHODS has not who answers it."""
    methods = METHODS[service.full_name]
    calls = [Line(rpc.name, _kind(rpc), _said(getattr(methods, rpc.name))) for rpc in service.methods]
    blocks = [Block("service", service.name, _said(methods), calls)]
    for message in service.file.message_types_by_name.values():
        blocks += _message(message, message.name)
    blocks += [_enum(enum, enum.name) for enum in service.file.enum_types_by_name.values()]
    return ProtoFile(service.file.package, "", blocks)


def _kind(rpc: MethodDescriptor) -> str:
    asked = ("stream " if rpc.client_streaming else "") + rpc.input_type.name
    return f"{asked} → {'stream ' if rpc.server_streaming else ''}{rpc.output_type.name}"


def _said(ours: object) -> str:
    """Its docstring in one line; a limit's name becomes its value."""
    doc = " ".join((inspect.getdoc(ours) or "").split())
    limits = {name: value for name, value in vars(health).items() if name.isupper() and isinstance(value, int | float)}
    return re.sub(r"\b[A-Z_]+\b", lambda found: f"{limits[found[0]]:g}" if found[0] in limits else found[0], doc)


def _message(message: Descriptor, name: str) -> Iterator[Block]:
    yield Block("message", name, "", [Line(field.name, _type(field)) for field in message.fields])
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            yield from _message(inner, f"{name}.{inner.name}")
    yield from (_enum(enum, f"{name}.{enum.name}") for enum in message.enum_types)


def _enum(enum: EnumDescriptor, name: str) -> Block:
    return Block("enum", name, "", [Line(value.name, str(value.number)) for value in enum.values])


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_one(kind.fields_by_name[name]) for name in ("key", "value"))
        return f"map<{key}, {value}>"
    return ("repeated " if field.is_repeated else "") + _one(field)


def _one(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    return _TYPES[field.type] if kind is None else kind.name
