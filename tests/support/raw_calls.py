"""One long request over each protocol, by hand, and every way in which its client may leave it."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from raw_http import DATA, HEADERS, RST_STREAM, Http2, head
from served import Served

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import kserve_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

VLLM_ID = "the one to abort"


@dataclass(frozen=True)
class Asked:
    """What is asked for over any protocol. `timeout_s`: by the request's own field, where it has one."""

    prompt: str = "abc"
    max_tokens: int = 60_000
    logprobs: int | None = None
    timeout_s: float | None = None


def _motley(asked: Asked) -> bytes:
    sampling = pb.SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, logprobs=asked.logprobs)
    return pb.CompleteRequest(text=asked.prompt, sampling=sampling, timeout_s=asked.timeout_s).SerializeToString()


def _kserve(asked: Asked, *, streaming: bool) -> bytes:
    request = kserve_pb2.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(asked.prompt.encode())
    if streaming:
        request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = asked.max_tokens
    request.parameters["ignore_eos"].bool_param = True
    if asked.logprobs is not None:
        request.parameters["logprobs"].int64_param = asked.logprobs
    if asked.timeout_s is not None:
        request.parameters["timeout"].int64_param = round(1e6 * asked.timeout_s)
    return request.SerializeToString()


def _vllm(asked: Asked, *, stream: bool) -> bytes:
    sampling = vllm_engine_pb2.SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, logprobs=asked.logprobs)
    return vllm_engine_pb2.GenerateRequest(
        request_id=VLLM_ID, text=asked.prompt, sampling_params=sampling, stream=stream
    ).SerializeToString()


def _openai(asked: Asked, *, stream: bool) -> bytes:
    body: dict[str, Any] = {"prompt": asked.prompt, "max_tokens": asked.max_tokens, "ignore_eos": True}
    body |= {"stream": stream, "logprobs": asked.logprobs and min(asked.logprobs, 5)}
    return json.dumps(body | ({} if asked.timeout_s is None else {"timeout_s": asked.timeout_s})).encode()


@dataclass(frozen=True)
class Protocol:
    """rpc: None over HTTP. streams: something comes before the end. fields: a request can carry its deadline."""

    name: str
    rpc: str | None
    message: Callable[[Asked], bytes]
    streams: bool = False
    fields: bool = True

    @property
    def ways(self) -> list[str]:
        """`field`: a deadline in the request itself; `deadline`: gRPC's own."""
        own = ["field"] if self.fields else []
        if self.rpc is None:
            return ["disconnect", *own]
        return ["cancel", "disconnect", "deadline", *own] + ["abort"] * self.rpc.endswith("/Generate")


MOTLEY, KSERVE = "motley.v1.Inference", "inference.GRPCInferenceService"
GENERATE = "vllm.grpc.engine.VllmEngine/Generate"
PROTOCOLS = [
    Protocol("motley.v1 stream", f"{MOTLEY}/CompleteStream", _motley, streams=True),
    Protocol("motley.v1", f"{MOTLEY}/Complete", _motley),
    Protocol("OpenAI stream", None, partial(_openai, stream=True), streams=True),
    Protocol("OpenAI", None, partial(_openai, stream=False)),
    Protocol("ModelStreamInfer", f"{KSERVE}/ModelStreamInfer", partial(_kserve, streaming=True), streams=True),
    Protocol("ModelInfer", f"{KSERVE}/ModelInfer", partial(_kserve, streaming=False)),
    Protocol("vLLM Generate stream", GENERATE, partial(_vllm, stream=True), streams=True, fields=False),
    Protocol("vLLM Generate", GENERATE, partial(_vllm, stream=False), fields=False),
]


class RawCall:
    """A request on a connection of its own. `grpc_timeout`: as the wire has it, "500m"."""

    def __init__(self, service: Served, protocol: Protocol, asked: Asked, grpc_timeout: str = "") -> None:
        self._service, self._protocol = service, protocol
        message = protocol.message(asked)
        self._http2: Http2 | None = None
        if protocol.rpc is None:
            self._connection = socket.socket()
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._connection.connect(("127.0.0.1", service.http_port))
            self._connection.sendall(head(service.http_port, "/v1/completions", message) + message)
            return
        self._http2 = Http2(service.grpc_port)
        self._connection = self._http2.connection
        self._stream, frames = self._http2.open(service.grpc_port, f"/{protocol.rpc}", message, grpc_timeout)
        self._connection.sendall(frames)

    def begun(self, seconds: float = 60.0) -> bool:
        """Some of the answer has come."""
        deadline = time.monotonic() + seconds
        if self._http2 is None:
            self._connection.settimeout(seconds)
            return self._connection.recv(4096).startswith(b"HTTP/1.1 200")
        while not self._http2.payloads.get((DATA, self._stream)) and time.monotonic() < deadline:
            self._http2.read(1.0)
        return bool(self._http2.payloads.get((DATA, self._stream)))

    def leave(self, way: str) -> None:
        if way == "disconnect":
            self._connection.close()
        elif way == "cancel":
            assert self._http2 is not None
            self._connection.sendall(self._http2.reset(self._stream))
        elif way == "abort":
            with grpc.insecure_channel(self._service.grpc) as channel:
                abort = vllm_engine_pb2.AbortRequest(request_ids=[VLLM_ID])
                vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(abort, timeout=60)

    def outcome(self, seconds: float = 60.0) -> str:
        """How it ended, read to the end: an HTTP status, or gRPC's number; and whatever it said."""
        deadline = time.monotonic() + seconds
        if self._http2 is None:
            self._connection.settimeout(seconds)
            received = b""
            while part := self._connection.recv(65_536):
                received += part
            return received.split(maxsplit=2)[1].decode() + " " + received.partition(b"\r\n\r\n")[2].decode()
        while time.monotonic() < deadline:
            for kind, stream in self._http2.read(1.0):
                if stream == self._stream and kind == RST_STREAM:
                    return "reset"
            found = re.search(
                rb"grpc-status.([0-9]{1,2})", self._http2.payloads.get((HEADERS, self._stream), b""), re.S
            )
            if found is not None:
                said = self._http2.payloads.get((DATA, self._stream), b"")
                return found[1].decode() + " " + said.decode(errors="replace")
        raise AssertionError(f"{self._protocol.name} did not end within {seconds:g} s")

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()
