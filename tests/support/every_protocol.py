"""One question said over every protocol of a running service, streamed and not, and what each answers."""

from __future__ import annotations

import http.client
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from openapi_conformance import check_refusal

from motley.cluster.protos import inference_pb2, kserve_pb2, vllm_engine_pb2
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import MotleyError
from motley.replicas.grammar.grammar_spec import GrammarSpec

Fields = Mapping[str, Any]
PROMPT = "abc"
NO_TYPE = "the type of the field holds no such value"
NO_BYTES = "JSON is read as a whole: see the body that is not UTF-8"
ABSENT = object()  # in place of a prompt: there is none
UNKNOWN_FIELD = 999  # of every protobuf message: a number that none of ours has
_KINDS = {
    200: "ok",
    400: "invalid",
    404: "not found",
    405: "method",
    413: "exhausted",
    415: "media",
    504: "deadline",
}
_CODES = {
    "OK": "ok",
    "INVALID_ARGUMENT": "invalid",
    "NOT_FOUND": "not found",
    "UNIMPLEMENTED": "method",
    "RESOURCE_EXHAUSTED": "exhausted",
    "DEADLINE_EXCEEDED": "deadline",
}
JSON = {"Content-Type": "application/json"}
HEADERS = ("Content-Type", "Content-Encoding")


def called(names: Mapping[str, str]) -> Mapping[str, str]:
    """The client's name of a field -> the question's."""
    return MappingProxyType(names)


class Unsayable(Exception):
    """This protocol has no words for the question."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request, in no protocol's words.

    prompt    text, ids, ABSENT, or bytes: a text that is not UTF-8
    messages  of a chat, in place of the prompt
    sampling  by SamplingParams' names; for `grammar`, `json_schema` as a text
    fields    of the request itself: model, timeout_s, priority, or such as there are not
    both      give ids as well as the text, or messages as well as the prompt
    id        the client's own
    """

    prompt: Any = PROMPT
    messages: Any = None
    sampling: Fields = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    both: bool = False
    id: str = ""

    @property
    def short(self) -> Fields:
        """Its sampling, which without any is of one token: an answer that should not come must not take its time."""
        return self.sampling or {"max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request, in no protocol's words.

    kind   ok, invalid, not found, method, media, exhausted, deadline; of a protocol whose errors are texts: refused
    param  the field at fault by the question's name, `?name` where the protocol calls nothing so
    code   None where the protocol has none
    said   text or ids of the answer, all of its choices
    """

    kind: str
    param: str = ""
    code: str | None = None
    said: tuple[Any, ...] = ()


class Protocol(ABC):
    """One way to ask. `own`: fields that it calls differently; `below`: what stands before the names of others."""

    name: str
    tells_kind = True
    tells_code = False
    own: Mapping[str, str] = called({})
    below = ""

    @abstractmethod
    def write(self, question: Question) -> Any:
        """The request. Raises Unsayable."""

    @abstractmethod
    def send(self, request: Any) -> Outcome: ...

    def ask(self, question: Question) -> Outcome:
        return self.send(self.write(question))

    def param(self, name: str) -> str:
        """The question's name of a field."""
        if not name or name in HEADERS:
            return name
        if name in self.own:
            return self.own[name]
        if not name.startswith(self.below):
            return f"?{name}"
        name = name.removeprefix(self.below)
        return f"?{name}" if name == "prompt" and "prompt" in self.own.values() else name

    def of_message(self, message: str) -> str:
        """The field that a message begins with, if it does."""
        message = message[message.startswith("[request id:") and message.index("] ") + 2 :]
        name, colon, _ = message.partition(": ")
        is_name = not name.isupper() and (" " not in name or name == f"field {UNKNOWN_FIELD}")
        return self.param(name) if colon and is_name else ""


class Http(Protocol):
    """A route that takes JSON."""

    tells_code = True

    def __init__(self, port: int, path: str) -> None:
        self.port, self.path = port, path
        self._own = threading.local()

    def send(self, request: Any) -> Outcome:
        return self.post(json.dumps(request).encode())

    def ask(self, question: Question) -> Outcome:
        headers = {"X-Request-Id": question.id} if question.id else {}
        return self.post(json.dumps(self.write(question)).encode(), {**JSON, **headers})

    def post(self, body: bytes, headers: Mapping[str, str] = JSON, method: str = "POST") -> Outcome:
        """Each thread has a connection of its own, kept for its next call if the service keeps it."""
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection = self._own.connection
        try:
            connection.request(method, self.path, body, dict(headers))
            response = connection.getresponse()
        except (ConnectionError, http.client.HTTPException):  # it was kept for too long
            connection.close()
            connection.request(method, self.path, body, dict(headers))
            response = connection.getresponse()
        return self.outcome(response.status, response.read().decode(), method)

    def outcome(self, status: int, body: str, method: str = "POST") -> Outcome:
        if body.startswith("data: "):
            events = [json.loads(line[6:]) for line in body.split("\n\n") if line and line != "data: [DONE]"]
            errors = [event["error"] for event in events if "error" in event]
            return self._refused(status, errors[0]) if errors else Outcome("ok", said=self.joined(events))
        content = json.loads(body)
        if status == 200:
            return Outcome("ok", said=self.said(content))
        check_refusal(method, self.path, status, content)
        return self._refused(status, content["error"])

    def _refused(self, status: int, error: Any) -> Outcome:
        if isinstance(error, str):  # KServe's errors are a text alone
            return Outcome(_KINDS.get(status, str(status)), self.of_message(error))
        assert set(error) == {"message", "type", "param", "code"}
        kind = "deadline" if error["type"] == "timeout_error" else _KINDS.get(status, str(status))
        return Outcome(kind, self.param(error["param"] or ""), error["code"])

    def said(self, content: Any) -> tuple[Any, ...]:
        return tuple(choice.get("text", (choice.get("message") or {}).get("content")) for choice in content["choices"])

    def joined(self, events: Iterable[Any]) -> tuple[Any, ...]:
        texts: dict[int, str] = {}
        for choice in (choice for event in events for choice in event["choices"]):
            part = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + part
        return tuple(texts[index] for index in sorted(texts))


_SCHEMA = {"structured_outputs.json": "json_schema"}


def _openai(sampling: Fields) -> dict[str, Any]:
    """Return the fields of OpenAI's request, with a schema in vLLM's words."""
    given = dict(sampling)
    return given | ({"structured_outputs": {"json": given.pop("json_schema")}} if "json_schema" in given else {})


class Completions(Http):
    own = called(_SCHEMA)

    def __init__(self, port: int, *, stream: bool) -> None:
        super().__init__(port, "/v1/completions")
        self.name = "completions stream" if stream else "completions"
        self._stream = {"stream": True} if stream else {}

    def write(self, question: Question) -> Any:
        prompt = {} if question.prompt is ABSENT else {"prompt": _json(question.prompt)}
        if question.messages is not None:
            raise Unsayable("a prompt is no list of messages")
        more = {"messages": [{"role": "user", "content": PROMPT}]} if question.both else {}
        return {**prompt, **more, **self._stream, **_openai(question.short), **question.fields}


class Chat(Http):
    own = called({"messages": "prompt", "top_logprobs": "logprobs", **_SCHEMA})

    def __init__(self, port: int, *, stream: bool) -> None:
        super().__init__(port, "/v1/chat/completions")
        self.name = "chat stream" if stream else "chat"
        self._stream = {"stream": True} if stream else {}

    def write(self, question: Question) -> Any:
        sampling = _openai(question.short)
        if "logprobs" in sampling:  # which is a switch there
            sampling |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
        if isinstance(question.prompt, bytes):
            raise Unsayable(NO_BYTES)
        messages = {} if (found := _messages(question)) is None else {"messages": found}
        more = {"prompt": PROMPT} if question.both else {}
        return {**messages, **more, **self._stream, **sampling, **question.fields}

    def param(self, name: str) -> str:
        return "prompt" if name.startswith("messages[") else super().param(name)


class Responses(Http):
    """Not there: whatever is asked."""

    name = "responses"

    def __init__(self, port: int) -> None:
        super().__init__(port, "/v1/responses")

    def write(self, question: Question) -> Any:
        prompt = PROMPT if question.prompt is ABSENT else question.prompt
        return {"input": _json(prompt if question.messages is None else question.messages)}


class Embeddings(Http):
    name = "embeddings"
    own = called({"input": "prompt"})

    def __init__(self, port: int) -> None:
        super().__init__(port, "/v1/embeddings")

    def write(self, question: Question) -> Any:
        if question.messages is not None:
            raise Unsayable("an input is no list of messages")
        prompt = {} if question.prompt is ABSENT else {"input": _json(question.prompt)}
        more = {"prompt": PROMPT} if question.both else {}
        return {**prompt, **more, **question.sampling, **question.fields}

    def said(self, content: Any) -> tuple[Any, ...]:
        return tuple(tuple(one["embedding"]) for one in content["data"])


_KSERVE_NAMES = {"text_input": "prompt", "input_ids": "prompt", "inputs": "prompt", "model_name": "model"}
_KSERVE_NAMES |= {"parameters.timeout": "timeout_s", "stop": "stop", "stop_token_ids": "stop_token_ids"}


def _kserve(question: Question) -> tuple[dict[str, tuple[str, Sequence[Any]]], dict[str, Any]]:
    """Tensors by name, of a datatype and elements; and parameters."""
    if question.messages is not None:
        raise Unsayable("a prompt is no list of messages")
    tensors: dict[str, tuple[str, Sequence[Any]]] = {}
    if isinstance(question.prompt, list):
        tensors["input_ids"] = ("INT64", question.prompt)
    elif question.prompt is not ABSENT:
        tensors["text_input"] = ("BYTES", [question.prompt])
    if question.both:
        tensors["input_ids"] = ("INT64", [1])
    parameters = {}
    for name, value in {**question.short, **question.fields}.items():
        if name == "stop" and isinstance(value, list):
            tensors["stop"] = ("BYTES", value)
        elif name == "stop_token_ids" and isinstance(value, list) and all(type(one) is int for one in value):
            tensors["stop_token_ids"] = ("INT64", value)
        elif name == "timeout_s" and value != value:
            raise Unsayable("whole microseconds")
        elif name == "timeout_s":
            parameters["timeout"] = value if isinstance(value, str) else int(value * 10**6)
        elif name in ("stop_token_ids", "logit_bias") and not isinstance(value, str):
            parameters[name] = json.dumps(value)
        elif name != "model":
            parameters[name] = value
    return tensors, parameters


class KServeRest(Http):
    name = "kserve REST"
    tells_code = False
    own = _KSERVE_NAMES
    below = "parameters."

    def __init__(self, port: int, model: str) -> None:
        super().__init__(port, f"/v2/models/{model}/infer")
        self._model = model

    def write(self, question: Question) -> Any:
        if question.fields.get("model", self._model) != self._model:
            raise Unsayable("the model is in the path")
        tensors, parameters = _kserve(question)
        inputs = [
            {"name": name, "shape": [len(data)], "datatype": kind, "data": _json(data)}
            for name, (kind, data) in tensors.items()
        ]
        return {"inputs": inputs, "parameters": parameters, "id": question.id}

    def said(self, content: Any) -> tuple[Any, ...]:
        return tuple(next(tensor["data"] for tensor in content["outputs"] if tensor["name"] == "text_output"))


class Grpc(Protocol):
    """One RPC with bytes of its own, so that what no library would write can be said as well."""

    service: str
    method: str
    reply: type[Message]
    streams = True

    def __init__(self, channel: grpc.Channel) -> None:
        self.path = f"/{self.service}/{self.method}"
        self._channel = channel

    def send(self, request: bytes) -> Outcome:
        return self.call(request)

    def call(self, data: bytes, **options: Any) -> Outcome:
        try:
            replies = [self.reply.FromString(reply) for reply in self._replies(data, timeout=120, **options)]
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)
            kind = _CODES.get(call.code().name, call.code().name)
            return Outcome(kind, self.of_message(call.details() or ""))
        return self.answered(replies)

    def _replies(self, data: bytes, **options: Any) -> list[bytes]:
        if self.streams:
            return list(self._channel.unary_stream(self.path)(data, **options))
        return [self._channel.unary_unary(self.path)(data, **options)]

    def answered(self, replies: Sequence[Any]) -> Outcome:
        ids: dict[int, list[int]] = {}
        for choice in (choice for reply in replies for choice in reply.choices):
            ids.setdefault(choice.index, []).extend(choice.token_ids)
        return Outcome("ok", said=tuple(tuple(ids[index]) for index in sorted(ids)))


class MotleyComplete(Grpc):
    service, method, reply, streams = "motley.v1.Inference", "Complete", inference_pb2.Completion, False
    own = called({f"field {UNKNOWN_FIELD}": "unknown", "sampling.grammar.json_schema": "json_schema"})
    request: type[Message] = inference_pb2.CompleteRequest

    def __init__(self, channel: grpc.Channel, *, stream: bool) -> None:
        if stream:
            self.method, self.reply, self.streams = f"{self.method}Stream", inference_pb2.CompletionChunk, True
        self.name = f"motley {self.method}"
        super().__init__(channel)

    def write(self, question: Question) -> bytes:
        if question.both:
            raise Unsayable("a oneof holds one of them")
        message, unknown = _filled(self.request, {"request_id": question.id} if question.id else {}, question.fields)
        sampling = dict(question.short)
        if "json_schema" in sampling:
            _fill(message.sampling.grammar, {"json_schema": sampling.pop("json_schema")})
        _fill(message.sampling, sampling)
        return self._prompted(message, question) + unknown

    def _prompted(self, message: Any, question: Question) -> bytes:
        if question.messages is not None:
            raise Unsayable("a prompt is no list of messages")
        if isinstance(question.prompt, list):
            message.token_ids.SetInParent()
            _fill(message.token_ids, {"ids": question.prompt})
        elif question.prompt is not ABSENT:
            _fill(message, {"text": _marked(question.prompt)})
        return _unmarked(message.SerializeToString(), question.prompt)


class MotleyChat(MotleyComplete):
    method = "Chat"
    request = inference_pb2.ChatRequest
    own = called({**MotleyComplete.own, "messages": "prompt"})

    def _prompted(self, message: Any, question: Question) -> bytes:
        for one in _messages(question) or ():
            if not isinstance(one, dict) or "content" not in one:
                raise Unsayable("a message has a text, if an empty one")
            _fill(message.messages.add(), {**one, "content": _marked(one["content"])})
        return _unmarked(message.SerializeToString(), question.prompt)

    def param(self, name: str) -> str:
        return "prompt" if name.startswith("messages[") else super().param(name)

    def of_message(self, message: str) -> str:
        """Return what is wrong with messages, which is told without a colon."""
        return "prompt" if message.startswith("messages") else super().of_message(message)


class MotleyEmbeddings(Grpc):
    name, service, method = "motley Embeddings", "motley.v1.Inference", "Embeddings"
    reply, streams = inference_pb2.EmbeddingsResponse, False
    own = called({f"field {UNKNOWN_FIELD}": "unknown", "inputs[0]": "prompt", "inputs": "prompt"})

    def write(self, question: Question) -> bytes:
        _no_chat_no_sampling(question)
        message, unknown = _filled(inference_pb2.EmbeddingsRequest, {"request_id": question.id}, question.fields)
        if isinstance(question.prompt, list):
            item = message.inputs.add()
            item.token_ids.SetInParent()
            _fill(item.token_ids, {"ids": question.prompt})
        elif question.prompt is not ABSENT:
            _fill(message.inputs.add(), {"text": _marked(question.prompt)})
        return _unmarked(message.SerializeToString(), question.prompt) + unknown

    def answered(self, replies: Sequence[Any]) -> Outcome:
        return Outcome("ok", said=tuple(tuple(one.values) for one in replies[0].embeddings))


class KServeInfer(Grpc):
    name, service, method = "kserve ModelInfer", "inference.GRPCInferenceService", "ModelInfer"
    reply, streams = kserve_pb2.ModelInferResponse, False
    own = _KSERVE_NAMES
    below = "parameters."
    streaming = False

    def write(self, question: Question) -> bytes:
        tensors, parameters = _kserve(question)
        request = kserve_pb2.ModelInferRequest(id=question.id, model_name=question.fields.get("model", ""))
        for name, (kind, data) in tensors.items():
            tensor = request.inputs.add(name=name, datatype=kind, shape=[len(data)])
            contents = {"BYTES": "bytes_contents", "INT64": "int64_contents"}[kind]
            _fill(tensor.contents, {contents: [_bytes(one) for one in data] if kind == "BYTES" else data})
        if self.streaming:
            request.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        for name, value in parameters.items():
            kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
            if type(value) not in kinds:
                raise Unsayable("a parameter is no such value")
            _fill(request.parameters[name], {kinds[type(value)]: value})
        return request.SerializeToString()

    def answered(self, replies: Sequence[Any]) -> Outcome:
        return Outcome("ok", said=_text_outputs(replies))


class KServeStream(KServeInfer):
    """Errors are texts in responses."""

    method, reply, streams, tells_kind = "ModelStreamInfer", kserve_pb2.ModelStreamInferResponse, True, False

    def __init__(self, channel: grpc.Channel, *, streaming: bool) -> None:
        self.name = "kserve ModelStreamInfer, streaming" if streaming else "kserve ModelStreamInfer"
        self.streaming = streaming
        super().__init__(channel)

    def _replies(self, data: bytes, **options: Any) -> list[bytes]:
        return list(self._channel.stream_stream(self.path)(iter([data]), **options))

    def answered(self, replies: Sequence[Any]) -> Outcome:
        errors = [reply.error_message for reply in replies if reply.error_message]
        if errors:
            return Outcome("refused", self.of_message(errors[0]))
        return Outcome("ok", said=_text_outputs([reply.infer_response for reply in replies]))


class Vllm(Grpc):
    service, method, reply = "vllm.grpc.engine.VllmEngine", "Generate", vllm_engine_pb2.GenerateResponse
    below = "sampling_params."
    own = called(
        {"text": "prompt", "tokenized.input_ids": "prompt", "input": "prompt", f"field {UNKNOWN_FIELD}": "unknown"}
    )

    def __init__(self, channel: grpc.Channel, *, stream: bool) -> None:
        self.name = "vllm Generate, stream" if stream else "vllm Generate"
        self._stream = stream
        super().__init__(channel)

    def write(self, question: Question) -> bytes:
        if question.messages is not None:
            raise Unsayable("a prompt is no list of messages")
        if question.both:
            raise Unsayable("a oneof holds one of them")
        if any(question.sampling.get(name) == 0 for name in ("n", "top_p", "repetition_penalty")):
            raise Unsayable("0 is how this protocol says nothing")
        common = {"request_id": question.id or "battery", "stream": self._stream}
        message, unknown = _filled(vllm_engine_pb2.GenerateRequest, common, question.fields)
        _fill(message.sampling_params, question.short)
        if isinstance(question.prompt, list):
            message.tokenized.SetInParent()
            _fill(message.tokenized, {"input_ids": question.prompt})
        elif question.prompt is not ABSENT:
            _fill(message, {"text": _marked(question.prompt)})
        return _unmarked(message.SerializeToString(), question.prompt) + unknown

    def answered(self, replies: Sequence[Any]) -> Outcome:
        whole = {reply.complete.index: reply.complete for reply in replies if reply.HasField("complete")}
        return Outcome("ok", said=tuple(tuple(whole[index].output_ids) for index in sorted(whole)))


class VllmEmbed(Grpc):
    name, service, method = "vllm Embed", "vllm.grpc.engine.VllmEngine", "Embed"
    reply, streams = vllm_engine_pb2.EmbedResponse, False
    own = called({"tokenized.input_ids": "prompt", f"field {UNKNOWN_FIELD}": "unknown"})

    def write(self, question: Question) -> bytes:
        _no_chat_no_sampling(question)
        message, unknown = _filled(vllm_engine_pb2.EmbedRequest, {"request_id": question.id}, question.fields)
        if isinstance(question.prompt, list):
            _fill(message.tokenized, {"input_ids": question.prompt})
        elif question.prompt is not ABSENT:
            if question.prompt != PROMPT:
                raise Unsayable("it takes ids alone")
            message.tokenized.input_ids.extend(PROMPT.encode())  # which are ids of this tokenizer
        return message.SerializeToString() + unknown

    def answered(self, replies: Sequence[Any]) -> Outcome:
        return Outcome("ok", said=(tuple(replies[0].embedding),))


class Python(Protocol):
    """The engine as a library."""

    def __init__(self, engine: Engine, method: str) -> None:
        self.name = f"Engine.{method}"
        self._engine, self._method = engine, method

    def write(self, question: Question) -> Any:
        if question.messages is not None or question.both or question.prompt is ABSENT:
            raise Unsayable("an argument is what it is")
        if question.fields:
            raise Unsayable("a call has no such fields")
        if self._method == "embed" and question.sampling:
            raise Unsayable("an embedding is not sampled")
        if isinstance(question.prompt, bytes):
            raise Unsayable("text is text")
        return question

    def send(self, request: Question) -> Outcome:
        engine = self._engine
        try:
            if self._method == "embed":
                return Outcome("ok", said=tuple(map(tuple, engine.embed([request.prompt]).tolist())))
            given = dict(request.short)
            if "json_schema" in given:
                given["grammar"] = GrammarSpec.json_schema(given.pop("json_schema"), field="json_schema")
            sampling = engine.sampling(**given)
            if self._method == "generate":
                return Outcome(
                    "ok", said=tuple(one.text for one in engine.generate([request.prompt], sampling)[0].outputs)
                )
            return Outcome("ok", said=("".join(delta.text for delta in engine.stream(request.prompt, sampling)),))
        except MotleyError as error:
            return Outcome(_CODES.get(error.grpc_code, error.grpc_code), error.param or "", error.code)


def everything(http_port: int, channel: grpc.Channel, engine: Engine | None, model: str) -> Iterator[Protocol]:
    """Every way to ask this service, and an engine in this process, for an answer."""
    for stream in (False, True):
        yield Completions(http_port, stream=stream)
        yield Chat(http_port, stream=stream)
        yield MotleyComplete(channel, stream=stream)
        yield MotleyChat(channel, stream=stream)
        yield KServeStream(channel, streaming=stream)
        yield Vllm(channel, stream=stream)
    yield from (Responses(http_port), Embeddings(http_port), KServeRest(http_port, model))
    yield from (MotleyEmbeddings(channel), KServeInfer(channel), VllmEmbed(channel))
    if engine is not None:
        yield from (Python(engine, "generate"), Python(engine, "stream"), Python(engine, "embed"))


def _messages(question: Question) -> Any:
    if question.messages is not None:
        return question.messages
    if question.prompt is ABSENT:
        return None
    if isinstance(question.prompt, list):
        raise Unsayable("a chat is of text")
    return [{"role": "user", "content": question.prompt}]


def _json(value: Any) -> Any:
    if isinstance(value, bytes) or (isinstance(value, list) and any(isinstance(one, bytes) for one in value)):
        raise Unsayable(NO_BYTES)
    return value


def _no_chat_no_sampling(question: Question) -> None:
    if question.sampling:
        raise Unsayable("an embedding is not sampled")
    if question.messages is not None:
        raise Unsayable("an input is no list of messages")
    if question.both:
        raise Unsayable("a oneof holds one of them")


def _filled(kind: type[Message], *parts: Fields) -> tuple[Any, bytes]:
    """A message, and the bytes of those fields that it does not have."""
    message, unknown = kind(), b""
    for name, value in ((name, value) for part in parts for name, value in part.items()):
        if name in kind.DESCRIPTOR.fields_by_name:
            _fill(message, {name: value})
        else:
            if name == "model":
                raise Unsayable("it asks for no model by name")
            unknown = _tag(UNKNOWN_FIELD, 2) + b"\x01x"
    return message, unknown


def _fill(message: Any, fields: Fields) -> None:
    """Only what the wire can say: Python's protobuf would take True for 1, and a text for a list of its letters."""
    for name, value in fields.items():
        if name not in message.DESCRIPTOR.fields_by_name:
            raise Unsayable(f"there is no field {name}")
        wanted = message.DESCRIPTOR.fields_by_name[name]
        if value is None or (wanted.is_repeated and not isinstance(value, list | tuple | dict)):
            raise Unsayable(NO_TYPE)
        values = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        truth = wanted.type == wanted.TYPE_BOOL
        if wanted.message_type is None and any(isinstance(one, bool) != truth for one in values):
            raise Unsayable(NO_TYPE)
        if isinstance(value, dict) and any(isinstance(one, bool) for one in values):
            raise Unsayable(NO_TYPE)
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (OverflowError, TypeError, ValueError):  # text that has no UTF-8 among them
            raise Unsayable(NO_TYPE) from None


def _tag(number: int, kind: int) -> bytes:
    value = number << 3 | kind
    return bytes([value & 0x7F | 0x80, value >> 7])


def _marked(text: Any) -> Any:
    """A place for what is not UTF-8, of as many bytes."""
    return "Q" * len(text) if isinstance(text, bytes) else text


def _unmarked(data: bytes, text: Any) -> bytes:
    return data.replace(b"Q" * len(text), text) if isinstance(text, bytes) else data


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Unsayable("bytes are no surrogates: see the bytes that are not UTF-8") from None


def _text_outputs(responses: Iterable[Any]) -> tuple[bytes, ...]:
    texts: dict[int, bytes] = {}
    for response in responses:
        elements = {one.name: one.contents.bytes_contents for one in response.outputs if one.datatype == "BYTES"}
        for index, text in enumerate(elements.get("text_output", ())):
            texts[index] = texts.get(index, b"") + text
    return tuple(texts[index] for index in sorted(texts))
