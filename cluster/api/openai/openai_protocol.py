"""OpenAI's HTTP protocol, built on a `RequestAdmitter` and a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import product, takewhile

from ....replicas.errors import InvalidRequest
from ....replicas.text.chat.tool_definitions import check_tools
from ....replicas.types import PromptLogprob, StreamMessage
from ...async_streams import merge_streams, run_all
from ...routing.router import Router
from ...transport.caller import Caller
from ...transport.http_server.response_content import EncodedObject, JsonObject, ResponseContent, StreamingContent
from ..common.admission import RequestAdmitter
from ..common.chat.chat_admission import ChatAdmitter
from ..common.chat.chat_reasoning import read_chat_template_kwargs
from ..common.chat.speaker_names import drop_unplaced_names
from ..common.collected_response import CollectedResponse, LogprobBudget, collect_response, encode_response
from ..common.concurrent_prompts import ConcurrentPrompts
from ..common.fields.body_shapes import normalize_body
from ..common.fields.field_schemas import MAX_PROMPTS
from ..common.fields.json_body import parse_body, take_field
from ..common.fields.unknown_fields import UnknownFieldPolicy
from ..common.fields.wire_names import in_wire_names
from ..common.parsed_request import AdmittedRequest
from . import openai_request
from .openai_chat_response import ChatForm
from .openai_chunks import OpenAIChunkWriter
from .openai_logprobs import LogprobWriter
from .openai_prompt_only import hide_output
from .openai_request import OpenAIRequest
from .openai_request_schemas import BODY_SHAPES
from .openai_response import CompletionForm, EchoedPrompt, ResponseForm, whole_response

Chunk = JsonObject | EncodedObject

MAX_CHOICES = 128  # choices of all prompts of one call together
MAX_ADDED = 2  # tokens that a tokenizer adds at one end of a text


class OpenAIProtocol:
    """OpenAI's calls: each takes a body and returns plain objects, one whole answer or a stream. They raise
    MotleyError.
    """

    def __init__(
        self,
        admitter: RequestAdmitter,
        router: Router,
        chats: ChatAdmitter,
        fingerprint: str = "",
        unknown: UnknownFieldPolicy | None = None,
    ) -> None:
        self._unknown = unknown or UnknownFieldPolicy()
        self._admitter = admitter
        self._router = router
        self._chats = chats
        self._tokens = LogprobWriter(admitter.tokenizer)
        self._fingerprint = f"fp_{fingerprint[:16]}"

    async def completions(self, body: bytes, caller: Caller) -> ResponseContent:
        fields, names = self._read(body, "completion", MAX_PROMPTS)
        with in_wire_names(names):
            size = openai_request.grammar_bytes(fields, body)
            call = await self._admitter.read(openai_request.parse_completion, fields, grammar_bytes=size)
            form = CompletionForm(self._tokens_of(call), self._fingerprint, token_ids=call.token_ids)
            return await self._respond(form, call, await self._admit(call, caller))

    async def chat(self, body: bytes, caller: Caller) -> ResponseContent:
        fields, names = self._read(body, "chat")
        with in_wire_names(names):
            return await self._chat(fields, body, caller)

    async def _chat(self, fields: JsonObject, body: bytes, caller: Caller) -> ResponseContent:
        size = openai_request.grammar_bytes(fields, body)
        call = await self._admitter.read(
            openai_request.parse_chat, fields, self._chats.template_for, self._unknown, grammar_bytes=size
        )
        [parsed] = call.requests
        chat = await self._chats.admit(parsed, caller, separate_reasoning=call.separate_reasoning)
        reader = partial(self._chats.reader, chat)
        form = ChatForm(
            self._tokens_of(call), self._fingerprint, reader, token_ids=call.token_ids, reasoning=call.reasoning
        )
        return await self._respond(form, call, [chat])

    async def tokenize(self, body: bytes) -> JsonObject:
        fields, names = self._read(body, "tokenize")
        with in_wire_names(names):
            return await self._tokenize(fields)

    async def _tokenize(self, fields: JsonObject) -> JsonObject:
        self._admitter.check_model(take_field(fields, "model", str, ""))
        if openai_request.tokenizes_chat(fields):
            tools = [] if fields.get("tools") is None else check_tools(fields["tools"])
            template = self._chats.template_for(tools)
            ids = await self._admitter.prompt_ids(
                drop_unplaced_names(openai_request.parse_messages(fields), template, self._unknown),
                chat=True,
                template_arguments=read_chat_template_kwargs(fields, template, self._unknown),
                tools=tools,
                **openai_request.parse_prompt_end(fields),
            )
        else:
            special = take_field(fields, "add_special_tokens", bool, True)
            ids = await self._admitter.prompt_ids(take_field(fields, "prompt", str, ""), add_special_tokens=special)
        return {"tokens": list(ids), "count": len(ids), "max_model_len": self._admitter.info.max_model_len}

    async def detokenize(self, body: bytes) -> JsonObject:
        fields, _ = self._read(body, "detokenize")
        self._admitter.check_model(take_field(fields, "model", str, ""))
        skip = take_field(fields, "skip_special_tokens", bool, False)
        text = await self._admitter.text("tokens", take_field(fields, "tokens", list, []), skip_special_tokens=skip)
        return {"prompt": text}

    def models(self) -> JsonObject:
        return {"object": "list", "data": [self.model(self._admitter.info.name)]}

    def model(self, name: str) -> JsonObject:
        self._admitter.check_model(name)
        info = self._admitter.info
        return {
            "id": info.name,
            "object": "model",
            "created": self._admitter.started,
            "owned_by": "motley",
            "max_model_len": info.max_model_len,
            "quantization": info.quantization,
        }

    def tokenizer_info(self) -> JsonObject:
        """Return what evaluation harnesses need of a remote tokenizer: its named tokens and its chat template."""
        tokenizer = self._admitter.tokenizer
        named: JsonObject = {name: tokenizer.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        template = tokenizer.chat_template
        return named | {
            "tokenizer_class": "Tokenizer",
            "model_max_length": self._admitter.info.max_model_len,
            "chat_template": None if template is None else template.source,
        }

    def _read(self, body: bytes, route: str, prompts: int = 4) -> tuple[JsonObject, Mapping[str, str]]:
        """Parse a body and return the fields that this service has, and the client's names of those that it renamed."""
        names: dict[str, str] = {}
        parsed = parse_body(body, self._admitter.body_limits(prompts))
        return normalize_body(parsed, BODY_SHAPES[route], self._unknown, names), names

    def _tokens_of(self, call: OpenAIRequest) -> LogprobWriter:
        return LogprobWriter(self._admitter.tokenizer, by_id=True) if call.named_by_id else self._tokens

    async def _admit(self, call: OpenAIRequest, caller: Caller) -> list[AdmittedRequest]:
        admitted = [await self._admitter.admit(parsed, caller) for parsed in call.requests]
        if len(admitted) * admitted[0].request.sampling.n > MAX_CHOICES:
            name = admitted[0].parsed.wire_names.get("n", "n")
            raise InvalidRequest(
                f"{name}: at most {MAX_CHOICES} choices for all prompts of a call", param=name, code="invalid_value"
            )
        return admitted

    async def _respond(
        self, form: ResponseForm, call: OpenAIRequest, admitted: Sequence[AdmittedRequest]
    ) -> ResponseContent:
        if not call.stream:
            return await self._whole(form, call, admitted)
        chunks = self._chunks(form, call, admitted)
        # An error must come before the response begins: wait for the first message.
        return StreamingContent(await anext(chunks), chunks)

    async def _whole(
        self, form: ResponseForm, call: OpenAIRequest, admitted: Sequence[AdmittedRequest]
    ) -> EncodedObject:
        feed = ConcurrentPrompts(self._router)
        budget = LogprobBudget(admitted[0].parsed.wire_names)
        gathered = await run_all([self._gather(call, one, feed, budget) for one in admitted])
        echoes = [
            await self._echo(call, one, response.prompt_logprobs)
            for one, response in zip(admitted, gathered, strict=True)
        ]
        keep = admitted[0].request.sampling.n if call.keep is None else call.keep
        return await encode_response(
            budget, lambda: EncodedObject(whole_response(form, admitted, gathered, echoes, keep))
        )

    async def _gather(
        self, call: OpenAIRequest, admitted: AdmittedRequest, feed: ConcurrentPrompts, budget: LogprobBudget
    ) -> CollectedResponse:
        async with aclosing(_messages(call, admitted, feed, whole=True)) as messages:
            n, shown = admitted.request.sampling.n, admitted.prompt_shown
            return await collect_response(messages, n, budget, logprobs=call.logprobs, prompt_shown=shown)

    async def _chunks(
        self, form: ResponseForm, call: OpenAIRequest, admitted: Sequence[AdmittedRequest]
    ) -> AsyncGenerator[list[Chunk], None]:
        """Yield the chunks of each message of a replica, to be sent in one write; those of a large prompt one by
        one.
        """
        writer = OpenAIChunkWriter(form, admitted, include_usage=call.include_usage, usage_so_far=call.usage_so_far)
        feed = ConcurrentPrompts(self._router)
        async with aclosing(merge_streams([_messages(call, one, feed) for one in admitted])) as messages:
            async for which, message in messages:
                chunks: list[Chunk] = []
                writer.note_weights(message.weights_status)
                if not writer.opened(which):
                    echo = await self._echo(call, admitted[which], message.prompt_logprobs)
                    openings = writer.openings(which, echo)
                    if echo is not None and echo.large:
                        while (opening := await asyncio.to_thread(_next_written, openings)) is not None:
                            yield [opening]
                    chunks += openings
                yield [*chunks, *writer.message(which, message)]
        yield [*writer.closing()]

    async def _echo(
        self, call: OpenAIRequest, admitted: AdmittedRequest, logprobs: Sequence[PromptLogprob] | None
    ) -> EchoedPrompt | None:
        if not call.echo:
            return None
        prompt, ids = admitted.parsed.prompt, admitted.request.prompt_ids
        if not isinstance(prompt, str):
            return EchoedPrompt(await self._admitter.text("prompt", ids, skip_special_tokens=False), ids, logprobs)
        if not admitted.prompt_is_cut:
            found = None if logprobs is None else await self._own(ids, prompt.__eq__)
            return EchoedPrompt(prompt, ids, logprobs, found[1] if found is not None else None)
        shown = await self._own(ids, prompt.startswith if admitted.parsed.truncate_end else prompt.endswith)
        if shown is None:  # the cut may be within a character
            shown = await self._admitter.text("prompt", ids, skip_special_tokens=False), (0, 0)
        return EchoedPrompt(shown[0], ids, logprobs, shown[1])

    async def _own(self, ids: Sequence[int], fits: Callable[[str], bool]) -> tuple[str, tuple[int, int]] | None:
        """Return the text of the ids, and how many ids at its beginning and end the tokenizer added, which have no
        text.

        The numbers are the smallest that leave a text that `fits`; None if there are none.
        """
        is_special = self._admitter.tokenizer.special_ids.__contains__
        before = sum(1 for _ in takewhile(is_special, ids[:MAX_ADDED]))
        behind = sum(1 for _ in takewhile(is_special, reversed(ids[-MAX_ADDED:])))
        for first, last in product(range(before + 1), range(behind + 1)):
            own = ids[first : len(ids) - last]
            text = await self._admitter.text("prompt", own, skip_special_tokens=False) if own else ""
            if fits(text):
                return text, (first, last)
        return None


def _next_written(openings: Iterator[JsonObject]) -> EncodedObject | None:
    opening = next(openings, None)
    return None if opening is None else EncodedObject(opening)


def _messages(
    call: OpenAIRequest, admitted: AdmittedRequest, feed: ConcurrentPrompts, *, whole: bool = False
) -> AsyncGenerator[StreamMessage, None]:
    messages = feed.stream(admitted.now(), whole=whole)
    return hide_output(messages) if call.silent else messages
