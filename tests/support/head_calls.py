"""Calls whose heads hold what a test says, over both protocols."""

from __future__ import annotations

import socket
from typing import Any

import grpc
from endless import http_head

from motley.cluster.protos import inference_pb2 as pb

Fields = list[tuple[str, str]]


def http_fields(fields: Fields) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in fields)


def over_grpc(stub: Any, metadata: Fields, stream: bool) -> str:
    try:
        if stream:
            request = pb.CompleteRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
            list(stub.CompleteStream(request, metadata=metadata, timeout=60))
        else:
            stub.GetModel(pb.GetModelRequest(), metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def over_http(port: int, fields: Fields) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(http_head("GET /v1/models", f"{http_fields(fields)}Connection: close\r\n"))
        return int(b"".join(iter(lambda: connection.recv(65_536), b""))[9:12])
