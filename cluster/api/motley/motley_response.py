"""Responses of motley.v1, whole or as chunks; a chat's answer is split into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ....replicas.text.tokenizer.tokenizer import Tokenizer
from ....replicas.types import Delta, FinishReason, PromptLogprob, StreamMessage, TokenLogprob, WeightsStatus
from ...protos import inference_pb2 as pb
from ..common.collected_response import CollectedChoice, CollectedResponse, count_logprob_values, encode_values
from ..common.parsed_request import AdmittedRequest
from ..common.parsers.answer_reader import AnswerReader
from .motley_chat import tool_call_messages

_FINISH = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
AnswerReaders = Sequence[AnswerReader]  # one reader for each choice of a chat; empty for a completion


class MotleyResponseBuilder:
    """Builder of the responses of one served model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def completion(
        self, admitted: AdmittedRequest, gathered: CollectedResponse, readers: AnswerReaders = ()
    ) -> pb.Completion:
        return pb.Completion(
            started=self.started(admitted),
            choices=[self._choice(choice, readers) for choice in gathered.choices],
            prompt_logprobs=self._prompt_logprobs(gathered.prompt_logprobs),
            usage=_usage(admitted, gathered.completion_tokens, gathered.cached_tokens, readers),
            weights=[weights_message(weights) for weights in gathered.weights],
        )

    async def chunks(
        self, admitted: AdmittedRequest, stream: AsyncIterable[StreamMessage], readers: AnswerReaders = ()
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        """Yield one chunk for each message; the first has `started`, an extra last one has `usage`."""
        yield pb.CompletionChunk(started=self.started(admitted))
        num_tokens = cached_tokens = 0
        weights: WeightsStatus | None = None
        async for message in stream:
            num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
            cached_tokens = cached_tokens if message.cached_tokens is None else message.cached_tokens
            weights = message.weights_status or weights
            if message.deltas or message.prompt_logprobs:
                values = count_logprob_values(message.prompt_logprobs or ())
                chunk = await encode_values(values, partial(self._chunk, message, readers))
                if weights is not None:
                    chunk.weights.CopyFrom(weights_message(weights))
                    weights = None
                yield chunk
        yield pb.CompletionChunk(usage=_usage(admitted, num_tokens, cached_tokens, readers))

    def started(self, admitted: AdmittedRequest) -> pb.Started:
        request = admitted.request
        return pb.Started(
            request_id=request.request_id,
            client_request_id=admitted.parsed.client_id,
            model=admitted.model,
            seed=request.sampling.seed or 0,
            prompt_tokens=len(request.prompt_ids),
        )

    def _chunk(self, message: StreamMessage, readers: AnswerReaders) -> pb.CompletionChunk:
        return pb.CompletionChunk(
            choices=[self._choice(delta, readers) for delta in message.deltas],
            prompt_logprobs=self._prompt_logprobs(message.prompt_logprobs),
        )

    def _choice(self, choice: Delta | CollectedChoice, readers: AnswerReaders) -> pb.Choice:
        reply = pb.Choice(index=choice.index, token_ids=choice.token_ids)
        if readers:
            _take_apart(choice, readers[choice.index], reply)
        else:
            reply.text = choice.text
        reply.logprobs.extend(self._logprob(entry) for entry in choice.logprobs or ())
        if readers and readers[choice.index].called and choice.finish_reason is FinishReason.STOP:
            reply.finish_reason = pb.FINISH_REASON_TOOL_CALLS
            return reply  # the end of a tool call stopped it, not a stop string of the client
        if choice.finish_reason is not None:
            reply.finish_reason = _FINISH[choice.finish_reason]
        if isinstance(choice.stop_reason, str):
            reply.stop_string = choice.stop_reason
        elif choice.stop_reason is not None:
            reply.stop_token_id = choice.stop_reason
        return reply

    def _logprob(self, entry: TokenLogprob) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.Alternative(token_id=i, logprob=p, **self._token(i)) for i, p in entry.top],
            **self._token(entry.token_id),
        )

    def _token(self, token_id: int) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "token_bytes": data}

    def _prompt_logprobs(self, entries: Iterable[PromptLogprob] | None) -> Iterator[pb.PromptLogprob]:
        for entry in entries or ():
            yield pb.PromptLogprob(token=None if entry is None else self._logprob(entry))


def weights_message(weights: WeightsStatus) -> pb.Weights:
    return pb.Weights(version=weights.version, contents=weights.contents)


def _take_apart(choice: Delta | CollectedChoice, reader: AnswerReader, reply: pb.Choice) -> None:
    parsed = reader.read(choice.text, choice.token_ids, last=choice.finish_reason is not None)
    reply.text, reply.reasoning_content = parsed.text, parsed.reasoning
    if parsed.calls:
        reply.tool_calls.extend(tool_call_messages(parsed))


def _usage(admitted: AdmittedRequest, completion_tokens: int, cached_tokens: int, readers: AnswerReaders) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(admitted.request.prompt_ids),
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        reasoning_tokens=sum(reader.reasoning_tokens for reader in readers),
    )
