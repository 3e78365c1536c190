"""Declarations of a protobuf module, as plain data. Arguments: names of modules; prints JSON."""

import importlib
import json
import sys

from google.protobuf import descriptor_pb2


def messages(prefix, found):
    """Full name -> field -> number, type, label and the type's name, at any depth."""
    for message in found:
        name = f"{prefix}.{message.name}"
        yield name, {field.name: [field.number, field.type, field.label, field.type_name] for field in message.field}
        yield from messages(name, message.nested_type)


def facts(module):
    proto = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(proto)
    rpcs = {
        f"{proto.package}.{service.name}/{rpc.name}": [
            rpc.input_type,
            rpc.output_type,
            rpc.client_streaming,
            rpc.server_streaming,
        ]
        for service in proto.service
        for rpc in service.method
    }
    enums = {f"{proto.package}.{enum.name}": {v.name: v.number for v in enum.value} for enum in proto.enum_type}
    return {"messages": dict(messages(proto.package, proto.message_type)), "rpcs": rpcs, "enums": enums}


if __name__ == "__main__":
    print(json.dumps([facts(importlib.import_module(name)) for name in sys.argv[1:]]))
