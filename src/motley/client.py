"""A small client of motley.v1 over gRPC, blocking or asynchronous.

Streams survive the loss of the door: the first message carries the seed, every message the ids, and a
stream that breaks is asked for again from where it was.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

import grpc

from .cluster.protos import inference_pb2 as pb
from .cluster.protos import inference_pb2_grpc

__all__ = ["AsyncClient", "Client", "Resume"]

Prompt = str | Sequence[int]
Messages = Sequence[tuple[str, str]]  # (role, content)
GenerateRequest = pb.CompleteRequest | pb.ChatRequest

MAX_RESUMES = 3
FIRST_WAIT_S = 0.1
OPTIONS = (("grpc.max_receive_message_length", 64 * 2**20),)


class Client:
    """Blocking client of one service. `sampling` arguments are the fields of motley.v1.SamplingParams."""

    def __init__(self, target: str = "127.0.0.1:9000") -> None:
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def complete(self, prompt: Prompt, **sampling: Any) -> pb.Completion:
        return self.stub.Complete(complete_request(prompt, sampling))

    def chat(self, messages: Messages, **sampling: Any) -> pb.Completion:
        return self.stub.Chat(chat_request(messages, sampling))

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[pb.CompletionChunk]:
        return self._stream(self.stub.CompleteStream, complete_request(prompt, sampling))

    def chat_stream(self, messages: Messages, **sampling: Any) -> Iterator[pb.CompletionChunk]:
        return self._stream(self.stub.ChatStream, chat_request(messages, sampling))

    def tokenize(self, text: str) -> list[int]:
        return list(self.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text

    def models(self) -> list[pb.Model]:
        return list(self.stub.ListModels(pb.ListModelsRequest()).models)

    def _stream(self, method: Any, request: GenerateRequest) -> Iterator[pb.CompletionChunk]:
        resume = Resume(request)
        while True:
            call = method(resume.request)
            try:
                for chunk in call:
                    yield from resume.take(chunk)
                return
            except grpc.RpcError as error:
                time.sleep(resume.after(error))
            finally:
                call.cancel()


class AsyncClient:
    """The same, asynchronous."""

    def __init__(self, target: str = "127.0.0.1:9000") -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self.stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def complete(self, prompt: Prompt, **sampling: Any) -> pb.Completion:
        return await self.stub.Complete(complete_request(prompt, sampling))

    async def chat(self, messages: Messages, **sampling: Any) -> pb.Completion:
        return await self.stub.Chat(chat_request(messages, sampling))

    def stream(self, prompt: Prompt, **sampling: Any) -> AsyncIterator[pb.CompletionChunk]:
        return self._stream(self.stub.CompleteStream, complete_request(prompt, sampling))

    def chat_stream(self, messages: Messages, **sampling: Any) -> AsyncIterator[pb.CompletionChunk]:
        return self._stream(self.stub.ChatStream, chat_request(messages, sampling))

    async def _stream(self, method: Any, request: GenerateRequest) -> AsyncIterator[pb.CompletionChunk]:
        resume = Resume(request)
        while True:
            call = method(resume.request)
            try:
                async for chunk in call:
                    for new in resume.take(chunk):
                        yield new
                return
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(resume.after(error))
            finally:
                call.cancel()


class Resume:
    """Follows a stream, and knows the request that continues it.

    request   what to ask for now: the original, later with seed and ids so far
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request: GenerateRequest = copy.deepcopy(request)
        self._ids: list[list[int]] = [list(ids.ids) for ids in request.output_ids]
        self._started = False
        self._resumes = 0

    def take(self, chunk: pb.CompletionChunk) -> list[pb.CompletionChunk]:
        """The chunk as the caller is to see it; nothing if it repeats the beginning."""
        if chunk.HasField("started"):
            self.request.sampling.seed = chunk.started.seed
            self._ids = self._ids or [[] for _ in range(self._n)]
            if self._started:
                return []
            self._started = True
        for choice in chunk.choices:
            self._ids[choice.index] += choice.token_ids
        return [chunk]

    def after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before asking for the rest. Raises the error if that cannot help."""
        lost = error.code() == grpc.StatusCode.UNAVAILABLE
        if not lost or not self._started or self._resumes == MAX_RESUMES:
            raise error
        self._resumes += 1
        del self.request.output_ids[:]
        self.request.output_ids.extend(pb.TokenIds(ids=ids) for ids in self._ids)
        return FIRST_WAIT_S * float(2**self._resumes)

    @property
    def _n(self) -> int:
        return self.request.sampling.n if self.request.sampling.HasField("n") else 1


def complete_request(prompt: Prompt, sampling: dict[str, Any]) -> pb.CompleteRequest:
    params = pb.SamplingParams(**sampling)
    if isinstance(prompt, str):
        return pb.CompleteRequest(text=prompt, sampling=params)
    return pb.CompleteRequest(token_ids=pb.TokenIds(ids=prompt), sampling=params)


def chat_request(messages: Messages, sampling: dict[str, Any]) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in messages],
        sampling=pb.SamplingParams(**sampling),
    )
