"""Description of gRPC's own services from their descriptors, since packages publish them without their .proto files.

The docstrings of Motley's methods say what each does here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor

from motley.cluster.api.health import health_protocol
from motley.cluster.api.health.health_rpcs import HealthRpcs
from motley.cluster.api.reflection_rpcs import ReflectionRpcs

from .proto_text import ProtoBlock, ProtoFile, ProtoLine

METHODS: Mapping[str, type] = {
    "grpc.health.v1.Health": HealthRpcs,
    "grpc.reflection.v1alpha.ServerReflection": ReflectionRpcs,
    "grpc.reflection.v1.ServerReflection": ReflectionRpcs,
}
_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}


# What their messages say, by full name: comments of ours, as their files are not here.
FIELD_COMMENTS: Mapping[str, str] = {
    "grpc.health.v1.HealthCheckRequest.service": "a service's full name; empty: all of them together",
    "grpc.health.v1.HealthCheckResponse.status": "whether it takes calls",
    "grpc.health.v1.HealthCheckResponse.ServingStatus.UNKNOWN": "never told",
    "grpc.health.v1.HealthCheckResponse.ServingStatus.SERVING": "it takes calls",
    "grpc.health.v1.HealthCheckResponse.ServingStatus.NOT_SERVING": "it does not: no engine goes round, or it stops",
    "grpc.health.v1.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN": "there is no such service; of Watch alone",
    "grpc.health.v1.HealthListResponse.statuses": "by the full names of services",
    "grpc.reflection.v1.ServerReflectionRequest.host": "changes nothing: one host is served",
    "grpc.reflection.v1.ServerReflectionRequest.file_by_filename": "asks for the file of this name",
    "grpc.reflection.v1.ServerReflectionRequest.file_containing_symbol": "for the file that declares this",
    "grpc.reflection.v1.ServerReflectionRequest.file_containing_extension": "for the file of this extension",
    "grpc.reflection.v1.ServerReflectionRequest.all_extension_numbers_of_type": "for a message's extensions",
    "grpc.reflection.v1.ServerReflectionRequest.list_services": "for all services, whatever the text",
    "grpc.reflection.v1.ExtensionRequest.containing_type": "the message that is extended",
    "grpc.reflection.v1.ExtensionRequest.extension_number": "and the field's number",
    "grpc.reflection.v1.ServerReflectionResponse.valid_host": "the request's host",
    "grpc.reflection.v1.ServerReflectionResponse.original_request": "which request this answers",
    "grpc.reflection.v1.ServerReflectionResponse.file_descriptor_response": "a file and those it imports",
    "grpc.reflection.v1.ServerReflectionResponse.all_extension_numbers_response": "a message's extensions",
    "grpc.reflection.v1.ServerReflectionResponse.list_services_response": "all services",
    "grpc.reflection.v1.ServerReflectionResponse.error_response": "why there is no other answer",
    "grpc.reflection.v1.FileDescriptorResponse.file_descriptor_proto": "each a serialized FileDescriptorProto",
    "grpc.reflection.v1.ExtensionNumberResponse.base_type_name": "the message that is extended",
    "grpc.reflection.v1.ExtensionNumberResponse.extension_number": "numbers of fields",
    "grpc.reflection.v1.ListServiceResponse.service": "one for each",
    "grpc.reflection.v1.ServiceResponse.name": "its full name",
    "grpc.reflection.v1.ErrorResponse.error_code": "a gRPC status, such as 5 for NOT_FOUND",
    "grpc.reflection.v1.ErrorResponse.error_message": "what is wrong",
}


def reachable_messages(message: Descriptor, seen: set[Descriptor] | None = None) -> set[Descriptor]:
    """Return the message and all messages in it; for a map the messages of its values, not its entries."""
    seen = set() if seen is None else seen
    if message not in seen:
        seen |= set() if message.GetOptions().map_entry else {message}
        for field in message.fields:
            if field.message_type is not None:
                reachable_messages(field.message_type, seen)
    return seen


def read_service(service: ServiceDescriptor) -> ProtoFile:
    """Return the description of the file of `service`. Raises KeyError if METHODS does not name the class that
    answers it.
    """
    methods = METHODS[service.full_name]
    calls = [ProtoLine(rpc.name, _kind(rpc), _said(getattr(methods, rpc.name))) for rpc in service.methods]
    blocks = [ProtoBlock("service", service.name, _said(methods), calls)]
    for message in service.file.message_types_by_name.values():
        blocks += _message(message, message.name)
    blocks += [_enum(enum, enum.name) for enum in service.file.enum_types_by_name.values()]
    return ProtoFile(service.file.package, "", blocks)


def _kind(rpc: MethodDescriptor) -> str:
    requested = ("stream " if rpc.client_streaming else "") + rpc.input_type.name
    return f"{requested} → {'stream ' if rpc.server_streaming else ''}{rpc.output_type.name}"


def _said(ours: object) -> str:
    """Return an object's docstring in one line, with the names of limits replaced by their values."""
    doc = " ".join((inspect.getdoc(ours) or "").split())
    limits = {
        name: value
        for name, value in vars(health_protocol).items()
        if name.isupper() and isinstance(value, int | float)
    }
    return re.sub(r"\b[A-Z_]+\b", lambda found: f"{limits[found[0]]:g}" if found[0] in limits else found[0], doc)


def _message(message: Descriptor, name: str) -> Iterator[ProtoBlock]:
    said = [ProtoLine(one.name, _type(one), _about(one.full_name), _zero(one)) for one in message.fields]
    yield ProtoBlock("message", name, "", said)
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            yield from _message(inner, f"{name}.{inner.name}")
    yield from (_enum(enum, f"{name}.{enum.name}") for enum in message.enum_types)


def _enum(enum: EnumDescriptor, name: str) -> ProtoBlock:
    said = [ProtoLine(one.name, str(one.number), _about(f"{enum.full_name}.{one.name}")) for one in enum.values]
    return ProtoBlock("enum", name, "", said)


def _about(name: str) -> str:
    return FIELD_COMMENTS.get(name.replace("v1alpha", "v1"), "")


def _zero(field: FieldDescriptor) -> str:
    """Return what the absence of a single text or number means."""
    plain = not field.is_repeated and field.message_type is None and field.enum_type is None
    return f"`{json.dumps(field.default_value)}`" if plain and not field.has_presence else ""


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_one(kind.fields_by_name[name]) for name in ("key", "value"))
        return f"map<{key}, {value}>"
    return ("repeated " if field.is_repeated else "") + _one(field)


def _one(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    return _TYPES[field.type] if kind is None else kind.name
