"""The same fields of sampling said over every protocol of a running service, and how each refuses them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import grpc

from motley.cluster.protos import (
    inference_pb2,
    inference_pb2_grpc,
    kserve_pb2,
    kserve_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from motley.replicas.errors import InvalidRequest
from motley.replicas.limits import Limits
from motley.replicas.protocol import Request
from motley.replicas.sampling_params import SamplingParams

Fields = dict[str, Any]
PROMPT = "abc"


@dataclass(frozen=True, slots=True)
class Refusal:
    """`param` as the client calls the field."""

    status: str
    param: str


Say = Callable[[Fields], Refusal | None]  # None: this protocol has no words for these fields


def openai_completions(http_port: int) -> Say:
    return lambda fields: _post(http_port, "/v1/completions", {"prompt": PROMPT, **fields})


def openai_chat(http_port: int) -> Say:
    def say(fields: Fields) -> Refusal | None:
        if "logprobs" in fields:  # which is a switch there
            fields = {"logprobs": True, "top_logprobs": fields["logprobs"]}
        found = _post(http_port, "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], **fields})
        return Refusal(found.status, "logprobs" if found.param == "top_logprobs" else found.param)

    return say


def kserve_rest(http_port: int, model: str) -> Say:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}

    def say(fields: Fields) -> Refusal | None:
        if not _are_scalars(fields):
            return None
        body = {"inputs": [tensor], "parameters": fields}
        return _unprefixed(_post(http_port, f"/v2/models/{model}/infer", body), "parameters.")

    return say


def motley(channel: grpc.Channel) -> Say:
    stub = inference_pb2_grpc.InferenceStub(channel)

    def say(fields: Fields) -> Refusal | None:
        try:
            sampling = inference_pb2.SamplingParams(**fields)
        except (TypeError, ValueError):
            return None
        return _call(stub.Complete, inference_pb2.CompleteRequest(text=PROMPT, sampling=sampling))

    return say


def motley_stream(channel: grpc.Channel) -> Say:
    stub = inference_pb2_grpc.InferenceStub(channel)

    def say(fields: Fields) -> Refusal | None:
        try:
            sampling = inference_pb2.SamplingParams(**fields)
        except (TypeError, ValueError):
            return None
        message = inference_pb2.ChatMessage(role="user", content=PROMPT)
        return _call(
            lambda ask: list(stub.ChatStream(ask)), inference_pb2.ChatRequest(messages=[message], sampling=sampling)
        )

    return say


def kserve(channel: grpc.Channel, model: str) -> Say:
    stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)

    def say(fields: Fields) -> Refusal | None:
        if not _are_scalars(fields):
            return None
        request = kserve_pb2.ModelInferRequest(model_name=model)
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(PROMPT.encode())
        for name, value in fields.items():
            kind = "double_param" if isinstance(value, float) else "int64_param"
            setattr(request.parameters[name], kind, value)
        return _unprefixed(_call(stub.ModelInfer, request), "parameters.")

    return say


def vllm(channel: grpc.Channel) -> Say:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def say(fields: Fields) -> Refusal | None:
        if any(fields.get(name) == 0 for name in ("n", "top_p", "repetition_penalty")):
            return None  # 0 is how this protocol says nothing
        try:
            sampling = vllm_engine_pb2.SamplingParams(**fields)
        except (TypeError, ValueError):
            return None
        request = vllm_engine_pb2.GenerateRequest(request_id="bad", text=PROMPT, sampling_params=sampling)
        return _unprefixed(_call(lambda ask: list(stub.Generate(ask)), request), "sampling_params.")

    return say


def python(limits: Limits) -> Say:
    """The engine as a library."""

    def say(fields: Fields) -> Refusal | None:
        try:
            limits.check(Request("bad", (1, 2, 3), SamplingParams(**{"seed": 0, **fields})))
        except InvalidRequest as error:
            return Refusal("InvalidRequest", error.param or "")
        return Refusal("accepted", "")

    return say


def _are_scalars(fields: Fields) -> bool:
    """As parameters of KServe, which know no lists."""
    values = fields.values()
    return all(isinstance(value, float) or (type(value) is int and abs(value) < 2**63) for value in values)


def _post(port: int, path: str, body: Any) -> Refusal:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    error = content.get("error", "")
    param = error["param"] if isinstance(error, dict) else error.partition(":")[0]
    return Refusal(str(response.status), str(param))


def _call(method: Any, request: Any) -> Refusal:
    try:
        method(request)
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)
        return Refusal(call.code().name, (call.details() or "").partition(":")[0])
    return Refusal("OK", "")


def _unprefixed(refusal: Refusal, prefix: str) -> Refusal:
    """A field below another is named with its path."""
    return Refusal(refusal.status, refusal.param.removeprefix(prefix))
