"""Form of a chat's answer: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....replicas.types import Delta
from ...transport.http_server.response_content import JsonObject
from ..common.collected_response import CollectedChoice
from ..common.parsed_request import AdmittedRequest
from ..common.parsers.answer_parser import ParsedAnswer
from ..common.parsers.answer_reader import AnswerReader, new_call_id
from ..common.parsers.tool_call_reader import ParsedToolCall
from .openai_logprobs import LogprobWriter
from .openai_response import EchoedPrompt, finish_fields


class ChatForm:
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        tokens: LogprobWriter,
        fingerprint: str,
        reader: Callable[[], AnswerReader],
        *,
        token_ids: bool = False,
        reasoning: bool = True,
    ) -> None:
        """Create the form of one chat. `reader` makes a reader for one choice. Without `reasoning`, reasoning is left
        out.
        """
        self._token_ids, self._reasoning = token_ids, reasoning
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._reader = reader
        self._readers: list[AnswerReader] = []

    def choice(self, choice: CollectedChoice, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> JsonObject:
        reader = self._new()
        parsed = reader.read(choice.text, choice.token_ids, last=True)
        logprobs = self._tokens.content(choice.logprobs)
        ids = {"token_ids": list(choice.token_ids)} if self._token_ids else {}
        message = _message(parsed, reasoning=self._reasoning)
        return {"message": message, "logprobs": logprobs} | ids | finish_fields(choice, called=reader.called)

    def stream(self, admitted: AdmittedRequest, echo: EchoedPrompt | None) -> _ChatChunks:
        return _ChatChunks(self._tokens, self._new(), token_ids=self._token_ids, reasoning=self._reasoning)

    def beside_choices(self, admitted: AdmittedRequest) -> JsonObject:
        return {"prompt_token_ids": list(admitted.request.prompt_ids)} if self._token_ids else {}

    def usage_details(self) -> JsonObject:
        count = sum(reader.reasoning_tokens for reader in self._readers)
        return {"completion_tokens_details": {"reasoning_tokens": count}}

    def _new(self) -> AnswerReader:
        self._readers.append(self._reader())
        return self._readers[-1]


class _ChatChunks:
    def __init__(self, tokens: LogprobWriter, reader: AnswerReader, *, token_ids: bool, reasoning: bool) -> None:
        self._tokens = tokens
        self._reader = reader
        self._token_ids, self._reasoning = token_ids, reasoning

    def opening(self) -> JsonObject | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, delta: Delta) -> JsonObject | None:
        parsed = self._reader.read(delta.text, delta.token_ids, last=delta.finish_reason is not None)
        fields = _fields(parsed, reasoning=self._reasoning)
        logprobs = self._tokens.content(delta.logprobs)
        ids = {"token_ids": list(delta.token_ids)} if self._token_ids and delta.token_ids else {}
        if not fields and logprobs is None and delta.finish_reason is None and not ids:
            return None
        return {"delta": fields, "logprobs": logprobs} | ids | finish_fields(delta, called=self._reader.called)


def _message(parsed: ParsedAnswer, *, reasoning: bool) -> JsonObject:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
    message |= _reasoning(parsed) if reasoning else {}
    if parsed.calls:
        message["content"] = parsed.text or None
        message["tool_calls"] = [_begun(call) for _, call in sorted(parsed.calls.items())]
    return message


def _fields(parsed: ParsedAnswer, *, reasoning: bool) -> JsonObject:
    fields: dict[str, Any] = _reasoning(parsed) if reasoning else {}
    if parsed.text:
        fields["content"] = parsed.text
    if parsed.calls:
        fields["tool_calls"] = [{"index": index} | _piece(call) for index, call in sorted(parsed.calls.items())]
    return fields


def _reasoning(parsed: ParsedAnswer) -> JsonObject:
    """Return reasoning under both names: model servers began with the longer one, and vLLM now has the shorter."""
    return {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning} if parsed.reasoning else {}


def _piece(call: ParsedToolCall) -> JsonObject:
    return _begun(call) if call.name else {"function": {"arguments": call.arguments}}


def _begun(call: ParsedToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}
