"""Gathers a stream's deltas into whole choices, for answers that are not streamed."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from ..replicas.errors import DeadlineExceeded, EngineFault, MotleyError, Unavailable
from ..replicas.protocol import Delta, FinishReason, PromptLogprob, StreamMessage, TokenLogprob


@dataclass(slots=True)
class GatheredChoice:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class Gathered:
    choices: list[GatheredChoice]
    cached_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def add(self, message: StreamMessage) -> None:
        self.cached_tokens = self.cached_tokens if message.cached_tokens is None else message.cached_tokens
        if message.prompt_logprobs is not None:
            self.prompt_logprobs = message.prompt_logprobs
        for delta in message.deltas:
            self.choices[delta.index].add(delta)


async def gather(messages: AsyncIterable[StreamMessage], n: int) -> Gathered:
    """Every choice, whole. Raises what ended it when that is not an answer (`check_finish`)."""
    gathered = Gathered([GatheredChoice(index) for index in range(n)])
    async for message in messages:
        gathered.add(message)
    for choice in gathered.choices:
        check_finish(choice.finish_reason)
    return gathered


def check_finish(reason: FinishReason | None) -> None:
    """Raise unless a whole answer ended this way."""
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return
    errors: dict[FinishReason | None, MotleyError] = {
        FinishReason.DEADLINE: DeadlineExceeded("the deadline passed before the answer was complete"),
        FinishReason.CANCELLED: Unavailable("the request was cancelled", code="cancelled"),
        FinishReason.REPLICA_LOST: Unavailable("the replica went away; try again", code="replica_lost"),
        FinishReason.ERROR: EngineFault("the engine failed on this request", code="engine_fault"),
    }
    raise errors.get(reason, EngineFault("the stream ended without a finish reason", code="engine_fault"))
