"""OpenAI's HTTP, on a door and a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ...replicas.errors import InvalidRequest
from ...replicas.protocol import PromptLogprob
from ..ask import Admitted
from ..door import Door
from ..gather import Gathered, check_finish, gather
from ..router import Router
from ..streams import all_of, merge
from . import openai_ask
from .openai_ask import Call
from .openai_chunks import ChunkWriter
from .openai_fields import parse_object, refuse_others, take
from .openai_reply import ChatForm, CompletionForm, Echo, Form, Object, Tokens, whole

MAX_CHOICES = 128  # of all prompts of one call together


@dataclass(frozen=True, slots=True)
class Streaming:
    """An answer in chunks: those of the first message, and the rest, to be closed by whoever holds it."""

    first: list[Object]
    rest: AsyncGenerator[list[Object], None]


Answer = Object | Streaming


class OpenAIProtocol:
    """Bodies in, plain objects out: one for an answer, or a stream of them. Errors leave as MotleyError."""

    def __init__(self, door: Door, router: Router) -> None:
        self._door = door
        self._router = router
        tokens = Tokens(door.tokenizer)
        self._completion = CompletionForm(tokens)
        self._chat = ChatForm(tokens)

    async def completions(self, body: bytes) -> Answer:
        return await self._answer(self._completion, openai_ask.completion_call(parse_object(body)))

    async def chat(self, body: bytes) -> Answer:
        return await self._answer(self._chat, openai_ask.chat_call(parse_object(body)))

    async def tokenize(self, body: bytes) -> Object:
        fields = parse_object(body)
        refuse_others(fields, ("model", "prompt", "messages", "add_special_tokens", "chat_template_kwargs"))
        self._door.check_model(take(fields, "model", str, ""))
        if openai_ask.tokenizes_chat(fields):
            ids = await self._door.prompt_ids(
                openai_ask.messages(fields),
                chat=True,
                template_arguments=take(fields, "chat_template_kwargs", dict, {}),
            )
        else:
            special = take(fields, "add_special_tokens", bool, True)
            ids = await self._door.prompt_ids(take(fields, "prompt", str, ""), add_special_tokens=special)
        return {"tokens": list(ids), "count": len(ids), "max_model_len": self._door.info.max_model_len}

    async def detokenize(self, body: bytes) -> Object:
        fields = parse_object(body)
        refuse_others(fields, ("model", "tokens", "skip_special_tokens"))
        self._door.check_model(take(fields, "model", str, ""))
        skip = take(fields, "skip_special_tokens", bool, False)
        text = await self._door.text("tokens", take(fields, "tokens", list, []), skip_special_tokens=skip)
        return {"prompt": text}

    def models(self) -> Object:
        return {"object": "list", "data": [self.model(self._door.info.name)]}

    def model(self, name: str) -> Object:
        self._door.check_model(name)
        info = self._door.info
        return {
            "id": info.name,
            "object": "model",
            "created": self._door.started,
            "owned_by": "motley",
            "max_model_len": info.max_model_len,
            "quantization": info.quantization,
        }

    async def _answer(self, form: Form, call: Call) -> Answer:
        admitted = [await self._door.admit(ask) for ask in call.asks]
        if len(admitted) * admitted[0].request.sampling.n > MAX_CHOICES:
            raise InvalidRequest(
                f"n: at most {MAX_CHOICES} choices for all prompts of a call", param="n", code="invalid_value"
            )
        if not call.stream:
            return await self._whole(form, call, admitted)
        chunks = self._chunks(form, call, admitted)
        # A refusal must come before the response begins: wait for the first message.
        return Streaming(await anext(chunks), chunks)

    async def _whole(self, form: Form, call: Call, admitted: Sequence[Admitted]) -> Object:
        gathered = await all_of([self._gather(one) for one in admitted])
        echoes = [
            await self._echo(call, one, answer.prompt_logprobs) for one, answer in zip(admitted, gathered, strict=True)
        ]
        return whole(form, admitted, gathered, echoes)

    async def _gather(self, admitted: Admitted) -> Gathered:
        async with aclosing(self._router.stream(admitted.request)) as messages:
            return await gather(messages, admitted.request.sampling.n)

    async def _chunks(self, form: Form, call: Call, admitted: Sequence[Admitted]) -> AsyncGenerator[list[Object], None]:
        """For each message of a replica the chunks it makes, to be sent in one write."""
        writer = ChunkWriter(form, admitted, include_usage=call.include_usage)
        async with aclosing(merge([self._router.stream(one.request) for one in admitted])) as messages:
            async for which, message in messages:
                chunks: list[Object] = []
                if not writer.opened(which):
                    echo = await self._echo(call, admitted[which], message.prompt_logprobs)
                    chunks = writer.opening(which, echo)
                yield chunks + writer.message(which, message)
                for delta in message.deltas:
                    if delta.finish_reason is not None:
                        check_finish(delta.finish_reason)
        yield writer.closing()

    async def _echo(self, call: Call, admitted: Admitted, logprobs: Sequence[PromptLogprob] | None) -> Echo | None:
        if not call.echo:
            return None
        text, ids = admitted.ask.prompt, admitted.request.prompt_ids
        if not isinstance(text, str):
            text = await self._door.text("prompt", ids, skip_special_tokens=False)
        return Echo(text, ids, logprobs)
