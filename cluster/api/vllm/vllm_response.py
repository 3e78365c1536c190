"""Conversion of deltas and choices to vllm.grpc.engine's responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....replicas.types import Delta, FinishReason, PromptLogprob, Request, TokenLogprob
from ...protos import vllm_engine_pb2 as pb
from ..common.collected_response import CollectedChoice, CollectedResponse

ABORTED = "abort"


def stream_chunk(request: Request, gathered: CollectedResponse, delta: Delta, *, first: bool) -> pb.GenerateResponse:
    """Return a chunk with what is new of one choice. `first`: it is the first chunk of that choice."""
    reply = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(delta.token_ids),
        cached_tokens=gathered.cached_tokens,
        index=delta.index,
    )
    if delta.logprobs:
        reply.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs))
    if first and gathered.prompt_logprobs is not None:
        reply.input_logprobs.CopyFrom(_input_logprobs(request.prompt_ids, gathered.prompt_logprobs))
    return pb.GenerateResponse(chunk=reply)


def complete_response(
    request: Request, gathered: CollectedResponse, choice: CollectedChoice, reason: FinishReason | str, *, prompt: bool
) -> pb.GenerateResponse:
    """Return a whole choice with the log-probabilities that were kept; with the prompt's if `prompt`."""
    reply = pb.GenerateComplete(
        output_ids=choice.token_ids,
        finish_reason=reason,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(choice.token_ids),
        cached_tokens=gathered.cached_tokens,
        index=choice.index,
    )
    if isinstance(choice.stop_reason, str):
        reply.matched_stop_str = choice.stop_reason
    elif choice.stop_reason is not None:
        reply.matched_token_id = choice.stop_reason
    if choice.logprobs:
        reply.output_logprobs.CopyFrom(_output_logprobs(choice.logprobs))
    if prompt and gathered.prompt_logprobs is not None:
        reply.input_logprobs.CopyFrom(_input_logprobs(request.prompt_ids, gathered.prompt_logprobs))
    return pb.GenerateResponse(complete=reply)


def _output_logprobs(entries: Iterable[TokenLogprob]) -> pb.OutputLogProbs:
    reply = pb.OutputLogProbs()
    for entry in entries:
        reply.token_logprobs.append(entry.logprob)
        reply.token_ids.append(entry.token_id)
        if entry.top:
            reply.top_logprobs.append(_top(entry))
    return reply


def _input_logprobs(prompt_ids: Sequence[int], entries: Sequence[PromptLogprob]) -> pb.InputLogProbs:
    reply = pb.InputLogProbs(token_ids=prompt_ids)
    wants_top = any(entry is not None and entry.top for entry in entries)
    for entry in entries:
        reply.token_logprobs.add() if entry is None else reply.token_logprobs.add(value=entry.logprob)
        if wants_top:
            reply.top_logprobs.append(pb.TopLogProbs() if entry is None else _top(entry))
    return reply


def _top(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[logprob for _, logprob in entry.top], token_ids=[i for i, _ in entry.top])
