"""Protocol motley.v1.Inference, built on a `RequestAdmitter` and a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial

from ....replicas.errors import InvalidRequest
from ....replicas.text.chat.tool_definitions import MAX_TOOLS
from ...protos import inference_pb2 as pb
from ...routing.router import Router
from ...transport.caller import Caller
from ..common.admission import RequestAdmitter
from ..common.chat.chat_admission import ChatAdmitter
from ..common.collected_response import LogprobBudget, collect_response, encode_response, encode_values
from ..common.embedding import embed_all
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.parsed_request import AdmittedRequest
from . import motley_chat, motley_embeddings
from . import motley_messages as wire
from .motley_response import AnswerReaders, MotleyResponseBuilder


class MotleyProtocol:
    """Calls of motley.v1.Inference: one method for each RPC. They raise MotleyError."""

    def __init__(self, admitter: RequestAdmitter, router: Router, chats: ChatAdmitter) -> None:
        self._admitter = admitter
        self._router = router
        self._chats = chats
        self._replies = MotleyResponseBuilder(admitter.tokenizer)

    async def complete(self, request: pb.CompleteRequest, caller: Caller) -> pb.Completion:
        return await self._whole(await self._completion(request, caller))

    def complete_stream(self, request: pb.CompleteRequest, caller: Caller) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self._chunks(partial(self._completion, request, caller))

    async def chat(self, request: pb.ChatRequest, caller: Caller) -> pb.Completion:
        return await self._whole(await self._chat(request, caller))

    def chat_stream(self, request: pb.ChatRequest, caller: Caller) -> AsyncGenerator[pb.CompletionChunk, None]:
        return self._chunks(partial(self._chat, request, caller))

    async def embeddings(self, request: pb.EmbeddingsRequest, caller: Caller) -> pb.EmbeddingsResponse:
        admitted = [
            await self._admitter.admit(parsed, caller) for parsed in motley_embeddings.parse_embeddings_request(request)
        ]
        embedded = await embed_all(self._router, admitted, "inputs")
        normalize = request.normalize if request.HasField("normalize") else True
        values = sum(len(one.embedding or ()) for one in embedded)
        tokens = sum(len(one.request.prompt_ids) for one in admitted)
        whole = partial(
            motley_embeddings.embeddings_message, self._admitter.info.name, embedded, tokens, normalize=normalize
        )
        return await encode_values(values, whole)

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        refuse_unknown_fields(request)
        self._admitter.check_model(request.model)
        if request.WhichOneof("input") == "chat":
            if request.HasField("add_special_tokens"):
                raise InvalidRequest(
                    "add_special_tokens: expected no value beside chat: the template decides",
                    param="add_special_tokens",
                    code="invalid_value",
                )
            ids = await self._chat_ids(request.chat)
        elif request.WhichOneof("input") == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await self._admitter.prompt_ids(request.text, add_special_tokens=special)
        else:
            raise InvalidRequest("input: give text or chat", param="input", code="missing_field")
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._admitter.info.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        refuse_unknown_fields(request)
        self._admitter.check_model(request.model)
        text = await self._admitter.text(
            "token_ids", tuple(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    def list_models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        refuse_unknown_fields(request)
        return pb.ListModelsResponse(models=[wire.model_message(self._admitter.info)])

    def get_model(self, request: pb.GetModelRequest) -> pb.Model:
        refuse_unknown_fields(request)
        self._admitter.check_model(request.model)
        return wire.model_message(self._admitter.info)

    async def _completion(self, request: pb.CompleteRequest, caller: Caller) -> AdmittedRequest:
        parsed = await self._admitter.read(
            wire.parse_complete_request, request, grammar_bytes=request.sampling.grammar.ByteSize()
        )
        return await self._admitter.admit(parsed, caller)

    async def _chat(self, request: pb.ChatRequest, caller: Caller) -> AdmittedRequest:
        size = request.sampling.grammar.ByteSize() + sum(tool.ByteSize() for tool in request.tools[: MAX_TOOLS + 1])
        template_for = self._chats.template_for
        parsed = await self._admitter.read(motley_chat.parse_chat_request, request, template_for, grammar_bytes=size)
        return await self._chats.admit(parsed, caller)

    def _readers(self, admitted: AdmittedRequest) -> AnswerReaders:
        """Return a reader for each choice of a chat, which has skipped what a resumed chat has already sent."""
        request = admitted.request
        readers = [self._chats.reader(admitted) for _ in range(request.sampling.n if admitted.parsed.chat else 0)]
        for reader, ids in zip(readers, request.output_ids, strict=False):
            reader.skip(request, ids)
        return readers

    async def _whole(self, admitted: AdmittedRequest) -> pb.Completion:
        budget, readers = LogprobBudget(admitted.parsed.wire_names), self._readers(admitted)
        async with aclosing(self._router.stream(admitted.request, whole=True)) as messages:
            gathered = await collect_response(messages, admitted.request.sampling.n, budget)
        return await encode_response(budget, lambda: self._replies.completion(admitted, gathered, readers))

    async def _chunks(
        self, admit: Callable[[], Awaitable[AdmittedRequest]]
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        admitted = await admit()
        async with (
            aclosing(self._router.stream(admitted.request)) as messages,
            aclosing(self._replies.chunks(admitted, messages, self._readers(admitted))) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def _chat_ids(self, chat: pb.ChatMessages) -> Sequence[int]:
        return await self._admitter.prompt_ids(
            motley_chat.openai_messages(chat.messages),
            chat=True,
            template_arguments=motley_chat.template_argument_values(chat.template_arguments),
            tools=motley_chat.openai_tools(chat.tools),
        )
