"""Bodies as large as they may be, beside a steady neighbour: refused soon, by the same processes, and nobody is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from neighbour import Neighbour
from raw_http import post
from serve_process import Served
from thorough import thorough

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

COMPLETIONS, CHAT, INFER = "/v1/completions", "/v1/chat/completions", "/v2/models/tiny/infer"
IDS = [65] * 2_000_000
MESSAGE = {"role": "user", "content": "x"}
TENSOR = {"name": "input_ids", "datatype": "INT64", "shape": [len(IDS)], "data": IDS}


def doubled(count: int) -> bytes:
    return b'{"prompt": "a", %s, "z": 0, "z": 0}' % b",".join(b'"k%d": 0' % number for number in range(count))


def nested(count: int, deep: int = 480) -> bytes:
    return b'{"prompt": [%s]}' % b",".join([b"[" * deep + b"]" * deep] * count)


def chained(links: int) -> dict[str, Any]:
    """Definitions, each of which refers to the next."""
    return {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(links)} | {f"{links:x}": {"type": "string"}}


FIRST = {"$ref": "#/$defs/0"}
LAST: dict[str, Any] = {"not": {}}  # refused, when all before it have been looked at
CHAINS = {"$defs": chained(1050), "anyOf": [FIRST] * 1250 + [LAST]}
MANY = {"type": "object", "properties": {f"{i:x}": FIRST for i in range(2000)}, "$defs": chained(2000) | {"z": LAST}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": CHAINS, "strict": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": MANY, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"enum": IDS[:1000]}}} for i in range(100)]

BODIES: dict[str, tuple[str, Any, int, str]] = {
    "a field given twice, the last of 400,000": (COMPLETIONS, doubled(400_000), 413, "too_many_values"),
    "a field given twice, the last of 60,000": (COMPLETIONS, doubled(60_000), 400, "invalid_json"),
    "lists within lists": (COMPLETIONS, nested(2000), 413, "too_many_values"),
    "token ids": (COMPLETIONS, {"prompt": IDS}, 400, "context_length_exceeded"),
    "prompts": (COMPLETIONS, {"prompt": ["x"] * 1_000_000}, 400, "invalid_value"),
    "biases": (COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(range(60_000), 1)}, 400, "invalid_value"),
    "stop ids": (COMPLETIONS, {"prompt": "a", "stop_token_ids": IDS}, 400, "invalid_value"),
    "messages": (CHAT, {"messages": [MESSAGE] * 150_000}, 413, "too_many_values"),
    "messages within the count of values": (CHAT, {"messages": [MESSAGE] * 30_000}, 400, "invalid_value"),
    "a schema of references": (COMPLETIONS, {"prompt": "a", "response_format": FORMAT}, 400, "invalid_grammar"),
    "a tool of references": (CHAT, {"messages": [MESSAGE], "tools": [TOOL]}, 400, "invalid_grammar"),
    "tools": (CHAT, {"messages": [MESSAGE], "tools": TOOLS}, 400, "grammar_too_complex"),
    "a tensor": (INFER, {"inputs": [TENSOR]}, 413, "the body holds more than 262144 values; expected at most as many"),
}


EACH_TIME = ("a field given twice, the last of 400,000", "a schema of references", "a tensor")


@pytest.mark.parametrize("name", [*EACH_TIME, *thorough(*(name for name in BODIES if name not in EACH_TIME))])
def test_over_http(service: Served, report: Callable[[str], None], name: str) -> None:
    path, body, status, code = BODIES[name]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(data) < 8 * 2**20, "within what is read at all"
    service.wait_idle()
    before, neighbour = service.replicas(), Neighbour(service)
    with neighbour.beside():
        for _ in range(3):
            reply = asyncio.run(post(service.http_port, path, data))
            assert reply.status == status, reply.body[:300]
            error = reply.json()["error"]
            assert (error if path == INFER else error["code"]) == code  # KServe's errors are a message alone
            assert len(reply.body) < 1000, "it is not quoted whole"
    report(f"{name}, {len(data) / 2**20:.1f} MiB, 3 times: {neighbour.pace()}")
    assert service.replicas() == before, "the same processes"


@pytest.mark.parametrize("field", ["output_ids", *thorough("token_ids", "stop_token_ids")])
def test_over_grpc(service: Served, report: Callable[[str], None], field: str) -> None:
    many = [65] * 4_000_000
    request = pb.CompleteRequest(text="a", sampling=pb.SamplingParams(max_tokens=1))
    if field == "token_ids":
        request.token_ids.ids.extend(many)
    elif field == "output_ids":
        request.output_ids.add().ids.extend(many)
    else:
        request.sampling.stop_token_ids.extend(many)
    service.wait_idle()
    before, neighbour = service.replicas(), Neighbour(service)
    with neighbour.beside(), grpc.insecure_channel(service.grpc) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                inference_pb2_grpc.InferenceStub(channel).Complete(request, timeout=60)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in caught.value.details()
            assert len(caught.value.details()) < 1000
    report(f"4,000,000 {field} over gRPC, 3 times: {neighbour.pace()}")
    assert service.replicas() == before, "the same processes"
