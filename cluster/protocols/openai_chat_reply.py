"""The form of a chat's answer: text, reasoning and calls of tools."""

from __future__ import annotations

import secrets
from typing import Any

from ...replicas.protocol import Delta
from ..ask import Admitted
from ..gather import GatheredChoice
from ..parsers.answer import Answer, AnswerParser, parse_whole
from ..parsers.calls import Call
from ..parsers.styles import Reading
from ..parsers.think import ThinkCounter
from ..web.answers import Object
from .openai_logprobs import Tokens
from .openai_reply import Echo, ending


class ChatForm:
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokens: Tokens, fingerprint: str, reading: Reading) -> None:
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._reading = reading
        self._counters: list[ThinkCounter] = []

    def choice(self, choice: GatheredChoice, admitted: Admitted, echo: Echo | None) -> Object:
        parser = self._reading.parser(eager=False)
        answer = Answer(text=choice.text) if parser is None else parse_whole(parser, choice.text)
        if counter := self._counter():
            counter.push([self._tokens.tokenizer.token_bytes(token_id) for token_id in choice.token_ids])
        logprobs = self._tokens.content(choice.logprobs)
        called = parser is not None and parser.num_calls > 0
        return {"message": _message(answer), "logprobs": logprobs} | ending(choice, called=called)

    def stream(self, admitted: Admitted, echo: Echo | None) -> _ChatStream:
        return _ChatStream(self._tokens, self._reading, self._counter())

    def usage_details(self) -> Object:
        count = sum(counter.num_tokens for counter in self._counters)
        return {"completion_tokens_details": {"reasoning_tokens": count}}

    def _counter(self) -> ThinkCounter | None:
        counter = self._reading.counter()
        if counter is not None:
            self._counters.append(counter)
        return counter


class _ChatStream:
    def __init__(self, tokens: Tokens, reading: Reading, counter: ThinkCounter | None) -> None:
        self._tokens = tokens
        self._parser = reading.parser(eager=True)
        self._counter = counter

    def opening(self) -> Object | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, delta: Delta) -> Object | None:
        if self._parser is None:  # most models, most chats: nothing to look for
            fields = {"content": delta.text} if delta.text else {}
        else:
            fields = _fields(self._read(self._parser, delta))
        logprobs = self._tokens.content(delta.logprobs)
        if not fields and logprobs is None and delta.finish_reason is None:
            return None
        called = self._parser is not None and self._parser.num_calls > 0
        return {"delta": fields, "logprobs": logprobs} | ending(delta, called=called)

    def _read(self, parser: AnswerParser, delta: Delta) -> Answer:
        if self._counter is not None:
            self._counter.push([self._tokens.tokenizer.token_bytes(token_id) for token_id in delta.token_ids])
        answer = Answer().add(parser.push(delta.text))
        return answer if delta.finish_reason is None else answer.add(parser.finish())


def _message(answer: Answer) -> Object:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None} | _reasoning(answer)
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_begun(call) for _, call in sorted(answer.calls.items())]
    return message


def _fields(answer: Answer) -> Object:
    fields: dict[str, Any] = _reasoning(answer)
    if answer.text:
        fields["content"] = answer.text
    if answer.calls:
        fields["tool_calls"] = [{"index": index} | _piece(call) for index, call in sorted(answer.calls.items())]
    return fields


def _reasoning(answer: Answer) -> Object:
    """Under both names: servers of models began with the longer one, and vLLM now says the shorter."""
    return {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning} if answer.reasoning else {}


def _piece(call: Call) -> Object:
    return _begun(call) if call.name else {"function": {"arguments": call.arguments}}


def _begun(call: Call) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
