"""Blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack

import grpc

from ..cluster.protos import inference_pb2 as pb
from ..cluster.protos import inference_pb2_grpc
from .channel import Tls, blocking_channel, metadata
from .generate_requests import (
    CallOptions,
    ChatOptions,
    GenerateRequest,
    Prompt,
    chat_request,
    complete_request,
    detokenize_request,
    embeddings_request,
    tokenize_request,
)
from .resume import Resume
from .retry import CallRetries
from .silence import PROBE_S, SILENCE_S, SilenceWatchdog, WatchedStream, service_gone_error
from .tools import Message

ResponseT = TypeVar("ResponseT")


class Client:
    """Client of one service. Use it in a `with`, or `close` it.

    target      host:port of the service's gRPC port
    api_key     API key that is sent with every call
    tls         TLS files; None: no TLS
    timeout_s   seconds for each call that is not given its own timeout; None waits for ever
    retries     further attempts of a call that may yet succeed
    silence_s   seconds without a message after which a stream is requested again, if the service does not answer a
                question within 10 s either; None waits for ever. Calls without a stream have `timeout_s`.

    Every call raises the service's errors: InvalidRequest, NotFound, Unauthenticated, Overloaded, Unavailable,
    DeadlineExceeded, EngineFault.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:9000",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_s: float | None = None,
        retries: int = 3,
        silence_s: float | None = SILENCE_S,
    ) -> None:
        self._channel = blocking_channel(target, tls)
        self._metadata = metadata(api_key)
        self._timeout_s, self._retries = timeout_s, retries
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._watch = SilenceWatchdog(silence_s, self._probe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Ends the open streams, too."""
        self._channel.close()

    def complete(self, prompt: Prompt, **options: Unpack[CallOptions]) -> pb.Completion:
        """Return the whole answer to a text, or to token ids."""
        return self._unary(self.stub.Complete, complete_request(prompt, options), options.get("timeout_s"))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_arguments: Mapping[str, bool | str] | None = None,
        **options: Unpack[ChatOptions],
    ) -> pb.Completion:
        """Return the whole answer to a conversation."""
        request = chat_request(messages, options, template_arguments)
        return self._unary(self.stub.Chat, request, options.get("timeout_s"))

    def stream(self, prompt: Prompt, **options: Unpack[CallOptions]) -> CompletionStream:
        """Return a stream of the answer to a text, or to token ids. Closing the stream cancels the request in the
        service.
        """
        return self._stream(self.stub.CompleteStream, complete_request(prompt, options), options.get("timeout_s"))

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        template_arguments: Mapping[str, bool | str] | None = None,
        **options: Unpack[ChatOptions],
    ) -> CompletionStream:
        """Return a stream of the answer to a conversation. Closing the stream cancels the request in the service."""
        request = chat_request(messages, options, template_arguments)
        return self._stream(self.stub.ChatStream, request, options.get("timeout_s"))

    def embed(
        self, prompts: Sequence[Prompt], *, pooling: Literal["last", "mean"] = "last", normalize: bool = True
    ) -> list[list[float]]:
        """Return one vector for each text, or list of token ids; of unit length unless `normalize` is False."""
        request = embeddings_request(prompts, pooling, normalize=normalize)
        return [list(one.values) for one in self._unary(self.stub.Embeddings, request).embeddings]

    def tokenize(self, text: str) -> list[int]:
        return list(self._unary(self.stub.Tokenize, tokenize_request(text)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._unary(self.stub.Detokenize, detokenize_request(token_ids)).text

    def models(self) -> list[pb.Model]:
        return list(self._unary(self.stub.ListModels, pb.ListModelsRequest()).models)

    def _unary(self, method: Callable[..., ResponseT], request: Any, timeout_s: float | None = None) -> ResponseT:
        retry = CallRetries(self._retries, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return method(request, timeout=retry.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(retry.after(error))

    def _stream(self, method: Any, request: GenerateRequest, timeout_s: float | None) -> CompletionStream:
        retry = CallRetries(self._retries, self._timeout_s if timeout_s is None else timeout_s)
        return CompletionStream(self._chunks(method, Resume(request), retry))

    def _chunks(self, method: Any, resume: Resume, retry: CallRetries) -> Generator[pb.CompletionChunk, None, None]:
        while True:
            call = method(resume.rest(), timeout=retry.left_s, metadata=self._metadata)
            with self._watch.over(call) as listening:
                try:
                    while (chunk := _next(call, listening)) is not None:
                        for new in resume.take(chunk):
                            retry.renew()
                            yield new
                    return
                except grpc.RpcError as error:
                    wait_s = retry.after(service_gone_error() if listening.gone else error)
                finally:
                    call.cancel()
            time.sleep(wait_s)

    def _probe(self) -> None:
        self.stub.GetModel(pb.GetModelRequest(), timeout=PROBE_S, metadata=self._metadata)


def _next(call: Iterator[pb.CompletionChunk], listening: WatchedStream) -> pb.CompletionChunk | None:
    """Return the next chunk, or None at the end. Raises grpc.RpcError."""
    listening.listen()
    try:
        return next(call, None)
    finally:
        listening.heard()


class CompletionStream(Iterator[pb.CompletionChunk]):
    """Stream of one answer's chunks; each holds what is new since the last. Leaving its `with` cancels the request."""

    def __init__(self, chunks: Generator[pb.CompletionChunk, None, None]) -> None:
        self._chunks = chunks

    def __next__(self) -> pb.CompletionChunk:
        return next(self._chunks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._chunks.close()
