"""Asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack

import grpc

from ..cluster.protos import inference_pb2 as pb
from ..cluster.protos import inference_pb2_grpc
from ..replicas.errors import Unavailable
from .channel import Tls, aio_channel, metadata
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
from .silence import PROBE_S, SILENCE_S, AsyncSilenceWatchdog, WatchedStream, service_gone_error
from .tools import Message

ResponseT = TypeVar("ResponseT")


class AsyncClient:
    """Asynchronous client with the methods of `Client`, to be awaited; use it in an `async with`, or `close` it."""

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
        self._channel = aio_channel(target, tls)
        self._metadata = metadata(api_key)
        self._timeout_s, self._retries = timeout_s, retries
        self.stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._watch = AsyncSilenceWatchdog(silence_s, self._probe)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Ends the open streams, too."""
        await self._channel.close()

    async def complete(self, prompt: Prompt, **options: Unpack[CallOptions]) -> pb.Completion:
        """Return the whole answer to a text, or to token ids."""
        return await self._unary(self.stub.Complete, complete_request(prompt, options), options.get("timeout_s"))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        template_arguments: Mapping[str, bool | str] | None = None,
        **options: Unpack[ChatOptions],
    ) -> pb.Completion:
        """Return the whole answer to a conversation."""
        request = chat_request(messages, options, template_arguments)
        return await self._unary(self.stub.Chat, request, options.get("timeout_s"))

    def stream(self, prompt: Prompt, **options: Unpack[CallOptions]) -> AsyncCompletionStream:
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
    ) -> AsyncCompletionStream:
        """Return a stream of the answer to a conversation. Closing the stream cancels the request in the service."""
        request = chat_request(messages, options, template_arguments)
        return self._stream(self.stub.ChatStream, request, options.get("timeout_s"))

    async def embed(
        self, prompts: Sequence[Prompt], *, pooling: Literal["last", "mean"] = "last", normalize: bool = True
    ) -> list[list[float]]:
        """Return one vector for each text, or list of token ids; of unit length unless `normalize` is False."""
        request = embeddings_request(prompts, pooling, normalize=normalize)
        return [list(one.values) for one in (await self._unary(self.stub.Embeddings, request)).embeddings]

    async def tokenize(self, text: str) -> list[int]:
        return list((await self._unary(self.stub.Tokenize, tokenize_request(text))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return (await self._unary(self.stub.Detokenize, detokenize_request(token_ids))).text

    async def models(self) -> list[pb.Model]:
        return list((await self._unary(self.stub.ListModels, pb.ListModelsRequest())).models)

    async def _unary(
        self, method: Callable[..., Awaitable[ResponseT]], request: Any, timeout_s: float | None = None
    ) -> ResponseT:
        retry = CallRetries(self._retries, self._timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                return await method(request, timeout=retry.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                wait_s = retry.after(error)
            await asyncio.sleep(wait_s)

    def _stream(self, method: Any, request: GenerateRequest, timeout_s: float | None) -> AsyncCompletionStream:
        retry = CallRetries(self._retries, self._timeout_s if timeout_s is None else timeout_s)
        return AsyncCompletionStream(self._chunks(method, Resume(request), retry))

    async def _chunks(
        self, method: Any, resume: Resume, retry: CallRetries
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        while True:
            call = method(resume.rest(), timeout=retry.left_s, metadata=self._metadata)
            with self._watch.over(call) as listening:
                try:
                    while (chunk := await _next(call, listening)) is not None:
                        for new in resume.take(chunk):
                            retry.renew()
                            yield new
                    return
                except (grpc.RpcError, Unavailable) as error:
                    wait_s = retry.after(error)
                finally:
                    call.cancel()
            await asyncio.sleep(wait_s)

    async def _probe(self) -> None:
        await self.stub.GetModel(pb.GetModelRequest(), timeout=PROBE_S, metadata=self._metadata)


async def _next(call: Any, listening: WatchedStream) -> pb.CompletionChunk | None:
    """Return the next chunk, or None at the end. Raises grpc.RpcError; Unavailable when the stream was given up."""
    listening.listen()
    try:
        chunk = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if listening.gone and task is not None and not task.cancelling():
            raise service_gone_error() from None
        raise
    finally:
        listening.heard()
    return None if chunk is grpc.aio.EOF else chunk


class AsyncCompletionStream(AsyncIterator[pb.CompletionChunk]):
    """Stream of one answer's chunks; each holds what is new since the last. Leaving its `async with` cancels the
    request.
    """

    def __init__(self, chunks: AsyncGenerator[pb.CompletionChunk, None]) -> None:
        self._chunks = chunks

    async def __anext__(self) -> pb.CompletionChunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._chunks.aclose()
