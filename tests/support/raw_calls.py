"""One long request over each protocol, by hand, and every way in which its client may leave it."""

from __future__ import annotations

import json
import re
import socket
import time
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from raw_http import DATA, HEADERS, RST_STREAM, Http2, head
from service_checkpoint import ids_of
from thorough import halves

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import kserve_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

MAX_INPUT = 20_000  # tokens: some seconds of work


@dataclass(frozen=True)
class Asked:
    """A request over any protocol. `timeout_s`: by the request's own field, where it has one.

    `regex`: what the whole answer matches.

    Of an embedding `max_tokens` is how much of its prompt there is at least, up to MAX_INPUT: that takes its time.
    """

    prompt: str = "abc"
    max_tokens: int = 60_000
    n: int = 1
    logprobs: int | None = None
    timeout_s: float | None = None
    regex: str | None = None
    id: str = "the one to abort"

    @property
    def text(self) -> str:
        return self.prompt * -(-min(self.max_tokens, MAX_INPUT) // len(self.prompt))


def _sampling(requested: Asked) -> pb.SamplingParams:
    held = None if requested.regex is None else pb.Grammar(regex=requested.regex)
    return pb.SamplingParams(
        max_tokens=requested.max_tokens, ignore_eos=True, n=requested.n, logprobs=requested.logprobs, grammar=held
    )


def _motley(requested: Asked) -> bytes:
    request = pb.CompleteRequest(text=requested.prompt, sampling=_sampling(requested), timeout_s=requested.timeout_s)
    return request.SerializeToString()


def _motley_chat(requested: Asked) -> bytes:
    messages = [pb.ChatMessage(role="user", content=requested.prompt)]
    request = pb.ChatRequest(messages=messages, sampling=_sampling(requested), timeout_s=requested.timeout_s)
    return request.SerializeToString()


def _motley_embeddings(requested: Asked) -> bytes:
    inputs = [pb.EmbeddingInput(text=requested.text)]
    return pb.EmbeddingsRequest(inputs=inputs, timeout_s=requested.timeout_s).SerializeToString()


def _kserve(requested: Asked, *, streaming: bool) -> bytes:
    request = kserve_pb2.ModelInferRequest(model_name="tiny")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(requested.prompt.encode())
    if streaming:
        request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = requested.max_tokens
    request.parameters["ignore_eos"].bool_param = True
    if requested.regex is not None:
        request.parameters["regex"].string_param = requested.regex
    if requested.logprobs is not None:
        request.parameters["logprobs"].int64_param = requested.logprobs
    if requested.timeout_s is not None:
        request.parameters["timeout"].int64_param = round(1e6 * requested.timeout_s)
    return request.SerializeToString()


def _kserve_rest(requested: Asked) -> bytes:
    parameters: dict[str, Any] = {"max_tokens": requested.max_tokens, "ignore_eos": True}
    if requested.regex is not None:
        parameters["regex"] = requested.regex
    if requested.timeout_s is not None:
        parameters["timeout"] = round(1e6 * requested.timeout_s)
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [requested.prompt]}
    return json.dumps({"inputs": [text], "parameters": parameters}).encode()


def _vllm(requested: Asked, *, stream: bool) -> bytes:
    held = {} if requested.regex is None else {"regex": requested.regex}
    sampling = vllm_engine_pb2.SamplingParams(
        max_tokens=requested.max_tokens, ignore_eos=True, logprobs=requested.logprobs, **held
    )
    return vllm_engine_pb2.GenerateRequest(
        request_id=requested.id, text=requested.prompt, sampling_params=sampling, stream=stream
    ).SerializeToString()


def _vllm_embed(requested: Asked) -> bytes:
    return vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": ids_of(requested.text)}).SerializeToString()


def _json(requested: Asked, fields: dict[str, Any]) -> bytes:
    more: dict[str, Any] = {} if requested.timeout_s is None else {"timeout_s": requested.timeout_s}
    more |= {} if requested.regex is None else {"structured_outputs": {"regex": requested.regex}}
    return json.dumps(fields | more).encode()


def _openai(requested: Asked, *, stream: bool) -> bytes:
    body: dict[str, Any] = {"prompt": requested.prompt, "max_tokens": requested.max_tokens, "ignore_eos": True}
    few = requested.logprobs and min(requested.logprobs, 5)
    return _json(requested, body | {"stream": stream, "n": requested.n, "logprobs": few})


def _openai_chat(requested: Asked, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": requested.prompt}]
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": requested.max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    body["n"] = requested.n
    return _json(
        requested, body | ({"logprobs": True, "top_logprobs": requested.logprobs} if requested.logprobs else {})
    )


def _openai_embeddings(requested: Asked) -> bytes:
    return _json(requested, {"input": requested.text})


@dataclass(frozen=True)
class Protocol:
    """`call`: a path over HTTP, or an RPC.

    streams  something comes before the end
    fields   a request can carry its deadline
    chat     the prompt is what a user says
    """

    name: str
    call: str
    message: Callable[[Asked], bytes]
    streams: bool = False
    fields: bool = True
    chat: bool = False

    @property
    def over_http(self) -> bool:
        return self.call.startswith("/")

    @property
    def embeds(self) -> bool:
        return "mbed" in self.name

    @property
    def ways(self) -> list[str]:
        """`field`: a deadline in the request itself; `deadline`: gRPC's own."""
        own = ["field"] if self.fields else []
        if self.over_http:
            return ["disconnect", *own]
        return ["cancel", "disconnect", "deadline", *own] + ["abort"] * self.call.endswith("/Generate")

    @property
    def leaves(self) -> list[str]:
        return [way for way in self.ways if way not in DEADLINES]

    @property
    def deadlines(self) -> list[str]:
        return [way for way in self.ways if way in DEADLINES]


DEADLINES = ("deadline", "field")
MOTLEY, KSERVE, VLLM = "motley.v1.Inference", "inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROTOCOLS = [
    Protocol("motley.v1 stream", f"{MOTLEY}/CompleteStream", _motley, streams=True),
    Protocol("motley.v1", f"{MOTLEY}/Complete", _motley),
    Protocol("motley.v1 ChatStream", f"{MOTLEY}/ChatStream", _motley_chat, streams=True, chat=True),
    Protocol("motley.v1 Chat", f"{MOTLEY}/Chat", _motley_chat, chat=True),
    Protocol("motley.v1 Embeddings", f"{MOTLEY}/Embeddings", _motley_embeddings),
    Protocol("OpenAI stream", COMPLETIONS, partial(_openai, stream=True), streams=True),
    Protocol("OpenAI", COMPLETIONS, partial(_openai, stream=False)),
    Protocol("OpenAI chat stream", CHATS, partial(_openai_chat, stream=True), streams=True, chat=True),
    Protocol("OpenAI chat", CHATS, partial(_openai_chat, stream=False), chat=True),
    Protocol("OpenAI embeddings", "/v1/embeddings", _openai_embeddings),
    Protocol("ModelStreamInfer", f"{KSERVE}/ModelStreamInfer", partial(_kserve, streaming=True), streams=True),
    Protocol("ModelInfer", f"{KSERVE}/ModelInfer", partial(_kserve, streaming=False)),
    Protocol("KServe REST", "/v2/models/tiny/infer", _kserve_rest),
    Protocol("vLLM Generate stream", f"{VLLM}/Generate", partial(_vllm, stream=True), streams=True, fields=False),
    Protocol("vLLM Generate", f"{VLLM}/Generate", partial(_vllm, stream=False), fields=False),
    Protocol("vLLM Embed", f"{VLLM}/Embed", _vllm_embed, fields=False),
]
# Those that are tried each time: of each door, in one piece and in many.
EACH_TIME = (
    "motley.v1 stream", "motley.v1 Chat", "OpenAI chat stream", "OpenAI", "OpenAI embeddings", "ModelStreamInfer",
    "KServe REST", "vLLM Generate stream",
)  # fmt: skip
in_parts = halves(PROTOCOLS, lambda protocol: protocol.name, EACH_TIME)
MANY_TOKENS = PROTOCOLS[1]  # an answer in one piece, which nobody need read meanwhile


def deadline_told(said: str) -> bool:
    return said.startswith(("504 ", "4 ")) or "deadline" in said


class Ports(typing.Protocol):
    """A service; `grpc` as host and port."""

    @property
    def http_port(self) -> int: ...

    @property
    def grpc(self) -> str: ...


class RawCall:
    """A request on a connection of its own. `grpc_timeout`: as the wire has it, "500m"."""

    def __init__(
        self, service: Ports, protocol: Protocol, requested: Asked, grpc_timeout: str = "", request_id: str = ""
    ) -> None:
        self._service, self._protocol, self._id = service, protocol, requested.id
        message = protocol.message(requested)
        self._http2: Http2 | None = None
        if protocol.over_http:
            self._connection = socket.socket()
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._connection.connect(("127.0.0.1", service.http_port))
            opening = head(service.http_port, protocol.call, message, request_id=request_id)
            self._connection.sendall(opening + message)
            return
        port = int(service.grpc.rpartition(":")[2])
        self._http2 = Http2(port)
        self._connection = self._http2.connection
        self._stream, frames = self._http2.open(port, f"/{protocol.call}", message, grpc_timeout, request_id)
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
                abort = vllm_engine_pb2.AbortRequest(request_ids=[self._id])
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
        ended = False
        while time.monotonic() < deadline:
            ended = ended or (RST_STREAM, self._stream) in self._http2.read(1.0)
            found = re.search(
                rb"grpc-status.([0-9]{1,2})", self._http2.payloads.get((HEADERS, self._stream), b""), re.S
            )
            if found is not None:
                said = self._http2.payloads.get((DATA, self._stream), b"")
                return found[1].decode() + " " + said.decode(errors="replace")
            if ended:
                return "reset"
        raise AssertionError(f"{self._protocol.name} did not end within {seconds:g} s")

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()
